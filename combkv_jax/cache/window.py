"""`window`: the first tokens and the recent ones (StreamingLLM, Xiao et al. 2023)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from combkv_jax.attention import Attended, attention, merge
from combkv_jax.cache.base import CacheShape, LayerCache, newest, take, write
from combkv_jax.layers import rotate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window(LayerCache):
    """The first S tokens and the last W ones; token i lies in ring slot i mod W.

    The query looks at first tokens that have left the window as if the tokens between were gone,
    as the paper does by renumbering: distances never grow past S + W. Nothing stored is rotated
    anew for that; the query is.
    """

    first_key: jax.Array  # [B, K, S, D]
    first_value: jax.Array
    key: jax.Array  # [B, K, W, D]
    value: jax.Array
    count: jax.Array  # int32 [B], tokens so far
    rotary: jax.Array  # [D / 2]

    defaults = {"first": 4, "window": 1024}
    sizes, beside = ("window",), ("first",)

    @classmethod
    def create(cls, shape: CacheShape) -> Window:
        """options: first (4 tokens, as in the paper) and window (the 1024 newest)."""
        first, window = shape.settings("window", least={"first": 0}, **cls.defaults)
        return cls(
            shape.empty(first),
            shape.empty(first),
            shape.empty(window),
            shape.empty(window),
            shape.counter(),
            # A copy: a donated cache must not hold one array twice.
            jnp.array(shape.rotary, device=shape.small),
        )

    def prefill(self, query, key, value, lengths):
        window = self.key.shape[2]
        step = jnp.arange(key.shape[1])
        index = self.count[:, None] + step  # [B, T]
        place = jnp.where(step < lengths[:, None], index, self.first_key.shape[2])
        kept = self._write_first(key, value, place)
        # The ring put in order (slot i of W holds token count - W + i), then the new tokens.
        order = (self.count[:, None] + jnp.arange(window)) % window
        older = [take(x, order) for x in (self.key, self.value)]
        line_key, line_value = (
            jnp.concatenate([a, b.swapaxes(1, 2).astype(a.dtype)], axis=2)
            for a, b in zip(older, (key, value), strict=True)
        )  # [B, K, W + T, D]
        oldest = jnp.maximum(step + 1, window - self.count[:, None])
        recent = attention(query, line_key, line_value, oldest, (window + step + 1)[None])
        attended = merge(recent, kept._attend_first(query, index))
        count = self.count + lengths
        # Where in the line each slot's newest token stands.
        source = newest(count, window) - self.count[:, None] + window
        kept = dataclasses.replace(
            kept, key=take(line_key, source), value=take(line_value, source), count=count
        )
        return attended, kept

    def append(self, key, value):
        kept = self._write_first(key, value, self.count[:, None])
        place = (self.count % self.key.shape[2])[:, None]
        rows = jnp.arange(key.shape[0])
        return dataclasses.replace(
            kept,
            key=write(self.key, key, place, rows),
            value=write(self.value, value, place, rows),
            count=self.count + 1,
        )

    def attend(self, query) -> Attended:
        filled = jnp.minimum(self.count, self.key.shape[2])[:, None]
        recent = attention(query, self.key, self.value, jnp.int32(0), filled)
        return merge(recent, self._attend_first(query, self.count[:, None] - 1))

    def _write_first(self, key, value, place) -> Window:
        rows = jnp.arange(key.shape[0])
        return dataclasses.replace(
            self,
            first_key=write(self.first_key, key, place, rows),
            first_value=write(self.first_value, value, place, rows),
        )

    def _attend_first(self, query, index) -> Attended:
        """The queries of tokens `index` [B, T] over first tokens that have left the window."""
        window, first = self.key.shape[2], self.first_key.shape[2]
        closer = jnp.minimum(first + window - 1 - index, 0).astype(jnp.float32)
        angle = closer[..., None] * self.rotary
        query = rotate(query, (jnp.cos(angle), jnp.sin(angle)))
        gone = jnp.clip(index + 1 - window, 0, first)
        return attention(query, self.first_key, self.first_value, jnp.int32(0), gone)
