"""Tokens or dialogue turns to history chunks and recent tokens, and samples to packed batches.

Everything here is plain NumPy on the host: what comes out goes into jitted functions as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from combkv_jax.errors import RequestError

IGNORED = -100  # a label the loss does not count


def chunk_tokens(tokens: Sequence[int], chunk_size: int) -> list[np.ndarray]:
    """Cuts tokens into chunks of `chunk_size`, in order; only the last can be shorter.

    Returns int32 arrays, none of them empty; no tokens give no chunks. Raises RequestError when
    chunk_size is not positive or tokens are not a flat sequence of token ids.
    """
    if chunk_size < 1:
        raise RequestError(f"chunk_size is {chunk_size}; it must be at least 1.")
    tokens = _token_array(tokens, "tokens")
    return [tokens[i : i + chunk_size] for i in range(0, len(tokens), chunk_size)]


def split_history(
    tokens: Sequence[int], window: int, chunk_size: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """(history chunks, recent tokens): the newest `window` tokens stay recent, the rest is cut.

    Chunks start at the oldest token, so a longer text keeps the chunks of its beginning. Raises
    RequestError when there are no tokens or window is not positive.
    """
    if window < 1:
        raise RequestError(f"window is {window}; at least 1 token must stay recent.")
    tokens = _token_array(tokens, "tokens")
    if not len(tokens):
        raise RequestError("the text has 0 tokens; at least 1 is needed.")
    border = max(0, len(tokens) - window)
    return chunk_tokens(tokens[:border], chunk_size), tokens[border:]


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One sequence for the model: recent tokens, their labels, and the chunks of its history.

    tokens: int32 [q]. labels: int32 [q], not shifted: the token itself where it counts in the
    loss, -100 elsewhere. chunks: int32 arrays, oldest first; none is a sample without history.
    """

    tokens: np.ndarray
    labels: np.ndarray
    chunks: tuple[np.ndarray, ...] = ()

    def __post_init__(self):
        tokens = _token_array(self.tokens, "a sample's tokens")
        labels = np.asarray(self.labels, np.int32)
        chunks = tuple(_token_array(chunk, "a sample's chunk") for chunk in self.chunks)
        if not len(tokens) or labels.shape != tokens.shape:
            raise RequestError(
                f"a sample has {len(tokens)} tokens and labels of shape {labels.shape}; at least "
                "one token and one label a token are needed."
            )
        if not all(len(chunk) for chunk in chunks):
            raise RequestError("a sample has a chunk of 0 tokens; each chunk needs at least 1.")
        for name, value in (("tokens", tokens), ("labels", labels), ("chunks", chunks)):
            object.__setattr__(self, name, value)


def dialogue_samples(
    turns: Sequence[tuple[Sequence[int], Sequence[int]]], chunk_size: int
) -> list[Sample]:
    """Samples of one dialogue of (user tokens, assistant tokens) pairs, as CombLlama cuts it.

    Pairs are gathered until `chunk_size` tokens are reached; what was gathered before the pair
    that reaches it is one history chunk. Each such boundary gives one sample: all chunks so far
    are its history, the remaining pairs its tokens, and only assistant tokens count in the loss. A
    pair that is longer than a chunk by itself is cut into several. A dialogue that never reaches
    chunk_size has no boundary and gives no sample.
    """
    pairs = [(_token_array(u, "a user turn"), _token_array(a, "a reply")) for u, a in turns]
    pairs = [(user, reply) for user, reply in pairs if len(user) + len(reply)]
    samples, history, gathered, size = [], [], [], 0
    for index, pair in enumerate(pairs):
        length = len(pair[0]) + len(pair[1])
        if gathered and size + length >= chunk_size:
            history += chunk_tokens(np.concatenate(gathered), chunk_size)
            rest = pairs[index:]
            labels = [x for u, a in rest for x in (np.full_like(u, IGNORED), a)]
            tokens = np.concatenate([x for p in rest for x in p])
            samples.append(Sample(tokens, np.concatenate(labels), tuple(history)))
            gathered, size = [], 0
        gathered += pair
        size += length
    return samples


