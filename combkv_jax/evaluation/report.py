"""Choosing and judging layers from end to end, and what is written about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from combkv_jax import console
from combkv_jax.config import CombConfig, every_fourth, plain, read_config
from combkv_jax.errors import RequestError
from combkv_jax.evaluation import selection
from combkv_jax.evaluation.metrics import Predicted
from combkv_jax.language_model import LanguageModel
from combkv_jax.model import parameters, starts_as
from combkv_jax.weights import checkpoint, open_source
from combkv_jax.weights.folders import staged
from combkv_jax.weights.plan import plan

Results = Mapping[str, Mapping[str, Predicted]]


def decoder_form(model: LanguageModel, chunk_size: int | None) -> CombConfig:
    """The model's config with that chunk size, or RequestError when it has the original form,
    whose layers cannot be chosen without training."""
    config = model.config
    if config.is_original:
        raise RequestError(
            "this model has encoder 'layers'; layers are measured for encoder 'decoder' only."
        )
    return dataclasses.replace(config, chunk_size=chunk_size or config.chunk_size)


def native_folder(source: str | Path, model: LanguageModel) -> Path | None:
    """The native folder a model came from, if it did, to be changed to other layers. Raises
    RequestError when its history is trained: it belongs to the layers it has."""
    folder = Path(source)
    if not folder.is_dir() or read_config(folder).get("model_type") != "combkv":
        return None
    arrays, copies = parameters(model.model), starts_as(model.config)
    for name, array in arrays.items():
        drawn = ".summary." in name and name.endswith(".weight")  # its gates tell
        if name.startswith("history.") and not drawn:
            same = (
                np.array_equal(array, arrays[copies[name]]) if name in copies else not array.any()
            )
            if not same:
                raise RequestError(
                    f"{folder} has a history trained for layers {list(model.config.cross_layers)}; "
                    "choose layers for the model it was converted from."
                )
    return folder


def store(folder: Path, layers: Sequence[int], chunk_size: int) -> None:
    """Rewrites a native folder whose history is untrained so that `layers` keep it, in chunks
    of `chunk_size`: new copies of their projections, everything else as it was. The old folder
    stays until the new is whole."""
    opened = open_source(folder)
    decoder = {n: t for n, t in opened.tensors.items() if n.startswith("decoder.")}
    source = dataclasses.replace(opened, config=plain(opened.config.text), tensors=decoder)
    config = dataclasses.replace(opened.config.keeping(layers), chunk_size=chunk_size)
    planned = plan(source, config, None)
    layout = {name: (p.tensor.shape, p.dtype) for name, p in planned.items()}
    with staged(folder) as new:
        checkpoint.write(
            new, config, layout, lambda name: planned[name].read(), opened.write_tokenizer
        )


def choose(
    model: LanguageModel, config: CombConfig, keep: int | None, scores: Sequence[str], folder: Path
) -> dict[str, tuple[int, ...]]:
    """Chooses `keep` layers (None: a quarter) for each score in `selection.SCORES`.

    The removals go into `folder/choice-SCORE.json`; one that is there already is gone on with.
    """
    layers = config.text.num_hidden_layers
    keep = keep or max(1, layers // 4)
    if keep > layers:
        raise RequestError(f"{keep} layers were asked for; the model has {layers}.")
    folder.mkdir(parents=True, exist_ok=True)
    kinds = dict.fromkeys(kind for score in scores for kind in selection.SCORES[score])
    probes = selection.choosing_probes(model.model.decoder, model.tokens, config, kinds)
    chosen = {}
    for score in scores:
        some = {kind: probes[kind] for kind in selection.SCORES[score]}
        settings = {
            "score": score,
            "chunk_size": config.chunk_size,
            "sink_tokens": config.sink_tokens,
            "cases": {kind: selection.CHOOSING[kind] for kind in some},
        }
        elimination = selection.Elimination(folder / f"choice-{score}.json", some, settings)
        chosen[score] = elimination.run(keep, f"Choosing layers for {score}")
    return chosen


def named(config: CombConfig, lists: Sequence[Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """The lists (none: the model's own layers) by name. Raises RequestError when the model has no
    such layers."""
    lists = [config.keeping(layers).cross_layers for layers in lists or [config.cross_layers]]
    return {",".join(map(str, layers)): layers for layers in lists}


def judge(
    model: LanguageModel, config: CombConfig, choices: Mapping[str, Collection[int]], folder: Path
) -> Results:
    """Judges the full cache, every fourth layer and `choices`; writes `judged.json` and
    `judged.md` into the folder, and prints the table."""
    layers = config.text.num_hidden_layers
    rows = {
        "all layers (full cache)": tuple(range(layers)),
        "every fourth": every_fourth(layers),
        **choices,
    }
    results = selection.judge(model.model.decoder, model.tokens, config, rows)
    folder.mkdir(parents=True, exist_ok=True)
    header, body = table(results, rows)
    console.write_json(
        folder / "judged.json",
        {
            "chunk_size": config.chunk_size,
            "sink_tokens": config.sink_tokens,
            "cases": selection.JUDGING,
            "layers": rows,
            "results": {
                row: {column: numbers(found) for column, found in columns.items()}
                for row, columns in results.items()
            },
        },
    )
    console.write_text(folder / "judged.md", console.markdown(body, header))
    console.print_table(body, header)
    return results


def numbers(predicted: Predicted) -> dict[str, float | int]:
    """Means, and of how much."""
    return {
        "nll": predicted.mean_nll,
        "right": predicted.accuracy,
        "all_right": predicted.exact,
        "questions": predicted.questions,
        "answer_tokens": len(predicted.nll),
    }


def table(results: Results, rows: Mapping[str, Sequence[int]]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows of the results, for people."""
    header = ["history visible in", "layers"]
    body = []
    for row in results:
        layers = list(rows.get(row, ()))
        whole = layers == list(range(len(layers))) and len(layers) > 1
        shown = f"{layers[0]}-{layers[-1]}" if whole else " ".join(map(str, layers)) or "none"
        body.append([row, shown])
    for column in dict.fromkeys(column for columns in results.values() for column in columns):
        facts = column.startswith("facts")
        header.append(f"{column}: NLL a {'digit' if facts else 'token'}")
        header += ["digits right", "all right"] if facts else []
        for line, columns in zip(body, results.values(), strict=True):
            found = columns.get(column)
            names = ["mean_nll", "accuracy", "exact"] if facts else ["mean_nll"]
            line += [f"{getattr(found, name):.2f}" if found else "-" for name in names]
    return header, body
