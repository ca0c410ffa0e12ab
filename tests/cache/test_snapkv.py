"""SnapKV against its vote written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from combkv_jax.cache import SnapKV
from tests.cache.plain import draw, drive, heads_of, same_set, shape, weights


def by_the_rule(tokens, steps, budget, window, kernel):
    """One row: what its tokens get [n, HEADS, D], and each KV head's kept tokens in order.

    steps: tokens of a prefill, or, where negative, how many were generated."""
    out, ends = np.zeros(tokens[0].shape), []
    for own, query, key, value in heads_of(tokens):
        kept, first = [], 0
        for length in steps:
            for t in range(first, first + abs(length)):
                kept = [*kept, t]
                out[t, own] = weights(query[t], key, kept) @ value[kept]
            first += abs(length)
            if length < 0 or len(kept) <= budget:
                continue
            votes = np.zeros(len(kept))
            for place in range(len(kept) - window, len(kept)):
                share = weights(query[kept[place]], key, kept[: place + 1])
                votes[: place + 1] += share.sum(axis=0)
            votes = np.convolve(votes[:-window], np.ones(kernel), "full")[kernel // 2 :]
            best = np.argsort(-votes[: len(kept) - window])[: budget - window]
            kept = [kept[i] for i in sorted(best)] + kept[len(kept) - window :]
        ends.append(kept)
    return out, ends


@pytest.mark.parametrize(("budget", "window", "kernel"), [(9, 4, 3), (5, 4, 1), (7, 1, 5)])
def test_the_last_queries_choose_what_stays(budget, window, kernel):
    rng = np.random.default_rng(budget)
    # The last prefill of most rows is shorter than the window, or nothing.
    prefills, decoded = [(19, 1, 5), (2, 3, 17), (3, 0, 1)], 6
    tokens = draw(rng, [sum(part) + decoded for part in zip(*prefills, strict=True)])
    options = {"budget": budget, "window": window, "kernel": kernel, "generated": 6}
    entry = SnapKV.create(shape(options=options))
    out, entry = drive(rng, entry, tokens, prefills, decoded)
    for row, own in enumerate(tokens):
        steps = [*(some[row] for some in prefills), -decoded]
        want, ends = by_the_rule(own, steps, budget, window, kernel)
        np.testing.assert_allclose(out[row], want, atol=3e-5)
        for head, kept in enumerate(ends):
            same_set(entry.key[row, head, : len(kept)], own[1][kept, head])


def test_a_second_prompt_is_voted_on_with_what_was_generated():
    """By the newest queries, most of which came with generated tokens."""
    rng = np.random.default_rng(4)
    tokens = draw(rng, [23])
    entry = SnapKV.create(shape(1, 64, {"budget": 11, "window": 4, "kernel": 3, "generated": 7}))
    _, entry = drive(rng, entry, tokens, [(8,)], 6)
    out, entry = drive(rng, entry, [tuple(x[14:] for x in tokens[0])], [(2,)], 7)
    want, ends = by_the_rule(tokens[0], [8, -6, 2, -7], 11, 4, 3)
    np.testing.assert_allclose(out[0], want[14:], atol=3e-5)
    for head, kept in enumerate(ends):
        same_set(entry.key[0, head], tokens[0][1][kept, head])


def test_after_more_was_generated_than_fits_the_order_is_still_that_of_time():
    rng = np.random.default_rng(5)
    tokens = draw(rng, [26])
    settings = shape(1, 64, {"budget": 6, "window": 3, "kernel": 1, "generated": 4})
    _, entry = drive(rng, SnapKV.create(settings), tokens, [(5,)], 9)  # room for 5 generated
    kept = [0, 1, 2, 3, 4, 9, 10, 11, 12, 13]
    rest = [tuple(x[14:] for x in tokens[0])]
    _, entry = drive(rng, entry, rest, [(12,)])
    order = [*kept, *range(14, 26)]
    _, ends = by_the_rule(tuple(x[order] for x in tokens[0]), [len(order)], 6, 3, 1)
    for head, chosen in enumerate(ends):
        np.testing.assert_array_equal(
            entry.key[0, head, :6], tokens[0][1][[order[i] for i in chosen], head]
        )
