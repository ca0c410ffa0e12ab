"""Plans from XLA's own GPU compiler, against what the shapes say."""

from __future__ import annotations

import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax import model, planner
from combkv_jax.config import FORMS, LLAMA_3_1_8B, CombConfig, every_fourth
from combkv_jax.errors import RequestError
from tests import tiny

pytestmark = pytest.mark.optimized

GIB = 2**30

needs_compiler = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
    reason="JAX's CUDA plugin, whose compiler makes the plan, is for Linux on x86_64 only",
)


@needs_compiler
@pytest.mark.parametrize(("encoder", "most"), [("layers", 23.0), ("decoder", 20.5)])
def test_llama_8b_behind_131072_tokens_on_an_h200(encoder, most):
    config = CombConfig(LLAMA_3_1_8B, encoder, FORMS[encoder], every_fourth(32), 1024)
    assert len(config.cross_layers) == 8
    plan = planner.plan_decode(config, "h200", history=131072, window=4096)
    assert plan.arguments <= most * GIB
    assert plan.temporaries < 0.1 * GIB
    # The donated recent tokens stay where they are: no layer's K/V is copied.
    recent = 32 * 2 * 8 * 128 * 4096 * 2
    assert plan.alias >= recent
    assert plan.output - plan.alias < 2**20
    assert plan.full_cache == 32 * 2 * 8 * 128 * (131072 + 4096) * 2
    sinks = 24 * 2 * 8 * 128 * 4 * 2 if encoder == "decoder" else 0
    history = 8 * 2 * 8 * 128 * 131072 * 2
    assert plan.cache == pytest.approx(history + recent + sinks, abs=2**16)
    assert plan.peak >= plan.weights + plan.cache
    assert plan.fits
    assert 0.003 < plan.seconds_a_token < 0.006  # about 20 GiB at 4.8 TB/s


@needs_compiler
@pytest.mark.parametrize(("gate", "dtype"), [("lse", "float32"), ("tanh", "bfloat16")])
def test_bytes_are_those_of_the_shapes(gate, dtype):
    config = tiny.comb_config(gate, (1, 3), num_hidden_layers=4)
    plan = planner.plan_decode(config, "a100-40", history=59, window=256, batch=3, dtype=dtype)
    item = jnp.dtype(dtype).itemsize
    expected = sum(
        math.prod(d.shape) * jnp.dtype(d.dtype or dtype).itemsize
        for d in model.declarations(config).values()
    )
    assert plan.weights == expected
    token = 2 * 3 * 2 * 12 * item  # K and V, rows, KV heads, head_dim
    sinks = 2 * 4 if gate == "lse" else 0
    small = 4 * 1024  # counts and positions
    assert 0 <= plan.cache - token * (4 * 256 + 2 * 59 + sinks) < small
    assert plan.full_cache == token * 4 * (59 + 256)
    assert plan.alias >= token * 4 * 256
    assert plan.memory == 40339 * 2**20
    assert plan.gpu == "NVIDIA A100-SXM4-40GB"


@needs_compiler
def test_two_gpus_hold_half_each():
    config = tiny.comb_config("lse", (1,), vocab_size=96, num_hidden_layers=2)
    one = planner.plan_decode(config, "rtx-4090", 61, 256, batch=2)
    two = planner.plan_decode(config, "rtx-4090", 61, 256, batch=2, mesh=(1, 2))
    rows = planner.plan_decode(config, "rtx-4090", 61, 256, batch=2, mesh=(2, 1))
    assert two.full_cache == rows.full_cache == one.full_cache // 2
    assert two.cache == pytest.approx(one.cache / 2, abs=4096)
    assert rows.cache == pytest.approx(one.cache / 2, abs=4096)
    assert one.weights / 2 < two.weights < 0.52 * one.weights
    assert rows.weights == one.weights
    assert (one.mesh, two.mesh, two.notes) == ("1x1", "1x2", ())


@needs_compiler
@pytest.mark.parametrize("name", planner.GPUS)
def test_xla_takes_every_gpu_of_the_table(name):
    mesh = planner.gpu_mesh(name, (1, 1))
    device = mesh.devices.item()
    assert device.device_kind == planner.GPUS[name].device
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    square = jax.ShapeDtypeStruct((512, 512), np.float32, sharding=where)
    used = jax.jit(jnp.dot).lower(square, square).compile().memory_analysis()
    assert used.argument_size_in_bytes == 2 * 512 * 512 * 4


@needs_compiler
def test_what_does_not_fit_is_said_so():
    config = tiny.comb_config("lse", (0,), num_hidden_layers=1)
    plan = planner.plan_decode(config, "rtx-3090", history=2**29, window=256)
    assert plan.cache > plan.memory
    assert not plan.fits


@needs_compiler
def test_a_plan_leaves_this_process_as_it_was():
    before = jax.devices(), jax.config.jax_enable_compilation_cache
    config = tiny.comb_config("tanh", (0,), num_hidden_layers=1)
    planner.plan_decode(config, "H200", 1, 1)  # names in any case
    assert (jax.devices(), jax.config.jax_enable_compilation_cache) == before
    assert jax.default_backend() == "cpu"
    np.testing.assert_array_equal(jnp.ones(3) + 1, [2, 2, 2])


def test_unknown_gpu():
    with pytest.raises(RequestError, match=r"GPU 'h300' is not known; .*rtx-3090, .*b200"):
        planner.gpu_mesh("h300")


@pytest.mark.parametrize("name", ["history", "window", "batch"])
def test_counts_are_positive(name):
    counts = {"history": 1, "window": 1, "batch": 1} | {name: 0}
    with pytest.raises(RequestError, match=f"{name} is 0"):
        planner.plan_decode(tiny.comb_config("lse"), "h200", **counts)


def test_without_the_cuda_plugin(monkeypatch):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(planner.topologies, "get_topology_desc", missing)
    with pytest.raises(RequestError, match=r"pip install 'jax\[cuda12\]'"):
        planner.gpu_mesh("h100")
