"""Data of one's own: what is read, what is refused, and how it becomes samples and packs."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from combkv_jax import records
from combkv_jax.chunking import IGNORED
from combkv_jax.errors import RequestError
from combkv_jax.training import data, samples
from combkv_jax.training.recipe import Lesson
from tests import text

CHUNK = 20
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1."},
    {"role": "user", "content": "And two?"},
    {"role": "assistant", "content": "2."},
    {"role": "user", "content": "Thanks"},
]


@pytest.fixture(scope="module")
def lm():
    """A tiny model of one token a byte."""
    return text.byte_model("lse", 1, chunk_size=CHUNK)


def decode(lm, ids):
    return lm.tokenizer.decode(ids)


def jsonl(path, *records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def limits(lm, tokens=200, history=200, taught=False):
    return samples.Limits.of(lm.config, tokens, history, taught)


def made(lm, name, objective="answer", seed=0, **sizes):
    return samples.Samples(
        data.documents(lm, name), Lesson(objective, name), lm.config, limits(lm, **sizes), seed
    )


def every(made):
    """All samples, read."""
    return [made.read(spec) for spec in [*made.train, *made.held_out]]


@pytest.mark.parametrize("template", [text.TEMPLATE, None])
def test_a_chat_is_written_turn_by_turn_as_its_format_has_it(template):
    lm = text.byte_model("lse", 1, template)
    found = list(data.turns(lm, CHAT))
    assert len(found) == 2
    said = decode(lm, np.concatenate([part for turn in found for part in turn]))
    if template:
        assert said == lm.render(CHAT[:5])
        assert [decode(lm, reply) for _, reply in found] == ["1.<|im_end|>", "2.<|im_end|>"]
    else:
        assert said == "Be brief.\nOne?\n1.\nAnd two?\n2.\n"


def test_a_chat_counts_replies_only_and_next_counts_all(lm, tmp_path):
    name = jsonl(tmp_path / "chats.jsonl", *[{"messages": CHAT}] * 9)
    for objective in ("answer", "next"):
        found = every(made(lm, name, objective, tokens=60))
        assert found
        for sample in found:
            counted = sample.labels != IGNORED
            np.testing.assert_array_equal(sample.labels[counted], sample.tokens[counted])
            assert decode(lm, sample.tokens[counted]) == (
                "2.<|im_end|>" if objective == "answer" else decode(lm, sample.tokens)
            )
            whole = np.concatenate([*sample.chunks, sample.tokens])
            assert decode(lm, whole) == lm.render(CHAT[:5])
            assert all(len(chunk) <= CHUNK for chunk in sample.chunks)


def test_a_context_becomes_the_history_of_its_question(lm, tmp_path):
    rows = [
        {"question": f"Where is {i}?", "answer": f"At {i}.", "context": f"{i} is here. " * 3}
        for i in range(9)
    ]
    table = pa.Table.from_pylist([{**row, "more": 1} for row in rows])
    pq.write_table(table, tmp_path / "asked.parquet", row_group_size=4)
    names = [jsonl(tmp_path / "asked.jsonl", *rows), str(tmp_path / "asked.parquet")]
    for name in names:
        contexts = set()
        for sample in every(made(lm, name)):
            asked, answer = (
                decode(lm, sample.tokens[counts])
                for counts in (sample.labels == IGNORED, sample.labels != IGNORED)
            )
            history = decode(lm, np.concatenate(sample.chunks))
            contexts.add(history)
            assert asked == f"<user>Where is {history[0]}?<|im_end|><assistant>"
            assert answer == f"At {history[0]}.<|im_end|>"
            assert [len(c) for c in sample.chunks[:-1]] == [CHUNK] * (len(sample.chunks) - 1)
        assert len(contexts) == 2 + (9 - 2)


def test_a_text_is_whole_chunks_and_what_follows_them(lm, tmp_path):
    (tmp_path / "long.txt").write_text("".join(f"line {i}\n" for i in range(400)))
    whole = (tmp_path / "long.txt").read_text()
    found = made(lm, str(tmp_path / "long.txt"), tokens=40, history=100)
    parts = sorted((spec.history, found.read(spec)) for spec in [*found.train, *found.held_out])
    assert len({len(sample.chunks) for _, sample in parts}) > 2
    said = ""
    for _, sample in parts:
        assert 1 <= len(sample.chunks) <= 5
        assert all(len(chunk) == CHUNK for chunk in sample.chunks)
        assert 2 <= len(sample.tokens) <= 40
        np.testing.assert_array_equal(sample.labels, sample.tokens)
        said += decode(lm, np.concatenate([*sample.chunks, sample.tokens]))
    assert whole.startswith(said)
    assert len(whole) - len(said) < CHUNK + 2


def test_a_reconstructed_text_is_its_own_history(lm, tmp_path):
    records = [{"text": chr(97 + i) * 15 + "." * i} for i in range(20)]
    records += [{"messages": CHAT}]
    name = jsonl(tmp_path / "texts.jsonl", *records)
    found = every(made(lm, name, "reconstruct", tokens=45))
    for sample in found:
        np.testing.assert_array_equal(np.concatenate(sample.chunks), sample.tokens)
        np.testing.assert_array_equal(sample.labels, sample.tokens)
    assert {len(sample.tokens) for sample in found} >= {15, 16, 20}
    one = samples.Samples(
        data.documents(lm, name), Lesson("reconstruct", name, chunks=1), lm.config, limits(lm), 0
    )
    assert max(len(sample.chunks) for sample in every(one)) == 1


def test_every_sample_is_trained_on_once_an_epoch_and_none_that_is_held_out(lm, tmp_path):
    rng = np.random.default_rng(0)
    records = [
        {
            "question": f"{i}?",
            "answer": "!" * int(rng.integers(1, 60)),
            "context": f"<{i:03}>" * int(rng.integers(1, 30)),
        }
        for i in range(60)
    ]
    name = jsonl(tmp_path / "asked.jsonl", *records)
    found = made(lm, name, seed=3)
    key = lambda sample: decode(lm, np.concatenate(sample.chunks)[:5])  # noqa: E731
    epoch = len(found._plan(0))
    packs = found.packs(0, epoch + len(found._plan(1)))
    orders = []
    for some in (packs[:epoch], packs[epoch:]):
        keys = [key(s) for pack in some for s in pack]
        orders.append(keys)
        assert len(keys) == len(set(keys)) == len(found.train) == 60 - len(found.held_out)
        assert not set(keys) & {key(found.read(spec)) for spec in found.held_out}
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    filled = [sum(len(s.tokens) + sum(map(len, s.chunks)) for s in pack) for pack in packs]
    assert all(
        sum(len(s.tokens) for s in p) <= 200 and sum(len(c) for s in p for c in s.chunks) <= 200
        for p in packs
    )
    assert np.mean(filled[: epoch - 3]) > 0.6 * 400  # history, which runs out first, is nearly full
    # What a resumed run sees does not depend on how it got there.
    again = made(lm, name, seed=3)
    assert again.fingerprint == found.fingerprint
    for number in (epoch + 1, 2, epoch - 1):
        (one,), two = again.packs(number, 1), packs[number]
        assert [key(s) for s in one] == [key(s) for s in two]
    other = made(lm, name, seed=4)
    assert [key(s) for s in other.packs(0, 1)[0]] != [key(s) for s in packs[0]]


def test_a_dialogue_is_held_out_as_a_whole(lm, tmp_path):
    talks = [
        {
            "messages": [
                {"role": r, "content": f"{i:02}" * 6}
                for _ in range(6)
                for r in ("user", "assistant")
            ]
        }
        for i in range(12)
    ]
    found = made(lm, jsonl(tmp_path / "chats.jsonl", *talks), tokens=500, history=500)
    talk = lambda spec: decode(lm, found.read(spec).tokens)[7:9]  # noqa: E731
    held = {talk(spec) for spec in found.held_out}
    assert len(held) == len(found.held_out) == 2
    assert not held & {talk(spec) for spec in found.train}
    assert len(found.train) > 2 * 10


def test_what_is_too_long_or_too_short_is_left_out_and_said(lm, tmp_path):
    fits = [{"question": "?", "answer": "!", "context": "c" * 30}] * 5
    long = {"question": "?", "answer": "!", "context": "c" * 300}
    bare = {"question": "?", "answer": "!", "context": None}
    found = made(lm, jsonl(tmp_path / "a.jsonl", *fits, long, long, bare))
    assert len(every(found)) == 5
    first, second = found.notes
    assert first.startswith("2 samples of ")
    assert "200 recent and 200 history tokens" in first
    assert second.startswith("1 of 8 records")
    with pytest.raises(RequestError, match="gives 0 usable samples.*9 samples of .* left out"):
        made(lm, jsonl(tmp_path / "b.jsonl", *[long] * 9))
    with pytest.raises(RequestError, match="gives 2 usable samples; at least 3"):
        made(lm, jsonl(tmp_path / "c.jsonl", *fits[:2]))


def test_a_teacher_s_positions_limit_a_sample(lm, tmp_path):
    positions = lm.config.text.max_position_embeddings
    rows = [{"question": "?", "answer": "!", "context": "c" * n} for n in (30, 30, 30, positions)]
    name = jsonl(tmp_path / "a.jsonl", *rows)
    sizes = {"tokens": 100, "history": 2 * positions}
    assert len(every(made(lm, name, **sizes))) == 4
    found = made(lm, name, "distill", taught=True, **sizes)
    assert len(every(found)) == 3
    assert f"teacher's positions {positions}" in found.notes[0]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "is empty"),
        ('{"text": "a"}\n{"text": \n', r"line 2 of .*bad.jsonl is not JSON"),
        ("\n[1]\n", "line 2 .* holds a list"),
        ('{"text": 3}', "text in line 1 .* is a int; a text is needed"),
        ('{"body": "x"}', "line 1 .* has the columns body; messages, question and answer"),
        ('{"question": "x"}', "line 1 .* has the columns question"),
        ('{"question": "x", "answer": ["y"]}', "answer in line 1 .* is a list"),
        ('{"messages": "hi"}', "messages in line 1 .* is a str; a list"),
        (
            '{"messages": [{"role": "bot", "content": "x"}]}',
            "message 1 in line 1 .*bot.*system, user",
        ),
        ('{"messages": [{"role": "user"}]}', "message 1 in line 1"),
        ('{"text": "\\ud800"}', "line 1 of .*: the text holds half a character"),
        ("[" * 100000, "line 1 .* is not JSON"),
    ],
)
def test_a_bad_line_is_named(lm, tmp_path, content, match):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(RequestError, match=match):
        made(lm, str(path))


def test_bad_files_are_named(lm, tmp_path, monkeypatch):
    (tmp_path / "latin.txt").write_bytes(b"fine\ncaf\xe9\n")
    with pytest.raises(RequestError, match="latin.txt is not UTF-8"):
        made(lm, str(tmp_path / "latin.txt"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(RequestError, match="bad.parquet is not a complete parquet file"):
        made(lm, str(tmp_path / "bad.parquet"))
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "body.parquet")
    with pytest.raises(RequestError, match="body.parquet has the columns body; messages"):
        made(lm, str(tmp_path / "body.parquet"))
    monkeypatch.setattr(records, "MOST_LINE", 50)
    with pytest.raises(RequestError, match="line 2 of .* is longer than 50 bytes"):
        made(lm, jsonl(tmp_path / "long.jsonl", {"text": "x"}, {"text": "x" * 100}))
    monkeypatch.setattr(records, "ROW_GROUP", 10)
    with pytest.raises(RequestError, match="row group of .* at most 10"):
        made(lm, str(tmp_path / "body.parquet"))


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("none.jsonl", "none.jsonl does not exist"),
        ("chats", "'chats' is neither a file .* nor the hub name"),
        ("a/b/c", "neither a file"),
        (".", r"\. is no data file; .jsonl, .parquet, .txt"),
    ],
)
def test_names_of_data_are_checked_without_reading(name, match):
    with pytest.raises(RequestError, match=match):
        records.check_name(name)


def test_text_is_read_in_blocks(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "TEXT_BLOCK", 30)
    path = tmp_path / "a.txt"
    path.write_text("twelve bytes\n" * 5 + "x" * 100)
    found = list(data.documents(lm, str(path)))
    assert [document.where for document in found[:3]] == [f"line {n} of {path}" for n in (1, 3, 5)]
    assert max(len(document.text) for document in found) <= 30
    assert "".join(decode(lm, d.text) for d in found) == path.read_text()


def test_a_name_of_the_hub_is_asked_for_its_training_split(lm, monkeypatch):
    import datasets

    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return datasets.Dataset.from_list([{"text": "x" * 50, "id": 3}] * 4)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(every(made(lm, "owner/name:part"))) == 4
    assert asked == [(("owner/name", "part"), {"split": "train"})]

    def fail(*args, **options):
        raise ConnectionError("no way\nat all")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(RequestError, match=r"owner/name could not be read \(no way\)"):
        made(lm, "owner/name")


def test_packs_that_cannot_hold_a_chunk_are_refused(lm):
    with pytest.raises(RequestError, match="pack-history is 19; a chunk has 20"):
        limits(lm, history=19)
    with pytest.raises(RequestError, match="pack-tokens is 1"):
        limits(lm, tokens=1)
