"""Runs of a tiny model: resuming, stopping, meshes, bad requests, and what a run leaves."""

from __future__ import annotations

import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest

import train as command
from combkv_jax import console, sharding
from combkv_jax.errors import RequestError
from combkv_jax.model import parameters
from combkv_jax.training import checks, lessons, rows, step, trainer
from combkv_jax.weights import adapters
from tests import text

SETTINGS = trainer.Settings(
    model="tiny",
    kept_layers="measured",
    steps=4,
    rows=2,
    pool=6,
    fresh=2,
    rate=1e-3,
    gate_rate=1e-2,
    warmup=1,
    decay=0.5,
    clip=1.0,
    text_weight=0.3,
    attention_weight=0.1,
    seed=1,
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """One shape of short rows, and checks that only give a number."""
    monkeypatch.setattr(lessons, "BUCKETS", (rows.Bucket(8, 96, 1.0),))
    monkeypatch.setattr(lessons, "Checks", NoChecks)


class NoChecks:
    """Every measurement is better than the one before."""

    def __init__(self, *args):
        self.score = 1.0

    def measure(self, trained, frozen):
        self.score -= 0.1
        return {"score": self.score}


@pytest.fixture(scope="module")
def lm():
    return text.byte_model("lse", 6, chunk_size=96)


def prepare(lm, out, resume=False, mesh=None, **changes):
    run = trainer.Trainer(
        lm,
        dataclasses.replace(SETTINGS, **changes),
        out,
        check_every=4,
        save_every=2,
        keep=2,
        mesh=mesh,
    )
    run.start(resume)
    return run


def train(lm, out, resume=False, mesh=None, **changes):
    run = prepare(lm, out, resume, mesh, **changes)
    run.run()
    return run


def log(out):
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True):
        np.testing.assert_array_equal(x, y)


def stop_in_the_first_step(lm, out, **changes):
    """SIGTERM in the first step: it is finished and saved, and the run leaves."""
    steps = trainer.step.train_step
    signals = []

    def killed(*args):
        if not signals:
            signals.append(os.kill(os.getpid(), signal.SIGTERM))
        return steps(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.step, "train_step", killed)
        stopped = train(lm, out, **changes)
    assert stopped.done == 1


def test_a_resumed_run_ends_bit_for_bit_where_the_straight_one_does(lm, tmp_path):
    straight = train(lm, tmp_path / "a")
    assert [line["step"] for line in log(tmp_path / "a")] == [1, 2, 3, 4]
    assert all(line["finite"] for line in log(tmp_path / "a"))

    stop_in_the_first_step(lm, tmp_path / "b")
    with (tmp_path / "b/log.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 0}\n')  # killed after it logged, before it saved
    resumed = train(lm, tmp_path / "b", resume=True)
    assert_same(straight, resumed)
    losses = [[line["loss"] for line in log(tmp_path / name)] for name in "ab"]
    assert losses[0] == losses[1]


@pytest.fixture(scope="module")
def one_device(lm, tmp_path_factory):
    """The losses of two steps on one device."""
    out = tmp_path_factory.mktemp("one") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lessons, "BUCKETS", (rows.Bucket(8, 96, 1.0),))
        patch.setattr(lessons, "Checks", NoChecks)
        train(lm, out, steps=2, rows=4)
    return [line["loss"] for line in log(out)]


@pytest.mark.parametrize("shape", ["4x1", "1x4", "2x2"])
def test_losses_are_the_same_on_any_mesh(lm, one_device, tmp_path, shape):
    mesh = sharding.parse_mesh(shape)
    run = train(lm, tmp_path / "mesh", steps=2, rows=4, mesh=mesh)
    losses = [line["loss"] for line in log(tmp_path / "mesh")]
    np.testing.assert_allclose(losses, one_device, atol=1e-4)
    if shape != "1x4":  # the two KV heads are not divided
        moments = jax.tree.leaves(run.state.optimiser)
        held = sum(x.addressable_shards[0].data.nbytes for x in moments)
        assert held < 1.02 * sum(x.nbytes for x in moments) / mesh.size
    # And of a run that began on one device.
    out = tmp_path / "other"
    stop_in_the_first_step(lm, out, steps=2, rows=4)
    train(lm, out, resume=True, steps=2, rows=4, mesh=mesh)
    np.testing.assert_allclose([line["loss"] for line in log(out)], one_device, atol=1e-4)


