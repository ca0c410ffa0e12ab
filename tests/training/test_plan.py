"""Plans of a training step from XLA's own GPU compiler, against what the shapes say."""

from __future__ import annotations

import json
import math

import pytest

import train
from combkv_jax import console
from combkv_jax.errors import RequestError
from combkv_jax.model import declarations
from combkv_jax.training import plan, rows
from tests import tiny
from tests.test_planner import needs_compiler

pytestmark = pytest.mark.optimized

GIB = 2**30
BUCKET = rows.Bucket(8, 96, 1.0)


@pytest.mark.once
@needs_compiler
def test_llama_8b_on_four_h200(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(console, "prepare_jax", lambda: None)  # the tests' own settings stay
    figures = tmp_path / "plan.json"
    arguments = ["--model", "llama-3.1-8b", "--kept-layers", "every4", "--plan", "h200"]
    arguments += ["--mesh", "2x2", "--rows", "2", "--json", str(figures)]
    assert console.run(train.main, train.parser(), arguments) == 0
    planned = json.loads(figures.read_text())
    assert planned["gpu"] == "NVIDIA H200"
    # Half of the 8.03e9 frozen weights at two bytes; norms are whole.
    assert planned["frozen"] == pytest.approx(8.03e9, rel=1e-3)
    # 8 layers of q, o [4096, 4096], k, v [1024, 4096]; 4 summaries of q, k, v [1024, 4096] and
    # two [8, 128, 128] in float32, half on each.
    trained = (8 * (2 * 4096 + 2 * 1024) + 4 * 3 * 1024) * 4096 * 4
    trained += 4 * 2 * 8 * 128 * 128 * 4
    assert planned["trained"] == pytest.approx(trained / 2, rel=1e-3)
    assert planned["moments"] == pytest.approx(2 * trained / 4, rel=1e-3)
    # One row a device: the largest shape's chunks of 1024 tokens, 8 layers of taps in float16.
    chunks = rows.BUCKETS[-1].chunks
    assert planned["batch"] == pytest.approx(chunks * 1024 * 8 * 4096 * 2, rel=5e-3)
    assert 0.5 * GIB < planned["temporaries"] < 4 * GIB
    assert planned["output"] - planned["alias"] < 2**20  # the state stays where it is
    assert planned["peak"] < 13 * GIB + planned["batch"]
    assert planned["fits"] is True
    shown = capsys.readouterr().out
    assert "Adam's moments" in shown
    assert "738.0 MiB" in shown


@needs_compiler
def test_bytes_are_those_of_the_shapes():
    config = tiny.comb_config("lse", (1,), num_hidden_layers=2)
    planned = plan.plan_training(
        config, "h100", mesh=(2, 1), rows=2, accumulate=3, dtype="float32", bucket=BUCKET
    )
    sizes = {name: 4 * math.prod(d.shape) for name, d in declarations(config).items()}
    trained = sum(size for name, size in sizes.items() if name.startswith("history."))
    assert planned.trained == trained
    assert planned.frozen == sum(sizes.values()) - trained
    assert 0 <= planned.moments - trained < 64  # half of two; and the counts of steps
    # Of each micro-batch one row a device: taps and their tokens, 13 numbers a token of the row,
    # first tokens, what is sought.
    row = 8 * config.chunk_size * (40 * 2 + 4) + 4 * (
        13 * 96 + rows.MOST_HISTORIES * 4 + rows.SOUGHT
    )
    assert planned.batch == 3 * row
    assert planned.history == 8 * config.chunk_size
    assert planned.fits


def test_what_cannot_be_planned():
    config = tiny.comb_config("lse")
    with pytest.raises(RequestError, match="own form"):
        plan.plan_training(tiny.comb_config("tanh"), "h100")
    with pytest.raises(RequestError, match="GPU 'h300' is not known"):
        plan.plan_training(config, "h300")


@needs_compiler
def test_rows_that_the_mesh_does_not_divide():
    with pytest.raises(RequestError, match=r"3 rows \(--rows\) .* data axis of 2; 1 or 3 would"):
        plan.plan_training(tiny.comb_config("lse"), "h100", mesh=(2, 1), rows=3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--plan", "h100", "--data", "chats.jsonl"],
            "leave --data, --recipe and --objective away",
        ),
        (["--plan", "h100", "--dtype", "int8"], "'int8' is not one of float32, bfloat16"),
        (["--json", "plan.json", "--out", "run"], "--json is for the figures of --plan"),
        ([], "--out is missing"),
    ],
)
def test_wrong_requests_are_one_sentence(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert console.run(train.main, train.parser(), arguments) == 2
    assert words in capsys.readouterr().err
