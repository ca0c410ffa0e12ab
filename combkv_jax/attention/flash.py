"""Attention on NVIDIA Hopper GPUs, in one Pallas kernel (Mosaic GPU back end) for all lengths.

The query heads that share a KV head are rows of one matrix (`fold`), so a key is read once for
all of them. A block of the grid takes a tile of rows and a stretch of the keys they see: one warp
group fetches keys and values into a ring in shared memory, the others multiply on the tensor
cores, with an online softmax (Dao et al. 2022; Shah et al. 2024). Few rows over many keys, as in a
decode step, do not fill the GPU: the keys are split then (Dao et al. 2023, Flash-Decoding), and
the parts merged exactly by their log-sum-exp.
"""

from __future__ import annotations

import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from combkv_jax.attention.source import Source, check_16_bit
from combkv_jax.attention.xla import fold, unfold

ROWS = 64  # of one warp group: what a wgmma instruction multiplies at once
KEYS = 64  # a step of the loop
ALIGNED = 8  # a copy into swizzled shared memory begins with a whole tile of rows
CORES = 132  # multiprocessors of an H100 or H200; another count only splits less evenly
SHARED = 227 * 1024  # bytes of shared memory a block of the grid may use (CUDA, capability 9.0)
MOST_STAGES = 4  # steps in flight
FEWEST_STEPS = 4  # a shorter stretch of keys is not worth a part of its own
NOTHING = -1e30  # the maximum of no logits: finite, so that no difference of two is NaN


