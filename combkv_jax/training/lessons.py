"""What a step trains on: batches of one lesson, their objective, and what is watched on it.

The number of a batch, counted for each lesson from 0, decides what is in it, so a resumed run
goes on where it stopped.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import jax
import numpy as np

from combkv_jax import console, distributed
from combkv_jax.chunking import Sample
from combkv_jax.evaluation.metrics import Predicted
from combkv_jax.language_model import LanguageModel
from combkv_jax.training import data, step
from combkv_jax.training.checks import Checks
from combkv_jax.training.lookup import LookupLessons
from combkv_jax.training.objectives import PackedLoss, Packs, stack
from combkv_jax.training.pool import GROUP, Pool
from combkv_jax.training.recipe import Lesson
from combkv_jax.training.rows import BUCKETS, Asker, Row, draw_row
from combkv_jax.training.samples import Limits, Samples, first_fit
from combkv_jax.training.settings import Settings


class Lessons(Protocol):
    """A lesson in use. objective: what `step.train_step` lowers. identity: what tells its data from
    other data, None where the settings do."""

    objective: step.Objective
    identity: list[int] | None

    def begin(self, number: int) -> None:
        """What is slow, before batch `number` is asked for."""

    def batch(self, number: int) -> tuple[Any, Any]:
        """(batch for `step.train_step`, what `record` wants of it)."""

    def record(self, about: Any, aux: Any) -> dict[str, Any]:
        """For the log, from the step's `Measured.aux` on the host; `tokens` that were read."""

    def check(self, trained: step.Arrays, frozen: step.Arrays) -> dict[str, float]:
        """Measured on what is held out; `score`, lower is better."""


def lessons_of(lm: LanguageModel, lesson: Lesson, settings: Settings) -> Lessons:
    """The lesson in use. Raises RequestError for what cannot be trained on."""
    if lesson.objective == "lookup":
        return LookupLessons(lm, settings)
    if lesson.objective == "recall":
        return RecallLessons(lm, settings)
    return PackedLessons(lm, lesson, settings)


class RecallLessons:
    """Facts and text in histories drawn from a pool of encoded chunks.

    The model must be of our own form.
    """

    identity = None

    def __init__(self, lm: LanguageModel, settings: Settings):
        self.lm, self.settings = lm, settings
        has_chat = getattr(lm.tokenizer, "chat_template", None)
        self.ask = Asker(lm.tokens, self._chat if has_chat else None)
        self.objective = step.Recall(lm.config, settings.attention_weight, settings.remat)

    def _chat(self, message: str) -> np.ndarray:
        return self.lm.chat_tokens([{"role": "user", "content": message}])

    def begin(self, number: int) -> None:
        """As `Lessons.begin`: fills the pool."""
        settings = self.settings
        self.pool = Pool(self.lm, settings.pool, settings.seed, self.lm.config.cross_layers)
        first = settings.groups_at(number)
        tokens = min(first, settings.pool) * GROUP * self.lm.config.chunk_size
        with console.progress(tokens, "Encoding chunks") as advance:
            self.pool.grow_to(first, advance)
        self.checks = Checks(self.lm, self.ask, settings.seed)

    def batch(self, number: int) -> tuple[step.Batch, list[Row]]:
        """As `Lessons.batch`."""
        settings, pool = self.settings, self.pool
        rng = np.random.default_rng([settings.seed, 0, number])
        pool.grow_to(settings.groups_at(number))
        # A shape that the pool cannot fill yet waits.
        held = GROUP * len(pool.filled)
        fitting = [b for b in BUCKETS if b.shortest <= held] or BUCKETS[:1]
        shares = np.array([bucket.share for bucket in fitting])
        bucket = fitting[rng.choice(len(fitting), p=shares / shares.sum())]
        rows = [
            draw_row(rng, pool, bucket, self.ask, settings.text_weight)
            for _ in range(settings.rows * settings.accumulate)
        ]
        parts = [rows[i : i + settings.rows] for i in range(0, len(rows), settings.rows)]
        return step.accumulated([step.stack(p, pool.ids, pool.taps) for p in parts]), rows

    def record(self, about: list[Row], aux: step.Rows) -> dict[str, Any]:
        """As `Lessons.record`."""
        parts, text, astray = [], [], []
        nlls, rights = (x.reshape(-1, x.shape[-1]) for x in (aux.nll, aux.right))
        for row, nll, right in zip(about, nlls, rights, strict=True):
            asked = row.question >= 0
            if asked.any():
                parts.append(Predicted(nll[asked], right[asked], row.question[asked]))
            is_text, lost = row.question == -1, row.alone >= 0
            text.append(nll[is_text & ~lost])
            astray.append((nll - row.alone)[is_text & lost])
        text, astray = np.concatenate(text), np.concatenate(astray)
        asked = Predicted.concatenate(parts) if parts else None
        return {
            "missed": float(np.sum(aux.missed)),
            "chunks": max(int((row.last - row.first).max()) for row in about),
            "questions": asked.questions if asked else 0,
            "answer_nll": asked.mean_nll if asked else None,
            "tokens_right": asked.accuracy if asked else None,
            "exact": asked.exact if asked else None,
            "text_nll": float(text.mean()) if len(text) else None,
            "astray_nll": float(astray.mean()) if len(astray) else None,
            "tokens": sum(map(self._tokens, about)),
        }

    def _tokens(self, row: Row) -> int:
        """Of the row's histories, questions and texts."""
        used = row.position > 0
        return int(row.last[used].max(initial=0)) * self.lm.config.chunk_size + int(used.sum())

    def check(self, trained: step.Arrays, frozen: step.Arrays) -> dict[str, float]:
        """As `Lessons.check`."""
        return self.checks.measure(trained, frozen)


