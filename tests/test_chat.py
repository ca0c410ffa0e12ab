"""Conversations: with room they are one long text, without it old turns become history."""

from __future__ import annotations

import numpy as np
import pytest

from combkv_jax.chat import ChatSession
from combkv_jax.errors import RequestError
from combkv_jax.generate import Sampling
from tests import text


def test_a_conversation_with_room_is_one_text():
    lm = text.byte_model("lse", 41, max_position_embeddings=4096)
    session = ChatSession(lm, window=400, max_new_tokens=12, sampling=Sampling(1.0, seed=3))
    replies = ["".join(session.send(line)) for line in ("hello there", "and you?", "bye")]
    assert session.history is None
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 3
    assert [m["content"] for m in session.messages[1::2]] == replies
    # The last reply again, from all tokens before it at once.
    tokens = np.concatenate(session.turns)
    opening = lm.tokens("<assistant>").tolist()
    starts = [i for i in range(len(tokens)) if tokens[i : i + len(opening)].tolist() == opening]
    border = starts[-1] + len(opening)
    run = lm.start([tokens[:border]], max_new_tokens=12, sampling=Sampling(1.0, seed=3))
    assert run.run()[0] == tokens[border:].tolist()
    assert lm.tokenizer.decode(tokens[:border]).endswith("<|im_end|><user>bye<|im_end|><assistant>")


@pytest.mark.parametrize("form", ["lse", "tanh"])
def test_old_turns_become_history_and_nothing_is_lost(form):
    lm = text.byte_model(form, 42, max_position_embeddings=4096)
    session = ChatSession(lm, window=90, max_new_tokens=10, sampling=Sampling(1.0, seed=4))
    said = 0
    for line in ("first message", "second", "a third one that is longer", "fourth", "fifth"):
        list(session.send(line))
        said += len(session.turns[-1])
        kept = sum(map(len, session.turns))
        gone = 0 if session.history is None else int(session.history.count[0])
        assert kept <= 90
        assert kept + gone == said
    assert session.history is not None


def test_a_conversation_goes_on_behind_a_document():
    lm = text.byte_model("lse", 43, max_position_embeddings=4096)
    document = lm.compress("Some document. " * 5)
    session = ChatSession(lm, window=120, history=document, max_new_tokens=6)
    first = "".join(session.send("What?"))
    run = lm.start(
        [lm.chat_tokens([{"role": "user", "content": "What?"}])], document, max_new_tokens=6
    )
    assert first == lm.text(run.run()[0])


def test_a_reader_that_leaves_early_loses_nothing():
    lm = text.byte_model("lse", 44, max_position_embeddings=4096)
    session = ChatSession(lm, window=200, max_new_tokens=30, sampling=Sampling(1.0, seed=1))
    reply = session.send("hello")
    next(reply)
    reply.close()
    assert "".join(session.send("go on")) is not None
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2


@pytest.mark.parametrize("reply", ["d", "end", ">", "", " x "])
def test_a_reply_that_looks_like_its_closing_tag_is_closed_all_the_same(reply):
    lm = text.byte_model("lse", 47, max_position_embeddings=4096)
    session = ChatSession(lm, window=200, max_new_tokens=10)
    session.messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": reply}]
    session.turns = [lm.tokens(f"<user>q<|im_end|><assistant>{reply}")]
    added = session._next_tokens({"role": "user", "content": "next"})
    tail = reply[len(reply.rstrip()) :]
    assert lm.tokenizer.decode(added) == f"{tail}<|im_end|><user>next<|im_end|><assistant>"


def test_what_cannot_be_sent_is_refused_and_forgotten():
    lm = text.byte_model("lse", 45, max_position_embeddings=4096)
    session = ChatSession(lm, window=60, max_new_tokens=10)
    with pytest.raises(RequestError, match="the message is empty"):
        list(session.send("  "))
    with pytest.raises(RequestError, match="with a window of 60 and 10 for the reply, 50 fit"):
        list(session.send("x" * 200))
    assert session.messages == []
    list(session.send("short"))
    with pytest.raises(RequestError, match="window is 5; it must be larger"):
        ChatSession(lm, window=5, max_new_tokens=10)
    with pytest.raises(RequestError, match="leave room for 4083"):
        ChatSession(lm, window=4090, max_new_tokens=10)


def test_what_closes_a_reply_is_there_once():
    """Whether the end token was drawn or the limit was hit, one <|im_end|> follows the reply."""
    lm = text.byte_model("lse", 46, max_position_embeddings=4096)
    for limit in (3, 40):
        session = ChatSession(lm, window=400, max_new_tokens=limit, sampling=Sampling(1.5, seed=7))
        for line in ("one", "two", "three"):
            list(session.send(line))
        tokens = np.concatenate(session.turns)
        ends = int(np.sum(tokens == 256))
        open_end = tokens[-1] != 256
        assert ends == 6 - open_end  # three messages and three replies
