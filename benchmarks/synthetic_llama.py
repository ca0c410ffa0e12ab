"""Writes a Llama checkpoint of random weights in the Hugging Face layout, one tensor in memory at
a time: the shapes of Llama-3.1-8B (16 GB), or with --scale 50 the same model at 1/50 of the bytes.

    python benchmarks/synthetic_llama.py DIR
    python convert_weights.py DIR --out DIR2

convert_weights.py then ends with its time and its peak memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from combkv_jax import console
from combkv_jax.config import LLAMA_3_1_8B, LlamaConfig, plain
from combkv_jax.model import declarations
from combkv_jax.weights import huggingface
from combkv_jax.weights.folders import check, staged
from combkv_jax.weights.source import BFLOAT16


def scaled(scale: float) -> LlamaConfig:
    """Llama-3.1-8B with about 1/scale of the bytes: every width divided by the square root."""
    by = math.sqrt(scale)
    head_dim = max(2, 2 * round(LLAMA_3_1_8B.head_dim / by / 2))
    return dataclasses.replace(
        LLAMA_3_1_8B,
        vocab_size=max(8, round(LLAMA_3_1_8B.vocab_size / by)),
        hidden_size=LLAMA_3_1_8B.num_attention_heads * head_dim,
        intermediate_size=max(8, round(LLAMA_3_1_8B.intermediate_size / by)),
        head_dim=head_dim,
    )


def write(folder: Path, config: LlamaConfig, seed: int, overwrite: bool = False) -> int:
    """Writes the checkpoint and returns its bytes. Every tensor is another cut of one random
    block: drawing 8 billion numbers would take longer than writing them."""
    rng = np.random.default_rng(seed)
    block = (rng.standard_normal(9_999_991, np.float32) * 0.02).astype(BFLOAT16)
    shapes = {huggingface.their_name(n): d.shape for n, d in declarations(plain(config)).items()}
    layout = {name: (shape, BFLOAT16) for name, shape in shapes.items()}
    nbytes = sum(math.prod(shape) * BFLOAT16.itemsize for shape in shapes.values())

    def array(name: str) -> np.ndarray:
        if len(shapes[name]) == 1:  # a norm
            return np.ones(shapes[name], BFLOAT16)
        return np.resize(np.roll(block, rng.integers(block.size)), shapes[name])

    check(folder, nbytes, overwrite, folder.parent)
    with console.progress(len(layout), "Writing", "tensors") as advance, staged(folder) as partial:
        huggingface.write_folder(partial, config.to_hf(), layout, array, lambda name: advance(1))
    return nbytes


def _main(args) -> None:
    start = time.monotonic()
    nbytes = write(args.folder, scaled(args.scale), args.seed, args.overwrite)
    seconds = time.monotonic() - start
    print(f"{args.folder}: {console.size(nbytes)} in {console.duration(seconds)}")


def _scale(text: str) -> float:
    value = float(text)
    if not 1 <= value <= 10000:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 10000")
    return value


def _parser() -> console.Parser:
    parser = console.Parser(__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--scale", type=_scale, default=1.0, help="divides the bytes (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true")
    return parser


if __name__ == "__main__":
    raise SystemExit(console.run(_main, _parser()))
