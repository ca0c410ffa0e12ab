"""Exact recall through a compressed history: several questions of each, answered greedily.

Books, names, surnames, the noun and the sentence are those for judging, which nothing is trained
or chosen on. Histories are compressed and answered by the paths that users take.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from combkv_jax import console
from combkv_jax.errors import RequestError
from combkv_jax.evaluation import continuation, tasks
from combkv_jax.evaluation.tasks import Encode, Fact
from combkv_jax.generate import Sampling
from combkv_jax.language_model import LanguageModel

FACTS_PER_CHUNK = 8  # of `similar`
LENGTHS = (4096, 32768, 131072)  # tokens
PAIRS = 10  # of places in the novels

SURNAMES = """Ainsworth Babington Carmody Dunstable Eberhart Fotheringay Galsworthy Hathersage
    Inglethorpe Jellicoe Kesselring Lattimore Mandeville Netherby Ormsby Pemberton Quennell
    Rotherham Satterfield Thistlewood Umberton Vandermeer Wetherall Yardborough Zellweger Ackroyd
    Birtwistle Copperfield Dashiell Endicott Fairweather Gillespie Halloran Isherwood Jernigan
    Kirkpatrick Lathbury Montclair Northcote Oglethorpe Peverell Quartermain Ravenscroft Sotheby
    Tunstall Urquhart Valverde Wolverton Yeardley Zeffirelli Bracegirdle Cholmondeley Dinsmore
    Etheridge Featherstone Gainsborough Hollingsworth Illingworth Kettlewell Leatherby Merriweather
    Nightingale Osterman Pumphrey Rosenthal Silverstone Tattersall"""


@dataclasses.dataclass(frozen=True, eq=False)
class RecallCase:
    """A history of tokens, int32 [n], and what is asked of it."""

    tokens: np.ndarray
    asked: tuple[Fact, ...]


@dataclasses.dataclass(frozen=True)
class Recall:
    """Of one task at one length. exact: questions answered with all digits right, and no digit
    behind them. digits: digits right at their places. wrong: (digits wanted, what was said) of the
    others."""

    task: str
    tokens: int
    facts: int
    histories: int
    questions: int
    exact: int
    digits: float
    wrong: tuple[tuple[str, str], ...] = ()

    @property
    def rate(self) -> float:
        """Share of questions answered exactly."""
        return self.exact / self.questions


def draw_people(rng: np.random.Generator, count: int) -> list[Fact]:
    """Facts about `count` people, each sharing a first name and a surname with many others."""
    names = [f"{f} {s}" for f in tasks.NAMES["judge"].split() for s in SURNAMES.split()]
    if not 1 <= count <= len(names):
        raise RequestError(f"{count} people were asked for; 1 to {len(names)} can be made.")
    chosen = rng.choice(names, count, replace=False)
    return [Fact(str(name), f"{rng.integers(100000):05d}") for name in chosen]


def recall_case(
    encode: Encode, rng: np.random.Generator, task: str, num_tokens: int, chunk_size: int, ask: int
) -> RecallCase:
    """`num_tokens` tokens of the judging novels from a random place on, with facts in them.

    passkey: `ask` facts, as many as are asked for, in chunks of their own among plain text.
    similar: FACTS_PER_CHUNK in every chunk, of which `ask` are asked for. Raises RequestError when
    the length is too short for that.
    """
    if task not in tasks.RECALL_TASKS:
        known = ", ".join(tasks.RECALL_TASKS)
        raise RequestError(f"recall task {task!r} is not one of {known}.")
    chunks = num_tokens // chunk_size
    each = FACTS_PER_CHUNK if task == "similar" else 1
    if chunks * each < 1:
        raise RequestError(f"{num_tokens} tokens hold no chunk of {chunk_size}.")
    count = chunks * each if task == "similar" else min(ask, chunks)
    facts = draw_people(rng, count)
    with_facts = set(rng.choice(chunks, count // each, replace=False).tolist())
    waiting = list(facts)
    sentences = tasks.book_sentences(encode, "judge")
    place = int(rng.integers(len(sentences)))
    page: list[np.ndarray] = []
    made = []
    for index in range(chunks + 1):
        inside = [waiting.pop() for _ in range(each)] if index in with_facts else []
        pieces = [np.asarray(encode(f" {fact.sentence}"), np.int32) for fact in inside]
        size = chunk_size if index < chunks else num_tokens - chunks * chunk_size
        if not size:
            break
        room = size - sum(map(len, pieces))
        if room < 0:
            raise RequestError(f"chunk_size is {chunk_size}; {each} facts need {size - room}.")
        while sum(map(len, page)) < room:
            page.append(sentences[place % len(sentences)])
            place += 1
        made.append(tasks.with_insertions(rng, page, pieces, room))
    chosen = rng.permutation(len(facts))[:ask]
    return RecallCase(np.concatenate(made), tuple(facts[i] for i in chosen))


def ask_all(
    lm: LanguageModel, case: RecallCase, progress: Callable[[int], None] | None = None
) -> list[tuple[str, str]]:
    """(answer, digits wanted) of each question: the history is compressed once, and the questions
    are answered greedily, a row each, a token longer than what is asked for."""
    history = lm.compress(case.tokens, progress=progress)
    asked = [tasks.question(lm.tokens, fact) for fact in case.asked]
    longest = max(len(answer) for _, answer in asked)
    run = lm.start(
        [prompt for prompt, _ in asked], history, max_new_tokens=longest + 1, sampling=Sampling()
    )
    answers = [lm.text(row).strip() for row in run.run()]
    return [(a, fact.digits) for a, fact in zip(answers, case.asked, strict=True)]


def share(task: str, chunks: int, histories: int, questions: int) -> int:
    """Questions of each history, that has a chunk for every passkey."""
    each = -(-questions // histories)
    return min(each, chunks) if task == "passkey" else each


def measure(
    lm: LanguageModel,
    task: str,
    num_tokens: int,
    *,
    histories: int,
    questions: int,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Recall:
    """Asks `questions` in all, the same number of each history but the last: of `histories`
    histories, or of more where one has no chunk for every passkey. progress: told of compressed
    tokens."""
    chunks = max(1, num_tokens // lm.config.chunk_size)
    each = share(task, chunks, histories, questions)
    digits, total, made, wrong = 0.0, 0, 0, []
    while total < questions:
        rng = np.random.default_rng([seed, tasks.RECALL_TASKS.index(task), num_tokens, made])
        ask = min(each, questions - total)
        case = recall_case(lm.tokens, rng, task, num_tokens, lm.config.chunk_size, ask)
        made += 1
        for answer, wanted in ask_all(lm, case, progress):
            if not tasks.says(answer, wanted):
                wrong.append((wanted, answer))
            digits += sum(a == b for a, b in zip(answer, wanted, strict=False)) / len(wanted)
            total += 1
    facts = chunks * FACTS_PER_CHUNK if task == "similar" else each
    right = total - len(wrong)
    return Recall(task, num_tokens, facts, made, total, right, digits / total, tuple(wrong))


def report(
    lm: LanguageModel,
    lengths: tuple[int, ...],
    folder: Path,
    *,
    task_names: tuple[str, ...],
    histories: int,
    questions: int,
) -> None:
    """Measures recall at these lengths (tokens), as `measure` does, and then the continuation of
    novels behind 4k tokens; of these only what `task_names`, from `tasks.MEASURED`, ask for.
    Prints a table of each, and writes `recall.json` into the folder after every cell."""
    folder.mkdir(parents=True, exist_ok=True)
    recalled = [task for task in task_names if task in tasks.RECALL_TASKS]
    found: dict[str, list] = {"recall": [], "continuation": []}

    def keep(name: str, result, begin: float) -> None:
        found[name].append({**dataclasses.asdict(result), "seconds": time.monotonic() - begin})
        console.write_json(folder / "recall.json", found)

    cells = []
    for num_tokens in lengths:
        for task in recalled:
            begin = time.monotonic()
            chunks = max(1, num_tokens // lm.config.chunk_size)
            made = -(-questions // share(task, chunks, histories, questions))
            with console.progress(made * num_tokens, f"{task}, {num_tokens}") as advance:
                cell = measure(
                    lm, task, num_tokens, histories=histories, questions=questions, progress=advance
                )
            keep("recall", cell, begin)
            console.note(f"{task}, {num_tokens} tokens: {cell.rate:.3f} exact")
            cells.append(
                (
                    task,
                    num_tokens,
                    cell.facts,
                    cell.histories,
                    cell.questions,
                    cell.rate,
                    cell.digits,
                )
            )
    if cells:
        header = ("task", "tokens", "facts", "histories", "questions", "exact", "digits right")
        console.print_table(cells, header)
    if "continuation" in task_names:
        begin = time.monotonic()
        chunks = max(1, 4096 // lm.config.chunk_size)
        text = continuation.measure(lm, pairs=PAIRS, chunks=chunks)
        keep("continuation", text, begin)
        if cells:
            print()
        console.print_table(continuation.table(text), ("history", "NLL", "perplexity"))
        print(
            f"The compressed history gives {text.share:.2f} of what the full cache gives; "
            "half-way is 0.5."
        )
