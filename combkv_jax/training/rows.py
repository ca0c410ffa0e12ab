"""Rows of a training batch: questions and text, and which history each token sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from combkv_jax.training.facts import CHAT, Told
from combkv_jax.training.pool import AFTER, GROUP, Placed, Pool

MOST_HISTORIES = 8  # of one row
SOUGHT = 384  # history tokens of one row that its questions are about
WITH_TEXT = 0.8  # share of rows that have text, in front of their first questions
ASTRAY = 0.25  # share of the texts whose own pages are not in their history
FARTHEST = 4096  # recent tokens that may lie between a history and what is asked


class Bucket(NamedTuple):
    """A shape of rows. chunks: places for history; tokens: for questions and text. share: how
    often it is drawn, relative to the others. shortest: chunks of a history, at least."""

    chunks: int
    tokens: int
    share: float
    shortest: int = 1


BUCKETS = (
    Bucket(16, 448, 0.8),
    Bucket(48, 448, 0.2, 16),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One row, T tokens and A answers, ready to be stacked with others of its bucket.

    chunks: pool chunks laid end to end. sinks: int32 [MOST_HISTORIES, sink_tokens], the first
    tokens of each history. ids, position, start: int32 [T]; token t sees `start[t] <= s <= t`.
    history: which history it sees, of the chunks `first <= c < last`, int32 [T] each.
    column, target: int32 [A], the token that predicts each answer token, and that token. weight:
    float32 [A], its part of the loss. alone: float32 [A], where the history has nothing to say: the
    NLL without one, which the token is to keep; -1 elsewhere. question: int32 [A], -1 for text and
    -2 for padding.
    sought: int32 [SOUGHT], history tokens by their place in the row's chunks; token t is to find
    those from `sought_first[t]` to before `sought_last[t]` of them, if any.
    """

    chunks: np.ndarray
    sinks: np.ndarray
    ids: np.ndarray
    position: np.ndarray
    start: np.ndarray
    history: np.ndarray
    first: np.ndarray
    last: np.ndarray
    column: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    alone: np.ndarray
    question: np.ndarray
    sought: np.ndarray
    sought_first: np.ndarray
    sought_last: np.ndarray


class Piece(NamedTuple):
    """A prompt, what is to be predicted behind it, and where the answer stands: history tokens
    counted from the history's beginning (start, stop), None for text. alone: of a text without its
    own pages, float32, the NLL of each token of the answer without a history."""

    prompt: np.ndarray
    answer: np.ndarray
    sought: tuple[int, int] | None = None
    is_text: bool = False
    alone: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


