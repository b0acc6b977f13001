"""`smoe-mlx demo`, `generate` and `stats`: text, the line of truth, and the instrument panel."""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import SmoeError
from ..generate import stream_generate
from ..hub import DEMO, find_model
from ..instrument import instrument
from ..load import load
from ..panel import Panel
from ..plan import format_bytes
from ..stats import Stats, stats
from .flags import (
    DEMO_PROMPT,
    add_budget,
    add_model,
    add_prompt,
    from_one,
    model_name,
    streaming_config,
)

PLOTS = (".png", ".svg", ".pdf")


def add_commands(commands: Any) -> None:
    """demo, generate, stats."""
    demo = commands.add_parser("demo", help="stream the bundled model, a quarter of it in memory")
    add_prompt(demo, DEMO_PROMPT, temp=0.7, top_p=0.95, max_tokens=200)
    add_budget(demo, slots=0.25)
    add_drafts(demo)
    _add_instrument(demo)
    demo.set_defaults(run=run_generate, model=DEMO, seed=7)

    generate = commands.add_parser("generate", help="generate text")
    add_model(generate)
    add_prompt(generate, "hello", temp=0.0, top_p=1.0, max_tokens=100)
    add_budget(generate)
    add_drafts(generate)
    _add_instrument(generate)
    generate.set_defaults(run=run_generate)

    stats_ = commands.add_parser("stats", help="generate, and print the counters of every layer")
    add_model(stats_)
    add_prompt(stats_, "hello", temp=0.0, top_p=1.0, max_tokens=100)
    add_budget(stats_)
    add_drafts(stats_)
    stats_.add_argument("--json", action="store_true", help="print JSON")
    stats_.set_defaults(run=run_stats)


def add_drafts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafts, used while they are faster")
    either = group.add_mutually_exclusive_group()
    either.add_argument("--draft-model", help="a smaller model with the same tokenizer, in memory")
    either.add_argument(
        "--prompt-lookup",
        type=from_one,
        nargs="?",
        const=True,
        default=False,
        metavar="N",
        help="what followed the last N tokens where they came before (default: 3)",
    )
    group.add_argument(
        "--num-draft-tokens", type=from_one, default=3, help="for one pass (default: 3)"
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


def run_generate(args: argparse.Namespace) -> None:
    _check_instrument(args)
    model, tokenizer = load_streamed(args)
    prompt = _prompt(args, tokenizer)
    first, start = None, ""
    tokens = []
    for response in responses(args, model, tokenizer, prompt):
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


def run_stats(args: argparse.Namespace) -> None:
    model, tokenizer = load_streamed(args)
    *_, last = responses(args, model, tokenizer)
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


def load_streamed(args: argparse.Namespace) -> tuple[Any, Any]:
    start = time.perf_counter()
    model, tokenizer = load(
        model_name(args),
        tokenizer_config={"trust_remote_code": True}
        if getattr(args, "trust_remote_code", False)
        else None,
        adapter_path=args.adapter_path,
        revision=getattr(args, "revision", None),
        trust_remote_code=getattr(args, "trust_remote_code", False),
        config=streaming_config(args),
    )[:2]
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    if not args.quiet:
        s = stats(model)
        tuned = f"; as tuned: {s.tuned}" if s.tuned else ""
        print(
            f"loaded in {time.perf_counter() - start:.1f} s: {s.plan.slots:,} of "
            f"{s.plan.num_experts:,} experts in memory at a time, "
            f"{format_bytes(s.plan.total)} planned{tuned}",
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


def responses(
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


# ---- the instrument panel ------------------------------------------------------------------------


def _instrumented(
    args: argparse.Namespace, model: Any, tokenizer: Any, prompt: list[int], tokens: list[int]
) -> Panel:
    """The panel of the same tokens, and their speed without it. The run that came before was cold,
    so both are measured after it."""

    def repeat() -> float:
        again, times = [], []
        for response in responses(args, model, tokenizer, prompt):
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
            from ..plot import new_figure

            new_figure()  # is there matplotlib?


def _write_panel(panel: Panel, path: str) -> None:
    if Path(path).suffix in PLOTS:
        from ..plot import plot_panel

        plot_panel(panel, path)
        return
    try:
        Path(path).write_text(json.dumps(panel.as_dict(), indent=2) + "\n")
    except OSError as e:
        raise SmoeError(f"--instrument {path}: {e.strerror}") from e
