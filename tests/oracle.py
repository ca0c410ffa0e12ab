"""What the model computes, written once more in plain NumPy float64: the judge of the tests.

It shares no code with the package (only its config dataclasses), works on one sample, one chunk
and one head at a time, and keeps no cache, so that it can be read beside the description of
the two forms:

- the original CombLlama (`gate="tanh"`): chunks through bidirectional layers of their own,
  tanh-gated cross-attention before some decoder layers;
- CombKV (`gate="lse"`): chunks through the decoder itself, one softmax over history and recent
  tokens in some decoder layers.

`parameters` is always a flat mapping of our names to arrays; a matrix is [out, in].
T tokens asked, S tokens seen, D hidden size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from combkv_jax.config import CombConfig, LlamaConfig

Parameters = Mapping[str, np.ndarray]
KeysValues = tuple[np.ndarray, np.ndarray]  # keys and values, each [S, KV heads, head_dim]


def llama(config: LlamaConfig, parameters: Parameters, ids, positions) -> np.ndarray:
    """Logits [T, V] of a plain causal Llama on one sequence: ids [T], positions [T]."""
    p = in_float64(parameters)
    x = p["decoder.embed_tokens.weight"][np.asarray(ids)]
    for layer in range(config.num_hidden_layers):
        x = llama_layer(config, p, f"decoder.layers.{layer}", x, positions, causal=True)
    return head(config, p, x)


def forward(config: CombConfig, parameters: Parameters, batch: Mapping[str, np.ndarray]):
    """Logits [sum of T, V] of a packed batch: `input_ids` cut by `cu_seqlens_q` into samples,
    `chunk_ids` cut by `cu_seqlens_k` into the samples' histories, which `cu_seqlens_chunk` cuts
    into chunks."""
    p = in_float64(parameters)
    sample_logits = original_sample if config.is_original else comb_sample
    out = [sample_logits(config, p, recent, chunks) for recent, chunks in unpack(batch)]
    return np.concatenate(out)


def encode(config: CombConfig, parameters: Parameters, chunks: Sequence) -> list[KeysValues]:
    """The chunks' K/V for each cross layer, all chunks in a row: [sum of S, KV heads, head_dim]."""
    p = in_float64(parameters)
    chunk_states = original_chunk if config.is_original else comb_chunk
    return join([chunk_states(config, p, chunk) for chunk in chunks])


def loss(logits, shift_labels) -> float:
    """Mean negative log-likelihood of the labels [T] (already shifted; -100 is not counted)."""
    total, count = 0.0, 0
    for row, label in zip(logits, np.asarray(shift_labels).ravel(), strict=True):
        if label != -100:
            total += log_sum_exp(row) - row[label]
            count += 1
    return total / count


# The original form.


def original_chunk(config: CombConfig, p: Parameters, chunk) -> list[KeysValues]:
    """One chunk through the encoder's layers; K/V are taken after each, before any norm."""
    positions = np.arange(len(chunk))
    x = p["decoder.embed_tokens.weight"][chunk]
    states = []
    for i in range(len(config.cross_layers)):
        x = llama_layer(config.text, p, f"encoder.layers.{i}", x, positions, causal=False)
        key = heads(config.text, x, p[f"encoder.k_proj.{i}.weight"])
        value = heads(config.text, x, p[f"encoder.v_proj.{i}.weight"])
        states.append((key, value))
    return states


def original_sample(config: CombConfig, p: Parameters, recent, chunks) -> np.ndarray:
    """One sample's logits. Without any chunk it is the plain Llama."""
    history = join([original_chunk(config, p, chunk) for chunk in chunks])
    positions = np.arange(len(recent))
    x = p["decoder.embed_tokens.weight"][recent]
    for layer in range(config.text.num_hidden_layers):
        if layer in config.cross_layers and chunks:
            i = config.cross_layers.index(layer)
            x = cross_layer(config.text, p, f"history.{i}", x, *history[i])
        x = llama_layer(config.text, p, f"decoder.layers.{layer}", x, positions, causal=True)
    return head(config.text, p, x)


