"""What decides the numbers of a run; kept in the training folder."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from combkv_jax.errors import RequestError
from combkv_jax.training.recipe import Lesson, Stage

FIRST_GROUPS = 6  # in the pool before the first step


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run.

    encoder: as in `convert_weights.py`. rows: of a micro-batch, of which a step takes
    `accumulate`; of one's own data a row is a pack of pack_tokens recent and pack_history history
    tokens. data, objective: what is trained on (`recipe.Lesson`). recipe: stages that say all that
    themselves.

    Of lookup and recall: pool: groups of chunks that each holds at once. fresh: its steps for each
    new group, once the pool is full (while it fills, every step makes one).

    Of recall: text_weight: what next-token loss on text counts beside answers. attention_weight:
    what attention away from an answer's place counts (`step.missed`). remat: whether activations
    are made again, as they always are in packs.

    rate, gate_rate: of the projections and the gates; warmup steps, then constant, then falling
    over the last `decay` share. clip: of the gradient's norm. weight_decay: of matrices.
    """

    model: str
    kept_layers: str | None
    steps: int
    rows: int
    pool: int
    fresh: int
    rate: float
    gate_rate: float
    warmup: int
    decay: float
    clip: float
    text_weight: float
    attention_weight: float
    seed: int
    encoder: str | None = None
    accumulate: int = 1
    weight_decay: float = 0.0
    remat: bool = False
    data: tuple[str, ...] = ()
    objective: str = "recall"
    pack_tokens: int = 1024
    pack_history: int = 8192
    recipe: tuple[Stage, ...] = ()

    def __post_init__(self):
        if not 0 < self.clip < math.inf:
            raise RequestError(f"clip is {self.clip}; it must be a positive number.")
        if self.recipe and self.data:
            raise RequestError("the recipe names its data; give either --recipe or --data.")
        for name in ("text_weight", "attention_weight", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RequestError(f"{name} is {getattr(self, name)}; it must be 0 or more.")
        if self.pool < FIRST_GROUPS:
            raise RequestError(f"pool is {self.pool} groups; at least {FIRST_GROUPS} are needed.")
        _ = self.stages  # checks the rest

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What is trained on, one after the other."""
        if self.recipe:
            return self.recipe
        lessons = tuple(Lesson(self.objective, name) for name in self.data or (None,))
        rates = (self.rate, self.gate_rate, self.warmup, self.decay)
        return (Stage(self.steps, lessons, (1.0,) * len(lessons), *rates),)

    def lesson_at(self, done: int) -> Lesson:
        """The lesson of step number `done` (from 0)."""
        stages, begin = self.stages, 0
        for stage in stages:
            if done < begin + stage.steps or stage is stages[-1]:
                break
            begin += stage.steps
        if len(stage.lessons) == 1:
            return stage.lessons[0]
        shares = np.array(stage.weights)
        rng = np.random.default_rng([self.seed, 4, done])
        return stage.lessons[rng.choice(len(shares), p=shares / shares.sum())]

    def groups_at(self, done: int) -> int:
        """Groups made before a lesson's own step number `done` (from 0) is taken."""
        filling = min(done, self.pool - FIRST_GROUPS)
        return FIRST_GROUPS + filling + (done - filling) // self.fresh

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """What runs had that were begun before a setting could be chosen."""
        fields = dataclasses.fields(cls)
        return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
