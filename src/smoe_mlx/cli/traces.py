"""`smoe-mlx trace` and `replay`: which experts the router chooses, and what policies make of it."""

import argparse
import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..cache.policy import POLICIES
from ..errors import SmoeError
from ..replay import report
from ..stats import streaming_of
from ..trace import Recorder, force, load_trace
from .flags import add_budget, add_model, add_prompt, budgets, comma_list, model_name
from .generate import load_streamed, responses


def add_commands(commands: Any) -> None:
    """trace, replay."""
    trace = commands.add_parser("trace", help="record which experts the router chooses")
    add_model(trace)
    add_prompt(trace, "hello", temp=0.0, top_p=1.0, max_tokens=256)
    trace.add_argument("--file", help="instead of a prompt: pass this text token by token")
    trace.add_argument("--output", "-o", default="trace.npz", help="default: trace.npz")
    add_budget(trace)
    trace.set_defaults(run=run_trace)

    replay = commands.add_parser("replay", help="what policies and budgets make of a trace")
    replay.add_argument("trace", help="the file that smoe-mlx trace wrote")
    replay.add_argument(
        "--policy", type=comma_list, default=list(POLICIES), help=f"default: {','.join(POLICIES)}"
    )
    replay.add_argument(
        "--slots",
        type=budgets,
        default=[0.125, 0.25, 0.5, 0.75],
        help="experts in memory, numbers or shares (default: 0.125,0.25,0.5,0.75)",
    )
    replay.add_argument("--json", action="store_true", help="print JSON")
    replay.add_argument("--plot", help="write a plot to this file (needs smoe-mlx[plots])")
    replay.set_defaults(run=run_replay)


def run_trace(args: argparse.Namespace) -> None:
    if not Path(args.output).absolute().parent.is_dir():
        raise SmoeError(f"--output {args.output}: there is no such folder")
    text = None if args.file is None else _read_text(args.file)
    model, tokenizer = load_streamed(args)
    prompt_tokens = 0
    with Recorder(model, model_name(args)) as recorder:
        if text is None:
            *_, last = responses(args, model, tokenizer)
            prompt_tokens = last.prompt_tokens
        else:
            tokens = tokenizer.encode(text)[: args.max_tokens]
            window = streaming_of(model).plan.context
            for _ in tqdm(
                force(model, tokens, window), total=len(tokens), unit=" tokens", disable=args.quiet
            ):
                pass
    trace = recorder.trace(prompt_tokens)
    trace.save(args.output)
    if not args.quiet:
        print(f"{args.output}: {trace.tokens:,} tokens. Replay it: smoe-mlx replay {args.output}")


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            text = f.read()
    except OSError as e:
        raise SmoeError(f"--file {path}: {e.strerror}") from e
    if not text:
        raise SmoeError(f"--file {path} is empty")
    return text


def run_replay(args: argparse.Namespace) -> None:
    trace = load_trace(args.trace)
    if unknown := set(args.policy) - set(POLICIES):
        raise SmoeError(f"--policy {', '.join(sorted(unknown))}: one of {', '.join(POLICIES)}")
    result = report(trace, args.policy, args.slots)
    if args.plot is not None:
        from ..plot import plot_report

        plot_report(result, args.plot)
    print(json.dumps(result.as_dict(), indent=2) if args.json else result)
