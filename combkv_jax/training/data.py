"""Data of one's own to tokens: the records of files and of the hub as texts, chats or questions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from combkv_jax import records
from combkv_jax.errors import RequestError
from combkv_jax.language_model import LanguageModel

COLUMNS = records.Columns(
    ("messages", "question", "answer", "context", "text"),
    "messages, question and answer (with context or without), or text",
)
ROLES = ("system", "user", "assistant")

Turn = tuple[np.ndarray, np.ndarray]


class Document(NamedTuple):
    """One record as tokens. where: what errors call it. text: int32 [n], a text, or what a
    question is asked about. turns: of a chat or a question (what stands in front of a reply, the
    reply), int32 each; none for a text."""

    where: str
    text: np.ndarray
    turns: tuple[Turn, ...] = ()


def documents(lm: LanguageModel, name: str) -> Iterator[Document]:
    """The records of a file or of a data set of the hub (its split "train"), tokenised in order.

    A record has the columns `messages` (role and content each), `question` and `answer` with or
    without a `context`, or `text` (of a text file `records.TEXT_BLOCK` characters at a time).
    Raises RequestError that names the file and the line or row.
    """
    for where, record in records.read(name, COLUMNS):
        try:
            yield _document(lm, where, record)
        except RequestError as error:
            told = str(error)
            raise RequestError(told if where in told else f"{where}: {told}") from None


def _document(lm: LanguageModel, where: str, record: dict[str, Any]) -> Document:
    none = np.zeros(0, np.int32)
    if record.get("messages") is not None:
        return Document(where, none, tuple(turns(lm, _messages(where, record["messages"]))))
    if record.get("question") is not None and record.get("answer") is not None:
        history = none
        if record.get("context") is not None:
            history = lm.tokens(records.string(where, record, "context"), special=True)
        asked = [
            {"role": "user", "content": records.string(where, record, "question")},
            {"role": "assistant", "content": records.string(where, record, "answer")},
        ]
        return Document(where, history, tuple(turns(lm, asked, begins=not len(history))))
    if record.get("text") is not None:
        return Document(where, lm.tokens(records.string(where, record, "text"), special=True))
    raise COLUMNS.lacking(where, [n for n, value in record.items() if value is not None])


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
