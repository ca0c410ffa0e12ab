"""How well a novel's continuation is predicted from its own pages, from another place's and from
none, pages being compressed or in the full cache."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax import console
from combkv_jax.cache import Cache, History, Packed
from combkv_jax.compress import compress
from combkv_jax.evaluation import tasks
from combkv_jax.language_model import LanguageModel
from combkv_jax.model import CombLlama


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Mean NLL, nats a token, of the text behind pages of `tokens` tokens each."""

    tokens: int
    cases: int
    none: float
    compressed: float
    other: float
    full: float
    other_full: float

    @property
    def share(self) -> float:
        """How much of what the full cache gains over no history the compressed one gains."""
        return (self.none - self.compressed) / (self.none - self.full)


def measure(lm: LanguageModel, *, pairs: int, chunks: int, seed: int = 0) -> Continuation:
    """On two times `pairs` places of the judging novels, each behind `chunks` full chunks. "other"
    is a place half the novels away."""
    size, cases = lm.config.chunk_size, 2 * pairs
    made = tasks.text_cases(lm.tokens, seed, "judge", cases=cases, chunks=chunks, chunk_size=size)
    sums = dict.fromkeys(("none", "compressed", "other", "full", "other_full"), 0.0)
    with console.progress(cases, "Continuations", "places") as advance:
        for pair in zip(made[:pairs], made[pairs:], strict=True):
            histories = [compress(lm.model, [case.chunks]) for case in pair]
            for index, case in enumerate(pair):
                target = case.tokens[1:]
                sums["none"] += float(_nll(lm.model, None, case.tokens[:-1], target))
                own, other = histories[index], histories[1 - index]
                sums["compressed"] += float(_nll(lm.model, own, case.tokens[:-1], target))
                sums["other"] += float(_nll(lm.model, other, case.tokens[:-1], target))
                for name, pages in (("full", case), ("other_full", pair[1 - index])):
                    whole = np.concatenate([*pages.chunks, case.tokens])
                    sums[name] += float(_nll(lm.model, None, whole[:-1], target))
                advance(1)
    return Continuation(chunks * size, cases, **{k: v / cases for k, v in sums.items()})


@jax.jit
def _nll(model: CombLlama, history: History | None, ids, target) -> jax.Array:
    """Mean NLL of `target` [A], which the last A of the tokens ids [T] predict."""
    index = jnp.arange(ids.shape[0], dtype=jnp.int32)[None]
    recent = Packed.causal(index)
    entries, position, blocks = [recent] * len(model.decoder.layers), index, {}
    if history is not None:
        entries = model.entries(history, recent)
        position = index + model.recent_offset(history.count)[:, None]
        blocks = model.blocks
    cache = Cache(tuple(entries), position[:, 0])
    lengths = jnp.full(1, ids.shape[0], jnp.int32)
    x, _ = model.decoder(jnp.asarray(ids)[None], position, cache, lengths, blocks)
    logits = model.decoder.logits(x[0, -target.shape[0] :])  # of the text alone, not its pages
    chosen = jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]
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
            ("another place's, full cache", result.other_full),
        )
    ]
