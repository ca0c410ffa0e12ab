"""Whole runs on meshes of virtual devices, against one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from combkv_jax import generate, sharding
from combkv_jax.compress import compress
from combkv_jax.generate import Generation, Sampling, new_cache, prefill
from combkv_jax.model import build, declarations, parameters
from tests import tiny


def placed(model, text):
    """The model on a mesh."""
    mesh = sharding.parse_mesh(text)
    places = sharding.place(model.config.text, mesh).parameters(declarations(model.config))
    arrays = {n: jax.device_put(a, places[n]) for n, a in parameters(model).items()}
    return build(model.config, arrays)


def answer(model, rows, policy="full", options=None, bits=16):
    """Tokens drawn behind one shared history, where the model keeps one, by `rows` prompts."""
    rng = np.random.default_rng(61)
    chunks = [rng.integers(0, 97, n) for n in (13, 13, 5)]
    prompts = [rng.integers(0, 97, 20 + n) for n in range(rows)]
    has_history = model.config.cross_layers
    history = compress(model, [chunks], chunk_batch=2, bits=bits) if has_history else None
    cache = new_cache(model, 60, history, batch=rows, policy=policy, options=options)
    logits, cache = prefill(model, cache, prompts)
    run = Generation.start(model, cache, logits, Sampling(), [], 7)
    return np.stack(list(run), axis=1)


def check_on_mesh(model, mesh, **cache):
    """A mesh gives the tokens of one device, and compiles nothing the second time."""
    want = answer(model, 2, **cache)
    on_mesh = placed(model, mesh)
    compiled = []
    monitor = jax.monitoring

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(duration)

    monitor.register_event_duration_secs_listener(listen)
    try:
        got = answer(on_mesh, 2, **cache)
        first = len(compiled)
        again = answer(on_mesh, 2, **cache)
    finally:
        monitor.clear_event_listeners()
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(again, want)
    assert first > 0
    assert len(compiled) == first  # nothing is compiled anew the second time


@pytest.mark.parametrize("form", ["lse", "tanh"])
@pytest.mark.parametrize("mesh", ["1x2", "2x1", "2x2"])
def test_a_mesh_draws_the_same_tokens_and_compiles_once(mesh, form, monkeypatch):
    monkeypatch.setattr(generate, "SEGMENT", 16)  # prompts take two segments
    config = tiny.comb_config(form)
    model = tiny.build(config, tiny.random_parameters(np.random.default_rng(62), config))
    check_on_mesh(model, mesh)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("quantized", {"bits": 2}),
        ("h2o", {"heavy": 6, "recent": 5}),
        ("snapkv", {"budget": 11, "window": 5, "generated": 3}),
        ("quest", {"budget": 12, "page": 4}),
        ("tailor", {"quantized": (), "first": 2, "window": 3, "top": 6, "channels": 4}),
        ("infllm", {"first": 2, "window": 3, "block": 4, "representatives": 2, "top": 8}),
        ("pqcache", {"first": 2, "window": 3, "top": 6, "bits": 3, "iterations": 3}),
    ],
)
def test_every_policy_is_divided_by_rows_and_heads(policy, options, monkeypatch):
    monkeypatch.setattr(generate, "SEGMENT", 16)
    config = tiny.comb_config("lse", (), num_hidden_layers=1)
    model = tiny.build(config, tiny.random_parameters(np.random.default_rng(63), config))
    check_on_mesh(model, "2x2", policy=policy, options=options)


def test_a_history_in_fewer_bits_is_divided_by_heads():
    config = tiny.comb_config("lse", (0,), num_hidden_layers=1)
    model = tiny.build(config, tiny.random_parameters(np.random.default_rng(64), config))
    check_on_mesh(model, "1x2", bits=4)
