"""Trained history blocks on their own: a safetensors file beside a JSON file.

The decoder they belong to stays where it is: NAME.json says which model it is and how it is cut
into chunks, NAME.safetensors holds `history.*` (and `encoder.*` of the original form), projections
in bfloat16 and gates in float32.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from combkv_jax.config import CombConfig
from combkv_jax.weights import tensorfile
from combkv_jax.weights.source import BFLOAT16, Source, plain_errors

NAME = "adapters"  # in a training folder


def write(
    folder: Path, name: str, config: CombConfig, base: str, arrays: Mapping[str, Any], facts: dict
) -> None:
    """Writes NAME.safetensors and NAME.json into `folder`, each all or nothing.

    base: the model as it was asked for. arrays: all but the decoder's, anything NumPy can read.
    facts: of the training, kept for people.
    """
    layout = {
        n: (tuple(x.shape), BFLOAT16 if n.endswith(".weight") else np.dtype(np.float32))
        for n, x in arrays.items()
    }
    own = {k: v for k, v in config.to_json().items() if k != "text_config"}
    text = json.dumps({"base": base, **own, "training": facts}, indent=2) + "\n"
    tensors, description = (folder / f"{name}.{kind}" for kind in ("safetensors", "json"))
    for path in (tensors, description):
        temporary = path.with_name(f".{path.name}.partial")
        if path is tensors:
            tensorfile.write(temporary, layout, lambda n: np.asarray(arrays[n]))
        else:
            temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def read_description(path: Path) -> dict[str, Any]:
    """What NAME.json says. Raises RequestError when it is not such a file."""
    with plain_errors(path, "description of adapters"):
        mapping = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(mapping["base"], str):
            raise TypeError("its base is not a name")
    return mapping


def join(opened: Source, path: Path) -> Source:
    """The decoder of `opened` with the history described at `path` (NAME.json), which takes the
    place of any that it has."""
    own = {k: v for k, v in read_description(path).items() if k not in ("base", "training")}
    with plain_errors(path, "description of adapters"):
        config = CombConfig.from_json(own | {"text_config": opened.config.text.to_hf()})
    tensors = {n: t for n, t in opened.tensors.items() if n.startswith("decoder.")}
    tensors |= tensorfile.read(path.with_suffix(".safetensors"))
    return dataclasses.replace(opened, kind="adapters", config=config, tensors=tensors)


def base_of(model: str) -> str:
    """The model whose decoder it is: of a training folder the one that it was trained for."""
    path = Path(model) / f"{NAME}.json"
    return base_of(read_description(path)["base"]) if path.is_file() else model


def open_folder(folder: Path, open_base: Callable[[str], Source]) -> Source:
    """A folder that `train.py` made: its adapters in front of the model they were trained for."""
    path = folder / f"{NAME}.json"
    return join(open_base(read_description(path)["base"]), path)


def with_bundled(opened: Source, preset: str) -> Source:
    """The preset with the adapters that come with this package, if there are any for it."""
    path = Path(str(importlib.resources.files("combkv_jax") / "assets" / f"{preset}.json"))
    return join(opened, path) if path.is_file() and not opened.config.cross_layers else opened
