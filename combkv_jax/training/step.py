"""The loss of a batch of rows, and one step of the optimiser."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from combkv_jax.cache import Cache, Chunks, Comb, Packed
from combkv_jax.config import CombConfig
from combkv_jax.encoder import encode_sinks
from combkv_jax.model import CombLlama, build, declarations
from combkv_jax.training.rows import Row
from combkv_jax.training.taps import Taps

BLOCK = 4  # chunks whose K/V are made at once

Arrays = Mapping[str, jax.Array]


class Batch(NamedTuple):
    """Rows stacked, [B, ...] as in `rows.Row`; taps: for each kept layer float16
    [blocks, B, BLOCK * chunk_size, D]."""

    taps: tuple[Any, ...]
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
    """Of one step. nll, right: [B, A], of each answer token. missed: how far attention was from
    the answers' places (`missed`)."""

    loss: jax.Array
    gradient_norm: jax.Array
    finite: jax.Array
    missed: jax.Array
    nll: jax.Array
    right: jax.Array


def stack(rows: list[Row], taps: list[np.ndarray], chunk_size: int) -> Batch:
    """A batch of rows of one bucket. taps: the pool's, [chunks, chunk_size, D] a kept layer."""
    index = np.stack([row.chunks for row in rows])
    blocks = -(-index.shape[1] // BLOCK)
    index = np.pad(index, ((0, 0), (0, blocks * BLOCK - index.shape[1])))
    index = index.reshape(len(rows), blocks, BLOCK).swapaxes(0, 1)
    shape = (blocks, len(rows), BLOCK * chunk_size, -1)
    names = Batch._fields[1:]
    return Batch(
        tuple(x[index].reshape(shape) for x in taps),
        *(np.stack([getattr(row, name) for row in rows]) for name in names),
    )


def split(arrays: Arrays) -> tuple[dict, dict]:
    """(trained, frozen): the history's arrays as float32 masters, and the decoder's."""
    trained = {n: jnp.array(a, jnp.float32) for n, a in arrays.items() if is_trained(n)}
    return trained, {n: a for n, a in arrays.items() if not is_trained(n)}


def is_trained(name: str) -> bool:
    """Whether the tensor belongs to the history blocks."""
    return name.startswith("history.")


def assemble(config: CombConfig, trained: Arrays, frozen: Arrays) -> CombLlama:
    """The model, the trained arrays in the frozen ones' dtype where they are not declared to have
    another."""
    dtype = frozen["decoder.norm.weight"].dtype
    declared = declarations(config)
    cast = {name: x.astype(declared[name].dtype or dtype) for name, x in trained.items()}
    return build(config, {**frozen, **cast})


def predict(config: CombConfig, trained: Arrays, frozen: Arrays, batch: Batch):
    """(NLL of each answer token, whether it is the likeliest) [B, A], and for each kept layer the
    log of the share of attention that each answer token's query gave to what it sought,
    [B, A, H]."""
    model = assemble(config, trained, frozen)
    rows, tokens = batch.ids.shape
    end = jnp.broadcast_to(jnp.arange(1, tokens + 1), (rows, tokens))
    recent = Packed(batch.start, end)
    seen = [x * config.chunk_size for x in (batch.first, batch.last)]
    sought = (batch.sought, batch.sought_first, batch.sought_last)
    found: list[jax.Array] = []
    entries: list[Any] = [recent] * config.text.num_hidden_layers
    for i, taps in zip(config.cross_layers, batch.taps, strict=True):
        entries[i] = Comb(recent, chunks=Taps(config, model.blocks[i], taps, *seen, *sought, found))
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
    x, _ = model.decoder(batch.ids, batch.position, cache, lengths, model.blocks)
    # The head is run for answer tokens only.
    logits = model.decoder.logits(jnp.take_along_axis(x, batch.column[..., None], axis=1))
    chosen = jnp.take_along_axis(logits, batch.target[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - chosen
    found = [jnp.take_along_axis(x, batch.column[..., None], axis=1) for x in found]
    return nll, jnp.argmax(logits, axis=-1) == batch.target, found


def missed(config: CombConfig, batch: Batch, found: list[jax.Array]) -> jax.Array:
    """-log of the share of attention that at least one head gave to what was sought, if heads
    looked independently; the mean over answer tokens and the kept layers of the upper half, where
    a question's tokens know what they ask for."""
    seeking = jnp.take_along_axis(batch.sought_last, batch.column, axis=1) > 0
    seeking &= batch.question >= 0
    upper = [
        x
        for i, x in zip(config.cross_layers, found, strict=True)
        if 2 * i >= config.text.num_hidden_layers
    ]
    total = jnp.float32(0)
    for x in upper:
        share = jnp.exp(jnp.where(seeking[..., None], x, 0.0))
        nobody = jnp.exp(jnp.sum(jnp.log1p(-jnp.minimum(share, 1 - 1e-6)), axis=-1))
        total -= jnp.sum(jnp.where(seeking, jnp.log(1 - nobody + 1e-6), 0.0))
    return total / (max(len(upper), 1) * jnp.maximum(jnp.sum(seeking), 1))


def loss(
    trained: Arrays, frozen: Arrays, batch: Batch, config: CombConfig, attention_weight: float
):
    """Weighted NLL, the mean over rows, and `attention_weight` times what attention missed; and
    (NLL, right, missed)."""
    nll, right, found = predict(config, trained, frozen, batch)
    away = missed(config, batch, found)
    value = jnp.sum(nll * batch.weight) / nll.shape[0] + attention_weight * away
    return value, (nll, right, away)


@functools.cache  # one object for the same numbers, so that a step is compiled once for them
def optimiser(rate: float, gate_rate: float, steps: int, warmup: int, decay: float, clip: float):
    """Adam for projections and gates, each with its own rate: warm-up, constant, and over the
    last `decay` share of the steps a cosine down to nothing. clip: of the gradient's norm."""

    def schedule(peak: float):
        falling = max(1, round(decay * steps))
        parts = [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.cosine_decay_schedule(peak, falling),
        ]
        return optax.join_schedules(parts, [warmup, max(warmup, steps - falling)])

    # Count from 1: the first step is to move too.
    shifted = lambda peak: lambda count: schedule(peak)(count + 1)  # noqa: E731
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.partition(
            {
                "projection": optax.adam(shifted(rate), b2=0.99),
                "gate": optax.adam(shifted(gate_rate), b2=0.99),
            },
            lambda trained: {
                name: "projection" if name.endswith(".weight") else "gate" for name in trained
            },
        ),
    )


@functools.partial(jax.jit, static_argnames=("config", "optimise"), donate_argnames="state")
def train_step(
    state: State,
    frozen: Arrays,
    batch: Batch,
    config: CombConfig,
    optimise: optax.GradientTransformation,
    attention_weight: float,
) -> tuple[State, Measured]:
    """One step; a step whose loss or gradient is not finite leaves everything but `skipped`."""
    gradient = jax.value_and_grad(loss, has_aux=True)
    (value, (nll, right, away)), grads = gradient(
        state.trained, frozen, batch, config, attention_weight
    )
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(value) & jnp.isfinite(norm)
    updates, moved = optimise.update(grads, state.optimiser, state.trained)
    keep = functools.partial(jnp.where, finite)
    new = State(
        jax.tree.map(keep, optax.apply_updates(state.trained, updates), state.trained),
        jax.tree.map(keep, moved, state.optimiser),
        jnp.where(finite, 0, state.skipped + 1),
    )
    return new, Measured(value, norm, finite, away, nll, right)


evaluate = jax.jit(predict, static_argnames="config")
