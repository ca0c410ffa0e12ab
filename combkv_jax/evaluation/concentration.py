"""How much of a layer's attention lies outside its few largest weights: which layers the `tailor`
cache keeps in a few bits, and of which it fetches a few tokens (TailorKV, Yao et al. 2025)."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax.attention import fold
from combkv_jax.cache import Cache, LayerCache, Packed
from combkv_jax.errors import RequestError
from combkv_jax.evaluation import tasks
from combkv_jax.language_model import LanguageModel
from combkv_jax.model import CombLlama
from combkv_jax.weights import tailored

QUERIES = 32  # the last ones of the prompt
LARGEST = 0.05  # share of a query's tokens, those with its largest weights
FEWEST_TOKENS = 64  # fewer tell nothing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched(LayerCache):
    """A layer's attention over one prompt, and what its last queries leave outside."""

    outside: jax.Array  # float32 []

    def prefill(self, query, key, value, lengths):
        index = jnp.arange(key.shape[1])[None]
        attended, _ = Packed.causal(index).prefill(query, key, value, lengths)
        return attended, Watched(outside(query, key))


def outside(query: jax.Array, key: jax.Array) -> jax.Array:
    """1 - the sum of the largest 5 % (at least one) of a query's causal attention weights: the mean
    over the last queries and all heads, float32 []. query [1, T, H, D], key [1, T, K, D]."""
    tokens, heads, kv_heads = key.shape[1], query.shape[2], key.shape[2]
    query = fold(query[:, -QUERIES:], kv_heads)  # [1, K, Q * G, D]
    count = jnp.arange(max(tokens - QUERIES, 0), tokens) + 1  # tokens that each query sees
    count = jnp.repeat(count, heads // kv_heads)[:, None]
    logits = jnp.einsum("bkrd,bskd->bkrs", query, key, preferred_element_type=jnp.float32)
    place = jnp.arange(tokens)
    logits = jnp.where(place < count, logits * query.shape[-1] ** -0.5, -jnp.inf)
    weights = jnp.sort(jax.nn.softmax(logits, axis=-1), axis=-1, descending=True)
    largest = jnp.ceil(LARGEST * count)
    return 1 - jnp.mean(jnp.sum(jnp.where(place < largest, weights, 0), axis=-1))


@jax.jit
def _measure(model: CombLlama, ids: jax.Array) -> jax.Array:
    """`outside` of every layer, float32 [L], for a prompt ids [T]."""
    entries = tuple(Watched(jnp.float32(0)) for _ in model.decoder.layers)
    cache = Cache(entries, jnp.zeros(1, jnp.int32))
    index = jnp.arange(ids.shape[0])[None]
    _, cache = model.decoder(ids[None], index, cache, jnp.full(1, ids.shape[0]), {})
    return jnp.stack([entry.outside for entry in cache.layers])


def classify(
    lm: LanguageModel, tokens: int = 4096, threshold: float = 0.2
) -> tailored.Classification:
    """Which layers of a model look at too many tokens to fetch a few, by a page of a novel.

    tokens: of the page. threshold: the least share outside that makes a layer one to be coded, in
    the paper 0.1 to 0.3. Raises RequestError for a page that is too short or long for the model,
    and for a threshold outside 0 to 1.
    """
    most = lm.config.text.max_position_embeddings
    if not FEWEST_TOKENS <= tokens <= most:
        raise RequestError(
            f"{tokens} tokens were asked for to classify layers by; this model takes "
            f"{FEWEST_TOKENS} to {most}."
        )
    if not (math.isfinite(threshold) and 0 < threshold < 1):
        raise RequestError(f"threshold is {threshold}; it must lie between 0 and 1.")
    page = lm.tokens(tasks.bundled_text(*tasks.BOOKS["choose"]), special=True)[:tokens]
    shares = [float(share) for share in np.asarray(_measure(lm.model, page))]
    if not all(map(math.isfinite, shares)):
        raise RequestError("the model's attention is not finite; its weights are damaged.")
    quantized = tuple(layer for layer, share in enumerate(shares) if share > threshold)
    return tailored.Classification(quantized, tuple(shares), threshold, len(page))


def table(result: tailored.Classification) -> list[tuple[int, str, str]]:
    """Rows (layer, share outside, what the `tailor` cache makes of it)."""
    kinds = ("fetched from the host", "coded in a few bits")
    return [
        (layer, f"{share:.3f}", kinds[layer in result.quantized])
        for layer, share in enumerate(result.outside)
    ]
