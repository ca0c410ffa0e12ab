"""Prefill, sampling and the decode loop. Streaming and the fused loop share one step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax.cache import Cache, Comb, History, create_cache
from combkv_jax.compress import bucket
from combkv_jax.errors import RequestError
from combkv_jax.model import CombLlama
from combkv_jax.sharding import cache_places

SEGMENT = 512  # prompt tokens a row prefilled at once


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0: the likeliest one; top_k 0 and top_p 1: off.

    Raises RequestError for a value outside what each may be.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature is {self.temperature}; it must be 0 or more.")
        if not 0 <= self.top_k < 2**31:
            raise RequestError(f"top_k is {self.top_k}; it must be 0 (off) or a count of tokens.")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if not 0 <= self.seed < 2**32:
            raise RequestError(f"seed is {self.seed}; it must lie in 0..{2**32 - 1}.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """A Sampling on the device. Its numbers are traced, so changing them compiles nothing anew."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    greedy: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, sampling: Sampling) -> Draw:
        return cls(
            jnp.float32(sampling.temperature),
            jnp.int32(sampling.top_k),
            jnp.float32(sampling.top_p),
            sampling.temperature == 0,
        )


def sample(logits: jax.Array, key: jax.Array, draw: Draw) -> jax.Array:
    """Tokens int32 [B] from float32 logits [B, V]: temperature, then top-k, then the smallest set
    of likeliest tokens whose probabilities reach top-p (Holtzman et al. 2020)."""
    if draw.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    order = jnp.argsort(logits, axis=-1, descending=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1) / draw.temperature
    rank = jnp.arange(logits.shape[-1])
    limit = jnp.where(draw.top_k > 0, draw.top_k, logits.shape[-1])
    ranked = jnp.where(rank < limit, ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    ranked = jnp.where((before < draw.top_p) | (rank == 0), ranked, -jnp.inf)
    # One key a row, so that a row's draw does not depend on its neighbours.
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(logits.shape[0]))
    choice = jax.vmap(jax.random.categorical)(keys, ranked)
    return jnp.take_along_axis(order, choice[:, None], axis=-1)[:, 0].astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """Between two steps: the changing part of the cache, the newest token of each row (not yet in
    the cache), which rows have ended, and how many tokens were drawn."""

    cache: Cache
    token: jax.Array  # int32 [B]
    done: jax.Array  # bool [B]
    drawn: jax.Array  # int32 []
    key: jax.Array

    def draw_from(self, logits: jax.Array, cache: Cache, draw: Draw, stop: jax.Array):
        """The state after drawing one more token a row; rows that have ended repeat their last."""
        token = sample(logits, jax.random.fold_in(self.key, self.drawn), draw)
        token = jnp.where(self.done, self.token, token)
        done = self.done | jnp.isin(token, stop)
        return dataclasses.replace(self, cache=cache, token=token, done=done, drawn=self.drawn + 1)


Borrowed = tuple[Comb | None, ...]


@functools.partial(jax.jit, donate_argnames="changed")
def _prefill(model: CombLlama, changed: Cache, borrowed: Borrowed, ids, lengths):
    logits, cache = model.prefill(changed.join(borrowed), ids, lengths)
    return logits, cache.split()[0]


@jax.jit
def _first(state: SamplingState, logits, draw: Draw, stop) -> SamplingState:
    return state.draw_from(logits, state.cache, draw, stop)


def decode(model: CombLlama, state: SamplingState, borrowed: Borrowed, draw: Draw, stop):
    """The one step: the newest token goes through the model, and the next is drawn."""
    logits, cache = model.decode_step(state.cache.join(borrowed), state.token)
    return state.draw_from(logits, cache.split()[0], draw, stop)


_decode = jax.jit(decode, donate_argnames="state")


@functools.partial(jax.jit, static_argnames="room", donate_argnames="state")
def _decode_all(model, state, borrowed, draw, stop, limit, room):
    """Steps until every row has ended or `limit` tokens are drawn: tokens [B, room], each where it
    stands among those drawn, and the state."""
    out = jnp.zeros((state.token.shape[0], room), jnp.int32)
    out = out.at[:, state.drawn - 1].set(state.token)

    def more(carry):
        state, _ = carry
        return (state.drawn < limit) & ~jnp.all(state.done)

    def body(carry):
        state, out = carry
        place = state.drawn
        state = decode(model, state, borrowed, draw, stop)
        return state, out.at[:, place].set(state.token)

    state, out = jax.lax.while_loop(more, body, (state, out))
    return out, state


