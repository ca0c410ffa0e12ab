"""What every cache policy is: a value with one entry a layer, passed in and returned."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from combkv_jax.attention import Attended
from combkv_jax.config import LlamaConfig


class LayerCache:
    """One layer's cache of recent tokens, an immutable pytree. Keys are stored after rotary.

    A policy implements `create`, `prefill`, `append` and `attend`. Rows are ragged: each has its
    own count of tokens, and the `lengths` of a prefill say how many of the T new ones are real.
    """

    @classmethod
    def create(cls, shape: CacheShape) -> Self:
        """An empty entry."""
        raise NotImplementedError

    def prefill(
        self, query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array
    ) -> tuple[Attended, Self]:
        """T new tokens a row: query [B, T, H, D], key and value [B, T, K, D], of which the first
        `lengths` [B] are real. They attend causally to everything so far and are kept."""
        raise NotImplementedError

    def append(self, key: jax.Array, value: jax.Array) -> Self:
        """Keeps one more token a row: key, value [B, 1, K, D]."""
        raise NotImplementedError

    def attend(self, query: jax.Array) -> Attended:
        """The newest token's query [B, 1, H, D] over everything kept."""
        raise NotImplementedError

    def extend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None
    ) -> tuple[Attended, Self]:
        """`prefill`, or, where lengths is None, one decoded token a row."""
        if lengths is not None:
            return self.prefill(query, key, value, lengths)
        entry = self.append(key, value)
        return entry.attend(query), entry

    def nbytes(self) -> dict[str, int]:
        """Bytes by place, {"device", "host"}."""
        return nbytes(self)


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """What a policy needs to make an empty entry.

    capacity: most recent tokens a row will hold; policies that drop tokens hold less.
    rotary: angle per position of each rotary pair [D / 2], for policies that move positions.
    options: the policy's own settings.
    keys, small: where K/V and the counters live (None: the default device). A cache must begin
        where a step leaves it, or the second step compiles anew.
    """

    batch: int
    kv_heads: int
    head_dim: int
    capacity: int
    dtype: Any
    rotary: jax.Array
    options: dict[str, int] = dataclasses.field(default_factory=dict)
    keys: jax.sharding.Sharding | None = None
    small: jax.sharding.Sharding | None = None

    def empty(self, tokens: int) -> jax.Array:
        """Zeros for `tokens` keys or values, [B, K, tokens, D]: heads outside tokens, so that a
        head's keys are one matrix and no product needs a transposed copy."""
        shape = (self.batch, self.kv_heads, tokens, self.head_dim)
        return jnp.zeros(shape, self.dtype, device=self.keys)

    def counter(self) -> jax.Array:
        """A count for each row, int32 [B], at zero."""
        return jnp.zeros(self.batch, jnp.int32, device=self.small)


def write(buffer: jax.Array, new: jax.Array, index: jax.Array, rows: jax.Array) -> jax.Array:
    """Puts new [b, T, K, D] into buffer [B, K, S, D] in place (when donated).

    index: [b, T], where each token goes; S or more drops it. rows: [b], the row of each.
    """
    heads = jnp.arange(buffer.shape[1])
    # Scatter over the leading dimensions in order, so that nothing transposes the buffer.
    place = (rows[:, None, None], heads[None, :, None], index[:, None, :])
    return buffer.at[place].set(
        new.swapaxes(1, 2).astype(buffer.dtype), mode="drop", unique_indices=True
    )


def full_cache_bytes(config: LlamaConfig, tokens: int, dtype: Any) -> int:
    """Bytes of the K/V of all layers for `tokens` tokens: what is compared with."""
    heads = config.num_hidden_layers * config.num_key_value_heads
    return 2 * heads * config.head_dim * tokens * jnp.dtype(dtype).itemsize


def nbytes(tree: Any) -> dict[str, int]:
    """Bytes of a cache's live arrays by place, measured from the arrays: {"device", "host"}."""
    total = {"device": 0, "host": 0}
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            kind = getattr(leaf.sharding, "memory_kind", None) or "device"
            total["host" if kind == "pinned_host" else "device"] += leaf.nbytes
    return total
