"""What the kernels for NVIDIA Hopper GPUs share (Pallas, Mosaic GPU back end): queries as rows, the
softmax of a step, and how parts are merged.

The query heads that share a KV head are rows of one matrix (`fold`), so a key is read once for all
of them. A warp group multiplies 64 rows on the tensor cores; few rows over many keys, as in a
decode step, do not fill the GPU, so the keys are split (Dao et al. 2023, Flash-Decoding), and the
parts merged exactly by their log-sum-exp.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from combkv_jax.attention.xla import fold, unfold

ROWS = 64  # of one warp group: what a wgmma instruction multiplies at once
KEYS = 64  # a step of the softmax
ALIGNED = 8  # a copy into swizzled shared memory begins with a whole tile of rows
CORES = 132  # multiprocessors of an H100 or H200; another count only splits less evenly
SHARED = 223 * 1024  # bytes of shared memory for a block: 227 KiB (CUDA, capability 9.0), less what
# barriers and reductions take
NOTHING = -1e30  # the maximum of no logits: finite, so that no difference of two is NaN


class Asked(NamedTuple):
    """Queries as the kernels take them: the rows of a KV head in tiles, the last one filled up.

    query: [B, K, tiles * rows of a tile, D]. start, end: what each row sees, int32 [B, rows],
    (0, 0) for one that sees nothing. lowest, highest: what a tile sees, [B, tiles].
    rows: how many are real.
    """

    query: jax.Array
    start: jax.Array
    end: jax.Array
    lowest: jax.Array
    highest: jax.Array
    rows: int

    @property
    def tiles(self) -> int:
        return self.lowest.shape[1]

    @property
    def written(self) -> int:
        """Rows that a warp group writes: all, or where one is enough for all, those in use."""
        return ROWS if self.query.shape[2] > ROWS else -(-self.rows // 8) * 8

    def parts(self, splits: int, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """out and lse of a kernel, [splits, B, K, R, D] and [splits, B, K, R]; float32 if there is
        something to merge."""
        batch, kv_heads, rows, dim = self.query.shape
        shape = (splits, batch, kv_heads, rows // ROWS * self.written)
        out = jax.ShapeDtypeStruct((*shape, dim), jnp.float32 if splits > 1 else dtype)
        return out, jax.ShapeDtypeStruct(shape, jnp.float32)


def ask(query, kv_heads: int, keys: int, start, end, tile: int, aligned: int) -> Asked:
    """`Asked` for query [B, T, H, D], start and end [B, T], in tiles of so many rows that begin
    with a key whose number is a multiple of `aligned`."""
    query_rows = fold(query, kv_heads)  # [B, K, R, D]
    rows = query_rows.shape[2]
    pad = -rows % tile
    query_rows = jnp.pad(query_rows, ((0, 0), (0, 0), (0, pad), (0, 0)))
    start, end = jnp.maximum(start, 0), jnp.minimum(end, keys)
    some = start < end
    group = query.shape[2] // kv_heads
    bounds = [jnp.repeat(jnp.where(some, x, 0), group, axis=1) for x in (start, end)]
    bounds = [jnp.pad(x, ((0, 0), (0, pad))).astype(jnp.int32) for x in bounds]
    first, last = (x.reshape(x.shape[0], -1, tile) for x in bounds)
    lowest = jnp.min(jnp.where(first < last, first, keys), axis=2) // aligned * aligned
    return Asked(query_rows, *bounds, lowest, jnp.max(last, axis=2), rows)


def answer(out, lse, asked: Asked, heads: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """out [B, T, H, D] and lse [B, T, H] of a kernel's parts."""
    out, lse = _merged(out, lse) if out.shape[0] > 1 else (out[0], lse[0])
    out, lse = out[:, :, : asked.rows].astype(dtype), lse[:, :, : asked.rows, None]
    return unfold(out, heads), unfold(lse, heads)[..., 0]


def _merged(out, lse):
    """Parts [N, B, K, R, D] and their log-sum-exp [N, B, K, R], as one; exact, in float32."""
    top = jnp.max(lse, axis=0)
    weights = jnp.exp(lse - jnp.where(jnp.isneginf(top), 0.0, top))
    total = jnp.sum(weights, axis=0)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    out = jnp.einsum("nbkr,nbkrd->bkrd", weights, out) / total[..., None]
    return out, jnp.where(seen, top + jnp.log(total), -jnp.inf)


