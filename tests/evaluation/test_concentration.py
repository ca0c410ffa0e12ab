"""Which layers the tailor cache codes: measured as NumPy would, and kept beside the weights."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

import combkv_jax
import evaluate
from combkv_jax import weights
from combkv_jax.config import plain
from combkv_jax.errors import RequestError
from combkv_jax.evaluation import concentration
from combkv_jax.language_model import LanguageModel
from combkv_jax.weights import tailored
from tests import oracle, text, tiny
from tests.weights import files

pytestmark = pytest.mark.once


class ByteModel(LanguageModel):
    """A token a byte."""

    def tokens(self, text, **options):
        return np.frombuffer(text.encode()[:500], np.uint8).astype(np.int32)


def model(seed, dtype=jnp.float32):
    """A tiny model and its parameters."""
    config = plain(tiny.llama_config(vocab_size=256))
    parameters = tiny.random_parameters(np.random.default_rng(seed), config)
    return tiny.build(config, parameters, dtype), parameters


def by_hand(config, parameters, ids):
    """1 - the sum of each query's largest twentieth, a head and a query at a time: [layers]."""
    p = oracle.in_float64(parameters)
    x, position = p["decoder.embed_tokens.weight"][ids], np.arange(len(ids))
    shares = []
    for layer in range(config.num_hidden_layers):
        name = f"decoder.layers.{layer}"
        h = oracle.rms_norm(config, x, p[f"{name}.input_layernorm.weight"])
        query, key = (
            oracle.rotary(
                config, oracle.heads(config, h, p[f"{name}.self_attn.{w}.weight"]), position
            )
            for w in ("q_proj", "k_proj")
        )
        each = []
        for head in range(config.num_attention_heads):
            own = key[:, head * config.num_key_value_heads // config.num_attention_heads]
            for t in range(max(len(ids) - 32, 0), len(ids)):
                weight = np.exp(own[: t + 1] @ query[t, head] / config.head_dim**0.5)
                weight = np.sort(weight / weight.sum())[::-1]
                each.append(1 - weight[: -(-(t + 1) // 20)].sum())
        shares.append(np.mean(each))
        x = oracle.llama_layer(config, p, name, x, position, causal=True)
    return np.array(shares)


@pytest.mark.parametrize("tokens", [64, 141])
def test_it_measures_what_the_largest_weights_leave(tokens):
    built, parameters = model(1)
    lm = ByteModel(built)
    result = concentration.classify(lm, tokens)
    page = lm.tokens(concentration.tasks.bundled_text("emma"))[:tokens]
    want = by_hand(lm.config.text, parameters, page)
    np.testing.assert_allclose(result.outside, want, atol=1e-5)
    assert result.tokens == tokens
    between = float(np.sort(want)[1] + np.sort(want)[2]) / 2
    result = concentration.classify(lm, tokens, between)
    assert result.quantized == (int(np.argmax(want)),)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"tokens": 63},
            "63 tokens were asked for to classify layers by; this model takes 64 to 512",
        ),
        ({"tokens": 513}, "513 tokens"),
        ({"threshold": 0.0}, r"threshold is 0.0; it must lie between 0 and 1"),
        ({"threshold": float("nan")}, "threshold is nan"),
    ],
)
def test_wrong_requests_are_refused_in_words(options, words):
    with pytest.raises(RequestError, match=words):
        concentration.classify(ByteModel(model(1)[0]), **{"tokens": 64, **options})


def test_a_file_belongs_to_its_weights_in_any_dtype(tmp_path):
    path, own = tmp_path / "tailor.json", model(1)[0]
    result = tailored.Classification((0, 2), (0.5, 0.1, 0.3), 0.2, 64)
    tailored.write(path, own, result)
    assert tailored.read(path, own) == result
    assert tailored.read(path, model(1, jnp.bfloat16)[0]) == result
    with pytest.raises(RequestError, match="was made for other weights; make it anew by evaluate"):
        tailored.read(path, model(2)[0])
    whole = json.loads(path.read_text())
    for spoilt in (
        "{",
        "[]",
        "{}",
        json.dumps(whole | {"quantized": [3]}),
        json.dumps(whole | {"quantized": ["0"]}),
        json.dumps(whole | {"quantized": None}),
        json.dumps(whole | {"more": 1}),
    ):
        path.write_text(spoilt)
        with pytest.raises(RequestError, match="is not a classification of this model's layers"):
            tailored.read(path, own)


def test_the_command_keeps_it_where_the_cache_finds_it(tmp_path, capsys):
    config = tiny.llama_config(vocab_size=257)
    tensors = tiny.random_llama(np.random.default_rng(3), config)
    folder = tmp_path / "plain"
    files.write_hf(folder, config, {files.hf_name(n): a for n, a in tensors.items()})
    text.byte_tokenizer().save_pretrained(folder)
    assert evaluate.main(["--model", str(folder), "--classify", "100", "--threshold", "0.01"]) == 0
    assert f"{folder / 'tailor.json'} now says so." in capsys.readouterr().out
    kept = json.loads((folder / "tailor.json").read_text())
    assert kept["tokens"] == 100
    assert kept["quantized"] == [i for i, share in enumerate(kept["outside"]) if share > 0.01]

    (folder / "tailor.json").write_text(json.dumps(kept | {"quantized": [1]}))
    weights.convert(folder, tmp_path / "native")  # goes along, and to bfloat16
    lm = combkv_jax.load(tmp_path / "native")
    cache = lm.start([np.array([5])], max_new_tokens=3, cache="tailor").cache
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert kinds == ["Tailor", "QuantizedTokens", "Tailor"]
    assert cache.layers[0].key.shape[2] == 64 + 3  # the window, and what will be generated
