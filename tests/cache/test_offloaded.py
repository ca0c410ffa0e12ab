"""What caches with tokens on the host take of a GPU, compiled for one that is not there."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax import planner
from combkv_jax.attention import attention, xla
from combkv_jax.cache import POLICIES, host
from tests.cache.plain import DIM, HEADS, KV_HEADS, shape
from tests.test_planner import needs_compiler


@needs_compiler
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("tailor", {"quantized": (), "channels": 2, "top": 32}),
        ("infllm", {}),
        ("pqcache", {}),
    ],
)
@pytest.mark.optimized
def test_compiled_for_a_gpu_the_host_copy_stays_in_host_memory(policy, options):
    """What is fetched the host collects. (Of a program for a device that is not there no argument
    can lie in host memory, so the program makes it and puts it there.)"""
    mesh = planner.gpu_mesh("h200")
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    settings = shape(1, 2**15, options)
    entry = POLICIES[policy].create(settings)
    names = [f.name for f in dataclasses.fields(entry) if f.name.startswith("host_")]

    def step(entry, query, key):
        on_host = {name: host.to_host(-getattr(entry, name)) for name in names}
        entry = dataclasses.replace(entry, **on_host).expect(lambda: query)
        attended, entry = entry.extend(query, key, key, None)
        return attended, entry.count

    entry = jax.eval_shape(lambda: entry)
    query, key = (jax.ShapeDtypeStruct((1, 1, h, DIM), jnp.float32) for h in (HEADS, KV_HEADS))
    arguments = planner.placed(
        (entry, query, key), jax.tree.map(lambda x: where, (entry, query, key))
    )
    with planner.no_compile_cache():
        compiled = jax.jit(step).lower(*arguments).compile()
    used, line = compiled.memory_analysis(), 2**15 * KV_HEADS * DIM * 4
    # Of several lines one may be over before another is made.
    assert 2 * line <= used.host_temp_size_in_bytes < (len(names) + 0.1) * line
    assert used.temp_size_in_bytes < line
    assert 'custom_call_target="HostExecute"' in compiled.as_text()


def test_a_long_prefill_reads_the_host_a_row_at_a_time(monkeypatch):
    """However little room there is for logits: sources on the host are no arrays to be divided."""
    monkeypatch.setattr(xla, "ROWS_BYTES", 1)
    rng = np.random.default_rng()
    length, tokens = xla.FEW_QUERIES + 1, 2 * xla.FEW_QUERIES + 3
    query = rng.standard_normal((2, length, HEADS, DIM), np.float32)
    key, value = rng.standard_normal((2, 2, KV_HEADS, tokens, DIM), np.float32)
    end = rng.integers(1, tokens + 1, (2, length)).astype(np.int32)
    got = jax.jit(host.attend)(query, host.to_host(key), host.to_host(value), end)
    want = attention(query, key, value, 0, end, implementation="reference")
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
