"""Every policy against attention written out in NumPy, over prefills and decoded tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax.cache import POLICIES, CacheShape, Chunks, Comb, create_cache, nbytes, write
from combkv_jax.errors import RequestError
from tests import tiny

ROWS, HEADS, KV_HEADS, DIM = 3, 4, 2, 6
FREQUENCIES = np.array([1.0, 0.31, 0.07])
OPTIONS = {"full": {}, "window": {"first": 3, "window": 7}}


def turned(x, angle):
    """x [..., DIM] turned by angle * FREQUENCIES, halves against halves."""
    cos, sin = np.cos(angle * FREQUENCIES), np.sin(angle * FREQUENCIES)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def seen(policy, index):
    """(token, how far the query is turned towards it) for each token that `index` sees."""
    if policy == "full":
        return [(j, 0) for j in range(index + 1)]
    first, window = OPTIONS["window"]["first"], OPTIONS["window"]["window"]
    recent = [(j, 0) for j in range(max(0, index - window + 1), index + 1)]
    closer = min(0, first + window - 1 - index)  # the paper's renumbering, as a distance
    return [(j, closer) for j in range(min(first, max(0, index - window + 1)))] + recent


def expected(policy, query, key, value, index):
    """The newest token's attention [HEADS, DIM] in float64; key, value [tokens, KV_HEADS, DIM]."""
    out = np.zeros((HEADS, DIM))
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        logits = np.array(
            [turned(query[head], c) @ key[j, kv] / DIM**0.5 for j, c in seen(policy, index)]
        )
        weights = np.exp(logits - logits.max())
        out[head] = weights @ value[[j for j, _ in seen(policy, index)], kv] / weights.sum()
    return out


@pytest.mark.parametrize("policy", POLICIES)
def test_prefills_and_decoded_tokens_of_ragged_rows(policy):
    rng = np.random.default_rng(7)
    lengths = [(5, 1, 4), (6, 17, 0), (1, 2, 13)]  # real tokens of each row in each prefill
    total = [sum(part) + 9 for part in zip(*lengths, strict=True)]
    tokens = [rng.normal(size=(3, n, HEADS, DIM)) for n in total]  # query, key, value
    shape = CacheShape(
        ROWS, KV_HEADS, DIM, 64, jnp.float32, jnp.asarray(FREQUENCIES), OPTIONS[policy]
    )
    entry = POLICIES[policy].create(shape)
    count = [0, 0, 0]

    def batch(widths, room):
        out = rng.normal(size=(3, ROWS, room, HEADS, DIM))  # padding is noise
        for row, n in enumerate(widths):
            out[:, row, :n] = tokens[row][:, count[row] : count[row] + n]
        query, key, value = (jnp.asarray(x, jnp.float32) for x in out)
        return query, key[:, :, :KV_HEADS], value[:, :, :KV_HEADS]

    def check(out, widths):
        for row, n in enumerate(widths):
            query, key, value = tokens[row]
            for t in range(n):
                want = expected(
                    policy,
                    query[count[row] + t],
                    key[:, :KV_HEADS],
                    value[:, :KV_HEADS],
                    count[row] + t,
                )
                np.testing.assert_allclose(out[row, t], want, atol=2e-5)
            count[row] += n

    for widths in lengths:
        query, key, value = batch(widths, 19)
        attended, entry = entry.prefill(query, key, value, jnp.asarray(widths))
        check(np.asarray(attended.out), widths)
    for _ in range(9):
        query, key, value = batch((1, 1, 1), 1)
        entry = entry.append(key, value)
        check(np.asarray(entry.attend(query).out), (1, 1, 1))


def test_a_window_holds_no_more_than_it_shows():
    text = tiny.llama_config()
    cache = create_cache(text, "window", 2, 10_000, jnp.bfloat16, {"first": 4, "window": 32})
    keys_values = 3 * 2 * 2 * 2 * (4 + 32) * 12 * 2  # layers, K and V, rows, heads, tokens, bf16
    small = 4096
    assert keys_values <= nbytes(cache)["device"] <= keys_values + small


def test_sinks_are_ordinary_keys_in_front():
    rng = np.random.default_rng(8)
    shape = CacheShape(1, KV_HEADS, DIM, 32, jnp.float32, jnp.asarray(FREQUENCIES))
    query, key, value = (
        jnp.asarray(x, jnp.float32) for x in rng.normal(size=(3, 1, 9, HEADS, DIM))
    )
    key, value = key[:, :, :KV_HEADS], value[:, :, :KV_HEADS]
    full = POLICIES["full"].create(shape)
    whole, _ = full.prefill(query, key, value, jnp.array([9]))
    sinks = Chunks(
        key[:, :4].swapaxes(1, 2),
        value[:, :4].swapaxes(1, 2),
        jnp.zeros((1, 1), int),
        jnp.full((1, 1), 4),
    )
    behind, _ = Comb(full, sinks=sinks).prefill(
        query[:, 4:], key[:, 4:], value[:, 4:], jnp.array([5])
    )
    np.testing.assert_allclose(behind.out, whole.out[:, 4:], atol=1e-6)


def test_write_drops_what_is_past_the_end_and_touches_nothing_else():
    rng = np.random.default_rng(9)
    buffer = rng.normal(size=(3, 2, 7, 4)).astype(np.float32)
    new = rng.normal(size=(2, 3, 2, 4)).astype(np.float32)
    index, rows = np.array([[5, 6, 7], [0, 7, 3]]), np.array([2, 0])
    got = np.asarray(write(jnp.asarray(buffer), jnp.asarray(new), jnp.asarray(index), rows))
    for i, row in enumerate(rows):
        for t, place in enumerate(index[i]):
            if place < 7:
                buffer[row, :, place] = new[i, t]
    np.testing.assert_array_equal(got, buffer)


def test_writing_into_a_donated_buffer_copies_nothing():
    buffer = jax.ShapeDtypeStruct((2, 3, 4096, 16), jnp.float32)
    new = jax.ShapeDtypeStruct((2, 1, 3, 16), jnp.float32)
    index, rows = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((2, 1), (2,)))
    compiled = jax.jit(write, donate_argnums=0).lower(buffer, new, index, rows).compile()
    used = compiled.memory_analysis()
    assert used.alias_size_in_bytes == 2 * 3 * 4096 * 16 * 4
    assert used.temp_size_in_bytes < 2**14


def test_an_unknown_policy_is_refused_with_the_list():
    with pytest.raises(RequestError, match="'lru' is not one of full, window"):
        create_cache(tiny.llama_config(), "lru", 1, 8, jnp.float32)
