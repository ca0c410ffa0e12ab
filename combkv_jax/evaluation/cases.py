"""Cases to compare cache policies on: contexts of an exact length, and questions with their scores.

All are made from the judging novels and names, by a random generator; the same one gives the same
cases. The tasks named `ruler-` follow RULER (Hsieh et al. 2024, arXiv 2404.06654) in what they ask
and how they score. They differ in their texts: the haystack of each is the novels, prompts are
sentences to complete, so that small models without instruction training can answer, and there is
no worked example in front. RULER's question answering needs SQuAD or HotpotQA, which are not
bundled; `longbench.dataset_cases` reads such sets.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from combkv_jax.errors import RequestError
from combkv_jax.evaluation import recall, scores, tasks
from combkv_jax.evaluation.tasks import Encode, Fact

KEYS = 4  # needles of `multikey`, each of which may be asked for
PAIRS = 8  # that `kv` asks for in one context at most
DENSITY = 384  # tokens that recall.FACTS_PER_CHUNK facts of `kv` share
CODES = 4  # that `ruler-multivalue` and `ruler-multiquery` ask for
HOPS = 4  # of `ruler-vt`, from a value to the last variable
COMMON = 10  # words that `ruler-cwe` asks for
# Tokens from which on `ruler-cwe` lists a common word 30 times and another 3 times, not 6 and 1.
LONG = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """What is asked of a context.

    prompt: int32 [n], read behind the context. new_tokens: how many the answer may have. score: of
    the generated text, 0 to 1.
    """

    prompt: np.ndarray
    new_tokens: int
    score: Callable[[str], float]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A context, int32 [n], that is read once for all its questions. place: what cells of a table
    are told apart by, such as {"depth": 0.5}; may be empty."""

    tokens: np.ndarray
    questions: tuple[Question, ...]
    place: Mapping[str, float] = dataclasses.field(default_factory=dict)


Maker = Callable[[Encode, np.random.Generator, int, int], Iterator[Case]]


def _needle(encode: Encode, rng: np.random.Generator, tokens: int, count: int) -> Iterator[Case]:
    """One code at each of `count` depths, of which the first is 0 and the last 1; alone, 0.5."""
    for depth in np.linspace(0, 1, count).tolist() if count > 1 else [0.5]:
        [fact] = tasks.draw_facts(rng, 1)
        context = tasks.haystack(encode, tokens, fact, depth)
        yield Case(context, (_code(encode, fact),), {"depth": depth})


def _multikey(encode: Encode, rng: np.random.Generator, tokens: int, count: int) -> Iterator[Case]:
    """One of KEYS codes of different names, as in RULER's niah_multikey_1."""
    for ask in _shares(count, KEYS):
        facts = tasks.draw_facts(rng, KEYS)
        context = _among(encode, rng, tokens, [fact.sentence for fact in facts])
        chosen = rng.permutation(KEYS)[:ask]
        yield Case(context, tuple(_code(encode, facts[i]) for i in chosen))


def _kv(encode: Encode, rng: np.random.Generator, tokens: int, count: int) -> Iterator[Case]:
    """One of many codes; every name shares its first name and its surname with others."""
    for ask in _shares(count, PAIRS):
        made = recall.recall_case(encode, rng, "similar", tokens, DENSITY, ask)
        yield Case(made.tokens, tuple(_code(encode, fact) for fact in made.asked))


