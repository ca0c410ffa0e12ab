"""Asks a question about a long context, and tells what the answer cost.

`python infer.py --ctx 131072` hides a code in a haystack of novels and asks for it;
`python infer.py --context book.txt --prompt "..."` asks about a file.
"""

from __future__ import annotations

import sys

import numpy as np

from combkv_jax import console
from combkv_jax.errors import RequestError

DEFAULT_MODEL = "smollm2-135m"


def parser() -> console.Parser:
    """The command line."""
    p = console.Parser(__doc__.splitlines()[0], prog="infer.py")
    p.add_argument("--model", default=DEFAULT_MODEL, help="folder, .gguf, preset or hub id")
    p.add_argument("--ctx", type=console.positive_int, help="tokens of context")
    p.add_argument("--context", nargs="+", metavar="FILE", help="UTF-8 texts, in this order")
    p.add_argument("--prompt", help="what to ask (default: for the haystack's code)")
    p.add_argument("--raw", action="store_true", help="continue --prompt, without chat template")
    p.add_argument("--batch", metavar="FILE", help="many prompts: one a line, or .jsonl")
    p.add_argument("--chat", action="store_true", help="a conversation about the context")
    p.add_argument("--cache", default="comb", help="comb (default), full, window, quest, ...")
    p.add_argument(
        "--cache-bits", type=int, metavar="N", help="of comb and quantized: 8, 4, 2 or 1"
    )
    p.add_argument(
        "--attention",
        choices=("xla", "auto", "pallas", "cudnn"),
        default="xla",
        help="who computes attention: auto takes the first of pallas, cudnn and xla that the GPU "
        "and the arrays allow (xla: the kernels have not been measured on a GPU yet)",
    )
    p.add_argument("--window", type=console.positive_int, default=1024, help="tokens kept whole")
    p.add_argument("--depth", type=float, default=0.5, help="place of the code, 0 to 1")
    p.add_argument("--mesh", help="data x tensor devices, such as 1x2")
    p.add_argument("--max-new-tokens", type=console.positive_int, metavar="N")
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--top-k", type=int, default=0)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dtype", help="float32 (default on a CPU) or bfloat16")
    p.add_argument("--chunk-batch", type=console.positive_int, help="chunks encoded at once")
    p.add_argument("--plan", metavar="GPU", help="memory a GPU would need; nothing is run")
    p.add_argument("--json", type=console.output_file, metavar="FILE", help="figures for programs")
    return p


