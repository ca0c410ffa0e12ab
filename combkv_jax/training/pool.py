"""A pool of encoded chunks from which histories of any length are drawn.

Chunks come in groups: consecutive pages of a novel with facts between their sentences. Group
number g is the same for the same seed, whoever makes it and when, so that a resumed run can make
its pool again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax import distributed
from combkv_jax.errors import RequestError
from combkv_jax.evaluation import tasks
from combkv_jax.language_model import LanguageModel
from combkv_jax.model import CombLlama
from combkv_jax.training.facts import Told, draw_names, draw_noun, draw_told
from combkv_jax.training.taps import DTYPE, encode_taps

GROUP = 8  # chunks of a group
AFTER = 128  # tokens behind a group that can be predicted
ERA = 12  # groups that mostly share a noun and names, so that many facts differ in little
NAMES = 40  # first names, and last names, of an era
MOST_FACTS = 18  # of one chunk
DENSE_SHARE = 0.6  # of the groups are full of facts, unless a pool asks for another

Encode = Callable[[str], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Placed:
    """A fact in a chunk; its value's tokens are `start <= n < stop` there, from the space in front
    to the full stop."""

    fact: Told
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """ids: int32 [chunks, chunk_size]. facts: of each chunk. after: int32 [AFTER + 1], the text
    that follows the last chunk. dense: whether every chunk is full of facts."""

    ids: np.ndarray
    facts: tuple[tuple[Placed, ...], ...]
    after: np.ndarray
    dense: bool


def make_group(
    encode: Encode,
    sentences: Sequence[np.ndarray],
    chunk_size: int,
    seed: int,
    number: int,
    dense_share: float = DENSE_SHARE,
) -> Group:
    """Group `number`: of such a share are full of facts; of the others' chunks a third have one."""
    rng = np.random.default_rng([seed, 1, number])
    era = np.random.default_rng([seed, 2, number // ERA])
    noun, names = draw_noun(era), draw_names(era, NAMES)
    if rng.random() < 0.3:
        noun = draw_noun(rng)
    dense = bool(rng.random() < dense_share)
    need = GROUP * chunk_size + AFTER + 1
    lengths = np.cumsum([len(s) for s in sentences])
    last = int(np.searchsorted(lengths, lengths[-1] - need))
    if last < 1:
        raise RequestError(
            f"the training text has {lengths[-1]} tokens; a chunk_size of {chunk_size} needs "
            f"{need} and a sentence more."
        )
    page = list(sentences[rng.integers(last) :][: need + 1])
    made, told = [], []
    for _ in range(GROUP):
        wanted = int(rng.integers(5, MOST_FACTS + 1)) if dense else int(rng.random() < 0.35)
        facts, pieces, room = [], [], chunk_size
        for fact in draw_told(rng, wanted, noun if dense else None, names):
            piece = np.asarray(encode(f" {fact.sentence}"), np.int32)
            if len(piece) <= room:
                facts.append(fact)
                pieces.append(piece)
                room -= len(piece)
        made.append(tasks.with_insertions(rng, page, pieces, room))
        told.append(tuple(map(functools.partial(place, encode, made[-1]), facts, pieces)))
    after = np.concatenate(page)[: AFTER + 1]
    return Group(np.stack(made), tuple(told), after, dense)


def place(encode: Encode, chunk: np.ndarray, fact: Told, piece: np.ndarray) -> Placed:
    """Where the value stands of a fact told by the tokens `piece` in the chunk."""
    windows = np.lib.stride_tricks.sliding_window_view(chunk, len(piece))
    begin = int(np.argmax((windows == piece).all(axis=1)))
    before = encode(f" {fact.asked(fact.frame)}")
    same = int(np.argmin([*(a == b for a, b in zip(before, piece, strict=False)), False]))
    return Placed(fact, begin + same, begin + len(piece))


def told_chunks(
    lm: LanguageModel, rng: np.random.Generator, told: list[Told], each: int
) -> tuple[np.ndarray, list[list[Placed]]]:
    """Chunks of the choosing novel, each with the next `each` facts: int32 [chunks, chunk_size],
    and where they stand. Raises RequestError for chunks too small for that."""
    size, sentences = lm.config.chunk_size, tasks.book_sentences(lm.tokens, "choose")
    chunks, placed, page = [], [], []
    for first in range(0, len(told), each):
        if len(page) < size:  # a sentence has a token at least
            page = list(sentences)
        some = told[first : first + each]
        pieces = [np.asarray(lm.tokens(f" {fact.sentence}"), np.int32) for fact in some]
        room = size - sum(map(len, pieces))
        if room < 0:
            raise RequestError(f"chunk_size is {size}; {len(some)} facts need {size - room}.")
        chunks.append(tasks.with_insertions(rng, page, pieces, room))
        placed.append([place(lm.tokens, chunks[-1], *p) for p in zip(some, pieces, strict=True)])
    return np.stack(chunks), placed


class Pool:
    """The newest `capacity` groups (`make_group`) and their taps, on the host.

    ids: int32 [capacity * GROUP, chunk_size]. taps: for each of `layers` float16
    [capacity * GROUP, chunk_size, D]. groups: the group in each slot, None while it is empty.
    """

    def __init__(
        self,
        lm: LanguageModel,
        capacity: int,
        seed: int,
        layers: tuple[int, ...],
        dense_share: float = DENSE_SHARE,
    ):
        config = lm.config
        self.layers = layers
        self.lm, self.capacity, self.seed, self.dense_share = lm, capacity, seed, dense_share
        self.sentences = tasks.book_sentences(lm.tokens, "train")
        shape = (capacity * GROUP, config.chunk_size)
        self.ids = np.zeros(shape, np.int32)
        hidden = config.text.hidden_size
        self.taps = [np.zeros((*shape, hidden), DTYPE) for _ in self.layers]
        self.groups: list[Group | None] = [None] * capacity
        self.made = 0  # groups made so far: numbers 0 to made - 1

    def grow_to(self, made: int, advance: Callable[[int], None] = lambda tokens: None) -> None:
        """Makes the groups up to number `made` - 1, of which the newest are kept."""
        for number in range(max(self.made, made - self.capacity), made):
            size = self.lm.config.chunk_size
            group = make_group(
                self.lm.tokens, self.sentences, size, self.seed, number, self.dense_share
            )
            slot = number % self.capacity
            place = slice(slot * GROUP, (slot + 1) * GROUP)
            self.ids[place], self.groups[slot] = group.ids, group
            for taps, new in zip(self.taps, encode(self.lm, group.ids, self.layers), strict=True):
                taps[place] = new
            advance(group.ids.size)
        self.made = max(self.made, made)

    def alone(self, slot: int) -> np.ndarray:
        """NLL of each token, but the first, of what follows that slot's group, without a history:
        float32 [AFTER]."""
        return distributed.fetch(_alone(self.lm.model, self.groups[slot].after))

    @property
    def filled(self) -> list[int]:
        """Slots that hold a group."""
        return [slot for slot, group in enumerate(self.groups) if group is not None]


def encode(lm: LanguageModel, ids: np.ndarray, layers: tuple[int, ...]) -> list[np.ndarray]:
    """Taps of chunks [n, chunk_size], GROUP at a time: float16 [n, chunk_size, D] a layer."""
    parts = []
    for first in range(0, len(ids), GROUP):
        batch = ids[first : first + GROUP]
        padded = np.pad(batch, ((0, GROUP - len(batch)), (0, 0)))
        taps = distributed.fetch(_encode(lm.model.decoder, layers, padded))
        parts.append([x[: len(batch)] for x in taps])
    return [np.concatenate(layer) for layer in zip(*parts, strict=True)]


@jax.jit
def _alone(model: CombLlama, ids: jax.Array) -> jax.Array:
    """The NLL of ids[1:], each behind those before it and no history, float32."""
    logits = model({"input_ids": ids[:-1], "cu_seqlens_q": jnp.array([0, len(ids) - 1])})
    chosen = jnp.take_along_axis(logits, ids[1:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - chosen


_encode = jax.jit(encode_taps, static_argnums=1)
