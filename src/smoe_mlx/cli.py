"""The command `smoe-mlx`. Flags are those of mlx_lm's own commands."""

import argparse
import json
import platform
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_tokenizer
from tqdm import tqdm

from . import __version__
from .bench import BUDGETS, bench
from .cache.policy import POLICIES
from .config import StreamingConfig
from .doctor import diagnose
from .errors import SmoeError
from .forward.decode import MODES
from .generate import stream_generate
from .hub import DEMO, find_model
from .instrument import instrument
from .kernels.choose import KERNELS
from .kernels.experts import FusedExperts, backend
from .kernels.selftest import operations, self_test, usual_geometries
from .load import load
from .load import plan as make_plan
from .panel import Panel
from .plan import format_bytes
from .replay import report
from .sculptor.recipe import AFFINE_BITS, AFFINE_GROUPS, FIXED
from .sculptor.shatter import shatter
from .sculptor.verify import verify
from .server.commands import add_chat_flags, add_server_flags, run_chat, run_server
from .stats import Stats, stats, streaming_of
from .store.reader import IO_MODES
from .trace import Recorder, force, load_trace

DEMO_PROMPT = "And the LORD said unto Moses,"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
    except BrokenPipeError:  # `| head`: whoever read has enough
        sys.stderr.close()
        return 128 + signal.SIGPIPE
    except (SmoeError, OSError) as e:
        print(f"smoe-mlx: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smoe-mlx",
        description="Run Mixture-of-Experts models larger than memory: experts stay on the SSD.",
    )
    parser.add_argument("--version", action="version", version=f"smoe-mlx {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="stream the bundled model, a quarter of it in memory")
    _add_prompt(demo, DEMO_PROMPT, temp=0.7, top_p=0.95, max_tokens=200)
    _add_budget(demo, slots=0.25)
    _add_drafts(demo)
    _add_instrument(demo)
    demo.set_defaults(run=run_generate, model=DEMO, seed=7)

    generate = commands.add_parser("generate", help="generate text")
    _add_model(generate)
    _add_prompt(generate, "hello", temp=0.0, top_p=1.0, max_tokens=100)
    _add_budget(generate)
    _add_drafts(generate)
    _add_instrument(generate)
    generate.set_defaults(run=run_generate)

    chat = commands.add_parser("chat", help="a conversation on the console")
    add_chat_flags(chat)
    _add_budget(chat)
    chat.set_defaults(run=lambda args: run_chat(args, _config(args)))

    server = commands.add_parser("server", help="serve models to OpenAI and Anthropic clients")
    add_server_flags(server)
    _add_budget(server)
    server.set_defaults(run=lambda args: run_server(args, _config(args)))

    plan = commands.add_parser("plan", help="say what would be in memory, from headers alone")
    _add_model(plan)
    _add_budget(plan)
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.set_defaults(run=run_plan)

    stats_ = commands.add_parser("stats", help="generate, and print the counters of every layer")
    _add_model(stats_)
    _add_prompt(stats_, "hello", temp=0.0, top_p=1.0, max_tokens=100)
    _add_budget(stats_)
    _add_drafts(stats_)
    stats_.add_argument("--json", action="store_true", help="print JSON")
    stats_.set_defaults(run=run_stats)

    trace = commands.add_parser("trace", help="record which experts the router chooses")
    _add_model(trace)
    _add_prompt(trace, "hello", temp=0.0, top_p=1.0, max_tokens=256)
    trace.add_argument("--file", help="instead of a prompt: pass this text token by token")
    trace.add_argument("--output", "-o", default="trace.npz", help="default: trace.npz")
    _add_budget(trace)
    trace.set_defaults(run=run_trace)

    replay = commands.add_parser("replay", help="what policies and budgets make of a trace")
    replay.add_argument("trace", help="the file that smoe-mlx trace wrote")
    replay.add_argument(
        "--policy", type=_list, default=list(POLICIES), help=f"default: {','.join(POLICIES)}"
    )
    replay.add_argument(
        "--slots",
        type=_budgets,
        default=[0.125, 0.25, 0.5, 0.75],
        help="experts in memory, numbers or shares (default: 0.125,0.25,0.5,0.75)",
    )
    replay.add_argument("--json", action="store_true", help="print JSON")
    replay.add_argument("--plot", help="write a plot to this file (needs smoe-mlx[plots])")
    replay.set_defaults(run=run_replay)

    doctor = commands.add_parser("doctor", help="will it run here, how fast, and what to do for it")
    _add_model(doctor)
    _add_budget(doctor)
    doctor.add_argument("--sim-ram", metavar="16GB", help="ask for a machine with this memory")
    doctor.add_argument("--sim-disk", metavar="3GB/s", help="ask for one with this disk")
    doctor.add_argument("--trace", help="take the hit rate from what smoe-mlx trace wrote")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=run_doctor)

    bench_ = commands.add_parser("bench", help="the speed that is forecast, and the one measured")
    _add_model(bench_)
    _add_budget(bench_)
    bench_.add_argument("--prompt", "-p", default=DEMO_PROMPT)
    bench_.add_argument("--max-tokens", "-m", type=int, default=48, help="default: 48")
    bench_.add_argument(
        "--budgets", type=_budgets, default=BUDGETS, help="as --slots: numbers or shares"
    )
    bench_.add_argument(
        "--cpu-time",
        action="store_true",
        help="count what the process computes: on machines that others use too, on a CPU",
    )
    bench_.add_argument("--json", action="store_true", help="print JSON")
    bench_.set_defaults(run=run_bench, decode="exact")

    shatter_ = commands.add_parser("shatter", help="make a vault: one aligned record an expert")
    shatter_.add_argument("src", help="local folder or Hub repository")
    shatter_.add_argument("dst", help="the new folder")
    _add_quantisation(shatter_, "", "the experts (default: keep their bytes)")
    shatter_.add_argument(
        "--recipe", help="SMOE-Q4, SMOE-Q2, or a JSON file of settings by layer, projection, expert"
    )
    _add_quantisation(shatter_, "backbone-", "everything else (default: keep it)")
    shatter_.add_argument("--revision", help="branch, tag or commit of a Hub repository")
    shatter_.add_argument("--trust-remote-code", action="store_true")
    shatter_.set_defaults(run=run_shatter)

    selftest = commands.add_parser(
        "selftest", help="are the expert kernels right on this GPU, and faster?"
    )
    selftest.set_defaults(run=run_selftest)

    verify_ = commands.add_parser("verify", help="check every record of a vault")
    verify_.add_argument("dst", help="the folder that shatter made")
    verify_.add_argument("--source", help="compare with the checkpoint it was made from")
    verify_.add_argument("--trust-remote-code", action="store_true")
    verify_.set_defaults(run=run_verify)
    return parser


