"""Rows of random tokens driven through a cache entry, and attention written out, for its tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax.cache import CacheShape

HEADS, KV_HEADS, DIM = 4, 2, 6
GROUP = HEADS // KV_HEADS
FREQUENCIES = np.array([1.0, 0.31, 0.07])

traced = []  # a policy for each time that `extend` was traced


@jax.jit
def extend(entry, *arrays):
    """Compiled as a whole: op by op, every new shape takes many times longer."""
    traced.append(type(entry))
    return entry.extend(*arrays)


def shape(rows=3, capacity=64, options=None, dtype=jnp.float32, dim=DIM) -> CacheShape:
    """Of a cache entry for tokens as `draw` makes them."""
    rotary = jnp.asarray(FREQUENCIES)
    return CacheShape(rows, KV_HEADS, dim, capacity, dtype, rotary, options or {}, group=GROUP)


def draw(rng, total, dim=DIM):
    """For each row its tokens: query [n, HEADS, dim], key and value [n, KV_HEADS, dim]."""
    rows = []
    for n in total:
        query, key, value = rng.normal(size=(3, n, HEADS, dim)).astype(np.float32)
        rows.append((query * 2, key[:, :KV_HEADS], value[:, :KV_HEADS]))
    return rows


def drive(rng, entry, tokens, prefills, decoded=0, dtype=jnp.float32):
    """What each row's tokens [n, HEADS, DIM] get, and the entry afterwards.

    prefills: for each prefill its real tokens in each row; `decoded` tokens a row follow.
    """
    count = [0] * len(tokens)
    out = [[] for _ in tokens]
    width = max([1, *(n for some in prefills for n in some)])

    def step(entry, widths, room, lengths):
        dim = tokens[0][0].shape[-1]
        arrays = [rng.normal(size=(len(tokens), room, h, dim)) for h in (HEADS, KV_HEADS, KV_HEADS)]
        for row, n in enumerate(widths):  # padding is noise
            for array, own in zip(arrays, tokens[row], strict=True):
                array[row, :n] = own[count[row] : count[row] + n]
        attended, entry = extend(entry, *(jnp.asarray(x, dtype) for x in arrays), lengths)
        for row, n in enumerate(widths):
            out[row].extend(np.asarray(attended.out[row, :n], np.float32))
            count[row] += n
        return entry

    for widths in prefills:
        entry = step(entry, widths, width, jnp.asarray(widths, jnp.int32))
    for _ in range(decoded):
        entry = step(entry, [1] * len(tokens), 1, None)
    return [np.array(x) for x in out], entry


def rounded(x, dtype):
    """The numbers of x [...] in dtype, as NumPy float32."""
    return np.asarray(jnp.asarray(x, dtype), np.float32)


def weights(query, key, seen):
    """Softmax weights [GROUP, len(seen)] of query [GROUP, D] over key [n, D] at `seen`, float64."""
    logits = query.astype(np.float64) @ key[seen].T / key.shape[-1] ** 0.5
    logits = np.exp(logits - logits.max(axis=1, keepdims=True))
    return logits / logits.sum(axis=1, keepdims=True)


def heads_of(tokens):
    """For each KV head of one row: its slice of query heads, and query [n, GROUP, D], key and
    value [n, D]."""
    query, key, value = tokens
    for head in range(KV_HEADS):
        own = slice(head * GROUP, (head + 1) * GROUP)
        yield own, query[:, own], key[:, head], value[:, head]


def same_set(got, want, **tolerance):
    """Whether two lists of vectors hold the same ones in any order."""
    got, want = (np.asarray(x)[np.lexsort(np.asarray(x).T)] for x in (got, want))
    np.testing.assert_allclose(got, want, **tolerance)
