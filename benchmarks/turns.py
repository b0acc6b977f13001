"""Decode with mlx-lm, everything in memory, and with several shares of it, in turns in one process.

    python benchmarks/turns.py
    python benchmarks/turns.py --model VAULT --reference CHECKPOINT --trace TRACE --shares 1.0 0.25

All arms are fed the same text, a few tokens a turn, in an order that moves on with every turn, so
that what disturbs one disturbs all, and no arm has caches or cores of its own. `decode.py` gives
each a process, and says more of it. The ratio is the speed against mlx-lm in the same turns: the
median, and the middle half. Arms that hold everything build the next forward while one computes, as
`generate` does for them. The bound is the larger of mlx-lm's time and the bytes that were read over
the bandwidth at which random experts come into slots afterwards. It needs the memory of all arms.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx_lm
from decode import TEXT, bandwidth_into_slots, counters, rotated, route_by_trace
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
    tokens = tokenizer.encode(TEXT)
    if len(tokens) < args.warmup + args.tokens:
        sys.exit(f"the text has {len(tokens)} tokens, {args.warmup + args.tokens} are needed")
    caches = {name: make_prompt_cache(model) for name, model in arms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    before: dict[str, dict] = {}
    for n, start in enumerate(range(0, args.warmup + args.tokens, args.turn)):
        if start >= args.warmup and not before:
            before = {name: counters(model) for name, model in arms.items()}
        answers = {}
        for name in rotated(list(arms), n):
            begin = time.perf_counter()
            answers[name] = feed(
                arms[name], tokens[start : start + args.turn], caches[name], progress[name]
            )
            if before:
                seconds[name].append((time.perf_counter() - begin) / args.turn)
        alike = set(map(tuple, answers.values())) if args.kernels == "stock" else {()}
        if len(alike) > 1:
            sys.exit(f"token {start}: the arms do not agree")

    base = 1e3 * statistics.median(seconds[RESIDENT])
    print(f"{'arm':<8}{'ms/token':>9}{'ratio':>8}{'(middle half)':>16}{'hits':>8}{'MB/token':>10}"
          f"{'GB/s':>7}{'of bound':>10}")  # fmt: skip
    for name, model in arms.items():
        ms = 1e3 * statistics.median(seconds[name])
        pairs = zip(seconds[RESIDENT], seconds[name], strict=True)
        low, ratio, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        line = f"{name:<8}{ms:>9.2f}{ratio:>8.3f}{f'({low:.3f}-{high:.3f})':>16}"
        used = {k: v - before[name][k] for k, v in counters(model).items()}
        if used["lookups"]:
            nbytes, rate = used["bytes"] / args.tokens, bandwidth_into_slots(model)
            bound = max(base, 1e3 * nbytes / rate) if rate else base
            line += f"{used['hits'] / used['lookups']:>8.1%}{nbytes / 1e6:>10.2f}"
            line += f"{rate / 1e9:>7.2f}{ms / bound:>10.2f}"
        print(line)


def feed(model: object, tokens: list[int], cache: list, progress: dict[str, int]) -> list[int]:
    """The most likely next token after each."""
    decoding = None
    if hasattr(model, "_streaming") and not model._streaming.cache.holds_all:
        decoding = model._streaming.decoding
    out = []
    for token in tokens:
        progress["tokens"] += 1
        x = mx.array([[token]])
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
