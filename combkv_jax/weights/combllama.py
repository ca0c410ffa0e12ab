"""The original CombLlama's checkpoints: folders in the Hugging Face layout, and the tensor-
parallel shards `tp_rank_R.pt` of its training, which are pickles and need torch to be read."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from combkv_jax.config import CombConfig
from combkv_jax.errors import RequestError
from combkv_jax.weights import huggingface
from combkv_jax.weights.source import BFLOAT16, Source, Tensor, plain_errors

SHARED = "chunk_model.embed_tokens.weight"  # the decoder's embedding, stored a second time
_SHARD = re.compile(r"tp_rank_(\d+)\.pt")
_ROWS = re.compile(r"(q_proj|k_proj|v_proj|gate_proj|up_proj|lm_head)\.(\d+\.)?weight$")
_COLUMNS = re.compile(r"(o_proj|down_proj)\.weight$")
_OURS = (
    ("language_model.model.cross_layers.", "history."),
    ("language_model.model.", "decoder."),
    ("language_model.lm_head.", "decoder.lm_head."),
    ("chunk_model.", "encoder."),
)


def our_name(name: str) -> str | None:
    """Our name of a CombLlama tensor, None when it is not one."""
    for theirs, ours in _OURS:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return None


def their_name(name: str) -> str:
    """CombLlama's name of one of our tensors in the original form."""
    if name == "decoder.lm_head.weight":
        return "language_model.lm_head.weight"
    for theirs, ours in _OURS:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    raise AssertionError(name)


def open_folder(folder: Path, config: CombConfig) -> Source:
    """Opens a CombLlama folder."""
    return _source("CombLlama folder", folder, config, huggingface.open_tensors(folder))


def _source(kind: str, folder: Path, config: CombConfig, tensors: dict[str, Tensor]) -> Source:
    shared = tensors.pop(SHARED, None)
    known, unknown = huggingface.rename(tensors, our_name)
    embedding = known.get("decoder.embed_tokens.weight")
    if shared and embedding:
        if shared.shape != embedding.shape or not np.array_equal(
            *(t.read(np.dtype(np.float32)) for t in (shared, embedding))
        ):
            raise RequestError(
                f"{SHARED} and {embedding.name} in {folder} differ; CombLlama shares one embedding."
            )
    elif shared:
        known["decoder.embed_tokens.weight"] = shared
    return huggingface.make_source(kind, folder, config, known, unknown)


def shard_files(folder: Path) -> list[Path]:
    """The `tp_rank_R.pt` files of a folder by rank."""
    found = {int(m[1]): p for p in folder.iterdir() if (m := _SHARD.fullmatch(p.name))}
    return [found[rank] for rank in sorted(found)]


def open_shards(folder: Path, config: CombConfig) -> Source:
    """Opens a folder of tensor-parallel shards, joined as they are read.

    Raises RequestError when torch is missing, ranks are missing or do not fit together.
    """
    try:
        import torch
    except ImportError:
        raise RequestError(
            f"{folder} holds pickles, which only torch can read; pip install torch."
        ) from None
    files = shard_files(folder)
    states, sizes = [], set()
    for path in files:
        with plain_errors(path, "tensor-parallel shard"):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            states.append(content["model_state_dict"])
            sizes.add(int(content["tp_size"]))
            if not all(isinstance(t, torch.Tensor) for t in states[-1].values()):
                raise ValueError("model_state_dict holds more than tensors")
    ranks = [int(_SHARD.fullmatch(p.name)[1]) for p in files]
    if sizes != {len(files)} or ranks != list(range(len(files))):
        raise RequestError(
            f"{folder} holds the ranks {ranks}, and its files speak of tp_size "
            f"{', '.join(map(str, sorted(sizes)))}; all ranks must be there."
        )
    if any(state.keys() != states[0].keys() for state in states):
        raise RequestError(f"the shards in {folder} do not hold the same tensors.")
    tensors = {name: _joined(folder, name, [s[name] for s in states]) for name in states[0]}
    return _source("tensor-parallel shards", folder, config, tensors)


def _joined(folder: Path, name: str, parts: list) -> Tensor:
    """One tensor from its parts; those on neither list are on every rank in full."""
    axis = 0 if _ROWS.search(name) else 1 if _COLUMNS.search(name) else None
    shapes = [list(p.shape) for p in parts]
    shape = shapes[0].copy()
    if axis is not None and len(shape) == 2:
        shape[axis] = sum(s[axis] for s in shapes)
    if any(len(s) != len(shape) or any(a != b for i, (a, b) in enumerate(zip(s, shape, strict=True))
                                       if i != axis) for s in shapes):  # fmt: skip
        raise RequestError(f"the parts of {name} in {folder} have shapes {shapes}.")

    def read(dtype: np.dtype) -> np.ndarray:
        arrays = [_numpy(p) for p in parts]
        if axis is not None:
            out = np.empty(shape, dtype)
            np.concatenate(arrays, axis=axis, out=out, casting="unsafe")
            return out
        if any(not np.array_equal(a, arrays[0]) for a in arrays):
            raise RequestError(f"{name} is replicated, but its copies in {folder} differ.")
        return arrays[0].astype(dtype)

    return Tensor(name, tuple(shape), str(parts[0].dtype).removeprefix("torch."), read)


def _numpy(tensor) -> np.ndarray:
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(BFLOAT16)
    return tensor.contiguous().numpy()
