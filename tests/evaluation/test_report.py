"""The command from end to end on a tiny model: choosing, judging, and changing the folder."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

import combkv_jax
import evaluate
from combkv_jax import weights
from combkv_jax.evaluation import selection
from combkv_jax.language_model import LanguageModel
from combkv_jax.model import parameters
from tests import tiny
from tests.weights import files

pytestmark = pytest.mark.once

load = combkv_jax.load  # the real one


class ByteModel(LanguageModel):
    """A token a byte, so that a tiny vocabulary will do."""

    def tokens(self, text, **options):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    config = tiny.llama_config(vocab_size=256, num_hidden_layers=4)
    tensors = tiny.random_llama(np.random.default_rng(31), config)
    folder = tmp_path_factory.mktemp("models") / "plain"
    return files.write_hf(folder, config, {files.hf_name(n): a for n, a in tensors.items()})


@pytest.fixture
def small(hugging_face, tmp_path, monkeypatch):
    """A native folder of the tiny model, and cases that are small."""
    monkeypatch.chdir(tmp_path)
    weights.convert(hugging_face, "native", "float32", kept_layers=[1, 3])
    facts = {"cases": 1, "chunks": 1, "facts_per_chunk": 2}
    monkeypatch.setattr(selection, "TEXT_HISTORY", 256)
    monkeypatch.setattr(
        selection, "CHOOSING", {"facts": facts, "text": {"cases": 1, "next_tokens": 7}}
    )
    judging = {"facts": facts, "text": {"cases": 3, "next_tokens": 11}}
    monkeypatch.setattr(selection, "JUDGING", judging)
    monkeypatch.setattr(selection, "JUDGED_AT_ONCE", 2)
    monkeypatch.setattr(combkv_jax, "load", lambda source: ByteModel(load(source).model))
    return tmp_path / "native"


def test_choosing_changes_the_folder_and_reports(small, capsys):
    arguments = ["--model", "native", "--select-layers", "2", "--score", "facts", "both"]
    assert evaluate.main([*arguments, "--chunk-size", "128", "--debug"]) == 0
    choice = json.loads((small.parent / "report/choice-both.json").read_text())
    removed = [entry["layer"] for entry in choice["removed"]]
    chosen = sorted({0, 1, 2, 3} - set(removed))
    assert len(chosen) == 2

    config = json.loads((small / "config.json").read_text())
    assert config["cross_attention_layers"] == chosen
    assert config["chunk_size"] == 128  # what the layers were chosen with
    arrays = parameters(load(small).model)
    for i, layer in enumerate(chosen):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            np.testing.assert_array_equal(
                arrays[f"history.{i}.{name}.weight"],
                arrays[f"decoder.layers.{layer}.self_attn.{name}.weight"],
            )

    report = json.loads((small.parent / "report/judged.json").read_text())
    assert report["layers"]["chosen for both"] == chosen
    full = report["results"]["all layers (full cache)"]
    assert full["facts"]["questions"] == 2
    assert full["text"]["answer_tokens"] == 33
    assert set(report["results"]["no history"]) == {"facts", "text"}
    rows = (small.parent / "report/judged.md").read_text().splitlines()
    assert len(rows) == 2 + 5
    assert (
        f"native now keeps the history in layers {chosen[0]},{chosen[1]}."
        in capsys.readouterr().out
    )

    # Once more: nothing is chosen anew, and the numbers are the same.
    evaluate.main([*arguments, "--chunk-size", "128"])
    assert json.loads((small.parent / "report/choice-both.json").read_text()) == choice
    assert json.loads((small.parent / "report/judged.json").read_text()) == report
    # Settings that differ are another choice.
    assert evaluate.main([*arguments, "--chunk-size", "127"]) == 2


def test_given_layers_are_judged_and_nothing_is_changed(small, capsys):
    before = (small / "config.json").read_bytes()
    arguments = ["--model", "native", "--chunk-size", "128", "--measure-layers"]
    assert evaluate.main([*arguments, "0,2", "1,3"]) == 0
    report = json.loads((small.parent / "report/judged.json").read_text())
    assert list(report["results"])[1:] == ["all layers (full cache)", "every fourth", "0,2", "1,3"]
    assert (small / "config.json").read_bytes() == before
    assert evaluate.main([*arguments, "2,4"]) == 2
    assert "0..3" in capsys.readouterr().err


def test_a_trained_history_is_left_alone(small, capsys, monkeypatch):
    model = load(small).model
    model.history[1].bias[...] = jnp.ones(4)
    monkeypatch.setattr(combkv_jax, "load", lambda source: ByteModel(model))
    assert evaluate.main(["--model", "native", "--select-layers"]) == 2
    assert "trained for layers [1, 3]" in capsys.readouterr().err
    assert not (small.parent / "report").exists()


def test_the_original_form_has_nothing_to_choose(small, capsys, monkeypatch):
    config = tiny.comb_config("tanh", (1, 2))
    model = tiny.build(config, tiny.random_parameters(np.random.default_rng(0), config))
    monkeypatch.setattr(combkv_jax, "load", lambda source: ByteModel(model))
    assert evaluate.main(["--select-layers"]) == 2
    assert "encoder 'layers'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Give --recall"),
        (["--select-layers", "0"], "'0'"),
        (["--select-layers", "-3"], "-3"),
        (["--measure-layers", "3,1"], "'3,1'"),
        (["--measure-layers", "1,x"], "'1,x'"),
        (["--measure-layers", "1", "--chunk-size", "none"], "'none'"),
        (["--select-layers", "--score", "speed"], "'speed'"),
        (["--select-layers", "--report", __file__], "is not a folder"),
        (["--select-layers", "5", "--model", "native"], "5 layers"),
        (["--select-layers", "--chunk-size", "30", "--model", "native"], "chunk_size is 30"),
        (["--recall", "--tasks", "needle"], "'needle' is not one of passkey, similar"),
    ],
)
def test_wrong_requests_are_one_sentence(arguments, said, small, capsys):
    assert evaluate.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.strip().count("\n") == 0
