"""What a run trains on: stages one after the other, each with its rates and a mixture of lessons.

A recipe is a small file, TOML or JSON; `combkv_jax/assets/recipe.toml` is the one that `train.py`
follows when it is told nothing else. Every step trains on one lesson of its stage, drawn by weight.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from combkv_jax.errors import RequestError

SHIPPED = Path(__file__).parents[1] / "assets" / "recipe.toml"
MOST_BYTES = 1 << 20  # of a recipe file

# Objective -> what each term of the loss counts: plain cross-entropy, and forward and reverse KL
# to the same frozen model that has the whole history in front of it. Distilled, KL counts twice
# what cross-entropy does.
OBJECTIVES = {
    "lookup": None,
    "recall": None,
    "next": (1.0, 0.0, 0.0),
    "answer": (1.0, 0.0, 0.0),
    "reconstruct": (1.0, 0.0, 0.0),
    "distill": (1.0, 1.0, 1.0),
}
TERMS = ("nll", "forward", "reverse")


class Rates(NamedTuple):
    """A stage's learning rates: `warmup` of its `steps` rising, then constant, then falling over
    the last `decay` share."""

    rate: float
    gate_rate: float
    steps: int
    warmup: int
    decay: float


@dataclasses.dataclass(frozen=True)
class Lesson:
    """One thing to learn.

    objective: "lookup" (where facts stand in a pool of encoded chunks) or "recall" (what they say),
        both without data of one's own; "next" (every recent token), "answer" (replies only; of a
        text all that follows its history), "distill" (as answer, and as the full context has it)
        or "reconstruct" (what the history says, again).
    data: a file or the name of a data set (`data.documents`).
    nll, forward, reverse: weights of cross-entropy and of KL(full || ours) and KL(ours || full);
        None: the objective's own.
    chunks: most chunks of a text's history; None: as many as a pack holds.
    """

    objective: str
    data: str | None = None
    nll: float | None = None
    forward: float | None = None
    reverse: float | None = None
    chunks: int | None = None

    def __post_init__(self):
        if self.objective not in OBJECTIVES:
            raise RequestError(
                f"objective {self.objective!r} is not known; use {', '.join(OBJECTIVES)}."
            )
        own = [n for n in ("data", *TERMS, "chunks") if getattr(self, n) is not None]
        makes_data = OBJECTIVES[self.objective] is None
        if makes_data and own:
            raise RequestError(
                f"the objective {self.objective} takes no {own[0]}; it makes its own data."
            )
        if not makes_data and not self.data:
            raise RequestError(
                f"the objective {self.objective} needs data: a .jsonl, .parquet or .txt file, or "
                "the hub name OWNER/NAME of a data set."
            )
        if not makes_data and not any(self.terms):
            raise RequestError("nll, forward and reverse are all 0; one must be more.")

    @property
    def terms(self) -> tuple[float, float, float]:
        """The weights of (nll, forward, reverse)."""
        own = OBJECTIVES[self.objective]
        mine = (getattr(self, name) for name in TERMS)
        return tuple(d if x is None else x for x, d in zip(mine, own, strict=True))

    @property
    def label(self) -> str:
        """Its name in logs."""
        return self.objective if self.data is None else f"{self.data} {self.objective}"


@dataclasses.dataclass(frozen=True)
class Stage:
    """`steps` steps, of lessons drawn with these weights. The rest is as in `Rates`."""

    steps: int
    lessons: tuple[Lesson, ...]
    weights: tuple[float, ...]
    rate: float
    gate_rate: float
    warmup: int
    decay: float

    def __post_init__(self):
        for name in ("rate", "gate_rate"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise RequestError(f"{name} is {value}; it must be a positive number.")
        if not 0 <= self.decay <= 1:
            raise RequestError(f"decay is {self.decay}; it is a share between 0 and 1.")

    @property
    def rates(self) -> Rates:
        """Its learning rates."""
        return Rates(self.rate, self.gate_rate, self.steps, self.warmup, self.decay)


def read(path: Path, **rates: float) -> tuple[Stage, ...]:
    """The stages of a recipe file. rates: rate, gate_rate, warmup and decay of a stage that does
    not name its own. Raises RequestError that names the place, the key and what is accepted."""
    place = str(path)
    tree = _parsed(path)
    _check_keys(tree, {"stages"}, place)
    stages = _tables(tree, "stages", place)
    return tuple(_stage(s, f"stage {i} of {place}", rates) for i, s in enumerate(stages, 1))


def shipped(steps: int | None, **rates: float) -> tuple[Stage, ...]:
    """The stages of the recipe that comes with the package, the last of them with these rates and
    this many steps, if any are given."""
    *before, last = read(SHIPPED, **rates)
    changed = dataclasses.replace(last, steps=steps or last.steps, **rates)
    return (*before, changed)


def _parsed(path: Path) -> dict[str, Any]:
    parsers = {".toml": tomllib.loads, ".json": json.loads}
    if path.suffix.lower() not in parsers:
        raise RequestError(f"the recipe {path} is neither .toml nor .json.")
    if not path.is_file():
        raise RequestError(f"the recipe {path} is not a file.")
    if path.stat().st_size > MOST_BYTES:
        raise RequestError(f"the recipe {path} is larger than {MOST_BYTES} bytes.")
    try:
        tree = parsers[path.suffix.lower()](path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} cannot be read as {path.suffix[1:]}: {error}.") from None
    if not isinstance(tree, dict):
        raise RequestError(f"{path} holds a {type(tree).__name__}; a table of stages is expected.")
    return tree


def _stage(tree: dict[str, Any], place: str, rates: Mapping[str, float]) -> Stage:
    _check_keys(tree, {"steps", "lessons", *rates}, place)
    kinds = {"rate": _positive, "gate_rate": _positive, "warmup": _count, "decay": _share}
    own = {name: kinds[name](tree, name, place) for name in rates if name in tree}
    steps = _count(tree, "steps", place)
    lessons, weights = [], []
    for i, lesson in enumerate(_tables(tree, "lessons", place), 1):
        where = f"lesson {i} of {place}"
        fields = [field.name for field in dataclasses.fields(Lesson)]
        _check_keys(lesson, {"weight", *fields}, where)
        weights.append(_positive(lesson, "weight", where) if "weight" in lesson else 1.0)
        kinds = {"objective": _text, "data": _text, "chunks": _count}
        given = {n: kinds.get(n, _number)(lesson, n, where) for n in fields if n in lesson}
        if "objective" not in given:
            raise RequestError(f"{where} lacks objective; use {', '.join(OBJECTIVES)}.")
        try:
            lessons.append(Lesson(**given))
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from None
    return Stage(steps, tuple(lessons), tuple(weights), **{**rates, **own})


def _check_keys(tree: dict[str, Any], known: set[str], place: str) -> None:
    unknown = sorted(set(tree) - known)
    if unknown:
        raise RequestError(
            f"{place} has the key {unknown[0]!r}; accepted are {', '.join(sorted(known))}."
        )


def _tables(tree: dict[str, Any], key: str, place: str) -> list[dict[str, Any]]:
    found = tree.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(x, dict) for x in found):
        raise RequestError(f"{place} needs at least one table [[{key}]].")
    return found


def _text(tree, key, place) -> str:
    return _checked(tree, key, place, "a text", lambda x: isinstance(x, str) and x)


def _count(tree, key, place) -> int:
    return _checked(
        tree,
        key,
        place,
        "a positive whole number",
        lambda x: isinstance(x, int) and not isinstance(x, bool) and 0 < x < 2**31,
    )


def _number(tree, key, place) -> float:
    return _checked(tree, key, place, "0 or a positive number", lambda x: _real(x) and x >= 0)


def _positive(tree, key, place) -> float:
    return _checked(tree, key, place, "a positive number", lambda x: _real(x) and x > 0)


def _share(tree, key, place) -> float:
    return _checked(tree, key, place, "a share from 0 to 1", lambda x: _real(x) and 0 <= x <= 1)


def _real(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < math.inf


def _checked(tree, key, place, accepted, is_right) -> Any:
    if key not in tree:
        raise RequestError(f"{place} lacks {key}, {accepted}.")
    if not is_right(tree[key]):
        raise RequestError(f"{key} in {place} is {tree[key]!r}; it must be {accepted}.")
    return tree[key]
