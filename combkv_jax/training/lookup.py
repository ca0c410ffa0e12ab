"""The objective `lookup`: a question's tokens are to find, among the keys of many chunks, where
their answer stands. The model is not run for it, so it costs a fraction of a step on recall.

Questions and chunks go through the frozen decoder once. What is trained on them are the history's
queries, keys and summaries in the layers that have summaries (contrastive: van den Oord et al.
2018, with every other token of all chunks as a negative).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax import console, distributed
from combkv_jax.cache import Packed
from combkv_jax.config import CombConfig
from combkv_jax.errors import RequestError
from combkv_jax.evaluation import tasks
from combkv_jax.language_model import LanguageModel
from combkv_jax.layers import rotary_angles
from combkv_jax.training import step
from combkv_jax.training.facts import draw_checks
from combkv_jax.training.pool import GROUP, Placed, Pool, encode, told_chunks
from combkv_jax.training.rows import Asker, draw_behind
from combkv_jax.training.settings import Settings
from combkv_jax.training.taps import encode_questions

TOKENS = 40  # of a question, with text in front of it
ANSWERS = 7  # tokens of an answer that are sought: a space, five digits and a full stop
ASKED = 64  # questions that go through the decoder at once
QUESTIONS = 96  # of a step
GROUPS = 6  # of a step, at most settings.FIRST_GROUPS
DISGUISED = 0.5  # share of steps that give every word another's place
LONGEST = 4096  # chunks of a history that a step's few stand for
CHECKED = 341  # and those of the check: 131072 tokens of 384 a chunk
OTHER_SEEDS = 1 << 20  # between a run's and that of its chunks to look up in
OPEN = 4.0  # the summaries' gates at the beginning: at 0 neither side learns from the other

HELD_OUT, EACH = 40, 8  # chunks of the check, facts in each


class Batch(NamedTuple):
    """taps: of each summary layer float16 [chunks, chunk_size, D], of the tokens ids
    [chunks, chunk_size]. asked: of each summary layer float16 [Q, T, D], of the tokens asked_ids
    [Q, T]. behind: int32 [Q], recent tokens in front of each question. column, target: int32
    [Q, A], tokens of a question and which of the chunks' tokens each is to find; weight: float32,
    0 where there is none. disguise: int32 [V], the word that each token is taken for. size:
    float32, log of the chunks of a history that these stand for."""

    taps: tuple[Any, ...]
    ids: Any
    asked: tuple[Any, ...]
    asked_ids: Any
    behind: Any
    column: Any
    target: Any
    weight: Any
    disguise: Any
    size: Any


class Found(NamedTuple):
    """Of a micro-batch: its part of each layer's loss [layers], and how many of the sought tokens
    had a head's most attention, [layers, H, A], of how many, [A]."""

    nll: jax.Array
    hits: jax.Array
    sought: jax.Array


@dataclasses.dataclass(frozen=True)
class Lookup:
    """-log of the share of attention that a sought token got, the mean over heads, tokens and
    layers: every head is to find it, because those that look elsewhere say something else.

    The chunks are a sample of a longer history: every other token counts as often as it has tokens
    to a chunk's one, so that a head learns how sharp it must be there (`HistoryAttention.scale`)
    at the price of a few chunks."""

    config: CombConfig

    def totals(self, batch: Batch) -> jax.Array:
        """What is sought, times layers."""
        return jnp.maximum(jnp.sum(batch.weight), 1) * len(self.config.summary_layers)

    def loss(self, trained: step.Arrays, frozen: step.Arrays, micro: Batch, totals) -> tuple:
        """As `Objective.loss`, with `Found`."""
        config = self.config
        model = step.assemble(config, trained, frozen)
        dtype = model.dtype
        of_chunks, of_questions = (
            model.decoder.words(model.decoder.embed(micro.disguise[ids]))
            for ids in (micro.ids, micro.asked_ids)
        )
        chunk, asked = (
            Packed.causal(jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape))
            for ids in (micro.ids, micro.asked_ids)
        )
        nearby = asked.nearby(config.summary_tokens)
        whole = jnp.full(micro.asked_ids.shape[0], micro.asked_ids.shape[1], jnp.int32)
        positions = [x.end - 1 for x in (chunk, asked)]
        at_chunk = rotary_angles(config.text, positions[0])
        place = config.chunk_size + micro.behind[:, None] + positions[1]
        at_recent = rotary_angles(config.text, place)
        size = jnp.full((*micro.asked_ids.shape, 1), micro.size, jnp.float32)
        for_each = micro.size - math.log(len(micro.ids))  # of the history's tokens, log
        nlls, hits = [], []
        for layer, h, q in zip(config.summary_layers, micro.taps, micro.asked, strict=True):
            block = model.blocks[layer]
            key, _ = block.keys_values(h.astype(dtype), of_chunks, at_chunk, chunk)
            query, _ = block.queries(q.astype(dtype), of_questions, at_recent, size, nearby, whole)
            query = jnp.take_along_axis(query, micro.column[..., None, None], axis=1)
            logits = _logits(query, key.reshape(-1, *key.shape[2:]))  # [Q, A, H, S]
            target = micro.target[..., None, None]
            chosen = jnp.take_along_axis(logits, target, axis=-1)[..., 0]
            others = jnp.where(jnp.arange(logits.shape[-1]) == target, -jnp.inf, logits)
            others = jax.nn.logsumexp(others, axis=-1) + for_each
            share = -jax.nn.softplus(others - chosen)
            nlls.append(-jnp.sum(share.mean(axis=-1) * micro.weight) / totals)
            hit = (chosen >= logits.max(axis=-1)) & (micro.weight > 0)[..., None]
            hits.append(jnp.sum(hit, axis=0).T)
        nll = jnp.stack(nlls)
        sought = jnp.sum(micro.weight > 0, axis=0)
        return jnp.sum(nll), Found(nll, jnp.stack(hits), sought)


