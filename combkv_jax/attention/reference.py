"""Attention written out, for tests and for reading; `xla.py` computes the same in blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from combkv_jax.attention import source
from combkv_jax.attention.source import Source


def attention(
    query: jax.Array, key: Source, value: Source, start: jax.Array, end: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `attention.attention`; start and end are [B, T]."""
    heads, kv_heads = query.shape[2], key.shape[1]
    key, value = (source.read(x, 0, x.shape[2]) for x in (key, value))
    key, value = (jnp.repeat(x, heads // kv_heads, axis=1) for x in (key, value))  # [B, H, S, D]
    logits = jnp.einsum("bthd,bhsd->bhts", query, key, preferred_element_type=jnp.float32)
    index = jnp.arange(key.shape[2])
    seen = (index >= start[:, :, None]) & (index < end[:, :, None])  # [B, T, S]
    logits = jnp.where(seen[:, None], logits * query.shape[-1] ** -0.5, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)  # [B, H, T]
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
    out = jnp.einsum("bhts,bhsd->bthd", weights.astype(value.dtype), value)
    return out, lse.swapaxes(1, 2)
