"""History tokens -> a compressed History, in fixed-shape batches of chunks.

One compiled step encodes a batch of chunks and writes their K/V into the cache's own buffers, so
memory does not grow with the context beyond the cache itself. A history in fewer bits is coded
batch by batch, and never held in full either.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from combkv_jax.attention import is_coded
from combkv_jax.cache import CacheShape, Chunks, History, write
from combkv_jax.cache.base import take
from combkv_jax.cache.quantize import GROUP, Quantized, check_bits, quantize
from combkv_jax.config import CombConfig
from combkv_jax.errors import RequestError
from combkv_jax.layers import rotary_frequencies
from combkv_jax.model import CombLlama
from combkv_jax.sharding import cache_places

BATCH_TOKENS = 4096  # chunk tokens encoded at once, unless chunk_batch says otherwise

Buffers = list[tuple[jax.Array, jax.Array]]  # K and V [B, K, N, D] of each cross layer


def bucket(size: int, smallest: int = 16) -> int:
    """The next of a ladder of sizes (eighths of powers of two), so that shapes repeat and few
    lengths compile anew; at most an eighth is wasted."""
    step = max(smallest, 1 << max((size - 1).bit_length() - 4, 0))
    return -(-size // step) * step


def compress(
    model: CombLlama,
    rows: Sequence[Sequence[np.ndarray]],
    *,
    history: History | None = None,
    chunk_batch: int | None = None,
    bits: int = 16,
    progress: Callable[[int], None] | None = None,
) -> History:
    """Encodes histories, one a row: each a sequence of chunks (`chunking.chunk_tokens`).

    history: what to append to (it stays usable; its K/V are copied once).
    chunk_batch: chunks encoded at once; the result does not depend on it.
    bits: 8, 4, 2 or 1 code the kept layers' K/V (cache/quantize.py); 16 leaves them as they are.
    progress: called with the number of tokens done after each batch.
    Raises RequestError when the model keeps no history, a chunk is empty or too long, or a coded
    history is to be appended to.
    """
    config = model.config
    check_bits(bits)
    if history is not None and (bits < 16 or _is_coded(history)):
        raise RequestError(
            "a history in fewer than 16 bits cannot be appended to; compress its text in one go."
        )
    if chunk_batch is not None and chunk_batch < 1:
        raise RequestError(f"chunk_batch is {chunk_batch}; at least 1 is needed.")
    _check_keeps(config)
    lengths = [len(chunk) for row in rows for chunk in row]
    if not all(0 < n <= config.chunk_size for n in lengths):
        bad = next(n for n in lengths if not 0 < n <= config.chunk_size)
        raise RequestError(f"a chunk has {bad} tokens; 1 to {config.chunk_size} can be encoded.")
    before = np.zeros(len(rows), np.int32) if history is None else np.asarray(history.count)
    if len(before) != len(rows):
        raise RequestError(
            f"the history has {len(before)} rows and {len(rows)} are to be appended."
        )
    count = before + np.array([sum(map(len, row)) for row in rows], np.int32)
    if not count.any():
        raise RequestError("the history has no tokens; at least one is needed.")

    capacity = bucket(int(count.max()))
    width = min(config.chunk_size, bucket(max(lengths, default=1)))
    size = min(chunk_batch or max(1, BATCH_TOKENS // width), _power_of_two(len(lengths)))
    coded = None
    if bits < 16:
        coded = _Coded.create(model, len(rows), capacity, size * width, bits)
    else:
        buffers = _buffers(model, len(rows), capacity, history)
    for batch, tokens in _batches(rows, before, width, size):
        if coded is None:
            buffers = _encode_into(model, buffers, *batch)
        else:
            coded.add(model, *batch)
            buffers = coded.kept
        if progress:
            jax.block_until_ready(buffers[-1])
            progress(tokens)
    start, end = jnp.zeros((len(rows), 1), jnp.int32), jnp.asarray(count)[:, None]
    kept = [Chunks(key, value, start, end) for key, value in buffers]
    return model.make_history(kept, _sinks(model, rows, history), jnp.asarray(count))


def blank(model: CombLlama, tokens: int, bits: int = 16) -> History:
    """A history of one row whose arrays are those that `tokens` tokens take, and hold nothing: for
    telling its bytes. Raises RequestError when the model keeps no history."""
    config, text = model.config, model.config.text
    _check_keeps(config)
    capacity, (keys, _) = bucket(tokens), cache_places(model, 1)
    if bits < 16:
        buffers = _Coded.create(model, 1, capacity, GROUP, bits).kept
    else:
        buffers = _buffers(model, 1, capacity, None)
    start, end = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), tokens, jnp.int32)
    sinks = {}
    if not config.is_original and config.sink_tokens:
        shape = (1, text.num_key_value_heads, config.sink_tokens, text.head_dim)
        sinks = {
            layer: Chunks(*(jnp.zeros(shape, model.dtype, device=keys) for _ in "kv"), start, end)
            for layer in range(text.num_hidden_layers)
            if layer not in config.cross_layers
        }
    kept = [Chunks(key, value, start, end) for key, value in buffers]
    return model.make_history(kept, sinks, end[:, 0])


def _check_keeps(config: CombConfig) -> None:
    if not config.cross_layers:
        raise RequestError("this model keeps no history: it has no cross layers.")


def _is_coded(history: History) -> bool:
    layers = zip(history.layers, history.kept, strict=True)
    return any(is_coded(chunks.key) for chunks, is_kept in layers if is_kept)


def _power_of_two(count: int) -> int:
    """The least that is `count` or more."""
    return 1 << max(count - 1, 0).bit_length()


def _batches(rows, before, width, size):
    """Yields ((ids [b, width], lengths [b], row [b], offset [b]), tokens in it): the chunks of all
    rows in batches of `size`. A batch that is not full ends in chunks of no tokens."""
    jobs = []
    for row, chunks in enumerate(rows):
        offset = int(before[row])
        for chunk in chunks:
            jobs.append((row, offset, np.asarray(chunk, np.int32)))
            offset += len(chunk)
    for first in range(0, len(jobs), size):
        ids = np.zeros((size, width), np.int32)
        lengths, row, offset = np.zeros((3, size), np.int32)
        for i, (r, o, chunk) in enumerate(jobs[first : first + size]):
            ids[i, : len(chunk)], lengths[i], row[i], offset[i] = chunk, len(chunk), r, o
        yield (ids, lengths, row, offset), int(lengths.sum())


@functools.partial(jax.jit, donate_argnames="buffers")
def _encode_into(model: CombLlama, buffers: Buffers, ids, lengths, row, offset) -> Buffers:
    """Encodes chunks ids [b, T] and writes each behind its row's earlier ones."""
    index = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    stop = jnp.broadcast_to(lengths[:, None], ids.shape)
    states = model.encode_chunks(ids, index, jnp.zeros_like(index), stop)
    capacity = buffers[0][0].shape[2]
    place = jnp.where(index < stop, offset[:, None] + index, capacity)
    return [
        (write(keys, model.history_key(i, key), place, row), write(values, value, place, row))
        for i, ((keys, values), (key, value)) in enumerate(zip(buffers, states, strict=True))
    ]


