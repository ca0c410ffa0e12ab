"""infer.py from end to end: a tiny model for its ways, the real one for an answer."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

import infer
from combkv_jax import console, inference
from combkv_jax.evaluation import tasks
from tests import text, tiny
from tests.weights import files

TOKEN_BYTES = 2 * 3 * 2 * 12 * 4  # K and V, layers, KV heads, head_dim, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny plain Llama with a byte tokenizer, as a Hugging Face folder."""
    config = tiny.llama_config(vocab_size=257, max_position_embeddings=2048)
    tensors = tiny.random_llama(np.random.default_rng(51), config)
    folder = tmp_path_factory.mktemp("models") / "bytes"
    files.write_hf(folder, config, {files.hf_name(n): a for n, a in tensors.items()})
    text.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(folder, tmp_path, capsys, monkeypatch):
    """Runs the front door on the tiny model: (exit code, stdout, stderr, figures)."""
    monkeypatch.setattr(console, "prepare_jax", lambda: None)  # the tests' own settings stay

    def call(*arguments, model=folder):
        report = tmp_path / "figures.json"
        report.unlink(missing_ok=True)
        argv = ["--model", str(model), *map(str, arguments)]
        if "--chat" not in arguments or "--json" in arguments:
            argv += ["--json", str(report)]
        code = console.run(infer.main, infer.parser(), argv)
        out, err = capsys.readouterr()
        return code, out, err, json.loads(report.read_text()) if report.exists() else None

    return call


def test_a_haystack_is_asked_checked_and_measured(run):
    code, out, err, figures = run("--ctx", 1200, "--window", 100, "--max-new-tokens", 5)
    assert code == 0, err
    assert figures["history_tokens"] == 1100
    name = tasks.draw_facts(np.random.default_rng(0), 1)[0].name
    assert figures["recent_tokens"] == 100 + len(f" The secret code of {name} is ")
    assert figures["full_cache_bytes"] == TOKEN_BYTES * (1100 + figures["recent_tokens"] + 5)
    assert figures["cache_bytes_host"] == 0
    assert 0 < figures["cache_bytes_device"] < figures["full_cache_bytes"]
    assert figures["correct"] is False
    assert figures["untrained"] is True
    assert "Wrong: the haystack's code is" in out
    assert "untrained copies" in out
    for label in ("cache on device", "full cache would be", "time to first token", "peak memory"):
        assert label in out


@pytest.mark.parametrize("cache", ["full", "window", "quantized", "tailor", "infllm", "pqcache"])
def test_other_caches_read_the_same_haystack(run, cache):
    code, _, err, figures = run("--ctx", 600, "--cache", cache, "--window", 64)
    assert code == 0, err
    assert figures["history_tokens"] == 0
    assert figures["recent_tokens"] > 600
    most = {"full": 800, "window": 80, "quantized": 450, "tailor": 250, "infllm": 550}
    assert figures["cache_bytes_device"] < TOKEN_BYTES * (most | {"pqcache": 200})[cache]
    is_on_host = cache in ("tailor", "infllm", "pqcache")
    assert (figures["cache_bytes_host"] > TOKEN_BYTES * 600) == is_on_host


def test_a_history_in_fewer_bits_is_so_much_smaller(run):
    code, _, err, figures = run("--ctx", 700, "--window", 60, "--cache-bits", 2)
    assert code == 0, err
    assert figures["history_tokens"] == 640
    # Of each number 2 bits and its share of two float16: a key's over 64 tokens, a value's over the
    # 12 channels of a head. The recent tokens and what else is beside them are held in full.
    coded = 640 * (2 + 32 * (1 / 64 + 1 / 12) / 2) / 32
    assert figures["cache_bytes_device"] < TOKEN_BYTES * (coded + 280)


@pytest.mark.once
def test_files_prompts_and_batches(run, tmp_path):
    book, prompts = tmp_path / "book.txt", tmp_path / "prompts.txt"
    book.write_text("A short book. " * 30, encoding="utf-8")
    prompts.write_text("What?\n\nWho is it then?\n", encoding="utf-8")
    common = ("--context", book, book, "--window", 50, "--max-new-tokens", 6)
    code, _, err, one = run(*common, "--prompt", "What?")
    assert code == 0, err
    assert one["history_tokens"] == 2 * 14 * 30 + 1 - 50
    assert one["expected"] is None
    code, out, _, two = run(*common, "--batch", prompts)
    assert code == 0
    assert len(two["answers"]) == 2
    assert two["answers"][0] == one["answers"][0]
    assert "> Who is it then?" in out
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "What?"}\n{"prompt": "Who is it then?"}\n', encoding="utf-8")
    assert run(*common, "--batch", lines)[3]["answers"] == two["answers"]
    cut = run("--context", book, "--prompt", "What?", "--ctx", 70, "--window", 50)
    assert cut[3]["history_tokens"] == 20
    assert "its first 70 are used" in cut[2]


def test_a_prompt_alone_needs_no_context(run):
    code, _, err, figures = run("--prompt", "Hello", "--raw", "--max-new-tokens", 3)
    assert code == 0, err
    assert (figures["history_tokens"], figures["recent_tokens"]) == (0, 5)


def test_a_mesh_answers_the_same(run):
    arguments = ("--ctx", 300, "--window", 80, "--max-new-tokens", 8)
    code, _, err, sharded = run(*arguments, "--mesh", "1x2")
    assert code == 0, err
    assert sharded["answers"] == run(*arguments)[3]["answers"]


