"""The training loss against the model's own packed forward, and the optimiser's promises."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax.training import step
from combkv_jax.training import taps as taps_module
from combkv_jax.training.rows import Bucket, Piece, RowBuilder
from combkv_jax.training.taps import encode_taps
from tests import tiny

CHUNK, SINKS = 13, 3


@pytest.fixture(scope="module")
def case():
    """A model, a pool of chunks with their taps, rows, and the same as packed samples."""
    rng = np.random.default_rng(20)
    config = tiny.comb_config(
        "lse", chunk_size=CHUNK, sink_tokens=SINKS, summary_layers=(2,), summary_tokens=5
    )
    arrays = {name: jnp.asarray(x) for name, x in tiny.random_parameters(rng, config).items()}
    model = step.build(config, arrays)
    pool = rng.integers(0, config.text.vocab_size, (7, CHUNK)).astype(np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taps_module, "DTYPE", jnp.float32)  # nothing is rounded on the way
        taps = jax.jit(encode_taps, static_argnums=1)(model.decoder, config.cross_layers, pool)
    taps = [np.asarray(x) for x in taps]
    rows, samples = [], []
    for lengths in ([1, 3], [5]):
        row = RowBuilder(Bucket(5, 40, 1.0), CHUNK, SINKS)
        for length in lengths:
            chunks = list(rng.integers(0, len(pool), length))
            row.add_history(chunks, pool[chunks[0], :SINKS])
            for sizes in ([(3, 2, False)], [(1, 5, True), (2, 3, False)]):
                pieces = [
                    Piece(
                        *(rng.integers(0, config.text.vocab_size, n) for n in (p, a)),
                        is_text=is_text,
                        alone=rng.uniform(0, 9, a) if is_text and length == 5 else None,
                    )
                    for p, a, is_text in sizes
                ]
                row.add_segment(pieces)
                samples.append((chunks, np.concatenate([x for p in pieces for x in p[:2]])))
        rows.append(row.finish(0.3))
    return config, arrays, step.stack(rows, pool, taps), pool, samples


def packed(pool, samples):
    """What `CombLlama.__call__` takes."""
    cu = lambda sizes: np.cumsum([0, *sizes]).astype(np.int32)  # noqa: E731
    return {
        "input_ids": np.concatenate([tokens for _, tokens in samples]),
        "cu_seqlens_q": cu([len(tokens) for _, tokens in samples]),
        "chunk_ids": np.concatenate([pool[chunks].reshape(-1) for chunks, _ in samples]),
        "cu_seqlens_k": cu([len(chunks) * CHUNK for chunks, _ in samples]),
        "cu_seqlens_chunk": cu([CHUNK] * sum(len(chunks) for chunks, _ in samples)),
    }


def test_loss_and_gradient_are_those_of_the_packed_model(case):
    config, arrays, batch, pool, samples = case
    trained, frozen = step.split(arrays)
    per_row = [len(samples[:4]), len(samples[4:])]
    used = [sum(len(t) for _, t in samples[:4]), sum(len(t) for _, t in samples[4:])]
    assert per_row == [4, 2]

    def reference(trained):
        logits = step.build(config, {**frozen, **trained})(packed(pool, samples))
        logp = jax.nn.log_softmax(logits)
        total = 0.0
        for r, offset in enumerate((0, used[0])):
            count = int(np.sum(batch.question[r] > -2))
            at = offset + batch.column[r, :count]
            nll, alone = -logp[at, batch.target[r, :count]], batch.alone[r, :count]
            lost = jnp.where(alone < 0, nll, jnp.abs(nll - alone))
            total += jnp.sum(lost * batch.weight[r, :count])
        return total / 2

    ours = jax.jit(step.gradients, static_argnums=3)
    value, gradient, _ = ours(trained, frozen, step.accumulated([batch]), step.Recall(config, 0.0))
    expected, expected_gradient = jax.jit(jax.value_and_grad(reference))(trained)
    np.testing.assert_allclose(value, expected, rtol=2e-4)
    for name, wanted in expected_gradient.items():
        scale = np.abs(wanted).max()
        assert scale > 0, name
        np.testing.assert_allclose(gradient[name], wanted, atol=1e-3 * scale, err_msg=name)


@pytest.mark.once
def test_accumulated_rows_are_one_larger_batch_and_remat_changes_nothing(case):
    config, arrays, batch, _, _ = case
    trained, frozen = step.split(arrays)
    gradients = jax.jit(step.gradients, static_argnums=3)
    objective = step.Recall(config, 0.5)
    value, gradient, rows = gradients(trained, frozen, step.accumulated([batch]), objective)
    one_by_one = [
        jax.tree.map(lambda x, i=i: x[i : i + 1], batch)._replace(
            taps=tuple(x[:, i : i + 1] for x in batch.taps),
            chunk_ids=batch.chunk_ids[:, i : i + 1],
        )
        for i in range(2)
    ]
    parts = step.accumulated(one_by_one)
    for some, goal in (
        (parts, objective),
        (step.accumulated([batch]), step.Recall(config, 0.5, True)),
    ):
        other, wanted, more = gradients(trained, frozen, some, goal)
        np.testing.assert_allclose(other, value, rtol=1e-5)
        np.testing.assert_allclose(np.sum(more.missed), np.sum(rows.missed), rtol=1e-5)
        nll = rows.nll.reshape(more.nll.shape)
        np.testing.assert_allclose(more.nll, nll, rtol=1e-4, atol=1e-5)
        for name, x in gradient.items():
            scale = np.abs(x).max()
            np.testing.assert_allclose(wanted[name], x, atol=5e-5 * scale, err_msg=name)


def test_weights_of_questions_and_text(case):
    batch = case[2]
    assert np.sum(batch.alone >= 0) == 5  # one text is not to be told by its history
    np.testing.assert_allclose(np.sum(batch.weight * (batch.question >= 0)), 2.0, rtol=1e-6)
    np.testing.assert_allclose(np.sum(batch.weight * (batch.question == -1)), 0.6, rtol=1e-6)
    assert not np.any(batch.weight[batch.question == -2])


def test_steps_reduce_the_loss_and_leave_the_decoder(case):
    config, arrays, batch, _, _ = case
    trained, frozen = step.split(arrays)
    optimise = step.optimiser((step.Rates(3e-3, 1e-2, 20, 2, 0.3),), 1.0)
    state = step.State(trained, optimise.init(trained), jnp.int32(0))
    batch, objective = step.accumulated([batch]), step.Recall(config, 0.1)
    losses = []
    for _ in range(20):
        state, measured = step.train_step(state, frozen, batch, objective, optimise)
        losses.append(float(measured.loss))
    assert losses[-1] < 0.8 * losses[0]
    assert set(state.trained) == {n for n in arrays if n.startswith("history.")}


def test_a_step_that_is_not_finite_changes_nothing(case):
    config, arrays, batch, _, _ = case
    trained, frozen = step.split(arrays)
    optimise = step.optimiser((step.Rates(3e-3, 1e-2, 20, 2, 0.3),), 1.0)
    state = step.State(trained, optimise.init(trained), jnp.int32(0))
    before = jax.tree.map(np.array, state)
    batch, objective = step.accumulated([batch]), step.Recall(config, 0.1)
    bad = batch._replace(weight=batch.weight * np.nan)
    for count in (1, 2):
        state, measured = step.train_step(state, frozen, bad, objective, optimise)
        assert not measured.finite
        assert state.skipped == count
    for a, b in zip(
        jax.tree.leaves(before._replace(skipped=0)),
        jax.tree.leaves(state._replace(skipped=0)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    state, measured = step.train_step(state, frozen, batch, objective, optimise)
    assert measured.finite
    assert state.skipped == 0


def test_rates_warm_up_stay_and_fall():
    optimise = step.optimiser((step.Rates(1e-2, 1e-1, steps=30, warmup=5, decay=0.4),), clip=1e9)
    trained = {"history.0.q_proj.weight": jnp.ones(()), "history.0.bias": jnp.ones(())}
    state, moves = optimise.init(trained), []
    for _ in range(30):
        update, state = optimise.update(jax.tree.map(jnp.ones_like, trained), state, trained)
        moves.append([-float(update[name]) for name in trained])
    moves = np.array(moves)
    # Adam's step for a constant gradient is the rate itself.
    np.testing.assert_allclose(moves[4:17], [[1e-2, 1e-1]] * 13, rtol=1e-3)
    np.testing.assert_allclose(moves[0], [2e-3, 2e-2], rtol=1e-3)
    assert np.all(np.diff(moves[18:], axis=0) < 0)
    assert moves[-1, 0] < 1e-4


def test_what_attention_missed_is_every_heads_matter_with_summaries():
    """Of three kept layers the first is in the lower half, the last has a summary."""
    rng = np.random.default_rng(23)
    config = tiny.comb_config("lse", (0, 2, 3), summary_layers=(3,), num_hidden_layers=4)
    rows, tokens, answers, heads = 2, 9, 5, config.text.num_attention_heads
    batch = types.SimpleNamespace(
        sought_last=rng.integers(0, 2, (rows, tokens)),
        column=rng.integers(0, tokens, (rows, answers)),
        question=rng.integers(-1, 2, (rows, answers)),
    )
    log_share = [-rng.exponential(2, (rows, answers, heads)) for _ in range(3)]
    log_share[2][0, 0, 0] = -np.inf
    wanted = 0.0
    for b, a in np.ndindex(rows, answers):
        if batch.question[b, a] >= 0 and batch.sought_last[b, batch.column[b, a]] > 0:
            share = np.exp(log_share[1][b, a])
            wanted -= np.log(1 - np.prod(1 - share)) / 2
            wanted -= np.mean(np.maximum(log_share[2][b, a], step.LEAST)) / 2
    found = [jnp.asarray(x, jnp.float32) for x in log_share]
    assert wanted > 0
    np.testing.assert_allclose(step.missed(config, batch, found), wanted, rtol=1e-4)