def pack(
    samples: Sequence[Sample],
    *,
    num_samples: int | None = None,
    num_chunks: int | None = None,
    num_tokens: int | None = None,
    num_chunk_tokens: int | None = None,
) -> dict[str, np.ndarray]:
    """The packed batch of several samples: one row of tokens, one of chunk tokens, and where each
    begins. All int32.

    input_ids, position_ids, shift_labels [1, tokens]: recent tokens; positions restart a sample,
        and labels are shifted already (the last one of a sample is -100).
    chunk_ids, position_ids_k [1, chunk tokens]: history; positions restart a chunk.
    cu_seqlens_q, cu_seqlens_k [samples + 1]: where each sample's tokens and chunk tokens begin.
    cu_seqlens_chunk [chunks + 1]: where each chunk begins.

    The keyword sizes pad the batch, so that a jitted function sees one shape: tokens are padded
    with token 0, position 0 and label -100, cumulative lengths by repeating the last value, so a
    padded token belongs to no sample. Raises RequestError when there is no sample, or one of the
    sizes is smaller than what it must hold.
    """
    if not samples:
        raise RequestError("the batch has 0 samples; at least 1 is needed.")
    chunks = [chunk for sample in samples for chunk in sample.chunks]
    tokens = np.concatenate([sample.tokens for sample in samples])
    chunk_ids = np.concatenate([np.zeros(0, np.int32), *chunks])
    labels = [np.append(sample.labels[1:], IGNORED) for sample in samples]
    cu_q = _cumulative([len(sample.tokens) for sample in samples])
    cu_k = _cumulative([sum(map(len, sample.chunks)) for sample in samples])
    cu_chunk = _cumulative([len(chunk) for chunk in chunks])

    sizes = (
        ("num_samples", num_samples, len(samples)),
        ("num_chunks", num_chunks, len(chunks)),
        ("num_tokens", num_tokens, len(tokens)),
        ("num_chunk_tokens", num_chunk_tokens, len(chunk_ids)),
    )
    for name, size, held in sizes:
        if size is not None and size < held:
            raise RequestError(f"{name} is {size}; this batch needs at least {held}.")

    def row(values, size, fill=0):
        return _padded(values, size, fill)[None]

    def borders(values, size):
        return _padded(values, None if size is None else size + 1, values[-1])

    return {
        "input_ids": row(tokens, num_tokens),
        "chunk_ids": row(chunk_ids, num_chunk_tokens),
        "cu_seqlens_q": borders(cu_q, num_samples),
        "cu_seqlens_k": borders(cu_k, num_samples),
        "cu_seqlens_chunk": borders(cu_chunk, num_chunks),
        "position_ids": row(_restarting(cu_q), num_tokens),
        "position_ids_k": row(_restarting(cu_chunk), num_chunk_tokens),
        "shift_labels": row(np.concatenate(labels, dtype=np.int32), num_tokens, IGNORED),
    }


def _token_array(tokens: Sequence[int], what: str) -> np.ndarray:
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RequestError(
            f"{what} have shape {array.shape} and type {array.dtype}; a flat sequence of whole "
            "numbers is needed."
        )
    if array.size and not 0 <= array.min() <= array.max() < 2**31:
        raise RequestError(
            f"{what} hold {array.min() if array.min() < 0 else array.max()}; token ids are at "
            "least 0 and fit in 32 bits."
        )
    return array.astype(np.int32)


def _cumulative(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)


def _restarting(borders: np.ndarray) -> np.ndarray:
    """Positions 0, 1, ... that restart at each border."""
    lengths = np.diff(borders)
    return np.arange(borders[-1], dtype=np.int32) - np.repeat(borders[:-1], lengths)


def _padded(values: np.ndarray, size: int | None, fill: int) -> np.ndarray:
    missing = 0 if size is None else size - len(values)
    return np.pad(values, (0, missing), constant_values=fill)
