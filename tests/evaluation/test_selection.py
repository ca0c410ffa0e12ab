"""The greedy choice of layers against one written out, and the command around it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from combkv_jax.config import plain
from combkv_jax.errors import RequestError
from combkv_jax.evaluation import selection
from combkv_jax.evaluation.probe import Probe, Questions
from combkv_jax.evaluation.tasks import FactCase, TextCase
from tests import tiny

LAYERS = 6


@pytest.fixture(scope="module")
def probes():
    rng = np.random.default_rng(21)
    config = tiny.llama_config(num_hidden_layers=LAYERS)
    decoder = tiny.build(plain(config), tiny.random_llama(rng, config)).decoder

    def draw(*shape):
        return rng.integers(0, 97, shape).astype(np.int32)

    facts = [FactCase(tuple(draw(1, 7)), ((draw(3), draw(2)), (draw(2), draw(5))))] * 2
    text = [TextCase(tuple(draw(2, 7)), draw(9))]
    return {
        kind: Probe.encode(decoder, Questions.from_cases(cases), 2)
        for kind, cases in (("facts", facts), ("text", text))
    }


def greedy(probes, keep):
    """Every layer tried at every step, each from the beginning."""

    def nll(kind, visible):
        return probes[kind].predict(probes[kind].start, visible, 0).mean_nll

    scale = {kind: (nll(kind, range(LAYERS)), nll(kind, ())) for kind in probes}

    def loss(visible):
        parts = []
        for kind, (every, none) in scale.items():
            parts.append((nll(kind, visible) - every) / (none - every if none > every else 1))
        return sum(parts) / len(parts)

    kept, losses = list(range(LAYERS)), []
    while len(kept) > keep:
        tried = {i: loss([j for j in kept if j != i]) for i in kept}
        gone = min(tried, key=tried.get)
        kept.remove(gone)
        losses.append((gone, tried[gone]))
    return tuple(kept), losses


@pytest.mark.parametrize("kinds", [("facts",), ("text",), ("facts", "text")])
def test_the_choice_is_the_greedy_one(probes, kinds, tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "TRIED", LAYERS)  # nothing is skipped
    some = {kind: probes[kind] for kind in kinds}
    path = tmp_path / "choice.json"
    chosen = selection.Elimination(path, some, {}).run(2, "Choosing")
    expected, losses = greedy(some, 2)
    assert chosen == expected
    removed = json.loads(path.read_text())["removed"]
    assert [entry["layer"] for entry in removed] == [layer for layer, _ in losses]
    np.testing.assert_allclose([e["loss"] for e in removed], [x for _, x in losses], atol=1e-5)


def test_skipping_layers_tries_fewer_and_says_what_it_found(probes, tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "TRIED", 1)
    count = [0]
    predict = Probe.predict

    def counted(self, state, visible, first):
        count[0] += 1
        return predict(self, state, visible, first)

    monkeypatch.setattr(Probe, "predict", counted)
    some = {"facts": probes["facts"]}
    elimination = selection.Elimination(tmp_path / "choice.json", some, {})
    chosen = elimination.run(1, "Choosing")
    assert len(chosen) == 1
    assert count[0] < 2 + sum(range(2, LAYERS + 1)) + LAYERS - 1
    left = some["facts"].predict(some["facts"].start, chosen, 0).mean_nll
    assert elimination.state["removed"][-1]["nll"]["facts"] == pytest.approx(left, abs=1e-6)


def test_a_choice_that_was_stopped_goes_on(probes, tmp_path):
    whole = selection.Elimination(tmp_path / "whole.json", probes, {"a": (1,)}).run(1, "Choosing")
    path = tmp_path / "parts.json"
    for keep in (5, 3, 1):
        parts = selection.Elimination(path, probes, {"a": (1,)}).run(keep, "Choosing")
        assert len(parts) == keep
    assert parts == whole
    assert json.loads(path.read_text()) == json.loads((tmp_path / "whole.json").read_text())
    # More layers than were left: the first removals alone.
    assert len(selection.Elimination(path, probes, {"a": (1,)}).run(4, "Choosing")) == 4


def test_a_file_of_something_else_is_refused(probes, tmp_path):
    path = tmp_path / "choice.json"
    selection.Elimination(path, probes, {"a": 1}).run(5, "Choosing")
    with pytest.raises(RequestError, match="other settings"):
        selection.Elimination(path, probes, {"a": 2})
    for text in ("", "[]", "{}", "\xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(RequestError, match="is not a choice of layers"):
            selection.Elimination(path, probes, {"a": 1})


def test_where_history_does_not_help_the_loss_is_in_nats(probes, tmp_path):
    elimination = selection.Elimination(tmp_path / "choice.json", {"facts": probes["facts"]}, {})
    elimination.state["scales"] = {"facts": {"every": 3.0, "none": 5.0}}
    assert elimination.loss({"facts": 4.0}) == 0.5
    elimination.state["scales"] = {"facts": {"every": 3.0, "none": 2.0}}
    assert elimination.loss({"facts": 4.0}) == 1.0
