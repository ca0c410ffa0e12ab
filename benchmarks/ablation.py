"""What each part of the history form is worth: variants trained for the same CPU time each.

    python -m benchmarks.ablation --minutes 60 --out DIR

One variant after the other is trained by the package's own `Trainer`, with a constant rate behind a
short warm-up, and measured at 0, 1/4, 1/2, 3/4 and all of the CPU-minutes (of all cores together:
60 are half an hour on two): recall of facts, and how well a novel goes on behind its own pages and
behind another place's. All are measured alike, by the paths that users take, on the book and the
names for choosing. DIR gets `ablation.md`, `ablation.json` and `ablation.png`, a JSON file and the
training log of each variant, and `chats.jsonl`. The same command again goes on with the first
variant that is not finished.

The original form learns from chats alone, so the chats have facts of the training kind in their
history and ask for them. Time counts while steps are made and the pool is filled, not while
programs are compiled or the model is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import train
from benchmarks.ablation_cases import PAGES, Measure, write_chats
from combkv_jax import console, load
from combkv_jax.errors import RequestError
from combkv_jax.evaluation import tasks
from combkv_jax.language_model import LanguageModel
from combkv_jax.model import build, declarations, parameters, starts_as
from combkv_jax.training import lookup, pool, step
from combkv_jax.training.recipe import Lesson, Stage
from combkv_jax.training.settings import FIRST_GROUPS, Settings
from combkv_jax.training.trainer import Trainer

RATE, GATE_RATE = 6e-4, 1e-2  # of our form
ORIGINAL_RATE = 5e-5  # of everything in the original
WARMUP = 20  # steps
LOOKUP = 300  # steps of looking up before recall; short ones
SHARES = (0, 0.25, 0.5, 0.75, 1)  # of the minutes, after which each variant is measured
CHATS = 1000
NAME = "ablation"  # of the files that tell of all variants


@dataclasses.dataclass(frozen=True)
class Variant:
    """How one variant differs.

    encoder, kept_layers: as in `convert_weights.py`. copied: whether the history's projections
    start as copies of the decoder's, and not from random numbers. summaries: whether keys and
    queries have a share of the words in front, and lookup: steps on that objective in front of
    all others. lessons: objectives and their weights. held: endings of the names of tensors that
    stay as they start.
    """

    encoder: str = "decoder"
    kept_layers: str = "measured"
    copied: bool = True
    summaries: bool = True
    lookup: int = LOOKUP
    lessons: tuple[tuple[str, float], ...] = (("recall", 1.0),)
    rate: float = RATE
    gate_rate: float = GATE_RATE
    held: tuple[str, ...] = ()


ORIGINAL = Variant(
    encoder="layers",
    kept_layers="every4",
    copied=False,
    lookup=0,
    lessons=(("next", 1.0),),
    rate=ORIGINAL_RATE,
    gate_rate=ORIGINAL_RATE,
)
VARIANTS = {
    "original": ORIGINAL,
    "copied": dataclasses.replace(ORIGINAL, copied=True),
    "ours-every-fourth": Variant(kept_layers="every4"),
    "ours": Variant(),
    "ours-without-summaries": Variant(summaries=False, lookup=0),
    "ours-without-log-n": Variant(held=("bias_slope", "scale_slope")),
    "ours-slow-gates": Variant(gate_rate=RATE),
    "ours-and-distillation": Variant(lessons=(("recall", 0.7), ("distill", 0.3))),
}


# The model of a variant


def start(source: str, variant: Variant, seed: int) -> LanguageModel:
    """The untrained model."""
    lm = load(source, encoder=variant.encoder, kept_layers=variant.kept_layers)
    config, arrays = lm.config, parameters(lm.model)
    if not variant.copied:
        declared = declarations(config)
        names = sorted(starts_as(config))
        keys = jax.random.split(jax.random.key(seed), len(names))
        dtype = lm.model.dtype
        arrays |= {n: declared[n].create(k, dtype) for n, k in zip(names, keys, strict=True)}
    if not variant.summaries:
        config = dataclasses.replace(config, summary_layers=())
        arrays = {name: arrays[name] for name in declarations(config)}
    return LanguageModel(build(config, arrays), lm.tokenizer)


@dataclasses.dataclass(frozen=True)
class Held:
    """An objective that moves no tensor whose name ends in one of `names`."""

    objective: step.Objective
    names: tuple[str, ...]

    def totals(self, batch: Any) -> Any:
        """As `step.Objective.totals`."""
        return self.objective.totals(batch)

    def loss(self, trained: step.Arrays, frozen: step.Arrays, micro: Any, totals: Any) -> tuple:
        """As `step.Objective.loss`."""
        some = {n: jax.lax.stop_gradient(x) for n, x in trained.items() if n.endswith(self.names)}
        return self.objective.loss({**trained, **some}, frozen, micro, totals)


# Runs


class Watch:
    """Counts a run's CPU time, measures the model after each of SHARES, and ends the run.

    budget: CPU-seconds. spent: before the first step. compiled: grows when a program is compiled. A
    step in which one was counts as a step of the mean length does.
    """

    def __init__(self, trainer: Trainer, measure: Measure, budget: float, spent: float, compiled):
        self.trainer, self.measure, self.budget, self.filled = trainer, measure, budget, spent
        self.compiled = compiled
        self.points: list[dict[str, float]] = []
        self.seconds: list[float] = []  # of steps that compiled nothing

    @property
    def spent(self) -> float:
        """CPU-seconds of the run up to now."""
        mean = np.mean(self.seconds) if self.seconds else 0.0
        return self.filled + float(mean) * self.trainer.done

    def check(self, trained: step.Arrays, frozen: step.Arrays) -> dict[str, float]:
        """As `lessons.Lessons.check`, with this benchmark's numbers, which one lesson gives."""
        done, found = self.trainer.done, {}
        if not self.points or self.points[-1]["steps"] != done:
            found = self.measure(step.assemble(self.trainer.config, trained, frozen))
            minutes = self.spent / 60 if done else 0.0
            self.points.append({"cpu_minutes": minutes, "steps": done, **found})
        self._begin()
        return {**found, "score": self.points[-1]["own_nll"]}

    def ends(self) -> bool:
        """As `Trainer.run` asks; the last measurement is the trainer's own check."""
        if not self.compiled:
            self.seconds.append(time.process_time() - self.begin)
        share = self.spent / self.budget
        if share < 1 and share >= SHARES[len(self.points)]:
            self.check(self.trainer.state.trained, self.trainer.frozen)
        self._begin()
        return share >= 1

    def _begin(self) -> None:
        self.compiled.clear()
        self.begin = time.process_time()


