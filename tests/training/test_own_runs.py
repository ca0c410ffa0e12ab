"""Runs on data of one's own, in both forms: resuming, meshes, mixtures, what is watched."""

from __future__ import annotations

import json
import os
import shutil
import signal

import numpy as np
import pytest

import train as command
from combkv_jax import console, sharding, weights
from combkv_jax.chunking import IGNORED, pack
from combkv_jax.errors import RequestError
from combkv_jax.model import parameters
from combkv_jax.training import lessons, recipe, rows, step, trainer
from combkv_jax.training.recipe import Lesson
from combkv_jax.weights import huggingface
from tests import text, tiny
from tests.training.test_recipe import settings
from tests.training.test_trainer import NoChecks, assert_same, log

CHUNK = 32
SMALL = {"cross_layers": (1,), "num_hidden_layers": 2}  # compiling takes most of the time here
SIZES = {"rows": 2, "warmup": 1, "pack_tokens": 64, "pack_history": 96, "rate": 1e-3}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A file of questions about contexts of 40 to 90 bytes."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "asked.jsonl"
    with path.open("w") as file:
        for _ in range(40):
            code = str(rng.integers(10**5))
            context = "x" * int(rng.integers(20, 40)) + code + "y" * int(rng.integers(20, 40))
            record = {"question": "Code?", "answer": code, "context": context}
            file.write(json.dumps(record) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def models():
    """A tiny model of each form, one token a byte."""
    return {form: text.byte_model(form, 6, chunk_size=CHUNK, **SMALL) for form in ("lse", "tanh")}


def train(lm, out, resume=False, mesh=None, **changes):
    options = {"check_every": 3, "save_every": 2, "keep": 2, "mesh": mesh}
    run = trainer.Trainer(lm, settings(**SIZES | changes), out, **options)
    run.start(resume)
    run.run()
    return run


@pytest.mark.once
def test_a_resumed_run_of_the_original_form_ends_where_the_straight_one_does(
    models, asked, tmp_path, monkeypatch
):
    lm, changes = models["tanh"], {"data": (asked,), "steps": 3, "accumulate": 2}
    straight = train(lm, tmp_path / "a", **changes)
    before = parameters(lm.model)
    moved = {n for n, x in straight.state.trained.items() if np.any(x != before[n])}
    assert moved == {n for n in before if n.startswith(("history.", "encoder."))}

    steps, signals = step.train_step, []

    def killed(*args):
        if not signals:
            signals.append(os.kill(os.getpid(), signal.SIGTERM))
        return steps(*args)

    with monkeypatch.context() as patch:
        patch.setattr(step, "train_step", killed)
        assert train(lm, tmp_path / "b", **changes).done == 1
    assert_same(straight, train(lm, tmp_path / "b", resume=True, **changes))
    lines = [log(tmp_path / name) for name in "ab"]
    for a, b in zip(*lines, strict=True):
        assert a["loss"] == b["loss"]
        assert a["samples"] == b["samples"]
    first = lines[0][0]
    assert first["lesson"] == f"{asked} answer"
    assert first["nll"] == pytest.approx(first["loss"])
    assert 0.5 < first["fill"] <= 1
    assert first["tokens"] == pytest.approx(first["fill"] * 4 * (64 + 96))
    assert "cross_attn_attn_gate" in first

    with open(asked) as file:
        records = file.readlines()
    other = tmp_path / "asked.jsonl"
    other.write_text("".join(records[1:]))
    with pytest.raises(RequestError, match="begun with data"):
        train(lm, tmp_path / "b", resume=True, **changes | {"data": (str(other),)})


def test_data_that_changed_is_not_resumed_on(models, asked, tmp_path):
    name = tmp_path / "own.jsonl"
    shutil.copy(asked, name)
    options = {"check_every": 1, "save_every": 1, "keep": 1}
    run = trainer.Trainer(
        models["lse"], settings(**SIZES, data=(str(name),)), tmp_path / "run", **options
    )
    run.start(False)
    run.checkpoints.close()
    name.write_text(name.read_text().replace("x", "w", 1))
    with pytest.raises(RequestError, match="own.jsonl answer are not those"):
        train(models["lse"], tmp_path / "run", resume=True, data=(str(name),))


@pytest.mark.parametrize(("form", "shape"), [("lse", "2x1"), ("tanh", "2x2")])
def test_losses_of_packs_are_the_same_on_any_mesh(models, asked, tmp_path, form, shape):
    losses = []
    for name, mesh in (("one", None), ("many", sharding.parse_mesh(shape))):
        train(models[form], tmp_path / name, mesh=mesh, data=(asked,), steps=2)
        losses.append([line["loss"] for line in log(tmp_path / name)])
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-4)