@pytest.mark.once
def test_adapters_are_the_trained_blocks(lm, tmp_path):
    run = train(lm, tmp_path / "run", steps=2)
    path = tmp_path / "run/adapters.json"
    described = adapters.read_description(path)
    assert described["base"] == "tiny"
    assert described["cross_attention_layers"] == list(lm.config.cross_layers)
    tensors = adapters.tensorfile.read(path.with_suffix(".safetensors"))
    assert set(tensors) == set(run.state.trained)
    for name, tensor in tensors.items():
        assert tensor.stored == ("float32" if step.is_gate(name) else "bfloat16")


def test_checks_measure_what_they_say(lm, monkeypatch):
    for name, value in {"DENSE": 8, "FACTS": 1, "PAGES": 2, "PAGE": 4, "TEXT": 40}.items():
        monkeypatch.setattr(checks, name, value)
    monkeypatch.setattr(checks, "ROOM", 800)
    made = checks.Checks(lm, rows.Asker(lm.tokens, None), 0)
    trained, frozen = step.split(parameters(lm.model))
    found = made.measure(trained, frozen)
    assert set(found) == {
        *(f"{name}_nll" for name in ("single", "similar", "passkey", "text", "other", "none")),
        *(f"{name}_exact" for name in ("single", "similar", "passkey")),
        "score",
    }
    assert found["single_exact"] == 0
    # A random model of 257 tokens knows nothing.
    assert 4 < found["similar_nll"] < 9
    batch = step.stack(made.rows["similar"][:1], made.ids, made.taps)
    assert np.sum(batch.question >= 0) >= 5


@pytest.mark.once
def test_losses_that_are_not_finite_end_the_run_and_keep_the_checkpoint(lm, tmp_path, monkeypatch):
    drawn = []

    def draw(*args):  # no numbers from the third step on
        row = rows.draw_row(*args)
        drawn.append(row)
        spoilt = len(drawn) > 2 * SETTINGS.rows
        return dataclasses.replace(row, weight=row.weight * np.nan) if spoilt else row

    monkeypatch.setattr(lessons, "draw_row", draw)
    with pytest.raises(RequestError, match="5 steps in a row"):
        train(lm, tmp_path / "run", steps=20)
    assert [p.name for p in (tmp_path / "run/state").iterdir()] == ["2"]
    assert [line["finite"] for line in log(tmp_path / "run")] == [True] * 2 + [False] * 5


def test_a_folder_with_something_in_it_is_refused(lm, tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(RequestError, match="not empty"):
        train(lm, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["note.txt"]


def test_recall_is_refused_for_the_original_form(tmp_path):
    original = text.byte_model("tanh", 6, chunk_size=96)
    with pytest.raises(RequestError, match="own form.*--data"):
        train(original, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_resume_needs_a_run_with_the_same_settings(lm, tmp_path):
    with pytest.raises(RequestError, match="no training run"):
        train(lm, tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()
    prepare(lm, tmp_path / "run").checkpoints.close()
    with pytest.raises(RequestError, match="rate 0.001, not 0.5"):
        train(lm, tmp_path / "run", resume=True, rate=0.5)


@pytest.mark.once
def test_of_a_recipe_only_the_end_may_move(lm, tmp_path):
    (stage,) = SETTINGS.stages
    first, last = (dataclasses.replace(stage, steps=steps) for steps in (1, 2))
    train(lm, tmp_path, recipe=(first, last))
    longer = dataclasses.replace(last, steps=3)
    assert train(lm, tmp_path, resume=True, recipe=(first, longer)).done == 4
    for changed in ((longer, last), (first, dataclasses.replace(last, decay=0.9))):
        with pytest.raises(RequestError, match="was begun with recipe"):
            prepare(lm, tmp_path, resume=True, recipe=changed)


def test_rows_that_the_mesh_does_not_divide_are_refused(lm, tmp_path):
    with pytest.raises(RequestError, match=r"3 rows \(--rows\) .* data axis of 2; 1 or 3 would"):
        train(lm, tmp_path / "run", rows=3, mesh=sharding.parse_mesh("2x1"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rate", 0.0),
        ("gate_rate", float("nan")),
        ("decay", 1.5),
        ("pool", 2),
        ("text_weight", -1.0),
    ],
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(RequestError, match=name.replace("_", ".")):
        dataclasses.replace(SETTINGS, **{name: value})


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [("--rate", "0", "rate is 0.0"), ("--seed", "-1", "seed is -1"), ("--steps", "none", "none")],
)
def test_the_command_refuses_in_a_sentence_before_anything_is_read(
    tmp_path, capsys, option, value, match
):
    out = tmp_path / "run"
    code = console.run(command.main, command.parser(), ["--out", str(out), option, value])
    assert code == 2
    assert match in capsys.readouterr().err
    assert not out.exists()
