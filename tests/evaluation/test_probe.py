"""The layer-by-layer probe against the whole model it stands for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from combkv_jax.chunking import Sample, pack
from combkv_jax.config import plain
from combkv_jax.evaluation.metrics import Predicted
from combkv_jax.evaluation.probe import Probe, Questions
from combkv_jax.evaluation.tasks import FactCase, TextCase
from tests import tiny

CHUNK = 13


@pytest.fixture(scope="module")
def llama():
    return tiny.random_llama(np.random.default_rng(3), tiny.llama_config(num_hidden_layers=4))


def draw(rng, *shape):
    return rng.integers(0, 97, shape).astype(np.int32)


def fact_case(rng, chunks):
    questions = tuple((draw(rng, n), draw(rng, 3)) for n in rng.integers(1, 7, 4))
    return FactCase(tuple(draw(rng, chunks, CHUNK)), questions)


def reference(config, parameters, samples):
    """NLL and rightness of answers by one packed forward of a whole model: samples are (chunks,
    prompt, answer)."""
    batch = pack(
        [Sample(np.concatenate([p, a]), np.concatenate([p, a]), tuple(c)) for c, p, a in samples]
    )
    if not batch["chunk_ids"].size:
        batch = {name: batch[name] for name in ("input_ids", "cu_seqlens_q")}
    logits = np.asarray(tiny.logits(tiny.build(config, parameters), batch), np.float64)
    nll, right = [], []
    for end, (_, _, answer) in zip(batch["cu_seqlens_q"][1:], samples, strict=True):
        part = logits[end - len(answer) - 1 : end - 1]
        chosen = part[np.arange(len(answer)), answer]
        nll.append(np.log(np.exp(part).sum(-1)) - chosen)
        right.append(part.argmax(-1) == answer)
    return np.concatenate(nll), np.concatenate(right)


def asked(cases, chunks_of):
    return [(chunks_of(case), *pair) for case in cases for pair in case.questions]


def check(predicted, reference):
    nll, right = reference
    np.testing.assert_allclose(predicted.nll, nll, atol=1e-4)
    np.testing.assert_array_equal(predicted.right, right)


@pytest.mark.parametrize("visible", [(1,), (0, 3), (0, 1, 2, 3)])
def test_any_set_of_layers_is_the_untrained_model_with_those_layers(llama, visible):
    rng = np.random.default_rng(len(visible))
    cases = [fact_case(rng, 3) for _ in range(2)]
    config = tiny.comb_config("lse", visible, CHUNK, num_hidden_layers=4)
    parameters = tiny.untrained(config, llama)
    probe = Probe.encode(tiny.build(config, parameters).decoder, Questions.from_cases(cases), 4)
    samples = asked(cases, lambda case: case.chunks)
    check(probe.predict(probe.start, visible, 0), reference(config, parameters, samples))


def test_one_chunk_in_every_layer_is_plain_attention_over_both(llama):
    rng = np.random.default_rng(11)
    cases = [fact_case(rng, 1) for _ in range(3)]
    config = plain(tiny.llama_config(num_hidden_layers=4))
    probe = Probe.encode(tiny.build(config, llama).decoder, Questions.from_cases(cases), 4)

    def continued(cases):  # the chunk is simply the beginning of the text
        samples = asked(cases, lambda case: case.chunks)
        return [((), np.concatenate([*chunks, p]), a) for chunks, p, a in samples]

    whole = probe.predict(probe.start, range(4), 0)
    check(whole, reference(config, llama, continued(cases)))
    alone = probe.predict_without_history()
    check(alone, reference(config, llama, asked(cases, lambda case: ())))
    moved = [FactCase(cases[(i + 1) % 3].chunks, case.questions) for i, case in enumerate(cases)]
    other = probe.other_history().predict(probe.start, range(4), 0)
    check(other, reference(config, llama, continued(moved)))


def test_a_layer_without_the_history_has_its_first_tokens(llama):
    case = fact_case(np.random.default_rng(13), 2)
    decoder = tiny.build(plain(tiny.llama_config(num_hidden_layers=4)), llama).decoder
    probe = Probe.encode(decoder, Questions.from_cases([case]), 3)
    first = dataclasses.replace(
        probe,
        keys=tuple(key[:, :, :3] for key in probe.keys),
        values=tuple(value[:, :, :3] for value in probe.values),
    )
    sinks_only = probe.predict(probe.start, (), 0).nll
    np.testing.assert_allclose(sinks_only, first.predict(first.start, range(4), 0).nll, atol=1e-6)
    assert not np.allclose(sinks_only, probe.predict(probe.start, range(4), 0).nll, atol=1e-3)


def test_going_on_from_a_layer_is_going_through_all(llama):
    rng = np.random.default_rng(12)
    case = TextCase(tuple(draw(rng, 5, CHUNK)), draw(rng, 18))
    decoder = tiny.build(plain(tiny.llama_config(num_hidden_layers=4)), llama).decoder
    probe = Probe.encode(decoder, Questions.from_cases([case]), 0)
    assert probe.questions.target.tolist() == case.tokens[1:].tolist()
    kept = [0, 1, 3]
    states = probe.states(kept)
    for layer in kept:
        visible = [other for other in kept if other != layer]
        whole = probe.predict(probe.start, visible, 0)
        part = probe.predict(states[layer], visible, layer)
        np.testing.assert_array_equal(whole.nll, part.nll)
    np.testing.assert_array_equal(
        probe.predict(states[-1], kept, 4).nll, probe.predict(probe.start, kept, 0).nll
    )


def test_means_count_what_they_say():
    one = Predicted(np.array([1.0, 2, 3]), np.array([True, True, False]), np.array([0, 0, 1]))
    two = Predicted(np.array([6.0, 8]), np.array([True, True]), np.array([0, 1]))
    both = Predicted.concatenate([one, two])
    assert both.question.tolist() == [0, 0, 1, 2, 3]
    assert (both.questions, both.mean_nll, both.accuracy, both.exact) == (4, 4.0, 0.8, 0.75)
