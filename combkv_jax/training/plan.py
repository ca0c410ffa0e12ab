"""Plans a training step for GPUs that are not there, as `planner` plans a decode step.

Nothing is run and no weight is read: XLA compiles the very step that a run takes, for rows of the
largest shape, and tells what each device needs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax import console, planner
from combkv_jax.config import CombConfig
from combkv_jax.errors import RequestError
from combkv_jax.model import declarations
from combkv_jax.training import step
from combkv_jax.training.placing import Placing, new_state
from combkv_jax.training.rows import BUCKETS, Bucket, RowBuilder
from combkv_jax.training.taps import DTYPE


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """What a training step takes on each GPU, in bytes.

    rows, accumulate: of a micro-batch, and micro-batches a step. history, tokens: of a row, of
        history and of questions.
    frozen, trained, moments: the decoder, the float32 masters of the history blocks, and Adam's
        moments. batch: the rows, most of it taps.
    arguments: what the step reads of all these. temporaries, output, alias: scratch memory;
        results; how much of those stays where the donated state was.
    peak: all of it. memory: the device's own; fits: whether `peak` is within 95 % of it.
    """

    gpu: str
    mesh: str
    dtype: str
    rows: int
    accumulate: int
    history: int
    tokens: int
    frozen: int
    trained: int
    moments: int
    batch: int
    arguments: int
    temporaries: int
    output: int
    alias: int
    peak: int
    memory: int
    fits: bool
    notes: tuple[str, ...]


def plan_training(
    config: CombConfig,
    gpu: str,
    *,
    mesh: tuple[int, int] = (1, 1),
    rows: int = 1,
    accumulate: int = 1,
    remat: bool = False,
    dtype: Any = jnp.bfloat16,
    bucket: Bucket = BUCKETS[-1],
) -> TrainingPlan:
    """Compiles one step on recall: `accumulate` micro-batches of `rows` rows of that shape.

    mesh: data x tensor. remat: as `step.Recall`. dtype: of the frozen decoder. Raises RequestError
    as `planner.gpu_mesh` and `sharding.place` do, for rows that the data axis does not divide, and
    for a model whose chunks the decoder itself does not encode.
    """
    if config.is_original or not config.cross_layers:
        raise RequestError(
            "a training plan is for a history of this project's own form (encoder 'decoder')."
        )
    placing = Placing.of(config, planner.gpu_mesh(gpu, mesh))
    placing.placement.check_rows(rows, f"{rows} rows (--rows)")
    # The rates are numbers in the program; they do not change its memory.
    optimise = placing.optimiser(step.optimiser((step.Rates(1e-3, 1e-2, 1000, 20, 0.4),), 1.0))
    declared = declarations(config)
    places = placing.placement.parameters(declared)
    frozen, masters = {}, {}
    for name, d in declared.items():
        if step.is_trained(name):
            masters[name] = jax.ShapeDtypeStruct(d.shape, np.float32)
        else:
            kind = np.dtype(d.dtype or dtype)
            frozen[name] = jax.ShapeDtypeStruct(d.shape, kind, sharding=places[name])
    state = jax.eval_shape(functools.partial(new_state, optimise), masters)
    state = planner.placed(state, placing.state(state))
    batch = _batch(config, bucket, rows, accumulate)
    batch = planner.placed(batch, placing.batch(batch))
    objective = step.Recall(config, 0.1, remat)
    with planner.no_compile_cache():
        lowered = step.train_step.lower(state, frozen, batch, objective, optimise)
        # The machine code is not looked at: without its optimisation the answer comes sooner.
        compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": "0"})
        used = compiled.memory_analysis()
    chosen = planner.find_gpu(gpu)
    new = used.temp_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes
    held = [planner.nbytes(x) for x in (frozen, state.trained, state.optimiser, batch)]
    peak = sum(held) + new
    return TrainingPlan(
        chosen.device,
        f"{mesh[0]}x{mesh[1]}",
        np.dtype(dtype).name,
        rows,
        accumulate,
        bucket.chunks * config.chunk_size,
        bucket.tokens,
        *held,
        arguments=used.argument_size_in_bytes,
        temporaries=used.temp_size_in_bytes,
        output=used.output_size_in_bytes,
        alias=used.alias_size_in_bytes,
        peak=peak,
        memory=chosen.memory,
        fits=peak <= console.GPU_MEMORY_FRACTION * chosen.memory,
        notes=placing.placement.notes,
    )


def _batch(config: CombConfig, bucket: Bucket, rows: int, accumulate: int) -> step.Batch:
    """A batch as the run makes it, of shapes."""
    row = RowBuilder(bucket, config.chunk_size, config.sink_tokens).finish(0.0)
    ids = np.zeros((1, config.chunk_size), np.int32)
    stacked = step.stack([row] * rows, ids, [])  # no taps: they are gigabytes
    blocks = -(-bucket.chunks // step.BLOCK)
    shape = (blocks, rows, step.BLOCK * config.chunk_size, config.text.hidden_size)
    batch = stacked._replace(taps=(jax.ShapeDtypeStruct(shape, DTYPE),) * len(config.cross_layers))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((accumulate, *x.shape), x.dtype), batch)


def table(plan: TrainingPlan) -> list[tuple[str, str]]:
    """A plan for people, a row each."""
    rows = [
        ("GPU", plan.gpu),
        ("mesh", plan.mesh),
        ("rows of a step", f"{plan.rows} x {plan.accumulate}"),
        ("history of a row", f"{plan.history} tokens"),
        ("questions of a row", f"{plan.tokens} tokens"),
    ]
    rows += [
        (label, console.size(getattr(plan, name)))
        for label, name in (
            (f"frozen weights ({plan.dtype})", "frozen"),
            ("trained weights (float32)", "trained"),
            ("Adam's moments", "moments"),
            ("rows with their taps", "batch"),
            ("arguments", "arguments"),
            ("temporaries of a step", "temporaries"),
            ("peak", "peak"),
            ("device memory", "memory"),
        )
    ]
    rows.append(("fits", "yes" if plan.fits else "no"))
    return rows + [("note", line) for line in plan.notes]
