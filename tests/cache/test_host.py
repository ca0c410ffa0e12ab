"""Tokens in host memory: what is written and taken, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax.cache import host


@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("axis", [2, 3])
def test_write_stays_within_its_tokens(axis, tokens):
    rng = np.random.default_rng(tokens)
    array = rng.normal(size=(5, 2, 7, 4)).astype(np.float32)
    new = rng.normal(size=(5, 2, tokens, 4)).astype(np.float32)
    first, lengths = np.array([-1, 2, 6, 7, 0]), np.array([0, 1, tokens, tokens, tokens])
    want = array.copy()
    for row in range(5):
        for t in range(lengths[row]):
            if first[row] + t < 7:
                want[row, :, first[row] + t] = new[row, :, t]
    if axis == 3:
        array, new, want = (x.swapaxes(2, 3) for x in (array, new, want))
    write = jax.jit(host.write, static_argnames="axis")
    got = write(host.to_host(jnp.asarray(array)), new, jnp.asarray(first), lengths, axis=axis)
    assert got.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(got, want)


def test_take_gives_each_head_its_own():
    rng = np.random.default_rng(2)
    array = rng.normal(size=(3, 2, 7, 4)).astype(np.float32)
    index = rng.integers(0, 7, (3, 2, 5))
    got = jax.jit(host.take)(host.to_host(jnp.asarray(array)), jnp.asarray(index))
    assert got.sharding.memory_kind == "device"
    np.testing.assert_array_equal(got, np.take_along_axis(array, index[..., None], axis=2))
