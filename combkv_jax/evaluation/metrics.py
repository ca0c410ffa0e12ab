"""How well given answers are predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Predicted:
    """What a model made of the answer tokens of several questions, teacher-forced.

    nll: float [A], negative log-likelihood of each answer token. right: bool [A], whether it was
    the likeliest. question: int [A], which question it belongs to.
    """

    nll: np.ndarray
    right: np.ndarray
    question: np.ndarray

    @classmethod
    def concatenate(cls, parts: Sequence[Predicted]) -> Predicted:
        """All questions of several batches, numbered on."""
        shifts = np.cumsum([0, *(part.question.max() + 1 for part in parts)])
        return cls(
            np.concatenate([part.nll for part in parts]),
            np.concatenate([part.right for part in parts]),
            np.concatenate([p.question + s for p, s in zip(parts, shifts, strict=False)]),
        )

    @property
    def questions(self) -> int:
        """How many questions there are."""
        return len(np.unique(self.question))

    @property
    def mean_nll(self) -> float:
        """Nats per answer token."""
        return float(self.nll.mean())

    @property
    def accuracy(self) -> float:
        """Share of answer tokens that are the likeliest ones."""
        return float(self.right.mean())

    @property
    def exact(self) -> float:
        """Share of questions with every answer token right, which is what greedy decoding gives
        right: up to the first wrong token it has the same text in front."""
        wrong = np.unique(self.question[~self.right])
        return 1 - len(wrong) / self.questions
