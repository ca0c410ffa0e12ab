"""Coded keys and values against their bounds, and attention over them against a plain one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax.attention import attention, xla
from combkv_jax.cache import nbytes
from combkv_jax.cache.quantize import CODED_BITS, Quantized, quantize
from combkv_jax.errors import RequestError

code = jax.jit(quantize, static_argnames=("bits", "per_token"))


def decoded(coded, tokens):
    """What `coded` stands for, float32 [B, K, tokens, D]."""
    return np.asarray(coded.dequantize(0, coded.shape[2]), np.float32)[:, :, :tokens]


def grouped(x, per_token):
    """For every number of x [B, K, S, D] the least and the largest of its group."""
    low, high = np.empty_like(x), np.empty_like(x)
    axis = 3 if per_token else 2
    for first in range(0, x.shape[axis], 64):
        part = (
            (..., slice(first, first + 64))
            if per_token
            else (..., slice(first, first + 64), slice(None))
        )
        low[part] = x[part].min(axis=axis, keepdims=True)
        high[part] = x[part].max(axis=axis, keepdims=True)
    return low, high


@pytest.mark.parametrize("bits", CODED_BITS)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 6), (67, 64), (131, 96), (192, 128)])
def test_no_number_is_off_by_more_than_half_a_step(bits, per_token, tokens, dim):
    rng = np.random.default_rng(tokens + bits)
    x = rng.normal(size=(2, 3, tokens, dim)) * np.exp(rng.normal(size=(2, 3, 1, dim)) * 2)
    x = (x + rng.normal(size=(2, 3, 1, dim)) * 20).astype(np.float32)  # far from 0, as keys are
    coded = code(jnp.asarray(x), bits, per_token=per_token)
    off = np.abs(decoded(coded, tokens) - x)
    low, high = grouped(x, per_token)
    levels = 2**bits - 1
    # The exact step, and what rounding the zero point and it to float16 adds.
    step = (high - low + 2.0**-10 * np.abs(low) + 2.0**-24) / levels * (1 + 2.0**-10) + 2.0**-24
    assert (off <= step / 2 + 2e-6 * np.abs(x)).all()


@pytest.mark.parametrize("bits", CODED_BITS)
def test_coding_twice_changes_nothing_where_the_step_is_exact(bits):
    """Numbers that are codes times a power of two come back as they were."""
    rng = np.random.default_rng(bits)
    levels = 2**bits - 1
    x = rng.integers(0, levels + 1, (1, 2, 128, 64)) * 0.25 - 3
    x[:, :, ::64], x[:, :, 1::64] = -3, levels * 0.25 - 3
    np.testing.assert_array_equal(
        decoded(code(jnp.asarray(x, jnp.float32), bits, per_token=False), 128), x
    )


@pytest.mark.parametrize("bits", CODED_BITS)
@pytest.mark.parametrize("per_token", [False, True])
def test_constant_groups_are_exact(bits, per_token):
    rng = np.random.default_rng(bits)
    constant = jnp.asarray(
        rng.normal(size=(2, 2, 5 if per_token else 1, 1 if per_token else 70)), jnp.bfloat16
    )
    x = jnp.broadcast_to(constant, (2, 2, 5, 70))
    coded = code(x, bits, per_token=per_token)
    assert coded.dequantize(0, 64).dtype == jnp.bfloat16
    np.testing.assert_array_equal(decoded(coded, 5), np.asarray(x, np.float32))


@pytest.mark.parametrize("bits", CODED_BITS)
@pytest.mark.parametrize("per_token", [False, True])
def test_bytes_are_those_of_the_formula(bits, per_token):
    x = jnp.zeros((2, 3, 192, 128), jnp.bfloat16)
    coded = quantize(x, bits, per_token=per_token)
    assert nbytes(coded)["device"] == x.nbytes * (bits / 16 + 2 / 64)


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("queries", [1, 19])
def test_attention_over_codes_is_attention_over_what_they_stand_for(
    bits, blocks, queries, monkeypatch
):
    if blocks:
        monkeypatch.setattr(xla, "DECODED_BYTES", 0)
        monkeypatch.setattr(xla, "SMALLEST_BLOCK", 64)
        monkeypatch.setattr(xla, "ROWS_BYTES", 0)
    rng = np.random.default_rng(bits)
    keys = 331
    key, value = (jnp.asarray(x, jnp.float32) for x in rng.normal(size=(2, 2, 2, keys, 6)))
    coded = code(key, bits, per_token=False), code(value, bits, per_token=True)
    query = jnp.asarray(rng.normal(size=(2, queries, 4, 6)), jnp.float32)
    start = jnp.asarray(rng.integers(0, keys, (2, queries)))
    end = jnp.minimum(start + jnp.asarray(rng.integers(0, keys, (2, queries))), keys)
    got = jax.jit(lambda *a: attention(*a))(query, *coded, start, end)
    whole = (jnp.asarray(decoded(x, keys)) for x in coded)
    want = attention(query, *whole, start, end, implementation="reference")
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    plain = attention(query, *coded, start, end, implementation="reference")
    np.testing.assert_allclose(plain.out, want.out, atol=1e-6)


@pytest.mark.optimized
def test_the_cache_is_never_decoded_at_once():
    """131072 tokens of 4 heads: 256 MiB decoded to float32, 10 MiB in 2 bits."""
    tokens, dim = 2**17, 128

    def coded(per_token):
        groups = (tokens, dim // 64) if per_token else (tokens // 64, dim)
        scale = jax.ShapeDtypeStruct((1, 4, *groups), jnp.float16)
        codes = jax.ShapeDtypeStruct((1, 4, tokens * 2 // 32, dim), jnp.uint32)
        return Quantized(codes, scale, scale, 2, per_token, jnp.dtype(jnp.bfloat16))

    query = jax.ShapeDtypeStruct((1, 1, 8, dim), jnp.bfloat16)
    bound = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    compiled = jax.jit(attention).lower(query, coded(False), coded(True), bound, bound).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * xla.DECODED_BYTES


def test_other_widths_are_refused_in_words():
    with pytest.raises(RequestError, match="bits is 3; codes have 1, 2, 4 or 8 bits"):
        quantize(jnp.zeros((1, 1, 1, 1)), 3, per_token=False)
