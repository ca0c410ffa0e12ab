"""Attention in plain XLA, with temporaries bounded however long the keys are.

While the logits are small they are computed at once. Beyond that, rows are taken a few at a time,
so that a softmax stays in the caches, and the keys of a long row block by block with an online
softmax (Milakov & Gimelshein 2018); blocks that no query sees are skipped. Keys are never padded,
transposed or copied: the last block overlaps the one before it instead.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

ROWS_BYTES = 12 * 2**20  # float32 logits of the rows taken at once, where there are several
LOGITS_BYTES = 48 * 2**20  # float32 logits held at once
SMALLEST_BLOCK = 128
FEW_QUERIES = 16  # up to here reading the keys is the work, and all rows share it


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, start: jax.Array, end: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `attention.attention`; start and end are [B, T]."""
    batch, length, heads, _ = query.shape
    at_once = ROWS_BYTES // (4 * heads * length * key.shape[2])
    if at_once >= batch or length < FEW_QUERIES:
        return _rows(query, key, value, start, end)

    def one(row):
        return jax.tree.map(lambda x: x[0], _rows(*(x[None] for x in row)))

    arrays = (query, key, value, start, end)
    return jax.lax.map(one, arrays, batch_size=max(1, at_once))


def _rows(query, key, value, start, end):
    batch, length, heads, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    group = heads // kv_heads
    # The G query heads of a KV head are rows of one matrix product.     [B, K, T * G, D]
    rows = query.reshape(batch, length, kv_heads, group, dim).swapaxes(1, 2)
    rows = rows.reshape(batch, kv_heads, length * group, dim)
    bounds = (start, end)
    block = LOGITS_BYTES // (4 * batch * heads * length)
    if block >= keys:
        state = _block(rows, key, value, bounds, 0, group)
    else:
        state = _walk(rows, key, value, bounds, max(block, SMALLEST_BLOCK), group)
    top, total, weighted = state
    seen = total > 0
    out = weighted / jnp.where(seen, total, 1.0)[..., None]
    lse = jnp.where(seen, top + jnp.log(jnp.where(seen, total, 1.0)), -jnp.inf)
    out = out.astype(value.dtype).reshape(batch, kv_heads, length, group, dim)
    lse = lse.reshape(batch, kv_heads, length, group)
    return (
        out.swapaxes(1, 2).reshape(batch, length, heads, dim),
        lse.swapaxes(1, 2).reshape(batch, length, heads),
    )


def _block(rows, key, value, bounds, first, group, fresh_from=None):
    """Softmax state (maximum, sum, weighted values) of keys `first <= s < first + block`, leaving
    out those before `fresh_from`."""
    batch, kv_heads, _, dim = rows.shape
    start, end = bounds
    logits = jnp.einsum("bkrd,bksd->bkrs", rows, key, preferred_element_type=jnp.float32)
    index = first + jnp.arange(key.shape[2])
    if fresh_from is not None:
        start = jnp.maximum(start, fresh_from)
    seen = (index >= start[..., None]) & (index < end[..., None])  # [B, T, S]
    seen = jnp.repeat(seen, group, axis=1)[:, None]  # [B, 1, T * G, S]
    logits = jnp.where(seen, logits * dim**-0.5, -jnp.inf)
    top = jnp.max(logits, axis=-1)
    top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))
    weights = jnp.exp(logits - top[..., None])
    total = jnp.sum(weights, axis=-1)
    weighted = jnp.einsum(
        "bkrs,bksd->bkrd",
        weights.astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
    )
    return top, total, weighted


def _walk(rows, key, value, bounds, block, group):
    """`_block` over all keys, one block after another."""
    keys = key.shape[2]
    block = min(block, keys)
    lowest, highest = jnp.min(bounds[0]), jnp.max(bounds[1])

    # Backward recomputes a block's logits instead of keeping them all.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def visit(state, step):
        def attend(state):
            fresh_from = step * block
            first = jnp.minimum(fresh_from, keys - block)
            part = [jax.lax.dynamic_slice_in_dim(x, first, block, axis=2) for x in (key, value)]
            top, total, weighted = _block(rows, *part, bounds, first, group, fresh_from)
            # A block without a visible key reports maximum 0 and sum 0: it must not raise `top`.
            top = jnp.where(total > 0, top, state[0])
            new_top = jnp.where(state[1] > 0, jnp.maximum(state[0], top), top)
            old = jnp.exp(jnp.minimum(state[0] - new_top, 0.0))  # no overflow from the empty state
            new = jnp.exp(top - new_top)
            return (
                new_top,
                state[1] * old + total * new,
                state[2] * old[..., None] + weighted * new[..., None],
            )

        visible = (step * block < highest) & ((step + 1) * block > lowest)
        return jax.lax.cond(visible, attend, lambda state: state, state), None

    shape = rows.shape[:3]
    state = (
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(rows.shape, jnp.float32),
    )
    return jax.lax.scan(visit, state, jnp.arange(-(-keys // block)))[0]