@contextlib.contextmanager
def watch_compiler() -> Iterator[list[str]]:
    """A list that an event is added to whenever XLA compiles a program."""
    events: list[str] = []

    def told(event: str, seconds: float, **about) -> None:
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(told)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(told)


def settings(source: str, variant: Variant, chats: Path, page: int, seed: int) -> Settings:
    """The settings of `train.py`, of a run whose end the clock decides."""
    lessons = [
        (Lesson(name) if name == "recall" else Lesson(name, str(chats)), weight)
        for name, weight in variant.lessons
    ]
    rates = (variant.rate, variant.gate_rate, WARMUP, 0.0)
    recipe = (Stage(10**9, *zip(*lessons, strict=True), *rates),)
    if variant.lookup:
        recipe = (Stage(variant.lookup, (Lesson("lookup"),), (1.0,), *rates), *recipe)
    own = {
        "model": source,
        "encoder": variant.encoder,
        "kept_layers": variant.kept_layers,
        "steps": sum(stage.steps for stage in recipe),
        "recipe": recipe,
        "data": (),
        "pool": 20,
        "fresh": 4,
        "attention_weight": 0.2,
        "pack_tokens": page // 2,
        "pack_history": PAGES * page,
        "seed": seed,
    }
    given = vars(train.parser().parse_args([])) | own
    return Settings(**{f.name: given[f.name] for f in dataclasses.fields(Settings)})


def filling(lm: LanguageModel, variant: Variant, wanted: Settings) -> float:
    """CPU-seconds that pools take before the first step, by the tokens they encode."""
    group, tokens = pool.GROUP * lm.config.chunk_size, 0
    if "recall" in dict(variant.lessons):
        tokens += FIRST_GROUPS * group
    if variant.lookup:
        tokens += FIRST_GROUPS * (group + lookup.ASKED * lookup.TOKENS)
    if not tokens:
        return 0.0
    made = pool.Pool(lm, 2, wanted.seed, lm.config.cross_layers)
    made.grow_to(1)  # compiles
    begin = time.process_time()
    made.grow_to(2)
    return (time.process_time() - begin) * tokens / group


def train_one(name: str, args, measure: Measure, chats: Path, page: int) -> list[dict[str, float]]:
    """Trains a variant and returns what was measured; its log goes to DIR."""
    variant = VARIANTS[name]
    lm = start(args.model, variant, args.seed)
    wanted = settings(args.model, variant, chats, page, args.seed)
    spent = filling(lm, variant, wanted)
    never = wanted.steps
    with (
        tempfile.TemporaryDirectory(prefix=f".{name}.", dir=args.out) as folder,
        watch_compiler() as compiled,
    ):
        out = Path(folder, "run")
        trainer = Trainer(lm, wanted, out, check_every=never, save_every=never, keep=1)
        watch = Watch(trainer, measure, 60 * args.minutes, spent, compiled)
        for lessons in trainer.lessons.values():
            lessons.check = watch.check
            if variant.held:
                lessons.objective = Held(lessons.objective, variant.held)
        trainer.start(False)
        trainer.run(watch.ends)
        if watch.spent < watch.budget:  # by SIGTERM
            raise KeyboardInterrupt
        shutil.copyfile(trainer.log_path, args.out / f"{name}.log.jsonl")
    tasks.book_sentences.cache_clear()  # its keys hold the model
    return watch.points


# Tables and a plot


