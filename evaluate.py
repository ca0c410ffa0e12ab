"""Measures a model: what it recalls, what each cache makes of it, and which layers should keep the
history or be coded."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from combkv_jax import console
from combkv_jax.errors import RequestError
from combkv_jax.evaluation.tasks import MEASURED

LENGTHS = (2048, 7680)  # tokens of context that caches are compared on
QUESTIONS = {"recall": 100, "cache": 20}  # of each task and length
BUDGET = "1024"


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
        "--cache",
        nargs="+",
        metavar="CACHE",
        help="compare these caches side by side, such as full window tailor:top=128,bits=2 comb",
    )
    parser.add_argument(
        "--ctx",
        nargs="+",
        type=console.positive_int,
        metavar="TOKENS",
        default=list(LENGTHS),
        help="of --cache: lengths of the contexts (default: 2048 7680)",
    )
    parser.add_argument(
        "--budget",
        nargs="+",
        metavar="SIZE",
        default=[BUDGET],
        help="of --cache: tokens that a query sees of a layer, such as 512, or bytes on the "
        "device, such as 64MB, or 5%% of those of the full cache (default: 1024); several make "
        "several rows",
    )
    parser.add_argument(
        "--cache-bits", type=int, metavar="N", help="of --cache comb and quantized: 8, 4, 2 or 1"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of --cache: of the questions and texts (0)"
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        help="of --recall: passkey: facts in chunks of their own among plain text; similar: 8 in "
        "every chunk; continuation: how well novels go on. Of --cache: needle and other questions, "
        "perplexity: NLL of novels; agreement: of the next token with the full cache (default: "
        "all)",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="SET",
        help="of --cache: questions with contexts, from a .jsonl or .parquet file, a folder of "
        "these, or the hub (such as LongBench's OWNER/NAME:CONFIG); without --tasks only these",
    )
    parser.add_argument(
        "--questions",
        type=console.positive_int,
        help="of each task and length (default: 100 of --recall, 20 of --cache)",
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
    modes = [x is not None for x in (args.recall, args.classify, args.cache)]
    if choosing + sum(modes) != 1:
        raise RequestError(
            "Give --recall, or --cache, or --classify, or one or both of --select-layers and "
            "--measure-layers."
        )
    if args.data and args.cache is None:
        raise RequestError("--data is compared by --cache; give that too.")
    request = _comparison(args) if args.cache is not None else None
    if request is None:
        _check_tasks(args.tasks or (), MEASURED, "--recall")
    place = next(p for p in (args.report.absolute(), *args.report.absolute().parents) if p.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise RequestError(f"{place} is not a folder that can be written; choose another --report.")
    console.prepare_jax()
    from combkv_jax import load
    from combkv_jax.evaluation import recall, report

    model = load(args.model)
    if request is not None:
        from combkv_jax.evaluation.comparison import compare

        return compare(model, request, args.report)
    if args.classify is not None:
        return classify(model, args)
    if args.recall is not None:
        lengths = tuple(args.recall or recall.LENGTHS)
        recall.report(
            model,
            lengths,
            args.report,
            task_names=tuple(args.tasks or MEASURED),
            histories=args.histories,
            questions=args.questions or QUESTIONS["recall"],
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


def _check_tasks(names, known, mode: str) -> None:
    for name in names:
        if name not in known:
            raise RequestError(
                f"--tasks {name!r} is not one of {', '.join(known)}, which {mode} has."
            )


def _comparison(args: argparse.Namespace):
    """What --cache asks for. Raises RequestError for what cannot be, before anything slow."""
    from combkv_jax.cache.quantize import check_bits
    from combkv_jax.evaluation import budgets, comparison

    known = comparison.task_names()
    _check_tasks(args.tasks or (), known, "--cache")
    for name in args.data:
        if not name.strip() or name in known:
            raise RequestError(
                f"--data {name!r} is no file, folder or set of the hub; of a file of that name "
                f"give its path, such as ./{name or 'questions.jsonl'}."
            )
    caches = [budgets.read_cache(text) for text in args.cache]
    if args.cache_bits is not None:
        check_bits(args.cache_bits)
        caches = budgets.with_bits(caches, args.cache_bits)
    if not 0 <= args.seed < 2**32:
        raise RequestError(f"seed is {args.seed}; it must lie in 0..{2**32 - 1}.")
    return comparison.Request(
        model=args.model,
        caches=tuple(caches),
        budgets=tuple(budgets.Budget.read(text) for text in args.budget),
        lengths=tuple(dict.fromkeys(args.ctx)),
        tasks=tuple(dict.fromkeys([*(args.tasks or ([] if args.data else known)), *args.data])),
        questions=args.questions or QUESTIONS["cache"],
        seed=args.seed,
        command=shlex.join(["python", "evaluate.py", *args.argv]),
    )


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
    parser = _parser()
    parser.set_defaults(argv=sys.argv[1:] if argv is None else argv)
    return console.run(_main, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
