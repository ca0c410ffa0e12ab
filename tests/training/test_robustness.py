"""Runs in processes of their own: killed, shared, out of disk, or taken up with something else."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import random
import shutil
import socket
import struct
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax.errors import RequestError
from combkv_jax.training import board, origin, trainer
from combkv_jax.weights import checkpoint
from tests import text
from tests.training import small

STEPS = 8
ADAPTERS = "adapters.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a model, compiled programs, and a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("runs")
    model = small.write_model(folder / "model")
    out = folder / "straight"
    cache = folder / "cache"
    arguments = ("--model", model, "--steps", STEPS)
    keep = ("--keep", STEPS)
    small.end(small.start(*arguments, "--out", out, "--tensorboard", *keep, cache=cache))
    return folder


def start(folder, out, *more, **variables):
    arguments = ("--model", folder / "model", "--steps", STEPS, "--out", out, *more)
    return small.start(*arguments, cache=folder / "cache", **variables)


def wait_for(out, steps, process):
    """Until the log shows that many steps or more."""
    path = out / "log.jsonl"
    while not path.is_file() or path.read_text().count('"loss"') < steps:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.once
def test_a_run_that_is_killed_goes_on_bit_for_bit(folder, tmp_path):
    out, seed = tmp_path / "run", time.time_ns()
    print("seed", seed)  # pytest shows it when the test fails
    rng = random.Random(seed)
    steps = 0  # the first kill is before or in the first step
    for turn in range(3):
        process = start(folder, out, *["--resume"] * (turn > 0), SLOW="0.05")
        wait_for(out, steps, process)
        time.sleep(rng.random() * 0.2)
        process.kill()
        process.communicate()
        steps = rng.randrange(1, STEPS)
    small.end(start(folder, out, "--resume"))
    straight = folder / "straight"
    assert small.losses(out) == small.losses(straight)
    assert len(small.losses(out)) == STEPS
    assert (out / ADAPTERS).read_bytes() == (straight / ADAPTERS).read_bytes()


def test_two_processes_go_on_with_a_run_and_one_ends_it(folder, tmp_path):
    """With the losses of the straight run."""
    out = tmp_path / "run"
    shutil.copytree(folder / "straight", out)
    before = 2
    for step in range(before + 1, STEPS + 1):
        shutil.rmtree(out / "state" / str(step))
    (out / "log.jsonl").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    group = ("--resume", "--mesh", "2x1", "--coordinator", address, "--processes", 2)
    two = [start(folder, out, *group, "--process", i, SLOW="0.5") for i in range(2)]
    wait_for(out, 1, two[0])
    two[1].terminate()  # one is told, and both stop after the same step
    first, second = map(small.end, two)
    assert "Stopped by SIGTERM after step" in first
    assert "step" not in second
    assert len(small.log(out)) < STEPS - before
    small.end(start(folder, out, "--resume"))
    steps, losses = zip(*[(line["step"], line["loss"]) for line in small.log(out)], strict=True)
    assert steps == tuple(range(before + 1, STEPS + 1))
    np.testing.assert_allclose(losses, small.losses(folder / "straight")[before:], atol=1e-4)


@pytest.mark.once
def test_a_full_disk_costs_checkpoints_and_not_the_run(folder, tmp_path):
    out = tmp_path / "run"
    said = small.end(start(folder, out, FULL_FROM=3))
    assert f"A checkpoint in {out / 'state'} was not written: File too large." in said
    assert sorted(p.name for p in (out / "state").iterdir()) == ["1", "2"]
    assert small.losses(out) == small.losses(folder / "straight")
    # The room is back: what was not saved is done again.
    small.end(start(folder, out, "--resume"))
    assert sorted(p.name for p in (out / "state").iterdir()) == ["7", "8"]
    assert small.losses(out) == small.losses(folder / "straight")


def test_what_a_failed_save_still_writes_is_deleted_too(tmp_path, monkeypatch):
    saved = checkpoint.TrainingCheckpoints(tmp_path / "state", 1)
    partial = tmp_path / "state" / f"1{checkpoint._PARTIAL}"
    until = time.monotonic() + 0.5

    def write():
        while time.monotonic() < until:
            partial.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):  # the folder has just gone
                (partial / str(time.monotonic())).touch()

    def fail(*args, **kwargs):
        writer.start()
        time.sleep(0.05)
        raise OSError(errno.EFBIG, "File too large")

    writer = threading.Thread(target=write)
    monkeypatch.setattr(saved.manager, "save", fail)
    saved.save(1, {"a": jnp.arange(3)})
    writer.join()
    saved.close()
    assert not list((tmp_path / "state").iterdir())


def test_a_disk_without_room_is_not_written_to(tmp_path, monkeypatch, capsys):
    saved = checkpoint.TrainingCheckpoints(tmp_path / "state", 1)
    saved.save(1, {"a": jnp.arange(3)})
    usage = checkpoint.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    saved.save(2, {"a": jnp.arange(4, 7)})
    assert "was not written: No space left on device." in capsys.readouterr().err
    monkeypatch.undo()
    step, tree = saved.restore({"a": jnp.zeros(3, int)})
    assert step == 1
    np.testing.assert_array_equal(tree["a"], [0, 1, 2])
    saved.save(3, {"a": jnp.arange(3)})
    saved.close()
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["3"]


def test_the_log_goes_back_with_the_checkpoint(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = ['{"step": 0, "check": {}}', '{"step": 1}', '{"step": 2, "lo', '{"step": 3}']
    path.write_text("\n".join(lines))
    trainer._cut(path, 2)
    assert path.read_text().splitlines() == lines[:2]
    trainer._cut(path, 0)  # the run begins anew
    assert path.read_text() == ""


def test_another_model_is_not_taken_up(folder, tmp_path):
    """The same name, other weights."""
    out = tmp_path / "run"
    settings = json.loads((folder / "straight/settings.json").read_text())
    settings.pop("samples")
    weights = settings.pop("weights")
    settings["recipe"], settings["data"] = (), ()
    settings = dataclasses.replace(trainer.Settings(**settings), model="bytes")

    def prepare(seed, resume):
        lm = text.byte_model("lse", seed, template=None, chunk_size=96)
        run = trainer.Trainer(lm, settings, out, check_every=1, save_every=1, keep=1)
        run.start(resume)
        run.checkpoints.close()

    prepare(6, False)
    prepare(6, True)
    assert json.loads((out / "settings.json").read_text())["weights"] != weights
    with pytest.raises(RequestError, match=r"weights of bytes are not those that .*run was begun"):
        prepare(7, True)


def test_weights_that_are_no_numbers_are_refused():
    arrays = {"b": jnp.ones((4, 20)), "a": jnp.ones(3), "c": jnp.ones(3)}
    same = origin.identity(arrays)
    assert origin.identity(dict(reversed(arrays.items()))) == same
    assert origin.identity(arrays | {"b": arrays["b"].at[0, 2].set(2)}) != same
    assert origin.identity(arrays | {"a": arrays["a"].astype(jnp.bfloat16)}) != same
    spoilt = arrays | {"b": arrays["b"].at[3, 19].set(jnp.nan)}
    with pytest.raises(RequestError, match=r"not all finite numbers \(b\)"):
        origin.identity(spoilt)
    with pytest.raises(RequestError, match=r"\(b and 1 more\)"):
        origin.identity(spoilt | {"c": jnp.array([jnp.inf])})


def scalars(folder):
    """(step, name) -> value in the event file there, read by the format's description."""
    from tensorboardX.proto import event_pb2

    (path,) = folder.glob("events.out.tfevents.*")
    data, found = path.read_bytes(), {}
    while data:
        (length,) = struct.unpack("<Q", data[:8])  # then a checksum, the event, and another
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        found |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
        data = data[16 + length :]
    return found


def test_tensorboard_shows_what_the_log_does(folder):
    shown = scalars(folder / "straight")
    for line in small.log(folder / "straight"):
        step = line["step"]
        assert shown[step, "train/loss"] == pytest.approx(line["loss"])
        assert shown[step, "train/bias"] == pytest.approx(line["bias"])
        assert line["peak_memory_host"] > 2**20
        assert shown[step, "train/peak_memory_host"] == pytest.approx(line["peak_memory_host"])
    assert (0, "check/score") in shown
    assert (STEPS, "check/score") in shown


def test_tensorboard_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(RequestError, match="pip install tensorboardX"):
        board.Board(tmp_path, 0)
