"""safetensors files, read and written one tensor at a time.

The safetensors package reads bfloat16 into NumPy only in its newest releases, maps whole files
(touched pages count as resident memory) and writes only what is all in memory; the format itself
is a length, a JSON header and raw bytes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from combkv_jax.errors import RequestError
from combkv_jax.weights.source import DTYPES, Tensor, read_blocks

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors package too
NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODES = {name: code for code, name in NAMES.items()}


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, none of them read yet.

    Raises RequestError when the header does not describe exactly the bytes that follow it.
    """
    if not path.is_file():
        raise RequestError(f"{path} is missing; it must lie beside the files that speak of it.")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER, size - 8):
            raise RequestError(f"{path} is not a complete safetensors file (header of {length} "
                               f"bytes in a file of {size}).")  # fmt: skip
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {
            name: (str(e["dtype"]), tuple(map(int, e["shape"])), int(start), int(stop))
            for name, e in header.items()
            for start, stop in [e["data_offsets"]]
        }
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
            RecursionError) as error:  # fmt: skip
        raise RequestError(f"{path} has an unreadable safetensors header ({error}).") from None
    end = size - 8 - length
    tensors = {}
    for name, (code, shape, start, stop) in entries.items():
        if code not in NAMES:
            raise RequestError(
                f"tensor {name} in {path} is stored as {code}; {', '.join(_CODES.values())} "
                "can be read."
            )
        stored = DTYPES[NAMES[code]]
        if min(shape, default=0) < 0 or stop - start != math.prod(shape) * stored.itemsize:
            raise RequestError(f"tensor {name} in {path} has {stop - start} bytes, which is not "
                               f"{code} {list(shape)}.")  # fmt: skip
        if start < 0 or stop > end:
            raise RequestError(
                f"{path} is truncated: tensor {name} ends at byte {8 + length + stop} of a file "
                f"of {size}."
            )
        reader = _reader(path, 8 + length + start, shape, stored)
        tensors[name] = Tensor(name, shape, NAMES[code], reader)
    last = 0
    for start, stop, name in sorted((e[2], e[3], name) for name, e in entries.items()):
        if start != last:
            raise RequestError(f"tensor {name} in {path} starts at byte {start} of the data; the "
                               f"one before it ends at {last}.")  # fmt: skip
        last = stop
    if last != end:
        raise RequestError(f"{path} has {end - last} bytes after its last tensor.")
    return tensors


def _reader(path: Path, offset: int, shape: tuple[int, ...], stored: np.dtype):
    def read_tensor(dtype: np.dtype) -> np.ndarray:
        rows = shape or (1,)
        row = math.prod(rows[1:]) * stored.itemsize
        with path.open("rb", buffering=0) as file:

            def block(start: int, stop: int) -> np.ndarray:
                file.seek(offset + start * row)
                out = np.empty((stop - start, *rows[1:]), stored)
                view, done = out.reshape(-1).view(np.uint8), 0
                while done < view.size:
                    got = file.readinto(view[done:])
                    if not got:
                        raise RequestError(f"{path} was cut short while it was read.")
                    done += got
                return out

            return read_blocks(block, rows, row, dtype).reshape(shape)

    return read_tensor


def write(
    path: Path,
    layout: dict[str, tuple[tuple[int, ...], np.dtype]],
    arrays: Callable[[str], np.ndarray],
    written: Callable[[str], None] = lambda name: None,
) -> None:
    """Writes a safetensors file, asking `arrays(name)` for one tensor after the other.

    layout: name -> (shape, dtype), in the order of the file. written: told each finished name.
    """
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (shape, dtype) in layout.items():
        stop = offset + math.prod(shape) * dtype.itemsize
        entry = {"dtype": _CODES[dtype.name], "shape": list(shape), "data_offsets": [offset, stop]}
        header[name], offset = entry, stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (shape, dtype) in layout.items():
            array = np.ascontiguousarray(arrays(name), dtype).reshape(shape)
            file.write(array.reshape(-1).view(np.uint8).data)
            written(name)


def shards(
    layout: dict[str, tuple[tuple[int, ...], np.dtype]], limit: int
) -> Iterable[dict[str, tuple[tuple[int, ...], np.dtype]]]:
    """Cuts a layout, in order, into parts of at most `limit` bytes (or one tensor)."""
    part, size = {}, 0
    for name, (shape, dtype) in layout.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if part and size + nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = (shape, dtype)
        size += nbytes
    if part:
        yield part
