"""Chunks of history -> K/V of the kept layers: by the frozen decoder, or the original's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from combkv_jax.cache import Packed
from combkv_jax.config import CombConfig
from combkv_jax.decoder import (
    Angles,
    Decoder,
    DecoderLayer,
    HistoryAttention,
    key_value_projection,
    keys_values,
)
from combkv_jax.layers import project_heads, rotary_angles

KeysValues = tuple[jax.Array, jax.Array]


class ChunkEncoder(nnx.Module):
    """The original's encoder: one bidirectional Llama layer a cross layer, and K/V projections
    of each layer's un-normed output."""

    def __init__(self, config: CombConfig):
        text, count = config.text, len(config.cross_layers)
        self.head_dim = text.head_dim
        self.layers = nnx.List([DecoderLayer(text) for _ in range(count)])
        self.k_proj = nnx.List([key_value_projection(text) for _ in range(count)])
        self.v_proj = nnx.List([key_value_projection(text) for _ in range(count)])

    def __call__(
        self, x: jax.Array, angles: Angles, entry: Packed, *, remat: Callable | None = None
    ) -> list[KeysValues]:
        """Embedded chunk tokens [B, T, D] -> K/V [B, T, K, head_dim] of each cross layer, before
        the cross layer's k_norm. remat: as in `Decoder.__call__`."""
        out = []
        for layer, k_proj, v_proj in zip(self.layers, self.k_proj, self.v_proj, strict=True):

            def run(x, layer=layer):
                return layer(x, angles, entry, _whole(x))[0]

            x = (remat(run) if remat else run)(x)
            out.append(tuple(project_heads(p, x, self.head_dim) for p in (k_proj, v_proj)))
        return out


def tap_decoder(
    decoder: Decoder,
    taps: dict[int, HistoryAttention | None],
    x: jax.Array,
    angles: Angles,
    entry: Packed,
) -> list[KeysValues]:
    """Embedded tokens [B, T, D] through the frozen decoder as far as the last tapped layer -> K/V
    [B, T, K, head_dim] of each tapped layer, in order: by the tap's own projections, or by the
    layer's where the tap is None."""
    out, words = [], decoder.words(x)
    for i in range(max(taps, default=-1) + 1):
        layer = decoder.layers[i]
        if i in taps:
            h = layer.input_layernorm(x)
            if taps[i]:
                out.append(taps[i].keys_values(h, words, angles, entry))
            else:
                out.append(keys_values(layer.self_attn, h, angles, layer.head_dim))
        if i < max(taps):
            x, _ = layer(x, angles, entry, _whole(x))
    return out


def encode_sinks(
    decoder: Decoder, skip: Sequence[int], ids: jax.Array, positions: jax.Array
) -> dict[int, KeysValues]:
    """The first tokens of histories, ids and positions [B, S] -> K/V [B, S, K, head_dim] of every
    decoder layer not in `skip`. They are causal, so nothing behind them is needed."""
    taps = {i: None for i in range(len(decoder.layers)) if i not in skip}
    angles = rotary_angles(decoder.config, positions)
    index = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    entry = Packed.causal(index)
    states = tap_decoder(decoder, taps, decoder.embed(ids), angles, entry)
    return dict(zip(taps, states, strict=True))


def _whole(x: jax.Array) -> jax.Array:
    return jnp.full(x.shape[0], x.shape[1], jnp.int32)
