"""How well a generated text answers, from 0 to 1: the measures of RULER and of LongBench.

RULER: Hsieh et al. 2024, arXiv 2404.06654, appendix B. LongBench: Bai et al. 2023, arXiv
2308.14508, table 1. Where LongBench cuts Chinese into words, here every character is a word.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Collection, Sequence

_CHINESE = "\u3400-\u9fff"
_WORD = re.compile(f"[{_CHINESE}]|[^\\s{_CHINESE}]+")
_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}\u3000-\u303f\uff00-\uffef]")


def contained(expected: Sequence[str], text: str) -> float:
    """Share of the expected strings that stand in the text, small and capital letters alike."""
    return sum(one.lower() in text.lower() for one in expected) / len(expected)


def words(text: str) -> list[str]:
    """In small letters, without punctuation."""
    return _WORD.findall(_PUNCTUATION.sub("", text.lower()))


def token_f1(truth: str, text: str) -> float:
    """F1 of the words that text and truth share, articles left out (SQuAD, Rajpurkar et al. 2016,
    arXiv 1606.05250, section 6.1)."""
    wanted, said = (
        Counter(word for word in words(some) if word not in ("a", "an", "the"))
        for some in (truth, text)
    )
    return _f1((wanted & said).total(), wanted.total(), said.total())


def rouge_l(truth: str, text: str) -> float:
    """F1 of the longest common subsequence of words (Lin 2004, "ROUGE", section 3.1)."""
    wanted, said = words(truth), words(text)
    # Bit i of a mask: whether that word is the truth's i-th. A zero in `row` is a step of the
    # longest subsequence so far (Hyyro 2004, "Bit-parallel LCS-length computation revisited").
    masks: dict[str, int] = {}
    for place, word in enumerate(wanted):
        masks[word] = masks.get(word, 0) | 1 << place
    full = (1 << len(wanted)) - 1
    row = full
    for word in said:
        match = row & masks.get(word, 0)
        row = (row + match | row - match) & full
    return _f1(len(wanted) - row.bit_count(), len(wanted), len(said))


def _f1(same: int, wanted: int, said: int) -> float:
    return 2 * same / (wanted + said) if same else 0.0


def classified(classes: Collection[str], truth: str, text: str) -> float:
    """1 when the text names the true class, shared with the other classes that it names; those
    that are a part of the true one's name do not count."""
    named = [c for c in classes if c in text and (c == truth or c not in truth)]
    return 1 / len(named) if truth in named else 0.0


def number_share(truth: str, text: str) -> float:
    """Share of the text's numbers that are the truth's first one ("Paragraph 12": 12)."""
    wanted, said = (re.findall(r"\d+", some) for some in (truth, text))
    return said.count(wanted[0]) / len(said) if wanted and said else 0.0


def code_similarity(truth: str, text: str) -> float:
    """Edit similarity of the text's first line that is no comment or quotation mark to the truth:
    twice the characters that match, of all those of both."""
    lines = text.lstrip("\n").split("\n")
    line = next((one for one in lines if not re.search("`|#|//", one)), "")
    return difflib.SequenceMatcher(None, line, truth, autojunk=False).ratio()
