"""Cache policies behind one interface. Adding one is a file and a line in POLICIES."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from combkv_jax.cache.base import CacheShape, LayerCache, full_cache_bytes, nbytes, write
from combkv_jax.cache.comb import Banded, Cache, Chunks, Comb, History, Packed
from combkv_jax.cache.full import Full
from combkv_jax.cache.window import Window
from combkv_jax.config import LlamaConfig
from combkv_jax.errors import RequestError
from combkv_jax.layers import rotary_frequencies

__all__ = [
    "POLICIES",
    "Banded",
    "Cache",
    "CacheShape",
    "Chunks",
    "Comb",
    "Full",
    "History",
    "LayerCache",
    "Packed",
    "Window",
    "create_cache",
    "full_cache_bytes",
    "nbytes",
    "write",
]

# Policies for recent tokens; with a History in front any of them becomes `comb`.
POLICIES: dict[str, type[LayerCache]] = {"full": Full, "window": Window}


def create_cache(
    config: LlamaConfig,
    policy: str,
    batch: int,
    capacity: int,
    dtype,
    options: Mapping[str, int] | None = None,
    keys: jax.sharding.Sharding | None = None,
    small: jax.sharding.Sharding | None = None,
) -> Cache:
    """An empty cache for `batch` rows of at most `capacity` recent tokens.

    options: the policy's settings (`window`: {"first": S, "window": W}). keys, small: see
    CacheShape.
    Raises RequestError for an unknown policy.
    """
    if policy not in POLICIES:
        raise RequestError(f"cache policy {policy!r} is not one of {', '.join(POLICIES)}.")
    shape = CacheShape(
        batch,
        config.num_key_value_heads,
        config.head_dim,
        capacity,
        dtype,
        rotary_frequencies(config),
        dict(options or {}),
        keys,
        small,
    )
    layers = tuple(POLICIES[policy].create(shape) for _ in range(config.num_hidden_layers))
    return Cache(layers, shape.counter())
