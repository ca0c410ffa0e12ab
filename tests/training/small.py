"""Runs of `train.py` in processes of their own, with a tiny model, short rows and quick checks.

`python -m tests.training.small ARGUMENTS` is `python train.py ARGUMENTS` with these. Of the
environment, FULL_FROM limits the size of files from that step on, as a full disk does, and SLOW
is how many seconds each step takes longer.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

import train
from combkv_jax import console, distributed
from combkv_jax.model import declarations
from combkv_jax.training import lessons, lookup, rows, step
from combkv_jax.weights import checkpoint
from tests import text, tiny

ROOT = Path(__file__).parents[2]
FILE_BYTES = 20_000  # of the log and the adapters: enough; of a checkpoint: too little
# Every step is saved, and the same things happen however often a run is taken up.
ARGUMENTS = ("--rows", 4, "--pool", 6, "--fresh", 2, "--warmup", 1, "--rate", 1e-3, "--seed", 1)
ARGUMENTS += ("--save-every", 1, "--check-every", 4, "--objective", "recall")


class QuickChecks:
    """A number that the trained arrays decide, lower from step to step."""

    def __init__(self, *args):
        pass

    def measure(self, trained, frozen):
        sums = [np.abs(x).sum() for x in distributed.fetch(trained).values() if x.ndim == 1]
        return {"score": -float(np.sum(sums))}


def write_model(folder: Path, seed: int = 6, layers: int = 1) -> Path:
    """A native folder of a random model of our form, one token a byte; with summaries in the upper
    half of its layers, if it has two or more."""
    config = tiny.comb_config(
        "lse",
        tuple(range(layers)),
        chunk_size=96,
        vocab_size=257,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
    )
    arrays = tiny.random_parameters(np.random.default_rng(seed), config)
    layout = {name: (d.shape, np.dtype(np.float32)) for name, d in declarations(config).items()}
    folder.mkdir()
    tokenizer = text.byte_tokenizer(template=None)
    checkpoint.write(folder, config, layout, arrays.get, tokenizer.save_pretrained)
    return folder


def start(*arguments, cache: Path, **variables) -> subprocess.Popen:
    """Starts `train.py` with the small settings. cache: of compiled programs."""
    environment = {
        **os.environ,
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        **{name: str(value) for name, value in variables.items()},
    }
    command = [sys.executable, "-m", "tests.training.small", *ARGUMENTS, *arguments]
    return subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen, code: int = 0) -> str:
    """Waits for the process, which must end with that code; what it said."""
    said, _ = process.communicate(timeout=240)
    assert process.returncode == code, said
    return said


def log(out: Path) -> list[dict]:
    """The steps of a run."""
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def losses(out: Path) -> list[float]:
    """Of the steps, which are numbered from 1 and there once each."""
    lines = log(out)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def _hinder(train_step):
    """The step with what the environment puts in its way."""
    slow, full_from = float(os.environ.get("SLOW", 0)), int(os.environ.get("FULL_FROM", 0))
    number = itertools.count(1)

    def hindered(*arguments):
        time.sleep(slow)
        if next(number) == full_from:
            before = Path(sys.argv[sys.argv.index("--out") + 1]) / "state" / str(full_from - 1)
            while not before.exists():  # it is saved beside the steps, and named when it is whole
                time.sleep(0.05)
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, hard))
        return train_step(*arguments)

    return hindered


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    lessons.BUCKETS = (rows.Bucket(8, 96, 1.0),)
    lessons.Checks = QuickChecks
    lookup.TOKENS, lookup.HELD_OUT, lookup.EACH = 96, 4, 1
    step.train_step = _hinder(step.train_step)
    sys.exit(console.run(train.main, train.parser()))