class PackedLessons:
    """Samples of one's own data in packs. Raises RequestError for data that cannot be used."""

    def __init__(self, lm: LanguageModel, lesson: Lesson, settings: Settings):
        nll, forward, reverse = lesson.terms
        self.objective = PackedLoss(lm.config, nll, forward, reverse)
        taught = self.objective.is_taught
        self.limits = Limits.of(lm.config, settings.pack_tokens, settings.pack_history, taught)
        self.rows, self.accumulate = settings.rows, settings.accumulate
        documents = data.documents(lm, lesson.data)
        self.samples = Samples(documents, lesson, lm.config, self.limits, settings.seed)
        self.identity = [len(self.samples.train), self.samples.fingerprint]
        for line in self.samples.notes:
            console.note(line)
        self.variants = self._held_out()
        self.none: float | None = None

    def begin(self, number: int) -> None:
        """As `Lessons.begin`: nothing."""

    def batch(self, number: int) -> tuple[Packs, list[list[Sample]]]:
        """As `Lessons.batch`."""
        count = self.rows * self.accumulate
        packs = self.samples.packs(number * count, count)
        parts = [packs[i : i + self.rows] for i in range(0, count, self.rows)]
        taught = self.objective.is_taught
        return step.accumulated([stack(part, self.limits, taught) for part in parts]), packs

    def record(self, about: list[list[Sample]], aux: np.ndarray) -> dict[str, Any]:
        """As `Lessons.record`. fill: share of the packs' tokens that are no padding."""
        nll, forward, reverse = aux.sum(axis=0).tolist()
        samples = [sample for pack in about for sample in pack]
        tokens = sum(len(s.tokens) + sum(map(len, s.chunks)) for s in samples)
        room = len(about) * (self.limits.tokens + self.limits.history)
        taught = {"forward": forward, "reverse": reverse} if self.objective.is_taught else {}
        return {
            "nll": nll,
            **taught,
            "samples": len(samples),
            "labels": sum(int(np.sum(s.labels[1:] >= 0)) for s in samples),
            "fill": tokens / room,
            "tokens": tokens,
        }

    def _held_out(self) -> dict[str, list[tuple[Packs, int]]]:
        """Held-out samples behind their own history, another sample's, and none: packs and the
        labels in each."""
        own = [self.samples.read(spec) for spec in self.samples.held_out]
        histories = {"right": [s.chunks for s in own], "none": [() for _ in own]}
        histories["other"] = [own[i - 1].chunks for i in range(len(own))]
        out = {}
        for name, chunks in histories.items():
            some = [Sample(s.tokens, s.labels, c) for s, c in zip(own, chunks, strict=True)]
            sizes = [(len(s.tokens), sum(map(len, s.chunks)), 1, len(s.chunks)) for s in some]
            packs = first_fit(range(len(some)), sizes, self.limits.capacity)
            out[name] = [
                (stack([[some[i] for i in pack]], self.limits, False), labels)
                for pack in packs
                for labels in [sum(int(np.sum(some[i].labels[1:] >= 0)) for i in pack)]
            ]
        return out

    def check(self, trained: step.Arrays, frozen: step.Arrays) -> dict[str, float]:
        """As `Lessons.check`: NLL a label with the right history, another's and none."""
        plain = PackedLoss(self.objective.config)

        def nll(name: str) -> float:
            variant = self.variants[name]
            sums = [_terms(plain, trained, frozen, packs) for packs, _ in variant]
            return float(sum(distributed.fetch(sums))[0]) / sum(labels for _, labels in variant)

        if self.none is None:  # nothing that is trained takes part in it
            self.none = nll("none")
        right = nll("right")
        return {
            "right_nll": right,
            "other_nll": nll("other"),
            "none_nll": self.none,
            "score": right,
        }


@functools.partial(jax.jit, static_argnums=0)
def _terms(objective: PackedLoss, trained, frozen, packs: Packs) -> jax.Array:
    return objective.terms(trained, frozen, packs)
