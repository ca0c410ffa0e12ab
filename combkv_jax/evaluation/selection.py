"""Which layers should see the history: greedy backward elimination, and how good a set is.

Nothing is trained for this (spec: the frozen decoder encodes, one softmax). Beginning with every
layer, the one whose removal hurts the answers least is removed, until the budget is left.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from combkv_jax import console
from combkv_jax.config import CombConfig
from combkv_jax.decoder import Decoder
from combkv_jax.errors import RequestError
from combkv_jax.evaluation.metrics import Predicted
from combkv_jax.evaluation.probe import Probe, Questions
from combkv_jax.evaluation.tasks import Encode, FactCase, TextCase, fact_cases, text_cases

SCORES = {"facts": ("facts",), "text": ("text",), "both": ("facts", "text")}

TEXT_HISTORY = 2000  # tokens in front of a continuation, to whole chunks

# Cases, sized so that a choice for a model of 30 layers and 135M parameters takes ten minutes on
# two CPU cores, and so that judging has a hundred questions and fifty continuations at least.
CHOOSING = {
    "facts": {"cases": 6, "chunks": 1},
    "text": {"cases": 6, "next_tokens": 64},
}
JUDGING = {
    "facts": {"cases": 16, "chunks": 1},
    "facts, 4 chunks": {"cases": 4, "chunks": 4},
    "text": {"cases": 50, "next_tokens": 128},
}
TRIED = 5  # layers tried at least before one is removed
JUDGED_AT_ONCE = 5  # cases whose K/V of every layer are held together while judging


def make_cases(
    encode: Encode, kind: str, seed: int, role: str, chunk_size: int, sizes: Mapping[str, int]
) -> list[FactCase] | list[TextCase]:
    """Cases of a kind in CHOOSING or JUDGING."""
    if kind == "text":
        chunks = max(1, round(TEXT_HISTORY / chunk_size))
        return text_cases(encode, seed, role, chunks=chunks, chunk_size=chunk_size, **sizes)
    return fact_cases(encode, seed, role, chunk_size=chunk_size, **sizes)


def choosing_probes(
    decoder: Decoder, encode: Encode, config: CombConfig, kinds: Collection[str], seed: int = 0
) -> dict[str, Probe]:
    """The cases of these kinds for choosing, with the K/V of every layer."""
    cases = {
        kind: make_cases(encode, kind, seed, "choose", config.chunk_size, CHOOSING[kind])
        for kind in kinds
    }
    total = sum(len(c.chunks) * config.chunk_size for some in cases.values() for c in some)
    with console.progress(total, "Encoding the cases for choosing") as advance:
        return {
            kind: Probe.encode(decoder, Questions.from_cases(some), config.sink_tokens, advance)
            for kind, some in cases.items()
        }


class Elimination:
    """Removes layers one by one; what was removed is in a file, written anew after each one, so
    that it can be stopped and taken up again."""

    def __init__(self, path: Path, probes: Mapping[str, Probe], settings: Mapping[str, Any]):
        """settings: whatever another choice would differ in. Raises RequestError when the file
        was made with other ones."""
        self.path, self.probes = path, probes
        first = next(iter(probes.values()))
        self.num_layers = len(first.decoder.layers)
        settings = {**settings, "weights": _fingerprint(first.decoder)}
        if path.exists():
            self.state = _read(path)
            if self.state["settings"] != json.loads(json.dumps(settings)):
                raise RequestError(
                    f"{path} was made with other settings; remove it or name another folder."
                )
        else:
            scales = {kind: _scale(probe) for kind, probe in probes.items()}
            self.state = {"settings": settings, "scales": scales, "removed": [], "harms": {}}

    def run(self, keep: int, label: str) -> tuple[int, ...]:
        """Removes layers until `keep` are left, and returns those."""
        gone = [entry["layer"] for entry in self.state["removed"][: self.num_layers - keep]]
        kept = [layer for layer in range(self.num_layers) if layer not in gone]
        with console.progress(len(kept) - keep, label, "layers to remove") as advance:
            while len(kept) > keep:
                layer, nll = self._least_missed(kept)
                kept.remove(layer)
                entry = {"layer": layer, "loss": self.loss(nll), "nll": nll}
                self.state["removed"].append(entry)
                console.write_json(self.path, self.state)
                advance(1)
        return tuple(kept)

    def _least_missed(self, kept: list[int]) -> tuple[int, dict[str, float]]:
        """The kept layer whose removal gives the least loss, and the NLLs then.

        Layers are tried in the order of the harm (loss added) they did when last tried, until the
        best of at least `TRIED` does less harm than the next one did then: fewer layers rarely make
        a layer matter less (Minoux 1978).
        """
        states = {kind: probe.states(kept) for kind, probe in self.probes.items()}
        end = len(states[next(iter(states))]) - 1
        now = self.loss(
            {k: p.predict(states[k][end], kept, end).mean_nll for k, p in self.probes.items()}
        )
        harms, tried = self.state["harms"], {}
        for layer in sorted(kept, key=lambda i: harms.get(str(i), -math.inf)):
            least = min((harms[str(i)] for i in tried), default=math.inf)
            if len(tried) >= TRIED and least <= harms.get(str(layer), -math.inf):
                break
            visible = [other for other in kept if other != layer]
            tried[layer] = {  # in front of the layer nothing changes
                kind: probe.predict(states[kind][layer], visible, layer).mean_nll
                for kind, probe in self.probes.items()
            }
            harms[str(layer)] = self.loss(tried[layer]) - now
        layer = min(tried, key=lambda i: self.loss(tried[i]))
        return layer, tried[layer]

    def loss(self, nll: Mapping[str, float]) -> float:
        """Mean over the kinds of cases of an NLL on its own scale: 0 is the history visible in
        every layer, 1 in none. Where history does not help at all, nats above the former."""
        parts = []
        for kind, value in nll.items():
            every, none = (self.state["scales"][kind][name] for name in ("every", "none"))
            parts.append((value - every) / (none - every if none > every else 1.0))
        return math.fsum(parts) / len(parts)


def _read(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if state.keys() == {"settings", "scales", "removed", "harms"}:
            return state
    except (OSError, ValueError, AttributeError):
        pass
    raise RequestError(f"{path} is not a choice of layers; remove it or name another folder.")


def _scale(probe: Probe) -> dict[str, float]:
    every = range(len(probe.decoder.layers))
    start = probe.start
    return {
        "every": probe.predict(start, every, 0).mean_nll,
        "none": probe.predict(start, (), 0).mean_nll,
    }


def _fingerprint(decoder: Decoder) -> str:
    """Of the weights: another model's choice is not gone on with."""
    parts = (decoder.norm.weight[...], decoder.layers[-1].self_attn.k_proj.weight[...])
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in parts)).hexdigest()[:16]