def _codes(
    encode: Encode, rng: np.random.Generator, tokens: int, count: int, *, values: int
) -> Iterator[Case]:
    """CODES codes that one question asks for, `values` of each name."""
    for _ in range(count):
        names = [fact.name for fact in tasks.draw_facts(rng, CODES // values)]
        codes = [f"{code:05d}" for code in rng.choice(100_000, CODES, replace=False)]
        told = [Fact(names[i // values], code).sentence for i, code in enumerate(codes)]
        context = _among(encode, rng, tokens, rng.permutation(told).tolist())
        *first, last = names
        listed = f"{', '.join(first)} and {last}" if first else last
        yield Case(context, (_listing(encode, f" The secret codes of {listed} are", codes),))


def _tracking(encode: Encode, rng: np.random.Generator, tokens: int, count: int) -> Iterator[Case]:
    """A value, a variable that is given it, and HOPS more that are given the one before."""
    for _ in range(count):
        names = _coded(rng, HOPS + 1, 5, string.ascii_uppercase)
        value = str(rng.integers(10_000, 100_000))
        given = [value, *(f"VAR {name}" for name in names)]
        told = [f"VAR {name} = {what}." for name, what in zip(names, given, strict=False)]
        asked = f"\n\nThe {HOPS + 1} variables that have the value {value} in the text above are"
        yield Case(_among(encode, rng, tokens, told), (_listing(encode, asked, names),))


def _common_words(
    encode: Encode, rng: np.random.Generator, tokens: int, count: int
) -> Iterator[Case]:
    """The COMMON words that a numbered list has ten (in short lists six) times as often as the
    others. When the novels' words are used up, the rest of the context is text."""
    repeats = (30, 3) if tokens >= LONG else (6, 1)
    numbers: list[Sequence[int]] = []  # token ids of " 1.", " 2.", as far as a list has them
    for _ in range(count):
        drawn = rng.permutation(_vocabulary())
        head = encode("\n\nSome words of this numbered list come much more often than others.")
        pieces: list[Sequence[int]] = []  # of the words, each as often as it comes
        room = tokens - len(head)
        for used, word in enumerate(drawn):
            times, ids = repeats[used >= COMMON], encode(f" {word}")
            filled = slice(len(pieces), len(pieces) + times)
            numbers += [encode(f" {n + 1}.") for n in range(len(numbers), filled.stop)]
            room -= times * len(ids) + sum(map(len, numbers[filled]))
            if room < 0:
                break
            pieces += [ids] * times
        if len(pieces) <= COMMON * repeats[0]:
            raise RequestError(f"a list with {COMMON} common words needs more.")
        order = rng.permutation(len(pieces))
        entries = [part for n, i in zip(numbers, order, strict=False) for part in (n, pieces[i])]
        context = _among(encode, rng, tokens, [np.concatenate([head, *entries])])
        asked = f"\n\nThe {COMMON} words that come most often in the list above are:"
        yield Case(context, (_listing(encode, asked, drawn[:COMMON].tolist()),))


def _frequent_words(
    encode: Encode, rng: np.random.Generator, tokens: int, count: int
) -> Iterator[Case]:
    """The three most frequent coded words of a text with a Zipf distribution: the k-th of
    tokens/50 words comes k**-2 / zeta(2) of all times. The first is dots, which mean nothing."""
    rank = np.arange(1, tokens // 50 + 1)
    for _ in range(count):
        coded = ["....", *_coded(rng, max(len(rank) - 1, 0), 6, string.ascii_lowercase)]
        head = encode("\n\nThis text is in code; its dots mean nothing.")
        ids = [encode(f" {word}") for word in coded[: len(rank)]]
        size = np.array([len(one) for one in ids])

        def times(total: int) -> np.ndarray:
            return (total * rank**-2.0 * 6 / math.pi**2).astype(int)

        def length(total: int, size: np.ndarray = size) -> int:
            return int(times(total) @ size)

        room = tokens - len(head)
        often = times(bisect.bisect_right(range(2 * max(room, 1)), room, key=length) - 1)
        if len(often) < 5 or often[3] == often[4]:
            raise RequestError("a text of coded words needs more.")
        order = rng.permutation(np.repeat(np.arange(len(ids)), often))
        block = np.concatenate([head, *(ids[i] for i in order)])
        asked = "\n\nThe three coded words that come most often in the text above are:"
        context = _among(encode, rng, tokens, [block])
        yield Case(context, (_listing(encode, asked, coded[1:4]),))


def _among(
    encode: Encode, rng: np.random.Generator, tokens: int, told: Sequence[str | np.ndarray]
) -> np.ndarray:
    """int32 [tokens]: the judging novels from a random place on, and in random places between
    their sentences what is told, in that order: sentences, or token ids."""
    pieces = [encode(f" {one}") if isinstance(one, str) else one for one in told]
    pieces = [np.asarray(piece, np.int32) for piece in pieces]
    room = tokens - sum(map(len, pieces))
    if room < 0:
        raise RequestError(f"what it tells has {tokens - room} tokens.")
    sentences = tasks.book_sentences(encode, "judge")
    place, page, size = int(rng.integers(len(sentences))), [], 0
    while size < room:
        page.append(sentences[place % len(sentences)])
        size += len(page[-1])
        place += 1
    return tasks.with_insertions(rng, page, pieces, room)


def _code(encode: Encode, fact: Fact) -> Question:
    """Right when the digits are said and no digit follows, for which there is a token more."""
    prompt, answer = tasks.question(encode, fact)
    return Question(prompt, len(answer) + 1, lambda text: float(tasks.says(text, fact.digits)))


def _listing(encode: Encode, asked: str, expected: list[str]) -> Question:
    """The share of `expected` that is said, within twice the tokens of their plain list."""
    room = 2 * len(encode(f" {', '.join(expected)}"))
    prompt = np.asarray(encode(asked), np.int32)
    return Question(prompt, room, functools.partial(scores.contained, expected))


def _shares(count: int, most: int) -> list[int]:
    """`count` questions shared out evenly to contexts that have `most` at most."""
    return [len(part) for part in np.array_split(np.arange(count), -(-count // most))]


def _coded(rng: np.random.Generator, count: int, length: int, letters: str) -> list[str]:
    """Different words of random letters."""
    drawn = rng.choice(len(letters) ** length, count, replace=False)
    return [
        "".join(letters[n // len(letters) ** i % len(letters)] for i in range(length))
        for n in drawn
    ]


@functools.cache
def _vocabulary() -> list[str]:
    """The judging novels' words of four letters and more that stand in small letters."""
    text = tasks.bundled_text(*tasks.BOOKS["judge"])
    return sorted(set(re.findall(r"\b[a-z]{4,}\b", text)))


def _cases(
    name: str, make: Maker, encode: Encode, rng: np.random.Generator, tokens: int, count: int
) -> list[Case]:
    if count < 1:
        raise RequestError(f"{count} questions of {name} were asked for; 1 or more can be made.")
    try:
        return list(make(encode, rng, tokens, count))
    except RequestError as error:
        raise RequestError(f"{name} cannot be made in {tokens} tokens: {error}") from None


_MAKERS: dict[str, Maker] = {
    "needle": _needle,
    "multikey": _multikey,
    "kv": _kv,
    "ruler-multivalue": functools.partial(_codes, values=CODES),
    "ruler-multiquery": functools.partial(_codes, values=1),
    "ruler-vt": _tracking,
    "ruler-cwe": _common_words,
    "ruler-fwe": _frequent_words,
}

# By name, (encode, rng, tokens, count) -> `count` questions in cases whose contexts have exactly
# `tokens` tokens. Each raises RequestError when these are too few for it.
TASKS: dict[str, Callable[[Encode, np.random.Generator, int, int], list[Case]]] = {
    name: functools.partial(_cases, name, make) for name, make in _MAKERS.items()
}
