"""Cache policies behind one interface. Adding one is a file and a line in POLICIES."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from combkv_jax.cache.base import CacheShape, LayerCache, full_cache_bytes, nbytes, write
from combkv_jax.cache.comb import Banded, Cache, Chunks, Comb, History, Packed
from combkv_jax.cache.full import Full
from combkv_jax.cache.h2o import H2O
from combkv_jax.cache.infllm import InfLLM
from combkv_jax.cache.pqcache import PQCache
from combkv_jax.cache.quantized import QuantizedTokens
from combkv_jax.cache.quest import Quest
from combkv_jax.cache.snapkv import SnapKV
from combkv_jax.cache.tailor import Tailor
from combkv_jax.cache.window import Window
from combkv_jax.config import LlamaConfig
from combkv_jax.errors import RequestError
from combkv_jax.layers import rotary_frequencies

__all__ = [
    "CODED",
    "POLICIES",
    "Banded",
    "Cache",
    "CacheShape",
    "Chunks",
    "Comb",
    "Full",
    "H2O",
    "History",
    "InfLLM",
    "LayerCache",
    "PQCache",
    "Packed",
    "QuantizedTokens",
    "Quest",
    "SnapKV",
    "Tailor",
    "Window",
    "create_cache",
    "full_cache_bytes",
    "nbytes",
    "write",
]

# Policies for recent tokens; with a History in front any of them becomes `comb`.
POLICIES: dict[str, type[LayerCache]] = {
    "full": Full,
    "window": Window,
    "quantized": QuantizedTokens,
    "h2o": H2O,
    "snapkv": SnapKV,
    "quest": Quest,
    "tailor": Tailor,
    "infllm": InfLLM,
    "pqcache": PQCache,
}

CODED = ("comb", "quantized")  # caches that are told in how many bits to keep numbers


def create_cache(
    config: LlamaConfig,
    policy: str,
    batch: int,
    capacity: int,
    dtype,
    options: Mapping[str, Any] | None = None,
    keys: jax.sharding.Sharding | None = None,
    small: jax.sharding.Sharding | None = None,
) -> Cache:
    """An empty cache for `batch` rows of at most `capacity` recent tokens.

    options: the policy's settings (`window`: {"first": S, "window": W}; of the others their
    `create` says which). keys, small: see CacheShape.
    Raises RequestError for an unknown policy, and for options it cannot take.
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
        config.num_attention_heads // config.num_key_value_heads,
        layers=config.num_hidden_layers,
    )
    layers = tuple(
        POLICIES[policy].create(dataclasses.replace(shape, layer=layer))
        for layer in range(config.num_hidden_layers)
    )
    return Cache(layers, shape.counter())
