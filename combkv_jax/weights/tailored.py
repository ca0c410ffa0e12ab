"""Which layers of a model the `tailor` cache codes: a small file beside its weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax import console
from combkv_jax.errors import RequestError
from combkv_jax.model import CombLlama

NAME = "tailor.json"
SAMPLE = 16  # numbers of each tensor that tell a model; other weights differ in all of them


@dataclasses.dataclass(frozen=True)
class Classification:
    """quantized: layers to be coded; outside: of each layer, how much attention lies outside its
    largest weights (evaluation/concentration.py); threshold: of it; tokens: it was measured on."""

    quantized: tuple[int, ...]
    outside: tuple[float, ...]
    threshold: float
    tokens: int


def beside(source: str | Path) -> Path | None:
    """Where the file of a model from `source` lies: in its folder, or beside its file. None for a
    preset and a hub id, which have no folder of one's own."""
    path = Path(source)
    if path.is_dir():
        return path / NAME
    return path.with_name(f"{path.name}.{NAME}") if path.is_file() else None


def write(path: Path, model: CombLlama, result: Classification) -> None:
    """Writes the file, all or nothing. Raises RequestError when it cannot be written."""
    console.write_json(path, {"weights": identity(model), **dataclasses.asdict(result)})


def read(path: Path, model: CombLlama) -> Classification:
    """The file, for this model. Raises RequestError when it is another model's, or no such file."""
    layers = len(model.decoder.layers)
    try:
        mapping = json.loads(path.read_text(encoding="utf-8"))
        owner = mapping.pop("weights")
        result = Classification(**mapping)
        quantized = tuple(result.quantized)
        if not all(type(i) is int and 0 <= i < layers for i in quantized):
            raise ValueError("it names layers that the model has not")
    except (OSError, RecursionError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RequestError(
            f"{path} is not a classification of this model's layers ({error}); make it anew by "
            "evaluate.py --classify, or remove it."
        ) from None
    if owner != identity(model):
        raise RequestError(
            f"{path} was made for other weights; make it anew by evaluate.py --classify, or "
            "remove it."
        )
    return dataclasses.replace(result, quantized=quantized, outside=tuple(result.outside))


def identity(model: CombLlama) -> str:
    """The same for the same decoder, in bfloat16 or more, on any mesh."""
    digest = hashlib.sha256(str([x.shape for x in _told_by(model)]).encode())
    for sample in _samples(model):
        digest.update(np.asarray(sample).tobytes())
    return digest.hexdigest()[:16]


def _told_by(model: CombLlama) -> list[jax.Array]:
    projections = (
        p for x in model.decoder.layers for p in (x.self_attn.q_proj, x.self_attn.k_proj)
    )
    return [projection.weight[...] for projection in projections]


@jax.jit
def _samples(model: CombLlama) -> list[jax.Array]:
    return [x[0, :SAMPLE].astype(jnp.bfloat16) for x in _told_by(model)]
