"""Trained history blocks on their own: written, put before a plain Llama, refused if damaged."""

from __future__ import annotations

import json

import numpy as np
import pytest

from combkv_jax import weights
from combkv_jax.errors import RequestError
from combkv_jax.weights import adapters, huggingface
from tests import text, tiny


@pytest.fixture
def base(tmp_path):
    """A plain Llama folder, and trained blocks for it."""
    rng = np.random.default_rng(7)
    config = tiny.comb_config("lse", vocab_size=257)
    arrays = tiny.random_parameters(rng, config)
    folder = tmp_path / "base"
    folder.mkdir()
    decoder = {n: x for n, x in arrays.items() if n.startswith("decoder.")}
    theirs = {huggingface.their_name(n): x for n, x in decoder.items()}
    layout = {n: (x.shape, np.dtype(np.float32)) for n, x in theirs.items()}
    huggingface.write_folder(
        folder, config.text.to_hf(), layout, lambda n: theirs[n], lambda n: None
    )
    text.byte_tokenizer().save_pretrained(folder)
    history = {n: x for n, x in arrays.items() if n.startswith("history.")}
    return config, folder, decoder, history


def rounded(x):
    return x.astype(adapters.BFLOAT16).astype(np.float32)


def test_a_training_folder_loads_like_any_model(base, tmp_path):
    config, folder, decoder, history = base
    run = tmp_path / "run"
    run.mkdir()
    adapters.write(run, adapters.NAME, config, str(folder), history, {"step": 3})
    assert {p.name for p in run.iterdir()} == {"adapters.json", "adapters.safetensors"}
    read, arrays, tokenizer = weights.load(run, "float32")
    assert read == config
    assert tokenizer is not None
    for name, x in {**decoder, **history}.items():
        wanted = rounded(x) if name.startswith("history.") and name.endswith(".weight") else x
        np.testing.assert_array_equal(arrays[name], wanted, err_msg=name)
    weights.convert(run, tmp_path / "native", "float32")
    again, native, _ = weights.load(tmp_path / "native")
    assert again == config
    for name, x in arrays.items():
        np.testing.assert_array_equal(native[name], x, err_msg=name)


def test_other_layers_are_refused_on_a_folder_that_has_its_own(base, tmp_path):
    config, folder, _, history = base
    run = tmp_path / "run"
    run.mkdir()
    adapters.write(run, adapters.NAME, config, str(folder), history, {})
    with pytest.raises(RequestError, match="already has a history"):
        weights.load(run, kept_layers="every4")


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("adapters.json", "{", "adapters.json is not a complete"),
        ("adapters.json", '{"base": 3}', "adapters.json is not a complete"),
        ("adapters.safetensors", "short", "not a complete safetensors"),
    ],
)
def test_damaged_files_are_named(base, tmp_path, name, content, match):
    config, folder, _, history = base
    run = tmp_path / "run"
    run.mkdir()
    adapters.write(run, adapters.NAME, config, str(folder), history, {})
    (run / name).write_text(content)
    with pytest.raises(RequestError, match=match):
        weights.load(run)


def test_a_base_of_another_shape_is_refused(base, tmp_path):
    config, folder, _, history = base
    run = tmp_path / "run"
    run.mkdir()
    adapters.write(run, adapters.NAME, config, str(folder), history, {})
    mapping = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(mapping | {"num_attention_heads": 2}))
    with pytest.raises(RequestError, match="another shape"):
        weights.load(run)


def test_adapters_take_the_place_of_a_history(base, tmp_path):
    config, folder, decoder, history = base
    weights.convert(folder, tmp_path / "untrained", "float32", kept_layers=[1])
    run = tmp_path / "run"
    run.mkdir()
    adapters.write(run, adapters.NAME, config, str(tmp_path / "untrained"), history, {})
    read, arrays, _ = weights.load(run, "float32")
    assert read == config
    np.testing.assert_array_equal(arrays["history.0.bias"], history["history.0.bias"])
    name = "decoder.layers.1.self_attn.q_proj.weight"
    np.testing.assert_array_equal(arrays[name], decoder[name])


def test_a_preset_without_adapters_of_its_own_stays_as_it_is(base):
    _, folder, _, _ = base
    opened = weights.open_source(folder)
    assert adapters.with_bundled(opened, "no-such-preset") is opened
