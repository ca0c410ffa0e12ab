"""Measures a model: what it recalls, and which layers should keep the history or be coded."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from combkv_jax import console
from combkv_jax.errors import RequestError
from combkv_jax.evaluation.tasks import MEASURED


def _layer_list(text: str) -> tuple[int, ...]:
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 0,7,14") from None
    if list(layers) != sorted(set(layers)) or layers[0] < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not ascending without repeats")
    return layers


def _parser() -> console.Parser:
    parser = console.Parser(__doc__)
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        help="native, Hugging Face or hub model, or .gguf file (default: the small real model)",
    )
    parser.add_argument(
        "--select-layers",
        nargs="?",
        const=0,
        type=console.positive_int,
        metavar="N",
        help="choose the N layers (default: a quarter) that should see the history, and judge "
        "them; a native folder is changed to them",
    )
    parser.add_argument(
        "--score",
        nargs="+",
        choices=("facts", "text", "both"),
        default=["both"],
        help="what a choice is scored on; several make several choices (default: both)",
    )
    parser.add_argument(
        "--measure-layers",
        nargs="*",
        type=_layer_list,
        metavar="LIST",
        help="judge these layers too, such as 0,7,14 (default: the model's own)",
    )
    parser.add_argument(
        "--recall",
        nargs="*",
        type=console.positive_int,
        metavar="TOKENS",
        help="exact recall from histories of these lengths (default: 4096 32768 131072), and then "
        "how well novels go on behind 4k tokens; --tasks asks for less",
    )
    parser.add_argument(
        "--classify",
        nargs="?",
        const=4096,
        type=console.positive_int,
        metavar="TOKENS",
        help="tell by a page of a novel (4096 tokens) which layers the tailor cache should code; "
        "kept beside the weights of a folder or file",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.2,
        help="share of attention outside the largest weights from which a layer is coded (0.2)",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=MEASURED,
        default=list(MEASURED),
        help="passkey: facts in chunks of their own among plain text; similar: 8 in every chunk; "
        "continuation: how well novels go on (default: all three)",
    )
    parser.add_argument(
        "--questions", type=console.positive_int, default=100, help="of each task and length (100)"
    )
    parser.add_argument(
        "--histories",
        type=console.positive_int,
        default=2,
        help="that these are shared out to, at least (2)",
    )
    parser.add_argument("--chunk-size", type=console.positive_int, help="default: the model's own")
    parser.add_argument(
        "--report", type=Path, default=Path("report"), metavar="DIR", help="default: report"
    )
    return parser


def _main(args: argparse.Namespace) -> None:
    choosing = args.select_layers is not None or args.measure_layers is not None
    if choosing + (args.recall is not None) + (args.classify is not None) != 1:
        raise RequestError(
            "Give --recall, or --classify, or one or both of --select-layers and --measure-layers."
        )
    place = next(p for p in (args.report.absolute(), *args.report.absolute().parents) if p.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise RequestError(f"{place} is not a folder that can be written; choose another --report.")
    console.prepare_jax()
    from combkv_jax import load
    from combkv_jax.evaluation import recall, report

    model = load(args.model)
    if args.classify is not None:
        return classify(model, args)
    if args.recall is not None:
        lengths = tuple(args.recall or recall.LENGTHS)
        recall.report(
            model,
            lengths,
            args.report,
            task_names=tuple(args.tasks),
            histories=args.histories,
            questions=args.questions,
        )
        return
    config = report.decoder_form(model, args.chunk_size)
    given = {} if args.measure_layers is None else report.named(config, args.measure_layers)
    choices, folder, best = {}, None, ()
    if args.select_layers is not None:
        folder = report.native_folder(args.model, model)
        chosen = report.choose(model, config, args.select_layers or None, args.score, args.report)
        choices = {f"chosen for {score}": layers for score, layers in chosen.items()}
        best = chosen["both" if "both" in chosen else args.score[0]]
    report.judge(model, config, choices | given, args.report)
    listed = ",".join(map(str, best))
    if folder is not None:
        report.store(folder, best, config.chunk_size)
        print(f"{folder} now keeps the history in layers {listed}.")
    elif best:
        print(f"To use them: python convert_weights.py {args.model} --kept-layers {listed}")


def classify(model, args: argparse.Namespace) -> None:
    """Which layers the tailor cache should code, kept beside the weights where that can be."""
    from combkv_jax.evaluation import concentration
    from combkv_jax.weights import tailored

    result = concentration.classify(model, args.classify, args.threshold)
    header = ("layer", "attention outside", "in the tailor cache")
    console.print_table(concentration.table(result), header)
    if path := tailored.beside(args.model):
        tailored.write(path, model.model, result)
        print(f"{path} now says so.")
    else:
        print(
            f"To keep this: python convert_weights.py {args.model} --out DIR, and then --classify "
            "with --model DIR."
        )


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return console.run(_main, _parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
