"""The tokenizer inside a GGUF file, built with the `tokenizers` package (no torch).

transformers can read one too, but needs torch for it and does not split digits where the file's
pre-tokenizer says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from combkv_jax.errors import RequestError

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# Splits text before BPE; the pattern of Llama 3, tiktoken's notation.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre.PreTokenizer:
    return pre.ByteLevel(add_prefix_space=False)


def _digits() -> pre.PreTokenizer:
    return pre.Sequence([pre.Digits(individual_digits=True), _gpt2()])


def _llama3() -> pre.PreTokenizer:
    split = pre.Split(Regex(_LLAMA3), behavior="isolated")
    return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS = {
    "smollm": _digits,
    "starcoder": _digits,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "gpt-2": _gpt2,
    "default": _gpt2,
}


def build(path: Path, fields: Mapping[str, Any]):
    """A transformers tokenizer from a GGUF file's metadata, or None when it has no vocabulary."""
    kind = fields.get("tokenizer.ggml.model")
    if kind is None or kind == "none":
        return None
    if kind not in ("gpt2", "llama"):
        raise RequestError(
            f"the tokenizer in {path} is of kind {kind!r}; 'gpt2' and 'llama' can be read."
        )
    tokens = fields.get("tokenizer.ggml.tokens") or []
    types = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise RequestError(f"the tokenizer in {path} has {len(tokens)} tokens and {len(types)} "
                           "token types.")  # fmt: skip
    tokenizer = (_bpe if kind == "gpt2" else _sentencepiece)(path, fields, tokens, types)
    for content, type_ in zip(tokens, types, strict=True):
        if type_ in (_CONTROL, _UNKNOWN, _USER_DEFINED):
            added = AddedToken(content, normalized=False, special=type_ != _USER_DEFINED)
            tokenizer.add_special_tokens([added]) if added.special else tokenizer.add_tokens(
                [added]
            )

    ids = {
        "bos_token": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token": fields.get("tokenizer.ggml.eos_token_id"),
        "unk_token": fields.get("tokenizer.ggml.unknown_token_id"),
        "pad_token": fields.get("tokenizer.ggml.padding_token_id"),
    }
    names = {k: tokens[i] for k, i in ids.items() if i is not None and i < len(tokens)}
    llama3 = fields.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3", "llama-v3")
    add_bos = fields.get("tokenizer.ggml.add_bos_token", kind == "llama" or llama3)
    add_eos = fields.get("tokenizer.ggml.add_eos_token", False)
    before = names["bos_token"] if add_bos and "bos_token" in names else None
    after = names["eos_token"] if add_eos and "eos_token" in names else None
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*filter(None, [before]), "$A", *filter(None, [after])],
            special_tokens=[(t, tokens.index(t)) for t in {before, after} - {None}],
        )
    from transformers import PreTrainedTokenizerFast  # slow to import

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **names,
    )


def write(tokenizer, fields: Mapping[str, Any], folder: Path) -> None:
    """Saves `build`'s tokenizer, and the ids that end a turn where the file names several."""
    if tokenizer is None:
        return
    tokenizer.save_pretrained(folder)
    ends = [fields.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom")]
    ends = sorted({i for i in ends if isinstance(i, int)})
    if ends:
        config = {"bos_token_id": fields.get("tokenizer.ggml.bos_token_id"), "eos_token_id": ends}
        (folder / "generation_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _bpe(path, fields, tokens, types) -> Tokenizer:
    name = fields.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise RequestError(f"the tokenizer in {path} splits text as {name!r}; "
                           f"{', '.join(_PRE_TOKENIZERS)} can be read.")  # fmt: skip
    if "<|begin_of_text|>" in tokens and name == "default":
        name = "llama-bpe"  # files of Llama 3 made before there was such an entry
    merges = [tuple(m.split(" ", 1)) for m in fields.get("tokenizer.ggml.merges") or []]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bad = [m for m in merges if len(m) != 2 or not {*m, "".join(m)} <= vocabulary.keys()]
    if bad or not merges:
        raise RequestError(f"the tokenizer in {path} has {len(bad) or 'no'} merges"
                           f"{' of unknown tokens' if bad else ''}.")  # fmt: skip
    make = _PRE_TOKENIZERS[name]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=make is _llama3))
    tokenizer.pre_tokenizer = make()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(path, fields, tokens, types) -> Tokenizer:
    """A SentencePiece BPE: the pair that makes the piece with the best score is merged first."""
    scores = fields.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise RequestError(f"the tokenizer in {path} has {len(tokens)} tokens and {len(scores)} "
                           "scores.")  # fmt: skip
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pieces = {t for t, type_ in zip(tokens, types, strict=True) if type_ == _NORMAL}
    merges = [
        (-scores[vocabulary[piece]], vocabulary[piece[:cut]], piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    merges = [(left, right) for _, _, left, right in sorted(merges)]
    unknown = tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces = [normalizers.Replace(" ", "▁")]
    strip = []
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        spaces, strip = [normalizers.Prepend("▁"), *spaces], [decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
