"""Cases from data sets with contexts: LongBench and what has its columns, or question and answer.

LongBench: Bai et al. 2023, arXiv 2308.14508. Its data sets are told apart by the column `dataset`,
which says how an answer is scored and how long it may be. The prompts are shorter than LongBench's
and not in a chat format: scores are for comparing policies, not with its tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from combkv_jax import records
from combkv_jax.errors import RequestError
from combkv_jax.evaluation import scores
from combkv_jax.evaluation.cases import Case, Question
from combkv_jax.evaluation.tasks import Encode

COLUMNS = records.Columns(
    ("context", "input", "answers", "dataset", "all_classes", "question", "answer"),
    "context, input and answers (or question and answer)",
)


class Kind(NamedTuple):
    """How a data set is asked. prompt: with `{input}` in it. score: (truth, text) -> 0 to 1, or
    None for the choice among the record's classes. first_line: whether only that one counts."""

    prompt: str
    score: Callable[[str, str], float] | None
    first_line: bool = False


QUESTION = Kind("\n\nQuestion: {input}\nAnswer:", scores.token_f1)
SUMMARY = Kind("\n\nSummary of all of the above:", scores.rouge_l)
# The context is worked examples, and the input one without its answer.
CLASSES = Kind("\n{input}", None, first_line=True)
EXAMPLES = Kind("\n\n{input}", scores.token_f1, first_line=True)
DIALOGUES = EXAMPLES._replace(score=scores.rouge_l)
RETRIEVAL = Kind(
    "\n\nThis is an abstract of one:\n\n{input}\n\nIt is of Paragraph", scores.number_share
)
COUNT = Kind("\n\nThe number of different paragraphs above is", scores.number_share)
CODE = Kind("{input}", scores.code_similarity)
# Name, and how many new tokens LongBench allows (its config/dataset2maxlen.json).
KINDS: dict[str, tuple[Kind, int]] = {
    "narrativeqa": (QUESTION, 128),
    "qasper": (QUESTION, 128),
    "multifieldqa_en": (QUESTION, 64),
    "multifieldqa_zh": (QUESTION, 64),
    "hotpotqa": (QUESTION, 32),
    "2wikimqa": (QUESTION, 32),
    "musique": (QUESTION, 32),
    "dureader": (QUESTION._replace(score=scores.rouge_l), 128),
    "gov_report": (SUMMARY, 512),
    "qmsum": (QUESTION._replace(score=scores.rouge_l), 512),
    "multi_news": (SUMMARY, 512),
    "vcsum": (SUMMARY, 512),
    "trec": (CLASSES, 64),
    "triviaqa": (EXAMPLES, 32),
    "samsum": (DIALOGUES, 128),
    "lsht": (CLASSES, 64),
    "passage_count": (COUNT, 32),
    "passage_retrieval_en": (RETRIEVAL, 32),
    "passage_retrieval_zh": (RETRIEVAL, 32),
    "lcc": (CODE, 64),
    "repobench-p": (CODE, 64),
}
UNKNOWN = (QUESTION, 64)


class _Asked(NamedTuple):
    where: str
    dataset: str
    context: str
    asked: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]


def dataset_cases(
    name_or_folder: str, encode: Encode, tokens: int, count: int, rng: np.random.Generator
) -> list[Case]:
    """`count` questions chosen at random, all if there are fewer; those about one text share it.

    name_or_folder: a hub name OWNER/NAME or OWNER/NAME:CONFIG, a .jsonl or .parquet file, or a
    folder of these. Contexts of more than `tokens` tokens lose their middle, as in LongBench;
    shorter ones stay as they are. Raises RequestError that names the file and the line or row.
    """
    if count < 1 or tokens < 1:
        raise RequestError(
            f"{count} questions with contexts of {tokens} tokens were asked for; 1 or more of both "
            "are needed."
        )
    kept: list[_Asked] = []
    for seen, asked in enumerate(_every(name_or_folder)):
        if seen < count:
            kept.append(asked)
        elif (place := rng.integers(seen + 1)) < count:  # all have the same chance
            kept[place] = asked
    if not kept:
        raise RequestError(f"{name_or_folder} holds no record.")
    questions: dict[str, list[Question]] = {}
    contexts: dict[str, np.ndarray] = {}
    for asked in kept:
        try:
            if asked.context not in contexts:
                contexts[asked.context] = _without_middle(encode(asked.context), tokens)
            questions.setdefault(asked.context, []).append(_question(encode, asked))
        except RequestError as error:
            raise RequestError(f"{asked.where}: {error}") from None
    return [Case(ids, tuple(questions[context])) for context, ids in contexts.items()]


def _every(name: str) -> Iterator[_Asked]:
    """The records of a file, of the hub or of all files of a folder, checked."""
    files = [name]
    if Path(name).is_dir():
        files = sorted(str(p) for p in Path(name).iterdir() if p.suffix in (".jsonl", ".parquet"))
        if not files:
            raise RequestError(f"the folder {name} holds no .jsonl or .parquet file.")
    for file in files:
        # Where no column says it, a file or a part of a data set of the hub is named after its set.
        named = Path(file).stem if Path(file).is_file() else file.rpartition(":")[2]
        for where, record in records.read(file, COLUMNS, split=None):
            yield _asked(where, record, named)


def _asked(where: str, record: dict[str, Any], named: str) -> _Asked:
    there = {column: value for column, value in record.items() if value is not None}
    asked = "input" if "input" in there else "question"
    answers = "answers" if "answers" in there else "answer"
    if not {"context", asked, answers} <= there.keys():
        raise COLUMNS.lacking(where, there)
    dataset = records.string(where, there, "dataset") if "dataset" in there else named
    found = _Asked(
        where,
        dataset.removesuffix("_e"),  # the sets of LongBench-E
        records.string(where, there, "context"),
        records.string(where, there, asked),
        _texts(where, there, answers),
        _texts(where, there, "all_classes") if "all_classes" in there else (),
    )
    kind, _ = KINDS.get(found.dataset, UNKNOWN)
    if not found.context or not found.answers or (kind.score is None and not found.classes):
        raise RequestError(
            f"{where} has {len(found.context)} characters of context, {len(found.answers)} "
            f"answers and {len(found.classes)} classes; a context and an answer are needed, and "
            "classes where one is to be chosen."
        )
    return found


def _texts(where: str, record: dict[str, Any], column: str) -> tuple[str, ...]:
    value = record[column]
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise RequestError(f"{column} in {where} is {str(value)[:80]}; a list of texts is needed.")
    return tuple(value)


def _without_middle(ids: Any, tokens: int) -> np.ndarray:
    """int32: the ids, or when they are more than `tokens` their first and last halves of that."""
    ids = np.asarray(ids, np.int32)
    behind = min(tokens, len(ids)) // 2
    return np.concatenate([ids[: min(tokens, len(ids)) - behind], ids[len(ids) - behind :]])


def _question(encode: Encode, asked: _Asked) -> Question:
    kind, new_tokens = KINDS.get(asked.dataset, UNKNOWN)
    prompt = np.asarray(encode(kind.prompt.format(input=asked.asked)), np.int32)
    return Question(prompt, new_tokens, functools.partial(_best, kind, asked))


def _best(kind: Kind, asked: _Asked, text: str) -> float:
    """The score with that answer which fits the text best."""
    if kind.first_line:
        text = text.lstrip("\n").partition("\n")[0]
    score = kind.score or functools.partial(scores.classified, asked.classes)
    return max(score(answer, text) for answer in asked.answers)
