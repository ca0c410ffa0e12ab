"""The JAX model against the float64 oracle, and the identities both forms promise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax import model
from combkv_jax.attention import xla
from combkv_jax.cache import Cache, Packed
from combkv_jax.config import plain
from combkv_jax.errors import RequestError
from tests import oracle, tiny

FORMS = ["tanh", "lse"]

# Changes to tiny.comb_config, and samples of (recent tokens, lengths of the chunks).
CASES = {
    "ragged": ({}, [(17, [13, 7]), (1, [1]), (5, []), (9, [5])]),
    "summaries of 5 words": (
        {"cross_layers": (0, 1, 2), "summary_layers": (0, 2), "summary_tokens": 5},
        [(19, [13, 7, 1, 13, 5]), (2, [3]), (23, [])],
    ),
    "every layer": ({"cross_layers": (0, 1, 2)}, [(19, [13, 7, 1, 13, 5]), (2, [3])]),
    "one kv head, first layer, tied": (
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "num_hidden_layers": 2,
            "cross_layers": (0,),
            "tie_word_embeddings": True,
        },
        [(2, []), (19, [2, 13, 1])],
    ),
    "all kv heads, last layers, no sinks, no scaling": (
        {
            "hidden_size": 23,
            "intermediate_size": 31,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "head_dim": 6,
            "cross_layers": (1, 2),
            "chunk_size": 29,
            "sink_tokens": 0,
            "rope_scaling": None,
        },
        [(7, [1]), (3, [29, 23]), (1, [])],
    ),
    "chunks of 1 token": (
        {"chunk_size": 1, "num_hidden_layers": 2, "cross_layers": (1,)},
        [(5, [1, 1, 1]), (3, [1])],
    ),
}


def case(form, name):
    """(config, parameters, batch) of a case."""
    changes, samples = CASES[name]
    config = tiny.comb_config(form, **changes)
    rng = np.random.default_rng(len(name))
    parameters = tiny.random_parameters(rng, config)
    return config, parameters, tiny.packed_batch(rng, config.text.vocab_size, samples)


def random_case(form, seed):
    """A case whose every size is drawn."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(2, 4))
    kept = rng.choice(layers, rng.integers(1, layers + 1), replace=False)
    kv_heads = int(rng.choice([1, 2, 3]))
    config = tiny.comb_config(
        form,
        cross_layers=sorted(map(int, kept)),
        chunk_size=int(rng.choice([2, 7, 17])),
        sink_tokens=int(rng.integers(0, 6)),
        summary_layers=sorted(map(int, rng.choice(kept, rng.integers(0, len(kept) + 1), False))),
        summary_tokens=int(rng.choice([1, 3, 32])),
        num_hidden_layers=layers,
        hidden_size=int(rng.integers(8, 50)),
        intermediate_size=int(rng.integers(8, 70)),
        num_attention_heads=kv_heads * int(rng.choice([1, 2, 3])),
        num_key_value_heads=kv_heads,
        head_dim=2 * int(rng.integers(2, 9)),
        tie_word_embeddings=bool(rng.integers(2)),
        rope_scaling=tiny.SCALING if rng.integers(2) else None,
    )
    samples = [
        (int(rng.integers(1, 20)), rng.integers(1, config.chunk_size + 1, rng.integers(0, 5)))
        for _ in range(3)
    ]
    parameters = tiny.random_parameters(rng, config)
    return config, parameters, tiny.packed_batch(rng, config.text.vocab_size, samples)