def prefill(
    model: CombLlama, cache: Cache, prompts: Sequence[np.ndarray]
) -> tuple[jax.Array, Cache]:
    """Puts one prompt a row (unequal lengths, at least one token each) into the cache: float32
    logits [B, V] behind each, and the cache. The cache passed in is used up.

    Long prompts go in segments of one shape and short ones in one of a few, so that few lengths
    compile anew.
    """
    lengths = np.array([len(p) for p in prompts])
    if not lengths.size:
        raise RequestError("there are 0 prompts; at least one is needed.")
    if not lengths.all():
        raise RequestError("a prompt has no tokens; at least one is needed.")
    longest = int(lengths.max())
    changed, borrowed = cache.split()
    logits = None
    width = min(SEGMENT, max(16, 1 << (longest - 1).bit_length()))
    for first in range(0, longest, width):
        ids = np.zeros((len(prompts), width), np.int32)
        for row, prompt in enumerate(prompts):
            part = prompt[first : first + width]
            ids[row, : len(part)] = part
        part = np.clip(lengths - first, 0, width).astype(np.int32)
        new, changed = _prefill(model, changed, borrowed, ids, part)
        logits = new if logits is None else jnp.where(part[:, None] > 0, new, logits)
    return logits, changed.join(borrowed)


def new_cache(
    model: CombLlama,
    capacity: int,
    history: History | None = None,
    *,
    batch: int = 1,
    policy: str = "full",
    options: dict[str, Any] | None = None,
) -> Cache:
    """An empty cache for `batch` rows of up to `capacity` recent tokens, behind a history if one
    is given: of one row, shared by all without a copy, or of `batch` rows."""
    text = model.config.text
    places = cache_places(model, batch)
    cache = create_cache(text, policy, batch, bucket(capacity, 256), model.dtype, options, *places)
    if history is None:
        return cache
    rows = history.count.shape[0]
    if rows not in (1, batch):
        raise RequestError(f"the history has {rows} rows and the batch {batch}; use 1 or {batch}.")
    width = model.config.summary_tokens
    window = {"window": width, "first": 0}
    nearby = create_cache(text, "window", batch, width, model.dtype, window, *places).layers
    layers = tuple(
        history.entry(i, recent, nearby[i] if i in model.config.summary_layers else None)
        for i, recent in enumerate(cache.layers)
    )
    position = jnp.broadcast_to(model.recent_offset(history.count), batch)
    return Cache(layers, cache.position + position)


def check_finite(logits: jax.Array) -> None:
    """Raises RequestError for a prefill's logits that mean nothing."""
    if not bool(jnp.all(jnp.isfinite(logits))):
        raise RequestError("the model's logits are not finite; its weights are damaged.")


@dataclasses.dataclass
class Generation:
    """A generation under way: iterate for the tokens of each step, [B] at a time, or `run` it;
    either may follow some steps of the other, and begins with the newest token.

    After it ends, `cache` holds every token but the last drawn one, and can be asked further.
    """

    model: CombLlama
    state: SamplingState
    borrowed: Borrowed
    draw: Draw
    stop: jax.Array
    limit: int

    @classmethod
    def start(
        cls,
        model: CombLlama,
        cache: Cache,
        logits: jax.Array,
        sampling: Sampling,
        stop_tokens: Sequence[int],
        max_new_tokens: int,
    ) -> Generation:
        """Draws the first token from prefill's logits. The cache passed in is used up."""
        if max_new_tokens < 1:
            raise RequestError(f"max-new-tokens is {max_new_tokens}; at least 1 is needed.")
        check_finite(logits)
        changed, borrowed = cache.split()
        batch = logits.shape[0]
        draw = Draw.of(sampling)
        # Never empty, so that every stop list has a comparison to compile; -1 is no token.
        stop = jnp.asarray(list(stop_tokens) or [-1], jnp.int32)
        state = SamplingState(
            changed,
            jnp.zeros(batch, jnp.int32),
            jnp.zeros(batch, bool),
            jnp.int32(0),
            jax.random.key(sampling.seed),
        )
        state = _first(state, logits, draw, stop)
        return cls(model, state, borrowed, draw, stop, max_new_tokens)

    @property
    def cache(self) -> Cache:
        """The cache so far."""
        return self.state.cache.join(self.borrowed)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yields the newest tokens int32 [B] after each step, ended rows repeating their last."""
        yield np.asarray(self.state.token)
        while int(self.state.drawn) < self.limit and not np.all(self.state.done):
            self.state = _decode(self.model, self.state, self.borrowed, self.draw, self.stop)
            yield np.asarray(self.state.token)

    def run(self) -> list[list[int]]:
        """The rest in one compiled loop: the tokens of each row, up to and with its stop token."""
        before = int(self.state.drawn) - 1
        out = self._run(self.limit)
        drawn = np.asarray(out)[:, before : int(self.state.drawn)]
        ends = np.isin(drawn, np.asarray(self.stop))
        last = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, drawn.shape[1])
        return [row[:n].tolist() for row, n in zip(drawn, last, strict=True)]

    def warm_up(self) -> None:
        """Compiles what `run` needs, so that `run` can be timed."""
        self._run(0)

    def _run(self, limit: int) -> jax.Array:
        rest = (self.borrowed, self.draw, self.stop, jnp.int32(limit), bucket(self.limit))
        out, self.state = _decode_all(self.model, self.state, *rest)
        return out
