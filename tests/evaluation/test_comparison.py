"""A comparison of every cache on a tiny random model, from end to end."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest

import combkv_jax
import evaluate
from combkv_jax import console, generate
from combkv_jax.evaluation import budgets, cases, comparison, comparison_report, reading, tasks
from combkv_jax.evaluation.budgets import CACHES, Setting
from combkv_jax.evaluation.cases import Question
from combkv_jax.evaluation.reading import Reading
from combkv_jax.language_model import LanguageModel
from tests import text

pytestmark = pytest.mark.once

TOKENS = 93
NEEDLE = cases.TASKS["needle"]
NAMES = ["needle", "perplexity", "agreement"]
# In a model of one layer, which tailor is not to code.
ASKED = ["tailor:quantized=none" if name == "tailor" else name for name in CACHES]


class ByteModel(LanguageModel):
    """A token a byte, without a tokenizer's detour."""

    def tokens(self, text, **options):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


@pytest.fixture(scope="module")
def lm():
    made = text.byte_model("lse", 3, cross_layers=(0,), num_hidden_layers=1, chunk_size=16)
    return ByteModel(made.model, made.tokenizer)


@pytest.fixture(autouse=True)
def small(lm, monkeypatch):
    put_small(lm, monkeypatch)


def put_small(lm, patch):
    patch.setattr(console, "prepare_jax", lambda: None)  # the tests' own settings stay
    patch.setattr(combkv_jax, "load", lambda source: lm)
    patch.setattr(generate, "SEGMENT", 32)  # a context's parts are as wide as a question
    patch.setattr(comparison, "PAGES", 2)
    patch.setattr(comparison, "NEXT", 32)
    patch.setattr(comparison.cases, "TASKS", {"needle": NEEDLE})


def arguments(folder, *more, caches=ASKED, budget="100%"):
    asked = ["--cache", *caches, "--ctx", str(TOKENS), "--budget", budget, "--questions", "2"]
    return [*asked, "--report", str(folder), "--tasks", *NAMES, *more]


@pytest.fixture(scope="module")
def whole(lm, tmp_path_factory):
    """A report of every cache with room for everything."""
    folder = tmp_path_factory.mktemp("whole") / "report"
    with pytest.MonkeyPatch.context() as patch:
        put_small(lm, patch)
        assert evaluate.main(arguments(folder, "--debug")) == 0
    return folder


def lines(folder):
    return [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]


def test_caches_that_hold_everything_say_what_the_full_one_says(whole):
    cells = {(cell["policy"], cell["task"]): cell for cell in lines(whole)[1:]}
    assert len(cells) == len(CACHES) * len(NAMES)
    for policy in CACHES:
        needle, novel, same = (cells[policy, task] for task in NAMES)
        assert needle["answers"] == cells["full", "needle"]["answers"], policy
        assert novel["nll"] == pytest.approx(cells["full", "perplexity"]["nll"], abs=1e-4), policy
        assert same["equal"] == 1, policy
        assert same["kl"] == pytest.approx(0, abs=1e-5), policy
        assert needle["device"] == novel["device"] > 0
        assert (needle["host"] > 0) == (needle["fetched"] > 0), policy


def logits(lm, ids):
    """The model's own, without any cache: float32 [n, V]."""
    batch = {
        "input_ids": np.pad(ids, (0, 160 - len(ids))),  # one shape
        "cu_seqlens_q": np.array([0, len(ids)]),
    }
    return np.asarray(lm(batch))[: len(ids)]


def novels(lm):
    return tasks.text_cases(
        lm.tokens, 0, "judge", cases=2, chunks=1, chunk_size=TOKENS, next_tokens=32
    )


def test_the_full_cache_says_what_the_model_says(lm, whole):
    cells = {cell["task"]: cell for cell in lines(whole)[1:] if cell["policy"] == "full"}
    nll = []
    for page in novels(lm):
        ids = np.concatenate([*page.chunks, page.tokens])
        log_p = jax.nn.log_softmax(logits(lm, ids[:-1]))[-32:]
        nll.append(-np.asarray(log_p)[np.arange(32), page.tokens[1:]])
    assert cells["perplexity"]["nll"] == pytest.approx(np.mean(nll), abs=1e-4)
    bins = np.mean(nll, axis=0).reshape(8, 4).mean(axis=1)
    np.testing.assert_allclose(cells["perplexity"]["by_position"], bins, atol=1e-4)

    made = NEEDLE(lm.tokens, np.random.default_rng([0, TOKENS, *b"needle"]), TOKENS, 2)
    for case, said in zip(made, cells["needle"]["answers"], strict=True):
        (question,) = case.questions
        ids = np.concatenate([case.tokens, question.prompt])
        for _ in range(question.new_tokens):
            ids = np.append(ids, logits(lm, ids)[-1].argmax())
        assert said == lm.text(ids[-question.new_tokens :])


