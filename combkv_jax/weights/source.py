"""What every reader gives: a config, and tensors that are read one at a time when asked."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from combkv_jax.config import CombConfig
from combkv_jax.errors import RequestError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
    "bfloat16": BFLOAT16,
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
BLOCK_BYTES = 1 << 26  # rows are read and cast in blocks of this size, so no second copy is held

# What lies beside the weights and goes along unchanged into a converted folder.
BESIDE_WEIGHTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
    "tailor.json",  # tailored.NAME; of the decoder alone
)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor still on disk.

    name: its name in the source. stored: its type there, for people ("bfloat16", "Q4_1").
    read: `read(dtype)` gives a fresh array of `shape`, cast (rounded to nearest) to `dtype`.
    """

    name: str
    shape: tuple[int, ...]
    stored: str
    read: Callable[[np.dtype], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint that was opened, but whose weights nobody has read yet.

    kind: what it is, for people. config: a plain Llama has no cross layers. tensors: by our flat
    names. unknown: names in the source that no part of a model of this kind has.
    tokenizer: makes the tokenizer (transformers), or None when the source has none.
    write_tokenizer: puts the tokenizer's files into a folder.
    """

    kind: str
    path: Path
    config: CombConfig
    tensors: Mapping[str, Tensor]
    unknown: tuple[str, ...]
    tokenizer: Callable[[], object | None]
    write_tokenizer: Callable[[Path], None]


def read_blocks(
    block: Callable[[int, int], np.ndarray], shape: tuple[int, ...], row_bytes: int, dtype: np.dtype
) -> np.ndarray:
    """An array of `shape` and `dtype`, filled from `block(start, stop)` rows at a time."""
    out = np.empty(shape, dtype)
    step = max(1, BLOCK_BYTES // max(row_bytes, 1))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        out[start:stop] = block(start, stop)
    return out


def folder_tokenizer(folder: Path):
    """The tokenizer of a folder with `tokenizer.json`, or None. Nothing is fetched."""
    if not (folder / "tokenizer.json").is_file():
        return None
    from transformers import PreTrainedTokenizerFast  # slow to import

    try:
        return PreTrainedTokenizerFast.from_pretrained(
            folder,
            local_files_only=True,
            model_max_length=10
            ** 30,  # texts beyond the model's own context are the point: no warning
        )
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise RequestError(f"the tokenizer in {folder} cannot be read: {error}.") from error


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the tokenizer files of folder `source` byte for byte."""
    for name in BESIDE_WEIGHTS:
        if (source / name).is_file():
            (target / name).write_bytes((source / name).read_bytes())


@contextlib.contextmanager
def plain_errors(path: Path, what: str) -> Iterator[None]:
    """Turns whatever a library raises while parsing a damaged file into one sentence."""
    try:
        yield
    except (RequestError, MemoryError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = lines[0].rstrip(".:")[:200]
        raise RequestError(f"{path} is not a complete {what} ({reason}).") from error
