"""Is the judge itself right? Held against the original's data and against transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from combkv_jax.config import CombConfig
from tests import oracle, tiny


def test_original_form_against_the_golden_data(golden_folder):
    config = CombConfig.from_json(json.loads((golden_folder / "config.json").read_text()))
    weights = load_file(golden_folder / "model.safetensors")
    parameters = {tiny.from_combllama_name(name): array for name, array in weights.items()}
    parameters.pop(None)
    data = load_file(golden_folder / "io.safetensors")

    chunks = [chunk for _, chunks in oracle.unpack(data) for chunk in chunks]
    assert [len(chunk) for chunk in chunks] == [12, 7, 20]
    states = oracle.encode(config, parameters, chunks)
    assert len(states) == len(config.cross_layers)
    for i, (key, value) in enumerate(states):
        np.testing.assert_allclose(key, data[f"cross_states.{i}.key"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(value, data[f"cross_states.{i}.value"], rtol=0, atol=1e-5)
    logits = oracle.forward(config, parameters, data)
    np.testing.assert_allclose(logits, data["logits"][0], rtol=0, atol=1e-5)
    loss = oracle.loss(logits, data["shift_labels"])
    np.testing.assert_allclose(loss, data["loss"][0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("scaling", [None, tiny.SCALING], ids=["plain", "llama3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_plain_llama_against_transformers(kv_heads, tied, scaling):
    torch = pytest.importorskip("torch", reason="the oracle here is transformers, on torch")
    transformers = pytest.importorskip("transformers")
    config = tiny.llama_config(
        num_key_value_heads=kv_heads, tie_word_embeddings=tied, rope_scaling=scaling
    )
    rng = np.random.default_rng(kv_heads)
    parameters = tiny.random_llama(rng, config)
    ids = rng.integers(0, config.vocab_size, 23)
    positions = np.arange(5, 28)

    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_hf())).double()
    tiny.load_into_transformers(reference, parameters)
    with torch.no_grad():
        expected = reference(
            torch.tensor(ids)[None], position_ids=torch.tensor(positions)[None]
        ).logits[0]
    logits = oracle.llama(config, parameters, ids, positions)
    # transformers keeps its rotary angles in float32.
    np.testing.assert_allclose(logits, expected.numpy(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("sink_tokens", [0, 4])
@pytest.mark.parametrize("chunks", [[13], [13, 1, 5], [3, 13]])
def test_untrained_comb_form_is_attention_under_a_mask(chunks, sink_tokens):
    """With copies and gates of zero, one softmax over both sources is ordinary attention in which
    chunks see only themselves, and recent tokens see the history or only its sinks."""
    config = tiny.comb_config("lse", cross_layers=(0, 2), sink_tokens=sink_tokens)
    text = config.text
    rng = np.random.default_rng(sum(chunks))
    llama = tiny.random_llama(rng, text)
    batch = tiny.packed_batch(rng, text.vocab_size, [(7, chunks)])
    logits = oracle.forward(config, tiny.untrained(config, llama), batch)

    owner = np.repeat(np.arange(len(chunks) + 1), [*chunks, 7])  # the last one is the recent text
    recent = owner == len(chunks)
    visible = np.tril(owner[:, None] == owner[None])
    sinks = np.arange(len(owner)) < min(sink_tokens, chunks[0])
    ends = np.cumsum(chunks)[owner.clip(max=len(chunks) - 1)]
    positions = config.chunk_size + np.arange(len(owner)) - ends

    p = oracle.in_float64(llama)
    x = p["decoder.embed_tokens.weight"][
        np.concatenate([batch["chunk_ids"][0], batch["input_ids"][0]])
    ]
    for layer in range(text.num_hidden_layers):
        name = f"decoder.layers.{layer}"
        shared = ~recent if layer in config.cross_layers else sinks
        h = oracle.rms_norm(text, x, p[f"{name}.input_layernorm.weight"])
        query, key, value = (
            oracle.heads(text, h, p[f"{name}.self_attn.{kind}_proj.weight"]) for kind in "qkv"
        )
        query, key = (oracle.rotary(text, y, positions) for y in (query, key))
        mask = visible | (recent[:, None] & shared[None])
        out, _ = oracle.attention(text, query, key, value, mask)
        x = x + out.reshape(len(x), -1) @ p[f"{name}.self_attn.o_proj.weight"].T
        x = x + oracle.feed_forward(text, p, name, x)
    np.testing.assert_allclose(logits, oracle.head(text, p, x)[recent], rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk", [13, 5, 1])
def test_untrained_comb_form_with_every_layer_and_one_chunk_is_the_plain_llama(chunk):
    """A chunk shorter than chunk_size only moves everything: rotary attention sees distances."""
    config = tiny.comb_config("lse", cross_layers=range(3))
    rng = np.random.default_rng(chunk)
    llama = tiny.random_llama(rng, config.text)
    batch = tiny.packed_batch(rng, config.text.vocab_size, [(11, [chunk])])
    logits = oracle.forward(config, tiny.untrained(config, llama), batch)
    both = np.concatenate([batch["chunk_ids"][0], batch["input_ids"][0]])
    plain = oracle.llama(config.text, llama, both, np.arange(len(both)))
    np.testing.assert_allclose(logits, plain[chunk:], rtol=0, atol=1e-10)


def test_closed_comb_gate_is_the_plain_llama_behind_the_chunk():
    config = tiny.comb_config("lse", cross_layers=range(3))
    rng = np.random.default_rng(1)
    llama = tiny.random_llama(rng, config.text)
    parameters = tiny.untrained(config, llama)
    for i in range(3):
        parameters[f"history.{i}.bias"][:] = -np.inf
    batch = tiny.packed_batch(rng, config.text.vocab_size, [(11, [13, 2])])
    logits = oracle.forward(config, parameters, batch)
    plain = oracle.llama(config.text, llama, batch["input_ids"][0], np.arange(13, 24))
    np.testing.assert_array_equal(logits, plain)


def test_loss_counts_labelled_tokens_only():
    logits = np.log([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]])
    assert oracle.loss(logits, [[1, -100, 2]]) == pytest.approx(-(np.log(0.25) + np.log(0.6)) / 2)