def test_agreement_is_of_the_same_tokens_behind_the_full_cache(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison_report, "write", lambda *args: None)
    folder = tmp_path / "report"
    asked = arguments(folder, caches=["window:window=17"], budget="40")
    assert evaluate.main(asked) == 0
    cell = next(cell for cell in lines(folder)[1:] if cell["task"] == "agreement")
    equal, divergence = [], []
    for page in novels(lm):
        ids = np.concatenate([*page.chunks, page.tokens])[:-1]
        setting = Setting("window", {"first": 4, "window": 17}, TOKENS)
        read = Reading.of(lm, setting, page.chunks[0])
        both = (logits(lm, ids)[-32:], read.logits(page.tokens[:-1]))
        both = [x.astype(np.float64) for x in both]
        p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in both)
        equal.append(p.argmax(axis=1) == q.argmax(axis=1))
        divergence.append((p * np.log(p / q)).sum(axis=1))
    assert cell["equal"] == pytest.approx(np.mean(equal))
    assert 0.001 < np.mean(divergence) == pytest.approx(cell["kl"], rel=1e-3)


@pytest.mark.parametrize("asked", ["window:window=17", "tailor:quantized=none", "comb:window=30"])
def test_one_context_serves_many_questions(asked, lm):
    setting = budgets.settle(lm, budgets.read_cache(asked), budgets.Budget.read("100%"), TOKENS)
    rng = np.random.default_rng(5)
    context = rng.integers(97, 123, TOKENS).astype(np.int32)
    questions = [
        Question(rng.integers(97, 123, size).astype(np.int32), new, float)
        for size, new in ((19, 3), (27, 9), (2, 6))
    ]
    read = Reading.of(lm, setting, context)
    assert read.held == setting.nbytes(lm)
    together = read.answers(questions)
    assert len(set(together)) == 3
    assert together == [read.answers([question])[0] for question in questions]
    again = Reading.of(lm, setting, context)
    assert together[2] == again.answers(questions[2:])[0]


