"""Tokenised samples of one lesson, and in which packs they are trained on.

The tokens lie in a file that vanishes with the process, so memory holds a few numbers a sample.
Which samples share a pack follows from their lengths, the seed and the epoch alone: pack number n
is the same for a run and for the same run resumed.
"""

from __future__ import annotations

import dataclasses
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from combkv_jax.chunking import IGNORED, Sample, chunk_tokens, dialogue_samples
from combkv_jax.config import CombConfig
from combkv_jax.errors import RequestError
from combkv_jax.training.data import Document
from combkv_jax.training.recipe import Lesson

HELD_OUT = 32  # samples that are measured and not trained on, at most
HELD_OUT_SHARE = 0.1
OPEN = 64  # packs that are still filled while samples are looked through
MOST_SAMPLES = 32  # of one pack


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one pack holds: recent tokens, history tokens, samples and chunks; and the most tokens
    of one sample (`alone`: recent, `together`: with its history) by the model's positions."""

    tokens: int
    history: int
    samples: int
    chunks: int
    alone: int
    together: int

    @classmethod
    def of(cls, config: CombConfig, tokens: int, history: int, taught: bool) -> Limits:
        """taught: whether a teacher reads history and recent tokens as one text. Raises
        RequestError when not even one chunk fits."""
        size, positions = config.chunk_size, config.text.max_position_embeddings
        if history < size:
            raise RequestError(
                f"pack-history is {history}; a chunk has {size} tokens and at least one must fit."
            )
        alone = positions if config.is_original else positions - size
        if min(tokens, alone) < 2:
            raise RequestError(
                f"pack-tokens is {tokens} and this model's positions leave {alone}; a sample has "
                "at least 2 tokens."
            )
        chunks = 4 * -(-history // size) + MOST_SAMPLES
        together = positions if taught else 2**31 - 1
        return cls(tokens, history, MOST_SAMPLES, chunks, min(alone, tokens), together)

    @property
    def capacity(self) -> tuple[int, int, int, int]:
        """In the order of `Spec.size`."""
        return self.tokens, self.history, self.samples, self.chunks

    def takes(self, spec: Spec) -> bool:
        """Whether the sample fits a pack at all."""
        recent, history, _, chunks = spec.size
        return (
            recent <= self.alone
            and history <= self.history
            and chunks <= self.chunks
            and recent + history <= self.together
        )


class Spec(NamedTuple):
    """A sample before it is read: where its history and its recent tokens lie in the file, the
    lengths of its chunks, and the group that is held out or trained on as a whole."""

    history: int
    start: int
    stop: int
    chunks: tuple[int, ...]
    group: int

    @property
    def size(self) -> tuple[int, int, int, int]:
        """What it takes of a pack: recent tokens, history tokens, samples, chunks."""
        return self.stop - self.start, sum(self.chunks), 1, len(self.chunks)


class Samples:
    """The samples of a lesson.

    documents: from `data.documents`, read once. Raises RequestError when too little is left of
    them. train, held_out: Specs; of held_out each has a group of its own. notes: what was left
    out, a sentence each. fingerprint: of all tokens.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        lesson: Lesson,
        config: CombConfig,
        limits: Limits,
        seed: int,
    ):
        self.limits, self.seed = limits, seed
        self.lesson, self.chunk_size = lesson, config.chunk_size
        self._written, self.fingerprint = 0, 0
        self._epoch: tuple[int, list[list[int]]] | None = None
        self._ends: list[int] = []  # packs up to the end of each epoch
        with tempfile.TemporaryFile() as self._file:
            self._split(self._all_specs(documents))
            self._file.flush()
            self._tokens = np.memmap(self._file, np.int32, "r")  # stays when the file is closed

    def _all_specs(self, documents: Iterable[Document]) -> list[Spec]:
        lesson, limits = self.lesson, self.limits
        specs, groups, too_long, bare, count = [], 0, 0, 0, 0
        for count, document in enumerate(documents, 1):
            found, shared = self._specs(document, count)
            fitting = [spec for spec in found if limits.takes(spec)]
            too_long += len(found) - len(fitting)
            bare += not found
            specs += [s._replace(group=groups + s.group) for s in fitting]
            groups += 1 if shared else len(found)
        if not count:
            raise RequestError(f"the data set {lesson.data} is empty.")
        fits = f"a pack holds {limits.alone} recent and {limits.history} history tokens"
        if limits.together < 2**31 - 1:
            fits += f", and the teacher's positions {limits.together} of both"
        self.notes = []
        if too_long:
            self.notes.append(
                f"{too_long} samples of {lesson.data} are left out: {fits} (--pack-tokens and "
                "--pack-history give it more)."
            )
        if bare:
            self.notes.append(
                f"{bare} of {count} records of {lesson.data} are left out: they give no history, "
                f"which is a question's context, or what a chat or a text has in front of its last "
                f"part when it is longer than a chunk of {self.chunk_size} tokens."
            )
        usable = len({spec.group for spec in specs})
        if usable < 3:
            raise RequestError(
                f"{lesson.data} gives {usable} usable samples; at least 3 are needed, of which 2 "
                f"are held out. {' '.join(self.notes)}"
            )
        return specs

    # Documents to samples

    def _specs(self, document: Document, number: int) -> tuple[list[Spec], bool]:
        """The samples of a document, and whether they belong to one group."""
        text, turns = document.text, document.turns
        if self.lesson.objective == "reconstruct":
            parts = [text] if len(text) else [part for turn in turns for part in turn]
            whole = np.concatenate([np.zeros(0, np.int32), *parts])
            return self._copies(whole, number), False
        if not turns:
            return self._pieces(text, number), False
        if len(text):  # a question about it
            chunks = chunk_tokens(text, self.chunk_size)
            begin = self._write(text)
            border = self._write(*self._labelled(turns))
            return [Spec(begin, border, self._written, tuple(map(len, chunks)), 0)], True
        total = sum(len(part) for turn in turns for part in turn)
        if total > self.limits.alone + self.limits.history:  # too long wherever it is cut
            return [Spec(0, 0, self.limits.alone + 1, (), 0)], True
        begin, specs = None, []
        for sample in dialogue_samples(turns, self.chunk_size):
            if begin is None:
                begin = self._write(*self._labelled(turns))
            lengths = tuple(map(len, sample.chunks))
            specs.append(Spec(begin, begin + sum(lengths), self._written, lengths, 0))
        return specs, True

    def _labelled(self, turns: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """The turns' tokens, complemented where they do not count in the loss."""
        everything = self.lesson.objective == "next"
        return [x for front, reply in turns for x in (front if everything else ~front, reply)]

    def _pieces(self, text: np.ndarray, number: int) -> list[Spec]:
        """A text as pieces of some chunks of history and what follows them: the whole of it where
        it fits, else of drawn lengths, each token in one piece."""
        size, most = self.chunk_size, self._most_chunks(self.limits.history)
        tail = min(size, self.limits.alone)
        rng = np.random.default_rng([self.seed, 6, number])
        base, specs, at = None, [], 0
        while len(text) - at >= size + 2:
            left = len(text) - at
            whole = left <= most * size + tail
            count = (left - tail // 2) // size if whole else int(rng.integers(1, most + 1))
            count = min(max(count, 1), most)
            border = at + count * size
            stop = min(len(text), border + (self.limits.alone if whole else tail))
            base = self._write(text) if base is None else base
            specs.append(Spec(base + at, base + border, base + stop, (size,) * count, len(specs)))
            at = stop
        return specs

    def _copies(self, text: np.ndarray, number: int) -> list[Spec]:
        """Pieces of a text, each both the history and what is to be said."""
        size = self.chunk_size
        most = self._most_chunks(min(self.limits.history, self.limits.alone)) * size
        most = most or min(size, self.limits.alone)
        rng = np.random.default_rng([self.seed, 6, number])
        base, specs, at = None, [], 0
        while len(text) - at >= 2:
            length = size * int(rng.integers(1, max(most // size, 1) + 1))
            stop = min(len(text), at + min(length, most))
            base = self._write(text) if base is None else base
            lengths = tuple(map(len, chunk_tokens(text[at:stop], size)))
            specs.append(Spec(base + at, base + at, base + stop, lengths, len(specs)))
            at = stop
        return specs

    def _most_chunks(self, tokens: int) -> int:
        return min(tokens // self.chunk_size, self.lesson.chunks or tokens)

    def _write(self, *parts: np.ndarray) -> int:
        """Appends tokens to the file; where they begin."""
        begin = self._written
        for part in parts:
            content = part.astype(np.int32).tobytes()
            self._file.write(content)
            self.fingerprint = zlib.crc32(content, self.fingerprint)
            self._written += len(part)
        return begin

    def _split(self, specs: list[Spec]) -> None:
        """Holds some groups out, of each of which one sample is measured."""
        rng = np.random.default_rng([self.seed, 5])
        groups = rng.permutation(sorted({spec.group for spec in specs}))
        count = min(HELD_OUT, max(2, int(HELD_OUT_SHARE * len(groups))))
        held = {int(group): [] for group in groups[:count]}
        self.train = []
        for spec in specs:
            held.get(spec.group, self.train).append(spec)
        self.held_out = [some[rng.integers(len(some))] for some in held.values()]

    def read(self, spec: Spec) -> Sample:
        """The sample itself."""
        stored = np.array(self._tokens[spec.start : spec.stop])
        counts = stored >= 0
        tokens = np.where(counts, stored, ~stored)
        total = sum(spec.chunks)
        history = np.array(self._tokens[spec.history : spec.history + total])
        history = np.where(history >= 0, history, ~history)
        chunks = np.split(history, np.cumsum(spec.chunks)[:-1]) if total else []
        return Sample(tokens, np.where(counts, tokens, IGNORED), tuple(chunks))

    # Samples to packs

    def packs(self, first: int, count: int) -> list[list[Sample]]:
        """Packs number `first` to `first + count - 1`, epoch after epoch."""
        return [
            [self.read(self.train[i]) for i in self._pack(number)]
            for number in range(first, first + count)
        ]

    def _pack(self, number: int) -> list[int]:
        while not self._ends or number >= self._ends[-1]:
            epoch = len(self._ends)
            self._epoch = (epoch, self._plan(epoch))
            self._ends.append((self._ends or [0])[-1] + len(self._epoch[1]))
        epoch = int(np.searchsorted(self._ends, number, side="right"))
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self._plan(epoch))
        return self._epoch[1][number - ([0, *self._ends])[epoch]]

    def _plan(self, epoch: int) -> list[list[int]]:
        order = np.random.default_rng([self.seed, 7, epoch]).permutation(len(self.train))
        return list(first_fit(order.tolist(), [s.size for s in self.train], self.limits.capacity))


def first_fit(
    order: Iterable[int], sizes: Sequence[tuple[int, ...]], capacity: tuple[int, ...]
) -> Iterator[list[int]]:
    """Packs of the items in this order, each put into the first of the OPEN newest packs where all
    of its sizes fit; each item alone must."""
    open_packs: list[tuple[list[int], list[int]]] = []  # room left, items
    for item in order:
        need = sizes[item]
        fitting = (
            p for p in open_packs if all(n <= left for n, left in zip(need, p[0], strict=True))
        )
        found = next(fitting, None)
        if found is None:
            if len(open_packs) == OPEN:
                yield open_packs.pop(0)[1]
            found = (list(capacity), [])
            open_packs.append(found)
        room, items = found
        items.append(item)
        room[:] = [left - n for n, left in zip(need, room, strict=True)]
    yield from (items for _, items in open_packs)
