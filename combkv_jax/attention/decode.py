"""Attention of a few queries over keys and values coded in few bits (cache/quantize.py), on NVIDIA
Hopper GPUs.

Only the codes leave the memory of the GPU. A block of the grid copies 64 words of every channel to
shared memory at once, which hold 64 tokens for each code of a word. Those are decoded in registers,
64 tokens at a time (the same code of each word, so their numbers are a word's tokens apart), and
multiplied as any 16-bit keys and values are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from combkv_jax.attention import hopper
from combkv_jax.attention.hopper import ALIGNED, CORES, KEYS, ROWS
from combkv_jax.attention.source import check_16_bit

WORD = 32  # bits
GROUP = 64  # tokens with one scale of keys, channels with one scale of values
HALF = 64  # channels that a warp group decodes, and adds up
MOST_STAGES = 2


def check(query: jax.Array, key: Any, value: Any) -> None:
    """Raises NotImplementedError, with the reason, for what this kernel does not take."""
    for x, per_token in ((key, False), (value, True)):
        if getattr(x, "per_token", None) is not per_token or x.bits != key.bits:
            raise NotImplementedError("it reads keys and values as cache/quantize.py codes them")
    check_16_bit(query, key, value)
    _, length, heads, dim = query.shape
    _, kv_heads, keys, _ = key.shape
    if dim not in (64, 128):
        raise NotImplementedError(f"head_dim is {dim}, and it takes 64 or 128")
    rows = length * heads // kv_heads
    if rows > ROWS:
        raise NotImplementedError(f"{rows} queries read a key, and it takes up to {ROWS}")
    words = keys * key.bits // WORD
    if words < ROWS or words % ALIGNED:
        step = ALIGNED * WORD // key.bits
        raise NotImplementedError(
            f"there are {keys} keys, and in {key.bits} bits it takes multiples of "
            f"{max(step, GROUP)}, from {ROWS * WORD // key.bits} on"
        )


def attention(
    query: jax.Array,
    key: Any,
    value: Any,
    start: jax.Array,
    end: jax.Array,
    *,
    splits: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `attention.attention`, for coded keys and values; start and end are [B, T].

    splits: as in `flash.attention`. Raises NotImplementedError as `check` does.
    """
    check(query, key, value)
    batch, _, heads, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    span = ROWS * WORD // key.bits
    asked = hopper.ask(query, kv_heads, keys, start, end, ROWS, span)
    if splits is None:
        splits = min(CORES // (batch * kv_heads), keys // span)
    out, lse = _kernel(asked, key, value, max(splits, 1))
    out = lax.bitcast_convert_type(out, jnp.float32)
    return hopper.answer(out, lse, asked, heads, value.dtype)


def _kernel(asked: hopper.Asked, key, value, splits: int):
    """The parts of `asked`; the bits of float32 numbers as int32, because the results leave by way
    of the shared memory that the codes came to."""
    batch, kv_heads, _, dim = asked.query.shape
    keys, bits, dtype = key.shape[2], key.bits, key.dtype
    in_word = WORD // bits
    span = ROWS * in_word  # tokens copied at once, and groups of them
    words = keys // in_word
    halves = dim // HALF  # one warp group decodes each
    _, lse_type = asked.parts(splits, dtype)
    fixed = ROWS * 2 * dim + halves * ROWS * 2 * KEYS + 2 * 2 * KEYS * dim + 4 * ROWS
    copied = 2 * 4 * ROWS * dim + 2 * 2 * in_word * dim
    ring = min(MOST_STAGES, (hopper.SHARED - fixed) // copied)

    def signed(x):
        return lax.bitcast_convert_type(x.codes, jnp.int32)

    def by_word(x):  # of the tokens of a word: [B, K, words, tokens * groups of channels]
        return x.reshape(batch, kv_heads, words, in_word * halves)

    def body(q_ref, k_ref, ks_ref, kz_ref, v_ref, vs_ref, vz_ref,
             start_ref, end_ref, low_ref, high_ref, out_ref, lse_ref,
             q_smem, p_smem, k16_smem, v16_smem, lse_smem, k_smem, ks_smem, kz_smem, v_smem,
             q_full, full, free, k16_full, k16_free):  # fmt: skip
        head, row = lax.axis_index("head"), lax.axis_index("batch")
        part, worker = lax.axis_index("split"), lax.axis_index("worker")
        low, steps = hopper.stretch(low_ref[row, 0], high_ref[row, 0], part, splits, span)

        def first_word(step):  # the last words overlap the step before instead of ending
            word = jnp.minimum(low // in_word + step * ROWS, words - ROWS)
            return pl.multiple_of(word, ALIGNED)

        @pl.when(worker == halves)
        def _fetch():
            if halves > 1:
                plgpu.set_max_registers(40, action="decrease")
            for half in range(halves):
                own = (row, head, slice(None), pl.ds(half * HALF, HALF))
                plgpu.copy_gmem_to_smem(q_ref.at[own], q_smem.at[half], q_full)

            @pl.loop(0, steps)
            def _step(step):
                slot = lax.rem(step, ring)
                pl.when(step >= ring)(lambda: plgpu.barrier_wait(free.at[slot]))
                word = first_word(step)
                for half in range(halves):
                    own = (row, head, pl.ds(word, ROWS), pl.ds(half * HALF, HALF))
                    for ref, smem in ((k_ref, k_smem), (v_ref, v_smem)):
                        plgpu.copy_gmem_to_smem(ref.at[own], smem.at[slot, half], full.at[slot])
                group = (row, head, pl.ds(word * in_word // GROUP, in_word))
                for ref, smem in ((ks_ref, ks_smem), (kz_ref, kz_smem)):
                    plgpu.copy_gmem_to_smem(ref.at[group], smem.at[slot], full.at[slot])

            hopper.drain(steps, ring, free)

        @pl.when(worker < halves)
        def _multiply():
            if halves > 1:
                plgpu.set_max_registers(232, action="increase")
            half = worker
            channels = pl.ds(half * HALF, HALF)
            rows = pl.ds(0, ROWS)
            first, last = (hopper.row_load(x.at[row, rows]) for x in (start_ref, end_ref))
            plgpu.barrier_wait(q_full)

            def decode(codes, number, scale, zero, to):
                """The 64 tokens that lie at `number` in their words, in this half's channels."""
                word = plgpu.load(codes, layout=plgpu.Layout.WGMMA)
                code = ((word >> (number * bits)) & (2**bits - 1)).astype(jnp.float32)
                to[...] = (code * scale + zero).astype(dtype)
                plgpu.commit_smem()

            def together(barrier):  # what each warp group decodes of a key, all multiply
                if halves > 1:
                    plgpu.barrier_arrive(barrier)
                    plgpu.barrier_wait(barrier)

            def step_on(step, state):
                slot = lax.rem(step, ring)
                plgpu.barrier_wait(full.at[slot])
                word = first_word(step)
                fresh = jnp.maximum(first, low + step * span)
                token = hopper.columns() * in_word + word * in_word
                group_of_word = plgpu.broadcasted_iota(
                    jnp.int32, (ROWS, HALF), 0, layout=plgpu.Layout.WGMMA
                ) // (GROUP // in_word)

                def of_keys(smem):  # one number a group of tokens and a channel
                    def put(group, x):
                        own = plgpu.load(
                            smem.at[slot, group, channels],
                            layout=plgpu.Layout.WGMMA.reduce(0),
                            optimized=False,
                        )
                        own = lax.broadcast_in_dim(own, x.shape, (1,))
                        return jnp.where(group_of_word == group, own, x)

                    empty = jnp.zeros((ROWS, HALF), jnp.float16)
                    empty = plgpu.layout_cast(empty, plgpu.Layout.WGMMA)
                    return lax.fori_loop(0, in_word, put, empty)

                def of_values(ref, number):  # one number a token and a group of channels
                    here = (row, head, pl.ds(word, ROWS), number * halves + half)
                    return hopper.row_load(ref.at[here])

                of_key = [of_keys(x) for x in (ks_smem, kz_smem)]

                def codes_on(number, state):
                    of_value = [of_values(x, number) for x in (vs_ref, vz_ref)]  # on their way
                    # Widened anew each time: two floats a key in registers would be too many.
                    packed = lax.optimization_barrier(of_key)
                    key_numbers = [x.astype(jnp.float32) for x in packed]
                    decode(k_smem.at[slot, half], number, *key_numbers, k16_smem.at[half])
                    together(k16_full)
                    logits = hopper.product(
                        *((q_smem.at[h], k16_smem.at[h].transpose((1, 0))) for h in range(halves))
                    )
                    together(k16_free)
                    index = token + number
                    seen = (index >= hopper.over(fresh, KEYS)) & (index < hopper.over(last, KEYS))

                    def values():
                        numbers = (hopper.over(x.astype(jnp.float32), HALF) for x in of_value)
                        decode(v_smem.at[slot, half], number, *numbers, v16_smem.at[half])
                        return v16_smem.at[half]

                    return hopper.see(state, logits, dim**-0.5, seen, p_smem.at[half], values)

                state = lax.fori_loop(0, in_word, codes_on, state)
                plgpu.barrier_arrive(free.at[slot])
                return state

            out, lse = hopper.outcome(lax.fori_loop(0, steps, step_on, hopper.nothing_yet(HALF)))
            there = (part, row, head, pl.ds(0, asked.written))
            out = lax.bitcast_convert_type(out, jnp.int32)
            hopper.write(out, k_smem.at[0, half], out_ref.at[(*there, channels)])
            pl.when(half == 0)(lambda: hopper.write(lse, lse_smem, lse_ref.at[there]))

    codes = hopper.tiled(ring, halves, ROWS, HALF, dtype=jnp.int32)
    key_numbers = plgpu.SMEM((ring, in_word, dim), jnp.float16)
    decoded = hopper.tiled(halves, KEYS, HALF, dtype=dtype)
    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((*lse_type.shape, dim), jnp.int32), lse_type),
        scratch_types=(
            hopper.tiled(halves, ROWS, HALF, dtype=dtype),
            hopper.tiled(halves, ROWS, KEYS, dtype=dtype),
            decoded,
            decoded,
            plgpu.SMEM((ROWS,), jnp.float32),
            codes,
            key_numbers,
            key_numbers,
            codes,
            plgpu.Barrier(num_arrivals=halves),
            plgpu.Barrier(num_arrivals=2 * halves + 2, num_barriers=ring),
            plgpu.Barrier(num_arrivals=halves, num_barriers=ring),
            plgpu.Barrier(num_arrivals=halves),
            plgpu.Barrier(num_arrivals=halves),
        ),
        grid=(splits, kv_heads, batch),
        grid_names=("split", "head", "batch"),
        num_threads=halves + 1,
        thread_name="worker",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(
        asked.query, signed(key), key.scale, key.zero, signed(value),
        by_word(value.scale), by_word(value.zero), *asked[1:5],
    )  # fmt: skip
