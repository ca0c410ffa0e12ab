"""Tiny random models and packed batches for the tests; every number drawn from a seed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax import model
from combkv_jax.config import CombConfig, LlamaConfig, RopeScaling

# Wavelengths of a tiny head lie below, between and above its two borders.
SCALING = RopeScaling(8.0, 1.0, 4.0, 64)


def llama_config(**changes) -> LlamaConfig:
    """A Llama of 3 layers whose head_dim is not hidden_size / heads."""
    fields = {
        "vocab_size": 97,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": SCALING,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**fields | changes)


def comb_config(
    gate: str,
    cross_layers=(0, 2),
    chunk_size=13,
    sink_tokens=4,
    summary_layers=None,
    summary_tokens=5,
    **changes,
):
    """A model of either form over `llama_config(**changes)`. summary_layers: of our form, None for
    the cross layers of the upper half."""
    encoder = {"lse": "decoder", "tanh": "layers"}[gate]
    text = llama_config(**changes)
    config = CombConfig(
        text, encoder, gate, (), chunk_size, sink_tokens, summary_tokens=summary_tokens
    ).keeping(cross_layers)
    if gate == "tanh" or summary_layers is None:
        return config
    return dataclasses.replace(config, summary_layers=tuple(summary_layers))


def packed_batch(rng: np.random.Generator, vocab: int, samples) -> dict[str, np.ndarray]:
    """The spec's packed batch from samples of (recent tokens, lengths of the chunks), such as
    `[(17, [12, 7]), (9, [])]`. About a quarter of the labels is not counted."""
    recent = [length for length, _ in samples]
    histories = [sum(chunks) for _, chunks in samples]
    chunks = [length for _, lengths in samples for length in lengths]
    labels = rng.integers(0, vocab, sum(recent))
    labels[rng.random(sum(recent)) < 0.25] = -100

    def cumulative(lengths):
        return np.cumsum([0, *lengths]).astype(np.int32)

    def positions(lengths):
        return np.concatenate([np.arange(n) for n in [0, *lengths]]).astype(np.int32)[None]

    return {
        "input_ids": rng.integers(0, vocab, (1, sum(recent))).astype(np.int32),
        "chunk_ids": rng.integers(0, vocab, (1, sum(chunks))).astype(np.int32),
        "shift_labels": labels.astype(np.int32)[None],
        "position_ids": positions(recent),
        "position_ids_k": positions(chunks),
        "cu_seqlens_q": cumulative(recent),
        "cu_seqlens_k": cumulative(histories),
        "cu_seqlens_chunk": cumulative(chunks),
    }


def padded(batch: dict[str, np.ndarray], tokens: int, segments: int) -> dict[str, np.ndarray]:
    """The batch with `tokens` more tokens and chunk tokens, and room for `segments` more samples
    and chunks, all of it padding."""
    out = {}
    for name, array in batch.items():
        if name.startswith("cu_seqlens"):
            out[name] = np.pad(array, (0, segments), mode="edge")
        else:
            fill = -100 if name == "shift_labels" else 0
            out[name] = np.pad(array, [(0, 0), (0, tokens)], constant_values=fill)
    return out


def random_llama(rng: np.random.Generator, config: LlamaConfig) -> dict[str, np.ndarray]:
    """Random float32 weights of a plain Llama by our names; norms are not 1."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    shapes = {"decoder.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        name = f"decoder.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.self_attn.q_proj.weight": (queries, hidden),
            f"{name}.self_attn.k_proj.weight": (keys, hidden),
            f"{name}.self_attn.v_proj.weight": (keys, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, queries),
            f"{name}.post_attention_layernorm.weight": (hidden,),
            f"{name}.mlp.gate_proj.weight": (inner, hidden),
            f"{name}.mlp.up_proj.weight": (inner, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, inner),
        }
    shapes["decoder.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["decoder.lm_head.weight"] = (config.vocab_size, hidden)
    return {name: random_array(rng, shape) for name, shape in shapes.items()}


def random_array(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A matrix that keeps its input's size, or a vector of numbers around 1."""
    if len(shape) == 1:
        return rng.normal(1, 0.2, shape).astype(np.float32)
    return (rng.normal(size=shape) * 1.5 / shape[-1] ** 0.5).astype(np.float32)


def untrained(config: CombConfig, llama: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A plain Llama with the `lse` form's history as it starts: copies, gates of zero, and
    summaries that nothing has a share of."""
    parameters = dict(llama)
    rng = np.random.default_rng(len(llama))
    for name, declared in model.declarations(config).items():
        if ".summary." in name:
            is_gate = name.endswith("_gate")
            zeros = np.zeros(declared.shape, np.float32)
            parameters[name] = zeros if is_gate else random_array(rng, declared.shape)
    for i, layer in enumerate(config.cross_layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            source = llama[f"decoder.layers.{layer}.self_attn.{name}.weight"]
            parameters[f"history.{i}.{name}.weight"] = source.copy()
        for name in ("bias", "bias_slope", "scale", "scale_slope"):
            zeros = np.zeros(config.text.num_attention_heads, np.float32)
            parameters[f"history.{i}.{name}"] = zeros
    return parameters


def from_hf_name(name: str) -> str:
    """Our name of a parameter of transformers' LlamaForCausalLM."""
    return "decoder." + name.removeprefix("model.")


def from_combllama_name(name: str) -> str | None:
    """Our name of a tensor in the original's checkpoint; None where it is held once already."""
    if name == "chunk_model.embed_tokens.weight":
        return None
    for theirs, ours in (
        ("language_model.model.cross_layers.", "history."),
        ("language_model.model.", "decoder."),
        ("language_model.", "decoder."),
        ("chunk_model.", "encoder."),
    ):
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    raise ValueError(name)


def load_into_transformers(reference, parameters: dict[str, np.ndarray]) -> None:
    """Puts a plain Llama's parameters into a transformers LlamaForCausalLM, all of them."""
    import torch

    with torch.no_grad():
        theirs = dict(reference.named_parameters())  # a tied head is listed once
        assert sorted(map(from_hf_name, theirs)) == sorted(parameters)
        for name, tensor in theirs.items():
            tensor.copy_(torch.tensor(parameters[from_hf_name(name)]))


def random_parameters(rng: np.random.Generator, config: CombConfig) -> dict[str, np.ndarray]:
    """Random float32 arrays for every parameter the model declares; gates are open, not at 1."""
    out = {}
    for name, declared in model.declarations(config).items():
        if declared.init == "zeros":
            out[name] = rng.normal(0, 0.3, declared.shape).astype(np.float32)
        else:
            out[name] = random_array(rng, declared.shape)
    return out


def build(config: CombConfig, parameters, dtype=jnp.float32) -> model.CombLlama:
    """The JAX model of NumPy parameters; those declared float32 stay so."""
    declared = model.declarations(config)
    arrays = {
        name: jnp.asarray(array, declared[name].dtype or dtype)
        for name, array in parameters.items()
    }
    return model.build(config, arrays)


# Compiled as a whole: op by op, even a tiny model takes many times longer.


@jax.jit
def run(comb_llama: model.CombLlama, batch) -> tuple[jax.Array, list]:
    """A packed batch's logits, and its history's K/V as `encode` gives them."""
    states = comb_llama.encode(batch["chunk_ids"], batch["cu_seqlens_chunk"])
    return comb_llama(batch), states


@jax.jit
def logits(comb_llama: model.CombLlama, batch) -> jax.Array:
    """A packed batch's logits."""
    return comb_llama(batch)


@jax.jit
@jax.value_and_grad
def loss_and_gradient(comb_llama: model.CombLlama, batch) -> jax.Array:
    """Mean negative log-likelihood of the labels that are not -100, and its gradient by every
    parameter."""
    labels = batch["shift_labels"].reshape(-1)
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(comb_llama(batch)), jnp.maximum(labels, 0)[:, None], axis=1
    )[:, 0]
    return -jnp.sum(jnp.where(labels == -100, 0.0, chosen)) / jnp.sum(labels != -100)
