"""Converts any Llama checkpoint: reads SOURCE, gives a plain Llama a compressed history, writes a
native folder that infer.py, train.py and evaluate.py open (or, with --to-hf, one that others do).
"""

from __future__ import annotations

import time
from pathlib import Path

import jax

from combkv_jax import console, weights
from combkv_jax.config import FORMS, PRESETS
from combkv_jax.errors import RequestError


def _parser() -> console.Parser:
    parser = console.Parser(__doc__)
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help=f"a preset ({', '.join(PRESETS)}), a Hugging Face id or folder, a .gguf file, a "
        "CombLlama folder, a folder of tp_rank_*.pt, or a native folder",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: models/NAME")
    parser.add_argument(
        "--dtype", choices=weights.DTYPES, help="default: bfloat16 (--to-hf: as stored)"
    )
    parser.add_argument(
        "--encoder",
        choices=FORMS,
        help="decoder (default): the model itself encodes the history; layers: the original "
        "CombLlama's own layers, started as copies",
    )
    parser.add_argument(
        "--kept-layers",
        metavar="measured|every4|LIST",
        help="the layers that see the history (default: measured; for --encoder layers, every4)",
    )
    parser.add_argument("--to-hf", type=Path, metavar="DIR", help="write a folder transformers, or "
                        "for its own form CombLlama, can read")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace a model folder")
    return parser


def _main(args) -> None:
    jax.config.update("jax_platforms", "cpu")  # nothing here is worth a GPU's memory
    if args.to_hf and (args.out or args.encoder or args.kept_layers):
        raise RequestError("--to-hf writes SOURCE as it is: no --out, --encoder or --kept-layers.")
    start = time.monotonic()
    options = {"overwrite": args.overwrite, "say": print}
    if args.to_hf:
        target = args.to_hf
        config = weights.export(args.source, target, args.dtype, **options)
    else:
        target = args.out or Path("models", Path(args.source).name.removesuffix(".gguf"))
        options |= {"encoder": args.encoder, "kept_layers": args.kept_layers}
        config = weights.convert(args.source, target, args.dtype, **options)
    nbytes = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    console.print_table(
        [
            ("written", str(target)),
            ("encoder", config.encoder),
            ("layers with history", ", ".join(map(str, config.cross_layers)) or "none"),
            ("chunk size", str(config.chunk_size)),
            ("size", console.size(nbytes)),
            ("time", console.duration(time.monotonic() - start)),
            ("peak memory", console.size(console.peak_memory()["host"])),
        ]
    )


def main(argv=None) -> int:
    """Runs the command; returns its exit code."""
    return console.run(_main, _parser(), argv)


if __name__ == "__main__":
    raise SystemExit(main())
