"""Data of one's own to tokens: files and data sets of the hub, as texts, chats or questions.

Files are read line by line (`.jsonl`, `.txt`) or some rows at a time (`.parquet`); what one record
may take is limited. Only a hub name reaches for the network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from combkv_jax.errors import RequestError
from combkv_jax.language_model import LanguageModel
from combkv_jax.weights.source import plain_errors

MOST_LINE = 64 << 20  # bytes of one record
TEXT_BLOCK = 4 << 20  # characters of a text file that are taken for one text
ROWS = 64  # of a parquet file at once
ROW_GROUP = 4 << 30  # bytes of one row group of a parquet file, unpacked
SUFFIXES = (".jsonl", ".parquet", ".txt")
COLUMNS = ("messages", "question", "answer", "context", "text")
WANTED = "messages, question and answer (with context or without), or text"
ROLES = ("system", "user", "assistant")

Turn = tuple[np.ndarray, np.ndarray]


class Document(NamedTuple):
    """One record as tokens. where: what errors call it. text: int32 [n], a text, or what a
    question is asked about. turns: of a chat or a question (what stands in front of a reply, the
    reply), int32 each; none for a text."""

    where: str
    text: np.ndarray
    turns: tuple[Turn, ...] = ()


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


def documents(lm: LanguageModel, name: str) -> Iterator[Document]:
    """The records of a file or of a data set of the hub (its split "train"), tokenised in order.

    A record has the columns `messages` (role and content each), `question` and `answer` with or
    without a `context`, or `text`. A text file is one text, TEXT_BLOCK characters at a time.
    Raises RequestError that names the file and the line or row.
    """
    check_name(name)
    for where, record in _records(name):
        try:
            yield _document(lm, where, record)
        except RequestError as error:
            told = str(error)
            raise RequestError(told if where in told else f"{where}: {told}") from None


def _records(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    path = Path(name)
    if not path.is_file():
        return _hub(name)
    return {".jsonl": _lines, ".parquet": _parquet, ".txt": _text}[path.suffix.lower()](path)


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
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


def _text(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
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


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
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
        columns = [c for c in file.schema_arrow.names if c in COLUMNS]
        if not columns:
            raise RequestError(
                f"{path} has the columns {', '.join(file.schema_arrow.names)}; {WANTED} are needed."
            )
        number = 0
        for batch in file.iter_batches(batch_size=ROWS, columns=columns):
            for record in batch.to_pylist():
                number += 1
                yield f"row {number} of {path}", record


def _hub(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets  # slow to import

    hub_id, _, config = name.partition(":")
    try:
        found = datasets.load_dataset(hub_id, config or None, split="train")
    except Exception as error:  # what is missing or unreachable is told in many ways
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise RequestError(f"the data set {name} could not be read ({reason[:200]}).") from error
    columns = [c for c in found.column_names if c in COLUMNS]
    if not columns:
        raise RequestError(
            f"the data set {name} has the columns {', '.join(found.column_names)}; {WANTED} are "
            "needed."
        )
    for number, record in enumerate(found.select_columns(columns), 1):
        yield f"row {number} of {name}", record


def _document(lm: LanguageModel, where: str, record: dict[str, Any]) -> Document:
    none = np.zeros(0, np.int32)
    if record.get("messages") is not None:
        return Document(where, none, tuple(turns(lm, _messages(where, record["messages"]))))
    if record.get("question") is not None and record.get("answer") is not None:
        context = record.get("context")
        history = (
            none if context is None else lm.tokens(_string(where, record, "context"), special=True)
        )
        asked = [
            {"role": "user", "content": _string(where, record, "question")},
            {"role": "assistant", "content": _string(where, record, "answer")},
        ]
        return Document(where, history, tuple(turns(lm, asked, begins=not len(history))))
    if record.get("text") is not None:
        return Document(where, lm.tokens(_string(where, record, "text"), special=True))
    columns = ", ".join(n for n, value in record.items() if value is not None) or "none"
    raise RequestError(f"{where} has the columns {columns}; {WANTED} are needed.")


def _string(where: str, record: dict[str, Any], column: str) -> str:
    value = record[column]
    if not isinstance(value, str):
        raise RequestError(f"{column} in {where} is a {type(value).__name__}; a text is needed.")
    return value


def _messages(where: str, messages: Any) -> list[dict[str, str]]:
    accepted = f"a list of messages is needed, each with a role ({', '.join(ROLES)}) and a content"
    if not isinstance(messages, list):
        raise RequestError(f"messages in {where} is a {type(messages).__name__}; {accepted}.")
    for number, message in enumerate(messages, 1):
        if (
            not isinstance(message, dict)
            or message.get("role") not in ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise RequestError(f"message {number} in {where} is {str(message)[:80]}; {accepted}.")
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def turns(
    lm: LanguageModel, messages: list[dict[str, str]], *, begins: bool = True
) -> Iterator[Turn]:
    """(tokens in front of a reply, tokens of the reply with what closes it) for each message of
    the assistant, as the chat format has them; what follows the last reply is left out. begins: as
    in `chat_tokens`."""
    has_format = bool(getattr(lm.tokenizer, "chat_template", None))

    def written(count: int, opened: bool) -> str:
        some = messages[:count]
        if has_format:
            return lm.render(some, add_generation_prompt=opened)
        return "".join(f"{m['content']}\n" for m in some)

    said = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opening, closing = written(number, True), written(number + 1, False)
        if not (opening.startswith(said) and closing.startswith(opening)):
            raise RequestError("the chat format does not write these messages one after another.")
        front = lm.tokens(opening[len(said) :], special=not (has_format or said) and begins)
        if not said and not begins:
            front = lm.without_bos(front)
        yield front, lm.tokens(closing[len(opening) :])
        said = closing
