"""Every cache on the same contexts, questions and texts: what `evaluate.py --cache` does."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from combkv_jax import console
from combkv_jax.cache import full_cache_bytes
from combkv_jax.errors import RequestError
from combkv_jax.evaluation import cases, comparison_report, longbench, reading, tasks
from combkv_jax.evaluation.budgets import Asked, Budget, Setting, settle
from combkv_jax.evaluation.cases import Case
from combkv_jax.evaluation.cells import Cells
from combkv_jax.evaluation.reading import Reading
from combkv_jax.language_model import LanguageModel
from combkv_jax.model import parameters
from combkv_jax.weights import tailored

TEXT = ("perplexity", "agreement")  # tasks about how novels go on behind a page of them
PAGES = 4  # of these
NEXT = 128  # tokens predicted behind each
BINS = 8  # of them, by position
UNLIMITED = ("window", "comb")  # caches that read more tokens than the model has positions


@dataclasses.dataclass(frozen=True)
class Request:
    """What to compare. lengths: tokens of context. tasks: of `task_names`, and data sets as
    `longbench.dataset_cases` takes them. questions: of each of these at each length. model: as it
    was named, and command: for the report."""

    model: str
    caches: tuple[Asked, ...]
    budgets: tuple[Budget, ...]
    lengths: tuple[int, ...]
    tasks: tuple[str, ...]
    questions: int
    seed: int
    command: str


def task_names() -> tuple[str, ...]:
    """What can be asked for."""
    return (*cases.TASKS, *TEXT)


def compare(lm: LanguageModel, request: Request, folder: Path) -> None:
    """Measures the cells that are not in `folder` yet, prints the tables and writes the report."""
    for tokens in request.lengths:  # before cases are made, which takes long where nothing fits
        if all(asked.policy not in UNLIMITED for asked in request.caches):
            _check_positions(lm, Setting("full", {}, tokens), "a cache")
    made = {
        tokens: {
            task: _cases(lm, request, task, tokens) for task in request.tasks if task not in TEXT
        }
        for tokens in request.lengths
    }
    every = [case for some in made.values() for several in some.values() for case in several]
    room = reading.room(question for case in every for question in case.questions)
    rows = {tokens: settings(lm, request, tokens, room) for tokens in request.lengths}
    cells = Cells(folder, _identity(lm, request))
    for number, tokens in enumerate(rows):
        if number:  # programs of another length are not needed again
            jax.clear_caches()
        _Length(lm, request, tokens, room, made[tokens], cells).measure(rows[tokens])
    found = [
        cells.get(key(row, task, made[row.tokens]))
        for some in rows.values()
        for row in some
        for task in request.tasks
    ]
    comparison_report.write(folder, request.command, found)


def settings(lm: LanguageModel, request: Request, tokens: int, room: int) -> list[Setting]:
    """The caches with all their options at one length and `room` tokens more, each once. Raises
    RequestError for what cannot be."""
    rows: list[Setting] = []
    full = full_cache_bytes(lm.config.text, tokens, lm.model.dtype)
    for budget in request.budgets:
        if budget.holds(tokens, full):
            console.note(
                f"A budget of {budget.text} holds all of {tokens} tokens: caches whose size it "
                "sets drop nothing, and are like the full one."
            )
    for asked in request.caches:
        for budget in request.budgets:
            row = settle(lm, asked, budget, tokens, room)
            if row not in rows:
                rows.append(row)
    for row in rows:
        _check_positions(lm, row, f"the {row.policy} cache")
    if "agreement" in request.tasks:
        _check_positions(lm, Setting("full", {}, tokens, room), "agreement with the full cache")
    return rows


def _check_positions(lm: LanguageModel, row: Setting, what: str) -> None:
    limit = lm.config.text.max_position_embeddings
    needed = row.recent + row.room
    if row.recent < row.tokens:
        needed += int(lm.model.recent_offset(np.int32(row.tokens)))
    if row.policy != "window" and needed > limit:
        raise RequestError(
            f"{what} needs {needed} positions for {row.tokens} tokens and {row.room} behind them; "
            f"this model has {limit}, so use a smaller --ctx, or shorter questions."
        )


def key(row: Setting, task: str, made: Mapping[str, Sequence[Case]]) -> dict[str, Any]:
    """What tells a cell. made: the cases of tasks that ask questions; a data set may change."""
    digest = hashlib.sha256()
    for case in made.get(task, ()):
        for ids in (case.tokens, *(question.prompt for question in case.questions)):
            digest.update(ids.tobytes())
    return {**dataclasses.asdict(row), "task": task, "cases": digest.hexdigest()[:16]}


def _identity(lm: LanguageModel, request: Request) -> dict[str, Any]:
    """What must be the same for cells to stand in one table."""
    digest = hashlib.sha256(tailored.identity(lm.model).encode())
    for name, array in parameters(lm.model).items():
        if name.startswith("history."):
            digest.update(np.asarray(array.reshape(-1)[: tailored.SAMPLE], np.float32).tobytes())
    return {
        "model": request.model,
        "weights": digest.hexdigest()[:16],
        "dtype": str(lm.model.dtype),
        "device": jax.devices()[0].device_kind,
        "seed": request.seed,
        "questions": request.questions,
        "texts": [PAGES, NEXT],
    }


def _begin(lm: LanguageModel) -> np.ndarray:
    """A first token, where the tokenizer has one."""
    return lm.tokens("", special=True)


def _cases(lm: LanguageModel, request: Request, task: str, tokens: int) -> list[Case]:
    """Of a task that asks questions, the same for the same seed: contexts of `tokens` tokens, or
    fewer where a data set has no more."""
    make = cases.TASKS.get(task) or functools.partial(longbench.dataset_cases, task)
    begin = _begin(lm)
    rng = np.random.default_rng([request.seed, tokens, *task.encode()])
    ask = {"tokens": tokens - len(begin), "count": request.questions, "rng": rng}
    return [
        dataclasses.replace(case, tokens=np.concatenate([begin, case.tokens]))
        for case in make(encode=lm.tokens, **ask)
    ]


class _Length:
    """The cells of one length. made: the cases of each task that asks questions."""

    def __init__(
        self,
        lm: LanguageModel,
        request: Request,
        tokens: int,
        room: int,
        made: dict[str, list[Case]],
        cells: Cells,
    ):
        self.lm, self.request, self.tokens = lm, request, tokens
        self.made, self.cells = made, cells
        self.full = Setting("full", {}, tokens, room)
        self.full_bytes = self.full.nbytes(lm)["device"]
        self.expected: list[np.ndarray] = []  # of each page, logits behind the full cache

    def measure(self, rows: Sequence[Setting]) -> None:
        """Adds what is missing."""
        missing = [(row, task) for row in rows for task in self.request.tasks]
        missing = [
            (row, task) for row, task in missing if key(row, task, self.made) not in self.cells
        ]
        pages = self.pages() if any(task in TEXT for _, task in missing) else []
        # Of each row its tasks about questions, and at once those about texts.
        work: list[tuple[Setting, list[str]]] = []
        for row in rows:
            left = [task for other, task in missing if other is row]
            work += [(row, [task]) for task in left if task not in TEXT]
            texts = [task for task in left if task in TEXT]
            work += [(row, texts)] if texts else []
        reads = sum(len(self.made.get(names[0], pages)) for _, names in work)
        with console.progress(reads * self.tokens, f"{self.tokens} tokens") as advance:
            for row, names in work:
                if names[0] in self.made:
                    found = {names[0]: self._questions(row, self.made[names[0]], advance)}
                else:
                    found = self._texts(row, names, pages, advance)
                for task, cell in found.items():
                    self.cells.add({**key(row, task, self.made), **cell})

    def pages(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(context, what follows it and one token more) of places in the novels for judging."""
        begin = _begin(self.lm)
        made = tasks.text_cases(
            self.lm.tokens,
            self.request.seed,
            "judge",
            cases=PAGES,
            chunks=1,
            chunk_size=self.tokens - len(begin),
            next_tokens=NEXT,
        )
        return [(np.concatenate([begin, *case.chunks]), case.tokens) for case in made]

    def _questions(self, row: Setting, made: Sequence[Case], advance) -> dict[str, Any]:
        """The cell of a task about questions."""
        scores: dict[tuple, list[float]] = {}
        said, held = [], {"device": -1}
        for case in made:
            read = Reading.of(self.lm, row, case.tokens)
            held = max(held, read.held, key=lambda one: one["device"])  # contexts may be shorter
            answers = read.answers(case.questions)
            said += answers
            place = tuple(sorted(case.place.items()))
            scores.setdefault(place, []).extend(
                question.score(answer)
                for question, answer in zip(case.questions, answers, strict=True)
            )
            advance(self.tokens)
        every = [score for some in scores.values() for score in some]
        by_place = [
            {**dict(place), "score": float(np.mean(some)), "questions": len(some)}
            for place, some in sorted(scores.items())
        ]
        return {
            "score": float(np.mean(every)),
            "asked": len(every),
            "answers": said,
            "by_place": by_place,
            **self._cost(read) | held,
        }

    def _texts(
        self, row: Setting, names: Sequence[str], pages: Sequence[tuple], advance
    ) -> dict[str, dict[str, Any]]:
        """The cells of the tasks about texts, `names` of them."""
        nll, equal, divergence = [], [], []
        for number, (context, after) in enumerate(pages):
            read = Reading.of(self.lm, row, context)
            logits = read.logits(after[:-1])
            log_p = _log_softmax(logits)
            nll.append(-np.take_along_axis(log_p, after[1:, None], axis=1)[:, 0])
            if "agreement" in names:
                wanted = self._expected(number, context, after, row, logits)
                wanted = _log_softmax(wanted)
                equal.append(np.argmax(log_p, axis=1) == np.argmax(wanted, axis=1))
                divergence.append(np.sum(np.exp(wanted) * (wanted - log_p), axis=1))
            advance(self.tokens)
        cost = self._cost(read)
        by_position = np.mean(nll, axis=0).reshape(BINS, -1).mean(axis=1)
        found = {"perplexity": {"nll": float(np.mean(nll)), "by_position": by_position}}
        if "agreement" in names:
            found["agreement"] = {"equal": np.mean(equal), "kl": np.mean(divergence)}
        size = {"pages": len(pages), "predicted_each": len(nll[0])}
        return {name: {**found[name], **size, **cost} for name in names}

    def _cost(self, read: Reading) -> dict[str, Any]:
        speed = read.tokens_a_second()
        return {**read.held, "full": self.full_bytes, "tokens_per_second": speed}

    def _expected(self, number: int, context, after, row: Setting, logits) -> np.ndarray:
        """The full cache's logits of a page, kept for the other rows."""
        if number == len(self.expected):
            if row.policy != "full":
                logits = Reading.of(self.lm, self.full, context).logits(after[:-1])
            self.expected.append(logits)
        return self.expected[number]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, float32."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
