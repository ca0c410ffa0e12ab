"""What `tailor`, `infllm` and `pqcache` share: all tokens on the host, and on the device the first,
the newest, and what a query fetches."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp

from combkv_jax.attention import Attended, attention, fold, merge
from combkv_jax.cache import host
from combkv_jax.cache.base import CacheShape, LayerCache, line_up, newest, take, write


@dataclasses.dataclass(frozen=True)
class Offloaded(LayerCache):
    """A layer whose tokens are all in host memory. The device holds the first of them and, in a
    ring, the newest; a decoded query sees these and what it fetches of the others. Which those are,
    a policy says (`choose`).

    A prefill attends to everything. The newest token reaches the host when the next one comes.
    """

    first_key: jax.Array  # [B, K, first, D]
    first_value: jax.Array
    key: jax.Array  # [B, K, slots, D]: token i in slot (i - start) mod slots
    value: jax.Array
    host_key: jax.Array  # [B, K, capacity, D]
    host_value: jax.Array
    start: jax.Array  # int32 [B], the first token that the ring has held
    count: jax.Array  # int32 [B], tokens so far

    @classmethod
    def empty(cls, shape: CacheShape, first: int, slots: int, **own: Any) -> Self:
        """Room for `first` tokens and a ring of `slots`, and with the policy's own fields."""
        return cls(
            *(shape.empty(size) for size in (first, first, slots, slots)),
            *(host.empty(shape, shape.capacity) for _ in "kv"),
            shape.counter(),
            shape.counter(),
            **own,
        )

    def choose(self, query: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The tokens that query [B, 1, H, D] fetches, int32 [B, K, N], the best first, and how many
        of them count, [B]. They lie behind the first ones and before `_oldest`."""
        raise NotImplementedError

    def _fetches(self) -> int:
        """How many tokens of each KV head those are, at most."""
        raise NotImplementedError

    @property
    def fetched(self):
        batch, heads, slots, dim = self.key.shape
        return 2 * self._fetches() * batch * heads * dim * self.key.dtype.itemsize

    def prefill(self, query, key, value, lengths):
        step = jnp.arange(key.shape[1])
        index = self.count[:, None] + step  # [B, T]
        new = (x.swapaxes(1, 2) for x in (key, value))
        kept = self._settled()._to_host(*new, self.count, lengths)
        attended = host.attend(query, kept.host_key, kept.host_value, index + 1)
        start, rows = self._begin(lengths), jnp.arange(key.shape[0])
        place = jnp.where(step < lengths[:, None], index, self.first_key.shape[2])
        return attended, dataclasses.replace(
            kept,
            first_key=write(self.first_key, key, place, rows),
            first_value=write(self.first_value, value, place, rows),
            key=self._ring(self._line(self.key, key), start, lengths),
            value=self._ring(self._line(self.value, value), start, lengths),
            start=start,
            count=self.count + lengths,
        )

    def append(self, key, value):
        return self._settled()._with(key, value)

    def attend(self, query) -> Attended:
        chosen, found = self.choose(query)
        fetched = [host.take(x, chosen) for x in (self.host_key, self.host_value)]
        first = jnp.minimum(self._oldest(), self.first_key.shape[2])
        sources = ((self.first_key, self.first_value, first), (*fetched, found))
        parts = (attention(query, *kv, jnp.int32(0), end[:, None]) for *kv, end in sources)
        return functools.reduce(merge, parts, self._attend_ring(query))

    def _attend_ring(self, query: jax.Array) -> Attended:
        held = self._held()[:, None]
        return attention(query, self.key, self.value, jnp.int32(0), held)

    def _best(self, score: jax.Array, top: int) -> tuple[jax.Array, jax.Array]:
        """What `choose` gives where every token has a score, [B, K, capacity]."""
        place, first, oldest = jnp.arange(score.shape[2]), self.first_key.shape[2], self._oldest()
        between = (place >= first) & (place < oldest[:, None])
        score = jnp.where(between[:, None], score, -jnp.inf)
        return jax.lax.top_k(score, top)[1], jnp.clip(oldest - first, 0, top)

    def _mean(self, query: jax.Array) -> jax.Array:
        """Of the query heads that share a KV head: [B, 1, H, D] -> float32 [B, K, D]."""
        return jnp.mean(fold(query, self.key.shape[1]), axis=2, dtype=jnp.float32)

    def _held(self) -> jax.Array:
        """Tokens in the ring, int32 [B]."""
        return jnp.minimum(self.count - self.start, self.key.shape[2])

    def _oldest(self) -> jax.Array:
        """The first token of those that every query sees up to the newest, int32 [B]."""
        return self.count - self._held()

    def _slot(self, token: jax.Array) -> jax.Array:
        return (token - self.start[:, None]) % self.key.shape[2]  # [B, N]

    def _begin(self, lengths: jax.Array) -> jax.Array:
        """`start` after a prefill of `lengths` [B] tokens."""
        return self.start

    def _line(self, kept: jax.Array, new: jax.Array) -> jax.Array:
        """The ring `kept` [B, K, slots, N] in the order of time and behind it new [B, T, K, N]:
        [B, K, slots + T, N]. What stands where, `_place` says."""
        held = self._held()
        token = (self.count - held)[:, None] + jnp.arange(kept.shape[2] + new.shape[1])
        return line_up(kept, new, self._slot(token), held)

    def _place(self, token: jax.Array) -> jax.Array:
        """Where in such a line each token [B, N] stands, past its ends where it is not there."""
        return token - (self.count - self._held())[:, None]

    def _ring(self, line: jax.Array, start: jax.Array, lengths: jax.Array) -> jax.Array:
        """Of such a line the ring [B, K, slots, N] after `lengths` [B] more tokens."""
        token = newest(self.count + lengths - start, self.key.shape[2])
        return take(line, self._place(start[:, None] + token))

    def _with(self, key: jax.Array, value: jax.Array) -> Self:
        """One more token [B, 1, K, D], on the device alone."""
        rows, index = jnp.arange(key.shape[0]), self.count[:, None]
        place = self._slot(index)
        return dataclasses.replace(
            self,
            first_key=write(self.first_key, key, index, rows),
            first_value=write(self.first_value, value, index, rows),
            key=write(self.key, key, place, rows),
            value=write(self.value, value, place, rows),
            count=self.count + 1,
        )

    def _settled(self) -> Self:
        """With the newest token on the host, too. At the begin of a step rather than with the token
        itself: what the step reads must not be overwritten behind it (see host.py)."""
        place = self._slot(self.count[:, None] - 1)
        key, value = (take(x, place) for x in (self.key, self.value))  # [B, K, 1, D]
        return self._to_host(key, value, self.count - 1, jnp.minimum(self.count, 1))

    def _to_host(self, key, value, first, lengths) -> Self:
        """The first `lengths` [B] of key and value [B, K, T, D] on the host, from token `first`."""
        return dataclasses.replace(
            self,
            host_key=host.write(self.host_key, key, first, lengths),
            host_value=host.write(self.host_value, value, first, lengths),
        )
