"""Decode with mlx-lm, everything in memory, and with several shares of it, in turns in one process.

    python benchmarks/turns.py
    python benchmarks/turns.py --model VAULT --reference CHECKPOINT --trace TRACE --shares 1.0 0.25

All arms are fed the same text, a few tokens a turn, in an order that moves on with every turn, so
that what disturbs one disturbs all, and no arm has caches or cores of its own. `decode.py` gives
each a process, and says more of it. The ratio is the speed against mlx-lm in the same turns: the
median, and the middle half. The next forward is built while one computes where `generate` does so:
with everything in memory, and where the device waits for slots. The bound is the larger of
mlx-lm's time and the bytes that were read over the bandwidth at which random experts come into
slots afterwards; times are set against it by their median and by their mean (mlx-lm's likewise). A
text that is too short is fed again and again. It needs the memory of all arms.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx_lm
from decode import (
    MODES,
    MOST_TOKENS,
    TEXT,
    bandwidth_into_slots,
    counters,
    rotated,
    route_by_trace,
    several,
    tokens_by_mode,
)
from mlx_lm.models.cache import make_prompt_cache

import smoe_mlx
from smoe_mlx.hub import find_model

RESIDENT = "mlx-lm"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="folder, or demo (the bundled model)")
    parser.add_argument("--reference", type=Path, help="for mlx-lm, if MODEL is a vault")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.75, 0.5, 0.25, 0.125])
    parser.add_argument("--decode", default="auto", help="StreamingConfig.decode")
    parser.add_argument("--kernels", default="stock", help="StreamingConfig.kernels")
    parser.add_argument("--tokens", type=int, default=192, help="to time")
    parser.add_argument("--warmup", type=int, default=64, help="tokens before those")
    parser.add_argument("--turn", type=int, default=8, help="tokens of one turn")
    parser.add_argument("--trace", type=Path, help="route as this trace (smoe-mlx trace) says")
    args = parser.parse_args()
    needed = args.warmup + args.tokens
    if args.trace and needed >= MOST_TOKENS:
        parser.error(f"--trace goes for {MOST_TOKENS - 1} tokens")
    if args.tokens % args.turn or args.warmup % args.turn:
        parser.error("--tokens and --warmup must be multiples of --turn")

    folder = find_model(args.model)
    resident, tokenizer = mlx_lm.load(str(args.reference or folder))
    arms = {RESIDENT: resident}
    for share in args.shares:
        config = smoe_mlx.StreamingConfig(slots=share, decode=args.decode, kernels=args.kernels)
        arms[f"{share:.1%}"] = smoe_mlx.load(folder, config=config)[0]
    progress: dict[str, dict[str, int]] = {name: {"tokens": 0} for name in arms}
    if args.trace:
        for name, model in arms.items():
            route_by_trace(model, args.trace, progress[name])
    most = getattr(resident.args, "max_position_embeddings", None) or needed
    if needed > most:
        sys.exit(f"the model's context is {most} tokens, {needed} are needed")
    tokens = tokenizer.encode(TEXT)
    tokens *= -(-needed // len(tokens))
    caches = {name: make_prompt_cache(model) for name, model in arms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    before: dict[str, dict] = {}
    for n, start in enumerate(range(0, needed, args.turn)):
        if start == args.warmup:
            before = {name: counters(model) for name, model in arms.items()}
        answers = {}
        for name in rotated(list(arms), n):
            begin = time.perf_counter()
            answers[name] = feed(
                arms[name], tokens[start : start + args.turn], caches[name], progress[name]
            )
            if before:
                seconds[name].append((time.perf_counter() - begin) / args.turn)
        if args.kernels != "stock":
            del answers[RESIDENT]  # kernels have bits of their own
        if len(set(map(tuple, answers.values()))) > 1:
            sys.exit(f"token {start}: the arms do not agree")

    print(f"{'':<8}{'ms a token':^18}{'':>48}{'of the bound':^18}")
    print(f"{'arm':<8}{'median':>9}{'mean':>9}{'ratio':>8}{'(middle half)':>16}{'hits':>8}"
          f"{'MB/token':>9}{'GB/s':>7}{'median':>9}{'mean':>9}")  # fmt: skip
    averages = (statistics.median, statistics.mean)
    modes = {}
    for name, model in arms.items():
        times = [1e3 * average(seconds[name]) for average in averages]
        pairs = zip(seconds[RESIDENT], seconds[name], strict=True)
        low, ratio, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        line = f"{name:<8}{times[0]:>9.2f}{times[1]:>9.2f}"
        line += f"{ratio:>8.3f}{f'({low:.3f}-{high:.3f})':>16}"
        used = {k: v - before[name][k] for k, v in counters(model).items()}
        modes[name] = {mode: used[mode] for mode in MODES}
        if used["lookups"]:
            nbytes, rate = used["bytes"] / args.tokens, bandwidth_into_slots(model)
            line += f"{used['hits'] / used['lookups']:>8.1%}{nbytes / 1e6:>9.2f}{rate / 1e9:>7.2f}"
            reading = 1e3 * nbytes / rate if rate else 0.0
            for average, ms in zip(averages, times, strict=True):
                line += f"{ms / max(1e3 * average(seconds[RESIDENT]), reading):>9.2f}"
        print(line)
    print()
    for name, taken in modes.items():
        if any(taken.values()):
            print(tokens_by_mode(name, taken))


def feed(model: object, tokens: list[int], cache: list, progress: dict[str, int]) -> list[int]:
    """The most likely next token after each."""
    decoding = None
    if hasattr(model, "_streaming") and not model._streaming.cache.holds_all:
        decoding = model._streaming.decoding
    out: list[mx.array] = []
    while len(out) < len(tokens):
        if decoding is not None:
            done = several(model, tokens[len(out) :], cache, progress)
            out += [d.wanted[0] for d in done]
            if done:
                continue
        progress["tokens"] += 1
        x = mx.array([[tokens[len(out)]]])
        logits = model(x, cache=cache) if decoding is None else decoding.step(model, x, cache)
        out.append(mx.argmax(logits[0, -1]))
        mx.async_eval(out[-1])
        if decoding is not None:
            out[-1].item()
            decoding.done()
        elif len(out) > 1:
            out[-2].item()
    return [best.item() for best in out]


if __name__ == "__main__":
    main()
