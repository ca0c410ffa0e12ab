"""The training run: settings, loop, log, checkpoints, and what it leaves in its folder.

A training folder holds `adapters.json` and `adapters.safetensors` (the best so far by the
checks), `log.jsonl` (a line a step), `settings.json` and `state/` (checkpoints to resume from).
Of several processes all do the same, and the first writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from combkv_jax import console, distributed, sharding
from combkv_jax.errors import RequestError
from combkv_jax.language_model import LanguageModel
from combkv_jax.model import parameters
from combkv_jax.training import lookup, origin, step
from combkv_jax.training.board import Board
from combkv_jax.training.lessons import Lessons, lessons_of
from combkv_jax.training.placing import Placing, new_state
from combkv_jax.training.recipe import Lesson
from combkv_jax.training.settings import Settings
from combkv_jax.weights import adapters

MOST_SKIPPED = 5  # steps in a row that are not finite, after which the run ends


class Trainer:
    """One run in one folder.

    check_every, save_every: steps. mesh: from `sharding.parse_mesh`, or None for one device.
    tensorboard: whether the log is written for TensorBoard too.
    """

    def __init__(
        self,
        lm: LanguageModel,
        settings: Settings,
        out: Path,
        *,
        check_every: int,
        save_every: int,
        keep: int,
        mesh: Mesh | None = None,
        tensorboard: bool = False,
    ):
        self.lm, self.settings, self.out = lm, settings, out
        self.check_every, self.save_every = check_every, save_every
        self.config = lm.config
        if not self.config.cross_layers:
            raise RequestError(f"{settings.model} keeps no history, so there is nothing to train.")
        wanted = dict.fromkeys(lesson for stage in settings.stages for lesson in stage.lessons)
        if self.config.is_original and any(lesson.data is None for lesson in wanted):
            raise RequestError(
                f"{settings.model} has no history of this project's own form (encoder 'decoder'), "
                "which the objectives lookup and recall need; train it on --data."
            )
        self.placing = None if mesh is None else Placing.of(self.config, mesh)
        if self.placing and any(lesson.objective != "lookup" for lesson in wanted):
            self.placing.placement.check_rows(settings.rows, f"{settings.rows} rows (--rows)")
        arrays = parameters(lm.model)
        self.origin = origin.identity(arrays)
        trained, self.frozen = step.split(arrays)
        if any(lesson.objective == "lookup" for lesson in settings.stages[0].lessons):
            trained = lookup.opened(trained)
        self.lessons: dict[Lesson, Lessons] = {
            lesson: lessons_of(lm, lesson, settings) for lesson in wanted
        }
        rates = tuple(stage.rates for stage in settings.stages)
        self.optimise = step.optimiser(rates, settings.clip, settings.weight_decay)
        places = None
        if self.placing:
            self.optimise = self.placing.optimiser(self.optimise)
            abstract = jax.eval_shape(functools.partial(new_state, self.optimise), trained)
            places = self.placing.state(abstract)
        begin = jax.jit(new_state, static_argnums=0, out_shardings=places)
        self.state = begin(self.optimise, trained)
        self.done, self.best = 0, math.inf
        self.keep = keep
        self.log_path = out / "log.jsonl"
        self.tensorboard, self.board = tensorboard, None

    # Resuming

    def start(self, resume: bool) -> None:
        """Prepares the folder, or takes the run in it up again. Raises RequestError."""
        from combkv_jax.weights.checkpoint import TrainingCheckpoints  # orbax is slow to import

        path = self.out / "settings.json"
        mine = json.loads(json.dumps(dataclasses.asdict(self.settings)))
        mine["samples"] = {
            lesson.label: x.identity for lesson, x in self.lessons.items() if x.identity
        }
        mine["weights"] = self.origin
        if not resume:
            if self.out.exists() and any(self.out.iterdir()):
                raise RequestError(
                    f"{self.out} is not empty; give --resume to go on, or another --out."
                )
        elif not path.is_file():
            raise RequestError(f"{self.out} holds no training run to resume.")
        else:
            self._check_same(json.loads(path.read_text()), mine)
        distributed.wait_for_all()  # before one of them changes what the others look at
        if distributed.is_first():
            self.out.mkdir(parents=True, exist_ok=True)
            console.write_json(path, mine)
        distributed.wait_for_all()
        self.checkpoints = TrainingCheckpoints(self.out / "state", self.keep)
        if resume:
            self._take_up()
        if self.tensorboard and distributed.is_first():
            self.board = Board(self.out, self.done)

    def _check_same(self, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
        """Raises RequestError where the run in the folder was begun with something else."""
        if theirs.get("weights", mine["weights"]) != mine["weights"]:
            raise RequestError(
                f"the weights of {self.settings.model} are not those that {self.out} was begun "
                "with; resume it with the same model and --dtype."
            )
        defaults = json.loads(json.dumps(Settings.defaults()))
        for label, identity in mine["samples"].items():
            if theirs.get("samples", {}).get(label, identity) != identity:
                raise RequestError(
                    f"the samples of {label} are not those that {self.out} was begun with; resume "
                    "it with the same data."
                )
        for name, value in mine.items():
            if name in ("steps", "samples", "weights"):
                continue
            begun = theirs.get(name, defaults.get(name))
            if _without_end(begun) != _without_end(value):
                raise RequestError(
                    f"{self.out} was begun with {name} {begun!r}, not {value!r}; "
                    "resume it with the same settings (--steps may change)."
                )

    def _take_up(self) -> None:
        """Goes back to the newest checkpoint, and the log with it."""
        restored = self.checkpoints.restore(self.state)
        if restored:  # None: killed before the first one, so the run begins anew
            self.done, self.state = restored
        if (self.out / f"{adapters.NAME}.json").is_file():
            facts = adapters.read_description(self.out / f"{adapters.NAME}.json")["training"]
            self.best = facts.get("score", math.inf)
        if distributed.is_first():
            _cut(self.log_path, self.done)

    # The loop

    def run(self, ends: Callable[[], bool] | None = None) -> None:
        """Trains to the last step, or until SIGTERM, after which the state is saved. ends: asked
        after each step whether it was the last one; the settings' steps are then only a bound."""
        steps = sum(stage.steps for stage in self.settings.stages)
        stop = []
        previous = signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
        try:
            self.taken = Counter(map(self.settings.lesson_at, range(self.done)))
            for lesson, lessons in self.lessons.items():
                lessons.begin(self.taken[lesson])
            if not self.done:
                self._check()
            shown = console.progress(steps - self.done, "Training", "steps")
            if ends is not None:  # nobody knows how much is left
                shown = contextlib.nullcontext(lambda amount: None)
            with shown as advance:
                for record in self._steps(steps):
                    self._log(record)
                    advance(1)
                    stopped = distributed.any_of_all(bool(stop))
                    ended = ends is not None and distributed.any_of_all(ends())
                    last = self.done >= steps or stopped or ended
                    if self.done % self.check_every == 0 or last:
                        self._check()
                    if record["finite"] and (self.done % self.save_every == 0 or last):
                        self.checkpoints.save(self.done, self.state)
                    if stopped:
                        console.note(f"Stopped by SIGTERM after step {self.done}; it is saved.")
                    if last:
                        break
        finally:
            signal.signal(signal.SIGTERM, previous)
            self.checkpoints.close()
            if self.board:
                self.board.close()

    def _steps(self, steps: int) -> Iterator[dict[str, Any]]:
        while self.done < steps:
            begin = time.perf_counter()
            lesson = self.settings.lesson_at(self.done)
            lessons = self.lessons[lesson]
            batch, about = lessons.batch(self.taken[lesson])
            self.state, measured = step.train_step(
                self.state, self.frozen, self._put(batch), lessons.objective, self.optimise
            )
            self.done += 1
            self.taken[lesson] += 1
            measured = distributed.fetch(measured)
            own = lessons.record(about, measured.aux)
            seconds = time.perf_counter() - begin
            yield {
                "step": self.done,
                "lesson": lesson.label,
                "loss": float(measured.loss),
                "finite": bool(measured.finite),
                "gradient_norm": float(measured.gradient_norm),
                **own,
                "tokens_per_second": own["tokens"] / seconds,
                "seconds": seconds,
                **{f"peak_memory_{name}": held for name, held in console.peak_memory().items()},
                **self._gates(),
            }
            skipped = int(self.state.skipped)
            if skipped >= MOST_SKIPPED:
                raise RequestError(
                    f"the loss or its gradient was not finite in {skipped} steps in a row, the "
                    f"last of them {self.done}; the newest good checkpoint is in {self.out}."
                )

    def _put(self, batch: Any) -> Any:
        if self.placing is None:
            return batch
        return jax.tree.map(sharding.put, batch, self.placing.batch(batch))

    def _gates(self) -> dict[str, float]:
        """The mean of each kind of gate."""
        kinds: dict[str, list[Any]] = {}
        trained = self.state.trained
        gates = distributed.fetch({name: x for name, x in trained.items() if step.is_gate(name)})
        for name, x in gates.items():
            kinds.setdefault(name.rsplit(".", 1)[-1], []).append(x)
        return {kind: float(np.mean(values)) for kind, values in kinds.items()}

    def _check(self) -> None:
        """Measures, and writes the adapters when they are the best so far."""
        begin = time.perf_counter()
        found, scores = {}, []
        for lesson, lessons in self.lessons.items():
            own = lessons.check(self.state.trained, self.frozen)
            scores.append(own.pop("score"))
            alone = lesson.data is None or len(self.lessons) == 1
            found |= {n if alone else f"{lesson.label} {n}": x for n, x in own.items()}
        found["score"] = sum(scores)
        self._log({"step": self.done, "check": found, "seconds": time.perf_counter() - begin})
        console.note(
            f"Step {self.done}: "
            + ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in found.items())
        )
        if not found["score"] < self.best:
            return
        self.best = found["score"]
        settings = dataclasses.asdict(self.settings)
        facts = {"step": self.done, "score": self.best, "settings": settings, "check": found}
        trained = distributed.fetch(self.state.trained)
        if not distributed.is_first():
            return
        try:
            base = adapters.base_of(self.settings.model)
            adapters.write(self.out, adapters.NAME, self.config, base, trained, facts)
        except OSError as error:
            console.note(f"The adapters of step {self.done} were not written: {error.strerror}.")

    def _log(self, record: dict[str, Any]) -> None:
        if not distributed.is_first():
            return
        try:
            with self.log_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_finite(record), allow_nan=False) + "\n")
            if self.board:
                self.board.write(record)
        except OSError as error:
            console.note(f"A line of {self.log_path} was not written: {error.strerror}.")


def _without_end(setting: Any) -> Any:
    """The setting; a recipe without how long its last stage is."""
    match setting:
        case [*before, {"steps": _, **rest}]:
            return [*before, rest]
    return setting


def _cut(path: Path, done: int) -> None:
    """Takes from a log what the run will log again, and lines that a full disk cut short."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            if 0 < done >= json.loads(line)["step"]:
                kept.append(f"{line}\n")
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


def _finite(record: Any) -> Any:
    """The record with null for what JSON does not have."""
    if isinstance(record, dict):
        return {name: _finite(value) for name, value in record.items()}
    return None if isinstance(record, float) and not math.isfinite(record) else record
