"""Cases made from the bundled novels: sizes, places, and that choosing and judging stay apart."""

from __future__ import annotations

import numpy as np
import pytest

from combkv_jax.errors import RequestError
from combkv_jax.evaluation import tasks
from combkv_jax.evaluation.tasks import Fact


def encode(text):  # one token a byte
    return list(text.encode())


def decode(tokens):
    return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")


FACT = Fact("Anne", "01234")
NEEDLE = " The secret code of Anne is 01234."


def test_the_six_novels_are_there_each_in_one_role():
    books = [book for role in tasks.BOOKS.values() for book in role]
    assert len(set(books)) == len(books) == 6
    texts = [tasks.bundled_text(book) for book in books]
    assert all(len(text) > 400_000 for text in texts)
    assert tasks.bundled_text() == "".join(texts)
    assert "It is a truth universally acknowledged, that a single man" in texts[0]


def test_names_of_roles_are_apart():
    choose, judge = (tasks.NAMES[role].split() for role in ("choose", "judge"))
    assert not set(choose) & set(judge)
    assert len(set(choose)) == len(choose) == len(set(judge)) == len(judge) == 48


@pytest.mark.parametrize("depth", [0.0, 0.37, 0.5, 1.0])
@pytest.mark.parametrize("count", [len(NEEDLE), 997, 20_000])
def test_a_haystack_has_its_needle_between_sentences_at_its_depth(count, depth):
    text = decode(tasks.haystack(encode, count, FACT, depth))
    assert len(text) == count
    assert text.count(NEEDLE) == 1
    before, after = text.split(NEEDLE)
    assert tasks.bundled_text().startswith(before + after)
    assert abs(len(before) - depth * len(before + after)) < 700  # a sentence
    assert not before or before[-1] in ".!?\"')_" or after.startswith("\n\n")
    assert not after or after[0].isspace() or not before


def test_a_text_longer_than_the_novels_begins_anew():
    size = len(tasks.bundled_text())
    text = decode(tasks.haystack(encode, size + 5000, FACT, 0.0))
    opening = tasks.bundled_text()[:1000]
    assert text.count(opening) == 2


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: tasks.haystack(encode, 3, FACT, 0.5), "is to have 3 tokens"),
        (lambda: tasks.haystack(encode, -1, FACT, 0.5), "is to have -1 tokens"),
        (lambda: tasks.haystack(encode, 99, FACT, 1.5), "depth is 1.5"),
        (lambda: tasks.draw_facts(np.random.default_rng(0), 0), "0 facts"),
        (lambda: tasks.draw_facts(np.random.default_rng(0), 49), "49 facts"),
        (
            lambda: tasks.fact_cases(encode, 0, "judge", cases=1, chunks=1, chunk_size=99),
            "chunk_size is 99",
        ),
        (
            lambda: tasks.text_cases(encode, 0, "judge", cases=9, chunks=99, chunk_size=9999),
            "9 cases",
        ),
    ],
)
def test_what_cannot_be_made_is_refused_in_words(call, said):
    with pytest.raises(RequestError, match=said):
        call()


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("role", ["choose", "judge"])
def test_fact_cases_hold_their_facts_and_ask_for_each(role, chunks):
    sizes = {"cases": 3, "chunks": chunks, "chunk_size": 701}
    cases = tasks.fact_cases(encode, 5, role, **sizes)
    book = "".join(tasks.bundled_text(*tasks.BOOKS[role]))
    assert len(cases) == 3
    for case in cases:
        assert [chunk.shape for chunk in case.chunks] == [(701,)] * chunks
        assert len(case.questions) == 8 * chunks
        texts = [decode(chunk) for chunk in case.chunks]
        for i, (prompt, answer) in enumerate(case.questions):
            prompt, answer = decode(prompt), decode(answer)
            assert prompt.removeprefix(" The secret code of ").removesuffix(" is ") in (
                tasks.NAMES[role].split()
            )
            assert len(answer) == 5
            assert answer.isdigit()
            sentence = f"{prompt}{answer}."
            assert sentence in texts[i // 8]
            texts[i // 8] = texts[i // 8].replace(sentence, "")
        assert all(text in book for text in texts)
    again = tasks.fact_cases(encode, 5, role, **sizes)
    other = tasks.fact_cases(encode, 6, role, **sizes)
    assert decode(again[0].chunks[0]) == decode(cases[0].chunks[0])
    assert decode(other[0].chunks[0]) != decode(cases[0].chunks[0])


def test_text_cases_are_pages_of_their_own_and_what_follows_them():
    cases = tasks.text_cases(encode, 1, "judge", cases=7, chunks=3, chunk_size=101, next_tokens=43)
    book = tasks.bundled_text(*tasks.BOOKS["judge"])
    places = []
    for case in cases:
        assert [chunk.shape for chunk in case.chunks] == [(101,)] * 3
        assert case.tokens.shape == (44,)
        text = decode(np.concatenate([*case.chunks, case.tokens]))
        places.append(book.find(text))
    assert min(places) >= 0
    assert (np.diff(sorted(places)) > 3 * 101 + 44).all()


def test_the_answer_begins_where_the_digits_begin_to_matter():
    # Words with their space are one token, as in many vocabularies; a number goes in threes.
    vocabulary = {}

    def words(text):
        out = []
        for word in text.replace(" ", "\0 ").split("\0"):
            digits = word.strip(" .").isdigit()
            parts = [word[i : i + 3] for i in range(0, len(word), 3)] if digits else [word]
            out += [vocabulary.setdefault(part, len(vocabulary)) for part in parts if part]
        return out

    prompt, answer = tasks.question(words, Fact("Anne", "56789"))
    names = {index: part for part, index in vocabulary.items()}
    assert [names[i] for i in prompt] == [" The", " secret", " code", " of", " Anne", " is"]
    assert [names[i] for i in answer] == [" 56", "789"]
