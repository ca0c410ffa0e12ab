"""The ablation on a tiny model: variants of each kind are trained, and the numbers are those of
their runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import types

import jax
import numpy as np
import pytest

from benchmarks import ablation, ablation_cases
from combkv_jax import console, load
from combkv_jax.chunking import chunk_tokens
from combkv_jax.evaluation import tasks
from combkv_jax.generate import Sampling
from combkv_jax.model import parameters, starts_as
from combkv_jax.training import data, facts, lessons, lookup, rows, samples
from combkv_jax.training.recipe import Lesson
from combkv_jax.weights import huggingface
from tests import text, tiny
from tests.training.small import QuickChecks

pytestmark = pytest.mark.once
MINUTES, STEPS = 0.1, 5  # of a clock that goes on by a second whenever it is read
PAGE = 512  # bytes, which are tokens here
# One step of looking up in one variant: filling its pool takes seconds.
KINDS = ("original", "ours", "ours-without-summaries", "ours-without-log-n", "ours-slow-gates")
SHORT = {
    name: dataclasses.replace(ablation.VARIANTS[name], lookup=int(name == "ours")) for name in KINDS
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A plain Llama, one token a byte."""
    folder = tmp_path_factory.mktemp("model")
    config = tiny.comb_config(
        "lse", (), vocab_size=257, num_hidden_layers=2, max_position_embeddings=2 * PAGE
    )
    arrays = tiny.random_parameters(np.random.default_rng(7), config)
    theirs = {huggingface.their_name(name): x for name, x in arrays.items()}
    layout = {name: (x.shape, np.dtype(np.float32)) for name, x in theirs.items()}
    huggingface.write_folder(folder, config.text.to_hf(), layout, theirs.get, lambda name: None)
    text.byte_tokenizer().save_pretrained(folder)
    return folder


def run(folder, out, *more):
    told = ["--model", folder, "--out", out, "--chats", 40, *more]
    return console.run(ablation.main, ablation.parser(), list(map(str, told)))


@pytest.fixture(scope="module")
def out(folder, tmp_path_factory):
    """What these variants gave."""
    out = tmp_path_factory.mktemp("out") / "ablation"
    facts.book_words()  # of the whole novels, for other tests too
    whole = tasks.bundled_text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "prepare_jax", lambda: None)
        patch.setattr(tasks, "bundled_text", lambda *books: whole(*books)[:150_000])
        patch.setattr(lessons, "BUCKETS", (rows.Bucket(4, 96, 1.0, 2),))
        patch.setattr(lessons, "Checks", QuickChecks)
        patch.setattr(lookup, "TOKENS", 120)  # questions of bytes are long
        patch.setattr(ablation_cases, "TEXTS", 2)
        patch.setattr(ablation, "VARIANTS", SHORT)
        patch.setattr(ablation, "filling", lambda *args: 1.0)
        patch.setattr(ablation.time, "process_time", itertools.count().__next__)
        jax.config.update("jax_disable_most_optimizations", True)  # compiling is most of the work
        try:
            assert run(folder, out, "--minutes", MINUTES) == 0
        finally:
            jax.config.update("jax_disable_most_optimizations", False)
    return out


def log(out, name):
    """(lines of steps, lines of checks) of a variant's run."""
    lines = [json.loads(line) for line in (out / f"{name}.log.jsonl").read_text().splitlines()]
    return [x for x in lines if "loss" in x], [x for x in lines if "check" in x]


def test_every_variant_is_measured_in_its_own_run(out):
    found = json.loads((out / "ablation.json").read_text())["variants"]
    assert tuple(found) == KINDS
    for name, points in found.items():
        steps, checks = log(out, name)
        assert [points[0][key] for key in ("cpu_minutes", "steps")] == [0, 0]
        assert points[-1]["steps"] == len(steps) == STEPS
        assert points[-1]["cpu_minutes"] == MINUTES
        assert 3 <= len(points) <= len(ablation.SHARES)
        for point, line in zip((points[0], points[-1]), checks, strict=True):
            assert line["step"] == point["steps"]
            told = {key: x for key, x in line["check"].items() if key != "score"}
            assert told == {key: point[key] for key in told}
            assert {"gap", f"exact_{PAGE}", f"nll_{3 * PAGE}"} <= set(told)
            assert point["gap"] == pytest.approx(point["other_nll"] - point["own_nll"])
        if name == "original":  # too slow for the text to tell after these steps
            assert steps[-1]["cross_attn_attn_gate"] != 0
        else:
            assert points[0]["own_nll"] != points[-1]["own_nll"], name


