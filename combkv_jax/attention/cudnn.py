"""Attention by cuDNN's fused kernel, for NVIDIA GPUs from Ampere on."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from combkv_jax import compat
from combkv_jax.attention.source import Source, check_16_bit, check_arrays

FEWEST_QUERIES = 16  # below, keys are only read, which XLA does as well
MASK_BYTES = 512 * 2**20  # it takes intervals as a bias for each query and key


def check(query: jax.Array, key: Source, value: Source) -> None:
    """Raises NotImplementedError, with the reason, for what cuDNN does not take."""
    check_arrays(key, value)
    check_16_bit(query, key, value)
    batch, length, _, dim = query.shape
    keys = key.shape[2]
    if dim % 8 or dim > 128:
        raise NotImplementedError(f"head_dim is {dim}, and it takes multiples of 8 up to 128")
    if length % 2 or keys % 2 or length < FEWEST_QUERIES:
        raise NotImplementedError(
            f"there are {length} queries and {keys} keys, and it takes even numbers, from "
            f"{FEWEST_QUERIES} queries on"
        )
    if 2 * batch * length * keys > MASK_BYTES:
        raise NotImplementedError(
            f"what {batch} x {length} queries see of {keys} keys takes more than "
            f"{MASK_BYTES // 2**20} MiB to write down"
        )


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, start: jax.Array, end: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `attention.attention`; start and end are [B, T]."""
    check(query, key, value)
    index = jnp.arange(key.shape[2])
    mask = (index >= start[..., None]) & (index < end[..., None])
    out, lse = compat.cudnn_attention(
        query.swapaxes(1, 2), key, value, mask[:, None], query.shape[3] ** -0.5
    )
    some = jnp.any(mask, axis=2)[..., None]  # [B, T, 1]
    out = jnp.where(some[..., None], out.swapaxes(1, 2), 0)
    return out, jnp.where(some, lse.swapaxes(1, 2).astype(jnp.float32), -jnp.inf)
