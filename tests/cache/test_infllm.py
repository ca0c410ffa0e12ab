"""InfLLM against its rule written out in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax.cache import InfLLM, nbytes
from tests.cache.plain import DIM, KV_HEADS, draw, drive, heads_of, rounded, shape, weights


def by_the_rule(tokens, steps, dtype, first, window, block, representatives, top):
    """One row: what its tokens get, [n, HEADS, D], and for each KV head the means of its blocks'
    representatives, [blocks, D]. steps: tokens of a prefill, or, where negative, generated."""
    out, told = np.zeros(tokens[0].shape), []
    for own, query, key, value in heads_of(tokens):
        mass, means, t = np.zeros(len(key)), [], 0
        for length in steps:
            for _ in range(abs(length)):
                seen = np.arange(t + 1)
                # A block is told when `window` newer tokens stand behind it, this one included.
                while first + (len(means) + 1) * block + window <= t + 1:
                    begin = first + len(means) * block
                    most = begin + np.argsort(-mass[begin : begin + block])[:representatives]
                    means.append(rounded(key[most].mean(axis=0), dtype))
                if length < 0:
                    score = np.array([query[t].mean(axis=0) @ mean for mean in means])
                    chosen = np.argsort(-score)[: -(-top // block)].astype(int)
                    fetched = first + chosen[:, None] * block + np.arange(block)
                    near = np.arange(first + len(means) * block, t + 1)
                    seen = np.concatenate([seen[:first], fetched.ravel(), near])
                share = weights(query[t], key, seen)
                out[t, own] = share @ value[seen]
                local = seen > t - window
                mass[seen[local]] += share.sum(axis=0)[local]
                t += 1
        told.append(np.array(means).reshape(-1, key.shape[1]))
    return out, told


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"first": 2, "window": 3, "block": 4, "representatives": 2, "top": 5}, jnp.float32),
        ({"first": 3, "window": 5, "block": 3, "representatives": 1, "top": 3}, jnp.bfloat16),
    ],
)
def test_it_fetches_what_the_rule_picks_in_every_turn(options, dtype):
    """The representatives are the most attended keys, whatever came in one prefill or alone."""
    rng = np.random.default_rng(options["first"])
    steps = [[19, 2, -6, 3, -7], [1, 3, -6, 0, -7], [5, 19, -6, 19, -7]]
    tokens = [[rounded(x, dtype) for x in own] for own in draw(rng, [37, 17, 56])]
    entry = InfLLM.create(shape(3, 64, options, dtype))
    out, place = [[], [], []], [0, 0, 0]
    for prefills, decoded in [([(19, 1, 5), (2, 3, 19)], 6), ([(3, 0, 19)], 7)]:
        rest = [[x[at:] for x in own] for own, at in zip(tokens, place, strict=True)]
        got, entry = drive(rng, entry, rest, prefills, decoded, dtype)
        for row, new in enumerate(got):
            out[row].extend(new)
            place[row] += len(new)
    close = {"atol": 3e-5} if dtype == jnp.float32 else {"atol": 0.04, "rtol": 0.02}
    means = np.asarray(entry.block_key, np.float32)
    for row in range(3):
        want, told = by_the_rule(tokens[row], steps[row], dtype, **options)
        np.testing.assert_allclose(out[row], want, **close)
        for head in range(KV_HEADS):
            np.testing.assert_allclose(means[row, head, : len(told[head])], told[head], atol=1e-6)
    assert entry.count.tolist() == place == [37, 17, 56]


def test_the_device_holds_what_the_formula_says_and_the_host_the_rest():
    rows, capacity, first, window, block = 3, 4096, 5, 7, 11
    options = {"first": first, "window": window, "block": block, "top": 22}
    entry = InfLLM.create(shape(rows, capacity, options, jnp.bfloat16))
    number = rows * KV_HEADS * DIM * 2  # bytes of one key or value in every row
    blocks = (capacity - first - window) // block
    device = (2 * (first + window + block) + blocks) * number
    device += rows * KV_HEADS * (window + block) * 4 + 2 * rows * 4  # masses, counters
    assert nbytes(entry) == {"device": device, "host": 2 * capacity * number}


def test_it_takes_any_length_where_no_block_has_room():
    rng = np.random.default_rng(4)
    tokens = draw(rng, [3, 9])
    entry = InfLLM.create(shape(2, 9))
    out, _ = drive(rng, entry, tokens, [(1, 7)], 2)
    for row, (query, key, value) in enumerate(tokens):
        for own, q, k, v in heads_of((query, key, value)):
            for t in range(len(k)):
                want = weights(q[t], k, np.arange(t + 1)) @ v[: t + 1]
                np.testing.assert_allclose(out[row][t, own], want, atol=3e-5)
