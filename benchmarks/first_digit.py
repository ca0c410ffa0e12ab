"""Where recall fails: which digit of an answer is wrong, and how much attention found its place.

    python -m benchmarks.first_digit [--model smollm2-135m] [--kept-layers measured]

Asks for 64 facts in 8 chunks, once with the chunk of the fact alone as history and once with all
eight. For each digit: the share that is right, and the largest share of attention, the mean over
questions, that a head of any kept layer gives to the digit's own place in the history.
"""

from __future__ import annotations

import argparse

import jax
import numpy as np

from combkv_jax import console, load
from combkv_jax.evaluation import tasks
from combkv_jax.model import parameters
from combkv_jax.training import facts, pool, step
from combkv_jax.training.rows import Asker, Bucket, RowBuilder

CHUNKS, EACH = 8, 8  # and facts of each
DIGITS = 5
TOKENS = 2048  # that all questions fit in


def main() -> None:
    """Prints a row a history and digit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kept-layers", help="measured: untrained copies")
    args = parser.parse_args()
    console.prepare_jax()
    lm = load(args.model, kept_layers=args.kept_layers)
    rng = np.random.default_rng(0)
    told = facts.draw_checks(rng, CHUNKS * EACH, tasks.NAMES["choose"].split())
    ids, placed = pool.told_chunks(lm, rng, told, EACH)
    taps = pool.encode(lm, ids, lm.config.cross_layers)
    trained, frozen = step.split(parameters(lm.model))
    predict = jax.jit(step.predict, static_argnames="config")
    rows = []
    for label, histories in (
        ("its own chunk", [[chunk] for chunk in range(CHUNKS)]),
        (f"all {CHUNKS} chunks", [list(range(CHUNKS))]),
    ):
        batch = step.stack([row(lm, ids, placed, histories)], ids, taps)
        _, right, found = predict(lm.config, trained, frozen, batch)
        asked = batch.question[0] >= 0
        number = batch.question[0][asked]
        digit = np.arange(len(number)) - np.searchsorted(number, number)  # 0 is the space
        share = np.exp(np.stack([np.asarray(x)[0][asked] for x in found]))  # [layer, A, H]
        for place in range(1, DIGITS + 1):
            here = digit == place
            heads = share[:, here].mean(axis=1)  # [layer, H]
            layer, head = np.unravel_index(heads.argmax(), heads.shape)
            best = f"{heads.max():.2f} (layer {lm.config.cross_layers[layer]}, head {head})"
            rows.append(
                (label, place, here.sum(), float(np.asarray(right)[0][asked][here].mean()), best)
            )
    console.print_table(rows, ("history", "digit", "questions", "right", "most attention on it"))


def row(lm, ids, placed, histories):
    """All questions, each seeing the history that its fact is in."""
    ask, size = Asker(lm.tokens, None), lm.config.chunk_size
    made = RowBuilder(Bucket(CHUNKS, TOKENS, 1.0), size, lm.config.sink_tokens)
    for history in histories:
        made.add_history(history, ids[history[0], : lm.config.sink_tokens])
        for index, chunk in enumerate(history):
            for p in placed[chunk]:
                place = (index * size + p.start, index * size + p.stop)
                made.add_segment([ask(p.fact, None, place)])
    return made.finish(0.0)


if __name__ == "__main__":
    main()
