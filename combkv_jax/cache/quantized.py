"""`quantized`: every token is kept, the older ones in a few bits (KIVI, Liu et al. 2024, with
TailorKV's sizes, Yao et al. 2025)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from combkv_jax.attention import Attended, attention, merge
from combkv_jax.cache.base import CacheShape, LayerCache, newest, take, write
from combkv_jax.cache.full import Full
from combkv_jax.cache.quantize import CODED_BITS, Quantized, check_bits, quantize

BLOCK = 128  # tokens coded together, and the fewest newest ones held in full


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTokens(LayerCache):
    """The last 2 * BLOCK tokens in full, in a ring, and the rest coded.

    Whole blocks are coded, each once BLOCK newer tokens stand behind it, and so before the ring
    loses its first token. As long as the ring still holds a coded token, it is read from the ring:
    what is read from the codes grows token by token, and both reads are one interval. A prefill
    sees its own tokens as they are, whatever their number.
    """

    old_key: Quantized
    old_value: Quantized
    key: jax.Array  # [B, K, 2 * BLOCK, D]
    value: jax.Array
    count: jax.Array  # int32 [B]

    defaults = {"bits": 4}
    sizes, in_tokens = ("bits",), False

    @classmethod
    def sized(cls, size, given):
        """With the most bits that numbers can be kept in, up to `size`."""
        return {"bits": max((b for b in (*CODED_BITS, 16) if b <= size), default=0), **given}

    @classmethod
    def create(cls, shape: CacheShape) -> LayerCache:
        """options: bits (4); with 16 nothing is coded, and the cache is `full`."""
        (bits,) = shape.settings("quantized", **cls.defaults)
        check_bits(bits)
        if bits == 16:
            return Full.create(shape)
        tokens = max(shape.capacity // BLOCK - 1, 0) * BLOCK
        return cls(
            Quantized.create(shape, tokens, bits, per_token=False),
            Quantized.create(shape, tokens, bits, per_token=True),
            shape.empty(2 * BLOCK),
            shape.empty(2 * BLOCK),
            shape.counter(),
        )

    def prefill(self, query, key, value, lengths):
        step = jnp.arange(key.shape[1])
        new = [x.swapaxes(1, 2) for x in (key, value)]  # [B, K, T, D]
        itself = attention(query, *new, jnp.int32(0), (step + 1)[None])
        attended = merge(self.attend(query), itself)

        ring = self.key.shape[2]
        count = self.count + lengths
        lines = [
            jnp.concatenate([old, x.astype(old.dtype)], axis=2)
            for old, x in zip((self.key, self.value), new, strict=True)
        ]  # [B, K, ring + T, D]

        def place(token):  # [B, N], in the lines
            before = self.count[:, None]
            return jnp.where(token < before, token % ring, ring + token - before)

        block = _coded(self.count)[:, None] + jnp.arange(key.shape[1] // BLOCK + 1)
        token = block[..., None] * BLOCK + jnp.arange(BLOCK)
        token = place(token.reshape(token.shape[0], -1))
        kept = self._code(*(take(x, token) for x in lines), block, count)
        held = place(newest(count, ring))
        key, value = (take(x, held) for x in lines)
        return attended, dataclasses.replace(kept, key=key, value=value, count=count)

    def append(self, key, value):
        ring = self.key.shape[2]
        place, rows = (self.count % ring)[:, None], jnp.arange(key.shape[0])
        key, value = write(self.key, key, place, rows), write(self.value, value, place, rows)
        count = self.count + 1
        # Always the block that is due next, and written only when it is: no branch, no copy.
        block = _coded(self.count)[:, None]
        token = (block * BLOCK + jnp.arange(BLOCK)) % ring
        kept = self._code(take(key, token), take(value, token), block, count)
        return dataclasses.replace(kept, key=key, value=value, count=count)

    def attend(self, query) -> Attended:
        ring = self.key.shape[2]
        recent = jnp.minimum(self.count, ring)[:, None]
        old = jnp.minimum(self.count - recent[:, 0], self.old_key.shape[2])[:, None]
        return merge(
            attention(query, self.key, self.value, jnp.int32(0), recent),
            attention(query, self.old_key, self.old_value, jnp.int32(0), old),
        )

    def _code(self, key, value, block, count) -> QuantizedTokens:
        """Codes blocks `block` [B, N], given as key and value [B, K, N * BLOCK, D], as far as they
        are due after `count` tokens."""
        past = self.old_key.shape[2] // BLOCK
        block = jnp.where(block < _coded(count)[:, None], block, past)
        coded = (
            old.write(quantize(new, old.bits, per_token=old.per_token), block, BLOCK)
            for old, new in ((self.old_key, key), (self.old_value, value))
        )
        return dataclasses.replace(self, **dict(zip(("old_key", "old_value"), coded, strict=True)))


def _coded(count: jax.Array) -> jax.Array:
    """Blocks coded after `count` tokens."""
    return jnp.maximum(count // BLOCK - 1, 0)
