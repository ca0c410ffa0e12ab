"""The policy that codes its older tokens, against the same written out token by token."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax.cache import Full, QuantizedTokens, nbytes
from combkv_jax.cache.quantized import BLOCK
from tests.cache.plain import draw, drive, heads_of, shape, weights


def stored(x, bits, axis):
    """A group [..., 64 or fewer, ...] as it is stored, by the formulas of the paper with the zero
    point rounded down and the step up, one group a call."""
    low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    zero = low.astype(np.float16)
    zero = np.where(zero > low, np.nextafter(zero, np.float16(-np.inf)), zero).astype(np.float32)
    step = (high - zero) / np.float32(2**bits - 1)
    scale = step.astype(np.float16)
    scale = np.where(scale < step, np.nextafter(scale, np.float16(np.inf)), scale)
    scale = scale.astype(np.float32)
    return np.round((x - zero) / scale) * scale + zero


def by_the_rule(tokens, prefills, bits):
    """One row: what its tokens get [n, HEADS, D], the ones behind the prefills decoded."""
    out, total = np.zeros(tokens[0].shape), len(tokens[0])
    steps = [*prefills, *[1] * (total - sum(prefills))]
    for own, query, key, value in heads_of(tokens):
        coded_key = np.concatenate([stored(key[i : i + 64], bits, 0) for i in range(0, total, 64)])
        coded_value = stored(value, bits, 1)
        first = 0
        for number, length in enumerate(steps):
            decoded = number >= len(prefills)
            # Of what stood before a prefill, or with a decoded token, 256 are read as they were.
            border = max(first + decoded - 2 * BLOCK, 0)
            keys = np.concatenate([coded_key[:border], key[border:]])
            values = np.concatenate([coded_value[:border], value[border:]])
            for t in range(first, first + length):
                seen = np.arange(t + 1)
                out[t, own] = weights(query[t], keys, seen) @ values[seen]
            first += length
    return out


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_older_tokens_are_read_from_their_codes(bits):
    rng = np.random.default_rng(bits)
    prefills, decoded = [(391, 1, 127), (0, 130, 390), (17, 391, 1)], 140
    tokens = draw(rng, [sum(part) + decoded for part in zip(*prefills, strict=True)])
    entry = QuantizedTokens.create(shape(3, 700, {"bits": bits}))
    out, _ = drive(rng, entry, tokens, prefills, decoded)
    for row, own in enumerate(tokens):
        want = by_the_rule(own, [some[row] for some in prefills], bits)
        assert np.mean(np.abs(out[row] - want).max(axis=(1, 2)) < 5e-5) == 1


def test_the_first_prefill_is_exact():
    rng = np.random.default_rng(3)
    tokens = draw(rng, [509, 300, 1])
    settings = shape(3, 512, {"bits": 1})
    prefills = [(509, 300, 1)]
    out, _ = drive(rng, QuantizedTokens.create(settings), tokens, prefills)
    want, _ = drive(rng, Full.create(shape(3, 512)), tokens, prefills)
    for a, b in zip(out, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_bytes_are_those_of_the_codes_and_the_ring(bits):
    settings = shape(2, 8192, {"bits": bits}, jnp.bfloat16, dim=64)
    entry = QuantizedTokens.create(settings)
    full = nbytes(Full.create(settings))["device"]
    coded = (8192 - BLOCK) / 8192 * (bits / 16 + 2 / 64) * full
    assert nbytes(entry)["device"] == pytest.approx(coded + full * 2 * BLOCK / 8192, rel=1e-4)


def test_sixteen_bits_are_the_full_cache():
    assert isinstance(QuantizedTokens.create(shape(options={"bits": 16})), Full)
