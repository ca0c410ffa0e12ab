"""The training run: settings, loop, log, checkpoints, and what it leaves in its folder.

A training folder holds `adapters.json` and `adapters.safetensors` (the best so far by the
checks), `log.jsonl` (a line a step), `settings.json` and `state/` (checkpoints to resume from).
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from combkv_jax import console, sharding
from combkv_jax.errors import RequestError
from combkv_jax.evaluation.metrics import Predicted
from combkv_jax.language_model import LanguageModel
from combkv_jax.model import declarations, parameters
from combkv_jax.training import step
from combkv_jax.training.checks import Checks
from combkv_jax.training.pool import GROUP, Pool
from combkv_jax.training.rows import BUCKETS, Asker, Row, draw_row
from combkv_jax.weights import adapters

MOST_SKIPPED = 5  # steps in a row that are not finite, after which the run ends
FIRST_GROUPS = 6  # in the pool before the first step
GATES = ("bias", "bias_slope", "scale", "scale_slope")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the numbers of a run; kept in the training folder.

    rows: rows of a step. pool: groups of chunks held at once. fresh: steps for each new group,
    once the pool is full (while it fills, every step makes one). rate, gate_rate: of the
    projections and the gates; warmup steps, then constant, then falling over the last `decay`
    share. text_weight: what next-token loss on text counts beside answers. attention_weight: what
    attention away from an answer's place counts (`step.missed`).
    """

    model: str
    kept_layers: str | None
    steps: int
    rows: int
    pool: int
    fresh: int
    rate: float
    gate_rate: float
    warmup: int
    decay: float
    clip: float
    text_weight: float
    attention_weight: float
    seed: int

    def __post_init__(self):
        for name in ("rate", "gate_rate", "clip"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise RequestError(f"{name} is {value}; it must be a positive number.")
        if not 0 <= self.decay <= 1:
            raise RequestError(f"decay is {self.decay}; it is a share between 0 and 1.")
        for name in ("text_weight", "attention_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RequestError(f"{name} is {getattr(self, name)}; it must be 0 or more.")
        if self.pool < FIRST_GROUPS:
            raise RequestError(f"pool is {self.pool} groups; at least {FIRST_GROUPS} are needed.")

    def groups_at(self, done: int) -> int:
        """Groups made before step number `done` (from 0) is taken."""
        filling = min(done, self.pool - FIRST_GROUPS)
        return FIRST_GROUPS + filling + (done - filling) // self.fresh


class Trainer:
    """One run in one folder.

    check_every, save_every: steps. mesh: from `sharding.parse_mesh`, or None for one device.
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
    ):
        self.lm, self.settings, self.out = lm, settings, out
        self.check_every, self.save_every = check_every, save_every
        self.config = lm.config
        if self.config.is_original or not self.config.cross_layers:
            raise RequestError(
                f"{settings.model} has no history of this project's own form (encoder 'decoder'); "
                "only that is trained here."
            )
        self._place(parameters(lm.model), mesh)
        self.optimise = step.optimiser(
            settings.rate,
            settings.gate_rate,
            settings.steps,
            settings.warmup,
            settings.decay,
            settings.clip,
        )
        trained = self.trained
        self.state = step.State(trained, self.optimise.init(trained), jnp.int32(0))
        self.done, self.best = 0, math.inf
        has_chat = getattr(lm.tokenizer, "chat_template", None)
        self.ask = Asker(lm.tokens, self._chat if has_chat else None)
        self.keep = keep
        self.log_path = out / "log.jsonl"

    def _chat(self, message: str) -> np.ndarray:
        return self.lm.chat_tokens([{"role": "user", "content": message}])

    def _place(self, arrays: dict[str, jax.Array], mesh: Mesh | None) -> None:
        trained, self.frozen = step.split(arrays)
        self.rows_at = None
        if mesh is not None:
            data = mesh.shape["data"]
            if self.settings.rows % data:
                raise RequestError(
                    f"{self.settings.rows} rows cannot be divided over a data axis of {data}; "
                    f"give --rows as a multiple of {data}."
                )
            places = sharding.place(self.config.text, mesh).parameters(declarations(self.config))
            trained = {n: jax.device_put(x, places[n]) for n, x in trained.items()}
            self.rows_at = (
                NamedSharding(mesh, P(None, "data")),
                NamedSharding(mesh, P("data")),
            )
        self.trained = trained

    # Resuming

    def start(self, resume: bool) -> None:
        """Prepares the folder, or takes the run in it up again. Raises RequestError."""
        from combkv_jax.weights.checkpoint import TrainingCheckpoints  # orbax is slow to import

        path = self.out / "settings.json"
        mine = dataclasses.asdict(self.settings)
        if not resume:
            if self.out.exists() and any(self.out.iterdir()):
                raise RequestError(
                    f"{self.out} is not empty; give --resume to go on, or another --out."
                )
            self.out.mkdir(parents=True, exist_ok=True)
            console.write_json(path, mine)
            self.checkpoints = TrainingCheckpoints(self.out / "state", self.keep)
            return
        if not path.is_file():
            raise RequestError(f"{self.out} holds no training run to resume.")
        theirs = json.loads(path.read_text())
        for name, value in mine.items():
            if name != "steps" and theirs.get(name) != value:
                raise RequestError(
                    f"{self.out} was begun with {name} {theirs.get(name)!r}, not {value!r}; "
                    "resume it with the same settings (--steps may change)."
                )
        console.write_json(path, mine)
        self.checkpoints = TrainingCheckpoints(self.out / "state", self.keep)
        restored = self.checkpoints.restore(self.state)
        if restored is None:
            return  # killed before the first checkpoint: the run begins anew
        self.done, self.state = restored
        if (self.out / f"{adapters.NAME}.json").is_file():
            facts = adapters.read_description(self.out / f"{adapters.NAME}.json")["training"]
            self.best = facts.get("score", math.inf)
        lines = self.log_path.read_text().splitlines() if self.log_path.is_file() else []
        kept = [line for line in lines if json.loads(line)["step"] <= self.done]
        self.log_path.write_text("".join(f"{line}\n" for line in kept))

    # The loop

    def run(self) -> None:
        """Trains to the last step, or until SIGTERM, after which the state is saved."""
        settings = self.settings
        stop = []
        previous = signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
        try:
            pool = Pool(self.lm, settings.pool, settings.seed)
            first = settings.groups_at(self.done)
            tokens = min(first, settings.pool) * GROUP * self.config.chunk_size
            with console.progress(tokens, "Encoding chunks") as advance:
                pool.grow_to(first, advance)
            checks = Checks(self.lm, self.ask, settings.seed)
            if not self.done:
                self._check(checks)
            with console.progress(settings.steps - self.done, "Training", "steps") as advance:
                for record in self._steps(pool):
                    self._log(record)
                    advance(1)
                    last = self.done >= settings.steps or bool(stop)
                    if self.done % self.check_every == 0 or last:
                        self._check(checks)
                    if record["finite"] and (self.done % self.save_every == 0 or last):
                        self.checkpoints.save(self.done, self.state)
                    if stop:
                        console.note(f"Stopped by SIGTERM after step {self.done}; it is saved.")
                        break
        finally:
            signal.signal(signal.SIGTERM, previous)
            self.checkpoints.close()

    def _steps(self, pool: Pool) -> Iterator[dict[str, Any]]:
        settings = self.settings
        while self.done < settings.steps:
            begin = time.perf_counter()
            rng = np.random.default_rng([settings.seed, 0, self.done])
            pool.grow_to(settings.groups_at(self.done))
            # A shape that the pool cannot fill yet waits.
            held = GROUP * len(pool.filled)
            fitting = [b for b in BUCKETS if b.shortest <= held] or BUCKETS[:1]
            shares = np.array([bucket.share for bucket in fitting])
            bucket = fitting[rng.choice(len(fitting), p=shares / shares.sum())]
            rows = [
                draw_row(rng, pool, bucket, self.ask, settings.text_weight)
                for _ in range(settings.rows)
            ]
            batch = self._put(step.stack(rows, pool.taps, self.config.chunk_size))
            self.state, measured = step.train_step(
                self.state,
                self.frozen,
                batch,
                self.config,
                self.optimise,
                settings.attention_weight,
            )
            self.done += 1
            yield self._record(rows, jax.device_get(measured), time.perf_counter() - begin)
            skipped = int(self.state.skipped)
            if skipped >= MOST_SKIPPED:
                raise RequestError(
                    f"the loss or its gradient was not finite in {skipped} steps in a row, the "
                    f"last of them {self.done}; the newest good checkpoint is in {self.out}."
                )

    def _put(self, batch: step.Batch) -> step.Batch:
        if self.rows_at is None:
            return batch
        taps_at, rest_at = self.rows_at
        return step.Batch(
            tuple(jax.device_put(x, taps_at) for x in batch.taps),
            *(jax.device_put(x, rest_at) for x in batch[1:]),
        )

    def _record(self, rows, measured: step.Measured, seconds: float) -> dict[str, Any]:
        parts, text = [], []
        for row, nll, right in zip(rows, measured.nll, measured.right, strict=True):
            asked = row.question >= 0
            if asked.any():
                parts.append(Predicted(nll[asked], right[asked], row.question[asked]))
            text.append(nll[row.question == -1])
        text = np.concatenate(text)
        asked = Predicted.concatenate(parts) if parts else None
        history = max(int((row.last - row.first).max()) for row in rows)
        return {
            "step": self.done,
            "loss": float(measured.loss),
            "finite": bool(measured.finite),
            "gradient_norm": float(measured.gradient_norm),
            "missed": float(measured.missed),
            "chunks": history,
            "questions": asked.questions if asked else 0,
            "answer_nll": asked.mean_nll if asked else None,
            "tokens_right": asked.accuracy if asked else None,
            "exact": asked.exact if asked else None,
            "text_nll": float(text.mean()) if len(text) else None,
            "tokens_per_second": sum(map(self._tokens, rows)) / seconds,
            "seconds": seconds,
            **self._gates(),
        }

    def _tokens(self, row: Row) -> int:
        """Of the row's histories, questions and texts."""
        used = row.position > 0
        return int(row.last[used].max(initial=0)) * self.config.chunk_size + int(used.sum())

    def _gates(self) -> dict[str, float]:
        trained = self.state.trained
        return {
            gate: float(np.mean([x for n, x in trained.items() if n.endswith(f".{gate}")]))
            for gate in GATES
        }

    def _check(self, checks: Checks) -> None:
        """Measures, and writes the adapters when they are the best so far."""
        begin = time.perf_counter()
        found = checks.measure(self.state.trained, self.frozen)
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
        try:
            adapters.write(
                self.out,
                adapters.NAME,
                self.config,
                self.settings.model,
                jax.device_get(self.state.trained),
                facts,
            )
        except OSError as error:
            console.note(f"The adapters of step {self.done} were not written: {error.strerror}.")

    def _log(self, record: dict[str, Any]) -> None:
        try:
            with self.log_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_finite(record), allow_nan=False) + "\n")
        except OSError as error:
            console.note(f"A line of {self.log_path} was not written: {error.strerror}.")


def _finite(record: Any) -> Any:
    """The record with null for what JSON does not have."""
    if isinstance(record, dict):
        return {name: _finite(value) for name, value in record.items()}
    return None if isinstance(record, float) and not math.isfinite(record) else record
