"""The objective lookup against a plain NumPy reference, and what a run with it learns."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax.errors import RequestError
from combkv_jax.model import parameters
from combkv_jax.training import lookup, step
from combkv_jax.training.settings import FIRST_GROUPS
from combkv_jax.training.taps import encode_questions, encode_taps
from tests import oracle, text, tiny
from tests.training import small
from tests.training.test_recipe import settings

CHUNKS, SIZE, QUESTIONS, TOKENS = 3, 13, 4, 11
STAND_FOR = 7  # chunks


@pytest.fixture(scope="module")
def case():
    """A model, chunks, questions about them, and all of it as a batch."""
    rng = np.random.default_rng(3)
    config = tiny.comb_config("lse", cross_layers=(0, 1, 2), chunk_size=SIZE, summary_layers=(1, 2))
    parameters = tiny.random_parameters(rng, config)
    model = tiny.build(config, parameters)
    vocab = config.text.vocab_size
    ids = rng.integers(0, vocab, (CHUNKS, SIZE)).astype(np.int32)
    asked = rng.integers(0, vocab, (QUESTIONS, TOKENS)).astype(np.int32)
    layers = config.summary_layers
    taps = jax.jit(encode_taps, static_argnums=1)(model.decoder, layers, ids)
    of_asked = jax.jit(encode_questions, static_argnums=(1, 4))(
        model.decoder, layers, asked, ids[0, : config.sink_tokens], SIZE
    )
    batch = lookup.Batch(
        tuple(taps),
        ids,
        tuple(of_asked),
        asked,
        np.array([0, 5, 300, 4096], np.int32),
        rng.integers(0, TOKENS, (QUESTIONS, 2)).astype(np.int32),
        rng.integers(0, CHUNKS * SIZE, (QUESTIONS, 2)).astype(np.int32),
        np.array([[1, 1], [1, 0], [1, 1], [0, 0]], np.float32),
        np.arange(vocab, dtype=np.int32),
        np.float32(math.log(STAND_FOR)),
    )
    return config, parameters, batch


def reference(config, parameters, batch) -> np.ndarray:
    """log of the share of attention, [layers, Q, A, H], and the same numbers' target."""
    p, c = oracle.in_float64(parameters), config.text
    first = oracle.comb_chunk_layers(config, p, batch.ids[0])
    positions = SIZE + np.arange(TOKENS)
    out = []
    for layer in config.summary_layers:
        i = config.cross_layers.index(layer)
        key = np.concatenate([oracle.comb_chunk(config, p, chunk)[i][0] for chunk in batch.ids])
        rows = []
        asked = zip(batch.asked_ids, batch.behind, batch.column, batch.target, strict=True)
        for ids, behind, columns, targets in asked:
            x = p["decoder.embed_tokens.weight"][ids]
            for before in range(layer):
                # Only the decoder's own projections make what stands in front.
                k, v = decoder_keys(config, p, batch.ids[0], before)
                sinks = (k[: config.sink_tokens], v[: config.sink_tokens])
                name = f"decoder.layers.{before}"
                x = oracle.llama_layer(c, p, name, x, positions, causal=True, before=sinks)
            h = oracle.rms_norm(c, x, p[f"decoder.layers.{layer}.input_layernorm.weight"])
            name = f"history.{i}"
            query = oracle.rotary(
                c, oracle.heads(c, h, p[f"{name}.q_proj.weight"]), behind + positions
            )
            told = oracle.summary(config, p, name, h, ids, positions)
            share = p[f"{name}.summary.query_gate"][:, None]
            query = query + share * np.repeat(told, c.num_attention_heads // told.shape[1], axis=1)
            sharp = p[f"{name}.scale"] + p[f"{name}.scale_slope"] * math.log(STAND_FOR)
            query = query * np.exp(sharp)[:, None]
            group = c.num_attention_heads // c.num_key_value_heads
            scores = np.stack(
                [query[:, n] @ key[:, n // group].T for n in range(c.num_attention_heads)], axis=1
            ) / math.sqrt(c.head_dim)
            found = []
            for column, target in zip(columns, targets, strict=True):
                weight = np.exp(scores[column])  # [H, S]
                often = np.full(weight.shape[1], STAND_FOR / CHUNKS)
                often[target] = 1
                found.append(np.log(weight[:, target] / (weight @ often)))
            rows.append(found)
        out.append(rows)
    assert len(first) == c.num_hidden_layers
    return np.array(out)


def decoder_keys(config, p, chunk, layer):
    """K/V that the decoder itself makes of a chunk."""
    none = dataclasses.replace(config, cross_layers=(), summary_layers=())
    return oracle.comb_chunk_layers(none, p, chunk)[layer]


def test_loss_is_the_share_of_attention_that_the_plain_reference_gives(case):
    config, parameters, batch = case
    trained, frozen = step.split({n: jnp.asarray(x) for n, x in parameters.items()})
    objective = lookup.Lookup(config)
    loss = jax.jit(lambda t: objective.loss(t, frozen, batch, objective.totals(batch)))
    value, found = loss(trained)
    share = reference(config, parameters, batch)
    mean = np.mean(share, axis=-1)  # over heads
    wanted = -(mean * batch.weight).sum(axis=(1, 2)) / (batch.weight.sum() * 2)
    # Taps are rounded to float16.
    np.testing.assert_allclose(found.nll, wanted, rtol=3e-3)
    np.testing.assert_allclose(value, wanted.sum(), rtol=3e-3)
    assert found.sought.tolist() == [3, 2]
    assert np.all(found.hits <= found.sought)


def test_a_disguise_changes_what_words_are_and_nothing_else(case):
    """Words renamed in chunks and questions alike match as before where the values that are made
    of them are renamed too."""
    config, parameters, batch = case
    trained, frozen = step.split({n: jnp.asarray(x) for n, x in parameters.items()})
    objective = lookup.Lookup(config)
    loss = jax.jit(lambda frozen, batch: objective.loss(trained, frozen, batch, 1.0)[0])
    order = np.random.default_rng(0).permutation(config.text.vocab_size)
    name = "decoder.embed_tokens.weight"
    renamed = frozen | {name: frozen[name][np.argsort(order)]}
    plain, disguised = loss(frozen, batch), loss(frozen, batch._replace(disguise=order))
    assert abs(plain - disguised) > 1e-3 * abs(plain)
    np.testing.assert_allclose(loss(renamed, batch._replace(disguise=order)), plain, rtol=1e-6)


def test_gates_are_opened_once():
    trained = {
        "history.0.summary.query_gate": jnp.zeros(3),
        "history.0.summary.key_gate": jnp.zeros(2),
        "history.0.bias": jnp.zeros(3),
    }
    opened = lookup.opened(trained)
    assert opened["history.0.summary.key_gate"].tolist() == [lookup.OPEN] * 2
    assert opened["history.0.bias"].tolist() == [0] * 3
    moved = opened | {"history.0.summary.query_gate": jnp.array([0.0, 0.0, 1.0])}
    assert lookup.opened(moved) is moved


@pytest.fixture(scope="module")
def lm():
    return text.byte_model("lse", 5, chunk_size=160, hidden_size=48)


def test_a_batch_asks_what_no_two_facts_answer(lm, monkeypatch):
    monkeypatch.setattr(lookup, "TOKENS", 120)  # a token a byte
    monkeypatch.setattr(lookup, "HELD_OUT", 4)
    monkeypatch.setattr(lookup, "EACH", 2)
    lessons = lookup.LookupLessons(lm, wanted())
    lessons.begin(0)
    batch, _ = lessons.batch(3)
    again, _ = lessons.batch(3)
    jax.tree.map(np.testing.assert_array_equal, batch, again)
    resumed = lookup.LookupLessons(lm, wanted())
    resumed.begin(3)
    assert resumed.pool.made > FIRST_GROUPS  # a group is replaced by then
    jax.tree.map(np.testing.assert_array_equal, batch, resumed.batch(3)[0])
    pool, seen = lessons.pool, 0
    for number in range(4):
        batch = jax.tree.map(lambda x: x[0], lessons.batch(number)[0])
        flat = batch.ids.reshape(-1)
        for ids, column, target, weight in zip(
            batch.asked_ids, batch.column, batch.target, batch.weight, strict=True
        ):
            for at, where, counts in zip(column, target, weight, strict=True):
                if counts and at + 1 < len(ids) and ids[at + 1]:
                    assert ids[at + 1] == flat[where]  # what is to be said stands there
                    seen += 1
    assert seen > 20
    assert len(pool.taps) == len(lm.config.summary_layers)
    trained, frozen = step.split(parameters(lm.model))
    assert lessons.check(trained, frozen)["score"] > 0


def wanted():
    return settings(model="tiny", pool=6, fresh=2, seed=1, objective="lookup")


def test_a_model_without_summaries_is_refused(lm):
    bare = text.byte_model("lse", 5, chunk_size=160, summary_layers=())
    with pytest.raises(RequestError, match="no summary layers"):
        lookup.LookupLessons(bare, wanted())


def test_a_run_lowers_its_loss(tmp_path):
    """`train.py --objective lookup` in a process of its own."""
    model, out = small.write_model(tmp_path / "model", layers=2), tmp_path / "run"
    small.end(
        small.start(
            *("--model", model, "--out", out, "--objective", "lookup", "--steps", 12),
            cache=tmp_path / "cache",
        )
    )
    losses = small.losses(out)
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