# ---- flags ---------------------------------------------------------------------------------------


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="local folder, Hub repository, or 'demo'")
    parser.add_argument("--model", dest="model_flag", help=argparse.SUPPRESS)  # as mlx_lm
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model's own code")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repository")


def _add_budget(parser: argparse.ArgumentParser, slots: float | None = None) -> None:
    group = parser.add_argument_group("memory and reading")
    group.add_argument("--memory", help="ceiling for all that MLX allocates, such as 12GB")
    group.add_argument(
        "--slots", type=_slots, help="instead: experts in memory, a number or a share such as 0.25"
    )
    group.add_argument("--context", type=int, help="tokens of KV cache to plan for")
    group.add_argument("--kv-bits", type=int, help="quantise the KV cache")
    group.add_argument("--kv-group-size", type=int, default=64)
    group.add_argument("--quantized-kv-start", type=int, default=5000)
    group.add_argument(
        "--no-hits-first",
        dest="hits_first",
        action="store_false",
        help="wait for all experts of a token before computing any",
    )
    group.add_argument(
        "--no-lookahead",
        dest="lookahead",
        action="store_false",
        help="read no experts of the next layer ahead",
    )
    group.add_argument(
        "--spec", type=int, default=0, metavar="N", help="ranks beyond top-k to read as bets"
    )
    group.add_argument("--threads", type=int, default=8, help="reads at a time (default: 8)")
    group.add_argument(
        "--io", choices=IO_MODES, default="pread", help="direct: past the page cache"
    )
    group.add_argument(
        "--decode", default="auto", metavar="MODE", help=f"{', '.join(MODES)} (docs/decode.md)"
    )
    group.add_argument(
        "--kernels",
        choices=KERNELS,
        default="stock",
        help="fused, auto: expert kernels on a GPU (docs/kernels.md); default: mlx-lm's operations",
    )
    group.add_argument(
        "--policy", default="lru", help=f"who makes room for another: {', '.join(POLICIES)}"
    )
    group.add_argument(
        "--usage",
        metavar="FILE",
        help="remember here which experts are used most, and read them while the model is idle "
        "('auto': beside the model)",
    )
    group.add_argument(
        "--hot-per-layer", type=int, default=0, metavar="N", help="pin the N most used of a layer"
    )
    group.add_argument(
        "--govern", action="store_true", help="give slots back while the system lacks memory"
    )
    group.add_argument(
        "--check", action="store_true", help="compare each record of a vault with its checksum"
    )
    parser.set_defaults(default_slots=slots)