def check(query: jax.Array, key: Source, value: Source) -> None:
    """Raises NotImplementedError, with the reason, for what this kernel does not take."""
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
    Raises NotImplementedError as `check` does. Its gradient is that of `xla.attention`.
    """
    check(query, key, value)
    batch, length, heads, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    rows = length * heads // kv_heads
    groups = 1 if rows <= ROWS else 2
    tile = ROWS * groups
    tiles = -(-rows // tile)
    if splits is None:
        splits = min(CORES // (batch * kv_heads * tiles), keys // (FEWEST_STEPS * KEYS))
    splits = max(splits, 1)

    folded = fold(query, kv_heads)  # [B, K, R, D]
    folded = jnp.pad(folded, ((0, 0), (0, 0), (0, tiles * tile - rows), (0, 0)))
    bounds, ranges = _bounds(start, end, keys, heads // kv_heads, tiles, tile)
    out, lse = _kernel(folded, key, value, *bounds, *ranges, rows, groups, splits)
    if splits > 1:
        out, lse = _merged(out, lse)
    else:
        out, lse = out[0], lse[0]
    out, lse = out[:, :, :rows].astype(value.dtype), lse[:, :, :rows, None]
    return unfold(out, heads), unfold(lse, heads)[..., 0]


def _bounds(start, end, keys, group, tiles, tile):
    """(start, end) of each row of queries, int32 [B, tiles * tile], (0, 0) for one that sees
    nothing; and the first and last key that a tile sees, [B, tiles] each."""
    start, end = jnp.maximum(start, 0), jnp.minimum(end, keys)
    some = start < end
    rows = [jnp.repeat(jnp.where(some, x, 0), group, axis=1) for x in (start, end)]
    rows = [jnp.pad(x, ((0, 0), (0, tiles * tile - x.shape[1]))) for x in rows]
    first, last = (x.reshape(-1, tiles, tile) for x in rows)
    lowest = jnp.min(jnp.where(first < last, first, keys), axis=2) // ALIGNED * ALIGNED
    return rows, (lowest, jnp.max(last, axis=2))


def _merged(out, lse):
    """Parts [N, B, K, R, D] and their log-sum-exp [N, B, K, R], as one; exact, in float32."""
    top = jnp.max(lse, axis=0)
    weights = jnp.exp(lse - jnp.where(jnp.isneginf(top), 0.0, top))
    total = jnp.sum(weights, axis=0)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    out = jnp.einsum("nbkr,nbkrd->bkrd", weights, out) / total[..., None]
    return out, jnp.where(seen, top + jnp.log(total), -jnp.inf)


def stages(dim: int, groups: int, out_bytes: int) -> int:
    """Steps whose keys and values fit into shared memory at once."""
    row = dim * 2 + KEYS * 2 + dim * out_bytes + 4  # a query, its weights, what it gets, its lse
    return min(MOST_STAGES, (SHARED - 4096 - groups * ROWS * row) // (2 * KEYS * dim * 2))


def _tiled(*shape, dtype):
    """Shared memory in the order that wgmma reads: tiles of 8 rows of 128 bytes, swizzled."""
    wide = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(plgpu.TilingTransform((8, wide)), plgpu.SwizzleTransform(128)),
    )


def _kernel(query, key, value, start, end, lowest, highest, rows, groups, splits):
    """out [splits, B, K, R, D] (float32 if there is more than one part) and lse
    [splits, B, K, R], of query [B, K, R, D] and key, value [B, K, S, D]; start, end [B, R], and
    lowest, highest [B, tiles]. `rows` of the R are real."""
    batch, kv_heads, padded, dim = query.shape
    keys = key.shape[2]
    tile = groups * ROWS
    written = ROWS if padded > ROWS else -(-rows // 8) * 8  # rows of a warp group
    dtype = key.dtype
    out_dtype = jnp.float32 if splits > 1 else dtype
    ring = stages(dim, groups, jnp.dtype(out_dtype).itemsize)
    scale = dim**-0.5 * math.log2(math.e)
    row_layout = plgpu.Layout.WGMMA.reduce(1)

    def body(q_ref, k_ref, v_ref, start_ref, end_ref, low_ref, high_ref, out_ref, lse_ref,
             q_smem, p_smem, out_smem, lse_smem, k_smem, v_smem,
             q_full, k_full, v_full, k_free, v_free):  # fmt: skip
        tile_id, head = lax.axis_index("tile"), lax.axis_index("head")
        row, part = lax.axis_index("batch"), lax.axis_index("split")
        worker = lax.axis_index("worker")
        # This part's keys: whole steps, so that no two parts see the same key.
        low, high = low_ref[row, tile_id], high_ref[row, tile_id]
        share = pl.cdiv(pl.cdiv(jnp.maximum(high - low, 0), splits), KEYS) * KEYS
        low = low + part * share
        steps = pl.cdiv(jnp.maximum(jnp.minimum(low + share, high) - low, 0), KEYS)

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

                @pl.when(step >= ring)
                def _wait():
                    plgpu.barrier_wait(k_free.at[slot])

                plgpu.copy_gmem_to_smem(k_ref.at[here], k_smem.at[slot], k_full.at[slot])

                @pl.when(step >= ring)
                def _wait():
                    plgpu.barrier_wait(v_free.at[slot])

                plgpu.copy_gmem_to_smem(v_ref.at[here], v_smem.at[slot], v_full.at[slot])

        @pl.when(worker < groups)
        def _multiply():
            if groups > 1:
                plgpu.set_max_registers(232, action="increase")
            mine = tile_id * tile + worker * ROWS
            own = pl.ds(mine, ROWS)
            q_own, p_own = q_smem.at[worker], p_smem.at[worker]
            plgpu.copy_gmem_to_smem(q_ref.at[row, head, own], q_own, q_full.at[worker])
            first = plgpu.load(start_ref.at[row, own], layout=row_layout, optimized=False)
            last = plgpu.load(end_ref.at[row, own], layout=row_layout, optimized=False)
            plgpu.barrier_wait(q_full.at[worker])

            def over(x, n):  # a number a row, as n columns
                return lax.broadcast_in_dim(x, (ROWS, n), (0,))

            def step_on(step, state):
                total, top, weighted = state
                slot = lax.rem(step, ring)
                plgpu.barrier_wait(k_full.at[slot])

                def product(acc):
                    plgpu.wgmma(acc, q_own, k_smem.at[slot].transpose((1, 0)))
                    return acc[...]

                logits = pl.run_scoped(product, plgpu.ACC((ROWS, KEYS), jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                index = first_key(step) + plgpu.broadcasted_iota(
                    jnp.int32, (ROWS, KEYS), 1, layout=plgpu.Layout.WGMMA
                )
                fresh = jnp.maximum(first, low + step * KEYS)
                seen = (index >= over(fresh, KEYS)) & (index < over(last, KEYS))
                logits = jnp.where(seen, logits * scale, -jnp.inf)
                new_top = jnp.maximum(top, logits.max(axis=1))
                weights = jnp.exp2(logits - over(new_top, KEYS))
                old = jnp.exp2(top - new_top)
                p_own[...] = weights.astype(dtype)
                plgpu.commit_smem()
                total = total * old + weights.sum(axis=1)
                plgpu.barrier_wait(v_full.at[slot])

                def product(acc):
                    plgpu.wgmma(acc, p_own, v_smem.at[slot])
                    return acc[...]

                new = pl.run_scoped(product, plgpu.ACC((ROWS, dim), jnp.float32))
                plgpu.barrier_arrive(v_free.at[slot])
                return total, new_top, weighted * over(old, dim) + new

            def full(shape, fill, layout):
                return plgpu.layout_cast(jnp.full(shape, fill, jnp.float32), layout)

            total, top, weighted = lax.fori_loop(
                0,
                steps,
                step_on,
                (
                    full((ROWS,), 0.0, row_layout),
                    full((ROWS,), NOTHING, row_layout),
                    full((ROWS, dim), 0.0, plgpu.Layout.WGMMA),
                ),
            )
            some = total > 0
            total = jnp.where(some, total, 1.0)
            out_own, lse_own = out_smem.at[worker], lse_smem.at[worker]
            out_own[...] = (weighted / over(total, dim)).astype(out_dtype)
            lse_own[...] = jnp.where(some, top * math.log(2) + jnp.log(total), -jnp.inf)
            plgpu.commit_smem()
            there = (part, row, head, pl.ds(mine, written))
            plgpu.copy_smem_to_gmem(out_own.at[pl.ds(0, written)], out_ref.at[there])
            plgpu.copy_smem_to_gmem(lse_own.at[pl.ds(0, written)], lse_ref.at[there])
            plgpu.wait_smem_to_gmem(0)

    kept = written if padded == ROWS else padded
    shape = (splits, batch, kv_heads, kept)
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((*shape, dim), out_dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        scratch_types=(
            _tiled(groups, ROWS, dim, dtype=dtype),
            _tiled(groups, ROWS, KEYS, dtype=dtype),
            _tiled(groups, ROWS, dim, dtype=out_dtype),
            plgpu.SMEM((groups, ROWS), jnp.float32),
            _tiled(ring, KEYS, dim, dtype=dtype),
            _tiled(ring, KEYS, dim, dtype=dtype),
            plgpu.Barrier(num_barriers=groups),
            plgpu.Barrier(num_barriers=ring),
            plgpu.Barrier(num_barriers=ring),
            plgpu.Barrier(num_arrivals=groups, num_barriers=ring),
            plgpu.Barrier(num_arrivals=groups, num_barriers=ring),
        ),
        grid=(padded // tile, splits, kv_heads, batch),
        grid_names=("tile", "split", "head", "batch"),
        num_threads=groups + 1,
        thread_name="worker",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(query, key, value, start, end, lowest, highest)
