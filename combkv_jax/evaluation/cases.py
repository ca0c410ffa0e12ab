"""Test cases for a cache: a context, and questions behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from combkv_jax.evaluation import tasks
from combkv_jax.evaluation.tasks import Encode


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """prompt: int32 [n], what is read behind the context. new_tokens: how many the answer may have.
    score: 0 to 1, of the generated text."""

    prompt: np.ndarray
    new_tokens: int
    score: Callable[[str], float]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """tokens: int32 [context], read once, for all its questions. place: what a cell of a table is
    told apart by, such as {"depth": 0.5}; may be empty."""

    tokens: np.ndarray
    questions: tuple[Question, ...]
    place: Mapping[str, float]


def needle(encode: Encode, rng: np.random.Generator, tokens: int, count: int) -> list[Case]:
    """One fact in each haystack, at depths from 0 to 1."""
    cases = []
    for number in range(count):
        depth = number / max(count - 1, 1)
        fact = tasks.draw_facts(rng, 1)[0]
        prompt, answer = tasks.question(encode, fact)

        def score(text, digits=fact.digits):
            return float(tasks.says(text, digits))

        question = Question(prompt, len(answer) + 1, score)
        haystack = tasks.haystack(encode, tokens, fact, depth)
        cases.append(Case(haystack, (question,), {"depth": depth}))
    return cases


TASKS: dict[str, Callable[[Encode, np.random.Generator, int, int], list[Case]]] = {"needle": needle}
