"""The Hopper kernel over codes: interpreted, against what they stand for, and compiled."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax.attention import choose, decode
from combkv_jax.cache.quantize import quantize
from tests.attention.cases import Case, expected
from tests.attention.test_flash import (
    abstract,
    interpreted,
    needs_interpreter,
    on,
    ptxas,
)
from tests.test_planner import needs_compiler

# Each has a last copy of words that overlaps the one before.
CASES = [
    (4, Case(1, 2, 4, 1, 576, 64)),
    (8, Case(2, 1, 6, 2, 320, 128, "float16", "prefix", 2)),
    (2, Case(1, 1, 1, 1, 1152, 64, sees="prefix")),
]


@functools.partial(jax.jit, static_argnames="bits")
def coded(key, value, bits):
    return quantize(key, bits, per_token=False), quantize(value, bits, per_token=True)


@needs_interpreter
@pytest.mark.parametrize(("bits", "case"), CASES, ids=str)
def test_it_is_attention_over_what_the_codes_stand_for(bits, case, capfd):
    query, key, value, start, end = case.draw()
    sources = coded(key, value, bits)
    got = interpreted(
        lambda *a: decode.attention(*a, splits=case.splits), query, *sources, start, end
    )
    whole = (x.dequantize(0, case.keys) for x in sources)
    out, lse = expected(query, *whole, start, end)
    np.testing.assert_allclose(np.asarray(got[0], np.float32), out, atol=0.02, rtol=0.01)
    np.testing.assert_allclose(got[1], lse, atol=1e-4)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@needs_interpreter
@needs_compiler
def test_compiled_for_llama_8b_on_an_h200(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    query, key, value, *bounds = abstract((1, 1, 32, 128), (1, 8, 131072, 128))
    sources = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=key.sharding),
        jax.eval_shape(functools.partial(coded, bits=4), key, value),
    )
    lowered = jax.jit(decode.attention).lower(query, *sources, *bounds)
    used = lowered.compile().memory_analysis()
    # Nothing is decoded in memory: a quarter of the bytes, scales included, is all that is read.
    assert used.argument_size_in_bytes < 2 * key.size * 2 * (4 / 16 + 2 / 64) + 2**16
    assert used.temp_size_in_bytes < 0.02 * used.argument_size_in_bytes
    ptx = capfd.readouterr().out
    assert "wgmma.mma_async" in ptx
    said = ptxas(ptx, tmp_path)
    assert "Used" in said
    # A dozen numbers of a thread are set aside; an array of a step would be 128 bytes or more.
    assert max(map(int, re.findall(r"(\d+) bytes spill", said))) <= 64


@needs_interpreter
@pytest.mark.parametrize(
    ("change", "bits", "name"),
    [
        ({}, 4, "pallas"),
        ({}, 1, "xla"),  # too few words
        ({"keys": 64 * 17}, 2, "xla"),  # words not in tiles of 8
        ({"queries": 33}, 4, "xla"),
        ({"dim": 96}, 4, "xla"),
        ({"dtype": "float32"}, 4, "xla"),
    ],
)
def test_what_it_takes(change, bits, name):
    case = dataclasses.replace(Case(1, 1, 4, 2, 1024, 64), **change)
    query, key, value, *_ = case.draw()
    sources = jax.eval_shape(functools.partial(coded, bits=bits), key, value)
    with on("h200"):
        assert choose(query, *sources) == name


def test_codes_of_another_kind_are_not_taken():
    query = jnp.zeros((1, 1, 1, 64), jnp.bfloat16)
    key = quantize(jnp.zeros((1, 1, 512, 64), jnp.bfloat16), 4, per_token=False)
    with pytest.raises(NotImplementedError, match="as cache/quantize.py codes them"):
        decode.check(query, key, key)
