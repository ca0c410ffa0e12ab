"""Tokenizers out of GGUF metadata, against slow ones written here from what llama.cpp documents."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import regex

from combkv_jax import weights
from combkv_jax.errors import RequestError
from combkv_jax.weights import gguf, gguf_tokenizer
from combkv_jax.weights.source import folder_tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ALPHABET = (
    "abcdefghijklmnopqrstuvwxyzABCXYZ0123456789     \n\n\t\r.,;:!?'\"()[]{}<>|/\\@#$%^&*-_=+"
    "éüßñ中文日本語한국어русский😀🚀\u00a0\u200b½²Ⅷ٣"
)
WORDS = """the of and to in it's we'll code Secret number is 48213 2024 def return {x} x² I'VE don't
über naïve 東京 Москва 3.14 1,000,000 http://a.b/c"""


def snippets(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    texts = [
        " ".join(rng.choice(WORDS.split(), rng.integers(1, 12))) if i % 2 else
        "".join(rng.choice(list(ALPHABET), rng.integers(1, 40)))
        for i in range(count)
    ]  # fmt: skip
    return ["", " ", "\n", *texts]


@functools.cache
def byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in own]
    return {b: chr(b) for b in own} | {b: chr(256 + i) for i, b in enumerate(others)}


def merge(pieces: list[str], rank) -> list[str]:
    """Joins the neighbours of the lowest rank, leftmost first, until none has one."""
    while True:
        ranks = [rank(*pair) for pair in zip(pieces, pieces[1:], strict=False)]
        ranks = [(r, i) for i, r in enumerate(ranks) if r is not None]
        if not ranks:
            return pieces
        _, i = min(ranks)
        pieces = [*pieces[:i], pieces[i] + pieces[i + 1], *pieces[i + 2 :]]


class SlowBPE:
    """Byte-level BPE of text that was cut by one pattern after the other; with `whole_first`, a
    part that is a token is never taken apart."""

    def __init__(self, fields, patterns, whole_first):
        merges = fields["tokenizer.ggml.merges"]
        self.ranks = {tuple(m.split(" ")): i for i, m in enumerate(merges)}
        self.number = {t: i for i, t in enumerate(fields["tokenizer.ggml.tokens"])}
        self.patterns, self.whole_first = patterns, whole_first

    def __call__(self, text: str) -> list[int]:
        parts, ids = [text], []
        for pattern in self.patterns:  # what a pattern does not match stays a part of its own
            parts = [p for part in parts for p in regex.split(f"({pattern})", part) if p]
        for part in parts:
            word = "".join(byte_letters()[b] for b in part.encode())
            whole = self.whole_first and word in self.number
            pieces = [word] if whole else merge(list(word), lambda a, b: self.ranks.get((a, b)))
            ids += [self.number[p] for p in pieces]
        return ids


def fields_of(path: Path) -> dict:
    return {name: f.contents() for name, f in gguf._Reader(path).fields.items()}


@pytest.fixture(scope="module")
def smollm2(smollm2_file):
    return weights.open_source(smollm2_file).tokenizer(), fields_of(smollm2_file)


