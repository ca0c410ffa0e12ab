"""Which tensors a model needs, and where each comes from: the source, a copy, or a constant."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax.config import (
    FORMS,
    PRESETS,
    CombConfig,
    LlamaConfig,
    Preset,
    every_fourth,
)
from combkv_jax.errors import RequestError
from combkv_jax.layers import Declaration
from combkv_jax.model import declarations, starts_as
from combkv_jax.weights.source import DTYPES, Source, Tensor

# What tells one model from another; files differ in the rest, such as the positions.
_KNOWN_BY = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rope_theta",
)


def preset_for(text: LlamaConfig) -> Preset | None:
    """The preset with a measured list that these shapes belong to."""
    measured = (preset for preset in PRESETS.values() if preset.cross_layers and preset.text)
    for preset in measured:
        if all(getattr(preset.text, name) == getattr(text, name) for name in _KNOWN_BY):
            return preset
    return None


def choose_config(
    config: CombConfig,
    encoder: str | None = None,
    kept_layers: str | Sequence[int] | None = None,
    note=lambda line: None,
) -> CombConfig:
    """The model that a source's `config` becomes: a plain Llama gets a history, others keep theirs.

    encoder: "decoder" (our form, when None) or "layers" (the original). kept_layers: "measured"
    (when None, in our form), "every4" (when None, in the original), or layers. note: told in one
    line when nothing was measured for the model.
    """
    if config.cross_layers:
        if encoder not in (None, config.encoder) or kept_layers is not None:
            raise RequestError(
                f"this model already has a history (encoder {config.encoder!r}, layers "
                f"{list(config.cross_layers)}); an encoder and kept layers are chosen when a "
                "plain Llama is converted."
            )
        return config
    encoder = encoder or "decoder"
    if encoder not in FORMS:
        raise RequestError(f"encoder {encoder!r} is not known; use {' or '.join(FORMS)}.")
    text, preset = config.text, preset_for(config.text)
    layers = kept_layers
    if layers is None:
        layers = "measured" if encoder == "decoder" else "every4"
    if layers == "measured":
        if preset:
            layers = preset.cross_layers
        else:
            note(
                "No layers were measured for this model, so every fourth keeps the history; "
                "`python evaluate.py --model DIR --select-layers` measures better ones."
            )
            layers = "every4"
    if layers == "every4":
        layers = every_fourth(text.num_hidden_layers) or (text.num_hidden_layers - 1,)
    elif isinstance(layers, str):
        parts = layers.split(",")
        if not all(p.strip().isdecimal() for p in parts):
            raise RequestError(
                f"kept layers {layers!r} cannot be read; use measured, every4, or layer numbers "
                "such as 3,7,11."
            )
        layers = sorted(int(p) for p in parts)
    chunk_size = preset.chunk_size if preset and encoder == "decoder" else 1024
    chunk_size = min(chunk_size, max(1, text.max_position_embeddings // 2))
    return CombConfig(text, encoder, FORMS[encoder], (), chunk_size).keeping(layers)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A tensor of the model to be: where it comes from, and the dtype it will have."""

    tensor: Tensor
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.tensor.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        return self.tensor.read(self.dtype)


def plan(source: Source, config: CombConfig, dtype: str | None) -> dict[str, Planned]:
    """Every tensor of `config` by name. dtype: None keeps what is stored, but
    makes all of a model bfloat16 where any of it is quantised.

    Raises one RequestError that lists all tensors that are missing, unknown or mis-shaped.
    """
    is_new = not source.config.cross_layers  # a history is added, not read
    copies = starts_as(config) if is_new else {}
    quantised = any(t.stored not in DTYPES for t in source.tensors.values())
    result, missing, shapes = {}, [], []
    for name, declared in declarations(config).items():
        tensor = source.tensors.get(copies.get(name, name))
        if is_new and name not in copies and not name.startswith("decoder."):
            tensor = _fresh(name, declared)
        if tensor is None:
            if name not in copies:
                missing.append(name)
        elif tensor.shape != declared.shape:
            if name not in copies:
                shapes.append(f"{tensor.name} {list(tensor.shape)} not {list(declared.shape)}")
        else:
            stored = dtype or ("bfloat16" if quantised else tensor.stored)
            result[name] = Planned(tensor, DTYPES[declared.dtype or stored])
    extra = [*source.unknown, *(source.tensors[n].name for n in source.tensors.keys() - result)]
    mis_shaped = {s.split(" ")[0] for s in shapes}
    problems = {
        "missing": sorted(missing),
        "unknown": sorted(set(extra) - mis_shaped),
        "of another shape": sorted(shapes),
    }
    if any(problems.values()):
        listed = "; ".join(f"{k}: {', '.join(v)}" for k, v in problems.items() if v)
        raise RequestError(f"the tensors of {source.path} do not fit its config ({listed}).")
    return result


def _fresh(name: str, declared: Declaration) -> Tensor:
    """A tensor that begins as it is declared; the same numbers for the same name and shape."""

    def read(dtype: np.dtype) -> np.ndarray:
        key = jax.random.key(zlib.crc32(name.encode()))
        return np.asarray(declared.create(key, jnp.dtype(dtype))).astype(dtype)

    return Tensor(declared.init, declared.shape, "float32", read)
