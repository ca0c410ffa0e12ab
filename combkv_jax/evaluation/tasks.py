"""Test cases made from the bundled novels, the same for the same seed.

Tokenizers come in as a function `encode(text) -> token ids` that adds no special tokens. Cases for
choosing something and cases for judging the choice use other books and other names.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import lzma
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from combkv_jax.chunking import chunk_tokens
from combkv_jax.errors import RequestError

Encode = Callable[[str], Sequence[int]]

RECALL_TASKS = ("passkey", "similar")  # of evaluation/recall.py
MEASURED = (*RECALL_TASKS, "continuation")  # by `evaluate.py --recall`
BOOKS = {
    "judge": ("pride_and_prejudice", "persuasion"),
    "choose": ("emma",),
    "train": ("mansfield_park", "northanger_abbey", "sense_and_sensibility"),
}
NAMES = {
    "judge": """Adele Bertha Cedric Dorian Edith Felix Greta Hector Irene Jasper Klara
        Leonard Mabel Nigel Olive Percy Quentin Rosalind Silas Thelma Ulric Vera Wilfred
        Yvonne Agnes Bruno Celeste Desmond Elsie Floyd Gilbert Hilda Ignatius Joyce Kenneth
        Lydia Mortimer Norma Oswald Pearl Rupert Stella Tobias Ursula Vincent Winifred
        Xavier Zelda""",
    "choose": """Albert Beatrice Conrad Daphne Ernest Fiona Gordon Harriet Isaac Jocelyn
        Karl Lucille Marcus Nadine Oliver Paulina Ralph Sabrina Theodore Una Victor Wanda
        Alfred Bridget Clarence Dolores Edgar Flora Gerald Heloise Ivan Judith Kurt Lorraine
        Maurice Natalie Otto Priscilla Roland Sylvia Terence Valerie Walter Yolanda Arnold
        Brenda Cyril Doris""",
}


def bundled_text(*books: str) -> str:
    """The text of the named novels one after another, or of all six, those for judging first."""
    return "".join(map(_read, books or [book for role in BOOKS.values() for book in role]))


@functools.cache
def _read(book: str) -> str:
    path = importlib.resources.files("combkv_jax") / "assets" / f"{book}.txt.xz"
    return lzma.decompress(path.read_bytes()).decode()


@dataclasses.dataclass(frozen=True)
class Fact:
    """A sentence that cannot be guessed, and the question for it."""

    name: str
    digits: str

    @property
    def question(self) -> str:
        """Text that the model is to continue with `answer`."""
        return f"The secret code of {self.name} is"

    @property
    def answer(self) -> str:
        """The digits with the space before them."""
        return f" {self.digits}"

    @property
    def sentence(self) -> str:
        return f"{self.question}{self.answer}."


def draw_facts(rng: np.random.Generator, count: int, role: str = "judge") -> list[Fact]:
    """`count` facts with distinct names of that role and five random digits each."""
    names = NAMES[role].split()
    if not 1 <= count <= len(names):
        raise RequestError(f"{count} facts were asked for; 1 to {len(names)} can be made.")
    chosen = rng.choice(names, count, replace=False)
    return [Fact(str(name), f"{rng.integers(100000):05d}") for name in chosen]


def haystack(encode: Encode, num_tokens: int, fact: Fact, depth: float) -> np.ndarray:
    """int32 [num_tokens]: the bundled novels from their beginning with the fact's sentence in them.

    depth: where it stands, 0 at the beginning and 1 at the end, moved to the nearest border of
    two sentences. Texts longer than the six novels together begin anew. Raises RequestError when
    the fact does not fit.
    """
    needle = np.asarray(encode(f" {fact.sentence}"), np.int32)
    if num_tokens < len(needle):
        raise RequestError(
            f"the haystack is to have {num_tokens} tokens; its needle alone has {len(needle)}."
        )
    if not 0 <= depth <= 1:
        raise RequestError(f"depth is {depth}; it lies between 0 and 1.")
    room, sentences, borders = num_tokens - len(needle), [], [0]
    while borders[-1] < room:
        for sentence in text_sentences(encode, bundled_text()):
            sentences.append(sentence)
            borders.append(borders[-1] + len(sentence))
            if borders[-1] >= room:
                break
    text = np.concatenate([*sentences, np.zeros(0, np.int32)])[:room]
    borders = np.array([b for b in borders if b <= room])  # the last sentence may be cut
    place = borders[np.argmin(np.abs(borders - depth * room))]
    return np.concatenate([text[:place], needle, text[place:]])


@dataclasses.dataclass(frozen=True, eq=False)
class FactCase:
    """Chunks of a novel with facts in them, and a question for each.

    chunks: int32 arrays, chunk_size tokens each. questions: (prompt tokens, answer tokens), the
    answer being only what depends on the digits.
    """

    chunks: tuple[np.ndarray, ...]
    questions: tuple[tuple[np.ndarray, np.ndarray], ...]


def fact_cases(
    encode: Encode,
    seed: int,
    role: str,
    *,
    cases: int,
    chunks: int,
    chunk_size: int,
    facts_per_chunk: int = 8,
) -> list[FactCase]:
    """`cases` histories of `chunks` chunks, each with its facts between sentences of a novel."""
    rng = np.random.default_rng([seed, chunks, chunk_size])
    pages = _pages(encode, rng, role, cases, chunks * chunk_size)
    out = []
    for page in pages:
        facts = draw_facts(rng, chunks * facts_per_chunk, role)
        made, page = [], list(page)
        for first in range(0, len(facts), facts_per_chunk):
            inserted = [
                np.asarray(encode(f" {fact.sentence}"), np.int32)
                for fact in facts[first : first + facts_per_chunk]
            ]
            room = chunk_size - sum(map(len, inserted))
            if room < 0:
                raise RequestError(
                    f"chunk_size is {chunk_size}; {facts_per_chunk} facts need "
                    f"{chunk_size - room} tokens."
                )
            made.append(with_insertions(rng, page, inserted, room))
        questions = tuple(question(encode, fact) for fact in facts)
        out.append(FactCase(tuple(made), questions))
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class TextCase:
    """Chunks of a novel and the tokens that follow them there (int32)."""

    chunks: tuple[np.ndarray, ...]
    tokens: np.ndarray


def text_cases(
    encode: Encode,
    seed: int,
    role: str,
    *,
    cases: int,
    chunks: int,
    chunk_size: int,
    next_tokens: int = 128,
) -> list[TextCase]:
    """`cases` pages: `chunks` full chunks, and the next tokens, of which `next_tokens` can be
    predicted from one before (so one more is given)."""
    rng = np.random.default_rng([seed, chunks, chunk_size, next_tokens])
    length = chunks * chunk_size
    out = []
    for page in _pages(encode, rng, role, cases, length + next_tokens + 1):
        page = np.concatenate(page)
        after = page[length : length + next_tokens + 1]
        out.append(TextCase(tuple(chunk_tokens(page[:length], chunk_size)), after))
    return out


def text_sentences(encode: Encode, text: str) -> Iterator[np.ndarray]:
    """Token ids of each sentence, its leading white space with it."""
    for sentence in _SENTENCE.finditer(text):
        yield np.asarray(encode(sentence[0]), np.int32)


# A sentence ends at . ! or ? with any closing quotes, before white space and no small letter, or
# at a paragraph's end. "Mr." and its like do not end one.
_SENTENCE = re.compile(
    r"\s*\S.*?(?:(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?][\"')_]*(?=\s+[^a-z\s])|(?=\n\n)|\s*\Z)",
    re.DOTALL,
)


@functools.lru_cache(maxsize=4)
def book_sentences(encode: Encode, role: str) -> list[np.ndarray]:
    """Token ids of each sentence of the role's books, in order."""
    return list(text_sentences(encode, bundled_text(*BOOKS[role])))