def test_the_clock_counts_steps_alone_and_ends_the_run(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(ablation.time, "process_time", lambda: now[0])
    monkeypatch.setattr(ablation.step, "assemble", lambda *_: None)
    trainer = types.SimpleNamespace(
        done=0, config=None, state=types.SimpleNamespace(trained={}), frozen={}
    )

    def measure(model):
        now[0] += 50  # which no step is charged with
        compiled.append("a program")
        return {"own_nll": float(trainer.done)}

    compiled = []
    watch = ablation.Watch(trainer, measure, 100.0, 20.0, compiled)
    assert watch.check({}, {}) == {"own_nll": 0.0, "score": 0.0}
    assert watch.check({}, {}) == {"score": 0.0}  # of another lesson, at the same step
    ended = []
    while not any(ended):
        trainer.done += 1
        if trainer.done in (1, 4):
            now[0] += 300
            compiled.append("a program")
        else:
            now[0] += 10
        ended.append(watch.ends())
    watch.check({}, {})
    # 20 seconds for the pool, and 10 for each step, also for those that compiled.
    assert trainer.done == 8
    assert [point["steps"] for point in watch.points] == [0, 2, 3, 6, 8]
    minutes = [point["cpu_minutes"] * 60 for point in watch.points]
    np.testing.assert_allclose(minutes, [0, 40, 50, 80, 100])


def test_variants_differ_as_they_say(out):
    chats = str(out / "chats.jsonl")
    asked = {name: {line["lesson"] for line in log(out, name)[0]} for name in KINDS}
    assert asked["original"] == {f"{chats} next"}
    assert asked["ours"] == {"lookup", "recall"}
    assert asked["ours-without-log-n"] == {"recall"}
    points = json.loads((out / "ablation.json").read_text())["variants"]
    assert points["original"][0]["gap"] == 0  # closed gates
    assert abs(points["ours"][0]["gap"]) > 0

    def gates(name):
        return log(out, name)[0][-1]

    ours, held = gates("ours"), gates("ours-without-log-n")
    assert min(abs(ours[key]) for key in ("bias", "bias_slope", "scale", "scale_slope")) > 0
    assert (held["bias_slope"], held["scale_slope"]) == (0, 0)
    assert min(abs(held[key]) for key in ("bias", "scale")) > 0
    assert "query_gate" in ours
    assert "query_gate" not in gates("ours-without-summaries")
    first = [log(out, name)[0][0]["bias"] for name in ("ours-without-log-n", "ours-slow-gates")]
    assert first[0] / first[1] == pytest.approx(ablation.GATE_RATE / ablation.RATE, rel=0.01)


def test_pools_are_charged_by_what_they_encode(monkeypatch):
    lm = text.byte_model("lse", 3, chunk_size=96)
    monkeypatch.setattr(ablation.time, "process_time", itertools.count().__next__)
    wanted = types.SimpleNamespace(pool=20, seed=0)

    def charged(name):
        return ablation.filling(lm, ablation.VARIANTS[name], wanted)

    assert charged("copied") == 0
    assert charged("ours-without-summaries") == 6  # groups, a second each
    questions = 64 * 40 / (8 * 96)  # tokens of a group's questions and of its chunks
    assert charged("ours") == pytest.approx(6 + 6 * (1 + questions))


def test_settings_are_those_of_the_command_with_what_the_variant_says(tmp_path):
    def stages(name):
        variant = ablation.VARIANTS[name]
        return ablation.settings("model", variant, tmp_path / "c.jsonl", PAGE, 3).stages

    chats = str(tmp_path / "c.jsonl")
    (next_token,) = stages("original")
    assert next_token.lessons == (Lesson("next", chats),)
    assert (next_token.rate, next_token.gate_rate) == (5e-5, 5e-5)
    assert stages("copied") == stages("original")
    looking, mixed = stages("ours-and-distillation")
    assert (looking.lessons, looking.steps) == ((Lesson("lookup"),), ablation.LOOKUP)
    assert mixed.lessons == (Lesson("recall"), Lesson("distill", chats))
    assert mixed.weights == (0.7, 0.3)
    assert stages("ours-slow-gates")[1].gate_rate == stages("ours")[1].rate


def test_the_table_and_the_plot_show_them_all(out):
    header, _, *lines = (out / "ablation.md").read_text().splitlines()
    assert "cpu minutes" in header
    points = json.loads((out / "ablation.json").read_text())["variants"]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in cells] == [name for name, some in points.items() for _ in some]
    last = points["ours"][-1]
    row = [row for row in cells if row[0] == "ours"][-1]
    assert row[1:3] == [f"{last['cpu_minutes']:.3f}", str(last["steps"])]
    assert row[-1] == f"{last['gap']:.3f}"
    assert (out / "ablation.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_finished_is_not_run_again_and_other_requests_are_refused(
    folder, out, monkeypatch, capsys
):
    monkeypatch.setattr(console, "prepare_jax", lambda: None)
    monkeypatch.setattr(ablation, "VARIANTS", SHORT)
    run_again = []
    monkeypatch.setattr(ablation, "prepare", lambda args: (None, None, None))

    def train_one(name, *rest):
        run_again.append(name)
        return [{"cpu_minutes": 0.0, "steps": 0, "gap": 0.5}]

    monkeypatch.setattr(ablation, "train_one", train_one)
    before = (out / "ablation.json").read_text()
    assert run(folder, out, "--minutes", MINUTES) == 0
    assert (run_again, (out / "ablation.json").read_text()) == ([], before)
    assert run(folder, out, "--minutes", 1) == 2
    assert f"begun with minutes {MINUTES}, not 1.0" in capsys.readouterr().err
    assert run(folder, out, "--minutes", 0) == 2
    monkeypatch.setattr(ablation, "VARIANTS", SHORT | {"ours": ablation.ORIGINAL})
    assert run(folder, out, "--minutes", MINUTES) == 2
    assert "ours.json was begun with variant" in capsys.readouterr().err


