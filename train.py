"""Trains the history blocks of a frozen model, so that it recalls what its history holds.

`python train.py --out run` trains the small bundled model; `python infer.py --model run` uses it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from combkv_jax import console
from combkv_jax.errors import RequestError


def parser() -> console.Parser:
    """The command line."""
    p = console.Parser(__doc__.splitlines()[0], prog="train.py")
    whole = console.positive_int
    p.add_argument("--model", default="smollm2-135m", help="folder, .gguf, preset or hub id")
    p.add_argument("--kept-layers", help="measured (default), every4 or 3,7,11")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run's own folder")
    p.add_argument("--resume", action="store_true", help="go on with the run in --out")
    p.add_argument("--steps", type=whole, default=1000)
    p.add_argument("--rows", type=whole, default=1, help="rows of questions a step (1)")
    p.add_argument("--pool", type=whole, default=40, help="groups of 8 chunks held encoded (40)")
    p.add_argument("--fresh", type=whole, default=3, help="steps for each new group (3)")
    p.add_argument("--rate", type=float, default=3e-4, help="learning rate of the projections")
    p.add_argument("--gate-rate", type=float, default=1e-2, help="and of bias and scale")
    p.add_argument("--warmup", type=whole, default=20, help="steps")
    p.add_argument("--decay", type=float, default=0.4, help="share of the steps that rates fall")
    p.add_argument("--clip", type=float, default=1.0, help="gradient norm")
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
    return p


def main(args) -> None:
    """Checks the request before anything slow, then trains."""
    from combkv_jax import sharding
    from combkv_jax.config import PRESETS
    from combkv_jax.training.trainer import Settings, Trainer

    if args.seed < 0:
        raise RequestError(f"seed is {args.seed}; it must be 0 or more.")
    if args.kept_layers is None and args.model in PRESETS:
        args.kept_layers = "measured"  # untrained copies, not adapters that come with a preset
    if Path(args.model).exists():
        args.model = str(Path(args.model).absolute())  # the adapters name it from their own folder
    settings = Settings(**{name: getattr(args, name) for name in Settings.__dataclass_fields__})
    console.prepare_jax()
    mesh = sharding.parse_mesh(args.mesh) if args.mesh else None
    from combkv_jax.language_model import load

    lm = load(args.model, dtype=args.dtype, mesh=mesh, kept_layers=args.kept_layers)
    trainer = Trainer(
        lm,
        settings,
        args.out,
        check_every=args.check_every,
        save_every=args.save_every,
        keep=args.keep,
        mesh=mesh,
    )
    trainer.start(args.resume)
    trainer.run()
    console.note(f"`python infer.py --model {args.out}` uses the best adapters of this run.")


if __name__ == "__main__":
    sys.exit(console.run(main, parser()))