def _logits(query: jax.Array, key: jax.Array) -> jax.Array:
    """query [Q, A, H, head_dim] against key [S, K, head_dim] -> float32 [Q, A, H, S]."""
    heads, dim = query.shape[2:]
    grouped = query.reshape(*query.shape[:2], key.shape[1], heads // key.shape[1], dim)
    out = jnp.einsum("qakgd,skd->qakgs", grouped, key, preferred_element_type=jnp.float32)
    return out.reshape(*query.shape[:3], -1) * dim**-0.5


def opened(trained: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The summaries' gates where looking up can begin, if no training has moved them yet."""
    gates = [name for name in trained if name.endswith(("summary.query_gate", "summary.key_gate"))]
    if any(bool(jnp.any(trained[name] != 0)) for name in gates):
        return trained
    return trained | {name: trained[name] + OPEN for name in gates}


@dataclasses.dataclass(frozen=True, eq=False)
class Asked:
    """Questions of some chunks. ids: int32 [Q, TOKENS]; taps: of each layer float16
    [Q, TOKENS, D]; column, place: int32 [Q, ANSWERS], tokens of a question and where in its chunk
    each finds what it seeks, -1 for none; the last question seeks nothing. row: the question about
    each fact."""

    ids: np.ndarray
    taps: list[np.ndarray]
    column: np.ndarray
    place: np.ndarray
    row: dict[tuple[str, str], int]

    @classmethod
    def of(cls, lm: LanguageModel, pieces, sinks: np.ndarray) -> Asked:
        """pieces: (key of the fact, text in front, its `Piece` with where in its chunk the value
        stands). sinks: first tokens of the history, int32 [sink_tokens]."""
        ids = np.zeros((-(-(len(pieces) + 1) // ASKED) * ASKED, TOKENS), np.int32)
        column = np.zeros((len(ids), ANSWERS), np.int32)
        place = np.full_like(column, -1)
        for i, (_, before, piece) in enumerate(pieces):
            tokens = np.concatenate([before, piece.prompt, piece.answer])[:TOKENS]
            ids[i, : len(tokens)] = tokens
            first = len(before) + len(piece.prompt) - 1
            for a in range(min(ANSWERS, piece.sought[1] - piece.sought[0])):
                column[i, a], place[i, a] = first + a, piece.sought[0] + a
        parts = []
        for begin in range(0, len(ids), ASKED):
            some = ids[begin : begin + ASKED]
            layers = lm.config.summary_layers
            parts.append(
                distributed.fetch(_ask(lm.model.decoder, layers, some, sinks, lm.config.chunk_size))
            )
        taps = [np.concatenate(layer) for layer in zip(*parts, strict=True)]
        return cls(ids, taps, column, place, {key: i for i, (key, _, _) in enumerate(pieces)})


_ask = jax.jit(encode_questions, static_argnums=(1, 4))


class LookupLessons:
    """Questions about facts in a pool of encoded chunks, as `lessons.Lessons`.

    Raises RequestError for a model without summaries.
    """

    identity = None

    def __init__(self, lm: LanguageModel, settings: Settings):
        if not lm.config.summary_layers:
            half = -(-lm.config.text.num_hidden_layers // 2)
            raise RequestError(
                f"{settings.model} has no summary layers, which the objective lookup trains; "
                f"convert the plain model anew with a kept layer of {half} or higher, or train on "
                "recall."
            )
        self.lm, self.settings = lm, settings
        self.ask = Asker(lm.tokens, None)  # a chat's answer lacks the space that `Placed` begins at
        self.objective = Lookup(lm.config)
        self.plain = np.arange(lm.config.text.vocab_size, dtype=np.int32)

    def begin(self, number: int) -> None:
        """As `Lessons.begin`: fills the pool, with questions about it."""
        settings = self.settings
        # Full of facts, and not those of recall: what a stage that mixes both repeats, it learns by
        # heart.
        seed, layers = settings.seed + OTHER_SEEDS, self.lm.config.summary_layers
        self.pool = Pool(self.lm, settings.pool, seed, layers, dense_share=1.0)
        self.asked: dict[int, Asked] = {}  # of the group in each slot
        made = settings.groups_at(number)
        tokens = min(made, settings.pool) * GROUP * self.lm.config.chunk_size
        with console.progress(tokens, "Encoding chunks to look up in") as advance:
            self._grow_to(made, advance)
        self.held_out = self._check_batch()
        if not (self.held_out.weight.any() and any(a.row for a in self.asked.values())):
            raise RequestError(
                f"no question about a fact fits into {TOKENS} tokens of this model's tokenizer, as "
                "the objective lookup needs; train on recall."
            )

    def _grow_to(self, made: int, advance: Callable[[int], None] = lambda tokens: None) -> None:
        """As `Pool.grow_to`, with questions about the new groups."""
        first = max(self.pool.made, made - self.pool.capacity)
        self.pool.grow_to(made, advance)
        for number in range(first, made):
            self.asked[number % self.pool.capacity] = self._about(number)

    def _about(self, number: int) -> Asked:
        """Questions about the facts of that group, with text of its pages in front."""
        rng = np.random.default_rng([self.settings.seed, 5, number])
        slot = number % self.pool.capacity
        found = [p for chunk in self.pool.groups[slot].facts for p in chunk]
        rng.shuffle(found)
        pieces = []
        for placed in found:
            if len(pieces) == ASKED - 1:
                break
            piece = self.ask(placed.fact, rng, (placed.start, placed.stop))
            room = TOKENS - len(piece)
            if room >= 0:
                sentence = self.pool.sentences[rng.integers(len(self.pool.sentences))]
                before = sentence[len(sentence) - rng.integers(min(room, len(sentence)) + 1) :]
                pieces.append((placed.fact.key, before, piece))
        return Asked.of(self.lm, pieces, self.pool.ids[slot * GROUP, : self.lm.config.sink_tokens])

    def batch(self, number: int) -> tuple[Batch, None]:
        """As `Lessons.batch`: groups made one after another, which often share names."""
        made, capacity = self.settings.groups_at(number), self.settings.pool
        self._grow_to(made)
        parts = []
        for part in range(self.settings.accumulate):
            rng = np.random.default_rng([self.settings.seed, 6, number, part])
            first = int(rng.integers(max(0, made - capacity), made - GROUPS + 1))
            parts.append(self._draw(rng, [(first + i) % capacity for i in range(GROUPS)]))
        return step.accumulated(parts), None

    def _draw(self, rng: np.random.Generator, slots: list[int]) -> Batch:
        chunks = np.concatenate([slot * GROUP + np.arange(GROUP) for slot in slots])
        told = [placed.fact.key for c in chunks for placed in self._facts(c)]
        rows = []
        for slot in slots:
            for index in range(GROUP):
                for placed in self._facts(slot * GROUP + index):
                    row = self.asked[slot].row.get(placed.fact.key)
                    if row is not None and told.count(placed.fact.key) == 1:
                        origin = list(chunks).index(slot * GROUP + index)
                        rows.append((slot, row, origin * self.lm.config.chunk_size))
        rng.shuffle(rows)
        rows = rows or [(slots[0], -1, 0)]
        disguise = self.plain
        if rng.random() < DISGUISED:
            disguise = rng.permutation(len(self.plain)).astype(np.int32)
        return self._stack(
            self.pool.ids[chunks],
            [x[chunks] for x in self.pool.taps],
            [(self.asked[s], *rest) for s, *rest in rows],
            disguise,
            rng.uniform(math.log(len(chunks)), math.log(LONGEST)),
            rng,
        )

    def _facts(self, chunk: int) -> tuple[Placed, ...]:
        return self.pool.groups[chunk // GROUP].facts[chunk % GROUP]

    def _stack(self, ids, taps, rows, disguise, size: float, rng: np.random.Generator) -> Batch:
        """rows: (questions, the one asked, where its chunk begins), most QUESTIONS. rng: draws how
        far behind the history they stand."""
        rows = rows[:QUESTIONS]

        def gather(x):
            """[QUESTIONS, ...] of what `x` says of each row; nothing where there is no row."""
            made = np.stack([x(asked)[row] for asked, row, _ in rows])
            return np.pad(made, [(0, QUESTIONS - len(rows))] + [(0, 0)] * (made.ndim - 1))

        origin = np.pad([o for *_, o in rows], (0, QUESTIONS - len(rows)))[:, None]
        where = gather(lambda asked: asked.place + 1) - 1  # -1 for none
        return Batch(
            tuple(taps),
            ids,
            tuple(gather(lambda asked, i=i: asked.taps[i]) for i in range(len(taps))),
            gather(lambda asked: asked.ids),
            np.array([draw_behind(rng) for _ in range(QUESTIONS)], np.int32),
            gather(lambda asked: asked.column),
            np.where(where >= 0, where + origin, 0).astype(np.int32),
            (where >= 0).astype(np.float32),
            disguise,
            np.float32(size),
        )

    def _check_batch(self) -> Batch:
        """Names, a noun, a frame and a book not trained on, in more chunks than a step's, which
        stand for CHECKED."""
        rng = np.random.default_rng([self.settings.seed, 7])
        told = draw_checks(rng, HELD_OUT * EACH, tasks.NAMES["choose"].split())
        ids, placed = told_chunks(self.lm, rng, told, EACH)
        sinks = ids[0, : self.lm.config.sink_tokens]
        nothing, size = np.zeros(0, np.int32), self.lm.config.chunk_size
        some = [
            (c, (p.fact.key, nothing, self.ask(p.fact, None, (p.start, p.stop))))
            for c, chunk in enumerate(placed)
            for p in chunk
        ]
        chosen = [some[i] for i in rng.permutation(len(some)) if len(some[i][1][2]) <= TOKENS]
        chosen = chosen[:QUESTIONS]
        pieces = [piece for _, piece in chosen]
        asked = Asked.of(self.lm, pieces, sinks)
        rows = [(asked, i, c * size) for i, (c, _) in enumerate(chosen)] or [(asked, -1, 0)]
        taps = encode(self.lm, ids, self.lm.config.summary_layers)
        return self._stack(ids, taps, rows, self.plain, math.log(CHECKED), rng)

    def record(self, about: None, aux: Found) -> dict[str, Any]:
        """As `Lessons.record`. nll: of each layer."""
        layers = self.lm.config.summary_layers
        nlls = (aux.nll.sum(axis=0) * len(layers)).tolist()
        return {
            **{f"nll_{layer}": nll for layer, nll in zip(layers, nlls, strict=True)},
            **_best(aux),
            "tokens": len(aux.nll)
            * (GROUPS * GROUP * self.lm.config.chunk_size + QUESTIONS * TOKENS),
        }

    def check(self, trained: step.Arrays, frozen: step.Arrays) -> dict[str, Any]:
        """As `Lessons.check`: the same of what is held out."""
        batch = step.accumulated([self.held_out])
        value, aux = distributed.fetch(_measure(self.objective, trained, frozen, batch))
        return {"lookup_nll": float(value), **_best(aux), "score": float(value)}


def _best(aux: Found) -> dict[str, float]:
    """Of each token of an answer (0: the space in front of a number) how often the best layer and
    head looked at it most, from `Found` of micro-batches."""
    hits, sought = aux.hits.sum(axis=0), np.maximum(aux.sought.sum(axis=0), 1)
    best = (hits.max(axis=(0, 1)) / sought).tolist()
    return {f"found_{token}": share for token, share in enumerate(best)}


@functools.partial(jax.jit, static_argnums=0)
def _measure(objective: Lookup, trained, frozen, batch: Batch):
    def one(micro):
        return objective.loss(trained, frozen, micro, objective.totals(batch))

    values, aux = jax.lax.map(one, batch)
    return jnp.sum(values), aux
