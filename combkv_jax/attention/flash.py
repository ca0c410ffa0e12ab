"""Attention of any number of queries over 16-bit keys and values, on NVIDIA Hopper GPUs.

A block of the grid takes a tile of rows and a stretch of the keys they see: one warp group fetches
keys and values into a ring in shared memory, the others multiply, with an online softmax (Dao et
al. 2022; Shah et al. 2024).
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from combkv_jax.attention import hopper
from combkv_jax.attention.hopper import ALIGNED, CORES, KEYS, ROWS
from combkv_jax.attention.source import Source, check_16_bit, check_arrays

MOST_STAGES = 4  # steps in flight
FEWEST_STEPS = 4  # a shorter stretch of keys is not worth a part of its own


def check(query: jax.Array, key: Source, value: Source) -> None:
    """Raises NotImplementedError, with the reason, for what this kernel does not take."""
    check_arrays(key, value)
    check_16_bit(query, key, value)
    if query.shape[3] not in (64, 128):
        raise NotImplementedError(f"head_dim is {query.shape[3]}, and it takes 64 or 128")
    keys = key.shape[2]
    if keys < KEYS or keys % ALIGNED:
        raise NotImplementedError(
            f"there are {keys} keys, and it takes multiples of {ALIGNED}, from {KEYS} on"
        )


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    start: jax.Array,
    end: jax.Array,
    *,
    splits: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `attention.attention`; start and end are [B, T].

    splits: parts that the keys of a row are divided into; by default as many as fill the GPU.
    Raises NotImplementedError as `check` does. It has no gradient of its own: see choice.py.
    """
    check(query, key, value)
    batch, length, heads, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    groups = 1 if length * heads // kv_heads <= ROWS else 2
    asked = hopper.ask(query, kv_heads, keys, start, end, ROWS * groups, ALIGNED)
    if splits is None:
        blocks = batch * kv_heads * asked.tiles
        splits = min(CORES // blocks, keys // (FEWEST_STEPS * KEYS))
    out, lse = _kernel(asked, key, value, groups, max(splits, 1))
    return hopper.answer(out, lse, asked, heads, value.dtype)


def stages(dim: int, groups: int, out_bytes: int) -> int:
    """Steps whose keys and values fit into shared memory at once."""
    row = dim * 2 + KEYS * 2 + dim * out_bytes + 4  # a query, its weights, what it gets, its lse
    return min(MOST_STAGES, (hopper.SHARED - groups * ROWS * row) // (2 * KEYS * dim * 2))


def _kernel(asked: hopper.Asked, key, value, groups: int, splits: int):
    """The parts of `asked` over key and value [B, K, S, D], with so many warp groups in a block."""
    batch, kv_heads, padded, dim = asked.query.shape
    keys = key.shape[2]
    dtype = key.dtype
    parts = asked.parts(splits, dtype)
    ring = stages(dim, groups, parts[0].dtype.itemsize)

    def body(q_ref, k_ref, v_ref, start_ref, end_ref, low_ref, high_ref, out_ref, lse_ref,
             q_smem, p_smem, out_smem, lse_smem, k_smem, v_smem,
             q_full, k_full, v_full, k_free, v_free):  # fmt: skip
        tile, head = lax.axis_index("tile"), lax.axis_index("head")
        row, part = lax.axis_index("batch"), lax.axis_index("split")
        worker = lax.axis_index("worker")
        low, steps = hopper.stretch(low_ref[row, tile], high_ref[row, tile], part, splits, KEYS)

        def first_key(step):  # the last keys of all overlap the step before instead of ending
            return pl.multiple_of(jnp.minimum(low + step * KEYS, keys - KEYS), ALIGNED)

        @pl.when(worker == groups)
        def _fetch():
            if groups > 1:
                plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, steps)
            def _step(step):
                slot = lax.rem(step, ring)
                here = (row, head, pl.ds(first_key(step), KEYS))
                for ref, smem, full, free in (
                    (k_ref, k_smem, k_full, k_free),
                    (v_ref, v_smem, v_full, v_free),
                ):
                    pl.when(step >= ring)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                    plgpu.copy_gmem_to_smem(ref.at[here], smem.at[slot], full.at[slot])

            hopper.drain(steps, ring, k_free, v_free)

        @pl.when(worker < groups)
        def _multiply():
            if groups > 1:
                plgpu.set_max_registers(232, action="increase")
            mine = (tile * groups + worker) * ROWS
            own = pl.ds(mine, ROWS)
            q_own, p_own = q_smem.at[worker], p_smem.at[worker]
            plgpu.copy_gmem_to_smem(q_ref.at[row, head, own], q_own, q_full.at[worker])
            first, last = (hopper.row_load(x.at[row, own]) for x in (start_ref, end_ref))
            plgpu.barrier_wait(q_full.at[worker])

            def step_on(step, state):
                slot = lax.rem(step, ring)
                plgpu.barrier_wait(k_full.at[slot])
                logits = hopper.product((q_own, k_smem.at[slot].transpose((1, 0))))
                plgpu.barrier_arrive(k_free.at[slot])
                index = first_key(step) + hopper.columns()
                fresh = jnp.maximum(first, low + step * KEYS)
                seen = (index >= hopper.over(fresh, KEYS)) & (index < hopper.over(last, KEYS))

                def values():
                    plgpu.barrier_wait(v_full.at[slot])
                    return v_smem.at[slot]

                def done():
                    plgpu.barrier_arrive(v_free.at[slot])

                return hopper.see(state, logits, dim**-0.5, seen, p_own, values, done)

            state = lax.fori_loop(0, steps, step_on, hopper.nothing_yet(dim))
            out, lse = hopper.outcome(state)
            there = (part, row, head, pl.ds(mine, asked.written))
            hopper.write(out.astype(parts[0].dtype), out_smem.at[worker], out_ref.at[there])
            hopper.write(lse, lse_smem.at[worker], lse_ref.at[there])

    return plgpu.kernel(
        body,
        out_type=parts,
        scratch_types=(
            hopper.tiled(groups, ROWS, dim, dtype=dtype),
            hopper.tiled(groups, ROWS, KEYS, dtype=dtype),
            hopper.tiled(groups, ROWS, dim, dtype=parts[0].dtype),
            plgpu.SMEM((groups, ROWS), jnp.float32),
            hopper.tiled(ring, KEYS, dim, dtype=dtype),
            hopper.tiled(ring, KEYS, dim, dtype=dtype),
            plgpu.Barrier(num_barriers=groups),
            plgpu.Barrier(num_barriers=ring),
            plgpu.Barrier(num_barriers=ring),
            plgpu.Barrier(num_arrivals=groups, num_barriers=ring),
            plgpu.Barrier(num_arrivals=groups, num_barriers=ring),
        ),
        grid=(asked.tiles, splits, kv_heads, batch),
        grid_names=("tile", "split", "head", "batch"),
        num_threads=groups + 1,
        thread_name="worker",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(asked.query, key, value, *asked[1:5])
