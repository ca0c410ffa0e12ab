"""Attention of chunks laid side by side, block by block, against attention over all of them."""

from __future__ import annotations

import numpy as np
import pytest

from combkv_jax.cache import Banded, Packed


@pytest.mark.parametrize("lengths", [[7, 7, 7, 7], [1, 7, 3, 2, 7, 7, 5], [4, 4]])
@pytest.mark.parametrize("causal", [True, False])
def test_a_band_is_all_that_a_chunk_sees(lengths, causal):
    rng = np.random.default_rng(len(lengths))
    total, padding = sum(lengths), 3
    start = np.concatenate(
        [np.repeat(np.cumsum([0, *lengths[:-1]]), lengths), np.arange(3) + total]
    )
    end = np.concatenate([np.repeat(np.cumsum(lengths), lengths), np.arange(3) + total + 1])
    index = np.arange(total + padding)
    bounds = [np.tile(x, (2, 1)) for x in (start, index + 1 if causal else end)]
    query = rng.normal(size=(2, total + padding, 4, 8)).astype(np.float32)
    key, value = rng.normal(size=(2, 2, total + padding, 2, 8)).astype(np.float32)
    ours, entry = Banded(*bounds, width=7).prefill(query, key, value, None)
    theirs, _ = Packed(*bounds).prefill(query, key, value, None)
    assert isinstance(entry, Banded)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