def _add_prompt(
    parser: argparse.ArgumentParser, prompt: str, temp: float, top_p: float, max_tokens: int
) -> None:
    add = parser.add_argument
    add("--prompt", "-p", default=prompt, help="the prompt; '-' reads it from standard input")
    add("--max-tokens", "-m", type=int, default=max_tokens, help=f"default: {max_tokens}")
    add("--temp", type=float, default=temp, help=f"sampling temperature (default: {temp})")
    add("--top-p", type=float, default=top_p, help=f"default: {top_p}")
    add("--min-p", type=float, default=0.0)
    add("--top-k", type=int, default=0)
    add("--seed", type=int, help="seed of the sampler")
    add("--system-prompt", help="system message for the chat template")
    add("--ignore-chat-template", action="store_true", help="take the prompt as it is")
    add("--extra-eos-token", nargs="+", default=(), help="more tokens that end the text")
    add("--adapter-path", help="folder of a LoRA adapter (not on routed experts)")
    add("--max-kv-size", type=int, help="rotate the KV cache at this size")
    add("--prefill-step-size", type=int, help="prompt tokens at a time (default: by the plan)")
    add("--quiet", "-q", action="store_true", help="print nothing but the text")


def _add_drafts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafts, used while they are faster")
    either = group.add_mutually_exclusive_group()
    either.add_argument("--draft-model", help="a smaller model with the same tokenizer, in memory")
    either.add_argument(
        "--prompt-lookup",
        type=_from_one,
        nargs="?",
        const=True,
        default=False,
        metavar="N",
        help="what followed the last N tokens where they came before (default: 3)",
    )
    group.add_argument(
        "--num-draft-tokens", type=_from_one, default=3, help="for one pass (default: 3)"
    )


