"""`smoe-mlx plan`, `doctor`, `bench` and `tune`: will it run, in how much memory, how fast."""

import argparse
import json
import time
from typing import Any

from mlx_lm.utils import load_tokenizer
from tqdm import tqdm

from ..bench import BUDGETS, bench
from ..config import StreamingConfig
from ..doctor import diagnose
from ..errors import SmoeError
from ..hub import find_model
from ..load import plan as make_plan
from ..plot import new_figure, plot_tuning
from ..trace import load_trace
from ..tune import GENERATION_TOKENS, PROMPT_TOKENS, SECONDS, tune
from .flags import (
    DEMO_PROMPT,
    add_budget,
    add_model,
    budgets,
    from_one,
    model_name,
    streaming_config,
)


def add_commands(commands: Any) -> None:
    """plan, doctor, bench, tune."""
    plan = commands.add_parser("plan", help="say what would be in memory, from headers alone")
    add_model(plan)
    add_budget(plan)
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.set_defaults(run=run_plan)

    doctor = commands.add_parser("doctor", help="will it run here, how fast, and what to do for it")
    add_model(doctor)
    add_budget(doctor)
    doctor.add_argument("--sim-ram", metavar="16GB", help="ask for a machine with this memory")
    doctor.add_argument("--sim-disk", metavar="3GB/s", help="ask for one with this disk")
    doctor.add_argument("--trace", help="take the hit rate from what smoe-mlx trace wrote")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=run_doctor)

    bench_ = commands.add_parser("bench", help="the speed that is forecast, and the one measured")
    add_model(bench_)
    add_budget(bench_)
    bench_.add_argument("--prompt", "-p", default=DEMO_PROMPT)
    bench_.add_argument("--max-tokens", "-m", type=int, default=48, help="default: 48")
    bench_.add_argument(
        "--budgets", type=budgets, default=BUDGETS, help="as --slots: numbers or shares"
    )
    bench_.add_argument(
        "--cpu-time",
        action="store_true",
        help="count what the process computes: on machines that others use too, on a CPU",
    )
    bench_.add_argument("--json", action="store_true", help="print JSON")
    bench_.set_defaults(run=run_bench, decode="exact")

    tune_ = commands.add_parser("tune", help="find the fastest budget and options, and keep them")
    add_model(tune_)
    tune_.add_argument("--memory", help="use no more, such as 12GB (default: what is free)")
    tune_.add_argument("--context", type=int, help="tokens of KV cache to plan for")
    tune_.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"for all of it (default: {SECONDS:.0f})"
    )
    tune_.add_argument(
        "--prompt-tokens",
        type=from_one,
        default=PROMPT_TOKENS,
        metavar="N",
        help=f"of the prompt in a turn, whose time is what counts (default: {PROMPT_TOKENS})",
    )
    tune_.add_argument(
        "--generation-tokens",
        type=from_one,
        default=GENERATION_TOKENS,
        metavar="N",
        help=f"of the answer in it (default: {GENERATION_TOKENS})",
    )
    tune_.add_argument(
        "--allow-kernels",
        action="store_true",
        help="take the expert kernels of a GPU if they are faster: they round otherwise than "
        "mlx-lm (docs/kernels.md)",
    )
    tune_.add_argument("--plot", help="write a plot to this file (needs smoe-mlx[plots])")
    tune_.add_argument("--json", action="store_true", help="print JSON")
    tune_.add_argument("--quiet", "-q", action="store_true", help="show no progress")
    tune_.set_defaults(run=run_tune)


def run_plan(args: argparse.Namespace) -> None:
    plan = make_plan(
        model_name(args),
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        config=streaming_config(args),
    )
    print(json.dumps(plan.as_dict(), indent=2) if args.json else plan)


def run_doctor(args: argparse.Namespace) -> None:
    diagnosis = diagnose(
        model_name(args),
        streaming_config(args),
        args.revision,
        args.trust_remote_code,
        args.sim_ram,
        args.sim_disk,
        None if args.trace is None else load_trace(args.trace),
    )
    print(json.dumps(diagnosis.as_dict(), indent=2) if args.json else diagnosis)


def run_bench(args: argparse.Namespace) -> None:
    folder = find_model(model_name(args), args.revision)
    result = bench(
        folder,
        load_tokenizer(folder).encode(args.prompt),
        streaming_config(args),
        args.budgets,
        args.max_tokens,
        args.trust_remote_code,
        time.process_time if args.cpu_time else time.perf_counter,
    )
    print(json.dumps(result.as_dict(), indent=2) if args.json else result)


def run_tune(args: argparse.Namespace) -> None:
    if not args.seconds > 0:
        raise SmoeError("--seconds must be more than 0")
    if args.plot is not None:
        new_figure()  # is there matplotlib?
    try:
        config = StreamingConfig(memory=args.memory, context=args.context)
    except ValueError as e:
        raise SmoeError(str(e)) from e
    with tqdm(
        total=args.seconds, bar_format="{bar} {n:.0f} of {total:.0f} s: {desc}", disable=args.quiet
    ) as bar:

        def show(passed: float, what: str) -> None:
            bar.update(min(passed, args.seconds) - bar.n)
            bar.set_description_str(what)

        tuning = tune(
            model_name(args),
            config,
            args.seconds,
            args.revision,
            args.trust_remote_code,
            show,
            prompt_tokens=args.prompt_tokens,
            generation_tokens=args.generation_tokens,
            allow_kernels=args.allow_kernels,
        )
    if args.plot is not None:
        plot_tuning(tuning, args.plot)
    print(json.dumps(tuning.as_dict(), indent=2) if args.json else tuning)