def test_the_original_starts_from_random_numbers_and_the_copied_one_does_not(folder):
    lms = [ablation.start(str(folder), ablation.VARIANTS[n], 0) for n in ("original", "copied")]
    random, copied = (parameters(lm.model) for lm in lms)
    copies = starts_as(lms[0].config)
    assert any(name.startswith("encoder.layers.0.self_attn") for name in copies)
    for name, source in copies.items():
        np.testing.assert_array_equal(copied[name], copied[source])
        assert name.endswith("norm.weight") or np.any(random[name] != copied[name])
        assert abs(float(np.mean(random[name]))) < 0.1 or np.all(random[name] == 1)
    assert all(np.array_equal(x, copied[n]) for n, x in random.items() if n not in copies)


def test_measures_are_those_of_greedy_answers_and_of_the_packed_model():
    lm = text.byte_model("tanh", 4, chunk_size=200)
    measure = ablation_cases.Measure(lm, PAGE, 0)
    case = measure.facts[PAGE][0]
    assert [len(some) for some in measure.facts.values()] == [3, 1]
    assert len(measure.facts[3 * PAGE][0].questions) == 24
    history = lm.compress(case.chunks[0])
    # Answers that the model gives are right, others are not.
    prompts = [prompt for prompt, _ in case.questions]
    said = lm.start(prompts, history, max_new_tokens=5, sampling=Sampling()).run()
    questions = [
        (prompt, np.asarray(answer if i % 2 else 256 - answer, np.int32))
        for i, (prompt, answer) in enumerate(zip(prompts, map(np.array, said), strict=True))
        if len(answer) == 5
    ]
    found = measure._asked(lm.model, type(case)(case.chunks, tuple(questions)))
    wanted = sum(1 for i in range(len(prompts)) if i % 2 and len(said[i]) == 5) / len(questions)
    assert 0 < wanted < 1
    assert found.exact == pytest.approx(wanted)

    def nll(tokens, pages):
        chunks = chunk_tokens(pages.chunks[0], 200)
        batch = {
            "input_ids": tokens[:-1],
            "cu_seqlens_q": np.array([0, len(tokens) - 1]),
            "chunk_ids": np.concatenate(chunks),
            "cu_seqlens_chunk": np.cumsum([0, *map(len, chunks)]),
            "cu_seqlens_k": np.array([0, PAGE]),
        }
        logp = np.asarray(jax.nn.log_softmax(lm(batch)))
        return -np.mean(logp[np.arange(len(tokens) - 1), tokens[1:]])

    result = measure(lm.model)
    texts = measure.texts
    own = [nll(case.tokens, case) for case in texts]
    other = [nll(case.tokens, texts[i - 1]) for i, case in enumerate(texts)]
    assert result["own_nll"] == pytest.approx(np.mean(own), abs=1e-4)
    assert result["other_nll"] == pytest.approx(np.mean(other), abs=1e-4)


def test_chats_ask_for_facts_that_are_in_their_history(folder, out):
    lm = load(folder, encoder="layers")
    name = str(out / "chats.jsonl")
    with open(name) as file:
        chats = [json.loads(line)["messages"] for line in file]
    assert len(chats) == 40
    assert {1, 2, 3} == {sum(len(m["content"]) > 200 for m in chat) for chat in chats}
    limits = samples.Limits.of(lm.config, PAGE // 2, 3 * PAGE, False)
    made = samples.Samples(
        data.documents(lm, name), Lesson("answer", name), lm.config, limits, seed=0
    )
    specs = [*made.train, *made.held_out]
    assert len(specs) == 40  # one cut of each chat is used
    found = 0
    for sample in map(made.read, specs):
        history = lm.text(np.concatenate(sample.chunks))
        found += history.count("I have read it.")
        assert "I have read it." not in lm.text(sample.tokens)  # all of the pages are history
    assert found == sum(m["content"] == "I have read it." for chat in chats for m in chat)
    for chat in chats:
        told = " ".join(m["content"] for m in chat if len(m["content"]) > 200)
        replies = [m["content"] for m in chat[1::2] if m["content"] != "I have read it."]
        assert replies
        assert all(reply.removesuffix(".").rsplit(" ", 1)[-1] in told for reply in replies)