def _add_instrument(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("instrument panel")
    group.add_argument(
        "--instrument",
        nargs="*",
        metavar="FILE",
        help="generate the same tokens twice more, and say where the time goes; also into files: "
        ".json, or a plot (.png, .svg, .pdf; needs smoe-mlx[plots])",
    )
    group.add_argument(
        "--probe-disk", action="store_true", help="with it: measure the disk's best, for a second"
    )


def _add_quantisation(parser: argparse.ArgumentParser, prefix: str, what: str) -> None:
    group = parser.add_argument_group(f"quantise {what}")
    group.add_argument(f"--{prefix}bits", type=int, choices=AFFINE_BITS)
    group.add_argument(f"--{prefix}group-size", type=int, choices=(16, *AFFINE_GROUPS))
    group.add_argument(f"--{prefix}mode", choices=("affine", *FIXED))


def _from_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 on")
    return int(text)


def _slots(text: str) -> int | float:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a share") from None


def _budgets(text: str) -> list[int | float]:
    return [_slots(x) for x in _list(text)]


def _list(text: str) -> list[str]:
    return [x.strip() for x in text.split(",")]


def _model(args: argparse.Namespace) -> str:
    model = args.model or getattr(args, "model_flag", None)
    if not model:
        raise SmoeError("name a model: a local folder, a Hub repository, or 'demo'")
    return str(model)


def _config(args: argparse.Namespace) -> StreamingConfig:
    slots = args.slots
    if slots is None and args.memory is None:
        slots = args.default_slots
    try:
        return StreamingConfig(
            memory=args.memory,
            slots=slots,
            context=args.context,
            kv_bits=args.kv_bits,
            kv_group_size=args.kv_group_size,
            quantized_kv_start=args.quantized_kv_start,
            hits_first=args.hits_first,
            lookahead=args.lookahead,
            spec=args.spec,
            decode=args.decode,
            kernels=args.kernels,
            threads=args.threads,
            io=args.io,
            policy=args.policy,
            usage=args.usage,
            hot_per_layer=args.hot_per_layer,
            govern=args.govern,
            check=args.check,
        )
    except ValueError as e:
        raise SmoeError(str(e)) from e


# ---- commands ------------------------------------------------------------------------------------


def run_plan(args: argparse.Namespace) -> None:
    plan = make_plan(
        _model(args),
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        config=_config(args),
    )
    print(json.dumps(plan.as_dict(), indent=2) if args.json else plan)


def run_generate(args: argparse.Namespace) -> None:
    _check_instrument(args)
    model, tokenizer = _load(args)
    prompt = _prompt(args, tokenizer)
    first, start = None, ""
    tokens = []
    for response in _responses(args, model, tokenizer, prompt):
        tokens.append(response.token)
        if first is None:
            first = response.token
            # mlx-lm's detokenizer drops a leading space, which a continued prompt needs.
            start = " " if tokenizer.decode([first]).startswith(" ") else ""
        text = response.text
        if text:
            text = text if text.startswith(start) else start + text
            start = ""
        print(text, end="", flush=True)
    print()
    if not args.quiet:
        print(f"\n{one_line(response, stats(model))}", file=sys.stderr)
    if args.instrument is not None:
        panel = _instrumented(args, model, tokenizer, prompt, tokens)
        print(f"\n{panel}")
        for path in args.instrument:
            _write_panel(panel, path)


PLOTS = (".png", ".svg", ".pdf")


def _instrumented(
    args: argparse.Namespace, model: Any, tokenizer: Any, prompt: list[int], tokens: list[int]
) -> Panel:
    """The panel of the same tokens, and their speed without it. The run that came before was cold,
    so both are measured after it."""

    def repeat() -> float:
        again, times = [], []
        for response in _responses(args, model, tokenizer, prompt):
            again.append(response.token)
            times.append(time.perf_counter())
        if again != tokens:
            raise SmoeError("--instrument: other tokens came out than before. This is a bug.")
        return times[-1] - times[0]

    with instrument(model, probe=args.probe_disk) as panel:
        repeat()
    seconds = repeat()
    panel.plain_tps = (len(tokens) - 1) / seconds if len(tokens) > 1 else None
    return panel


def _check_instrument(args: argparse.Namespace) -> None:
    """What is wrong with the files of --instrument is said before a minute is spent."""
    if args.instrument is None:
        if args.probe_disk:
            raise SmoeError("--probe-disk goes with --instrument")
        return
    if args.draft_model is not None or args.prompt_lookup:
        raise SmoeError("--instrument looks at passes of one token: leave the drafts out")
    if args.seed is None:  # the same tokens have to come twice
        args.seed = random.randrange(1 << 31)
    for path in args.instrument:
        if Path(path).suffix not in (".json", *PLOTS):
            raise SmoeError(
                f"--instrument {path}: a file ends in .json, {', '.join(PLOTS)}. "
                "(The name of the model goes before --instrument.)"
            )
        if not Path(path).absolute().parent.is_dir():
            raise SmoeError(f"--instrument {path}: there is no such folder")
        if Path(path).suffix in PLOTS:
            from .plot import new_figure

            new_figure()  # is there matplotlib?


def _write_panel(panel: Panel, path: str) -> None:
    if Path(path).suffix in PLOTS:
        from .plot import plot_panel

        plot_panel(panel, path)
        return
    try:
        Path(path).write_text(json.dumps(panel.as_dict(), indent=2) + "\n")
    except OSError as e:
        raise SmoeError(f"--instrument {path}: {e.strerror}") from e


def run_selftest(args: argparse.Namespace) -> None:
    where = backend()
    if where is None:
        raise SmoeError("MLX's default device is no GPU here: there are no kernels to test.")
    device = {k: v for k, v in mx.device_info().items() if "name" in k or "arch" in k}
    mlx = mx.__version__  # type: ignore[attr-defined]
    print(f"smoe-mlx {__version__}, MLX {mlx}, {platform.platform()}, {where}: {device}")
    bad = []
    for name, (geometry, activation) in usual_geometries().items():
        print(f"{name} ({geometry}): ", end="", flush=True)
        try:
            stock = operations(geometry, activation)
            verdict = self_test(FusedExperts(geometry), stock, activation)
        except Exception as e:  # whatever MLX, a driver or a compiler raises: report it, go on
            print(f"FAILED\n{e}")
            bad.append(name)
            continue
        if verdict.fault:
            bad.append(name)
        print(verdict)
    if bad:
        raise SmoeError(f"the kernels are not right here for {', '.join(bad)}; they are not used.")


def run_stats(args: argparse.Namespace) -> None:
    model, tokenizer = _load(args)
    *_, last = _responses(args, model, tokenizer)
    s = stats(model)
    if args.json:
        print(json.dumps(s.as_dict(), indent=2))
        return
    print(f"{s}\nspeed             {last.generation_tps:.1f} tok/s")
    print("\nlayer      hits   misses   hit rate")
    for i, x in enumerate(s.layers):
        rate = (
            f"{100 * x.hits / (x.hits + x.misses):8.1f} %" if x.hits + x.misses else "  in memory"
        )
        print(f"{i:>5} {x.hits:>9,} {x.misses:>8,}  {rate}")


def one_line(response: Any, s: Stats) -> str:
    """The line of truth after a generation."""
    rate = f"{100 * s.hit_rate:.0f} % hits" if s.hits + s.misses else "all experts in memory"
    d = s.drafts
    notes = f"{d.accepted:,} of {d.drafted:,} drafts accepted, " if d.passes else ""
    notes += f"{d.note}, " if d.note else ""
    notes += f"LOSSY ({s.dropped:,} experts left out), " if s.dropped else ""
    return (
        f"{response.generation_tps:.1f} tok/s, {notes}{rate}, {format_bytes(s.bytes_read)} read, "
        f"peak {format_bytes(s.peak_memory)} (plan {format_bytes(s.plan.total)}: "
        f"{s.plan.slots:,} of {s.plan.num_experts:,} experts)"
    )


def _load(args: argparse.Namespace) -> tuple[Any, Any]:
    start = time.perf_counter()
    model, tokenizer = load(
        _model(args),
        tokenizer_config={"trust_remote_code": True}
        if getattr(args, "trust_remote_code", False)
        else None,
        adapter_path=args.adapter_path,
        revision=getattr(args, "revision", None),
        trust_remote_code=getattr(args, "trust_remote_code", False),
        config=_config(args),
    )[:2]
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    if not args.quiet:
        plan = stats(model).plan
        print(
            f"loaded in {time.perf_counter() - start:.1f} s: {plan.slots:,} of "
            f"{plan.num_experts:,} experts in memory at a time, {format_bytes(plan.total)} planned",
            file=sys.stderr,
        )
    return model, tokenizer


def _prompt(args: argparse.Namespace, tokenizer: Any) -> list[int]:
    """The tokens of the prompt; prints it where the text will continue it."""
    prompt = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    prompt = sys.stdin.read() if prompt == "-" else prompt
    if tokenizer.has_chat_template and not args.ignore_chat_template:
        messages = [{"role": "user", "content": prompt}]
        if args.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": args.system_prompt})
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    else:
        if not args.quiet and args.run is run_generate:
            print(prompt, end="", flush=True)
        tokens = tokenizer.encode(prompt)
    return list(tokens)


def _responses(
    args: argparse.Namespace, model: Any, tokenizer: Any, prompt: list[int] | None = None
) -> Iterator[Any]:
    from mlx_lm.sample_utils import make_sampler

    if args.seed is not None:
        mx.random.seed(args.seed)
    return stream_generate(
        model,
        tokenizer,
        _prompt(args, tokenizer) if prompt is None else prompt,
        max_tokens=args.max_tokens,
        sampler=make_sampler(args.temp, args.top_p, args.min_p, top_k=args.top_k),
        max_kv_size=args.max_kv_size,
        kv_bits=args.kv_bits,
        kv_group_size=args.kv_group_size,
        quantized_kv_start=args.quantized_kv_start,
        prefill_step_size=args.prefill_step_size,
        **_draft_options(args, tokenizer),
    )


def _draft_options(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    if not hasattr(args, "draft_model"):  # smoe-mlx trace
        return {}
    draft_model = None
    if args.draft_model is not None:
        import mlx_lm

        draft_model, of_draft = mlx_lm.load(str(find_model(args.draft_model)))[:2]
        if of_draft.vocab_size != tokenizer.vocab_size:
            raise SmoeError(
                f"--draft-model {args.draft_model}: its tokenizer has {of_draft.vocab_size}, "
                f"the model's {tokenizer.vocab_size} tokens. It must be the same one."
            )
    return {
        "draft_model": draft_model,
        "prompt_lookup": args.prompt_lookup,
        "num_draft_tokens": args.num_draft_tokens,
    }


def run_trace(args: argparse.Namespace) -> None:
    if not Path(args.output).absolute().parent.is_dir():
        raise SmoeError(f"--output {args.output}: there is no such folder")
    text = None if args.file is None else _read_text(args.file)
    model, tokenizer = _load(args)
    prompt_tokens = 0
    with Recorder(model, _model(args)) as recorder:
        if text is None:
            *_, last = _responses(args, model, tokenizer)
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
        from .plot import plot_report

        plot_report(result, args.plot)
    print(json.dumps(result.as_dict(), indent=2) if args.json else result)


def run_doctor(args: argparse.Namespace) -> None:
    diagnosis = diagnose(
        _model(args),
        _config(args),
        args.revision,
        args.trust_remote_code,
        args.sim_ram,
        args.sim_disk,
        None if args.trace is None else load_trace(args.trace),
    )
    print(json.dumps(diagnosis.as_dict(), indent=2) if args.json else diagnosis)


def run_bench(args: argparse.Namespace) -> None:
    folder = find_model(_model(args), args.revision)
    result = bench(
        folder,
        load_tokenizer(folder).encode(args.prompt),
        _config(args),
        args.budgets,
        args.max_tokens,
        args.trust_remote_code,
        time.process_time if args.cpu_time else time.perf_counter,
    )
    print(json.dumps(result.as_dict(), indent=2) if args.json else result)


def run_shatter(args: argparse.Namespace) -> None:
    with tqdm(unit="B", unit_scale=True, unit_divisor=1000, desc="shatter") as bar:
        warnings.showwarning = lambda message, *_: bar.write(f"warning: {message}", sys.stderr)
        dst = shatter(
            args.src,
            args.dst,
            bits=args.bits,
            group_size=args.group_size,
            mode=args.mode,
            recipe=args.recipe,
            backbone_bits=args.backbone_bits,
            backbone_group_size=args.backbone_group_size,
            backbone_mode=args.backbone_mode,
            revision=args.revision,
            trust_remote_code=args.trust_remote_code,
            progress=lambda done, total: _show(bar, done, total),
        )
    size = sum(p.stat().st_size for p in dst.iterdir())
    print(f"{dst}: {format_bytes(size)}. Run it: smoe-mlx generate {dst}")


def run_verify(args: argparse.Namespace) -> None:
    with tqdm(unit=" records", desc="verify") as bar:
        records = verify(
            args.dst,
            args.source,
            args.trust_remote_code,
            progress=lambda done, total: _show(bar, done, total),
        )
    print(f"{args.dst}: {records:,} records, all as they were written.")


def _show(bar: Any, done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)
