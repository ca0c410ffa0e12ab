"""Llama checkpoints in the Hugging Face layout: folders and hub ids, read and written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from combkv_jax.config import CombConfig
from combkv_jax.errors import RequestError
from combkv_jax.weights import tensorfile
from combkv_jax.weights.source import (
    Source,
    Tensor,
    copy_tokenizer,
    folder_tokenizer,
    plain_errors,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
# Our own history, beside a decoder that transformers reads as it is.
HISTORY, HISTORY_CONFIG = "history.safetensors", "combkv.json"

_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def our_name(name: str) -> str | None:
    """Our name of a Llama tensor, None when it is not one."""
    if re.fullmatch(r"model\.(embed_tokens|norm|layers\.\d+\..+)\.weight", name):
        return "decoder." + name.removeprefix("model.")
    return "decoder.lm_head.weight" if name == "lm_head.weight" else None


def their_name(name: str) -> str:
    """The name transformers' LlamaForCausalLM has for one of our decoder's tensors."""
    name = name.removeprefix("decoder.")
    return name if name.startswith("lm_head.") else "model." + name


def download(hub_id: str, weights: bool = True) -> Path:
    """Fetches config, tokenizer and safetensors of a hub model (or finds them in its cache).

    weights: False fetches the JSON files alone.
    """
    import huggingface_hub  # asks the network, so only when it is needed
    from huggingface_hub import errors

    local = "or give a folder that holds its files"
    patterns = _DOWNLOADED if weights else ["*.json"]
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=patterns))
    except errors.GatedRepoError:
        raise RequestError(
            f"{hub_id} is gated: accept its terms on https://huggingface.co/{hub_id}, run "
            f"`hf auth login` (or set HF_TOKEN), {local}."
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise RequestError(
            f"{hub_id!r} is neither an existing file or folder nor a model on the Hugging Face "
            f"hub that you can see; if it is private, run `hf auth login` (or set HF_TOKEN), "
            f"{local}."
        ) from None
    except Exception as error:  # of the network, of whichever HTTP package it uses, of the disk
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RequestError(
            f"{hub_id} could not be fetched from the Hugging Face hub ({reason[0].rstrip('.:')}); "
            f"check the network, run `hf auth login` if it needs a login, {local}."
        ) from error


def open_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of `model.safetensors`, or of all the files its index names."""
    if (folder / INDEX).is_file():
        return _open_shards(folder)
    if (folder / SINGLE).is_file():
        return tensorfile.read(folder / SINGLE)
    pickles = sorted(p.name for p in folder.glob("*.bin"))
    raise RequestError(
        f"{folder} has neither {SINGLE} nor {INDEX}"
        + (f"; {pickles[0]} is a pickle, save the model as safetensors first." if pickles else ".")
    )


def _open_shards(folder: Path) -> dict[str, Tensor]:
    path = folder / INDEX
    try:
        where = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        names = sorted(set(where.values()))
        outside = [n for n in names if Path(n).name != n]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RequestError(f"{path} is not an index of safetensors files ({error}).") from None
    if outside:
        raise RequestError(f"{path} names {outside[0]!r}; only files in its own folder are read.")
    missing = [n for n in names if not (folder / n).is_file()]
    if missing:
        raise RequestError(f"{folder} lacks {', '.join(missing)}, named in {INDEX}.")
    shards = {name: tensorfile.read(folder / name) for name in names}
    absent = [t for t, shard in where.items() if t not in shards[shard]]
    if absent:
        raise RequestError(f"{INDEX} in {folder} names tensors that its files do not hold: "
                           f"{', '.join(absent)}.")  # fmt: skip
    return {name: shards[shard][name] for name, shard in where.items()}


def with_history(folder: Path, config: CombConfig) -> CombConfig:
    """The plain Llama `config` of a folder, with our own history if one lies beside it."""
    if (folder / HISTORY_CONFIG).is_file():
        with plain_errors(folder / HISTORY_CONFIG, "description of a history"):
            own = json.loads((folder / HISTORY_CONFIG).read_text(encoding="utf-8"))
            config = CombConfig.from_json(own | {"text_config": config.text.to_hf()})
    return config


def open_folder(folder: Path, config: CombConfig) -> Source:
    """Opens a plain Llama, or one `with_history`."""
    tensors, unknown = rename(open_tensors(folder), our_name)
    if config.cross_layers:
        tensors |= tensorfile.read(folder / HISTORY)
    return make_source("Hugging Face folder", folder, config, tensors, unknown)


def rename(tensors: dict[str, Tensor], our_name: Callable) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors by our names, and the names that are nobody's. Rotary tables, which old versions
    of transformers saved, are dropped: they follow from the config."""
    names = {t: our_name(t) for t in tensors if not t.endswith(".rotary_emb.inv_freq")}
    known = {ours: tensors[t] for t, ours in names.items() if ours}
    return known, [t for t, ours in names.items() if not ours]


def make_source(kind: str, folder: Path, config: CombConfig, tensors, unknown) -> Source:
    """A Source whose tokenizer files lie in `folder`."""
    if config.text.tie_word_embeddings:  # a stored copy of the embedding is not used
        tensors.pop("decoder.lm_head.weight", None)
    return Source(
        kind=kind,
        path=folder,
        config=config,
        tensors=tensors,
        unknown=tuple(unknown),
        tokenizer=lambda: folder_tokenizer(folder),
        write_tokenizer=lambda target: copy_tokenizer(folder, target),
    )


def write_folder(
    folder: Path,
    config: dict,
    layout: dict[str, tuple[tuple[int, ...], np.dtype]],
    arrays: Callable[[str], np.ndarray],
    written: Callable[[str], None],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes config.json and safetensors (several files with an index over `shard_bytes`)."""
    parts = list(tensorfile.shards(layout, shard_bytes))
    names = [SINGLE]
    if len(parts) > 1:
        names = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
        where = {t: name for name, part in zip(names, parts, strict=True) for t in part}
        total = sum(np.prod(shape) * dtype.itemsize for shape, dtype in layout.values())
        index = {"metadata": {"total_size": int(total)}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for name, part in zip(names, parts, strict=True):
        tensorfile.write(folder / name, part, arrays, written)
    dtypes = sorted({dtype.name for _, dtype in layout.values()})
    config = config | {"dtype": dtypes[0], "torch_dtype": dtypes[0]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_history(
    folder: Path, config: CombConfig, layout, arrays, written: Callable[[str], None]
) -> None:
    """Puts our own history beside a decoder in the Hugging Face layout."""
    tensorfile.write(folder / HISTORY, layout, arrays, written)
    own = {k: v for k, v in config.to_json().items() if k != "text_config"}
    (folder / HISTORY_CONFIG).write_text(json.dumps(own, indent=2) + "\n")
