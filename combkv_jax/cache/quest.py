"""`quest`: every token is kept, and a query reads the pages that may matter (Tang et al. 2024)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from combkv_jax.attention import Attended, attention, fold
from combkv_jax.cache.base import CacheShape, LayerCache
from combkv_jax.cache.full import Full


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quest(LayerCache):
    """All tokens in pages, and for each page the least and the largest of every key channel.

    Together they bound every logit of a page from above; a decoded query reads the pages with the
    largest bounds, and always the newest page. A KV head's pages are chosen once for the query
    heads that read it, by the largest of their bounds. A prefill reads everything, as in the paper.
    (There the first two layers read everything always; here all layers are alike.)
    """

    tokens: Full
    low: jax.Array  # [B, K, pages, D]
    high: jax.Array
    pages: int = dataclasses.field(metadata={"static": True})  # read by a query

    defaults = {"budget": 1024, "page": 16}
    sizes, unit = ("budget",), "page"

    @classmethod
    def create(cls, shape: CacheShape) -> Quest:
        """options: budget (1024 tokens read, in whole pages) and page (16 tokens)."""
        budget, page = shape.settings("quest", **cls.defaults)
        pages = -(-shape.capacity // page)
        return cls(
            Full.create(dataclasses.replace(shape, capacity=pages * page)),
            shape.empty(pages, fill=jnp.inf),
            shape.empty(pages, fill=-jnp.inf),
            min(-(-budget // page), pages),
        )

    def prefill(self, query, key, value, lengths):
        attended, tokens = self.tokens.prefill(query, key, value, lengths)
        return attended, self._with(tokens, key, lengths)

    def append(self, key, value):
        return self._with(self.tokens.append(key, value), key, jnp.ones_like(self.tokens.count))

    def attend(self, query) -> Attended:
        chosen, count = self.choose(query)
        batch, heads, total, dim = self.low.shape
        index = jnp.minimum(chosen, total - 1)[..., None]

        def read(x):  # the chosen pages alone, [B, K, pages * page, D]
            x = x.reshape(batch, heads, total, -1)
            return jnp.take_along_axis(x, index, axis=2).reshape(batch, heads, -1, dim)

        key, value = read(self.tokens.key), read(self.tokens.value)
        return attention(query, key, value, jnp.int32(0), count[:, None])

    def bound(self, query: jax.Array) -> jax.Array:
        """What no logit of a page exceeds, before scaling, for any query head of a KV head: query
        [B, 1, H, D] -> float32 [B, K, pages]. Of an empty page it means nothing."""
        query = fold(query, self.low.shape[1])  # [B, K, G, D]
        # Per channel the larger of q * low and q * high: one of them, by the sign of q.
        up, down = (
            jnp.einsum("bkgd,bkpd->bkgp", part, side, preferred_element_type=jnp.float32)
            for part, side in (
                (jnp.maximum(query, 0), self.high),
                (jnp.minimum(query, 0), self.low),
            )
        )
        return jnp.max(up + down, axis=2)

    def choose(self, query: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The pages a query reads, int32 [B, K, pages], in their order and then, where a row has
        fewer, numbers past the last one; and how many of their tokens are real, [B]."""
        total = self.low.shape[2]
        count = self.tokens.count
        newest = (count - 1) // self._page()
        place, newest = jnp.arange(total), newest[:, None, None]
        rank = jnp.where(place < newest, self.bound(query), -jnp.inf)
        rank = jnp.where(place == newest, jnp.inf, rank)
        best, chosen = jax.lax.top_k(rank, self.pages)
        chosen = jnp.sort(jnp.where(jnp.isneginf(best), total, chosen), axis=2)
        gone = jnp.maximum(newest[:, 0, 0] + 1 - self.pages, 0)  # whole pages that are not read
        return chosen, count - gone * self._page()

    def _page(self) -> int:
        return self.tokens.key.shape[2] // self.low.shape[2]

    def _with(self, tokens: Full, key: jax.Array, lengths: jax.Array) -> Quest:
        """`tokens`, which has grown by the first `lengths` [B] of key [B, T, K, D]."""
        step = jnp.arange(key.shape[1])
        page = (self.tokens.count[:, None] + step) // self._page()
        page = jnp.where(step < lengths[:, None], page, self.low.shape[2])  # padding: dropped
        rows, heads = jnp.arange(key.shape[0]), jnp.arange(key.shape[2])
        place = (rows[:, None, None], heads[None, :, None], page[:, None, :])
        key = key.swapaxes(1, 2).astype(self.low.dtype)
        return dataclasses.replace(
            self,
            tokens=tokens,
            low=self.low.at[place].min(key, mode="drop"),
            high=self.high.at[place].max(key, mode="drop"),
        )
