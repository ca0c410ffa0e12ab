"""One step of the optimiser, whatever it trains on; and the loss of a batch of recall rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from combkv_jax.cache import Cache, Chunks, Comb, Packed
from combkv_jax.config import CombConfig
from combkv_jax.encoder import encode_sinks
from combkv_jax.model import CombLlama, build, declarations
from combkv_jax.training.recipe import Rates
from combkv_jax.training.rows import Row
from combkv_jax.training.taps import Taps

LEAST = -14.0  # log of a share of attention; below it a head is not called back
BLOCK = 4  # chunks whose K/V are made at once

Arrays = Mapping[str, jax.Array]


class Batch(NamedTuple):
    """Rows stacked, [B, ...] as in `rows.Row`; taps: for each kept layer float16
    [blocks, B, BLOCK * chunk_size, D], of the tokens chunk_ids [blocks, B, BLOCK * chunk_size]."""

    taps: tuple[Any, ...]
    chunk_ids: Any
    sinks: Any
    ids: Any
    position: Any
    start: Any
    history: Any
    first: Any
    last: Any
    column: Any
    target: Any
    weight: Any
    alone: Any
    question: Any
    sought: Any
    sought_first: Any
    sought_last: Any


class State(NamedTuple):
    """What training changes. trained: float32 arrays by name. skipped: steps in a row, up to
    now, whose loss or gradient was not finite."""

    trained: dict[str, jax.Array]
    optimiser: Any
    skipped: jax.Array


class Measured(NamedTuple):
    """Of one step. aux: what the loss gave beside its value, an axis of micro-batches in front."""

    loss: jax.Array
    gradient_norm: jax.Array
    finite: jax.Array
    aux: Any


class Objective(Protocol):
    """What a step lowers; hashable, and the same for the same numbers, so that it is compiled
    once. A batch is a tree of arrays with an axis of micro-batches in front."""

    def totals(self, batch: Any) -> Any:
        """What the whole batch's sums are divided by; it does not depend on what is trained."""

    def loss(self, trained: Arrays, frozen: Arrays, micro: Any, totals: Any) -> tuple:
        """(the micro-batch's part of the loss, more to be looked at); parts add up."""


class Rows(NamedTuple):
    """Of recall rows: NLL of each answer token and whether it was the likeliest, [B, A], and the
    micro-batch's part of how far attention was from the answers' places (`missed`)."""

    nll: jax.Array
    right: jax.Array
    missed: jax.Array


