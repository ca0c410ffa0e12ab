"""Chunks, dialogues and packed batches against what plain loops give."""

from __future__ import annotations

import numpy as np
import pytest

from combkv_jax.chunking import Sample, chunk_tokens, dialogue_samples, pack, split_history
from combkv_jax.errors import RequestError


def ids(rng, count):
    return rng.integers(0, 1000, count).astype(np.int32)


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 13, 14, 29])
@pytest.mark.parametrize("size", [1, 7, 100])
def test_chunks_are_the_tokens_in_order_and_full_but_the_last(count, size):
    tokens = ids(np.random.default_rng(count), count)
    chunks = chunk_tokens(tokens.tolist(), size)
    assert [t for chunk in chunks for t in chunk] == tokens.tolist()
    assert all(len(chunk) == size for chunk in chunks[:-1])
    assert all(1 <= len(chunk) <= size and chunk.dtype == np.int32 for chunk in chunks)


@pytest.mark.parametrize(("count", "window"), [(1, 1), (5, 5), (5, 9), (23, 1), (23, 5), (23, 22)])
def test_the_newest_tokens_stay_recent(count, window):
    tokens = ids(np.random.default_rng(window), count)
    chunks, recent = split_history(tokens, window, 7)
    assert len(recent) == min(window, count)
    assert [t for part in [*chunks, recent] for t in part] == tokens.tolist()
    assert all(len(chunk) == 7 for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: chunk_tokens([1], 0), "chunk_size is 0"),
        (lambda: chunk_tokens([[1]], 3), "shape"),
        (lambda: chunk_tokens([0.5], 3), "float"),
        (lambda: chunk_tokens([-1], 3), "-1"),
        (lambda: chunk_tokens([2**31], 3), str(2**31)),
        (lambda: split_history([1, 2], 0, 3), "window is 0"),
        (lambda: split_history([], 4, 3), "0 tokens"),
        (lambda: Sample([], []), "0 tokens"),
        (lambda: Sample([1, 2], [1]), "label"),
        (lambda: Sample([1], [1], ([],)), "0 tokens"),
        (lambda: pack([]), "0 samples"),
        (lambda: pack([Sample([1, 2], [1, 2])], num_tokens=1), "num_tokens is 1.*at least 2"),
        (lambda: pack([Sample([1], [1], ([5],))] * 2, num_samples=1), "num_samples is 1"),
        (lambda: pack([Sample([1], [1], ([5],))] * 2, num_chunks=1), "num_chunks is 1"),
        (lambda: pack([Sample([1], [1], ([5, 6],))], num_chunk_tokens=1), "num_chunk_tokens is 1"),
    ],
)
def test_wrong_input_is_refused_in_words(call, said):
    with pytest.raises(RequestError, match=said):
        call()


def dialogue(rng, lengths):
    return [(ids(rng, user), ids(rng, reply)) for user, reply in lengths]


def test_a_dialogue_gives_one_sample_a_boundary():
    # Pair totals 4, 5, 6, 3, 8 with chunks of 10: 4 + 5 stays under 10, 6 more reaches it; 6 + 3
    # stays, 8 more reaches it.
    turns = dialogue(np.random.default_rng(0), [(1, 3), (2, 3), (4, 2), (1, 2), (3, 5)])
    first, second = dialogue_samples(turns, 10)

    def flat(pairs):
        return [t for pair in pairs for part in pair for t in part]

    assert [chunk.tolist() for chunk in first.chunks] == [flat(turns[:2])]
    assert [chunk.tolist() for chunk in second.chunks] == [flat(turns[:2]), flat(turns[2:4])]
    assert first.tokens.tolist() == flat(turns[2:])
    assert second.tokens.tolist() == flat(turns[4:])
    counted = [([-100] * len(u), a.tolist()) for u, a in turns[2:]]
    assert first.labels.tolist() == flat(counted)


def test_a_dialogue_that_stays_short_gives_no_sample():
    rng = np.random.default_rng(1)
    assert dialogue_samples([], 10) == []
    assert dialogue_samples(dialogue(rng, [(4, 5)]), 10) == []
    assert dialogue_samples(dialogue(rng, [(4, 50)]), 10) == []