def test_what_is_measured_is_not_measured_again(lm, whole, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "report"
    shutil.copytree(whole, folder)
    before = lines(whole)
    file = folder / "cells.jsonl"
    file.write_bytes(file.read_bytes()[:-99])  # in the middle of the last cell
    monkeypatch.setattr(comparison_report, "write", lambda *args: None)
    read = []
    of = Reading.of

    def counted(lm, setting, tokens):
        read.append(setting.policy)
        return of(lm, setting, tokens)

    monkeypatch.setattr(Reading, "of", counted)
    assert evaluate.main(arguments(folder)) == 0
    assert set(read) == {"comb", "full"}  # agreement wants the full cache's logits, too
    after = lines(folder)
    timed = {"tokens_per_second"}
    assert [{k: v for k, v in x.items() if k not in timed} for x in after] == [
        {k: v for k, v in x.items() if k not in timed} for x in before
    ]
    read.clear()
    assert evaluate.main(arguments(folder)) == 0
    assert evaluate.main(arguments(folder, caches=["quest", "full"])) == 0
    assert not read
    capsys.readouterr()
    assert evaluate.main(arguments(folder, "--seed", "1")) == 2
    assert "was begun with seed 0, not 1" in capsys.readouterr().err
    file.write_text("{}\nno cell\n")
    assert evaluate.main(arguments(folder)) == 2
    assert "does not hold a comparison" in capsys.readouterr().err


def test_a_report_has_every_cache_and_the_command(whole, tmp_path):
    report = (whole / "comparison.md").read_text()
    assert f"python evaluate.py --cache {' '.join(ASKED)} --ctx {TOKENS}" in report
    rows = [line.split(" | ") for line in report.splitlines() if line.startswith("| ")]
    assert [row[0].strip("| ") for row in rows[2 : 2 + len(CACHES)]] == list(CACHES)
    assert rows[0][5:] == [
        "times smaller",
        "needle",
        "NLL of novels",
        "same next token as full",
        "KL from full",
        "tokens/s |",
    ]
    assert rows[2][5] == "1.00"
    found = json.loads((whole / "comparison.json").read_text())
    assert len(found["cells"]) == len(CACHES) * len(NAMES)
    for name in ("quality.svg", "quality.png", "needle.svg"):
        assert (whole / name).stat().st_size > 1000
    assert not [path for path in whole.iterdir() if path.name.startswith(".")]
    comparison_report.write(tmp_path, found["command"], found["cells"])
    for name in ("comparison.md", "quality.svg", "needle.svg"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()


def test_two_settings_are_two_rows_and_the_same_is_one(lm):
    read = [
        budgets.read_cache(x) for x in ("tailor:top=9", "tailor:top=11", "full", "tailor:top=9")
    ]
    amounts = tuple(budgets.Budget.read(x) for x in ("40", "50"))
    request = comparison.Request("m", tuple(read), amounts, (TOKENS,), ("needle",), 2, 0, "")
    rows = comparison.settings(lm, request, TOKENS, budgets.ROOM)
    assert [(row.policy, row.options.get("top")) for row in rows] == [
        ("tailor", 9),
        ("tailor", 11),
        ("full", None),
    ]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--cache", "lru"], "cache 'lru' is not one of full, window"),
        (["--cache", "full:bits=2"], "no option 'bits'; it takes none"),
        (["--cache", "tailor:tops=2"], "no option 'tops'; it takes quantized"),
        (["--cache", "tailor:top=x"], "top of the tailor cache is 'x'"),
        (["--cache", "tailor:top"], "top of the tailor cache is ''"),
        (["--cache", "tailor:top=3,top=4"], "gives top twice"),
        (["--cache", "tailor:top=0"], "top of the tailor cache is 0"),
        (["--cache", "tailor:quantized=9"], "list of layers, each from 0 to 0"),
        (["--cache", "tailor:bits=3"], "bits is 3"),
        (["--cache", "comb:bits=5"], "bits is 5"),
        (["--cache", "comb:window=0"], "window of the comb cache is 0"),
        (["--cache", "full", "--budget", "0"], "budget '0' is not"),
        (["--cache", "full", "--budget", "-5"], "budget '-5' is not"),
        (["--cache", "full", "--budget", "1.5"], "budget '1.5' is not"),
        (["--cache", "full", "--budget", "5 parsecs"], "budget '5 parsecs' is not"),
        (["--cache", "window", "--budget", "2"], "it needs at least 5 tokens"),
        (["--cache", "full", "comb", "--cache-bits", "4"], "comb and quantized, not full"),
        (["--cache", "comb", "--cache-bits", "3"], "bits is 3"),
        (["--cache", "full", "--tasks", "passkey"], "'passkey' is not one of needle"),
        (["--recall", "--tasks", "needle"], "'needle' is not one of passkey"),
        (["--cache", "full", "--recall"], "Give --recall, or --cache"),
        (["--cache"], "--cache"),
        (["--cache", "full", "--seed", "-1"], "seed is -1"),
        (["--cache", "quest", "--ctx", "300"], "needs 556 positions"),
        (["--cache", "window", "--ctx", "300", "--tasks", "agreement"], "needs 556 positions"),
        (["--cache", "quest:page=0"], "page of the quest cache is 0"),
        (["--cache", "infllm:block=0"], "block of the infllm cache is 0"),
        (["--cache", f"window:first={2**64}"], "must be a whole number below 16777216"),
        (["--cache", "full", "--data", "needle"], "--data 'needle' is no file"),
        (["--cache", "full", "--data", ""], "--data '' is no file"),
        (["--recall", "--data", "x.jsonl"], "--data is compared by --cache"),
    ],
)
def test_wrong_requests_are_one_sentence(asked, said, tmp_path, capsys):
    ctx = [] if "--ctx" in asked else ["--ctx", str(TOKENS)]
    assert evaluate.main([*asked, *ctx, "--report", str(tmp_path / "report")]) == 2
    captured = capsys.readouterr()
    assert said in captured.err.splitlines()[-1]
    assert captured.out == ""
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(("size", "new"), [(1, 3), (9, 0)])
def test_questions_that_cannot_be_asked_are_refused(size, new):
    with pytest.raises(ValueError, match=f"has {size} tokens and its answer {new}"):
        reading.room([Question(np.zeros(size, np.int32), new, float)])


def test_longer_questions_get_more_room():
    def room(size, new):
        return reading.room([Question(np.zeros(size, np.int32), new, float)] * 2)

    assert room(200, 48) == budgets.ROOM
    assert room(200, 49) == room(300, 200) == 2 * budgets.ROOM


def test_a_file_of_questions_is_compared_too(tmp_path):
    data, folder = tmp_path / "set.jsonl", tmp_path / "report"
    records = [
        {"context": "It rained." * n, "input": "Did it?", "answers": ["Yes"]} for n in (3, 30)
    ]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    asked = ["--cache", "full", "--ctx", str(TOKENS), "--report", str(folder)]
    assert evaluate.main([*asked, "--data", str(data)]) == 0
    _, cell = lines(folder)
    assert (cell["task"], cell["asked"], cell["tokens"]) == (str(data), 2, TOKENS)
    assert 0 <= cell["score"] <= 1
    # What is there already is not asked again, unless the file is another.
    assert evaluate.main([*asked, "--data", str(data)]) == 0
    assert len(lines(folder)) == 2
    data.write_text(data.read_text().replace("rained", "snowed"))
    assert evaluate.main([*asked, "--data", str(data)]) == 0
    assert len(lines(folder)) == 3