def test_smollm2_splits_every_digit(smollm2):
    tokenizer, fields = smollm2
    slow = SlowBPE(fields, [r"\p{N}", GPT2], whole_first=False)
    for text in snippets(2000, seed=1):
        ids = tokenizer(text).input_ids
        assert ids == slow(text), repr(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.tokenize("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]


def test_smollm2_equals_transformers_where_it_has_no_digits(smollm2, smollm2_file):
    pytest.importorskip("torch", reason="torch (the oracle) is not installed")
    from transformers import AutoTokenizer

    tokenizer, _ = smollm2
    theirs = AutoTokenizer.from_pretrained(smollm2_file.parent, gguf_file=smollm2_file.name)
    texts = [regex.sub(r"\p{N}", "", text) for text in snippets(1000, seed=2)]
    assert tokenizer(texts).input_ids == theirs(texts).input_ids
    assert tokenizer.chat_template == theirs.chat_template


def test_smollm2_special_tokens_and_chat_template(smollm2, tmp_path):
    tokenizer, fields = smollm2
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    turn = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text).input_ids
    assert ids[0] == 1
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    assert tokenizer.decode(ids, skip_special_tokens=True).startswith("system\nYou are")
    gguf_tokenizer.write(tokenizer, fields, tmp_path)
    again = folder_tokenizer(tmp_path)
    assert again(text).input_ids == ids
    # No warning about texts beyond the model's own context: they are the point.
    assert min(again.model_max_length, tokenizer.model_max_length) > 10**9
    assert again.chat_template == tokenizer.chat_template
    assert '"eos_token_id": [\n    2\n  ]' in (tmp_path / "generation_config.json").read_text()


def train_bpe(pattern: str, count: int) -> tuple[list[str], list[str]]:
    """A small vocabulary and its merges, in the order in which pairs became frequent."""
    text = WORDS * 3 + " ".join(snippets(60, seed=3))
    words = regex.findall(pattern, text)
    words = [[byte_letters()[b] for b in word.encode()] for word in words]
    tokens, merges = list(byte_letters().values()), []
    for _ in range(count):
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in zip(word, word[1:], strict=False):
                counts[pair] = counts.get(pair, 0) + 1
        best = max(counts, key=counts.get)
        merges.append(" ".join(best))
        tokens.append("".join(best))
        words = [merge(w, lambda a, b, best=best: 0 if (a, b) == best else None) for w in words]
    return tokens, merges


def bpe_fields(pattern: str, pre: str | None, **more) -> dict:
    tokens, merges = train_bpe(pattern, 120)
    # A word that no merge makes, and special tokens.
    tokens += ["Ġcode.", "<|begin_of_text|>", "<|end_of_text|>"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        **more,
    }
    return {k: v for k, v in fields.items() if v is not None}


@pytest.mark.parametrize(
    ("pre", "pattern", "llama3"),
    [("llama-bpe", LLAMA3, True), ("gpt-2", GPT2, False), (None, LLAMA3, True)],
)
def test_bpe_equals_the_slow_one(pre, pattern, llama3):
    fields = bpe_fields(pattern, pre)
    if pre is None:  # a Llama 3 file older than the entry: known by its tokens
        fields["tokenizer.ggml.add_bos_token"] = True
    tokenizer = gguf_tokenizer.build(Path("x.gguf"), fields)
    tokens, slow = fields["tokenizer.ggml.tokens"], SlowBPE(fields, [pattern], llama3)
    start = [tokens.index("<|begin_of_text|>")] if llama3 else []
    for text in snippets(300, seed=4):
        ids = tokenizer(text).input_ids
        assert ids == start + slow(text), repr(text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    ids = tokenizer("a<|end_of_text|>", add_special_tokens=False).input_ids
    assert ids == [tokens.index("a"), len(tokens) - 1]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_equals_the_slow_one(prefix):
    rng = np.random.default_rng(5)
    text = WORDS.replace(" ", "▁").replace("\n", "▁")
    pieces = sorted({text[i : i + n] for n in (2, 3, 4, 5) for i in rng.integers(0, 200, 60)})
    letters = [c for c in dict.fromkeys(text) if c not in "東ü"]  # those two fall back to bytes
    pieces = [p for p in pieces if set(p) <= set(letters) and len(p) > 1]
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *letters, *pieces]
    scores = [0.0] * 259 + [-1e4] * len(letters) + [-float(i) for i in rng.permutation(len(pieces))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    tokenizer = gguf_tokenizer.build(Path("x.gguf"), fields)
    number = {t: i for i, t in enumerate(tokens)}
    normal = {t: -scores[i] for t, i in number.items() if types[i] == 1}

    def slow(text: str) -> list[int]:
        text = ("▁" * prefix + text).replace(" ", "▁")
        parts = merge(list(text), lambda a, b: normal.get(a + b))
        ids = [[number[p]] if p in normal else [3 + b for b in p.encode()] for p in parts]
        return [1, *(i for part in ids for i in part)]

    for text in filter(None, snippets(300, seed=6)):
        ids = tokenizer(text).input_ids
        assert ids == slow(text), repr(text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"tokenizer.ggml.pre": "qwen9"}, "'qwen9'"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
        ({"tokenizer.ggml.merges": ["a b", "zzz q"]}, "merges of unknown tokens"),
        ({"tokenizer.ggml.merges": None}, "no merges"),
        ({"tokenizer.ggml.model": "llama"}, "0 scores"),
    ],
)
def test_unreadable_tokenizers_are_refused(change, words):
    fields = bpe_fields(GPT2, "gpt-2", **change)
    with pytest.raises(RequestError, match=words):
        gguf_tokenizer.build(Path("x.gguf"), fields)


def test_a_file_without_vocabulary_has_no_tokenizer():
    assert gguf_tokenizer.build(Path("x.gguf"), {}) is None


def test_no_torch_is_imported(smollm2_file):
    code = (
        "import sys; from combkv_jax import weights; "
        f"t = weights.open_source({str(smollm2_file)!r}).tokenizer(); "
        "assert t('a 1').input_ids; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
