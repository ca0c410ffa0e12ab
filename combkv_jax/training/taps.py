"""Chunks of history as a frozen model sees them, made once and trained on many times.

The encoder is the frozen decoder and chunks do not see each other, so the normed inputs of the
kept layers ("taps") never change while the history's own projections are trained. K/V are made
from them block by block inside the loss and never held whole, forward or backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax.attention import Attended, attention
from combkv_jax.cache import Chunks, Comb, Packed
from combkv_jax.config import CombConfig
from combkv_jax.decoder import Decoder, HistoryAttention
from combkv_jax.encoder import encode_sinks
from combkv_jax.layers import rotary_angles

DTYPE = np.float16  # normed states are small numbers; bfloat16 would keep 3 bits fewer


def encode_taps(decoder: Decoder, layers: Sequence[int], ids: jax.Array) -> list[jax.Array]:
    """Whole chunks ids [B, chunk_size] through the decoder, each alone -> the normed input of the
    attention of each of these layers, float16 [B, chunk_size, D]."""
    return _taps(decoder, layers, ids, 0, lambda layer, recent: recent)


def encode_questions(
    decoder: Decoder, layers: Sequence[int], ids: jax.Array, sinks: jax.Array, offset: int
) -> list[jax.Array]:
    """Recent tokens ids [Q, T], the first at position `offset`, behind a history of which each
    layer sees no more than its first tokens, sinks [S] -> as `encode_taps`, of these layers."""
    count = sinks.shape[0]
    pairs = encode_sinks(decoder, (), sinks[None], jnp.arange(count)[None]) if count else {}

    def entry(layer, recent):
        if not count:
            return recent
        key, value = (x.swapaxes(1, 2) for x in pairs[layer])
        return Comb(recent, sinks=Chunks(key, value, jnp.int32(0), jnp.int32(count)))

    return _taps(decoder, layers, ids, offset, entry)


def _taps(decoder: Decoder, layers, ids, offset: int, entry) -> list[jax.Array]:
    index = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    recent = Packed.causal(index)
    lengths = jnp.full(ids.shape[0], ids.shape[1], jnp.int32)
    x, angles, taps = decoder.embed(ids), rotary_angles(decoder.config, offset + index), []
    for i in range(max(layers) + 1):
        layer = decoder.layers[i]
        if i in layers:
            taps.append(layer.input_layernorm(x).astype(DTYPE))
        if i < max(layers):
            x, _ = layer(x, angles, entry(i, recent), lengths)
    return taps


@dataclasses.dataclass(frozen=True, eq=False)
class Taps:
    """Stands in for `cache.Chunks` in front of a history block that is being trained.

    h: float16 [blocks, B, S, D], whole chunks, and ids: int32 [blocks, B, S], their tokens, which
    `words` makes [..., D] of. Query t of row b sees history tokens
    `start[b, t] <= n < end[b, t]` of the blocks laid end to end. sought: int32 [B, G], history
    tokens; sought_first, sought_last: int32 [B, T], those of them that a query is to find.
    found: takes the log of the share of its attention that each query gave to those, float32
    [B, T, H] (-inf where there are none).
    """

    config: CombConfig
    block: HistoryAttention
    words: Callable[[jax.Array], jax.Array]
    h: jax.Array
    ids: jax.Array
    start: jax.Array
    end: jax.Array
    sought: jax.Array
    sought_first: jax.Array
    sought_last: jax.Array
    found: list[jax.Array]

    def attend(self, query: jax.Array) -> Attended:
        """query [B, T, H, head_dim] over the tokens it sees; each must see at least one."""
        rows, size = self.h.shape[1:3]
        index = jnp.broadcast_to(jnp.arange(size), (rows, size))
        place = index % self.config.chunk_size
        angles = rotary_angles(self.config.text, place)
        chunk = Packed(index - place, index + 1)

        def visit(step):
            h, ids, first = step
            words = self.words(ids).astype(query.dtype)
            key, value = self.block.keys_values(h.astype(query.dtype), words, angles, chunk)
            where = self.sought - first
            inside = (where >= 0) & (where < size)
            sought = jnp.take_along_axis(key, jnp.clip(where, 0, size - 1)[..., None, None], axis=1)
            sought = jnp.where(inside[..., None, None], sought, 0)
            key, value = (x.swapaxes(1, 2) for x in (key, value))
            return attention(query, key, value, self.start - first, self.end - first), sought

        # Backward makes K/V and logits of a block again instead of keeping them all.
        first = jnp.arange(self.h.shape[0]) * size
        steps = (self.h, self.ids, first)
        parts, sought = jax.lax.map(jax.checkpoint(visit, prevent_cse=False), steps)
        lse = jax.nn.logsumexp(parts.lse, axis=0)
        weight = jnp.exp(parts.lse - lse)[..., None]
        out = jnp.sum(weight * parts.out.astype(jnp.float32), axis=0)
        key = jnp.sum(sought, axis=0).swapaxes(1, 2)  # each lies in one block
        found = attention(query, key, key, self.sought_first, self.sought_last).lse
        self.found.append(found - lse)
        return Attended(out.astype(query.dtype), lse)
