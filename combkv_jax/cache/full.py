"""`full`: every recent token is kept."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from combkv_jax.attention import Attended, attention
from combkv_jax.cache.base import CacheShape, LayerCache, write


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Full(LayerCache):
    """Key and value [B, K, capacity, D]; row b holds its first `count[b]` tokens."""

    key: jax.Array
    value: jax.Array
    count: jax.Array  # int32 [B]

    @classmethod
    def create(cls, shape: CacheShape) -> Full:
        return cls(
            shape.empty(shape.capacity),
            shape.empty(shape.capacity),
            shape.counter(),
        )

    def prefill(self, query, key, value, lengths):
        step = jnp.arange(key.shape[1])
        index = self.count[:, None] + step
        place = jnp.where(step < lengths[:, None], index, self.key.shape[2])
        kept = self._write(key, value, place, self.count + lengths)
        return attention(query, kept.key, kept.value, jnp.int32(0), index + 1), kept

    def append(self, key, value):
        return self._write(key, value, self.count[:, None], self.count + 1)

    def attend(self, query) -> Attended:
        return attention(query, self.key, self.value, jnp.int32(0), self.count[:, None])

    def _write(self, key, value, place, count) -> Full:
        rows = jnp.arange(key.shape[0])
        return Full(write(self.key, key, place, rows), write(self.value, value, place, rows), count)