def test_a_seed_repeats_and_another_differs(run):
    arguments = ("--ctx", 150, "--temperature", 1.5, "--top-p", 0.95, "--max-new-tokens", 30)
    first = run(*arguments, "--seed", 1)[3]["answers"]
    assert run(*arguments, "--seed", 1)[3]["answers"] == first
    assert run(*arguments, "--seed", 2)[3]["answers"] != first


@pytest.mark.once
def test_a_chat_goes_on_after_a_message_that_is_too_long(run, tmp_path, monkeypatch):
    book = tmp_path / "book.txt"
    book.write_text("A short book. " * 9, encoding="utf-8")
    said = "Hello\n\n" + "x" * 500 + "\nAnd now?\n/exit\nnever read\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    code, out, err, _ = run("--chat", "--context", book, "--window", 100, "--max-new-tokens", 4)
    assert code == 0, err
    assert out.count("\n") >= 3
    assert "the message has" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("said", "right"),
    [(" 63696.", True), ("63696", True), ("6369696.", False), ("6369", False), ("It is 6", False)],
)
def test_an_answer_is_right_when_it_is_the_code_and_ends(said, right):
    assert tasks.says(said, "63696") is right


@pytest.mark.once
@pytest.mark.optimized
def test_the_real_model_finds_a_code_in_a_few_chunks(run, smollm2_file):
    arguments = ("--ctx", 900, "--window", 400, "--max-new-tokens", 8)
    code, out, err, figures = run(*arguments, model=smollm2_file)
    assert code == 0, err
    assert figures["history_tokens"] == 500
    assert figures["correct"], figures["answers"]
    assert f"Right: the haystack's code is {figures['expected']}." in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ctx", 0], "'0' is not a positive whole number"),
        (["--ctx", -3], "'-3' is not a positive whole number"),
        (["--ctx", "many"], "'many' is not a positive whole number"),
        (["--window", 0], "--window: '0' is not a positive"),
        (["--max-new-tokens", 0], "'0' is not a positive"),
        (["--ctx", 5], "its needle alone has"),
        (["--ctx", 100, "--depth", 2], "depth is 2.0; it lies between 0 and 1"),
        (["--cache", "lru"], "'lru' is not one of comb, full, window"),
        (["--mesh", "2by2"], "mesh '2by2' cannot be read"),
        (["--mesh", "0x1"], "axis of 0 devices"),
        (["--prompt", " "], "the prompt is empty"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a", "--chat"], "exclude each other"),
        (["--chat", "--json", "x"], "--chat has no figures for --json"),
        (["--chat", "--cache", "full"], "--chat works with --cache comb"),
        (["--cache-bits", 3], "bits is 3; keys and values are kept in 1, 2, 4, 8 or 16 bits"),
        (
            ["--cache-bits", 4, "--cache", "quest"],
            "works with the caches comb and quantized, not q",
        ),
        (["--cache-bits", 4, "--plan", "h200"], "--plan plans a history in 16 bits"),
        (["--cache-bits", 4, "--chat"], "--chat appends to its history"),
        (["--context", "{book}"], "--context needs a question"),
        (["--context", "{empty}", "--prompt", "a"], "is empty; a text is needed"),
        (["--context", "{latin1}", "--prompt", "a"], "is not UTF-8 (byte 3)"),
        (["--context", "{here}", "--prompt", "a"], "is a directory"),
        (["--context", "{here}/none.txt", "--prompt", "a"], "No such file"),
        (["--batch", "{book}/x"], "cannot be read"),
        (["--batch", "{bad_jsonl}"], "line 2 is not a JSON object"),
        (["--temperature", -1], "temperature is -1.0"),
        (["--top-p", 1.5], "top_p is 1.5"),
        (["--top-k", -1], "top_k is -1"),
        (["--top-k", 3000000000], "top_k is 3000000000"),
        (["--seed", -1], "seed is -1"),
        (["--plan", "h200", "--dtype", "nonsense"], "dtype 'nonsense' is not one of"),
        (["--dtype", "int4"], "int4"),
        (["--plan", "gtx-480"], "choose one of rtx-3090"),
        (["--plan", "h200", "--cache", "full"], "--plan plans --cache comb, not full"),
        (["--ctx", "9" * 5000], "is not a positive whole number below 2**31"),
        (["--ctx", 3000, "--cache", "full"], "the full cache of this model ends at 2048 tokens"),
        (["--ctx", 4000, "--window", 3000], "pass this model's 2048 positions"),
        (["--bogus"], "--bogus"),
        (["--json", "{here}"], "is not a file name"),
    ],
)
def test_wrong_requests_are_one_sentence(run, tmp_path, arguments, words):
    (tmp_path / "book.txt").write_text("A book.", encoding="utf-8")
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "latin1.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n["b"]\n', encoding="utf-8")
    places = {
        "here": tmp_path,
        "book": tmp_path / "book.txt",
        "empty": tmp_path / "empty.txt",
        "latin1": tmp_path / "latin1.txt",
        "bad_jsonl": tmp_path / "bad.jsonl",
    }
    code, out, err, figures = run(*(str(a).format(**places) for a in arguments))
    assert code == 2, err
    said = [line for line in err.splitlines() if line.startswith("infer.py: ")]
    assert len(said) == 1
    assert words in said[0]
    assert "Traceback" not in err
    assert out == ""
    assert figures is None


def test_a_prompts_file_in_words(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n \r\ntwo\r\n")  # as some editors save it
    assert inference.read_prompts(path) == ["one", "two"]
