"""`tailor`: some layers in a few bits, and of the others what a query asks for (TailorKV, Yao et
al. 2025)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from combkv_jax.cache import host
from combkv_jax.cache.base import CacheShape, LayerCache
from combkv_jax.cache.offloaded import Offloaded
from combkv_jax.cache.quantize import check_bits
from combkv_jax.cache.quantized import QuantizedTokens


class Ahead(NamedTuple):
    """What was fetched for a token before its layer runs: for each KV head the numbers of a few
    channels, int32 [B, K, C], and these channels of all keys, [B, K, C, S]."""

    channel: jax.Array
    keys: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tailor(Offloaded):
    """A layer whose queries look at few tokens: all are in host memory, and a decoded query fetches
    the `top` that matter most to it. The device holds the first tokens, the last `window` of the
    prompt and those generated since; the query sees these and what it fetched.

    Which tokens matter is told from a few channels of the keys, which the host also keeps channel
    by channel: those where the query is large, and any key is. They are fetched while the layer
    before still runs, for a query made from that layer's input (`expect`), because neighbouring
    layers have much the same input. What is compared then is the true query, the mean of those that
    share the KV head.

    Each prefill begins anew: the last tokens of it are the window, and what was generated before
    can be fetched. When more is generated than there is room for, the oldest of it can be fetched,
    too.
    """

    largest: jax.Array  # [B, K, 1, D], of every channel's absolute values
    host_channels: jax.Array  # [B, K, D, capacity], the keys again: a channel is one line
    window: int = dataclasses.field(metadata={"static": True})
    top: int = dataclasses.field(metadata={"static": True})
    channels: int = dataclasses.field(metadata={"static": True})
    ahead: Ahead | None = None  # between `expect` and `extend`

    defaults = {
        "quantized": (0,),
        "bits": 2,
        "first": 64,
        "window": 64,
        "top": 896,
        "channels": 12,
        "generated": 1024,
    }
    sizes, beside = ("top",), ("first", "window")

    @classmethod
    def create(cls, shape: CacheShape) -> LayerCache:
        """options: quantized (layers, (0,) as measured for Llama-3.1-8B), which hold all tokens in
        so many bits (2); of the others first (64 tokens), window (64), top (896 tokens fetched),
        channels (12) and generated (1024 tokens, room for them)."""
        quantized, bits, first, window, top, channels, generated = shape.settings(
            "tailor", **cls.defaults
        )
        check_bits(bits)
        if shape.layer in quantized:
            return QuantizedTokens.create(dataclasses.replace(shape, options={"bits": bits}))
        recent = min(window + generated, shape.capacity)
        return cls.empty(
            shape,
            first,
            recent,
            largest=shape.empty(1),
            host_channels=host.empty(shape, shape.head_dim, shape.capacity),
            window=min(window, recent),
            top=min(top, shape.capacity),
            channels=min(channels, shape.head_dim),
        )

    def prefill(self, query, key, value, lengths):
        attended, kept = super().prefill(query, key, value, lengths)
        real = jnp.arange(key.shape[1]) < lengths[:, None]
        return attended, kept._larger(jnp.where(real[..., None, None], key, 0))

    def expect(self, query: Callable[[], jax.Array]) -> Tailor:
        settled = self._settled()
        return dataclasses.replace(settled, ahead=settled._fetch(query()))

    def extend(self, query, key, value, lengths):
        if lengths is not None:
            return self.prefill(query, key, value, lengths)
        # Without a layer before it there is nothing to tell the query from but itself.
        entry = self.expect(lambda: query) if self.ahead is None else self
        entry = entry._with(key, value)
        return entry.attend(query), dataclasses.replace(entry, ahead=None)

    def _fetches(self):
        return self.top

    def choose(self, query):
        channel, keys = self._fetch(query) if self.ahead is None else self.ahead
        mean = jnp.take_along_axis(self._mean(query), channel, axis=2)  # [B, K, C]
        score = jnp.sum(mean[..., None] * keys.astype(jnp.float32), axis=2)  # [B, K, S]
        return self._best(score, self.top)

    def _fetch(self, query: jax.Array) -> Ahead:
        """The channels in which query [B, 1, H, D] and the keys are large."""
        weight = jnp.abs(self._mean(query)) * self.largest[:, :, 0].astype(jnp.float32)
        channel = jax.lax.top_k(weight, self.channels)[1]
        return Ahead(channel, host.take(self.host_channels, channel))

    def _begin(self, lengths):
        start = jnp.maximum(self.count + lengths - self.window, 0)
        return jnp.where(lengths > 0, start, self.start)

    def _with(self, key, value):
        return super()._with(key, value)._larger(key)

    def _larger(self, key: jax.Array) -> Tailor:
        """With key [B, T, K, D] among those of which `largest` tells."""
        size = jnp.max(jnp.abs(key.astype(self.largest.dtype)), axis=1)  # [B, K, D]
        return dataclasses.replace(self, largest=jnp.maximum(self.largest, size[:, :, None]))

    def _to_host(self, key, value, first, lengths):
        channels = host.write(self.host_channels, key.swapaxes(2, 3), first, lengths, axis=3)
        kept = super()._to_host(key, value, first, lengths)
        return dataclasses.replace(kept, host_channels=channels)
