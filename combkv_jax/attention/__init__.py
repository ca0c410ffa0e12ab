"""Attention of every query over one contiguous interval of keys: the one entry for all callers.

Causal text, packed samples, bidirectional chunks, ragged caches and compressed histories differ
only in the interval of keys a query may see, so a query carries `start` and `end` and nothing
else. Two sources (recent tokens and history) are merged exactly by their log-sum-exp.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from combkv_jax.attention import choice, xla
from combkv_jax.attention.choice import IMPLEMENTATIONS, choose, used
from combkv_jax.attention.source import Source, is_coded
from combkv_jax.attention.xla import fold, unfold

__all__ = [
    "IMPLEMENTATIONS",
    "Attended",
    "attention",
    "choose",
    "fold",
    "is_coded",
    "mass",
    "merge",
    "unfold",
    "used",
]


class Attended(NamedTuple):
    """What attention returns: out [B, T, H, D] in the value's dtype, and the log-sum-exp of the
    scaled logits, lse [B, T, H] in float32 (-inf, with out 0, where a query sees no key)."""

    out: jax.Array
    lse: jax.Array


def attention(
    query: jax.Array,
    key: Source,
    value: Source,
    start: jax.Array,
    end: jax.Array,
    *,
    implementation: str | None = None,
) -> Attended:
    """Grouped-query attention; query t of row b sees keys `start[b, t] <= s < end[b, t]`.

    query: [B, T, H, D]. key, value: [B, K, S, D] with H a multiple of K (query head h reads KV
        head h // (H / K)), or [1, K, S, D]: one source shared by all rows, read once.
        Both arrays, or both coded in fewer bits (`source.Coded`, as cache/quantize.py does).
    start, end: int32, broadcastable to [B, T].
    implementation: "xla", "reference", "pallas" or "cudnn"; None is what `choice.use` was told.
    The scale is D ** -0.5. Raises RequestError for an implementation that is unknown or that cannot
    run here.
    """
    batch, length, heads, dim = query.shape
    if not query.size or not key.shape[2]:  # nobody asks, or there is nothing to see
        return Attended(jnp.zeros_like(query), jnp.full(query.shape[:3], -jnp.inf, jnp.float32))
    bounds = [jnp.broadcast_to(b, (batch, length)) for b in (start, end)]
    if key.shape[0] == 1 < batch:  # fold the rows into one, so that the shared source is read once
        query = query.reshape(1, batch * length, heads, dim)
        bounds = [b.reshape(1, batch * length) for b in bounds]
    name = choose(query, key, value, implementation or choice.default())
    with jax.named_scope("attention"):
        out, lse = choice.function(name)(query, key, value, *bounds)
    return Attended(out.reshape(batch, length, heads, dim), lse.reshape(batch, length, heads))


def mass(
    query: jax.Array, key: jax.Array, lse: jax.Array, start: jax.Array, end: jax.Array
) -> jax.Array:
    """How much attention each key gets: its softmax weights summed over the queries that see it and
    the query heads that read it, float32 [B, K, S].

    query [B, T, H, D], key [B, K, S, D], start and end as in `attention`; lse [B, T, H], what
    `attention` gave over all that a query sees, of which these keys may be a part.
    """
    bounds = [jnp.broadcast_to(b, query.shape[:2]) for b in (start, end)]
    with jax.named_scope("attention_mass"):
        return xla.mass(query, key, lse, *bounds)


def merge(a: Attended, b: Attended) -> Attended:
    """Attention over the union of two disjoint key sets, exactly (Milakov & Gimelshein 2018)."""
    lse = jnp.logaddexp(a.lse, b.lse)
    lse = jnp.where(jnp.isneginf(a.lse) & jnp.isneginf(b.lse), -jnp.inf, lse)
    safe = jnp.where(jnp.isneginf(lse), 0.0, lse)
    weights = [jnp.exp(x.lse - safe)[..., None] for x in (a, b)]
    out = a.out.astype(jnp.float32) * weights[0] + b.out.astype(jnp.float32) * weights[1]
    return Attended(out.astype(a.out.dtype), lse)
