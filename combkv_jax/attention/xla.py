"""Attention in plain XLA, with temporaries bounded however long the keys are.

While the logits are small they are computed at once. Beyond that, rows are taken a few at a time,
so that a softmax stays in the caches, and the keys of a long row block by block with an online
softmax (Milakov & Gimelshein 2018); blocks that no query sees are skipped. Keys are never padded,
transposed or copied: the last block overlaps the one before it instead. Coded keys and values are
decoded block by block, never all at once.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from combkv_jax.attention import source
from combkv_jax.attention.source import Source

ROWS_BYTES = 12 * 2**20  # float32 logits of the rows taken at once, where there are several
LOGITS_BYTES = 48 * 2**20  # float32 logits held at once
DECODED_BYTES = 16 * 2**20  # float32 keys, or values, decoded at once from a coded source
SMALLEST_BLOCK = 128
FEW_QUERIES = 16  # up to here reading the keys is the work, and all rows share it


def attention(
    query: jax.Array, key: Source, value: Source, start: jax.Array, end: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `attention.attention`; start and end are [B, T]."""
    batch, length, heads, _ = query.shape
    at_once = ROWS_BYTES // (4 * heads * length * key.shape[2])
    if at_once >= batch or length < FEW_QUERIES or batch == 1:
        return _rows(query, key, value, start, end)

    def one(row):
        return jax.tree.map(lambda x: x[0], _rows(*jax.tree.map(lambda x: x[None], row)))

    arrays = (query, key, value, start, end)
    return jax.lax.map(one, arrays, batch_size=max(1, at_once))


def mass(
    query: jax.Array, key: jax.Array, lse: jax.Array, start: jax.Array, end: jax.Array
) -> jax.Array:
    """See `attention.mass`; start and end are [B, T]."""
    batch, length, heads, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    group = heads // kv_heads
    rows = fold(query, kv_heads)
    lse = fold(jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None], kv_heads)  # [B, K, T * G, 1]
    block = min(keys, max(LOGITS_BYTES // (4 * batch * heads * length), SMALLEST_BLOCK))

    def visit(step, total):
        first = jnp.minimum(step * block, keys - block)
        part = jax.lax.dynamic_slice_in_dim(key, first, block, axis=2)
        weights = jnp.exp(_logits(rows, part, (start, end), first, group) - lse)
        return jax.lax.dynamic_update_slice_in_dim(total, weights.sum(axis=2), first, axis=2)

    total = jnp.zeros((batch, kv_heads, keys), jnp.float32)
    return jax.lax.fori_loop(0, -(-keys // block), visit, total)


def fold(x: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, H, D] -> [B, K, T * G, D]: the G query heads of a KV head as rows of one matrix."""
    batch, length, heads, dim = x.shape
    x = x.reshape(batch, length, kv_heads, heads // kv_heads, dim).swapaxes(1, 2)
    return x.reshape(batch, kv_heads, -1, dim)


def unfold(x: jax.Array, heads: int) -> jax.Array:
    """The inverse of `fold`."""
    batch, kv_heads, rows, dim = x.shape
    group = heads // kv_heads
    x = x.reshape(batch, kv_heads, rows // group, group, dim).swapaxes(1, 2)
    return x.reshape(batch, -1, heads, dim)


def _rows(query, key, value, start, end):
    batch, length, heads, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    group = heads // kv_heads
    rows = fold(query, kv_heads)
    bounds = (start, end)
    block = LOGITS_BYTES // (4 * batch * heads * length)
    if source.is_coded(key):
        block = min(block, DECODED_BYTES // (4 * batch * kv_heads * dim))
        # Whole groups, and then the last block begins with one too.
        block = max(block, SMALLEST_BLOCK) // key.group * key.group or key.group
    if block >= keys:
        whole = [source.read(x, 0, keys) for x in (key, value)]
        state = _block(rows, *whole, bounds, 0, group)
    else:
        state = _walk(rows, key, value, bounds, max(block, SMALLEST_BLOCK), group)
    top, total, weighted = state
    seen = total > 0
    out = weighted / jnp.where(seen, total, 1.0)[..., None]
    lse = jnp.where(seen, top + jnp.log(jnp.where(seen, total, 1.0)), -jnp.inf)
    return unfold(out.astype(value.dtype), heads), unfold(lse[..., None], heads)[..., 0]


def _logits(rows, key, bounds, first, group, fresh_from=None):
    """Scaled logits [B, K, T * G, S] of keys `first <= s < first + S`, -inf where not seen, leaving
    out those before `fresh_from`."""
    start, end = bounds
    logits = jnp.einsum("bkrd,bksd->bkrs", rows, key, preferred_element_type=jnp.float32)
    index = first + jnp.arange(key.shape[2])
    if fresh_from is not None:
        start = jnp.maximum(start, fresh_from)
    seen = (index >= start[..., None]) & (index < end[..., None])  # [B, T, S]
    seen = jnp.repeat(seen, group, axis=1)[:, None]  # [B, 1, T * G, S]
    return jnp.where(seen, logits * rows.shape[-1] ** -0.5, -jnp.inf)


def _block(rows, key, value, bounds, first, group, fresh_from=None):
    """Softmax state (maximum, sum, weighted values) of the keys that `_logits` compares with."""
    logits = _logits(rows, key, bounds, first, group, fresh_from)
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
            part = [source.read(x, first, block) for x in (key, value)]
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
