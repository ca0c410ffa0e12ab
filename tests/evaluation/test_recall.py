"""Recall cases are what they say, and an answer counts when all its digits are right."""

from __future__ import annotations

import json

import numpy as np
import pytest

import combkv_jax
import evaluate
from combkv_jax import console
from combkv_jax.errors import RequestError
from combkv_jax.evaluation import continuation, recall, tasks
from tests import text

pytestmark = pytest.mark.once

CHUNK = 512


def encode(line):
    return list(line.encode())


@pytest.mark.parametrize(("task", "size"), [("passkey", 512 * 9), ("similar", 512 * 5 + 37)])
def test_cases_hold_their_facts_in_whole_chunks(task, size):
    rng = np.random.default_rng(3)
    case = recall.recall_case(encode, rng, task, size, CHUNK, 7)
    assert len(case.tokens) == size
    assert len(case.asked) == 7
    chunks = [bytes(case.tokens[i : i + CHUNK].tolist()) for i in range(0, size, CHUNK)]
    found = [chunk.decode("utf-8", "ignore").count("The secret code of") for chunk in chunks]
    if task == "similar":
        assert found == [8] * 5 + [0]
    else:
        assert sorted(found) == [0, 0, *[1] * 7]
    everything = b"".join(chunks).decode("utf-8", "ignore")
    for fact in case.asked:
        assert everything.count(fact.sentence) == 1
        assert everything.count(fact.name) == 1


def test_people_share_first_names_and_surnames_and_are_enough_for_131072_tokens():
    people = recall.draw_people(np.random.default_rng(0), 341 * recall.FACTS_PER_CHUNK)
    names = [fact.name.split() for fact in people]
    assert len({tuple(name) for name in names}) == len(people)
    assert len({first for first, _ in names}) < 60
    with pytest.raises(RequestError, match="people"):
        recall.draw_people(np.random.default_rng(0), 10**6)


def test_an_answer_counts_when_all_digits_are_right_and_no_more_follow(monkeypatch):
    lm = text.byte_model("lse", 2, chunk_size=CHUNK)
    said = {}

    def ask(lm, case, progress):
        wanted = [fact.digits for fact in case.asked]
        said["wrong"] = wanted[0][:4] + str(9 - int(wanted[0][4]))
        answers = [
            said["wrong"],
            *(w + "0" for w in wanted[1:2]),
            *(w + ". And" for w in wanted[2:]),
        ]
        return list(zip(answers, wanted, strict=True))

    monkeypatch.setattr(recall, "ask_all", ask)
    cell = recall.measure(lm, "passkey", CHUNK * 6, histories=2, questions=10)
    assert (cell.exact, cell.questions, cell.rate) == (6, 10, 0.6)
    assert cell.digits == pytest.approx((8 + 2 * 0.8) / 10)
    assert len(cell.wrong) == 4
    assert not any(tasks.says(said, wanted) for wanted, said in cell.wrong)
    # A history of two chunks holds two passkeys: seven questions need four of them.
    cell = recall.measure(lm, "passkey", CHUNK * 2, histories=1, questions=7)
    assert (cell.histories, cell.questions, cell.facts) == (4, 7, 2)
    cell = recall.measure(lm, "similar", CHUNK * 2, histories=1, questions=7)
    assert (cell.histories, cell.questions, cell.facts) == (1, 7, 16)


def test_questions_are_answered_from_one_history():
    lm = text.byte_model("lse", 2, chunk_size=CHUNK)
    case = recall.recall_case(
        lm.tokens, np.random.default_rng(1), "passkey", CHUNK * 3, CHUNK, ask=3
    )
    answers = recall.ask_all(lm, case)
    assert [wanted for _, wanted in answers] == [fact.digits for fact in case.asked]
    turned = recall.RecallCase(case.tokens, case.asked[::-1])
    assert recall.ask_all(lm, turned) == answers[::-1]


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ([], ["passkey 600", "similar 600", "passkey 700", "similar 700", "continuation"]),
        (["--tasks", "passkey"], ["passkey 600", "passkey 700"]),
        (["--tasks", "continuation", "similar"], ["similar 600", "similar 700", "continuation"]),
        (["--tasks", "continuation"], ["continuation"]),
    ],
)
def test_only_what_is_asked_for_is_measured(asked, wanted, tmp_path, monkeypatch, capsys):
    done = []

    def recalled(lm, task, tokens, **options):
        done.append(f"{task} {tokens}")
        return recall.Recall(task, tokens, 8, 2, 4, 3, 0.875)

    def continued(lm, **options):
        done.append("continuation")
        return continuation.Continuation(4096, 20, 3.0, 2.7, 2.9, 2.5, 2.8)

    monkeypatch.setattr(console, "prepare_jax", lambda: None)  # the tests' own settings stay
    monkeypatch.setattr(combkv_jax, "load", lambda source: text.byte_model("lse", 2))
    monkeypatch.setattr(recall, "measure", recalled)
    monkeypatch.setattr(continuation, "measure", continued)
    assert evaluate.main(["--recall", "600", "700", "--report", str(tmp_path), *asked]) == 0
    assert done == wanted
    found = json.loads((tmp_path / "recall.json").read_text())
    cells = [f"{cell['task']} {cell['tokens']}" for cell in found["recall"]]
    assert cells + ["continuation"] * len(found["continuation"]) == wanted
    shown = capsys.readouterr().out
    assert ("digits right" in shown) == bool(cells)
    said = "The compressed history gives 0.60 of what the full cache gives; half-way is 0.5."
    assert (said in shown) == bool(found["continuation"])


@pytest.mark.parametrize(
    ("task", "size", "match"), [("other", 5000, "other"), ("passkey", 100, "no chunk")]
)
def test_bad_requests_are_refused(task, size, match):
    with pytest.raises(RequestError, match=match):
        recall.recall_case(encode, np.random.default_rng(0), task, size, CHUNK, 3)


def test_names_are_for_judging_alone():
    assert not set(recall.SURNAMES.split()) & set(tasks.NAMES["choose"].split())
