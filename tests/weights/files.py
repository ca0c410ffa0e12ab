"""Writes small checkpoints in the layouts of others, without the package's own writers."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import gguf
import numpy as np
import safetensors.numpy

from combkv_jax.config import CombConfig, LlamaConfig
from combkv_jax.model import declarations
from combkv_jax.weights.source import BFLOAT16
from tests import tiny

# Tiny models of four layers, whatever the other tests use.
llama_config = functools.partial(tiny.llama_config, num_hidden_layers=4)
comb_config = functools.partial(tiny.comb_config, cross_layers=(1, 3), num_hidden_layers=4)


def random_parameters(rng: np.random.Generator, config: CombConfig) -> dict[str, np.ndarray]:
    """Random float32 weights of any form by our names."""
    return {n: tiny.random_array(rng, d.shape) for n, d in declarations(config).items()}


def to_bfloat16(parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.astype(BFLOAT16) for name, array in parameters.items()}


def hf_name(ours: str) -> str:
    return ours.replace("decoder.lm_head", "lm_head").replace("decoder.", "model.")


def combllama_name(ours: str) -> str:
    ours = ours.replace("decoder.lm_head", "language_model.lm_head")
    ours = ours.replace("decoder.", "language_model.model.").replace("encoder.", "chunk_model.")
    return ours.replace("history.", "language_model.model.cross_layers.")


def write_json(path: Path, data) -> None:
    path.write_text(json.dumps(data))


def write_hf(folder: Path, config: LlamaConfig, tensors, shards: int = 1) -> Path:
    """A Hugging Face folder of tensors by *their* names, cut into `shards` files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config.to_hf())
    names = list(tensors)
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder
    where = {
        n: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, n in enumerate(names)
    }
    for file in set(where.values()):
        part = {n: tensors[n] for n in names if where[n] == file}
        safetensors.numpy.save_file(part, folder / file)
    write_json(folder / "model.safetensors.index.json", {"weight_map": where})
    return folder


def write_combllama(folder: Path, config: CombConfig, parameters) -> Path:
    """A folder of the original CombLlama, from parameters by our names."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {combllama_name(n): a for n, a in parameters.items()}
    tensors["chunk_model.embed_tokens.weight"] = parameters["decoder.embed_tokens.weight"]
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    text = config.text.to_hf()
    layers = list(config.cross_layers)
    write_json(
        folder / "config.json",
        {"model_type": "combllama", "text_config": text, "cross_attention_layers": layers},
    )
    return folder


def pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rotary rows of q and k: halves become neighbours."""
    size = rows.shape[0] // heads
    order = np.stack([np.arange(size // 2), np.arange(size // 2) + size // 2], 1).reshape(-1)
    return rows.reshape(heads, size, -1)[:, order].reshape(rows.shape)


def frequency_factors(config: LlamaConfig) -> np.ndarray:
    """What llama.cpp keeps of a llama3 scaling: a divisor for each rotary frequency."""
    s, factors = config.rope_scaling, []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * np.pi * config.rope_theta ** (i / config.head_dim)
        if wavelength < s.original_max_position_embeddings / s.high_freq_factor:
            factors.append(1.0)
        elif wavelength > s.original_max_position_embeddings / s.low_freq_factor:
            factors.append(s.factor)
        else:
            smooth = s.original_max_position_embeddings / wavelength - s.low_freq_factor
            smooth /= s.high_freq_factor - s.low_freq_factor
            factors.append(1 / ((1 - smooth) / s.factor + smooth))
    return np.array(factors, np.float32)


_GGUF = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(ours: str) -> str:
    top = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    parts = ours.removeprefix("decoder.").removesuffix(".weight").split(".")
    if parts[0] in top:
        return top[parts[0]] + ".weight"
    return f"blk.{parts[1]}.{_GGUF['.'.join(parts[2:])]}.weight"


def write_gguf(
    path: Path, config: LlamaConfig, parameters, quantise=None, metadata=None, extra=None
) -> Path:
    """A GGUF file. quantise: a GGMLQuantizationType for all matrices; metadata: told the writer,
    to add to it or change it; extra: more tensors by their GGUF names."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if metadata:
        metadata(writer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, array in parameters.items():
        kind = name.split(".")[-2]
        array = pairs(array, heads[kind]) if kind in heads else array
        if quantise is not None and array.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(array, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(gguf_name(name), array)
    if config.rope_scaling:
        writer.add_tensor("rope_freqs.weight", frequency_factors(config))
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_equal(arrays, expected) -> None:
    """The same names, dtypes and bits."""
    assert sorted(arrays) == sorted(expected)
    for name, array in expected.items():
        ours = np.asarray(arrays[name])
        assert ours.dtype == array.dtype, name
        np.testing.assert_array_equal(
            ours.view(np.uint8), np.ascontiguousarray(array).view(np.uint8), err_msg=name
        )
