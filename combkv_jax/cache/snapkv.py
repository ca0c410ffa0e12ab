"""`snapkv`: the end of a prompt votes for the rest of it (SnapKV, Li et al. 2024)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from combkv_jax.attention import Attended, attention, fold, mass, unfold
from combkv_jax.cache.base import CacheShape, LayerCache, line_up, take, write
from combkv_jax.errors import RequestError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SnapKV(LayerCache):
    """For each KV head `budget` tokens of the prompt, and the tokens generated since.

    The newest `window` queries vote: a token's votes are its softmax weights, summed over them and
    the query heads that read it, and averaged with those of its `kernel` nearest tokens, as in the
    authors' code. The window stays, and of the tokens before it those with most votes.

    Each prefill ends with a vote over what is kept then, generated tokens included, so that a
    prompt in several prefills never takes more room than budget and prefill together; the newest
    queries are kept for it, whatever prefill they came with. Kept tokens stand in their order; of
    those generated since the last prefill the newest stay when there is no more room.
    """

    key: jax.Array  # [B, K, S, D]
    value: jax.Array
    query: jax.Array  # [B, K, window * G, D], the oldest first
    voted: jax.Array  # int32 [B], tokens the last prefill kept
    count: jax.Array  # int32 [B], those and the tokens since
    budget: int = dataclasses.field(metadata={"static": True})
    kernel: int = dataclasses.field(metadata={"static": True})

    defaults = {"budget": 1024, "window": 32, "kernel": 5, "generated": 1024}
    sizes = ("budget",)

    @classmethod
    def create(cls, shape: CacheShape) -> SnapKV:
        """options: budget (1024 tokens, the window included), window (32 queries), kernel (5
        tokens, odd) and generated (1024 tokens, room for them)."""
        budget, window, kernel, generated = shape.settings("snapkv", **cls.defaults)
        if budget <= window:
            raise RequestError(
                f"budget of the snapkv cache is {budget}; it must be larger than its window of "
                f"{window}."
            )
        if kernel % 2 == 0:
            raise RequestError(f"kernel of the snapkv cache is {kernel}; it must be an odd number.")
        budget = min(budget, shape.capacity)
        slots = max(budget + 1, min(budget + generated, shape.capacity))
        return cls(
            shape.empty(slots),
            shape.empty(slots),
            shape.empty(window * shape.group),
            shape.counter(),
            shape.counter(),
            budget,
            kernel,
        )

    def prefill(self, query, key, value, lengths):
        slots, filled = self.key.shape[2], self._filled()
        step = jnp.arange(key.shape[1])
        place = jnp.arange(slots + key.shape[1])
        order = self._slot(jnp.maximum(self.count - slots, 0)[:, None], place)
        line_key, line_value = (
            line_up(kept, new, order, filled)
            for kept, new in ((self.key, key), (self.value, value))
        )  # [B, K, S + T, D]
        end = filled[:, None] + step + 1
        attended = attention(query, line_key, line_value, jnp.int32(0), end)

        total = filled + lengths
        queries = self._newest(query, lengths)
        chosen = self._chosen(queries, line_key, total, query.shape[2])
        fill = ((0, 0), (0, 0), (0, slots - self.budget), (0, 0))
        key, value = (jnp.pad(take(x, chosen), fill) for x in (line_key, line_value))
        count = jnp.minimum(total, self.budget)
        return attended, SnapKV(key, value, queries, count, count, self.budget, self.kernel)

    def append(self, key, value):
        place, rows = self._slot(jnp.int32(0), self.count[:, None]), jnp.arange(key.shape[0])
        return dataclasses.replace(
            self,
            key=write(self.key, key, place, rows),
            value=write(self.value, value, place, rows),
            count=self.count + 1,
        )

    def attend(self, query) -> Attended:
        return attention(query, self.key, self.value, jnp.int32(0), self._filled()[:, None])

    def extend(self, query, key, value, lengths):
        if lengths is not None:
            return self.prefill(query, key, value, lengths)
        kept = self.append(key, value)
        queries = self._newest(query, jnp.ones_like(self.voted))
        return kept.attend(query), dataclasses.replace(kept, query=queries)

    def _filled(self) -> jax.Array:
        return jnp.minimum(self.count, self.key.shape[2])

    def _slot(self, first: jax.Array, place: jax.Array) -> jax.Array:
        """The slot of the token at `place` in the order of time, where `first` generated tokens
        [B, 1] are gone: those are in a ring behind the voted ones."""
        voted = self.voted[:, None]
        return jnp.where(
            place < voted, place, voted + (first + place - voted) % (self.key.shape[2] - voted)
        )

    def _newest(self, query, lengths) -> jax.Array:
        """`self.query` moved on by the first `lengths` [B] of query [B, T, H, D]."""
        kv_heads = self.key.shape[1]
        group = query.shape[2] // kv_heads
        new = fold(query, kv_heads).astype(self.query.dtype)
        index = lengths[:, None] * group + jnp.arange(self.query.shape[2])
        return take(jnp.concatenate([self.query, new], axis=2), index)

    def _chosen(self, queries, line_key, total, heads) -> jax.Array:
        """Where in the line of `total` [B] tokens the kept ones stand: [B, K, budget], in order,
        past the line where there are not so many."""
        queries = unfold(queries, heads)  # [B, window, H, D]
        window, length = queries.shape[1], line_key.shape[2]
        end = total[:, None] - window + 1 + jnp.arange(window)  # none, where there are fewer
        lse = attention(queries, line_key, line_key, jnp.int32(0), end).lse
        votes = mass(queries, line_key, lse, jnp.int32(0), end)  # [B, K, S + T]
        place = jnp.arange(length)
        border = total[:, None, None] - window
        votes = jnp.where(place < border, votes, 0.0)
        size = (1, 1, self.kernel)
        votes = jax.lax.reduce_window(votes, 0.0, jax.lax.add, size, (1, 1, 1), "SAME")
        rank = jnp.where(place < border, votes, jnp.inf)
        rank = jnp.where(place < total[:, None, None], rank, -jnp.inf)
        best, chosen = jax.lax.top_k(rank, self.budget)
        return jnp.sort(jnp.where(jnp.isneginf(best), length, chosen), axis=2)