def check_against_oracle(config, parameters, batch):
    """K/V of every chunk and logits, all within 1e-4; more tokens, samples and chunks than there
    are (padding) change nothing."""
    samples = oracle.unpack(batch)
    chunks = [chunk for _, chunks in samples for chunk in chunks]
    expected_states = oracle.encode(config, parameters, chunks)
    expected = oracle.forward(config, parameters, batch)
    batch = tiny.padded(batch, tokens=6, segments=2)
    logits, states = tiny.run(tiny.build(config, parameters), batch)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[: len(expected)], expected, rtol=0, atol=1e-4)
    assert len(states) == len(expected_states) == len(config.cross_layers)
    for pair, expected_pair in zip(states, expected_states, strict=True):
        for got, wanted in zip(pair, expected_pair, strict=True):
            np.testing.assert_allclose(got[: len(wanted)], wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(form, name):
    check_against_oracle(*case(form, name))


@pytest.mark.parametrize(("form", "seed"), [("tanh", 11), ("lse", 12)])
def test_drawn_models_against_the_oracle(form, seed):
    check_against_oracle(*random_case(form, seed))


@pytest.mark.parametrize(("form", "in_blocks"), [("tanh", True), ("lse", False), ("lse", True)])
def test_gradients_against_finite_differences_of_the_oracle(form, in_blocks, monkeypatch):
    """Of every parameter, along a direction in which a wrong scale, a wrong entry and a missing
    one all show: the gradient itself plus a random direction of the same length. Also where the
    keys are too many to be attended to at once."""
    tiny.loss_and_gradient.clear_cache()
    if in_blocks:
        monkeypatch.setattr(xla, "LOGITS_BYTES", 0)
        monkeypatch.setattr(xla, "SMALLEST_BLOCK", 5)
    config, parameters, batch = case(form, "one kv head, first layer, tied")
    loss, gradient = tiny.loss_and_gradient(
        tiny.build(config, parameters), tiny.padded(batch, tokens=6, segments=2)
    )
    tiny.loss_and_gradient.clear_cache()
    parameters = oracle.in_float64(parameters)

    def oracle_loss(parameters):
        logits = oracle.forward(config, parameters, batch)
        return oracle.loss(logits, batch["shift_labels"])

    np.testing.assert_allclose(loss, oracle_loss(parameters), rtol=0, atol=1e-4)
    rng = np.random.default_rng(3)
    for name, ours in model.parameters(gradient).items():
        ours = np.asarray(ours, np.float64)
        norm = np.linalg.norm(ours)
        assert norm > 0, name
        other = rng.normal(size=ours.shape)
        direction = ours / norm + other / np.linalg.norm(other)
        up, down = (
            oracle_loss(parameters | {name: parameters[name] + step * direction})
            for step in (1e-5, -1e-5)
        )
        slope = (up - down) / 2e-5
        assert abs(slope - np.sum(ours * direction)) < 1e-3 * norm, name


# Identities


def plain_logits(config, parameters, batch, first_position=0):
    """The decoder alone on the packed recent tokens, its positions from `first_position`."""
    decoder = {name: a for name, a in parameters.items() if name.startswith("decoder.")}
    llama = tiny.build(plain(config.text), decoder)
    if first_position == 0:
        return tiny.logits(llama, {k: batch[k] for k in ("input_ids", "cu_seqlens_q")})

    @jax.jit
    def forward(llama, ids, start):
        index = jnp.arange(ids.size)[None]
        entries = (Packed(start, index + 1),) * config.text.num_hidden_layers
        positions = index - start + first_position
        cache = Cache(entries, positions[:, 0])
        x, _ = llama.decoder(ids, positions, cache, jnp.full(1, ids.size), {})
        return llama.decoder.logits(x[0])

    lengths = np.diff(batch["cu_seqlens_q"])
    start = np.repeat(batch["cu_seqlens_q"][:-1], lengths)[None]
    return forward(llama, batch["input_ids"], start)


def test_closed_tanh_gates_are_the_plain_llama_bit_for_bit():
    config, parameters, batch = case("tanh", "ragged")
    for name, array in parameters.items():
        if name.endswith("_gate"):
            array[:] = 0
    logits = tiny.logits(tiny.build(config, parameters), batch)
    np.testing.assert_array_equal(logits, plain_logits(config, parameters, batch))


def test_closed_lse_gates_are_the_plain_llama_bit_for_bit():
    config, parameters, batch = case("lse", "every layer")
    for name, array in parameters.items():
        if name.endswith(".bias"):
            array[:] = -np.inf
    logits = tiny.logits(tiny.build(config, parameters), batch)
    expected = plain_logits(config, parameters, batch, first_position=config.chunk_size)
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("form", FORMS)
def test_no_history_is_the_plain_llama_bit_for_bit(form):
    """Whether the batch says so with empty arrays, or says nothing."""
    config, parameters, _ = case(form, "ragged")
    rng = np.random.default_rng(4)
    batch = tiny.packed_batch(rng, config.text.vocab_size, [(7, []), (3, [])])
    comb_llama = tiny.build(config, parameters)
    without = {name: batch[name] for name in ("input_ids", "cu_seqlens_q")}
    expected = plain_logits(config, parameters, batch)
    np.testing.assert_array_equal(tiny.logits(comb_llama, without), expected)
    np.testing.assert_array_equal(tiny.logits(comb_llama, batch), expected)
    np.testing.assert_allclose(
        expected, oracle.forward(config, parameters, batch), rtol=0, atol=1e-4
    )


def test_untrained_lse_form_with_every_layer_and_one_chunk_is_the_plain_llama():
    """On chunk + text in a row."""
    config = tiny.comb_config("lse", cross_layers=range(2), num_hidden_layers=2)
    rng = np.random.default_rng(5)
    llama = tiny.random_llama(rng, config.text)
    batch = tiny.packed_batch(rng, config.text.vocab_size, [(11, [13])])
    logits = tiny.logits(tiny.build(config, tiny.untrained(config, llama)), batch)
    both = {
        "input_ids": np.concatenate([batch["chunk_ids"], batch["input_ids"]], axis=1),
        "cu_seqlens_q": np.array([0, 13 + 11]),
    }
    expected = plain_logits(config, llama, both)[13:]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_permuted_chunks_only_permute_keys_and_values(form):
    """Every layer sees the history here: elsewhere the first chunk gives the sinks."""
    config, parameters, batch = case(form, "every layer")
    comb_llama = tiny.build(config, parameters)
    bounds = batch["cu_seqlens_chunk"]
    chunks = np.split(np.arange(bounds[-1]), bounds[1:-1])
    order = [3, 0, 4, 2, 1, 5]  # the last one is the second sample's
    tokens = np.concatenate([chunks[i] for i in order])
    permuted = batch | {
        "chunk_ids": batch["chunk_ids"][:, tokens],
        "cu_seqlens_chunk": np.cumsum([0, *(len(chunks[i]) for i in order)]).astype(np.int32),
    }
    expected, before = tiny.run(comb_llama, batch)
    logits, after = tiny.run(comb_llama, permuted)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-5)
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_allclose(new, old[tokens], rtol=0, atol=5e-5)