@pytest.mark.parametrize("seed", range(5))
def test_chunks_of_a_dialogue_hold_what_is_no_longer_recent(seed):
    rng = np.random.default_rng(seed)
    turns = dialogue(rng, rng.integers(0, 12, (20, 2)))
    everything = np.concatenate([part for pair in turns for part in pair])
    samples = dialogue_samples(turns, 11)
    assert samples
    for sample in samples:
        parts = np.concatenate([*sample.chunks, sample.tokens])
        np.testing.assert_array_equal(parts, everything)
        assert all(1 <= len(chunk) <= 11 for chunk in sample.chunks)
    assert [len(s.tokens) for s in samples] == sorted({len(s.tokens) for s in samples})[::-1]


def random_samples(rng, count):
    out = []
    for _ in range(count):
        tokens = ids(rng, rng.integers(1, 9))
        labels = np.where(rng.random(len(tokens)) < 0.5, tokens, -100)
        chunks = tuple(ids(rng, n) for n in rng.integers(1, 6, rng.integers(0, 4)))
        out.append(Sample(tokens, labels, chunks))
    return out


@pytest.mark.parametrize("seed", range(5))
def test_a_packed_batch_takes_apart_into_its_samples(seed):
    rng = np.random.default_rng(seed)
    samples = random_samples(rng, 5)
    batch = pack(samples)
    assert all(array.dtype == np.int32 for array in batch.values())
    cu_q, cu_k, cu_chunk = (batch[f"cu_seqlens_{x}"] for x in ("q", "k", "chunk"))
    for i, sample in enumerate(samples):
        place = slice(cu_q[i], cu_q[i + 1])
        assert batch["input_ids"][0, place].tolist() == sample.tokens.tolist()
        assert batch["position_ids"][0, place].tolist() == list(range(len(sample.tokens)))
        assert batch["shift_labels"][0, place].tolist() == [*sample.labels[1:].tolist(), -100]
        history = batch["chunk_ids"][0, cu_k[i] : cu_k[i + 1]].tolist()
        assert history == [t for chunk in sample.chunks for t in chunk]
    lengths = [len(chunk) for sample in samples for chunk in sample.chunks]
    assert np.diff(cu_chunk).tolist() == lengths
    assert batch["position_ids_k"][0].tolist() == [i for n in lengths for i in range(n)]


def test_padding_changes_nothing_of_what_is_there_and_belongs_to_nobody():
    samples = random_samples(np.random.default_rng(7), 3)
    exact = pack(samples)
    padded = pack(samples, num_samples=5, num_chunks=11, num_tokens=40, num_chunk_tokens=53)
    sizes = {"input_ids": 40, "position_ids": 40, "shift_labels": 40, "chunk_ids": 53}
    sizes |= {"position_ids_k": 53, "cu_seqlens_q": 6, "cu_seqlens_k": 6, "cu_seqlens_chunk": 12}
    for name, array in padded.items():
        before = exact[name].shape[-1]
        assert array.shape[-1] == sizes[name]
        np.testing.assert_array_equal(array[..., :before], exact[name])
        fill = exact[name][-1] if name.startswith("cu") else -100 if "labels" in name else 0
        assert (array[..., before:] == fill).all()


def test_the_golden_batch_is_packed_as_the_original_does(golden_folder):
    from safetensors.numpy import load_file

    golden = load_file(golden_folder / "io.safetensors")
    cu_q, cu_k, cu_chunk = (golden[f"cu_seqlens_{x}"] for x in ("q", "k", "chunk"))
    samples = []
    for i in range(len(cu_q) - 1):
        tokens = golden["input_ids"][0, cu_q[i] : cu_q[i + 1]]
        labels = np.append(-100, golden["shift_labels"][0, cu_q[i] : cu_q[i + 1] - 1])
        borders = [b for b in cu_chunk if cu_k[i] <= b <= cu_k[i + 1]]
        chunks = [
            golden["chunk_ids"][0, a:b] for a, b in zip(borders[:-1], borders[1:], strict=True)
        ]
        samples.append(Sample(tokens, labels, tuple(chunks)))
    for name, array in pack(samples).items():
        np.testing.assert_array_equal(array, golden[name], err_msg=name)
