"""Quest: its bound is one, it reads the pages with the largest, and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax.cache import Quest
from tests.cache.plain import GROUP, HEADS, KV_HEADS, draw, drive, shape, weights


@pytest.mark.parametrize(("page", "budget"), [(4, 12), (5, 5), (1, 3), (7, 20)])
def test_it_reads_the_pages_with_the_largest_bounds(page, budget):
    rng = np.random.default_rng(page)
    prefills = [(11, 1, 6), (8, 3, 19)]
    tokens = draw(rng, [sum(part) + 5 for part in zip(*prefills, strict=True)])
    entry = Quest.create(shape(options={"page": page, "budget": budget}))
    before = [tuple(x[:-1] for x in own) for own in tokens]
    _, entry = drive(rng, entry, before, prefills, 4)
    last = [tuple(x[-1:] for x in own) for own in tokens]
    out, entry = drive(rng, entry, last, [], 1)
    query = jnp.asarray([own[0] for own in last])
    bound = np.asarray(entry.bound(query))
    chosen, count = (np.asarray(x) for x in entry.choose(query))
    most = -(-budget // page)
    for row, (queries, key, value) in enumerate(tokens):
        n = len(key)
        pages = -(-n // page)
        for head in range(KV_HEADS):
            own = slice(head * GROUP, (head + 1) * GROUP)
            logits = queries[-1, own] @ key[:, head].T  # [G, n]
            for i in range(pages):
                assert bound[row, head, i] >= logits[:, i * page : (i + 1) * page].max() - 1e-5
            best = np.argsort(-bound[row, head, : pages - 1])[: most - 1]
            want = [*sorted(best), pages - 1]
            got = chosen[row, head]
            np.testing.assert_array_equal(got[: len(want)], want)
            assert (got[len(want) :] >= entry.low.shape[2]).all()
            seen = [t for i in want for t in range(i * page, min(n, (i + 1) * page))]
            assert count[row] == len(seen)
            share = weights(queries[-1, own], key[:, head], seen)
            np.testing.assert_allclose(out[row][0, own], share @ value[seen, head], atol=2e-5)


def test_a_bound_is_reached_by_the_key_it_belongs_to():
    """A page of one token has a bound that is its logit."""
    rng = np.random.default_rng(11)
    tokens = draw(rng, [13])
    _, entry = drive(rng, Quest.create(shape(1, 16, {"page": 1})), tokens, [(13,)])
    query = rng.normal(size=(1, 1, HEADS, tokens[0][0].shape[-1])).astype(np.float32)
    logits = np.einsum("kgd,nkd->kgn", query[0, 0].reshape(KV_HEADS, GROUP, -1), tokens[0][1]).max(
        axis=1
    )
    np.testing.assert_allclose(entry.bound(jnp.asarray(query))[0, :, :13], logits, atol=1e-5)


@pytest.mark.optimized
def test_a_decoded_query_reads_its_pages_and_not_the_cache():
    settings = shape(1, 2**16, {"budget": 64})
    entry = jax.eval_shape(lambda: Quest.create(settings))
    query = jax.ShapeDtypeStruct((1, 1, HEADS, settings.head_dim), jnp.float32)
    compiled = jax.jit(lambda e, q: e.attend(q)).lower(entry, query).compile()
    tokens = entry.tokens.key
    assert compiled.memory_analysis().temp_size_in_bytes < tokens.size * 4 / 4