def test_permuted_chunks_behind_the_first_change_nothing():
    """The first chunk, whose tokens are the sinks of the other layers, stays where it is."""
    config = tiny.comb_config("lse", cross_layers=(1,), num_hidden_layers=2)
    rng = np.random.default_rng(6)
    parameters = tiny.random_parameters(rng, config)
    batch = tiny.packed_batch(rng, config.text.vocab_size, [(11, [2, 13, 5])])
    ids = batch["chunk_ids"]
    permuted = batch | {
        "chunk_ids": np.concatenate([ids[:, :2], ids[:, 15:], ids[:, 2:15]], axis=1),
        "cu_seqlens_chunk": np.array([0, 2, 7, 20], np.int32),
    }
    comb_llama = tiny.build(config, parameters)
    np.testing.assert_allclose(
        tiny.logits(comb_llama, permuted), tiny.logits(comb_llama, batch), rtol=0, atol=5e-5
    )


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_stays_close(form):
    """bfloat16 keeps 8 bits of a number: over a few layers the logits stay within 5 % of
    their size, on average, of those with the same (rounded) weights and exact arithmetic."""
    config, parameters, batch = case(form, "ragged")
    in_bfloat16 = tiny.build(config, parameters, jnp.bfloat16)
    rounded = {k: np.asarray(x, np.float32) for k, x in model.parameters(in_bfloat16).items()}
    logits = tiny.logits(in_bfloat16, batch)
    expected = oracle.forward(config, rounded, batch)
    assert logits.dtype == jnp.float32
    error = np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2))
    assert error < 0.05


