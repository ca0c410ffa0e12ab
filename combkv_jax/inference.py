"""What `infer.py` does: a context, a question about it, the answer, and what it all cost."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from combkv_jax import attention, console
from combkv_jax.cache import POLICIES, History, full_cache_bytes, nbytes
from combkv_jax.chunking import split_history
from combkv_jax.compress import compress
from combkv_jax.config import CombConfig
from combkv_jax.errors import RequestError
from combkv_jax.evaluation import tasks
from combkv_jax.generate import Sampling
from combkv_jax.language_model import LanguageModel
from combkv_jax.model import is_untrained
from combkv_jax.planner import Plan
from combkv_jax.weights import read_source_config

CACHES = ("comb", *POLICIES)
MOST_FILE_BYTES = 2**30  # of one context or batch file


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked behind a context: prompts, one a row, and the answer where it is known."""

    prompts: list[np.ndarray]
    answer: str | None = None


@dataclasses.dataclass
class Run:
    """Figures of one run; bytes, seconds and tokens."""

    cache: str
    attention: list[str]  # the implementations that computed it
    history_tokens: int
    recent_tokens: int
    new_tokens: int
    cache_bytes_device: int
    cache_bytes_host: int
    full_cache_bytes: int
    compress_seconds: float
    seconds_to_first_token: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float | None
    peak_memory_host: int
    peak_memory_device: int | None
    answers: list[str] = dataclasses.field(default_factory=list)
    expected: str | None = None
    correct: bool | None = None
    untrained: bool | None = None


def read_text(path: str | Path) -> str:
    """A text file for --context or --batch. Raises RequestError when it is missing, a directory,
    empty, larger than 1 GiB, or not UTF-8."""
    path = Path(path)
    if path.is_dir():
        raise RequestError(f"{path} is a directory; a UTF-8 text file is needed.")
    try:
        with path.open("rb") as file:  # also of what has no size, such as a pipe
            content = file.read(MOST_FILE_BYTES + 1)
        text = content.decode("utf-8-sig") if len(content) <= MOST_FILE_BYTES else None
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8 text."
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{path} cannot be read: {reason}.") from None
    if text is None:
        raise RequestError(f"{path} has more than {MOST_FILE_BYTES} bytes, the most that is read.")
    if not text.strip():
        raise RequestError(f"{path} is empty; a text is needed.")
    return text


def read_prompts(path: str | Path) -> list[str]:
    """The prompts of a --batch file: one a line, or JSON lines {"prompt": ...} in a .jsonl file.
    Blank lines are left out. Raises RequestError naming the line that cannot be read."""
    prompts = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        if Path(path).suffix.lower() == ".jsonl":
            try:
                line = json.loads(line)["prompt"]
            except (ValueError, RecursionError, KeyError, TypeError):
                line = None
            if not isinstance(line, str) or not line.strip():
                raise RequestError(f'{path} line {number} is not a JSON object {{"prompt": text}}.')
        prompts.append(line)
    return prompts


def needle(lm: LanguageModel, num_tokens: int, depth: float, seed: int):
    """A haystack of `num_tokens` tokens of the bundled novels with a fact in it, and the question
    for the fact: (tokens int32 [num_tokens], Question)."""
    fact = tasks.draw_facts(np.random.default_rng(seed), 1)[0]
    begin = lm.tokens("", special=True)  # a first token, where the tokenizer has one
    tokens = tasks.haystack(lm.tokens, num_tokens - len(begin), fact, depth)
    prompt, _ = tasks.question(lm.tokens, fact)
    return np.concatenate([begin, tokens]), Question([prompt], fact.digits)


def answer(
    lm: LanguageModel,
    context: np.ndarray,
    question: Question,
    *,
    cache: str,
    window: int,
    max_new_tokens: int,
    sampling: Sampling,
    bits: int | None = None,
    chunk_batch: int | None = None,
    show: Callable[[str], None] = lambda piece: None,
) -> Run:
    """Reads the context, answers the question and measures both.

    context: int32 [n], may be empty. cache: one of CACHES. window: newest context tokens kept
    whole (`comb`), or all that is kept but the first ones (`window`); the other policies keep
    what they do by default. bits: of the numbers that CODED caches keep (None: 16 in `comb`, 4 in
    `quantized`). show: given the first row's text as it comes. Raises RequestError for what the
    model or cache cannot hold.
    """
    begin = time.perf_counter()
    recent, history, compress_seconds = context, None, 0.0
    if cache == "comb" and len(context):
        chunks, recent = split_history(context, window, lm.config.chunk_size)
        if chunks:
            with console.progress(sum(map(len, chunks)), "Compressing") as advance:
                history = compress(
                    lm.model, [chunks], chunk_batch=chunk_batch, bits=bits or 16, progress=advance
                )
            jax.block_until_ready(history)
            compress_seconds = time.perf_counter() - begin
    prompts = [np.concatenate([recent, prompt]) for prompt in question.prompts]
    longest = max(map(len, prompts))
    if cache != "window":
        _check_positions(lm, cache, longest + max_new_tokens, history)
    options = {"window": window} if cache == "window" else {}
    if cache == "quantized" and bits is not None:
        options = {"bits": bits}
    run = lm.start(
        prompts,
        history,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        cache="full" if cache == "comb" else cache,
        cache_options=options,
    )
    jax.block_until_ready(run.state)
    first_token = time.perf_counter() - begin
    if len(prompts) == 1:
        texts, new_tokens, rate = _stream(lm, run, show)
    else:
        run.warm_up()
        start = time.perf_counter()
        rows = run.run()
        new_tokens = sum(map(len, rows))
        rate = (new_tokens - len(rows)) / (time.perf_counter() - start) or None
        texts = [lm.text(row) for row in rows]
    old = 0 if history is None else int(history.count[0])
    held = nbytes(run.cache)
    peak = console.peak_memory()
    total = old + sum(map(len, prompts))
    return Run(
        cache=cache,
        attention=attention.used(),
        history_tokens=old,
        recent_tokens=longest,
        new_tokens=new_tokens,
        cache_bytes_device=held["device"],
        cache_bytes_host=held["host"],
        full_cache_bytes=full_cache_bytes(
            lm.config.text, len(prompts) * (old + longest + max_new_tokens), lm.model.dtype
        ),
        compress_seconds=compress_seconds,
        seconds_to_first_token=first_token,
        prefill_tokens_per_second=total / first_token,
        decode_tokens_per_second=rate,
        peak_memory_host=peak["host"],
        peak_memory_device=peak["device"],
        answers=texts,
        expected=question.answer,
        correct=None if question.answer is None else tasks.says(texts[0], question.answer),
        untrained=is_untrained(lm.model) if history is not None else None,
    )


