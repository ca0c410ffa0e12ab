"""Records of files and of data sets of the hub, read in order and a piece at a time.

Files are read line by line (`.jsonl`, `.txt`) or some rows at a time (`.parquet`); what one record
may take is limited. Only a hub name reaches for the network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from combkv_jax.errors import RequestError
from combkv_jax.weights.source import plain_errors

MOST_LINE = 64 << 20  # bytes of one record
TEXT_BLOCK = 4 << 20  # characters of a text file that are taken for one text
ROWS = 64  # of a parquet file at once
ROW_GROUP = 4 << 30  # bytes of one row group of a parquet file, unpacked
SUFFIXES = (".jsonl", ".parquet", ".txt")
JUDGED = ("test", "validation", "train")  # splits of the hub to judge by, the best first

Record = tuple[str, dict[str, Any]]  # what errors call it ("line 3 of FILE"), and its columns


class Columns(NamedTuple):
    """Names of the columns that are read, and in words what a record needs of them."""

    names: tuple[str, ...]
    wanted: str

    def lacking(self, where: str, found: Any) -> RequestError:
        """For something called `where` whose columns are `found`."""
        return RequestError(
            f"{where} has the columns {', '.join(found) or 'none'}; {self.wanted} are needed."
        )


def check_name(name: str) -> None:
    """Raises RequestError for what is neither a file that can be read nor a hub name."""
    path = Path(name)
    is_file = path.suffix.lower() in SUFFIXES
    if path.is_file() and is_file:
        return
    if path.exists():
        raise RequestError(f"{name} is no data file; {', '.join(SUFFIXES)} can be read.")
    if is_file:
        raise RequestError(f"the data file {name} does not exist.")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?", name, re.ASCII):
        raise RequestError(
            f"data {name!r} is neither a file ({', '.join(SUFFIXES)}) nor the hub name of a data "
            "set, OWNER/NAME or OWNER/NAME:CONFIG."
        )


def read(name: str, columns: Columns, split: str | None = "train") -> Iterator[Record]:
    """The records of a file or of a data set of the hub, in order.

    A text file gives records with a `text` of TEXT_BLOCK characters at most. split: of the hub's
    data set; None: the first of JUDGED that it has. Raises RequestError that names the file and
    the line or row.
    """
    check_name(name)
    path = Path(name)
    if not path.is_file():
        return _hub(name, columns, split)
    if path.suffix.lower() == ".parquet":
        return _parquet(path, columns)
    return {".jsonl": _lines, ".txt": _text}[path.suffix.lower()](path)


def _lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MOST_LINE + 1):
            number += 1
            where = f"line {number} of {path}"
            if len(line) > MOST_LINE:
                raise RequestError(f"{where} is longer than {MOST_LINE} bytes.")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{where} is not JSON ({error}).") from None
            if not isinstance(record, dict):
                raise RequestError(
                    f"{where} holds a {type(record).__name__}; an object is expected."
                )
            yield where, record


def _text(path: Path) -> Iterator[Record]:
    block, size, number, first = [], 0, 0, 1
    with path.open(encoding="utf-8-sig", newline="") as file:
        while True:
            try:
                line = file.readline(TEXT_BLOCK)
            except UnicodeDecodeError as error:
                raise RequestError(
                    f"{path} is not UTF-8 text from line {number + 1} on ({error.reason})."
                ) from None
            number += 1
            if block and (not line or size + len(line) > TEXT_BLOCK):
                yield f"line {first} of {path}", {"text": "".join(block)}
                block, size, first = [], 0, number
            if not line:
                return
            block.append(line)
            size += len(line)


def _parquet(path: Path, columns: Columns) -> Iterator[Record]:
    import pyarrow.parquet as pq

    with plain_errors(path, "parquet file"):
        file = pq.ParquetFile(path)
        groups = range(file.metadata.num_row_groups)
        largest = max((file.metadata.row_group(i).total_byte_size for i in groups), default=0)
        if largest > ROW_GROUP:
            raise RequestError(
                f"a row group of {path} has {largest} bytes; at most {ROW_GROUP} are unpacked, so "
                "write it with smaller row groups."
            )
        found = [c for c in file.schema_arrow.names if c in columns.names]
        if not found:
            raise columns.lacking(str(path), file.schema_arrow.names)
        number = 0
        for batch in file.iter_batches(batch_size=ROWS, columns=found):
            for record in batch.to_pylist():
                number += 1
                yield f"row {number} of {path}", record


def _hub(name: str, columns: Columns, split: str | None) -> Iterator[Record]:
    import datasets  # slow to import

    hub_id, _, config = name.partition(":")
    try:
        loaded = datasets.load_dataset(hub_id, config or None, split=split)
    except Exception as error:  # what is missing or unreachable is told in many ways
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise RequestError(f"the data set {name} could not be read ({reason[:200]}).") from error
    if split is None:
        best = next((s for s in JUDGED if s in loaded), None)
        if best is None:
            raise RequestError(
                f"the data set {name} has the splits {', '.join(loaded)}; one of "
                f"{', '.join(JUDGED)} is needed."
            )
        loaded = loaded[best]
    found = [c for c in loaded.column_names if c in columns.names]
    if not found:
        raise columns.lacking(f"the data set {name}", loaded.column_names)
    for number, record in enumerate(loaded.select_columns(found), 1):
        yield f"row {number} of {name}", record


def string(where: str, record: dict[str, Any], column: str) -> str:
    """The text in a column of a record. Raises RequestError for what is none."""
    value = record[column]
    if not isinstance(value, str):
        raise RequestError(f"{column} in {where} is a {type(value).__name__}; a text is needed.")
    return value
