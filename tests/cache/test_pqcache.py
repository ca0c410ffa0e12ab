"""PQCache: its codes are the nearest centroids, and it fetches by them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax.cache import PQCache, nbytes, pqcache
from tests.cache.plain import DIM, KV_HEADS, draw, drive, heads_of, rounded, shape, weights


def check_codes(key, codes, centroids, learned):
    """The codes [n, parts] of a head's keys [n, D] are the nearest centroids [C, D], and these the
    means of those of the first `learned` keys that have them."""
    for part, channels in enumerate(np.split(np.arange(key.shape[1]), codes.shape[1])):
        own, center = key[:, channels].astype(np.float64), centroids[:, channels]
        distance = ((own[:, None] - center) ** 2).sum(axis=2)  # [n, C]
        got = distance[np.arange(len(own)), codes[:, part]]
        np.testing.assert_allclose(got, distance.min(axis=1), atol=1e-5)
        for number in np.unique(codes[:learned, part]):
            mean = own[:learned][codes[:learned, part] == number].mean(axis=0)
            np.testing.assert_allclose(center[number], mean, atol=1e-5)


@pytest.mark.parametrize(("parts", "bits", "dtype"), [(3, 2, jnp.float32), (2, 3, jnp.bfloat16)])
def test_it_fetches_by_the_nearest_centroids_in_every_turn(parts, bits, dtype, monkeypatch):
    monkeypatch.setattr(pqcache, "BLOCK", 11)  # several, of which the last begins before its turn
    rng = np.random.default_rng(parts)
    first, window, top = 2, 3, 4
    options = {"first": first, "window": window, "top": top, "parts": parts, "bits": bits}
    tokens = [[rounded(x, dtype) for x in own] for own in draw(rng, [37, 17, 56])]
    entry = PQCache.create(shape(3, 64, options | {"iterations": 40}, dtype))
    place = np.zeros(3, int)
    # Learned from 19, 4 and 24 tokens, and in the second turn only by the row that has doubled.
    for prefills, learned in [
        ([(19, 1, 5), (2, 3, 19)], [19, 4, 24]),
        ([(3, 0, 19)], [19, 4, 49]),
    ]:
        rest = [[x[at:] for x in own] for own, at in zip(tokens, place, strict=True)]
        out, entry = drive(rng, entry, rest, prefills, 6, dtype)
        place += [len(own) for own in out]
        assert entry.learned.tolist() == learned
        codes, centroids = np.asarray(entry.codes), np.asarray(entry.centroids)
        for row, n in enumerate(place):
            for head, (own, query, key, value) in enumerate(heads_of(tokens[row])):
                code, center = codes[row, head, :n], centroids[row, head]
                check_codes(key[:n], code, center, learned[row])
                coded = np.take_along_axis(center, np.repeat(code, DIM // parts, axis=1), axis=0)
                between = np.arange(first, max(n - window, first))
                # Summed key by key, so that equal codes have equal scores: the older one is taken.
                score = (coded[between] * query[n - 1].mean(axis=0)).sum(axis=1)
                chosen = between[np.argsort(-score, kind="stable")[:top]]
                seen = np.array([*range(min(first, n - window)), *chosen, *range(n - window, n)])
                want = weights(query[n - 1], key, seen) @ value[seen]
                close = {"atol": 3e-5} if dtype == jnp.float32 else {"atol": 0.04, "rtol": 0.02}
                np.testing.assert_allclose(out[row][-1, own], want, **close)


def test_the_device_holds_what_the_formula_says_and_the_host_the_rest():
    rows, capacity, first, window, parts, bits = 3, 4096, 5, 7, 3, 5
    options = {"first": first, "window": window, "parts": parts, "bits": bits}
    entry = PQCache.create(shape(rows, capacity, options, jnp.bfloat16))
    number = rows * KV_HEADS * DIM * 2  # bytes of one key or value in every row
    codes, centroids = capacity * parts, 2**bits * DIM * 4
    device = 2 * (first + window) * number + rows * KV_HEADS * (codes + centroids) + 3 * rows * 4
    assert nbytes(entry) == {"device": device, "host": 2 * capacity * number}