def test_what_is_watched_is_the_nll_behind_each_history(models, asked):
    lm = models["lse"]
    made = lessons.PackedLessons(lm, Lesson("answer", asked), settings(**SIZES))
    found = made.check(*step.split(parameters(lm.model)))
    own = [made.samples.read(spec) for spec in made.samples.held_out]
    assert len(own) == 4
    histories = {
        "right_nll": [s.chunks for s in own],
        "other_nll": [own[i - 1].chunks for i in range(4)],
        "none_nll": [()] * 4,
    }
    for name, chunks in histories.items():
        total = labels = 0
        for sample, history in zip(own, chunks, strict=True):
            one = pack([lessons.Sample(sample.tokens, sample.labels, history)])
            logits = np.asarray(tiny.logits(lm.model, one), np.float64)
            for t in np.flatnonzero(one["shift_labels"][0] != IGNORED):
                total += np.logaddexp.reduce(logits[t]) - logits[t, sample.tokens[t + 1]]
                labels += 1
        np.testing.assert_allclose(found[name], total / labels, rtol=1e-4)
    assert len({round(x, 6) for x in found.values()}) == 3
    assert found["score"] == found["right_nll"]


@pytest.mark.once
def test_stages_and_mixtures_are_resumed_too(models, asked, tmp_path, monkeypatch):
    monkeypatch.setattr(lessons, "BUCKETS", (rows.Bucket(8, 96, 1.0),))
    monkeypatch.setattr(lessons, "Checks", NoChecks)
    long = text.byte_model("lse", 6, chunk_size=96, **SMALL)
    rates = {"rate": 1e-3, "gate_rate": 1e-2, "warmup": 1, "decay": 0.0}
    mixed = (Lesson("recall"), Lesson("distill", asked))
    stages = (
        recipe.Stage(2, (Lesson("reconstruct", asked),), (1.0,), **rates),
        recipe.Stage(4, mixed, (1.0, 1.0), **rates | {"rate": 1e-4}),
    )
    changes = {"recipe": stages, "steps": 6, "pack_tokens": 128, "pool": 6, "seed": 0}
    straight = train(long, tmp_path / "a", **changes)
    chosen = [line["lesson"] for line in log(tmp_path / "a")]
    assert chosen[:2] == [f"{asked} reconstruct"] * 2
    assert {"recall", f"{asked} distill"} == set(chosen[2:])
    assert chosen == [straight.settings.lesson_at(i).label for i in range(6)]
    taught = next(line for line in log(tmp_path / "a") if line["lesson"].endswith("distill"))
    assert taught["loss"] == pytest.approx(taught["nll"] + taught["forward"] + taught["reverse"])

    class Stopped(Exception):
        pass

    def stop(self, record, logged=trainer.Trainer._log):
        logged(self, record)
        if record["step"] == 5:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_log", stop)
        with pytest.raises(Stopped):
            train(long, tmp_path / "b", **changes)
    assert_same(straight, train(long, tmp_path / "b", resume=True, **changes))
    lines = [json.loads(line) for line in (tmp_path / "a/log.jsonl").read_text().splitlines()]
    names = set(next(line["check"] for line in lines if "check" in line))
    assert {f"{asked} reconstruct none_nll", f"{asked} distill other_nll", "score"} <= names


def test_the_command_trains_the_original_form_and_its_folder_is_loaded(
    asked, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(console, "prepare_jax", lambda: None)
    config = tiny.comb_config("lse", vocab_size=257, num_hidden_layers=4)
    arrays = tiny.random_parameters(np.random.default_rng(7), config)
    theirs = {huggingface.their_name(n): x for n, x in arrays.items() if n.startswith("decoder.")}
    layout = {n: (x.shape, np.dtype(np.float32)) for n, x in theirs.items()}
    folder = tmp_path / "plain"
    folder.mkdir()
    huggingface.write_folder(folder, config.text.to_hf(), layout, theirs.get, lambda n: None)
    text.byte_tokenizer().save_pretrained(folder)
    told = ["--model", folder, "--encoder", "layers", "--kept-layers", "every4", "--data", asked]
    told += ["--out", tmp_path / "run", "--steps", 2, "--rows", 1, "--warmup", 1]
    told += ["--pack-tokens", 64, "--pack-history", 512, "--objective", "distill"]
    assert console.run(command.main, command.parser(), list(map(str, told))) == 0
    said = capsys.readouterr().err
    assert "right nll" in said
    assert "none nll" in said
    read, loaded, tokenizer = weights.load(tmp_path / "run", "float32")
    assert read.is_original
    assert read.cross_layers == (3,)
    assert tokenizer is not None
    gates = [float(x[0]) for n, x in loaded.items() if n.endswith("_gate")]
    assert len(gates) == 2
    plain = arrays["decoder.layers.3.self_attn.q_proj.weight"]
    copied = loaded["encoder.layers.0.self_attn.q_proj.weight"]
    assert np.abs(copied - plain).max() < 0.02  # a copy, rounded and moved by two steps at most


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--data", "none.jsonl"], "none.jsonl does not exist"),
        (["--recipe", "none.toml"], "none.toml is not a file"),
        (["--recipe", "r.toml", "--steps", "3"], "leave --steps away"),
        (["--weight-decay", "-1"], "weight_decay is -1.0"),
        (["--recipe", "r.toml", "--objective", "next"], "leave --objective away"),
        (["--data", "x.jsonl", "--objective", "recall"], "recall takes no data"),
        (["--objective", "next"], "the objective next needs data"),
    ],
)
def test_the_command_refuses_before_it_reads_a_model(tmp_path, capsys, arguments, match):
    told = ["--out", str(tmp_path / "run"), *arguments]
    assert console.run(command.main, command.parser(), told) == 2
    assert match in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
