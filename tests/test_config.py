"""Configurations in and out of the config.json files of others, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from combkv_jax.config import (
    LLAMA_3_1_8B,
    PRESETS,
    CombConfig,
    LlamaConfig,
    every_fourth,
    plain,
    read_config,
)
from combkv_jax.errors import RequestError
from tests import tiny

SCALING = tiny.llama_config().to_hf()["rope_scaling"]


@pytest.mark.parametrize("config", [LLAMA_3_1_8B, tiny.llama_config(rope_scaling=None)])
def test_a_llama_comes_back_from_its_config_json(config):
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_the_newer_rope_parameters_are_the_older_fields():
    hf = LLAMA_3_1_8B.to_hf()
    scaling = hf.pop("rope_scaling")
    hf["rope_parameters"] = {**scaling, "rope_theta": hf.pop("rope_theta")}
    assert LlamaConfig.from_hf(hf) == LLAMA_3_1_8B


@pytest.mark.parametrize("gate", ["lse", "tanh"])
def test_a_comb_model_comes_back_from_its_config_json(gate):
    config = dataclasses.replace(tiny.comb_config(gate), chunk_token_index=7)
    assert CombConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_the_original_s_config_json_comes_back(golden_folder):
    theirs = read_config(golden_folder)
    ours = CombConfig.from_json(theirs).to_combllama()
    known = {k: v for k, v in theirs.items() if k not in ("text_config", "q_lens", "chunk_lens")}
    assert {k: ours[k] for k in known} == known
    assert {k: ours["text_config"][k] for k in theirs["text_config"]} == theirs["text_config"]


def test_presets_fit_their_models():
    assert every_fourth(32) == (3, 7, 11, 15, 19, 23, 27, 31)
    preset = PRESETS["smollm2-135m"]
    assert len(preset.cross_layers) == 7  # a quarter of 30, rounded down
    assert max(preset.cross_layers) < 30


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; only 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_theta": None}, "lacks rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim is 7; rotary embedding needs an even one"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be positive"),
        ({"vocab_size": 97.5}, "vocab_size is 97.5; it must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be a whole number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; it must be a number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf; it must be positive and finite"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; it must be positive and finite"),
        ({"rope_scaling": SCALING | {"factor": 0}}, "factor is 0; it must be positive"),
        ({"rope_scaling": SCALING | {"factor": "8"}}, "factor is '8'; it must be a number"),
        (
            {"rope_scaling": SCALING | {"low_freq_factor": 4.0}},
            "high_freq_factor 4.0 must be above",
        ),
        (
            {"rope_scaling": SCALING | {"original_max_position_embeddings": 64.5}},
            "original_max_position_embeddings is 64.5; it must be a whole number",
        ),
    ],
)
def test_what_is_no_llama_is_refused_in_words(changes, words):
    with pytest.raises(RequestError, match=words):
        LlamaConfig.from_hf(tiny.llama_config().to_hf() | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gate": "tanh"}, "encoder 'decoder' with gate 'tanh' is no known form"),
        ({"cross_layers": (2, 1)}, "must be ascending"),
        ({"cross_layers": (1, 1)}, "without repeats"),
        ({"cross_layers": (0, 3)}, "within 0..2"),
        ({"cross_layers": (0, 1.5)}, "a cross layer is 1.5; it must be a whole number"),
        ({"chunk_size": 0}, "chunk_size is 0; it must be within 1"),
        ({"chunk_size": 384.5}, "chunk_size is 384.5; it must be a whole number"),
        ({"chunk_size": 10**12}, "chunk_size is 1000000000000; it must be within"),
        ({"sink_tokens": -1}, "sink_tokens is -1; it must be within 0"),
        ({"sink_tokens": 10**12}, "sink_tokens is 1000000000000; it must be within 0"),
        ({"sink_tokens": "4"}, "sink_tokens is '4'; it must be a whole number"),
        ({"chunk_token_index": "<c>"}, "chunk_token_index is '<c>'; it must be a whole number"),
    ],
)
def test_what_is_no_comb_model_is_refused_in_words(changes, words):
    with pytest.raises(RequestError, match=words):
        dataclasses.replace(tiny.comb_config("lse"), **changes)


def test_a_newer_format_is_refused():
    newer = plain(LLAMA_3_1_8B).to_json() | {"format_version": 99}
    with pytest.raises(RequestError, match="format_version is 99; this release reads 1"):
        CombConfig.from_json(newer)
