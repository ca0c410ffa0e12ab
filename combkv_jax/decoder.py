"""The Llama decoder, and the two ways a layer looks at the compressed history."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from combkv_jax.attention import Attended
from combkv_jax.cache import Cache, Comb, LayerCache, Packed
from combkv_jax.config import CombConfig, LlamaConfig
from combkv_jax.layers import (
    MLP,
    HeadsLinear,
    Linear,
    RMSNorm,
    declare,
    project_heads,
    rotary_angles,
    rotate,
    unit_rms,
)

Angles = tuple[jax.Array, jax.Array]


def query_projection(config: LlamaConfig) -> Linear:
    """D -> H * head_dim."""
    return Linear(config.hidden_size, config.num_attention_heads * config.head_dim, ("heads", None))


def key_value_projection(config: LlamaConfig) -> Linear:
    """D -> K * head_dim."""
    return Linear(
        config.hidden_size, config.num_key_value_heads * config.head_dim, ("kv_heads", None)
    )


def output_projection(config: LlamaConfig) -> Linear:
    """H * head_dim -> D."""
    return Linear(config.num_attention_heads * config.head_dim, config.hidden_size, (None, "heads"))


def keys_values(
    projections: SelfAttention | HistoryAttention, h: jax.Array, angles: Angles, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """K (after rotary) and V, [B, T, K, head_dim], of a layer's normed input h [B, T, D]."""
    key = rotate(project_heads(projections.k_proj, h, head_dim), angles)
    return key, project_heads(projections.v_proj, h, head_dim)


def flatten_heads(x: jax.Array) -> jax.Array:
    """[B, T, H, D] -> [B, T, H * D]."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


class SelfAttention(nnx.Module):
    """The four projections of Llama's attention."""

    def __init__(self, config: LlamaConfig):
        self.q_proj = query_projection(config)
        self.k_proj = key_value_projection(config)
        self.v_proj = key_value_projection(config)
        self.o_proj = output_projection(config)


class DecoderLayer(nnx.Module):
    """A pre-norm Llama block (Touvron et al. 2023) over any cache."""

    def __init__(self, config: LlamaConfig):
        self.head_dim = config.head_dim
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def __call__(
        self,
        x: jax.Array,
        angles: Angles,
        entry: LayerCache,
        lengths: jax.Array | None,
        history: HistoryAttention | None = None,
        words: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """x [B, T, D] -> [B, T, D] and the new entry. lengths [B]: how many of the T tokens are
        real; None for one decoded token a row. history: the layer's own view of `entry.chunks`,
        and words [B, T, D], what its summary gathers (`Decoder.words`)."""
        attn = self.self_attn
        h = self.input_layernorm(x)
        query = self.queries(h, angles)
        key, value = keys_values(attn, h, angles, self.head_dim)
        local, entry = entry.extend(query, key, value, lengths)
        if history is None:
            x = x + attn.o_proj(flatten_heads(local.out))
        else:
            out, entry = history(h, words, angles, local, attn.o_proj, entry, lengths)
            x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), entry

    def queries(self, h: jax.Array, angles: Angles) -> jax.Array:
        """Queries (after rotary) [B, T, H, head_dim] of the normed input h [B, T, D]."""
        return rotate(project_heads(self.self_attn.q_proj, h, self.head_dim), angles)