def _pages(
    encode: Encode, rng: np.random.Generator, role: str, count: int, length: int
) -> list[list[np.ndarray]]:
    """`count` places of at least `length` tokens in the role's books, as sentences; no two overlap,
    and each begins with a sentence."""
    sentences = book_sentences(encode, role)
    begins = np.cumsum([0, *map(len, sentences)])
    slot = begins[-1] // max(count, 1)
    longest = max(map(len, sentences))
    if count < 1 or slot < length + 2 * longest:
        raise RequestError(
            f"{count} cases of {length} tokens were asked for; the books for this hold "
            f"{begins[-1]} tokens."
        )
    pages = []
    for index in range(count):
        start = index * slot + rng.integers(slot - length - 2 * longest + 1)
        first = np.searchsorted(begins, start)
        last = np.searchsorted(begins, begins[first] + length)
        pages.append(sentences[first:last])
    return pages


def with_insertions(
    rng: np.random.Generator, page: list[np.ndarray], inserted: list[np.ndarray], room: int
) -> np.ndarray:
    """Takes sentences from the front of `page` until `room` tokens are there, the last one cut, and
    puts `inserted` between them in random places."""
    taken, size = [], 0
    while size < room:
        sentence = page.pop(0)[: room - size]
        taken.append(sentence)
        size += len(sentence)
    places = np.sort(rng.integers(0, len(taken) + 1, len(inserted)))
    for place, piece in reversed(list(zip(places, inserted, strict=True))):
        taken.insert(place, piece)
    return np.concatenate(taken)


def says(text: str, digits: str) -> bool:
    """Whether a text begins with these digits, and no other digit behind them."""
    number = re.match(r"\s*(\d+)", text)
    return number is not None and number[1] == digits


def question(encode: Encode, fact: Fact) -> tuple[np.ndarray, np.ndarray]:
    """(prompt, answer) tokens; the answer begins at the first token that the digits can change."""
    asked = f" {fact.question}"
    tokens = list(encode(asked + fact.answer))
    flipped = "".join(str(9 - int(digit)) for digit in fact.digits)
    other = list(encode(f"{asked} {flipped}"))
    same = next(i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b)
    return np.asarray(tokens[:same], np.int32), np.asarray(tokens[same:], np.int32)
