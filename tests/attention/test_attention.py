"""Every implementation against a float64 softmax written out per query."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax.attention import Attended, attention, mass, merge, xla
from combkv_jax.errors import RequestError
from tests.attention.cases import expected

# batch, queries, query heads, KV heads, keys, head_dim
SHAPES = [(1, 1, 1, 1, 1, 2), (2, 7, 6, 2, 13, 8), (3, 1, 4, 4, 131, 16), (1, 37, 9, 3, 257, 6)]


def drawn(rng, shape, dtype=np.float32):
    """query, key, value, start, end; some queries see nothing, some everything."""
    batch, queries, heads, kv_heads, keys, dim = shape
    query = rng.normal(size=(batch, queries, heads, dim)) * 3
    key, value = rng.normal(size=(2, batch, kv_heads, keys, dim))
    start = rng.integers(0, keys, (batch, queries))
    end = np.minimum(start + rng.integers(0, keys + 1, (batch, queries)), keys)
    start[:, 0], end[:, 0] = 0, keys
    return *(jnp.asarray(x, dtype) for x in (query, key, value)), jnp.asarray(start), end


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_against_a_plain_softmax(implementation, blocks, shape, monkeypatch):
    if blocks:
        monkeypatch.setattr(xla, "ROWS_BYTES", 0)
        monkeypatch.setattr(xla, "FEW_QUERIES", 1)
        monkeypatch.setattr(xla, "LOGITS_BYTES", 0)
        monkeypatch.setattr(xla, "SMALLEST_BLOCK", 11)
    arrays = drawn(np.random.default_rng(sum(shape)), shape)
    got = jax.jit(lambda *a: attention(*a, implementation=implementation))(*arrays)
    out, lse = expected(*arrays)
    np.testing.assert_allclose(got.out, out, atol=2e-5)
    np.testing.assert_allclose(got.lse, lse, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("blocks", [False, True])
def test_the_mass_of_a_key_is_the_sum_of_its_weights(blocks, shape, monkeypatch):
    if blocks:
        monkeypatch.setattr(xla, "LOGITS_BYTES", 0)
        monkeypatch.setattr(xla, "SMALLEST_BLOCK", 11)
    query, key, value, start, end = drawn(np.random.default_rng(sum(shape)), shape)
    lse = attention(query, key, value, start, end).lse
    got = np.asarray(jax.jit(lambda *a: mass(*a))(query, key, lse, start, end))
    want = np.zeros(key.shape[:3])
    group = query.shape[2] // key.shape[1]
    for b, t, h in np.ndindex(query.shape[:3]):
        seen = slice(int(start[b, t]), int(end[b, t]))
        logits = np.asarray(key, np.float64)[b, h // group, seen] @ np.asarray(query)[b, t, h]
        if logits.size:
            share = np.exp((logits - logits.max()) * query.shape[-1] ** -0.5)
            want[b, h // group, seen] += share / share.sum()
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_bfloat16_stays_within_its_rounding():
    arrays = drawn(np.random.default_rng(1), SHAPES[1], jnp.bfloat16)
    got = attention(*arrays)
    out, lse = expected(*arrays)
    assert (got.out.dtype, got.lse.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(np.asarray(got.out, np.float32), out, atol=0.04)
    np.testing.assert_allclose(got.lse, lse, atol=0.02)


def test_one_source_shared_by_all_rows_is_that_source_repeated():
    query, key, value, start, end = drawn(np.random.default_rng(2), SHAPES[1])
    shared = attention(query, key[:1], value[:1], start, end)
    repeated = attention(query, *(jnp.repeat(x[:1], 2, 0) for x in (key, value)), start, end)
    np.testing.assert_allclose(shared.out, repeated.out, atol=1e-6)
    np.testing.assert_allclose(shared.lse, repeated.lse, atol=1e-6)


def test_merging_two_halves_is_the_whole():
    query, key, value, start, _ = drawn(np.random.default_rng(3), SHAPES[3])
    keys = key.shape[2]
    border = jnp.asarray(np.random.default_rng(4).integers(0, keys + 1, start.shape))
    whole = attention(query, key, value, jnp.int32(0), jnp.int32(keys))
    first = attention(query, key, value, jnp.int32(0), border)
    second = attention(query, key, value, border, jnp.int32(keys))
    merged = merge(first, second)
    np.testing.assert_allclose(merged.out, whole.out, atol=1e-5)
    np.testing.assert_allclose(merged.lse, whole.lse, atol=1e-5)


def test_merging_nothing_with_nothing_is_nothing():
    nothing = Attended(jnp.zeros((1, 1, 1, 2)), jnp.full((1, 1, 1), -jnp.inf))
    merged = merge(nothing, nothing)
    assert np.all(merged.out == 0)
    assert np.all(np.isneginf(merged.lse))


def test_gradients_in_blocks_are_those_of_the_whole(monkeypatch):
    query, key, value, start, end = drawn(np.random.default_rng(5), SHAPES[1])

    def total(query, key, value):
        out, lse = attention(query, key, value, start, end)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse))

    whole = jax.grad(total, (0, 1, 2))(query, key, value)
    monkeypatch.setattr(xla, "LOGITS_BYTES", 0)
    monkeypatch.setattr(xla, "SMALLEST_BLOCK", 5)
    blocks = jax.grad(total, (0, 1, 2))(query, key, value)
    for a, b in zip(whole, blocks, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.optimized
def test_memory_does_not_grow_with_queries_times_keys():
    """16384 keys under 4096 queries: logits at once would take 1 GiB a head."""
    query = jax.ShapeDtypeStruct((1, 4096, 4, 16), jnp.float32)
    key = jax.ShapeDtypeStruct((1, 2, 16384, 16), jnp.float32)
    bound = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    compiled = jax.jit(attention).lower(query, key, key, bound, bound).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * xla.LOGITS_BYTES


def test_an_unknown_implementation_is_refused_with_the_list():
    with pytest.raises(RequestError, match="'triton' is not one of xla, reference"):
        attention(*drawn(np.random.default_rng(6), SHAPES[0]), implementation="triton")
