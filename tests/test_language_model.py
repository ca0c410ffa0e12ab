"""Text in and out: pieces, tokens, and what the Python API promises."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax import generate
from combkv_jax.errors import RequestError
from combkv_jax.generate import Sampling
from combkv_jax.language_model import LanguageModel, TextStream
from tests import text, tiny


@pytest.mark.parametrize("said", ["plain", "é😀日本", "😀" * 20, "a\u0301 ü\n\n €", ""])
def test_a_stream_never_breaks_a_character(said):
    tokenizer = text.byte_tokenizer()
    stream, pieces = TextStream(tokenizer), []
    for token in tokenizer(said)["input_ids"]:
        pieces.append(stream.push(token))
    pieces.append(stream.finish())
    assert "".join(pieces) == said
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([p for p in pieces if p]) >= len(said)  # no character waits for the next


def test_bytes_that_are_no_character_come_out_in_the_end():
    tokenizer = text.byte_tokenizer()
    broken = tokenizer("😀")["input_ids"][:2]
    stream = TextStream(tokenizer)
    out = "".join(map(stream.push, broken)) + stream.finish()
    assert "\ufffd" in out
    stream = TextStream(tokenizer)
    # Not held back for ever either.
    assert any(stream.push(broken[0]) for _ in range(40))


def test_real_tokens_stream_as_they_decode(smollm2_file):
    from combkv_jax.weights import open_source

    tokenizer = open_source(smollm2_file).tokenizer()
    said = "Naïve café: 12345 — “日本語” 😀😀, don't   stop.\n\tEnd"
    stream = TextStream(tokenizer)
    pieces = [stream.push(t) for t in tokenizer(said)["input_ids"]] + [stream.finish()]
    assert "".join(pieces) == said
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("form", ["lse", "tanh"])
def test_generate_streams_what_start_draws(form):
    lm = text.byte_model(form, 31)
    history = lm.compress("Once upon a time there was a king.")
    sampling = Sampling(1.0, seed=2)
    pieces = list(lm.generate("Who?", history, max_new_tokens=20, sampling=sampling))
    run = lm.start([lm.tokens("Who?")], history, max_new_tokens=20, sampling=sampling)
    assert "".join(pieces) == lm.text(run.run()[0])


@pytest.mark.parametrize("form", ["lse", "tanh"])
def test_the_packed_call_and_encode_are_the_model_s(form):
    lm = text.byte_model(form, 32)
    batch = tiny.packed_batch(np.random.default_rng(33), 257, [(5, [13, 2]), (3, [])])
    logits, states = tiny.run(lm.model, batch)
    got = lm(batch)
    assert got.dtype == jnp.float32
    assert got.shape == (8, 257)
    np.testing.assert_allclose(got, logits, atol=1e-5)
    for pair, want in zip(
        lm.encode(batch["chunk_ids"], batch["cu_seqlens_chunk"]), states, strict=True
    ):
        for a, b in zip(pair, want, strict=True):
            assert a.shape == (15, 2, 12)
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_packed_batch_may_be_lists_and_is_checked():
    lm = text.byte_model("lse", 32)
    batch = tiny.packed_batch(np.random.default_rng(33), 257, [(5, [13, 2]), (3, [])])
    lists = {name: array.tolist() for name, array in batch.items()}
    np.testing.assert_allclose(lm(lists), lm(batch), atol=1e-5)
    with pytest.raises(RequestError, match="lacks cu_seqlens_k"):
        lm({name: array for name, array in batch.items() if name != "cu_seqlens_k"})
    with pytest.raises(RequestError, match="a token id is 300"):
        lm(batch | {"input_ids": np.full((1, 8), 300)})
    with pytest.raises(RequestError, match="input_ids has type float64"):
        lm(batch | {"input_ids": np.ones((1, 8))})


def test_a_tokenizer_with_more_tokens_than_the_model_is_noticed():
    small = text.byte_model("lse", 30)
    config = tiny.comb_config("lse", vocab_size=100)
    model = tiny.build(config, tiny.random_parameters(np.random.default_rng(30), config))
    lm = LanguageModel(model, small.tokenizer)
    with pytest.raises(RequestError, match="this model's lie in 0..99"):
        lm.tokens("\u00e9\u00ff")


def test_a_chat_template_that_refuses_says_so():
    lm = text.byte_model("lse", 29, template="{{ raise_exception('no such role') }}")
    with pytest.raises(RequestError, match="does not take these messages: no such role"):
        lm.chat_tokens([{"role": "user", "content": "hi"}])


def test_history_may_be_appended_to():
    lm = text.byte_model("lse", 34)
    whole = lm.compress("x" * 26)
    parts = lm.compress("x" * 13, history=lm.compress("x" * 13))
    for a, b in zip(whole.layers, parts.layers, strict=True):
        np.testing.assert_allclose(a.key[:, :, :26], b.key[:, :, :26], atol=1e-5)


def test_stop_tokens_and_chat_template_are_the_tokenizer_s():
    lm = text.byte_model("lse", 35)
    assert lm.stop_tokens() == [256]
    tokens = lm.chat_tokens([{"role": "user", "content": "hi"}])
    assert lm.tokenizer.decode(tokens) == "<user>hi<|im_end|><assistant>"
    bare = text.byte_model("lse", 35, template=None)
    assert bare.text(bare.chat_tokens([{"role": "user", "content": "hi"}])) == "hi"


def test_a_first_token_begins_a_text_and_nothing_behind_it():
    """With a tokenizer that puts one in front, as Llama 3's does."""
    from tokenizers import processors

    lm = text.byte_model("lse", 40)
    lm.tokenizer.bos_token = "<|im_end|>"
    lm.tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        "<|im_end|> $A", special_tokens=[("<|im_end|>", 256)]
    )
    lm.tokenizer.chat_template = "<|im_end|>{{ messages[0]['content'] }}"
    message = [{"role": "user", "content": "hi"}]
    hi = lm.tokens("hi").tolist()
    assert lm.tokens("hi", special=True).tolist() == [256, *hi]
    assert lm.chat_tokens(message).tolist() == [256, *hi]
    assert lm.chat_tokens(message, begins=False).tolist() == hi
    history = lm.compress("a book")
    assert int(history.count[0]) == 1 + len("a book")
    whole = lm.start([np.array([256, *hi])], max_new_tokens=3).run()[0]
    assert "".join(lm.generate("hi", max_new_tokens=3)) == lm.text(whole)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1, 257], "a token id is 257; this model's lie in 0..256"),
        ([-1], "a token id is -1"),
        ([[1]], "a flat list"),
        ([0.5], "a flat list"),
        ("\ud83d", "half a character"),
    ],
)
def test_what_are_no_tokens_is_refused(given, words):
    with pytest.raises(RequestError, match=words):
        text.byte_model("lse", 36).tokens(given)


def test_without_a_tokenizer_token_ids_still_work():
    lm = LanguageModel(text.byte_model("lse", 37).model)
    history = lm.compress(np.arange(30))
    assert len(lm.start([np.array([1, 2])], history, max_new_tokens=3).run()[0]) == 3
    with pytest.raises(RequestError, match="without a tokenizer"):
        lm.generate("text", history)


def test_a_request_is_checked_before_the_first_piece():
    lm = text.byte_model("lse", 38)
    with pytest.raises(RequestError, match="no tokens"):
        lm.generate("")
    with pytest.raises(RequestError, match="max-new-tokens is 0"):
        lm.generate("a", max_new_tokens=0)


def test_a_cache_is_as_long_as_asked_and_counts_rows():
    lm = text.byte_model("lse", 39)
    run = lm.start([lm.tokens("abc"), lm.tokens("z")], max_new_tokens=4)
    run.run()
    counts = {tuple(entry.count.tolist()) for entry in run.cache.layers}
    assert counts == {(6, 4)}  # the prompt and all drawn tokens but the last
    assert run.cache.position.tolist() == [6, 4]
    assert generate.bucket(7, 256) == run.cache.layers[0].key.shape[2]