def stack(rows: list[Row], pool_ids: np.ndarray, taps: list[np.ndarray]) -> Batch:
    """A batch of rows of one bucket, whose histories are of these chunks: tokens
    [chunks, chunk_size], and [chunks, chunk_size, D] a kept layer."""
    index = np.stack([row.chunks for row in rows])
    blocks = -(-index.shape[1] // BLOCK)
    index = np.pad(index, ((0, 0), (0, blocks * BLOCK - index.shape[1])))
    index = index.reshape(len(rows), blocks, BLOCK).swapaxes(0, 1)
    shape = (blocks, len(rows), BLOCK * pool_ids.shape[1])
    names = Batch._fields[2:]
    return Batch(
        tuple(x[index].reshape(*shape, -1) for x in taps),
        pool_ids[index].reshape(shape),
        *(np.stack([getattr(row, name) for row in rows]) for name in names),
    )


def split(arrays: Arrays) -> tuple[dict, dict]:
    """(trained, frozen): the history's arrays as float32 masters, and the decoder's."""
    trained = {n: jnp.array(a, jnp.float32) for n, a in arrays.items() if is_trained(n)}
    return trained, {n: a for n, a in arrays.items() if not is_trained(n)}


def is_trained(name: str) -> bool:
    """Whether the tensor belongs to the history blocks or the original form's encoder."""
    return name.startswith(("history.", "encoder."))


def assemble(config: CombConfig, trained: Arrays, frozen: Arrays) -> CombLlama:
    """The model, the trained arrays in the frozen ones' dtype where they are not declared to have
    another."""
    dtype = frozen["decoder.norm.weight"].dtype
    declared = declarations(config)
    cast = {name: x.astype(declared[name].dtype or dtype) for name, x in trained.items()}
    return build(config, {**frozen, **cast})


def predict(config: CombConfig, trained: Arrays, frozen: Arrays, batch: Batch, remat: bool = False):
    """(NLL of each answer token, whether it is the likeliest) [B, A], and for each kept layer the
    log of the share of attention that each answer token's query gave to what it sought,
    [B, A, H]. remat: make a layer's activations again in the backward pass."""
    model = assemble(config, trained, frozen)
    rows, tokens = batch.ids.shape
    end = jnp.broadcast_to(jnp.arange(1, tokens + 1), (rows, tokens))
    recent = Packed(batch.start, end)
    seen = [x * config.chunk_size for x in (batch.first, batch.last)]
    sought = (batch.sought, batch.sought_first, batch.sought_last)
    found: list[jax.Array] = []

    def again(run):
        """`jax.checkpoint`, which lets arrays out of a layer as its results only."""

        def layer(x):
            before = len(found)
            x = run(x)
            inside = found[before:]
            del found[before:]
            return x, inside

        def outer(x):
            x, inside = jax.checkpoint(layer)(x)
            found.extend(inside)
            return x

        return outer

    def words(ids):
        return model.decoder.words(model.decoder.embed(ids))

    nearby = recent.nearby(config.summary_tokens)
    entries: list[Any] = [recent] * config.text.num_hidden_layers
    for i, taps in zip(config.cross_layers, batch.taps, strict=True):
        own = (config, model.blocks[i], words, taps, batch.chunk_ids)
        entries[i] = Comb(recent, Taps(*own, *seen, *sought, found), nearby=nearby)
    width = config.sink_tokens
    if width:
        ids = batch.sinks.reshape(-1, width)
        position = jnp.broadcast_to(jnp.arange(width), ids.shape)
        pairs = encode_sinks(model.decoder, config.cross_layers, ids, position)
        start = batch.history * width
        for i, pair in pairs.items():
            key, value = (x.reshape(rows, -1, *x.shape[2:]).swapaxes(1, 2) for x in pair)
            entries[i] = Comb(recent, sinks=Chunks(key, value, start, start + width))
    cache = Cache(tuple(entries), batch.position[:, 0])
    lengths = jnp.full(rows, tokens, jnp.int32)
    x, _ = model.decoder(
        batch.ids, batch.position, cache, lengths, model.blocks, remat=again if remat else None
    )
    # The head is run for answer tokens only.
    logits = model.decoder.logits(jnp.take_along_axis(x, batch.column[..., None], axis=1))
    chosen = jnp.take_along_axis(logits, batch.target[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - chosen
    found = [jnp.take_along_axis(x, batch.column[..., None], axis=1) for x in found]
    return nll, jnp.argmax(logits, axis=-1) == batch.target, found


def missed(config: CombConfig, batch: Batch, found: list[jax.Array]) -> jax.Array:
    """-log of the share of attention that was given to what was sought; the sum over answer tokens,
    and the mean over the kept layers of the upper half, where a question's tokens know what they
    ask for. With summaries every head is to find it, as in `lookup.Lookup`; without them it is
    enough that one does."""
    seeking = is_seeking(batch)
    total = jnp.float32(0)
    for layer, x in zip(config.cross_layers, found, strict=True):
        if layer not in config.upper_layers:
            continue
        x = jnp.where(seeking[..., None], x, 0.0)
        if layer in config.summary_layers:
            share = jnp.mean(jnp.maximum(x, LEAST), axis=-1)
        else:  # of at least one head, if they look independently
            nobody = jnp.sum(jnp.log1p(-jnp.minimum(jnp.exp(x), 1 - 1e-6)), axis=-1)
            share = jnp.log(1 - jnp.exp(nobody) + 1e-6)
        total -= jnp.sum(jnp.where(seeking, share, 0.0))
    return total / max(len(config.upper_layers), 1)


def is_seeking(batch: Batch) -> jax.Array:
    """Whether an answer token has a place in the history to look for, [..., B, A]."""
    seeking = jnp.take_along_axis(batch.sought_last, batch.column, axis=-1) > 0
    return seeking & (batch.question >= 0)


@dataclasses.dataclass(frozen=True)
class Recall:
    """Weighted NLL of answers and text, the mean over rows, and `attention_weight` times what
    attention missed, the mean over answer tokens. Of a text whose own pages are not in the history
    it is the NLL's distance to that without a history: other pages are neither to help nor to
    disturb."""

    config: CombConfig
    attention_weight: float
    remat: bool = False

    def totals(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Rows, and answer tokens that seek."""
        rows = jnp.float32(batch.ids.shape[0] * batch.ids.shape[1])
        return rows, jnp.maximum(jnp.sum(is_seeking(batch)), 1)

    def loss(self, trained: Arrays, frozen: Arrays, micro: Batch, totals) -> tuple:
        """As `Objective.loss`, with `Rows`."""
        rows, seeking = totals
        nll, right, found = predict(self.config, trained, frozen, micro, self.remat)
        away = missed(self.config, micro, found) / seeking
        lost = jnp.where(micro.alone < 0, nll, jnp.abs(nll - micro.alone))
        value = jnp.sum(lost * micro.weight) / rows + self.attention_weight * away
        return value, Rows(nll, right, away)


@functools.cache  # one object for the same numbers, so that a step is compiled once for them
def optimiser(
    stages: tuple[Rates, ...], clip: float, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """Adam for projections and gates, each with its own rate, stage after stage: warm-up,
    constant, and a cosine down to nothing. clip: of the gradient's norm. weight_decay: of
    matrices alone (Loshchilov & Hutter 2019)."""

    def one(peak: float, stage: Rates):
        falling = max(1, round(stage.decay * stage.steps))
        parts = [
            optax.linear_schedule(0.0, peak, stage.warmup),
            optax.constant_schedule(peak),
            optax.cosine_decay_schedule(peak, falling),
        ]
        joined = optax.join_schedules(
            parts, [stage.warmup, max(stage.warmup, stage.steps - falling)]
        )
        return lambda count: joined(count + 1)  # the first step is to move too

    def schedule(name: str):
        ends = np.cumsum([stage.steps for stage in stages])[:-1].tolist()
        return optax.join_schedules([one(getattr(s, name), s) for s in stages], ends)

    projections = optax.adamw(
        schedule("rate"),
        b2=0.99,
        weight_decay=weight_decay,
        mask=lambda trained: jax.tree.map(lambda x: x.ndim > 1, trained),
    )
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.partition(
            {"projection": projections, "gate": optax.adam(schedule("gate_rate"), b2=0.99)},
            lambda trained: {name: "gate" if is_gate(name) else "projection" for name in trained},
        ),
    )


def is_gate(name: str) -> bool:
    """Whether a trained tensor is a gate (a bias, a scale, a summary's or a tanh gate), no
    projection or norm."""
    return not name.endswith(".weight")


def gradients(
    trained: Arrays, frozen: Arrays, batch: Any, objective: Objective
) -> tuple[jax.Array, dict[str, jax.Array], Any]:
    """(loss, gradient, aux with an axis of micro-batches in front) of a whole batch, one
    micro-batch after the other, added up in float32."""
    totals = objective.totals(batch)
    gradient = jax.value_and_grad(objective.loss, has_aux=True)

    def add(so_far, micro):
        (value, aux), grads = gradient(trained, frozen, micro, totals)
        return jax.tree.map(jnp.add, so_far, (value, grads)), aux

    zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, trained))
    (value, grads), aux = jax.lax.scan(add, zero, batch)
    return value, grads, aux


@functools.partial(jax.jit, static_argnames=("objective", "optimise"), donate_argnames="state")
def train_step(
    state: State,
    frozen: Arrays,
    batch: Any,
    objective: Objective,
    optimise: optax.GradientTransformation,
) -> tuple[State, Measured]:
    """One step; a step whose loss or gradient is not finite leaves everything but `skipped`."""
    value, grads, aux = gradients(state.trained, frozen, batch, objective)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(value) & jnp.isfinite(norm)
    updates, moved = optimise.update(grads, state.optimiser, state.trained)
    keep = functools.partial(jnp.where, finite)
    new = State(
        jax.tree.map(keep, optax.apply_updates(state.trained, updates), state.trained),
        jax.tree.map(keep, moved, state.optimiser),
        jnp.where(finite, 0, state.skipped + 1),
    )
    return new, Measured(value, norm, finite, aux)


def accumulated(micro_batches: Sequence[Any]) -> Any:
    """One batch for `train_step` of micro-batches of one shape."""
    if len(micro_batches) == 1:  # a view: a batch may be large
        return jax.tree.map(lambda x: x[None], micro_batches[0])
    return jax.tree.map(lambda *x: np.stack(x), *micro_batches)


evaluate = jax.jit(predict, static_argnames="config")
