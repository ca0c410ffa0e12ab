"""How well a novel's continuation is predicted from its compressed pages, from another book's, from
none, and from the same pages in the full cache."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax import console
from combkv_jax.evaluation import tasks
from combkv_jax.evaluation.tasks import TextCase
from combkv_jax.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Mean NLL, nats a token, of the text behind pages of `tokens` tokens each."""

    tokens: int
    cases: int
    none: float
    compressed: float
    other: float
    full: float

    @property
    def share(self) -> float:
        """How much of what the full cache gains over no history the compressed one gains."""
        return (self.none - self.compressed) / (self.none - self.full)


def measure(lm: LanguageModel, *, cases: int, chunks: int, seed: int = 0) -> Continuation:
    """On `cases` places of the judging novels, each behind `chunks` full chunks. "other" is the
    page farthest away."""
    size = lm.config.chunk_size
    made = tasks.text_cases(lm.tokens, seed, "judge", cases=cases, chunks=chunks, chunk_size=size)
    sums = dict.fromkeys(("none", "compressed", "other", "full"), 0.0)
    with console.progress(cases, "Continuations", "places") as advance:
        for index, case in enumerate(made):
            other = made[(index + cases // 2) % cases]
            sums["none"] += _nll(lm, case, None)
            sums["compressed"] += _nll(lm, case, case.chunks)
            sums["other"] += _nll(lm, case, other.chunks)
            whole = TextCase((), np.concatenate([*case.chunks, case.tokens]))
            sums["full"] += _nll(lm, whole, None, len(case.tokens) - 1)
            advance(1)
    return Continuation(chunks * size, cases, **{k: v / cases for k, v in sums.items()})


def _nll(lm: LanguageModel, case: TextCase, chunks, last: int | None = None) -> float:
    """Mean NLL of the case's last tokens (None: all that can be predicted)."""
    tokens = case.tokens
    batch = {"input_ids": tokens[:-1], "cu_seqlens_q": np.array([0, len(tokens) - 1], np.int32)}
    if chunks is not None:
        sizes = np.cumsum([0, *map(len, chunks)]).astype(np.int32)
        batch["chunk_ids"] = np.concatenate(chunks)
        batch["cu_seqlens_chunk"] = sizes
        batch["cu_seqlens_k"] = sizes[[0, -1]]
    return float(_mean(lm.model, batch, tokens[1:], last=last or len(tokens) - 1))


@functools.partial(jax.jit, static_argnames="last")
def _mean(model, batch, target, last: int):
    logits = model(batch)[-last:]
    chosen = jnp.take_along_axis(logits, target[-last:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen)


def table(result: Continuation) -> list[tuple[str, float, float]]:
    """Rows (history, NLL, perplexity)."""
    return [
        (label, value, math.exp(value))
        for label, value in (
            ("no history", result.none),
            ("compressed", result.compressed),
            ("another place's, compressed", result.other),
            ("full cache", result.full),
        )
    ]
