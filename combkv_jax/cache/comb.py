"""`comb`: recent tokens by any other policy, and the compressed history in the kept layers.

The history is shared by everyone who asks about it: decode steps donate what they change (the
recent tokens) and only borrow the rest (`split`, `join`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from combkv_jax.attention import Attended, attention, merge
from combkv_jax.cache.base import LayerCache
from combkv_jax.cache.quantize import Quantized


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunks:
    """K/V of history tokens, [B, K, N, D] (or [1, K, N, D] for all rows), as they are or both coded
    in fewer bits, of which a query sees `start <= n < end`, int32 and broadcastable to [B, T]."""

    key: jax.Array | Quantized
    value: jax.Array | Quantized
    start: jax.Array
    end: jax.Array

    def attend(self, query: jax.Array) -> Attended:
        """query [B, T, H, D] over the tokens it sees."""
        return attention(query, self.key, self.value, self.start, self.end)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Comb(LayerCache):
    """recent: the layer's recent tokens. chunks: the history, in a kept layer; the layer's gate
    decides what becomes of it. sinks: the first tokens of the history, in the other layers of the
    `lse` form; ordinary keys in front of the recent ones. nearby: the last few tokens once more, as
    a kept layer's summary of them needs it."""

    recent: LayerCache | None
    chunks: Chunks | None = None
    sinks: Chunks | None = None
    nearby: LayerCache | None = None

    # Not of `create`, but of those who make one: the newest tokens that are kept whole, and the
    # bits in which the history is kept.
    defaults = {"window": 1024, "bits": 16}
    sizes = ("window",)

    @property
    def fetched(self):
        return self.recent.fetched

    def prefill(self, query, key, value, lengths):
        return self.extend(query, key, value, lengths)

    def extend(self, query, key, value, lengths):
        attended, recent = self.recent.extend(query, key, value, lengths)
        return self._with_sinks(query, attended), dataclasses.replace(self, recent=recent)

    def expect(self, query):
        return dataclasses.replace(self, recent=self.recent.expect(query))

    def append(self, key, value):
        return dataclasses.replace(self, recent=self.recent.append(key, value))

    def attend(self, query) -> Attended:
        return self._with_sinks(query, self.recent.attend(query))

    def _with_sinks(self, query, attended) -> Attended:
        return attended if self.sinks is None else merge(attended, self.sinks.attend(query))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed(LayerCache):
    """No memory at all: the tokens of one packed batch, each seeing `start <= t < end` of it."""

    start: jax.Array  # int32 [B, T]
    end: jax.Array

    @classmethod
    def causal(cls, index: jax.Array) -> Packed:
        """Each token, standing at `index` [B, T] of its row, sees the row up to itself."""
        return cls(jnp.zeros_like(index), index + 1)

    def prefill(self, query, key, value, lengths):
        key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        return attention(query, key, value, self.start, self.end), self

    def nearby(self, tokens: int) -> Packed:
        """Where each token sees up to itself: the last `tokens` of what it sees."""
        start = jnp.maximum(self.start, self.end - tokens)
        if self.end.shape[1] > 3 * tokens:
            return Banded(start, self.end, tokens)
        return Packed(start, self.end)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Banded(Packed):
    """Packed tokens that see nothing `width` or more tokens away, such as chunks of at most that
    many: a block of `width` queries is compared with the keys of three blocks, not of all."""

    width: int = dataclasses.field(metadata={"static": True})

    def prefill(self, query, key, value, lengths):
        rows, tokens = query.shape[:2]
        blocks = -(-tokens // self.width)
        pad = blocks * self.width - tokens

        def own(x):  # [B, T, ...] -> [B * blocks, width, ...]
            x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
            return x.reshape(-1, self.width, *x.shape[2:])

        def beside(x):  # [B, T, K, D] -> [B * blocks, K, 3 * width, D]
            x = jnp.pad(x, ((0, 0), (self.width, pad + self.width), (0, 0), (0, 0)))
            x = x.reshape(rows, blocks + 2, self.width, *x.shape[2:])
            x = jnp.concatenate([x[:, :-2], x[:, 1:-1], x[:, 2:]], axis=2)
            return x.reshape(-1, *x.shape[2:]).swapaxes(1, 2)

        first = jnp.tile((jnp.arange(blocks) - 1) * self.width, rows)[:, None]
        bounds = (own(x) - first for x in (self.start, self.end))
        found = attention(own(query), beside(key), beside(value), *bounds)
        return Attended(*(x.reshape(rows, -1, *x.shape[2:])[:, :tokens] for x in found)), self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """A compressed history: what a `comb` cache borrows, ready for any number of questions.

    layers: for each decoder layer its `Chunks` (kept layer), its sinks (`Chunks`, the other
        layers of the `lse` form) or None.
    kept: for each decoder layer whether it is a kept one (static).
    count: int32 [B], tokens in each row's history.
    """

    layers: tuple[Chunks | None, ...]
    count: jax.Array
    kept: tuple[bool, ...] = dataclasses.field(metadata={"static": True})

    def entry(self, layer: int, recent: LayerCache, nearby: LayerCache | None = None) -> Comb:
        """The cache entry of a layer with this history in front of `recent`. nearby: as in Comb."""
        chunks = self.layers[layer]
        if self.kept[layer]:
            return Comb(recent, chunks, nearby=nearby)
        return Comb(recent, sinks=chunks)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """A whole model's cache: one entry a layer, and the position of each row's next token."""

    layers: tuple[LayerCache, ...]
    position: jax.Array  # int32 [B]

    def split(self) -> tuple[Cache, tuple[Comb | None, ...]]:
        """(what a step changes and may donate, what it only reads)."""
        changed = tuple(
            dataclasses.replace(e, chunks=None, sinks=None) if isinstance(e, Comb) else e
            for e in self.layers
        )
        borrowed = tuple(
            dataclasses.replace(e, recent=None, nearby=None) if isinstance(e, Comb) else None
            for e in self.layers
        )
        return dataclasses.replace(self, layers=changed), borrowed

    def join(self, borrowed: tuple[Comb | None, ...]) -> Cache:
        """The inverse of `split`."""
        layers = tuple(
            e if b is None else dataclasses.replace(b, recent=e.recent, nearby=e.nearby)
            for e, b in zip(self.layers, borrowed, strict=True)
        )
        return dataclasses.replace(self, layers=layers)
