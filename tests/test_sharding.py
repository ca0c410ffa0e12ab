"""Meshes from text, placements, and that a sharded model gives the single device's numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from combkv_jax import generate, model, sharding
from combkv_jax.compress import compress
from combkv_jax.errors import RequestError
from tests import tiny

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("text", ["1x1", "1x2", "2x2", "2x4", "8x1", "3x1"])
def test_mesh(text):
    mesh = sharding.parse_mesh(text)
    data, tensor = map(int, text.split("x"))
    assert dict(mesh.shape) == {"data": data, "tensor": tensor}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


@pytest.mark.parametrize("text", ["", "2", "2x", "2x2x2", "-1x2", "2*2", "axb", "²x1", "1.5x2"])
def test_text_that_is_no_mesh(text):
    with pytest.raises(RequestError, match="cannot be read; give data x tensor") as error:
        sharding.parse_mesh(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["0x1", "1x0"])
def test_no_axis_is_empty(text):
    with pytest.raises(RequestError, match="both need at least 1"):
        sharding.parse_mesh(text)


def test_more_devices_than_there_are():
    with pytest.raises(RequestError, match=r"'4x4' asks for 16 devices; there are 8 \(cpu\)"):
        sharding.parse_mesh("4x4")


class Gpu:
    platform = "gpu"

    def __init__(self, process):
        self.process_index = process


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [Gpu(0)])
    with pytest.raises(RequestError, match=r"'1x2' asks for 2 devices; there is 1 \(gpu\)\."):
        sharding.parse_mesh("1x2")
    monkeypatch.setattr(jax, "devices", lambda: [Gpu(i) for i in (0, 0, 1)])
    words = r"'4x1' asks for 4 devices; there are 3 \(gpu\), 2 and 1 of them in a process"
    with pytest.raises(RequestError, match=words):
        sharding.parse_mesh("4x1", processes=2)
    with pytest.raises(RequestError, match=r"'3x1' has 3 .* 2 processes .* a multiple of 2"):
        sharding.parse_mesh("3x1", processes=2)


def test_every_process_gives_its_part_of_a_mesh(monkeypatch):
    made = []
    monkeypatch.setattr(jax, "devices", lambda: [Gpu(i) for i in (0, 0, 0, 1, 1, 1)])
    monkeypatch.setattr(jax, "make_mesh", lambda *a, devices, **k: made.append(devices))
    sharding.parse_mesh("2x2", processes=2)
    assert [device.process_index for device in made[0]] == [0, 0, 1, 1]


def test_without_text_all_devices_are_along_data():
    assert sharding.parse_mesh(None).shape == {"data": 8, "tensor": 1}


def test_moments_are_divided_over_data_too():
    config = tiny.comb_config("lse", (1,), num_hidden_layers=2)
    placement = sharding.place(config.text, sharding.parse_mesh("2x2"))
    moments = placement.moments(model.declarations(config))
    assert moments["history.0.q_proj.weight"].spec == P("tensor", "data")
    assert moments["history.0.o_proj.weight"].spec == P("data", "tensor")
    assert moments["history.0.bias"].spec == P("data")
    assert moments["decoder.lm_head.weight"].spec == P(None, "data")  # 97 x 40


def test_virtual_devices_are_made_and_said():
    code = (
        "from combkv_jax.sharding import parse_mesh\n"
        "import jax\n"
        "print(parse_mesh('2x3').size, jax.device_count())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["6", "6"]
    assert "6 virtual devices" in done.stderr


def test_each_parameter_is_divided_where_its_axis_is():
    config = tiny.comb_config("tanh", (1, 3), num_hidden_layers=4)
    declared = model.declarations(config)
    placement = sharding.place(config.text, sharding.parse_mesh("2x2"))
    shardings = placement.parameters(declared)
    assert list(shardings) == list(declared)
    assert shardings["decoder.layers.0.self_attn.q_proj.weight"].spec == P("tensor", None)
    assert shardings["decoder.layers.3.self_attn.o_proj.weight"].spec == P(None, "tensor")
    assert shardings["history.1.mlp.down_proj.weight"].spec == P(None, "tensor")
    assert shardings["encoder.v_proj.0.weight"].spec == P("tensor", None)
    assert shardings["decoder.norm.weight"].is_fully_replicated
    for name, where in shardings.items():  # every one can really be placed
        where.shard_shape(declared[name].shape)
    # 97 vocabulary entries are prime.
    assert [n for n in placement.notes if "97 vocabulary entries" in n and "1 or 97 would" not in n]
    assert shardings["decoder.lm_head.weight"].is_fully_replicated


def test_kv_heads_that_are_not_divided_are_named():
    config = tiny.llama_config(num_attention_heads=8, num_key_value_heads=2, vocab_size=96)
    placement = sharding.place(config, sharding.parse_mesh("1x4"))
    assert placement.split == {"heads", "ffn", "hidden", "vocab"}
    assert placement.notes == (
        "A tensor axis of 4 does not divide the 2 KV heads, so every device holds them all; "
        "1 or 2 would.",
    )


def test_a_tensor_axis_that_divides_nothing():
    with pytest.raises(RequestError, match="axis of 3 divides none of 4 attention heads, 2 KV"):
        sharding.place(tiny.llama_config(), sharding.parse_mesh("1x3"))


def test_a_batch_that_is_not_divided():
    placement = sharding.place(tiny.llama_config(), sharding.parse_mesh("2x1"))
    cache = {"key": jnp.zeros((3, 2, 5, 12))}
    with pytest.raises(RequestError, match="batch of 3 cannot be divided .* of 2; 1 or 3 would"):
        placement.cache(cache)


@pytest.mark.parametrize(("gate", "mesh"), [("lse", "2x2"), ("tanh", "2x2"), ("lse", "1x4")])
def test_a_sharded_model_gives_the_same_logits(gate, mesh):
    rng = np.random.default_rng(11)
    config = tiny.comb_config(gate, (1,), num_hidden_layers=2)
    single = tiny.build(config, tiny.random_parameters(rng, config))
    rows = [
        [rng.integers(0, 97, n) for n in lengths] for lengths in ([13, 5], [7], [13, 13, 1], [2])
    ]
    prompts = [rng.integers(0, 97, n) for n in (3, 7, 1, 5)]
    history = compress(single, rows)
    cache = generate.new_cache(single, 16, history, batch=4)
    ids = np.zeros((4, 7), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    lengths = np.array([len(p) for p in prompts], np.int32)

    @jax.jit
    def prefill_and_step(comb_llama, cache):
        logits, cache = comb_llama.prefill(cache, ids, lengths)
        return logits, *comb_llama.decode_step(cache, jnp.argmax(logits, axis=-1))

    placement = sharding.place(config.text, sharding.parse_mesh(mesh))
    places = placement.parameters(model.declarations(config))
    arrays = {name: jax.device_put(a, places[name]) for name, a in model.parameters(single).items()}
    there = model.build(config, arrays)
    placed = jax.device_put(cache, placement.cache(cache))
    key = placed.layers[0].recent.key
    data, tensor = placement.mesh.shape.values()
    heads = 2 // tensor if 2 % tensor == 0 else 2
    assert key.sharding.shard_shape(key.shape) == (4 // data, heads, *key.shape[2:])
    for ours, theirs in zip(
        jax.tree.leaves(prefill_and_step(there, placed)),
        jax.tree.leaves(prefill_and_step(single, cache)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