def main(args) -> None:
    """Checks the request before anything slow, then runs it."""
    from combkv_jax import inference, sharding
    from combkv_jax.attention import choice
    from combkv_jax.generate import Sampling

    if args.cache not in inference.CACHES:
        raise RequestError(f"cache {args.cache!r} is not one of {', '.join(inference.CACHES)}.")
    if args.prompt is not None and not args.prompt.strip():
        raise RequestError("the prompt is empty; ask something.")
    if sum(map(bool, (args.prompt, args.batch, args.chat))) > 1:
        raise RequestError("--prompt, --batch and --chat exclude each other; give one.")
    if args.dtype not in (None, "float32", "bfloat16"):
        raise RequestError(f"dtype {args.dtype!r} is not one of float32, bfloat16.")
    if args.plan and args.cache != "comb":
        raise RequestError(f"--plan plans --cache comb, not {args.cache}, and tells full's bytes.")
    if args.chat and args.json:
        raise RequestError("--chat has no figures for --json; give one of them.")
    if args.chat and args.cache != "comb":
        raise RequestError(f"--chat works with --cache comb, not {args.cache}.")
    if args.cache_bits is not None:
        check_coded(args)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    texts = [inference.read_text(path) for path in args.context or ()]
    prompts = inference.read_prompts(args.batch) if args.batch else [args.prompt]
    console.prepare_jax()
    if args.plan:
        return plan(args)
    choice.use(args.attention)
    mesh = sharding.parse_mesh(args.mesh) if args.mesh else None

    from combkv_jax.language_model import load

    lm = load(args.model, dtype=args.dtype, mesh=mesh)
    context = np.zeros(0, np.int32)
    question = None
    if texts:
        context = lm.tokens("\n".join(texts), special=True)
        if args.ctx and len(context) > args.ctx:
            console.note(f"The context has {len(context)} tokens; its first {args.ctx} are used.")
            context = context[: args.ctx]
    elif args.ctx or not (args.prompt or args.batch or args.chat):
        context, question = inference.needle(lm, args.ctx or 4096, args.depth, args.seed)
    if args.chat:
        return chat(lm, context, sampling, args)
    if prompts != [None]:
        begins = not len(context)
        if not args.raw:
            ids = [lm.chat_tokens([{"role": "user", "content": p}], begins=begins) for p in prompts]
        else:
            ids = [lm.tokens(p, special=begins) for p in prompts]
        question = inference.Question(ids)
    elif question is None:
        raise RequestError("--context needs a question: give --prompt, --batch or --chat.")

    run = inference.answer(
        lm,
        context,
        question,
        cache=args.cache,
        window=args.window,
        max_new_tokens=args.max_new_tokens or (16 if question.answer else 256),
        sampling=sampling,
        bits=args.cache_bits,
        chunk_batch=args.chunk_batch,
        show=lambda piece: print(piece, end="", flush=True),
    )
    print()
    if len(run.answers) > 1:
        for prompt, text in zip(prompts, run.answers, strict=True):
            print(f"> {prompt}\n{text.strip()}\n")
    if run.expected:
        print(inference.verdict(run))
    print()
    console.print_table(inference.table(run))
    if args.json:
        console.write_json(args.json, inference.as_json(run, sys.argv, args.model))


def check_coded(args) -> None:
    """Raises RequestError for --cache-bits that cannot be, or that would change nothing."""
    from combkv_jax.cache import CODED
    from combkv_jax.cache.quantize import check_bits

    check_bits(args.cache_bits)
    if args.cache not in CODED:
        known = " and ".join(CODED)
        raise RequestError(f"--cache-bits works with the caches {known}, not {args.cache}.")
    if args.plan:
        raise RequestError("--plan plans a history in 16 bits; leave --cache-bits out.")
    if args.chat:
        raise RequestError(
            "--chat appends to its history, which cannot be done in fewer bits; leave --cache-bits "
            "out."
        )


def chat(lm, context, sampling, args) -> None:
    """Reads messages from stdin, a line each, until it ends or says /exit."""
    from combkv_jax.chat import ChatSession

    history = None
    if len(context):
        with console.progress(len(context), "Compressing") as advance:
            history = lm.compress(context, chunk_batch=args.chunk_batch, progress=advance)
    session = ChatSession(
        lm,
        window=args.window,
        history=history,
        max_new_tokens=args.max_new_tokens or min(256, args.window // 2),
        sampling=sampling,
    )
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return
        if not line.strip():
            continue
        try:
            for piece in session.send(line.strip()):
                print(piece, end="", flush=True)
        except RequestError as error:  # this message cannot be taken; the conversation goes on
            console.note(str(error))
        print()


def plan(args) -> None:
    """Prints what a decode step would take on a GPU."""
    from combkv_jax import inference, planner, sharding

    config = inference.planned_config(args.model)
    shape = sharding.mesh_shape(args.mesh or "1x1")
    console.note(f"Compiling a decode step for {args.plan} ...")
    result = planner.plan_decode(
        config,
        args.plan,
        args.ctx or config.text.max_position_embeddings,
        args.window,
        dtype=args.dtype or "bfloat16",
        mesh=shape,
    )
    console.print_table(inference.plan_table(result))
    if args.json:
        console.write_json(args.json, result)


if __name__ == "__main__":
    sys.exit(console.run(main, parser()))
