"""The original PyTorch CombLlama's own numbers: K/V, logits, loss and gradients."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from combkv_jax import model, weights
from tests import tiny


@pytest.fixture(scope="module")
def golden(golden_folder):
    """The model as it is loaded, and the reference's inputs and outputs."""
    config, parameters, _ = weights.load(golden_folder, "float32")
    return model.build(config, parameters), load_file(golden_folder / "io.safetensors")


def test_logits_and_encoder_keys_and_values(golden):
    comb_llama, data = golden
    logits, states = tiny.run(comb_llama, data)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, data["logits"][0], rtol=0, atol=1e-4)
    assert len(states) == len(comb_llama.config.cross_layers)
    for i, (key, value) in enumerate(states):
        np.testing.assert_allclose(key, data[f"cross_states.{i}.key"], rtol=0, atol=1e-4)
        np.testing.assert_allclose(value, data[f"cross_states.{i}.value"], rtol=0, atol=1e-4)


def test_loss_and_gradients(golden):
    comb_llama, data = golden
    loss, gradient = tiny.loss_and_gradient(comb_llama, data)
    np.testing.assert_allclose(loss, data["loss"][0], rtol=0, atol=1e-4)
    gradient = model.parameters(gradient)
    expected = {name.removeprefix("grad."): g for name, g in data.items() if "grad." in name}
    assert len(expected) == 23
    for name, theirs in expected.items():
        ours = np.asarray(gradient[tiny.from_combllama_name(name)])
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert error < 1e-3, (name, error)
        np.testing.assert_allclose(
            ours, theirs, rtol=1e-3, atol=1e-3 * np.abs(theirs).max(), err_msg=name
        )