def cross_layer(config: LlamaConfig, p: Parameters, name: str, x, key, value) -> np.ndarray:
    """Gated cross-attention to all history tokens, then a gated feed-forward; no rotary."""
    h = rms_norm(config, x, p[f"{name}.input_layernorm.weight"])
    query = heads(config, h, p[f"{name}.cross_attn.q_proj.weight"])
    query = rms_norm(config, query, p[f"{name}.cross_attn.q_norm.weight"])
    key = rms_norm(config, key, p[f"{name}.cross_attn.k_norm.weight"])
    everything = np.ones((len(query), len(key)), bool)
    out, _ = attention(config, query, key, value, everything)
    out = out.reshape(len(x), -1) @ p[f"{name}.cross_attn.o_proj.weight"].T
    x = x + np.tanh(p[f"{name}.cross_attn_attn_gate"]) * out
    h = rms_norm(config, x, p[f"{name}.post_attention_layernorm.weight"])
    return x + np.tanh(p[f"{name}.cross_attn_mlp_gate"]) * swiglu(p, f"{name}.mlp", h)


# Our own form.


def comb_chunk(config: CombConfig, p: Parameters, chunk) -> list[KeysValues]:
    """One chunk's K/V for each cross layer: the layers' own k_proj and v_proj of the history."""
    layers = comb_chunk_layers(config, p, chunk)
    return [layers[layer] for layer in config.cross_layers]


def comb_chunk_layers(config: CombConfig, p: Parameters, chunk) -> list[KeysValues]:
    """One chunk through the decoder, alone; its K/V in every layer. In a cross layer they are what
    the history's projections make, elsewhere the decoder's own (only the sinks of them are used).
    The chunk is right-aligned: it ends at position chunk_size - 1 however short it is."""
    text, states = config.text, []
    positions = np.arange(config.chunk_size - len(chunk), config.chunk_size)
    x = p["decoder.embed_tokens.weight"][chunk]
    for layer in range(text.num_hidden_layers):
        name = f"decoder.layers.{layer}"
        projections = f"{name}.self_attn"
        if layer in config.cross_layers:
            projections = f"history.{config.cross_layers.index(layer)}"
        h = rms_norm(text, x, p[f"{name}.input_layernorm.weight"])
        key = rotary(text, heads(text, h, p[f"{projections}.k_proj.weight"]), positions)
        value = heads(text, h, p[f"{projections}.v_proj.weight"])
        if layer in config.summary_layers:
            told = summary(config, p, projections, h, chunk, positions)
            key = key + p[f"{projections}.summary.key_gate"][:, None] * told
        states.append((key, value))
        x = llama_layer(text, p, name, x, positions, causal=True)
    return states


def comb_sample(config: CombConfig, p: Parameters, recent, chunks) -> np.ndarray:
    """One sample's logits. Recent tokens stand behind a whole chunk; without any chunk they start
    at position 0 and this is the plain Llama."""
    text = config.text
    if not chunks:
        return llama(text, p, recent, np.arange(len(recent)))
    history = join([comb_chunk(config, p, chunk) for chunk in chunks])
    first_chunk = comb_chunk_layers(config, p, chunks[0])
    positions = np.arange(config.chunk_size, config.chunk_size + len(recent))
    length = sum(len(chunk) for chunk in chunks)
    x = p["decoder.embed_tokens.weight"][recent]
    for layer in range(text.num_hidden_layers):
        name = f"decoder.layers.{layer}"
        if layer in config.cross_layers:
            h = rms_norm(text, x, p[f"{name}.input_layernorm.weight"])
            own = history[config.cross_layers.index(layer)]
            x = x + merged_attention(config, p, layer, h, recent, positions, own, length)
            x = x + feed_forward(text, p, name, x)
        else:
            key, value = first_chunk[layer]
            sinks = (key[: config.sink_tokens], value[: config.sink_tokens])
            x = llama_layer(text, p, name, x, positions, causal=True, before=sinks)
    return head(text, p, x)