# Names and first values


@pytest.mark.parametrize("tied", [False, True])
def test_untrained_lse_form_starts_as_copies(tied):
    config = tiny.comb_config("lse", tie_word_embeddings=tied)
    llama = tiny.random_llama(np.random.default_rng(7), config.text)
    expected = tiny.untrained(config, llama)
    declared = model.declarations(config)
    assert set(declared) == set(expected)
    copies = model.starts_as(config)
    for name, array in expected.items():
        assert declared[name].shape == array.shape, name
        if ".summary." in name and name.endswith(".weight"):
            assert name not in copies, name
            assert declared[name].init == "normal", name  # its gates of zero keep it out
        elif not name.startswith("decoder."):
            start = llama[copies[name]] if name in copies else np.zeros_like(array)
            np.testing.assert_array_equal(start, array, err_msg=name)
            assert name in copies or declared[name].init == "zeros", name


def test_original_form_starts_as_copies():
    """Every matrix of encoder and history is a copy of the decoder layer it belongs to; gates are
    closed, and norms over a head are at one."""
    config = tiny.comb_config("tanh", cross_layers=(0, 2))
    declared, copies = model.declarations(config), model.starts_as(config)
    new = [name for name in declared if not name.startswith("decoder.")]
    for name in new:
        if name.endswith("_gate"):
            assert declared[name].init == "zeros"
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            assert declared[name].init == "ones"
        else:
            assert declared[copies[name]].shape == declared[name].shape, name
    assert copies["encoder.k_proj.1.weight"] == "decoder.layers.2.self_attn.k_proj.weight"
    assert copies["encoder.layers.0.mlp.up_proj.weight"] == "decoder.layers.0.mlp.up_proj.weight"
    assert (
        copies["history.1.cross_attn.o_proj.weight"] == "decoder.layers.2.self_attn.o_proj.weight"
    )
    assert not set(copies) - set(new)


@pytest.mark.parametrize("form", FORMS)
def test_parameters_and_build_are_inverse(form):
    config, parameters, _ = case(form, "ragged")
    comb_llama = tiny.build(config, parameters)
    back = model.parameters(comb_llama)
    assert list(back) == list(model.declarations(config))
    for name, array in back.items():
        np.testing.assert_array_equal(array, parameters[name], err_msg=name)


def test_build_names_what_is_missing_and_what_is_unknown():
    config, parameters, _ = case("lse", "ragged")
    parameters["history.0.extra"] = parameters.pop("history.1.k_proj.weight")
    parameters.pop("decoder.norm.weight")
    with pytest.raises(RequestError) as error:
        model.build(config, parameters)
    for name in ("history.0.extra", "history.1.k_proj.weight", "decoder.norm.weight"):
        assert name in str(error.value)


def test_init_is_random_and_as_declared():
    config = tiny.comb_config("lse", num_hidden_layers=1, cross_layers=(0,))
    dtype = jnp.bfloat16
    first, again, other = (
        model.parameters(model.init(config, jax.random.key(seed), dtype)) for seed in (0, 0, 1)
    )
    abstract = model.parameters(model.abstract(config, dtype))
    for name, declared in model.declarations(config).items():
        assert first[name].shape == declared.shape == abstract[name].shape
        assert first[name].dtype == jnp.dtype(declared.dtype or dtype) == abstract[name].dtype
        np.testing.assert_array_equal(first[name], again[name])
        values = np.asarray(first[name], np.float32)
        if declared.init == "normal":
            assert not np.array_equal(first[name], other[name]), name
            assert 0.8 < np.std(values) * declared.shape[-1] ** 0.5 < 1.2, name
        else:
            assert np.all(values == {"ones": 1, "zeros": 0}[declared.init]), name
