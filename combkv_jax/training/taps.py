"""Chunks of history as a frozen model sees them, made once and trained on many times.

The encoder is the frozen decoder and chunks do not see each other, so the normed inputs of the
kept layers ("taps") never change while the history's own projections are trained. K/V are made
from them block by block inside the loss and never held whole, forward or backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax.attention import Attended, attention
from combkv_jax.cache import Packed
from combkv_jax.config import CombConfig
from combkv_jax.decoder import Decoder, HistoryAttention, keys_values
from combkv_jax.layers import rotary_angles

DTYPE = np.float16  # normed states are small numbers; bfloat16 would keep 3 bits fewer


def encode_taps(decoder: Decoder, layers: Sequence[int], ids: jax.Array) -> list[jax.Array]:
    """Whole chunks ids [B, chunk_size] through the decoder, each alone -> the normed input of the
    attention of each kept layer, float16 [B, chunk_size, D]."""
    index = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    entry = Packed(jnp.zeros_like(index), index + 1)
    lengths = jnp.full(ids.shape[0], ids.shape[1], jnp.int32)
    x, angles, taps = decoder.embed(ids), rotary_angles(decoder.config, index), []
    for i in range(max(layers) + 1):
        layer = decoder.layers[i]
        if i in layers:
            taps.append(layer.input_layernorm(x).astype(DTYPE))
        if i < max(layers):
            x, _ = layer(x, angles, entry, lengths)
    return taps


@dataclasses.dataclass(frozen=True, eq=False)
class Taps:
    """Stands in for `cache.Chunks` in front of a history block that is being trained.

    h: float16 [blocks, B, S, D], whole chunks. Query t of row b sees history tokens
    `start[b, t] <= n < end[b, t]` of the blocks laid end to end. sought: int32 [B, G], history
    tokens; sought_first, sought_last: int32 [B, T], those of them that a query is to find.
    found: takes the log of the share of its attention that each query gave to those, float32
    [B, T, H] (-inf where there are none).
    """

    config: CombConfig
    block: HistoryAttention
    h: jax.Array
    start: jax.Array
    end: jax.Array
    sought: jax.Array
    sought_first: jax.Array
    sought_last: jax.Array
    found: list[jax.Array]

    def attend(self, query: jax.Array) -> Attended:
        """query [B, T, H, head_dim] over the tokens it sees; each must see at least one."""
        size = self.h.shape[2]
        positions = jnp.arange(size)[None] % self.config.chunk_size
        angles = rotary_angles(self.config.text, positions)

        def visit(step):
            h, first = step
            pair = keys_values(self.block, h.astype(query.dtype), angles, query.shape[-1])
            key, value = (x.swapaxes(1, 2) for x in pair)
            return attention(query, key, value, self.start - first, self.end - first)

        # Backward makes K/V and logits of a block again instead of keeping them all.
        first = jnp.arange(self.h.shape[0]) * size
        parts = jax.lax.map(jax.checkpoint(visit, prevent_cse=False), (self.h, first))
        lse = jax.nn.logsumexp(parts.lse, axis=0)
        weight = jnp.exp(parts.lse - lse)[..., None]
        out = jnp.sum(weight * parts.out.astype(jnp.float32), axis=0)
        self.found.append(self._lse_of_sought(query) - lse)
        return Attended(out.astype(query.dtype), lse)

    def _lse_of_sought(self, query: jax.Array) -> jax.Array:
        size = self.h.shape[2]
        block, place = self.sought // size, self.sought % size
        row = jnp.arange(self.h.shape[1])[:, None]
        h = self.h[block, row, place].astype(query.dtype)  # [B, G, D]
        angles = rotary_angles(self.config.text, place % self.config.chunk_size)
        pair = keys_values(self.block, h, angles, query.shape[-1])
        key, value = (x.swapaxes(1, 2) for x in pair)
        return attention(query, key, value, self.sought_first, self.sought_last).lse