class RowBuilder:
    """Lays pieces of several histories out in one row.

    chunk_size: position of the first recent token. sink_tokens: of each history.
    """

    def __init__(self, bucket: Bucket, chunk_size: int, sink_tokens: int):
        self.bucket, self.chunk_size = bucket, chunk_size
        self.chunks: list[int] = []
        self.sinks = np.zeros((MOST_HISTORIES, sink_tokens), np.int32)
        self.histories = 0
        tokens = bucket.tokens
        self.ids, self.position = np.zeros((2, tokens), np.int32)
        self.start = np.arange(tokens, dtype=np.int32)  # a padding token sees itself alone
        self.history, self.first = np.zeros((2, tokens), np.int32)
        self.last = np.ones(tokens, np.int32)  # and the first chunk, since it must see one
        self.used = 0
        self.sought: list[int] = []
        self.sought_first, self.sought_last = np.zeros((2, tokens), np.int32)
        self.answers: list[tuple[int, int, int]] = []  # column, target, question
        self.alone: list[float] = []  # of each answer token
        self.questions = 0

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self.bucket.tokens - self.used

    def add_history(self, chunks: Sequence[int], sinks: np.ndarray) -> None:
        """What the segments added from now on see: pool chunks in this order, and the first
        tokens of the first one."""
        self.sinks[self.histories] = sinks
        self.histories += 1
        self.sees = (self.histories - 1, len(self.chunks), len(self.chunks) + len(chunks))
        self.chunks += chunks

    def add_segment(self, pieces: Sequence[Piece], behind: int = 0) -> None:
        """Texts one behind the other, each seeing what is before it, the first one as far from the
        history as if `behind` tokens lay between them."""
        begin = self.used
        for piece in pieces:
            prompt, answer, sought, is_text, alone = piece
            number = -1 if is_text else self.questions
            self.questions += not is_text
            tokens = np.concatenate([prompt, answer])
            place = slice(self.used, self.used + len(tokens))
            self.ids[place], self.start[place] = tokens, begin
            self.history[place], self.first[place], self.last[place] = self.sees
            at = self.used + len(prompt) - 1
            self.answers += [(at + i, token, number) for i, token in enumerate(answer)]
            self.alone += [-1.0] * len(answer) if alone is None else alone.tolist()
            if sought and len(self.sought) + sought[1] - sought[0] <= SOUGHT:
                seeking = slice(at, at + len(answer))
                self.sought_first[seeking] = len(self.sought)
                origin = self.sees[1] * self.chunk_size
                self.sought += range(origin + sought[0], origin + sought[1])
                self.sought_last[seeking] = len(self.sought)
            self.used += len(tokens)
        self.position[begin : self.used] = self.chunk_size + behind + np.arange(self.used - begin)

    def finish(self, text_weight: float) -> Row:
        """The row. text_weight: what the text's mean loss counts beside the questions'."""
        column, target, question = np.array(self.answers, np.int32).reshape(-1, 3).T
        weight = np.zeros(len(question), np.float32)
        for which, share in ((question >= 0, 1.0), (question == -1, text_weight)):
            weight[which] = share / max(which.sum(), 1)
        pad = (0, self.bucket.tokens - len(question))
        chunks = self.chunks + [0] * (self.bucket.chunks - len(self.chunks))
        return Row(
            np.array(chunks, np.int32),
            self.sinks,
            self.ids,
            self.position,
            self.start,
            self.history,
            self.first,
            self.last,
            np.pad(column, pad),
            np.pad(target, pad),
            np.pad(weight, pad),
            np.pad(np.array(self.alone, np.float32), pad, constant_values=-1),
            np.pad(question, pad, constant_values=-2),
            np.pad(np.array(self.sought, np.int32), (0, SOUGHT - len(self.sought))),
            self.sought_first,
            self.sought_last,
        )


class Asker:
    """Facts to tokens. encode: text -> ids; chat: a user's message -> ids up to the reply, or
    None for a model without a chat format."""

    def __init__(self, encode: Callable, chat: Callable | None):
        self.encode, self.chat = encode, chat

    def __call__(
        self,
        fact: Told,
        rng: np.random.Generator | None = None,
        sought: tuple[int, int] | None = None,
    ) -> Piece:
        """A question for the row builder, in any phrasing; without `rng` as it was told. The
        answer has the space before the value too, and the full stop behind it, by which the model
        learns where a value ends."""
        if rng is not None and self.chat is not None and rng.random() < 0.06:
            prompt = self.chat(CHAT.format(n=fact.noun, s=fact.subject))
            return Piece(prompt, np.asarray(self.encode(fact.value), np.int32), sought)
        frame = fact.frame if rng is None else fact.phrasing(rng)
        asked = f" {fact.asked(frame)}"
        prompt = self.encode(asked)
        whole = self.encode(f"{asked} {fact.value}.")
        same = int(np.argmin([*(a == b for a, b in zip(prompt, whole, strict=False)), False]))
        whole = np.asarray(whole, np.int32)
        return Piece(whole[:same], whole[same:], sought)


def draw_behind(rng: np.random.Generator) -> int:
    """How many recent tokens lie between a history and what is asked, 0 to FARTHEST: a fifth of
    them less than a question's own, a third more than a thousand."""
    return int((FARTHEST + 1) * rng.random() ** 3)


