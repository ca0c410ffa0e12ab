"""`tailor`: some layers in a few bits, and of the others what a query asks for (TailorKV, Yao et
al. 2025)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from combkv_jax.attention import Attended, attention, fold, merge
from combkv_jax.cache import host
from combkv_jax.cache.base import CacheShape, LayerCache, newest, take, write
from combkv_jax.cache.quantize import check_bits
from combkv_jax.cache.quantized import QuantizedTokens


class Ahead(NamedTuple):
    """What was fetched for a token before its layer runs: for each KV head the numbers of a few
    channels, int32 [B, K, C], and these channels of all keys, [B, K, C, S]."""

    channel: jax.Array
    keys: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tailor(LayerCache):
    """A layer whose queries look at few tokens: all are in host memory, and a decoded query fetches
    the `top` that matter most to it. The device holds the first tokens, the last `window` of the
    prompt and those generated since; the query sees these and what it fetched.

    Which tokens matter is told from a few channels of the keys, which the host also keeps channel
    by channel: those where the query is large, and any key is. They are fetched while the layer
    before still runs, for a query made from that layer's input (`expect`), because neighbouring
    layers have much the same input. What is compared then is the true query, the mean of those that
    share the KV head.

    Each prefill attends to everything and begins anew: the last tokens of it are the window, and
    what was generated before can be fetched. When more is generated than there is room for, the
    oldest of it can be fetched, too. The newest token reaches the host when the next one comes.
    """

    first_key: jax.Array  # [B, K, first, D]
    first_value: jax.Array
    key: jax.Array  # [B, K, window + generated, D]: token i in slot (i - start) mod the slots
    value: jax.Array
    largest: jax.Array  # [B, K, 1, D], of every channel's absolute values
    host_key: jax.Array  # [B, K, capacity, D]
    host_value: jax.Array
    host_channels: jax.Array  # [B, K, D, capacity], the keys again: a channel is one line
    start: jax.Array  # int32 [B], the first token of the window
    count: jax.Array  # int32 [B], tokens so far
    window: int = dataclasses.field(metadata={"static": True})
    top: int = dataclasses.field(metadata={"static": True})
    channels: int = dataclasses.field(metadata={"static": True})
    ahead: Ahead | None = None  # between `expect` and `extend`

    @classmethod
    def create(cls, shape: CacheShape) -> LayerCache:
        """options: quantized (layers, (0,) as measured for Llama-3.1-8B), which hold all tokens in
        so many bits (2); of the others first (64 tokens), window (64), top (896 tokens fetched),
        channels (12) and generated (1024 tokens, room for them)."""
        quantized, bits, first, window, top, channels, generated = shape.settings(
            "tailor",
            quantized=(0,),
            bits=2,
            first=64,
            window=64,
            top=896,
            channels=12,
            generated=1024,
        )
        check_bits(bits)
        if shape.layer in quantized:
            return QuantizedTokens.create(dataclasses.replace(shape, options={"bits": bits}))
        recent = min(window + generated, shape.capacity)
        return cls(
            shape.empty(first),
            shape.empty(first),
            shape.empty(recent),
            shape.empty(recent),
            shape.empty(1),
            host.empty(shape, shape.capacity),
            host.empty(shape, shape.capacity),
            host.empty(shape, shape.head_dim, shape.capacity),
            shape.counter(),
            shape.counter(),
            min(window, recent),
            min(top, shape.capacity),
            min(channels, shape.head_dim),
        )

    def prefill(self, query, key, value, lengths):
        step = jnp.arange(key.shape[1])
        index = self.count[:, None] + step  # [B, T]
        real = step < lengths[:, None]
        rows = jnp.arange(key.shape[0])
        new = [x.swapaxes(1, 2).astype(self.key.dtype) for x in (key, value)]  # [B, K, T, D]
        kept = self._settled()._to_host(*new, self.count, lengths)
        attended = host.attend(query, kept.host_key, kept.host_value, index + 1)

        count = self.count + lengths
        start = jnp.where(lengths > 0, jnp.maximum(count - self.window, 0), self.start)
        ring = self.key.shape[2]
        token = start[:, None] + newest(count - start, ring)  # that each slot is to hold
        before = self.count[:, None]
        source = jnp.where(token < before, self._slot(token), ring + token - before)
        key_line, value_line = (
            jnp.concatenate([old, x], axis=2)
            for old, x in zip((self.key, self.value), new, strict=True)
        )  # [B, K, ring + T, D]
        place = jnp.where(real, index, self.first_key.shape[2])
        largest = jnp.max(jnp.where(real[:, None, :, None], jnp.abs(new[0]), 0), axis=2)
        return attended, dataclasses.replace(
            kept,
            first_key=write(self.first_key, key, place, rows),
            first_value=write(self.first_value, value, place, rows),
            key=take(key_line, source),
            value=take(value_line, source),
            largest=jnp.maximum(self.largest, largest[:, :, None]),
            start=start,
            count=count,
        )

    def expect(self, query: Callable[[], jax.Array]) -> Tailor:
        settled = self._settled()
        return dataclasses.replace(settled, ahead=settled._fetch(query()))

    def append(self, key, value):
        return self._settled()._with(key, value)

    def attend(self, query) -> Attended:
        chosen, found = self.choose(query)
        fetched = [host.take(x, chosen) for x in (self.host_key, self.host_value)]
        oldest, first = self._oldest(), self.first_key.shape[2]
        held = jnp.minimum(self.count - self.start, self.key.shape[2])
        sources = (
            (self.key, self.value, held),
            (self.first_key, self.first_value, jnp.minimum(oldest, first)),
            (*fetched, found),
        )
        parts = (attention(query, *kv, jnp.int32(0), end[:, None]) for *kv, end in sources)
        return functools.reduce(merge, parts)

    def extend(self, query, key, value, lengths):
        if lengths is not None:
            return self.prefill(query, key, value, lengths)
        # Without a layer before it there is nothing to tell the query from but itself.
        entry = self.expect(lambda: query) if self.ahead is None else self
        entry = entry._with(key, value)
        return entry.attend(query), dataclasses.replace(entry, ahead=None)

    def choose(self, query: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The tokens that query [B, 1, H, D] fetches, int32 [B, K, top], the best first, and how
        many of them count, [B]."""
        channel, keys = self._fetch(query) if self.ahead is None else self.ahead
        mean = jnp.take_along_axis(self._mean(query), channel, axis=2)  # [B, K, C]
        score = jnp.sum(mean[..., None] * keys.astype(jnp.float32), axis=2)  # [B, K, S]
        place, first, oldest = jnp.arange(keys.shape[3]), self.first_key.shape[2], self._oldest()
        between = (place >= first) & (place < oldest[:, None])
        score = jnp.where(between[:, None], score, -jnp.inf)
        return jax.lax.top_k(score, self.top)[1], jnp.clip(oldest - first, 0, self.top)

    def _fetch(self, query: jax.Array) -> Ahead:
        """The channels in which query [B, 1, H, D] and the keys are large."""
        weight = jnp.abs(self._mean(query)) * self.largest[:, :, 0].astype(jnp.float32)
        channel = jax.lax.top_k(weight, self.channels)[1]
        return Ahead(channel, host.take(self.host_channels, channel))

    def _mean(self, query: jax.Array) -> jax.Array:
        """Of the query heads that share a KV head: [B, 1, H, D] -> float32 [B, K, D]."""
        return jnp.mean(fold(query, self.key.shape[1]), axis=2, dtype=jnp.float32)

    def _oldest(self) -> jax.Array:
        """The first token of those held in full up to the newest, int32 [B]."""
        return jnp.maximum(self.start, self.count - self.key.shape[2])

    def _slot(self, token: jax.Array) -> jax.Array:
        return (token - self.start[:, None]) % self.key.shape[2]  # [B, N]

    def _with(self, key: jax.Array, value: jax.Array) -> Tailor:
        """One more token [B, 1, K, D], on the device alone."""
        rows, index = jnp.arange(key.shape[0]), self.count[:, None]
        place = self._slot(index)
        size = jnp.abs(key.swapaxes(1, 2)).astype(self.largest.dtype)
        return dataclasses.replace(
            self,
            first_key=write(self.first_key, key, index, rows),
            first_value=write(self.first_value, value, index, rows),
            key=write(self.key, key, place, rows),
            value=write(self.value, value, place, rows),
            largest=jnp.maximum(self.largest, size),
            count=self.count + 1,
        )

    def _settled(self) -> Tailor:
        """With the newest token on the host, too. At the begin of a step rather than with the token
        itself: what the step reads must not be overwritten behind it (see host.py)."""
        place = self._slot(self.count[:, None] - 1)
        key, value = (take(x, place) for x in (self.key, self.value))  # [B, K, 1, D]
        return self._to_host(key, value, self.count - 1, jnp.minimum(self.count, 1))

    def _to_host(self, key, value, first, lengths) -> Tailor:
        """The first `lengths` [B] of key and value [B, K, T, D] on the host, from token `first`."""
        return dataclasses.replace(
            self,
            host_key=host.write(self.host_key, key, first, lengths),
            host_value=host.write(self.host_value, value, first, lengths),
            host_channels=host.write(
                self.host_channels, key.swapaxes(2, 3), first, lengths, axis=3
            ),
        )
