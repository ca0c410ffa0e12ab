"""Cases from data sets: what is read, cut, asked and scored, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from combkv_jax.errors import RequestError
from combkv_jax.evaluation import longbench
from tests import text

TOKENIZER = text.byte_tokenizer()


def encode(some):
    return TOKENIZER(some, add_special_tokens=False)["input_ids"]


def decode(ids):
    return TOKENIZER.decode(ids)


def record(number=0, **columns):
    made = {"input": f"Who is {number}?", "context": f"{number} is x{number}.", "answers": ["x"]}
    return made | {"length": 3, "dataset": "qasper", "all_classes": None} | columns


def jsonl(path, *records):
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records))
    return str(path)


def made(name, tokens=100, count=50, seed=0):
    return longbench.dataset_cases(str(name), encode, tokens, count, np.random.default_rng(seed))


def only(found):
    """The one case and its one question."""
    [case] = found
    [question] = case.questions
    return case, question


@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("size", [1, 2, 7, 8, 41])
def test_long_contexts_lose_their_middle(tmp_path, tokens, size):
    context = "".join(chr(48 + i) for i in range(size))
    case, _ = only(made(jsonl(tmp_path / "a.jsonl", record(context=context)), tokens))
    assert case.tokens.dtype == np.int32
    if size <= tokens:
        assert decode(case.tokens) == context
    else:
        last = tokens // 2
        assert decode(case.tokens) == context[: tokens - last] + context[size - last :]


@pytest.mark.parametrize(
    ("columns", "prompt", "new_tokens", "said"),
    [
        ({}, "\n\nQuestion: Who is {0}?\nAnswer:", 128, {"an X!": 1, "x y": 2 / 3, "y": 0}),
        ({"dataset": "unknown"}, "Answer:", 64, {"x": 1, "y": 0}),
        ({"dataset": "hotpotqa_e", "answers": ["a b", "c"]}, "Answer:", 32, {"c": 1, "b": 1}),
        ({"dataset": "gov_report", "input": ""}, "Summary", 512, {"x y": 2 / 3}),
        ({"dataset": "qmsum"}, "Who is {0}?", 512, {"x y": 2 / 3}),
        ({"dataset": "samsum"}, "\n\nWho is {0}?", 128, {"\nx\ny": 1}),
        ({"dataset": "triviaqa"}, "\n\nWho is {0}?", 32, {"x\ny": 1, "y\nx": 0}),
        (
            {"dataset": "trec", "all_classes": ["x", "z"]},
            "\nWho is {0}?",
            64,
            {"x": 1, "x, z": 0.5, "z\nx": 0},
        ),
        ({"dataset": "passage_count", "answers": ["7"]}, " is", 32, {"7": 1, "6 or 7": 0.5}),
        ({"dataset": "passage_retrieval_en", "answers": ["Paragraph 7"]}, "Who", 32, {" 7": 1}),
        ({"dataset": "lcc", "input": "", "answers": ["abcd"]}, "", 64, {"abxy": 0.5}),
        ({"dataset": "repobench-p", "answers": ["abcd"]}, "Who is {0}?", 64, {"abcd": 1}),
    ],
)
def test_each_data_set_is_asked_and_scored_in_its_way(tmp_path, columns, prompt, new_tokens, said):
    asked = record(**columns, input="Who is {0}?") if "input" not in columns else record(**columns)
    _, question = only(made(jsonl(tmp_path / "a.jsonl", asked)))
    assert prompt in decode(question.prompt)  # braces of a question are no fields
    assert question.prompt.dtype == np.int32
    assert question.new_tokens == new_tokens
    assert {t: question.score(t) for t in said} == pytest.approx(said)


def test_questions_about_one_text_share_it(tmp_path):
    same = [record(n, context="one text") for n in (3, 5, 4)]
    first, other = made(jsonl(tmp_path / "a.jsonl", *same[:2], record(9), same[2]))
    assert [decode(q.prompt)[12:21] for q in first.questions] == [f"Who is {n}?" for n in (3, 5, 4)]
    assert decode(other.tokens) == "9 is x9."
    assert first.place == other.place == {}


def test_some_of_many_are_chosen_by_chance(tmp_path):
    name = jsonl(tmp_path / "a.jsonl", *map(record, range(40)))
    chosen = [[decode(case.tokens) for case in made(name, count=7, seed=s)] for s in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert all(len(set(some)) == 7 for some in chosen)
    often = [
        int(decode(c.tokens).split()[0]) for s in range(60) for c in made(name, count=7, seed=s)
    ]
    assert 15 < np.mean(often) < 24  # 19.5, all the same


def test_folders_parquet_files_and_plain_columns_are_read(tmp_path):
    plain = {"question": "Who?", "answer": "x", "context": "c1"}
    (tmp_path / "readme.txt").write_text("no data")
    pq.write_table(pa.Table.from_pylist([record(1), record(2)]), tmp_path / "b.parquet")
    jsonl(tmp_path / "samsum.jsonl", plain)
    found = made(tmp_path)
    assert [decode(case.tokens) for case in found] == ["1 is x1.", "2 is x2.", "c1"]
    assert [case.questions[0].new_tokens for case in found] == [
        128,
        128,
        128,
    ]  # samsum, by its file
    (tmp_path / "none").mkdir()
    with pytest.raises(RequestError, match="none holds no .jsonl or .parquet file"):
        made(tmp_path / "none")


def test_a_name_of_the_hub_is_asked_for_its_test_split(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        rows = {"train": 1, "test": 2, "validation": 3} if args[0] == "an/other" else {"dev": 1}
        return datasets.DatasetDict(
            {split: datasets.Dataset.from_list([record(n)]) for split, n in rows.items()}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    case, _ = only(made("an/other:qasper"))
    assert decode(case.tokens) == "2 is x2."
    assert asked == [(("an/other", "qasper"), {"split": None})]
    with pytest.raises(
        RequestError, match="a/b has the splits dev; one of test, validation, train"
    ):
        made("a/b")


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('{"context": ', r"line 2 of .*bad.jsonl is not JSON"),
        ("[]", "line 2 of .* holds a list"),
        ('{"body": 1}', "line 2 .* has the columns body; context, input and answers"),
        ("{}", "line 2 .* has the columns none;"),
        (json.dumps(record(context=None)), "line 2 .* has the columns input, answers, length"),
        (json.dumps(record(context=3)), "context in line 2 .* is a int; a text"),
        (json.dumps(record(context="")), "line 2 .* has 0 characters of context"),
        (json.dumps(record(answers=[])), "line 2 .* 0 answers"),
        (json.dumps(record(answers=[3])), r"answers in line 2 .* is \[3\]; a list of texts"),
        (json.dumps(record(answers={"a": 1})), "answers in line 2 .* a list of texts"),
        (json.dumps(record(dataset=["x"])), "dataset in line 2 .* is a list"),
        (json.dumps(record(dataset="trec")), "line 2 .* 0 classes"),
    ],
)
def test_a_bad_record_is_named(tmp_path, line, match):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(record())}\n{line}\n")
    with pytest.raises(RequestError, match=match):
        made(path, count=1)


def test_what_cannot_be_read_is_refused(tmp_path):
    path = tmp_path / "half.jsonl"
    path.write_text(json.dumps(record(context="\ud800")))
    lm = text.byte_model("lse", 1)
    with pytest.raises(RequestError, match="line 1 of .*half a character"):
        longbench.dataset_cases(str(path), lm.tokens, 9, 1, np.random.default_rng(0))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(RequestError, match="empty.jsonl holds no record"):
        made(tmp_path / "empty.jsonl")
    with pytest.raises(RequestError, match="0 questions with contexts of 9 tokens"):
        made(path, 9, 0)
    with pytest.raises(RequestError, match="neither a file .* nor the hub name"):
        made("longbench")