def draw_row(
    rng: np.random.Generator, pool: Pool, bucket: Bucket, ask: Asker, text_weight: float
) -> Row:
    """A row of one to MOST_HISTORIES histories of one length, log-uniform between the bucket's
    shortest and what the bucket and the pool hold."""
    config = pool.lm.config
    most = min(bucket.chunks, GROUP * len(pool.filled))
    length = round(np.exp(rng.uniform(np.log(min(bucket.shortest, most)), np.log(most))))
    count = min(bucket.chunks // length, MOST_HISTORIES)
    row = RowBuilder(bucket, config.chunk_size, config.sink_tokens)
    for index in range(count):
        chunks, after = draw_history(rng, pool, length)
        row.add_history(chunks, pool.ids[chunks[0], : config.sink_tokens])
        share = row.room // (count - index)
        found = askable(pool, chunks)
        rng.shuffle(found)
        end = row.used + share
        # Mostly the newest text stands in front of the questions, as it does in use.
        if index == 0 and rng.random() < WITH_TEXT:
            pieces = [draw_text(rng, pool, chunks, after)]
            pieces += [ask(fact, rng, at) for fact, at in found[: rng.integers(4)]]
            while sum(map(len, pieces)) > row.room:
                pieces.pop()
            row.add_segment(pieces, draw_behind(rng))
        for fact, at in found + found:
            piece = ask(fact, rng, at)
            if row.used + len(piece) <= end:
                row.add_segment([piece], draw_behind(rng))
            elif row.used + 16 > end:
                break
    return row.finish(text_weight)


def draw_history(rng: np.random.Generator, pool: Pool, length: int):
    """`length` pool chunks in any order, among them pages of one group, and the text that follows
    these, more than AFTER tokens. Full of facts, or mostly plain text, or both."""
    filled = pool.filled
    dense = [slot for slot in filled if pool.groups[slot].dense]
    sparse = [slot for slot in filled if not pool.groups[slot].dense]
    kind = rng.random()
    slots = (dense if kind < 0.5 else sparse if kind < 0.75 else filled) or filled
    slot = slots[rng.integers(len(slots))]
    # The text may be any page that has no facts, or what follows the last one.
    facts, begin = pool.groups[slot].facts, slot * GROUP
    pages = [page for page in range(1, GROUP) if not facts[page]] + [GROUP]
    page = pages[rng.integers(len(pages))]
    after = pool.ids[begin + page] if page < GROUP else pool.groups[slot].after
    own = list(range(begin + max(0, page - length), begin + page))
    # Where one kind does not suffice, the rest is of the other.
    others = [s for s in slots if s != slot]
    rest = [s for s in filled if s not in slots]
    rng.shuffle(others)
    rng.shuffle(rest)
    more = [s * GROUP + i for s in others + rest for i in range(GROUP)][: length - len(own)]
    if sparse and 0.5 <= kind < 0.75 and dense and rng.random() < 0.5:
        # One chunk full of facts among plain text.
        own[rng.integers(len(own))] = int(rng.choice(dense)) * GROUP + int(rng.integers(GROUP))
    chunks = own + more
    rng.shuffle(chunks)
    return chunks, after


def draw_text(
    rng: np.random.Generator, pool: Pool, chunks: Sequence[int], after: np.ndarray
) -> Piece:
    """`after`, the text behind pages among the chunks; or, sometimes, that behind a group which
    none of them is of."""
    length, alone = int(rng.integers(AFTER // 2, AFTER + 1)), None
    inside = {chunk // GROUP for chunk in chunks}
    others = [other for other in pool.filled if other not in inside]
    if rng.random() < ASTRAY and others:
        slot = int(rng.choice(others))
        after, alone = pool.groups[slot].after, pool.alone(slot)[:length]
    return Piece(after[:1], after[1 : length + 1], is_text=True, alone=alone)


def askable(pool: Pool, chunks: Sequence[int]) -> list[tuple[Told, tuple[int, int]]]:
    """The facts in these chunks whose noun and subject no other of them has, each with where in
    the history its value stands."""
    size = pool.lm.config.chunk_size
    found: dict[tuple[str, str], list[tuple[int, Placed]]] = {}
    for index, chunk in enumerate(chunks):
        for placed in pool.groups[chunk // GROUP].facts[chunk % GROUP]:
            found.setdefault(placed.fact.key, []).append((index * size, placed))
    return [
        (placed.fact, (origin + placed.start, origin + placed.stop))
        for (origin, placed), *more in found.values()
        if not more
    ]