class LocalSummary(nnx.Module):
    """Which words stand just in front, added to a kept layer's keys and queries.

    Sliding-window attention of its own over the last `summary_tokens` tokens, whose values are
    made from the tokens' embeddings instead of the layer's input. A name in a question and the
    same name in a chunk so give the same values whatever else stands around them, and the query
    finds the place where it was told among thousands of similar ones; the layer's input alone
    names it too weakly (docs/training.md). To the values' mean comes the product of two projections
    of it (bilinear: Kim et al. 2017), which holds products of every two words: names that share one
    of two words have half of the mean in common, and much less of the product. Gates of 0 add
    nothing.
    """

    def __init__(self, config: CombConfig):
        text = config.text
        self.head_dim, self.tokens = text.head_dim, config.summary_tokens
        self.q_proj = key_value_projection(text)
        self.k_proj = key_value_projection(text)
        self.v_proj = key_value_projection(text)
        self.left = HeadsLinear(text.num_key_value_heads, text.head_dim)
        self.right = HeadsLinear(text.num_key_value_heads, text.head_dim)
        self.query_gate = declare((text.num_attention_heads,), (None,), "zeros", "float32")
        self.key_gate = declare((text.num_key_value_heads,), (None,), "zeros", "float32")

    def __call__(
        self,
        h: jax.Array,
        words: jax.Array,
        angles: Angles,
        nearby: LayerCache,
        lengths: jax.Array | None,
    ) -> tuple[jax.Array, LayerCache]:
        """[B, T, K, head_dim] of the layer's normed input h and words [B, T, D], and the new
        `nearby`."""
        query, key = (
            rotate(project_heads(linear, h, self.head_dim), angles)
            for linear in (self.q_proj, self.k_proj)
        )
        value = project_heads(self.v_proj, words, self.head_dim)
        gathered, nearby = nearby.extend(query, key, value, lengths)
        mean = gathered.out
        return mean + self.left(mean) * self.right(mean), nearby

    def in_key(self, key: jax.Array, summary: jax.Array) -> jax.Array:
        """key [B, T, K, head_dim] with the summary."""
        return (key + self.key_gate[...][:, None] * summary).astype(key.dtype)

    def in_query(self, query: jax.Array, summary: jax.Array) -> jax.Array:
        """query [B, T, H, head_dim] with the summary of its KV head."""
        summary = jnp.repeat(summary, query.shape[2] // summary.shape[2], axis=2)
        return (query + self.query_gate[...][:, None] * summary).astype(query.dtype)


class HistoryAttention(nnx.Module):
    """Our form: one softmax over history and recent tokens, with its own projections.

    With copied projections, b = a = s = u = 0 and summaries gated off it is ordinary attention
    over both; with b = -inf it is the frozen layer, bit for bit.
    """

    def __init__(self, config: CombConfig, layer: int):
        text = config.text
        self.head_dim, self.chunk_size = text.head_dim, config.chunk_size
        self.q_proj = query_projection(text)
        self.k_proj = key_value_projection(text)
        self.v_proj = key_value_projection(text)
        self.o_proj = output_projection(text)
        heads = (text.num_attention_heads,)
        self.bias = declare(heads, (None,), "zeros", "float32")  # b_h
        self.bias_slope = declare(heads, (None,), "zeros", "float32")  # a_h
        self.scale = declare(heads, (None,), "zeros", "float32")  # s_h
        self.scale_slope = declare(heads, (None,), "zeros", "float32")  # u_h
        self.summary = LocalSummary(config) if layer in config.summary_layers else None

    def keys_values(
        self, h: jax.Array, words: jax.Array, angles: Angles, chunk: Packed
    ) -> tuple[jax.Array, jax.Array]:
        """K and V [B, T, K, head_dim] of chunk tokens: the layer's normed input h and words
        [B, T, D], each token seeing what `chunk` says."""
        key, value = keys_values(self, h, angles, self.head_dim)
        if self.summary is not None:
            nearby = chunk.nearby(self.summary.tokens)
            whole = jnp.full(h.shape[0], h.shape[1], jnp.int32)
            summary, _ = self.summary(h, words, angles, nearby, whole)
            key = self.summary.in_key(key, summary)
        return key, value

    def queries(
        self,
        h: jax.Array,
        words: jax.Array,
        angles: Angles,
        size: jax.Array,
        nearby: LayerCache | None,
        lengths: jax.Array | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Queries of the history [B, T, H, head_dim], and the new `nearby`. size: log of the
        history's tokens, in chunks, [B, T, 1]."""
        query = rotate(project_heads(self.q_proj, h, self.head_dim), angles)
        if self.summary is not None:
            summary, nearby = self.summary(h, words, angles, nearby, lengths)
            query = self.summary.in_query(query, summary)
        sharpness = jnp.exp(self.scale[...] + self.scale_slope[...] * size)  # [B, T, H]
        return (query * sharpness[..., None]).astype(query.dtype), nearby

    def __call__(
        self,
        h: jax.Array,
        words: jax.Array,
        angles: Angles,
        local: Attended,
        o_proj: Linear,
        entry: Comb,
        lengths: jax.Array | None,
    ) -> tuple[jax.Array, Comb]:
        """The layer's attention output [B, T, D] from its normed input h and what its own
        attention over recent tokens gave, and the new entry."""
        chunks = entry.chunks
        count = jnp.maximum(chunks.end - chunks.start, 1)[..., None]  # [B, T, 1]
        size = jnp.log(count.astype(jnp.float32) / self.chunk_size)
        query, nearby = self.queries(h, words, angles, size, entry.nearby, lengths)
        entry = dataclasses.replace(entry, nearby=nearby)
        past = chunks.attend(query)
        prior = self.bias[...] + self.bias_slope[...] * size
        weight = jax.nn.sigmoid(past.lse - local.lse + prior)[..., None]
        recent = (local.out * (1 - weight)).astype(local.out.dtype)
        past = (past.out * weight).astype(past.out.dtype)
        return o_proj(flatten_heads(recent)) + self.o_proj(flatten_heads(past)), entry


class CrossAttention(nnx.Module):
    """The original's projections and per-head norms."""

    def __init__(self, config: LlamaConfig):
        self.q_proj = query_projection(config)
        self.o_proj = output_projection(config)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)


class CrossLayer(nnx.Module):
    """The original form: a tanh-gated cross-attention block before a decoder layer."""

    def __init__(self, config: CombConfig):
        text = config.text
        self.head_dim = text.head_dim
        self.input_layernorm = RMSNorm(text.hidden_size, text.rms_norm_eps)
        self.cross_attn = CrossAttention(text)
        self.cross_attn_attn_gate = declare((1,), (None,), "zeros")
        self.post_attention_layernorm = RMSNorm(text.hidden_size, text.rms_norm_eps)
        self.mlp = MLP(text)
        self.cross_attn_mlp_gate = declare((1,), (None,), "zeros")

    def __call__(self, x: jax.Array, entry: Comb) -> jax.Array:  # [B, T, D] -> [B, T, D]
        attn = self.cross_attn
        query = project_heads(attn.q_proj, self.input_layernorm(x), self.head_dim)
        out = attn.o_proj(flatten_heads(entry.chunks.attend(attn.q_norm(query)).out))
        x = x + jnp.tanh(self.cross_attn_attn_gate[...]) * out
        out = self.mlp(self.post_attention_layernorm(x))
        # A row without history passes unchanged, as if the block were not there.
        gate = jnp.where(entry.chunks.end > entry.chunks.start, 1, 0).astype(x.dtype)[..., None]
        return x + gate * jnp.tanh(self.cross_attn_mlp_gate[...]) * out


class Decoder(nnx.Module):
    """Embedding, layers (unrolled, one array each), final norm and head."""

    def __init__(self, config: LlamaConfig):
        self.config = config
        sizes = (config.hidden_size, config.vocab_size)
        # Divided by columns: looking a token up must not gather the table from every device.
        self.embed_tokens = Linear(*sizes, (None, "hidden"))
        self.layers = nnx.List([DecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(*sizes, ("vocab", None))

    def embed(self, ids: jax.Array) -> jax.Array:  # [B, T] -> [B, T, D]
        return self.embed_tokens.weight[...][ids]

    def words(self, embedded: jax.Array) -> jax.Array:
        """What a LocalSummary gathers of embedded tokens [B, T, D]: embeddings of one size."""
        return unit_rms(embedded, self.config.rms_norm_eps)

    def logits(self, x: jax.Array) -> jax.Array:
        """Final norm and head: [..., D] -> float32 [..., V]."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        x = self.norm(x)
        return jax.lax.dot_general(
            x,
            head.weight[...],
            (((x.ndim - 1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    def __call__(
        self,
        ids: jax.Array,
        positions: jax.Array,
        cache: Cache,
        lengths: jax.Array | None,
        blocks: dict[int, HistoryAttention | CrossLayer],
        *,
        remat: Callable | None = None,
    ) -> tuple[jax.Array, Cache]:
        """ids, positions [B, T] -> hidden states before the final norm [B, T, D], and the cache.

        blocks: decoder layer -> its view of the history, for layers whose entry has chunks.
        remat: `jax.checkpoint`, so that a backward pass keeps each layer's input and makes the
        rest of it again; entries that keep tokens stay as they were then.
        """
        x = self.embed(ids)
        words = self.words(x)
        angles = rotary_angles(self.config, positions)
        entries, earlier = [], None
        for i, (layer, entry) in enumerate(zip(self.layers, cache.layers, strict=True)):
            block = blocks.get(i)
            if lengths is None and i:
                entry = entry.expect(functools.partial(self._queries_ahead, i, earlier, angles))
            earlier = x

            def run(x, layer=layer, entry=entry, block=block):
                if isinstance(block, CrossLayer):
                    x, block = block(x, entry), None
                return layer(x, angles, entry, lengths, block, words)

            with jax.named_scope(f"layer_{i}"):
                if remat:
                    x = remat(lambda x, run=run: run(x)[0])(x)
                else:
                    x, entry = run(x)
            entries.append(entry)
        taken = 1 if lengths is None else lengths
        return x, Cache(tuple(entries), cache.position + taken)

    def _queries_ahead(self, layer: int, x: jax.Array, angles: Angles) -> jax.Array:
        """About what the queries [B, T, H, head_dim] of a layer will be, from the input x [B, T, D]
        of the layer before it."""
        h = self.layers[layer - 1].input_layernorm(x)
        return self.layers[layer].queries(h, angles)