def _stream(lm: LanguageModel, run, show) -> tuple[list[str], int, float | None]:
    """The text of one row, the tokens drawn, and tokens/s without the first step's compile."""
    pieces, times = [], []

    def timed():
        for tokens in run:
            times.append(time.perf_counter())
            yield tokens

    for piece in lm.stream(timed()):
        pieces.append(piece)
        show(piece)
    rate = (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else None
    return ["".join(pieces)], len(times), rate


def _check_positions(lm: LanguageModel, cache: str, tokens: int, history: History | None) -> None:
    """Recent tokens must stay within the positions that the model knows."""
    offset = 0 if history is None else int(lm.model.recent_offset(history.count)[0])
    limit = lm.config.text.max_position_embeddings
    if offset + tokens <= limit:
        return
    if cache != "comb":
        raise RequestError(
            f"the {cache} cache of this model ends at {limit} tokens and {tokens} are needed; use "
            "--cache comb, or a shorter --ctx or --context."
        )
    raise RequestError(
        f"{tokens} recent tokens behind a chunk of {offset} pass this model's {limit} positions; "
        "use a smaller --window, a shorter prompt or fewer new tokens."
    )


def table(run: Run) -> list[tuple[str, Any]]:
    """The run's figures for people, a row each."""
    rows = [
        ("cache", run.cache),
        ("attention by", ", ".join(run.attention)),
        ("history tokens (compressed)", run.history_tokens),
        ("recent tokens (prompt included)", run.recent_tokens),
        ("new tokens", run.new_tokens),
        ("cache on device", console.size(run.cache_bytes_device)),
        ("cache on host", console.size(run.cache_bytes_host)),
        ("full cache would be", console.size(run.full_cache_bytes)),
        ("times smaller on device", f"{run.full_cache_bytes / run.cache_bytes_device:.2f}"),
        ("time to first token", console.duration(run.seconds_to_first_token)),
        ("  of it compressing", console.duration(run.compress_seconds)),
        ("prefill", f"{run.prefill_tokens_per_second:.0f} tokens/s"),
        (
            "decode",
            f"{run.decode_tokens_per_second:.1f} tokens/s"
            if run.decode_tokens_per_second
            else "too short to time",
        ),
        ("peak memory, host", console.size(run.peak_memory_host)),
    ]
    if run.peak_memory_device:
        rows.append(("peak memory, device", console.size(run.peak_memory_device)))
    return rows


def verdict(run: Run) -> str:
    """The check of a haystack's answer, in a sentence or two."""
    if run.correct:
        return f"Right: the haystack's code is {run.expected}."
    said = f"Wrong: the haystack's code is {run.expected}."
    if run.untrained:
        said += (
            " The history's projections of this model are untrained copies: right at one or a few "
            "chunks, not to be relied on beyond."
        )
    return said


def as_json(run: Run, command: Sequence[str], model: str) -> dict[str, Any]:
    """The run's figures for programs."""
    return {"command": " ".join(command), "model": model, **dataclasses.asdict(run)}


def planned_config(source: str) -> CombConfig:
    """The configuration to plan for, read without weights and where possible without the hub."""
    return read_source_config(source, note=console.note)


def plan_table(plan: Plan) -> list[tuple[str, str]]:
    """A plan for people, a row each."""
    rows = [("GPU", plan.gpu), ("mesh", plan.mesh)]
    rows += [
        (label, console.size(getattr(plan, name)))
        for label, name in (
            ("weights", "weights"),
            ("cache", "cache"),
            ("full cache would be", "full_cache"),
            ("temporaries of a step", "temporaries"),
            ("peak", "peak"),
            ("device memory", "memory"),
        )
    ]
    rows.append(("fits", "yes" if plan.fits else "no"))
    rows.append(("time a token, at least", f"{1000 * plan.seconds_a_token:.2f} ms (bandwidth)"))
    return rows + [("note", line) for line in plan.notes]
