"""GGUF files (llama.cpp): any quantisation the `gguf` package can expand.

Tensor data is read row block by row block, never mapped: a mapping's touched pages count as
resident memory, and a fp32 copy of an 8B model's embedding alone would be 2 GB.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, dequantize

from combkv_jax.config import LlamaConfig, RopeScaling, plain
from combkv_jax.errors import RequestError
from combkv_jax.weights import gguf_tokenizer, tensorfile
from combkv_jax.weights.source import Source, Tensor, plain_errors, read_blocks

MAX_HEADER_ITEMS = 8_000_000  # pieces of a header; Llama 3's has about a million

_TOP = {
    "token_embd.weight": "decoder.embed_tokens.weight",
    "output_norm.weight": "decoder.norm.weight",
    "output.weight": "decoder.lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE = "rope_freqs.weight"


class _Bytes:
    """The file as the reader sees it: plain slices (a memmap's are ten times slower), and an
    error, not an empty slice, when a truncated or hostile header points behind the end."""

    def __init__(self, data: np.ndarray):
        self.data, self.items = data.view(np.ndarray), 0

    def __getitem__(self, part: slice) -> np.ndarray:
        self.items += 1
        if part.stop > len(self.data) or part.stop < part.start:
            raise ValueError(f"it ends at byte {len(self.data)}, and {part.stop} were announced")
        if self.items > MAX_HEADER_ITEMS:
            raise ValueError(f"its header has more than {MAX_HEADER_ITEMS} items")
        return self.data[part]


class _Reader(GGUFReader):
    @property
    def data(self):
        return self._bytes

    @data.setter
    def data(self, value):
        self._bytes = _Bytes(value)


def open_gguf(path: Path) -> Source:
    """Opens a GGUF file of a Llama. Raises RequestError when it is another model or damaged."""
    with plain_errors(path, "GGUF file"):
        reader = _Reader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        infos = {
            t.name: (t.tensor_type, tuple(int(n) for n in reversed(t.shape)), t.data_offset)
            for t in reader.tensors
        }
    del reader  # and with it the mapping of the file
    with plain_errors(path, "GGUF file"):
        config = _config(path, fields, infos)
        tensors, unknown = _tensors(path, config, infos)

    def tokenizer():
        with plain_errors(path, "GGUF file, as to its tokenizer"):
            return gguf_tokenizer.build(path, fields)

    return Source(
        kind="GGUF file",
        path=path,
        config=plain(config),
        tensors=tensors,
        unknown=tuple(unknown),
        tokenizer=tokenizer,
        write_tokenizer=lambda folder: gguf_tokenizer.write(tokenizer(), fields, folder),
    )


def _tensors(
    path: Path, config: LlamaConfig, infos: dict[str, tuple]
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors by our names, and the names that are nobody's."""
    tensors, unknown = {}, []
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, (kind, shape, offset) in infos.items():
        if name == _ROPE:
            continue
        ours = _our_name(name)
        if ours is None:
            unknown.append(name)
            continue
        read = _read(path, kind, shape, offset, heads.get(name.split(".")[-2]))
        stored = tensorfile.NAMES.get(kind.name, kind.name)
        tensors[ours] = Tensor(name, shape, stored, read)
    return tensors, unknown


def _our_name(name: str) -> str | None:
    if name in _TOP:
        return _TOP[name]
    match name.split("."):
        case ["blk", number, part, "weight"] if number.isdecimal() and part in _LAYER:
            return f"decoder.layers.{int(number)}.{_LAYER[part]}.weight"
    return None


def _read(path: Path, kind: GGMLQuantizationType, shape: tuple[int, ...], offset: int, heads):
    """Reads, expands, and puts rotary rows of q and k (`heads` not None) back as halves."""
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    row_bytes = shape[-1] // per_block * block_bytes

    def read(dtype: np.dtype) -> np.ndarray:
        with path.open("rb", buffering=0) as file:

            def block(start: int, stop: int) -> np.ndarray:
                file.seek(offset + start * row_bytes)
                raw = np.fromfile(file, np.uint8, (stop - start) * row_bytes)
                try:
                    # as one long row: the package goes through rows 16 at a time
                    return dequantize(raw.reshape(1, -1), kind).reshape(stop - start, -1)
                except NotImplementedError:
                    raise RequestError(
                        f"{path} stores weights as {kind.name}, which the gguf package cannot "
                        "expand; use another quantisation of this model."
                    ) from None

            rows = shape if len(shape) == 2 else (1, *shape)
            out = read_blocks(block, rows, 4 * rows[-1], dtype).reshape(shape)
        if heads:  # stored as pairs (0, 1), (2, 3), ... of each head
            out = out.reshape(heads, -1, 2, shape[-1]).swapaxes(1, 2).reshape(shape)
        return out

    return read


def _config(path: Path, fields: dict[str, Any], infos: dict[str, tuple]) -> LlamaConfig:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise RequestError(f"{path} holds a {architecture!r} model; only 'llama' can be read.")
    if fields.get("split.count", 1) > 1:
        raise RequestError(
            f"{path} is one of {fields['split.count']} parts; join them first, with llama.cpp's "
            "llama-gguf-split --merge."
        )
    if fields.get("llama.expert_count"):
        raise RequestError(f"{path} is a mixture of experts, which cannot be read.")

    def get(key: str, *fallback):
        value = fields.get(f"llama.{key}", *fallback)
        if value is None and not fallback:
            raise RequestError(f"{path} lacks the entry llama.{key}.")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise RequestError(f"llama.{key} in {path} differs by layer; it must not.")
            value = value[0]
        # float32 1e-5 is 9.99999974e-06 as a Python float: take the shortest reading
        return float(str(np.float32(value))) if isinstance(value, float) else value

    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise RequestError(f"{path} uses {scaling!r} rope scaling; none and llama3 can be read.")
    if "token_embd.weight" not in infos:
        raise RequestError(f"{path} has no tensor token_embd.weight.")
    heads, hidden = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", None) or hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise RequestError(f"llama.{key} in {path} is {get(key)}; only {head_dim} can be read.")
    theta = get("rope.freq_base", 10000.0)  # llama.cpp's default
    rope = None
    if _ROPE in infos:
        kind, shape, offset = infos[_ROPE]
        factors = _read(path, kind, shape, offset, None)(np.dtype(np.float64))
        rope = rope_scaling(factors, theta, head_dim)
        if rope is None:
            raise RequestError(f"{_ROPE} in {path} is not a llama3 rope scaling; no other is read.")
    return LlamaConfig(
        vocab_size=infos["token_embd.weight"][1][0],
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=rope,
        max_position_embeddings=get("context_length"),
        tie_word_embeddings="output.weight" not in infos,
    )


def rope_scaling(factors: np.ndarray, theta: float, head_dim: int) -> RopeScaling | None:
    """The llama3 scaling behind the divisors [head_dim / 2] a GGUF keeps of it, or None.

    Between two wavelengths 1/divisor runs linearly in the frequency, from 1/factor to 1. With
    low_freq_factor 1 as its unit, one point on that line gives the original length if
    high_freq_factor is Llama's 4; two give both. Whatever reproduces all divisors is right.
    """
    if factors.shape != (head_dim // 2,) or not np.all(np.isfinite(factors) & (factors >= 1)):
        return None
    turns = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    factor = round(float(factors.max()), 4)
    smooth = (1 / factors - 1 / factor) / (1 - 1 / factor) if factor > 1 else np.zeros(0)
    between = np.flatnonzero((smooth > 1e-4) & (smooth < 1 - 1e-4))
    lines = [((3 * smooth[i] + 1) / turns[i], 4.0) for i in between[:1]]
    if between.size > 1:
        slope, offset = np.polyfit(turns[between], smooth[between], 1)
        lines.append((-slope / offset, 1 - 1 / offset))
    for original, high in lines:
        high, original = round(float(high), 3), round(float(original))
        if high > 1 and original > 0:
            expected = np.clip((original * turns - 1) / (high - 1), 0, 1)
            if np.allclose(1 / factors, expected + (1 - expected) / factor, rtol=1e-4):
                return RopeScaling(factor, 1.0, high, original)
    return None
