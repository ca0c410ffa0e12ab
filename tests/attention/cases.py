"""One list of cases for all implementations of attention, and a float64 softmax to compare with."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """batch, queries, query heads, KV heads, keys, head_dim; splits: as flash.attention has it.

    sees: "some" (any interval, some empty, the first query everything), "causal" (the queries stand
    at the end of a row of its own length), "prefix" (a decode step over ragged rows).
    """

    batch: int
    queries: int
    heads: int
    kv_heads: int
    keys: int
    dim: int
    dtype: str = "bfloat16"
    sees: str = "some"
    splits: int | None = None

    def draw(self, seed: int = 0):
        """query, key, value, start, end."""
        rng = np.random.default_rng(seed + self.keys)
        query = rng.normal(size=(self.batch, self.queries, self.heads, self.dim)) * 2
        key, value = rng.normal(size=(2, self.batch, self.kv_heads, self.keys, self.dim))
        return *(jnp.asarray(x, self.dtype) for x in (query, key, value)), *self._bounds(rng)

    def _bounds(self, rng):
        shape = (self.batch, self.queries)
        if self.sees == "some":
            start = rng.integers(0, self.keys, shape)
            end = np.minimum(start + rng.integers(0, self.keys + 1, shape), self.keys)
            end[:, -1] = start[:, -1]
            start[:, 0], end[:, 0] = 0, self.keys
        else:
            fewest = self.queries if self.sees == "causal" else 0
            count = rng.integers(fewest, self.keys + 1, (self.batch, 1))
            start = np.zeros(shape, int)
            behind = np.arange(self.queries)[::-1] if self.sees == "causal" else 0
            end = np.broadcast_to(count - behind, shape)
        return jnp.asarray(start, jnp.int32), jnp.asarray(end, jnp.int32)


CASES = [
    Case(2, 1, 8, 2, 264, 64, sees="prefix", splits=3),
    Case(1, 3, 3, 1, 328, 128, "float16"),  # more steps than are in flight
    Case(2, 37, 4, 2, 136, 64, sees="causal"),
]


def expected(query, key, value, start, end):
    """out and lse, float64, query by query."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, queries, heads, dim = query.shape
    group = heads // key.shape[1]
    out, lse = np.zeros(query.shape), np.full((batch, queries, heads), -np.inf)
    for b, t, h in np.ndindex(batch, queries, heads):
        seen = slice(int(start[b, t]), int(end[b, t]))
        logits = key[b, h // group, seen] @ query[b, t, h] * dim**-0.5
        if logits.size:
            weights = np.exp(logits - logits.max())
            out[b, t, h] = weights @ value[b, h // group, seen] / weights.sum()
            lse[b, t, h] = logits.max() + np.log(weights.sum())
    return out, lse
