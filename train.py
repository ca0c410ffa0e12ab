"""Trains the history blocks of a frozen model, so that it recalls what its history holds.

`python train.py --out run` trains the small bundled model; `--data chats.jsonl` on data of your
own; `python infer.py --model run` uses it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from combkv_jax import console, distributed
from combkv_jax.config import FORMS
from combkv_jax.errors import RequestError
from combkv_jax.training.recipe import OBJECTIVES


def parser() -> console.Parser:
    """The command line."""
    p = console.Parser(__doc__.splitlines()[0], prog="train.py")
    whole = console.positive_int
    p.add_argument("--model", default="smollm2-135m", help="folder, .gguf, preset or hub id")
    p.add_argument(
        "--encoder",
        choices=FORMS,
        help="decoder (default): the model itself encodes the history; layers: the original "
        "CombLlama's own layers, started as copies",
    )
    p.add_argument(
        "--kept-layers", help="measured (default), every4 (for --encoder layers) or 3,7,11"
    )
    p.add_argument("--out", type=Path, metavar="DIR", help="the run's own folder")
    p.add_argument("--resume", action="store_true", help="go on with the run in --out")
    p.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="NAME_OR_FILE",
        help="data of your own: .jsonl, .parquet, .txt, or a data set of the hub, "
        "OWNER/NAME[:CONFIG]; with messages, question and answer (and context), or text",
    )
    p.add_argument(
        "--objective",
        choices=list(OBJECTIVES),
        help="without --data: lookup (where facts stand) or recall (what they say), by default one "
        "and then both; of --data: answer (default; replies, or what follows a text's history), "
        "next (every token), distill (as the same model answers that has it all in front of it) "
        "or reconstruct (say the history again)",
    )
    p.add_argument(
        "--recipe", type=Path, metavar="FILE", help="stages and mixtures, .toml or .json"
    )
    p.add_argument(
        "--steps", type=whole, help="1000; by default behind 300 of lookup; a recipe has its own"
    )
    p.add_argument("--rows", type=whole, default=1, help="rows of questions, or packs, at once (1)")
    p.add_argument(
        "--accumulate", type=whole, default=1, help="times that many, one after another, a step (1)"
    )
    p.add_argument(
        "--pack-tokens", type=whole, default=1024, help="recent tokens of a pack of --data (1024)"
    )
    p.add_argument("--pack-history", type=whole, default=8192, help="and history tokens (8192)")
    p.add_argument(
        "--remat",
        action="store_true",
        help="on recall too, keep each layer's input only for the backward pass: slower, smaller",
    )
    p.add_argument("--pool", type=whole, default=40, help="groups of 8 chunks held encoded (40)")
    p.add_argument("--fresh", type=whole, default=3, help="steps for each new group (3)")
    p.add_argument("--rate", type=float, default=3e-4, help="learning rate of the projections")
    p.add_argument(
        "--gate-rate", type=float, default=1e-2, help="and of gates: biases, scales, summaries"
    )
    p.add_argument("--warmup", type=whole, default=20, help="steps")
    p.add_argument("--decay", type=float, default=0.4, help="share of the steps that rates fall")
    p.add_argument("--clip", type=float, default=1.0, help="gradient norm")
    p.add_argument("--weight-decay", type=float, default=0.0, help="of matrices, not of gates (0)")
    p.add_argument("--text-weight", type=float, default=0.3, help="of next-token loss on novels")
    p.add_argument(
        "--attention-weight", type=float, default=0.1, help="of attention away from the answer"
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--mesh", help="data x tensor devices, such as 2x1")
    p.add_argument("--dtype", help="of the frozen decoder: float32 (default on a CPU) or bfloat16")
    p.add_argument("--check-every", type=whole, default=50, help="steps between measurements")
    p.add_argument("--save-every", type=whole, default=25, help="steps between checkpoints")
    p.add_argument("--keep", type=whole, default=2, help="checkpoints kept")
    p.add_argument("--tensorboard", action="store_true", help="event files beside log.jsonl")
    p.add_argument("--plan", metavar="GPU", help="memory a step on recall needs; nothing is run")
    p.add_argument("--json", type=console.output_file, metavar="FILE", help="the plan's figures")
    distributed.add_arguments(p)
    return p


def main(args) -> None:
    """Checks the request before anything slow, then trains."""
    from combkv_jax import records, sharding
    from combkv_jax.config import PRESETS
    from combkv_jax.training import recipe
    from combkv_jax.training.trainer import Settings, Trainer

    if args.plan:
        return plan(args)
    if args.out is None:
        raise RequestError("--out is missing; give the folder that the run is to have.")
    if args.json:
        raise RequestError("--json is for the figures of --plan; a run writes log.jsonl.")
    if args.seed < 0:
        raise RequestError(f"seed is {args.seed}; it must be 0 or more.")
    rates = {name: getattr(args, name) for name in ("rate", "gate_rate", "warmup", "decay")}
    if args.recipe:
        if args.steps or args.objective:
            extra = "--steps" if args.steps else "--objective"
            raise RequestError(f"the recipe's stages have their own; leave {extra} away.")
        args.recipe = recipe.read(args.recipe, **rates)
    elif not (args.data or args.objective):
        args.recipe = recipe.shipped(args.steps, **rates)
    args.recipe, args.data = args.recipe or (), tuple(args.data)
    args.steps = sum(stage.steps for stage in args.recipe) or args.steps or 1000
    args.objective = args.objective or ("answer" if args.data else "recall")
    if args.kept_layers is None and args.encoder is None and args.model in PRESETS:
        args.kept_layers = "measured"  # untrained copies, not adapters that come with a preset
    if Path(args.model).exists():
        args.model = str(Path(args.model).absolute())  # the adapters name it from their own folder
    settings = Settings(**{name: getattr(args, name) for name in Settings.__dataclass_fields__})
    for lesson in (lesson for stage in settings.stages for lesson in stage.lessons):
        if lesson.data:
            records.check_name(lesson.data)
    console.prepare_jax()
    processes = distributed.start(args.coordinator, args.processes, args.process)
    mesh = (
        sharding.parse_mesh(args.mesh, processes)
        if args.mesh is not None or processes > 1
        else None
    )
    from combkv_jax.language_model import load

    lm = load(
        args.model, dtype=args.dtype, mesh=mesh, encoder=args.encoder, kept_layers=args.kept_layers
    )
    trainer = Trainer(
        lm,
        settings,
        args.out,
        check_every=args.check_every,
        save_every=args.save_every,
        keep=args.keep,
        mesh=mesh,
        tensorboard=args.tensorboard,
    )
    trainer.start(args.resume)
    trainer.run()
    console.note(f"`python infer.py --model {args.out}` uses the best adapters of this run.")


def plan(args) -> None:
    """Prints what a step of training would take on a GPU."""
    from combkv_jax import sharding
    from combkv_jax.training import plan as planning
    from combkv_jax.weights import read_source_config

    if args.data or args.recipe or args.objective:
        raise RequestError(
            "--plan plans a step on recall; leave --data, --recipe and --objective away."
        )
    if args.dtype not in (None, "float32", "bfloat16"):
        raise RequestError(f"dtype {args.dtype!r} is not one of float32, bfloat16.")
    console.prepare_jax()
    config = read_source_config(
        args.model, note=console.note, encoder=args.encoder, kept_layers=args.kept_layers
    )
    console.note(f"Compiling a training step for {args.plan} ...")
    result = planning.plan_training(
        config,
        args.plan,
        mesh=sharding.mesh_shape(args.mesh or "1x1"),
        rows=args.rows,
        accumulate=args.accumulate,
        remat=args.remat,
        dtype=args.dtype or "bfloat16",
    )
    console.print_table(planning.table(result))
    if args.json:
        console.write_json(args.json, result)


if __name__ == "__main__":
    sys.exit(console.run(main, parser()))