def _buffers(model: CombLlama, rows: int, capacity: int, history: History | None) -> Buffers:
    text, layers = model.config.text, model.config.cross_layers
    shape = (rows, text.num_key_value_heads, capacity, text.head_dim)
    if history is None:
        keys, _ = cache_places(model, rows)
        return [tuple(jnp.zeros(shape, model.dtype, device=keys) for _ in "kv") for _ in layers]
    old = [history.layers[i] for i in layers]
    grow = [(0, 0), (0, 0), (0, max(0, capacity - old[0].key.shape[2])), (0, 0)]
    return [(jnp.pad(c.key, grow), jnp.pad(c.value, grow)) for c in old]


@dataclasses.dataclass
class _Coded:
    """K/V of the cross layers in few bits. Tokens are coded in groups, whose borders are not those
    of chunks: what a batch brings is staged in full, behind the last group if not complete."""

    kept: list[tuple[Quantized, Quantized]]  # of each cross layer [B, K, N, D]
    staged: Buffers  # [B, K, room, D]
    left: np.ndarray  # int32 [B], tokens that are coded and staged no more
    count: np.ndarray  # int32 [B], tokens so far

    @classmethod
    def create(cls, model: CombLlama, rows: int, capacity: int, batch: int, bits: int) -> _Coded:
        """Room for `capacity` tokens a row, of which `batch` come at once at most."""
        text = model.config.text
        places = cache_places(model, rows)
        heads, dim = text.num_key_value_heads, text.head_dim
        shape = CacheShape(
            rows, heads, dim, capacity, model.dtype, rotary_frequencies(text), {}, *places
        )
        capacity, room = _whole_groups(capacity), _whole_groups(batch) + GROUP
        kept = [
            tuple(Quantized.create(shape, capacity, bits, per_token=x) for x in (False, True))
            for _ in model.config.cross_layers
        ]
        left, count = np.zeros((2, rows), np.int32)
        return cls(kept, _buffers(model, rows, room, None), left, count)

    def add(self, model: CombLlama, ids, lengths, row, offset) -> None:
        """A batch as `_batches` gives it."""
        staged = _encode_into(model, self.staged, ids, lengths, row, offset - self.left[row])
        np.maximum.at(self.count, row, offset + lengths)
        self.kept, self.staged = _code(self.kept, staged, self.left, self.count - self.left)
        self.left = self.count // GROUP * GROUP