def summary(config: CombConfig, p: Parameters, name, h, ids, positions) -> np.ndarray:
    """What attention over the last few tokens of one text gathers of their words, the embeddings
    at a root mean square of one, and the product of two projections of that:
    [T, KV heads, head_dim]."""
    text = config.text
    words = p["decoder.embed_tokens.weight"][ids]
    words = rms_norm(text, words, np.ones(words.shape[1]))
    query = rotary(text, heads(text, h, p[f"{name}.summary.q_proj.weight"]), positions)
    key = rotary(text, heads(text, h, p[f"{name}.summary.k_proj.weight"]), positions)
    value = heads(text, words, p[f"{name}.summary.v_proj.weight"])
    out = np.zeros(query.shape)
    for t in range(len(h)):
        first = max(0, t + 1 - config.summary_tokens)
        for head_ in range(query.shape[1]):
            scores = key[first : t + 1, head_] @ query[t, head_] / math.sqrt(text.head_dim)
            share = np.exp(scores - log_sum_exp(scores))
            mean = share @ value[first : t + 1, head_]
            left, right = (p[f"{name}.summary.{side}.weight"][head_] for side in ("left", "right"))
            out[t, head_] = mean + (left @ mean) * (right @ mean)
    return out


def merged_attention(
    config: CombConfig, p: Parameters, layer, h, recent, positions, history, length
):
    """Recent and history attention, each with its own projections, weighted by how much of the
    softmax each holds and by the gates (bias b, bias_slope a, scale s, scale_slope u of a head)."""
    text, i = config.text, config.cross_layers.index(layer)
    local = f"decoder.layers.{layer}.self_attn"
    query = rotary(text, heads(text, h, p[f"{local}.q_proj.weight"]), positions)
    key = rotary(text, heads(text, h, p[f"{local}.k_proj.weight"]), positions)
    value = heads(text, h, p[f"{local}.v_proj.weight"])
    local_out, local_lse = attention(text, query, key, value, causal_mask(len(h)))

    growth = math.log(length / config.chunk_size)
    query = rotary(text, heads(text, h, p[f"history.{i}.q_proj.weight"]), positions)
    if layer in config.summary_layers:
        asked = summary(config, p, f"history.{i}", h, recent, positions)
        share = p[f"history.{i}.summary.query_gate"]
        for head_ in range(text.num_attention_heads):
            group = text.num_attention_heads // text.num_key_value_heads
            query[:, head_] += share[head_] * asked[:, head_ // group]
    for head_ in range(text.num_attention_heads):
        s, u = p[f"history.{i}.scale"][head_], p[f"history.{i}.scale_slope"][head_]
        query[:, head_] *= math.exp(s + u * growth)
    everything = np.ones((len(h), length), bool)
    history_out, history_lse = attention(text, query, *history, everything)

    for head_ in range(text.num_attention_heads):
        b, a = p[f"history.{i}.bias"][head_], p[f"history.{i}.bias_slope"][head_]
        odds = history_lse[:, head_] - local_lse[:, head_] + b + a * growth
        w = 1 / (1 + np.exp(-odds))
        local_out[:, head_] *= (1 - w)[:, None]
        history_out[:, head_] *= w[:, None]
    local_out = local_out.reshape(len(h), -1) @ p[f"{local}.o_proj.weight"].T
    history_out = history_out.reshape(len(h), -1) @ p[f"history.{i}.o_proj.weight"].T
    return local_out + history_out


# The parts of a Llama layer.


def llama_layer(config: LlamaConfig, p: Parameters, name, x, positions, causal, before=None):
    """A pre-norm Llama layer on one sequence x [T, D]. `before`: K/V of earlier tokens that every
    token sees."""
    h = rms_norm(config, x, p[f"{name}.input_layernorm.weight"])
    query = rotary(config, heads(config, h, p[f"{name}.self_attn.q_proj.weight"]), positions)
    key = rotary(config, heads(config, h, p[f"{name}.self_attn.k_proj.weight"]), positions)
    value = heads(config, h, p[f"{name}.self_attn.v_proj.weight"])
    visible = causal_mask(len(x)) if causal else np.ones((len(x), len(x)), bool)
    if before is not None:
        key = np.concatenate([before[0], key])
        value = np.concatenate([before[1], value])
        visible = np.concatenate([np.ones((len(x), len(before[0])), bool), visible], axis=1)
    out, _ = attention(config, query, key, value, visible)
    x = x + out.reshape(len(x), -1) @ p[f"{name}.self_attn.o_proj.weight"].T
    return x + feed_forward(config, p, name, x)


def feed_forward(config: LlamaConfig, p: Parameters, name, x) -> np.ndarray:
    h = rms_norm(config, x, p[f"{name}.post_attention_layernorm.weight"])
    return swiglu(p, f"{name}.mlp", h)


def head(config: LlamaConfig, p: Parameters, x) -> np.ndarray:
    """Final norm and logits; a tied head is the embedding."""
    tied = config.tie_word_embeddings
    weight = p["decoder.embed_tokens.weight" if tied else "decoder.lm_head.weight"]
    return rms_norm(config, x, p["decoder.norm.weight"]) @ weight.T


def attention(config: LlamaConfig, query, key, value, visible):
    """query [T, heads, head_dim], key and value [S, KV heads, head_dim], visible [T, S] ->
    output [T, heads, head_dim] and log-sum-exp of the scores [T, heads]. Neighbouring query heads
    share a KV head."""
    out = np.zeros(query.shape)
    lse = np.zeros(query.shape[:2])
    group = config.num_attention_heads // config.num_key_value_heads
    for head_ in range(config.num_attention_heads):
        scores = query[:, head_] @ key[:, head_ // group].T / math.sqrt(config.head_dim)
        scores = np.where(visible, scores, -np.inf)
        lse[:, head_] = log_sum_exp(scores)
        out[:, head_] = np.exp(scores - lse[:, head_, None]) @ value[:, head_ // group]
    return out, lse


def causal_mask(length: int) -> np.ndarray:
    return np.tril(np.ones((length, length), bool))


def log_sum_exp(scores) -> np.ndarray:
    top = scores.max(axis=-1, keepdims=True)
    return np.log(np.exp(scores - top).sum(axis=-1)) + top[..., 0]


def heads(config: LlamaConfig, x, weight) -> np.ndarray:
    """A projection cut into heads: [T, D] -> [T, heads, head_dim]."""
    return (x @ weight.T).reshape(len(x), -1, config.head_dim)


def rms_norm(config: LlamaConfig, x, weight) -> np.ndarray:
    mean_square = (x * x).mean(axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + config.rms_norm_eps) * weight


def swiglu(p: Parameters, name: str, x) -> np.ndarray:
    gate = x @ p[f"{name}.gate_proj.weight"].T
    up = x @ p[f"{name}.up_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ p[f"{name}.down_proj.weight"].T


def rotary(config: LlamaConfig, x, positions) -> np.ndarray:
    """Turns the pair (j, j + head_dim / 2) of every head by position * frequency_j."""
    half = config.head_dim // 2
    out = np.empty(x.shape)
    for j in range(half):
        angle = np.asarray(positions, np.float64)[:, None] * rotary_frequency(config, j)
        cos, sin = np.cos(angle), np.sin(angle)
        out[:, :, j] = x[:, :, j] * cos - x[:, :, j + half] * sin
        out[:, :, j + half] = x[:, :, j + half] * cos + x[:, :, j] * sin
    return out


def rotary_frequency(config: LlamaConfig, j: int) -> float:
    frequency = config.rope_theta ** (-2 * j / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    # How often this pair turns within the length the model was first trained on.
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if turns < low:
        return frequency / scaling.factor
    if turns > high:
        return frequency
    mix = (turns - low) / (high - low)
    return (1 - mix) * frequency / scaling.factor + mix * frequency


# Packing.


def unpack(batch: Mapping[str, np.ndarray]) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """The samples of a packed batch: (recent tokens, chunks)."""
    input_ids, chunk_ids = np.ravel(batch["input_ids"]), np.ravel(batch["chunk_ids"])
    recent_ends, history_ends, chunk_ends = (
        np.asarray(batch[name]).tolist()
        for name in ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_chunk")
    )
    samples = []
    for i in range(len(recent_ends) - 1):
        recent = input_ids[recent_ends[i] : recent_ends[i + 1]]
        chunks = []
        for start, end in itertools.pairwise(chunk_ends):
            if history_ends[i] <= start < end <= history_ends[i + 1]:
                chunks.append(chunk_ids[start:end])
        samples.append((recent, chunks))
    return samples


def join(chunks: Sequence[list[KeysValues]]) -> list[KeysValues]:
    """K/V of several chunks, layer by layer, in a row."""
    layers = zip(*chunks, strict=True)
    return [
        (np.concatenate([key for key, _ in layer]), np.concatenate([value for _, value in layer]))
        for layer in layers
    ]


def in_float64(parameters: Parameters) -> dict[str, np.ndarray]:
    return {name: np.asarray(array, np.float64) for name, array in parameters.items()}