def tiled(*shape: int, dtype: Any) -> Any:
    """Shared memory in the order that wgmma reads: tiles of 8 rows of 128 bytes, swizzled."""
    wide = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(plgpu.TilingTransform((8, wide)), plgpu.SwizzleTransform(128)),
    )


def over(x: jax.Array, columns: int) -> jax.Array:
    """A number a row, [ROWS], in so many columns."""
    return lax.broadcast_in_dim(x, (ROWS, columns), (0,))


def columns() -> jax.Array:
    """0, 1, ... along a step's keys, int32 [ROWS, KEYS]."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=plgpu.Layout.WGMMA)


def row_load(ref: Any) -> jax.Array:
    """A number a row from a reference to [ROWS]."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def product(*pairs: tuple[Any, Any]) -> jax.Array:
    """The sum of a @ b over pairs of references to shared memory, float32 in registers."""

    def multiply(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    shape = (pairs[0][0].shape[0], pairs[0][1].shape[1])
    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def nothing_yet(dim: int) -> tuple[jax.Array, ...]:
    """The softmax state of no keys: sum, maximum (in powers of 2), weighted values."""

    def full(shape, fill, layout):
        return plgpu.layout_cast(jnp.full(shape, fill, jnp.float32), layout)

    row_layout = plgpu.Layout.WGMMA.reduce(1)
    return (
        full((ROWS,), 0.0, row_layout),
        full((ROWS,), NOTHING, row_layout),
        full((ROWS, dim), 0.0, plgpu.Layout.WGMMA),
    )


def see(state, logits, scale, seen, p_smem, value, done=lambda: None) -> tuple[jax.Array, ...]:
    """The softmax state after a step's keys, of which each row has `seen` some.

    logits: float32 [ROWS, KEYS], to be multiplied by `scale`. p_smem: room for their weights.
    value: called when the values are needed, a reference to [KEYS, D]; done: called when they are
    not any more.
    """
    total, top, weighted = state
    logits = jnp.where(seen, logits * (scale * math.log2(math.e)), -jnp.inf)
    new_top = jnp.maximum(top, logits.max(axis=1))
    weights = jnp.exp2(logits - over(new_top, KEYS))
    old = jnp.exp2(top - new_top)
    p_smem[...] = weights.astype(p_smem.dtype)
    plgpu.commit_smem()
    total = total * old + weights.sum(axis=1)
    new = product((p_smem, value()))
    done()
    return total, new_top, weighted * over(old, weighted.shape[1]) + new


def outcome(state) -> tuple[jax.Array, jax.Array]:
    """What a softmax state comes to: out, and the natural log-sum-exp."""
    total, top, weighted = state
    some = total > 0
    total = jnp.where(some, total, 1.0)
    lse = jnp.where(some, top * math.log(2) + jnp.log(total), -jnp.inf)
    return weighted / over(total, weighted.shape[1]), lse


def write(x: jax.Array, smem: Any, ref: Any) -> None:
    """The first rows of x to `ref`, as many as it has, by way of `smem`."""
    smem[...] = x
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.at[pl.ds(0, ref.shape[0])], ref)
    plgpu.wait_smem_to_gmem(0)


def stretch(low, high, part, splits: int, step: int):
    """(first key, steps) of a part of the keys low <= s < high: whole steps, so that no two parts
    see the same key."""
    share = pl.cdiv(pl.cdiv(jnp.maximum(high - low, 0), splits), step) * step
    low = low + part * share
    return low, pl.cdiv(jnp.maximum(jnp.minimum(low + share, high) - low, 0), step)


def drain(steps, ring: int, *free: Any) -> None:
    """Waits until what was fetched in the last steps is used up: no barrier is left unread."""

    @pl.loop(jnp.maximum(steps - ring, 0), steps)
    def _step(step):
        for barrier in free:
            plgpu.barrier_wait(barrier.at[lax.rem(step, ring)])
