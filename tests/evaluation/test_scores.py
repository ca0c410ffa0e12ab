"""Scores of generated texts, against plain counting."""

from __future__ import annotations

import re

import numpy as np
import pytest

from combkv_jax.evaluation import scores


def plain_f1(same, wanted, said):
    if not same:
        return 0
    precision, recall = same / said, same / wanted
    return 2 * precision * recall / (precision + recall)


def plain_common(a, b):
    """Length of the longest common subsequence, by the usual table."""
    table = np.zeros((len(a) + 1, len(b) + 1), int)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1, j + 1] = (
                table[i, j] + 1 if x == y else max(table[i, j + 1], table[i + 1, j])
            )
    return table[-1, -1]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 7), (13, 5), (80, 131)])
def test_f1_and_rouge_against_plain_counting(sizes):
    rng = np.random.default_rng(sum(sizes))
    for kinds in (2, 9):
        truth, said = (rng.choice(list("uvwxyzrst")[:kinds], n).tolist() for n in sizes)
        same = 0
        left = list(truth)
        for word in said:
            if word in left:
                left.remove(word)
                same += 1
        texts = " ".join(truth), " ".join(said)
        assert scores.token_f1(*texts) == pytest.approx(plain_f1(same, *sizes))
        common = plain_common(truth, said)
        assert scores.rouge_l(*texts) == pytest.approx(plain_f1(common, *sizes))


@pytest.mark.parametrize(
    ("truth", "text", "f1", "rouge"),
    [
        ("The cat", "a  CAT!", 1, 0.5),  # articles count for ROUGE alone
        ("cat", "dog", 0, 0),
        ("cat", "", 0, 0),
        ("", "cat", 0, 0),
        ("don't go home", "home go, dont", 1, 1 / 3),
        ("他在家。", "他家", 0.8, 0.8),  # a character is a word
    ],
)
def test_words_are_compared_without_case_and_punctuation(truth, text, f1, rouge):
    assert scores.token_f1(truth, text) == pytest.approx(f1)
    assert scores.rouge_l(truth, text) == pytest.approx(rouge)


@pytest.mark.parametrize(
    ("score", "truth", "text", "expected"),
    [
        (scores.number_share, "Paragraph 12", " 12.", 1),
        (scores.number_share, "Paragraph 12", "Paragraph 2, 12, 12 or 1", 0.5),
        (scores.number_share, "7", "seven", 0),
        (scores.number_share, "段落3", "段落3", 1),
        (scores.number_share, "none", "3", 0),
        (scores.code_similarity, "x = 1", "\n# first\n`x`\nx = 1\ny", 1),
        (scores.code_similarity, "abcd", "abxy", 0.5),
        (scores.code_similarity, "abcd", "// only", 0),
    ],
)
def test_numbers_and_code(score, truth, text, expected):
    assert score(truth, text) == pytest.approx(expected)


def test_a_class_shares_with_the_others_named():
    classes = ["City", "Country", "Other location", "location"]
    found = {
        text: scores.classified(classes, "Other location", text)
        for text in ("Type: Other location", "City or Other location", "location", "City", "")
    }
    assert list(found.values()) == [1, 0.5, 0, 0, 0]


def test_what_is_contained_counts_by_its_share():
    assert scores.contained(["One", "two", "THREE"], re.escape("xoney three")) == pytest.approx(
        2 / 3
    )