def _whole_groups(tokens: int) -> int:
    return -(-tokens // GROUP) * GROUP


@functools.partial(jax.jit, donate_argnames=("kept", "staged"))
def _code(kept, staged: Buffers, left, filled):
    """Codes the first `filled` [B] tokens of `staged`, which come behind `left` [B] others, and
    moves those of the last group, if it is not complete, to the front: they are coded again."""
    place = jnp.arange(staged[0][0].shape[2])
    number = jnp.arange(len(place) // GROUP)
    some = number * GROUP < filled[:, None]
    # A group is filled up with its last token, which changes nothing of how the others are coded.
    source = jnp.minimum(place, jnp.maximum(filled - 1, 0)[:, None])
    rest = place + (filled // GROUP * GROUP)[:, None]

    def code(old: Quantized, new):
        block = jnp.where(some, (left // GROUP)[:, None] + number, old.shape[2] // GROUP)
        new = quantize(take(new, source), old.bits, per_token=old.per_token)
        return old.write(new, block, GROUP)

    coded = [tuple(map(code, old, new)) for old, new in zip(kept, staged, strict=True)]
    return coded, [tuple(take(x, rest) for x in new) for new in staged]


def _sinks(model: CombLlama, rows, history: History | None) -> dict[int, Chunks]:
    """The first tokens of each row's first chunk, for the layers that keep no history."""
    config = model.config
    width = config.sink_tokens
    if config.is_original or not width:
        return {}
    ids = np.zeros((len(rows), width), np.int32)
    length = np.zeros(len(rows), np.int32)
    for i, row in enumerate(rows):
        if len(row) and (history is None or not history.count[i]):
            length[i] = len(row[0])
            ids[i, : min(width, length[i])] = row[0][:width]
    old = {}
    if history is not None:
        kept = zip(history.layers, history.kept, strict=True)
        old = {i: chunks for i, (chunks, is_kept) in enumerate(kept) if not is_kept}
        if not length.any():
            return old
    start = jnp.zeros((len(rows), 1), jnp.int32)
    end = jnp.minimum(jnp.asarray(length), width)[:, None]
    new = {
        i: Chunks(key, value, start, end)
        for i, (key, value) in _encode_sinks(model, ids, length).items()
    }
    if not old:
        return new
    begins = length > 0  # rows whose history begins here; the others keep what they have

    def choose(a, b):
        return jnp.where(begins.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return {i: jax.tree.map(choose, new[i], old[i]) for i in new}


@jax.jit
def _encode_sinks(model: CombLlama, ids, length):
    states = model.encode_sinks(ids, length)
    return {i: tuple(x.swapaxes(1, 2) for x in pair) for i, pair in states.items()}
