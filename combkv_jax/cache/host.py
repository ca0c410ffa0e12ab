"""Tokens in host memory, written and read in parts: a device never holds all of them.

On an accelerator the arrays lie in pinned memory. The device copies parts of them by itself, and
where tokens lie scattered the host collects them first. On a CPU there is one memory, and the same
program runs in it.

A part that is read depends on what was written before, and nothing is written behind a read of the
same step: otherwise XLA would copy the whole array to keep both.
"""

from __future__ import annotations

import dataclasses
import inspect

import jax
import jax.numpy as jnp
from jax.experimental import compute_on

from combkv_jax.attention import Attended, attention
from combkv_jax.cache.base import CacheShape

# In later versions of jax compute_on is what 0.10 calls compute_on2.
_is_later = "out_memory_spaces" in inspect.signature(compute_on.compute_on).parameters
_compute_on = compute_on.compute_on if _is_later else compute_on.compute_on2

_BY_ROW_AND_HEAD = jax.lax.GatherDimensionNumbers(
    offset_dims=(3,),
    collapsed_slice_dims=(2,),
    start_index_map=(2,),
    operand_batching_dims=(0, 1),
    start_indices_batching_dims=(0, 1),
)


def to_host(x: jax.Array) -> jax.Array:
    """x in host memory, divided over the devices' hosts as it was over the devices."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: jax.Array) -> jax.Array:
    """The inverse of `to_host`."""
    return jax.device_put(x, jax.memory.Space.Device)


def empty(shape: CacheShape, size: int, dim: int | None = None) -> jax.Array:
    """Zeros [B, K, size, dim] in host memory; dim is the head's where it is None."""
    return to_host(shape.empty(size, dim))


def write(
    array: jax.Array, new: jax.Array, first: jax.Array, lengths: jax.Array, axis: int = 2
) -> jax.Array:
    """Puts new tokens into `array` [B, K, S, D] or [B, K, D, S], in place when it is donated.

    new: shaped like it with T tokens on `axis`, where tokens stand; row b's first `lengths[b]` go
    to `first[b]` and behind. Those past the end are dropped. first, lengths: int32 [B].
    """
    room = array.shape[axis]
    size = min(new.shape[axis], room)
    # A slice must lie inside: near the end it begins earlier, and what is there stays.
    start = jnp.clip(first, 0, room - size)
    token = (start - first)[:, None] + jnp.arange(size)  # [B, size], which of the new ones
    real = (token >= 0) & (token < lengths[:, None])
    token, real = (jnp.expand_dims(x, (1, 5 - axis)) for x in (token, real))
    new = jnp.take_along_axis(new, jnp.clip(token, 0, size - 1), axis=axis).astype(array.dtype)

    def one(row, array):
        corner = [row, 0, 0, 0]
        corner[axis] = start[row]
        mine, real_ones = (jax.lax.dynamic_slice_in_dim(x, row, 1) for x in (new, real))
        old = to_device(jax.lax.dynamic_slice(array, corner, mine.shape))
        mine = jnp.where(real_ones, mine, old)
        return jax.lax.dynamic_update_slice(array, to_host(mine), corner)

    return jax.lax.fori_loop(0, array.shape[0], one, array)


def read(array: jax.Array, first: jax.Array, size: int) -> jax.Array:
    """`size` tokens of array [B, K, S, D] from token `first` on, on the device."""
    return to_device(jax.lax.dynamic_slice_in_dim(array, first, size, axis=2))


def take(array: jax.Array, index: jax.Array) -> jax.Array:
    """array [B, K, S, D] at index [B, K, N] of its third axis, on the device: [B, K, N, D]. Every
    index must lie within it."""

    def collect(array, index):
        size = (1, 1, 1, array.shape[3])
        return jax.lax.gather(array, index, _BY_ROW_AND_HEAD, size, mode="promise_in_bounds")

    space = jax.memory.Space.Host
    collect = _compute_on(collect, compute_type="device_host", out_memory_spaces=space)
    return to_device(collect(array, to_host(index[..., None])))


def attend(query: jax.Array, key: jax.Array, value: jax.Array, end: jax.Array) -> Attended:
    """Attention of query [B, T, H, D] over key and value [B, K, S, D] in host memory, of which
    query t of row b sees the first `end[b, t]`: a row at a time, and block by block."""

    def one(row):
        own, last = (jax.lax.dynamic_slice_in_dim(x, row, 1) for x in (query, end))
        found = attention(own, _Row(key, row), _Row(value, row), jnp.int32(0), last)
        return jax.tree.map(lambda x: x[0], found)

    return jax.lax.map(one, jnp.arange(query.shape[0]))


@dataclasses.dataclass(frozen=True)
class _Row:
    """One row of an array in host memory, as a source that attention reads in parts."""

    array: jax.Array  # [B, K, S, D]
    row: jax.Array
    group = 1

    @property
    def dtype(self):
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (1, *self.array.shape[1:])

    def dequantize(self, first: jax.Array | int, tokens: int) -> jax.Array:
        _, heads, _, dim = self.shape
        corner = (self.row, 0, first, 0)
        return to_device(jax.lax.dynamic_slice(self.array, corner, (1, heads, tokens, dim)))