def rows(found: Mapping[str, Sequence[Mapping[str, float]]]) -> tuple[list[str], list[list[Any]]]:
    """(header, rows): a row for each variant and point."""
    names = list(next(iter(found.values()))[0])
    table = [[name, *point.values()] for name, points in found.items() for point in points]
    return ["variant", *(name.replace("_", " ") for name in names)], table


def write_markdown(path: Path, header: Sequence[str], table: Sequence[Sequence[Any]]) -> None:
    """A table of these rows."""
    lines = [header, ["---"] * len(header)]
    lines += [[f"{x:.3f}" if isinstance(x, float) else str(x) for x in row] for row in table]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def plot(path: Path, found: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """What the variants make of their CPU-minutes, a panel for each kind of number."""
    from matplotlib.figure import Figure  # slow to import

    point = next(iter(found.values()))[0]
    lengths = [name.removeprefix("exact_") for name in point if name.startswith("exact_")]
    panels = {f"exact_{n}": f"answered exactly, {n} tokens" for n in lengths}
    panels |= {f"nll_{n}": f"NLL of answers, {n} tokens" for n in lengths}
    panels |= {"gap": "other's pages - own pages, nats a token"}
    figure = Figure(figsize=(4 * len(panels), 4.5), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for name, points in found.items():
            axes.plot(
                [p["cpu_minutes"] for p in points], [p[key] for p in points], "o-", label=name
            )
        axes.set_title(title)
        axes.set_xlabel("CPU-minutes")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    temporary = path.with_name(f".{path.stem}.partial{path.suffix}")
    figure.savefig(temporary, dpi=120)
    temporary.replace(path)


def report(folder: Path, asked: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Writes what is there up to now."""
    console.write_json(folder / f"{NAME}.json", {**asked, "variants": found})
    if found:
        write_markdown(folder / f"{NAME}.md", *rows(found))
        plot(folder / f"{NAME}.png", found)


def check_same(path: Path, asked: Mapping[str, Any]) -> None:
    """Raises RequestError where the file, if there is one, says something else."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for name, value in json.loads(json.dumps(asked)).items():
        if known.get(name, value) != value:
            raise RequestError(
                f"{path} was begun with {name} {known[name]}, not {value}; give the same, or "
                "another --out."
            )


def main(args) -> None:
    """Trains what is not trained yet, and reports all."""
    if not 0 < args.minutes < math.inf:
        raise RequestError(f"minutes is {args.minutes}; it must be a positive number.")
    if args.seed < 0:
        raise RequestError(f"seed is {args.seed}; it must be 0 or more.")
    console.prepare_jax()
    jax.config.update("jax_platforms", "cpu")  # what is equal is the processor's time
    args.out.mkdir(parents=True, exist_ok=True)
    asked = {name: getattr(args, name) for name in ("model", "minutes", "seed", "chats")}
    check_same(args.out / f"{NAME}.json", asked)
    found = {}
    for name, variant in VARIANTS.items():
        path = args.out / f"{name}.json"
        check_same(path, {"variant": dataclasses.asdict(variant)})
        if path.is_file():
            found[name] = json.loads(path.read_text(encoding="utf-8"))["points"]
    report(args.out, asked, found)
    missing = [name for name in VARIANTS if name not in found]
    if missing:
        measure, chats, page = prepare(args)
    for name in missing:
        console.note(f"{name}: {args.minutes} CPU-minutes")
        points = train_one(name, args, measure, chats, page)
        record = {"variant": dataclasses.asdict(VARIANTS[name]), "points": points}
        console.write_json(args.out / f"{name}.json", record)
        found = {n: points if n == name else found[n] for n in VARIANTS if n in {*found, name}}
        report(args.out, asked, found)
    header, table = rows(found)
    console.print_table(table, header)


def prepare(args) -> tuple[Measure, Path, int]:
    """(measure, chats, tokens of a page: a chunk of the original form)."""
    lm = load(args.model, encoder=ORIGINAL.encoder, kept_layers=ORIGINAL.kept_layers)
    page, chats = lm.config.chunk_size, args.out / "chats.jsonl"
    if not chats.is_file():
        # With the chat format a page is to be about a chunk, so that questions begin behind it.
        write_chats(chats, lm, page - 48, page // 2, args.seed, args.chats)
    measure = Measure(lm, page, args.seed)
    tasks.book_sentences.cache_clear()  # its keys hold the model
    return measure, chats, page


def parser() -> console.Parser:
    """The command line."""
    p = console.Parser(__doc__.splitlines()[0], prog="ablation")
    p.add_argument("--minutes", type=float, required=True, help="CPU-minutes of each variant")
    p.add_argument("--out", type=Path, required=True, metavar="DIR")
    p.add_argument("--model", default="smollm2-135m", help="a plain Llama (default: smollm2-135m)")
    p.add_argument("--chats", type=console.positive_int, default=CHATS, help=f"written ({CHATS})")
    p.add_argument("--seed", type=int, default=0)
    return p


if __name__ == "__main__":
    sys.exit(console.run(main, parser()))
