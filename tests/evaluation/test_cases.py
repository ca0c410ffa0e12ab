"""Cases of the comparison: exact contexts that hold their answers, and scores that tell them."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from combkv_jax.errors import RequestError
from combkv_jax.evaluation import cases, tasks

VOCABULARY: dict[str, int] = {}


def encode(text):  # five characters of a word at most, with the white space before them
    pieces = re.findall(r"\s*\S{1,5}|\s+", text)
    return [VOCABULARY.setdefault(piece, len(VOCABULARY)) for piece in pieces]


def decode(ids):
    pieces = list(VOCABULARY)
    return "".join(pieces[i] for i in ids)


def made(name, tokens, count, seed=0):
    return cases.TASKS[name](encode, np.random.default_rng(seed), tokens, count)


def codes(context, prompt):
    """What the context says of the names of a prompt, by name."""
    names = re.findall(r"[A-Z]\w+(?: [A-Z]\w+)?", prompt.removeprefix(" The"))
    return [re.findall(rf" The secret code of {name} is (\d+)\.", context) for name in names]


def variables(context, prompt):
    given = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", context)
    known = {re.search(r"\d{5}", prompt)[0]}
    for name, what in given:  # in the order of the text
        known |= {name} if what in known else set()
    return [name for name, _ in given if name in known]


def listed(context, prompt):
    inside = re.search(r"come much more often than others\.((?: \d+\. [a-z]+)+)", context)[1]
    numbers, words = zip(*re.findall(r"(\d+)\. (\w+)", inside), strict=True)
    assert list(map(int, numbers)) == list(range(1, len(numbers) + 1))
    (common, often), *_ = ranks = Counter(words).most_common()
    assert [n for _, n in ranks[:10]] == [often] * 10
    assert {n for _, n in ranks[10:]} == {often // 10 or 1}
    return [word for word, _ in ranks[:10]]


def coded(context, prompt):
    inside = re.search(r"its dots mean nothing\.((?: (?:\.{4}|[a-z]{6}))+)", context)[1]
    ranks = Counter(inside.split()).most_common()
    assert ranks[0][0] == "...."
    counts = [n for _, n in ranks[:5]]
    assert counts == sorted(set(counts), reverse=True)
    assert abs(counts[1] / counts[0] - 1 / 4) < 1.5 / counts[0]
    return [word for word, _ in ranks[1:4]]


LISTS = {
    "ruler-multivalue": lambda context, prompt: sum(codes(context, prompt), []),
    "ruler-multiquery": lambda context, prompt: sum(codes(context, prompt), []),
    "ruler-vt": variables,
    "ruler-cwe": listed,
    "ruler-fwe": coded,
}
CODES = [name for name in cases.TASKS if name not in LISTS]


@pytest.mark.parametrize("tokens", [1009, 4999])
@pytest.mark.parametrize("name", cases.TASKS)
def test_contexts_are_exact_and_the_same_for_the_same_seed(name, tokens):
    found = made(name, tokens, 3)
    assert sum(len(case.questions) for case in found) == 3
    again, other = made(name, tokens, 3), made(name, tokens, 3, seed=1)
    for case, same, new in zip(found, again, other, strict=True):
        assert case.tokens.shape == (tokens,)
        assert case.tokens.dtype == np.int32
        np.testing.assert_array_equal(case.tokens, same.tokens)
        assert not np.array_equal(case.tokens, new.tokens)
        assert case.place == same.place
        for question, repeated in zip(case.questions, same.questions, strict=True):
            assert question.prompt.dtype == np.int32
            np.testing.assert_array_equal(question.prompt, repeated.prompt)


@pytest.mark.parametrize("name", CODES)
def test_a_code_stands_in_the_context_once_and_alone_is_right(name):
    for case in made(name, 1201, 11, seed=2):
        context = decode(case.tokens)
        for question in case.questions:
            [[digits]] = codes(context, decode(question.prompt))
            wrong = digits[:4] + str(9 - int(digits[4]))
            said = {f" {digits}": 1, f"{digits}. And": 1, f"{digits}0": 0, wrong: 0, "": 0}
            assert {text: question.score(text) for text in said} == said
            assert question.new_tokens == len(encode(f" {digits}")) + 1
        assert len({decode(question.prompt) for question in case.questions}) == len(case.questions)


@pytest.mark.parametrize("tokens", [811, 5003])
@pytest.mark.parametrize("name", LISTS)
def test_a_list_counts_by_its_share(name, tokens):
    size = {"ruler-cwe": 10, "ruler-fwe": 3, "ruler-vt": 5}.get(name, 4)
    for case in made(name, tokens, 3, seed=3):
        [question] = case.questions
        expected = LISTS[name](decode(case.tokens), decode(question.prompt))
        assert len(set(expected)) == len(expected) == size
        everything = f" {', '.join(expected)}"
        assert question.score(everything.upper()) == 1
        assert question.score("\n".join(f"x{one}y" for one in reversed(expected[1:]))) == (
            pytest.approx(1 - 1 / size)
        )
        assert question.score("no idea") == 0
        assert question.new_tokens >= len(encode(everything))


@pytest.mark.parametrize("name", ["multikey", "ruler-multiquery", "ruler-vt", "ruler-cwe"])
def test_all_else_is_text_of_the_judging_novels(name):
    text = tasks.bundled_text(*tasks.BOOKS["judge"])
    told = r" The secret code of [\w ]+ is \d+\.| VAR \w+ = (VAR )?\w+\.|\n\nSome .* others\."
    for case in made(name, 1500, 2, seed=4):
        left, told_of = re.subn(f"{told}|( \\d+\\. [a-z]+)+", "", decode(case.tokens))
        assert told_of
        assert left in text + text
        assert len(left) < 200 or name != "ruler-cwe"


def test_needles_are_at_their_depths():
    found = made("needle", 2003, 5)
    assert [case.place for case in found] == [{"depth": d} for d in (0, 0.25, 0.5, 0.75, 1)]
    for case in found:
        before = len(encode(decode(case.tokens).partition(" The secret code of")[0]))
        assert abs(before / 2003 - case.place["depth"]) < 0.08  # a sentence
    assert [case.place for case in made("needle", 500, 1)] == [{"depth": 0.5}]


@pytest.mark.parametrize(
    ("name", "count", "shares"),
    [
        ("multikey", 9, [3, 3, 3]),
        ("multikey", 4, [4]),
        ("kv", 19, [7, 6, 6]),
        ("kv", 8, [8]),
        ("kv", 1, [1]),
    ],
)
def test_questions_share_contexts_evenly(name, count, shares):
    assert [len(case.questions) for case in made(name, 900, count)] == shares


def test_keys_are_as_dense_as_asked_for_and_others_than_the_one_asked_for():
    found = re.findall(r"secret code of (\w+ \w+) is", decode(made("kv", 384 * 3 + 7, 1)[0].tokens))
    assert len(set(found)) == len(found) == 24
    found = re.findall(r"secret code of (\w+) is", decode(made("multikey", 700, 1)[0].tokens))
    assert len(set(found)) == len(found) == cases.KEYS


def test_when_words_run_out_text_fills_the_list_s_context(monkeypatch):
    words = [f"w{letter}{letter}" for letter in "abcdefghijklm"]
    monkeypatch.setattr(cases, "_vocabulary", lambda: words)
    [case] = made("ruler-cwe", 4999, 1)
    found = Counter(re.findall(r"\d+\. (w\w+)", decode(case.tokens)))
    assert len(case.tokens) == 4999
    assert sorted(found.values()) == [3] * 3 + [30] * 10


@pytest.mark.parametrize("name", cases.TASKS)
def test_contexts_that_are_too_short_are_refused_in_one_sentence(name):
    for tokens in (-1, 0, 7):
        with pytest.raises(RequestError, match=f"^{name} cannot be made in {tokens} tokens: .*"):
            made(name, tokens, 2)
    with pytest.raises(RequestError, match=f"^0 questions of {name}"):
        made(name, 999, 0)
