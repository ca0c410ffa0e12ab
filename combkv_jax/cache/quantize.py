"""Keys and values in 8, 4, 2 or 1 bits: asymmetric, by minimum and maximum, in groups of 64.

Keys are coded per channel, in groups of 64 tokens, because a few channels of a key are large in
every token; values per token, in groups of 64 channels (KIVI, Liu et al. 2024; TailorKV, Yao et
al. 2025). Each group keeps a zero point and a step in float16, whose 11 bits hold a zero point far
from 0 better than bfloat16's 8. A 16-bit cache shrinks to bits / 16 + 2 / 64 of its bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from combkv_jax.cache.base import CacheShape, write
from combkv_jax.errors import RequestError

GROUP = 64
CODED_BITS = (1, 2, 4, 8)
WORD = 32  # bits of the integers that hold the codes


def check_bits(bits: int) -> None:
    """Raises RequestError for a width that no key can be kept in."""
    if bits not in (*CODED_BITS, 16):
        raise RequestError(f"bits is {bits!r}; keys and values are kept in 1, 2, 4, 8 or 16 bits.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """Coded keys or values [B, K, S, D], S a multiple of 64; `x` is about code * scale + zero.

    codes: token s lies in word s // (32 / bits), its lowest bits first. scale, zero: of keys one a
        group of tokens and a channel, of values one a token and a group of channels.
    """

    codes: jax.Array  # uint32 [B, K, S * bits / 32, D]
    scale: jax.Array  # float16 [B, K, S / 64, D] or [B, K, S, ceil(D / 64)]
    zero: jax.Array
    bits: int = dataclasses.field(metadata={"static": True})
    per_token: bool = dataclasses.field(metadata={"static": True})  # values, not keys
    dtype: Any = dataclasses.field(metadata={"static": True})  # what they decode to

    @classmethod
    def create(cls, shape: CacheShape, tokens: int, bits: int, *, per_token: bool) -> Quantized:
        """Room for `tokens`, a multiple of 64."""
        groups = (tokens, -(-shape.head_dim // GROUP)) if per_token else (tokens // GROUP, None)
        return cls(
            shape.empty(tokens * bits // WORD, dtype=jnp.uint32),
            shape.empty(*groups, dtype=jnp.float16),
            shape.empty(*groups, dtype=jnp.float16),
            bits,
            per_token,
            jnp.dtype(shape.dtype),
        )

    @property
    def group(self) -> int:
        """Tokens coded together."""
        return GROUP

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of what is coded, [B, K, S, D]."""
        batch, heads, words, dim = self.codes.shape
        return batch, heads, words * WORD // self.bits, dim

    def dequantize(self, first: jax.Array | int, tokens: int) -> jax.Array:
        """[B, K, tokens, D] from token `first`; both multiples of 64."""
        batch, heads, _, dim = self.shape
        in_word = WORD // self.bits
        words = _part(self.codes, first // in_word, tokens // in_word)
        shift = jnp.arange(in_word, dtype=jnp.uint32)[:, None] * self.bits
        codes = (words[:, :, :, None] >> shift) & (2**self.bits - 1)
        codes = codes.reshape(batch, heads, tokens, dim).astype(jnp.float32)
        a_group = 1 if self.per_token else GROUP
        scale, zero = (
            _part(x, first // a_group, tokens // a_group).astype(jnp.float32)
            for x in (self.scale, self.zero)
        )
        if self.per_token:
            scale, zero = (jnp.repeat(x, GROUP, axis=3)[..., :dim] for x in (scale, zero))
        else:
            codes = codes.reshape(batch, heads, -1, GROUP, dim)
            scale, zero = scale[:, :, :, None], zero[:, :, :, None]
        x = codes * scale + zero
        return x.reshape(batch, heads, tokens, dim).astype(self.dtype)

    def write(self, new: Quantized, block: jax.Array, size: int) -> Quantized:
        """new, blocks of `size` tokens each, in place of blocks `block` [B, N] of these; a block
        past the last one is dropped."""
        rows = jnp.arange(block.shape[0])

        def put(old, new):
            each = new.shape[2] // block.shape[1]
            index = block[..., None] * each + jnp.arange(each)
            return write(old, new.swapaxes(1, 2), index.reshape(len(rows), -1), rows)

        assert new.shape[2] == block.shape[1] * size
        return jax.tree.map(put, self, new)


def quantize(x: jax.Array, bits: int, *, per_token: bool) -> Quantized:
    """Codes keys (`per_token=False`) or values x [B, K, S, D] in 1, 2, 4 or 8 bits.

    S is filled up to a multiple of 64 with copies of the last token. The zero point is rounded down
    and the step up to float16, and the codes are counted from them: no value leaves its group's
    range, so it is off by at most half of the step as stored. That step is (max - min) / (2^bits -
    1), larger by one rounding (2^-10 of itself) and by the zero point's share (2^-10 of |min|, over
    2^bits - 1). A group of one number that float16 holds is exact. Numbers lie within 65504.
    """
    if bits not in CODED_BITS:
        raise RequestError(f"bits is {bits!r}; codes have 1, 2, 4 or 8 bits.")
    dtype = x.dtype
    batch, heads, tokens, dim = x.shape
    grouped = -(-dim // GROUP) * GROUP if per_token else dim
    pad = ((0, 0), (0, 0), (0, -tokens % GROUP), (0, grouped - dim))
    x = jnp.pad(x.astype(jnp.float32), pad, mode="edge")  # leaves every minimum and maximum
    tokens = x.shape[2]
    if per_token:
        x, axis = x.reshape(batch, heads, tokens, -1, GROUP), 4
    else:
        x, axis = x.reshape(batch, heads, -1, GROUP, dim), 3
    levels = 2**bits - 1
    zero = _rounded(jnp.min(x, axis), -jnp.inf)
    spread = jnp.max(x, axis) - zero.astype(jnp.float32)
    scale = _rounded(spread / levels, jnp.inf)
    z, s = (jnp.expand_dims(y.astype(jnp.float32), axis) for y in (zero, scale))
    codes = jnp.round((x - z) / jnp.where(s > 0, s, 1.0))
    codes = jnp.clip(codes, 0, levels).astype(jnp.uint32)
    codes = codes.reshape(batch, heads, tokens, grouped)[..., :dim]
    in_word = WORD // bits
    shift = jnp.arange(in_word, dtype=jnp.uint32)[:, None] * bits
    codes = codes.reshape(batch, heads, tokens // in_word, in_word, dim) << shift
    codes = jnp.sum(codes, axis=3, dtype=jnp.uint32)  # no two share a bit
    return Quantized(codes, scale, zero, bits, per_token, dtype)


def _part(x: jax.Array, first: jax.Array | int, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, first, size, axis=2)


def _rounded(x: jax.Array, towards: float) -> jax.Array:
    """float16 at or beyond x in the direction of -inf or inf."""
    most = float(jnp.finfo(jnp.float16).max)
    x = jnp.clip(x, -most, most)
    near = x.astype(jnp.float16)
    short = near.astype(jnp.float32) > x if towards < 0 else near.astype(jnp.float32) < x
    return jnp.where(short, jnp.nextafter(near, jnp.float16(towards)), near)
