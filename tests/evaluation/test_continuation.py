"""A continuation's NLL against the model's own packed forward."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from combkv_jax.evaluation import continuation, tasks
from tests import text

pytestmark = pytest.mark.once

CHUNK = 32


def test_each_history_gives_the_packed_models_nll():
    lm = text.byte_model("lse", 9, chunk_size=CHUNK)
    result = continuation.measure(lm, pairs=1, chunks=2, seed=4)
    cases = tasks.text_cases(lm.tokens, 4, "judge", cases=2, chunks=2, chunk_size=CHUNK)

    def nll(ids, target, chunks=()):
        sizes = np.cumsum([0, *map(len, chunks)]).astype(np.int32)
        batch = {
            "input_ids": ids,
            "cu_seqlens_q": np.array([0, len(ids)]),
            "chunk_ids": np.concatenate([np.zeros(0, np.int32), *chunks]),
            "cu_seqlens_chunk": sizes,
            "cu_seqlens_k": sizes[[0, -1]],
        }
        logp = jax.nn.log_softmax(lm(batch))[-len(target) :]
        return -np.mean(np.asarray(logp)[np.arange(len(target)), target])

    wanted = {name: [] for name in ("none", "compressed", "other", "full", "other_full")}
    for case, other in zip(cases, cases[::-1], strict=True):
        ids, target = case.tokens[:-1], case.tokens[1:]
        wanted["none"].append(nll(ids, target))
        wanted["compressed"].append(nll(ids, target, case.chunks))
        wanted["other"].append(nll(ids, target, other.chunks))
        wanted["full"].append(nll(np.concatenate([*case.chunks, ids]), target))
        wanted["other_full"].append(nll(np.concatenate([*other.chunks, ids]), target))
    for name, values in wanted.items():
        assert getattr(result, name) == pytest.approx(np.mean(values), abs=1e-4), name
    assert result.tokens == 2 * CHUNK
    assert result.share == pytest.approx(
        (result.none - result.compressed) / (result.none - result.full)
    )
    assert len({row[1] for row in continuation.table(result)}) == 5