def judge(
    decoder: Decoder,
    encode: Encode,
    config: CombConfig,
    choices: Mapping[str, Collection[int]],
    seed: int = 1,
) -> dict[str, dict[str, Predicted]]:
    """Every choice of layers on the cases for judging: {row: {column: what was predicted}}.

    Columns are those of JUDGING, and "text, another history": the same continuations behind the
    history of another place. One more row, "no history", has the recent tokens alone.
    """
    parts: dict[str, dict[str, list[Predicted]]] = {}

    def add(row: str, column: str, predicted: Predicted):
        parts.setdefault(row, {}).setdefault(column, []).append(predicted)

    batches = list(_judging_batches(encode, config.chunk_size, seed))
    total = sum(q.chunks.size for _, q in batches)
    with console.progress(total, "Judging") as advance:
        for kind, questions in batches:
            probe = Probe.encode(decoder, questions, config.sink_tokens)
            add("no history", kind, probe.predict_without_history())
            other = probe.other_history() if kind == "text" else None
            for name, layers in choices.items():
                add(name, kind, probe.predict(probe.start, layers, 0))
                if other is not None:
                    add(name, f"{kind}, another history", other.predict(probe.start, layers, 0))
            advance(questions.chunks.size)
    return {
        row: {column: Predicted.concatenate(some) for column, some in columns.items()}
        for row, columns in parts.items()
    }


def _judging_batches(encode: Encode, chunk_size: int, seed: int) -> Iterator[tuple[str, Questions]]:
    for kind, sizes in JUDGING.items():
        cases = make_cases(encode, kind, seed, "judge", chunk_size, sizes)
        for first in range(0, len(cases), JUDGED_AT_ONCE):
            yield kind, Questions.from_cases(cases[first : first + JUDGED_AT_ONCE])
