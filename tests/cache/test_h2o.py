"""H2O against its rule written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from combkv_jax.cache import H2O
from tests.cache.plain import draw, drive, heads_of, same_set, shape, weights


def by_the_rule(tokens, prefills, decoded, heavy, recent):
    """One row: what its tokens get [n, HEADS, D], and each KV head's kept tokens and masses."""
    out, ends = np.zeros(tokens[0].shape), []
    for own, query, key, value in heads_of(tokens):
        kept, mass = [], np.zeros(len(key))

        def see(t, seen, own=own, query=query, key=key, value=value, mass=mass):
            share = weights(query[t], key, seen)
            out[t, own] = share @ value[seen]
            mass[seen] += share.sum(axis=0)

        def evict(kept, mass=mass):
            border = max(kept) + 1 - recent
            older = sorted((t for t in kept if t < border), key=lambda t: -mass[t])
            return older[:heavy] + [t for t in kept if t >= border]

        first = 0
        for length in prefills:  # all is seen, and then it is decided who stays
            new = list(range(first, first + length))
            for t in new:
                see(t, kept + new[: t - first + 1])
            first += length
            kept = evict(kept + new) if kept or new else kept
        for t in range(first, first + decoded):  # the new token takes its place first
            kept = evict([*kept, t])
            see(t, kept)
        ends.append((kept, mass))
    return out, ends


@pytest.mark.parametrize(("heavy", "recent"), [(5, 3), (1, 1), (2, 7), (13, 2)])
def test_it_keeps_the_heaviest_and_the_recent(heavy, recent):
    rng = np.random.default_rng(heavy)
    prefills, decoded = [(11, 1, 5), (3, 2, 17), (0, 4, 1)], 13
    tokens = draw(rng, [sum(part) + decoded for part in zip(*prefills, strict=True)])
    entry = H2O.create(shape(options={"heavy": heavy, "recent": recent}))
    out, entry = drive(rng, entry, tokens, prefills, decoded)
    for row, own in enumerate(tokens):
        want, ends = by_the_rule(own, [some[row] for some in prefills], decoded, heavy, recent)
        np.testing.assert_allclose(out[row], want, atol=3e-5)
        for head, (kept, mass) in enumerate(ends):
            filled = min(len(own[0]), heavy + recent)
            assert len(kept) == filled
            same_set(entry.key[row, head, :filled], own[1][kept, head])
            same_set(entry.mass[row, head, :filled], mass[kept][:, None], rtol=1e-4)


def test_a_key_that_everyone_looks_at_is_never_lost():
    rng = np.random.default_rng(3)
    tokens = draw(rng, [60])
    query, key, _ = tokens[0]
    query[...] = np.abs(query)
    key[4] = 3.0  # every query's largest logit by far
    entry = H2O.create(shape(1, 64, {"heavy": 2, "recent": 3}))
    _, entry = drive(rng, entry, tokens, [(9,)], 51)
    assert (np.asarray(entry.key) == 3.0).all(axis=-1).any(axis=-1).all()
