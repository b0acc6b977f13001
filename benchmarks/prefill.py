"""Compare time to first token and bytes read: layer-major prefill, chunk by chunk, and mlx-lm.

    python benchmarks/prefill.py
    python benchmarks/prefill.py --model /tmp/bench/mid --tokens 512 4096 --slots 0.125

Four arms: mlx-lm with everything in memory, smoe_mlx with everything in memory, layer by layer, and
chunk by chunk through the same slots (what it falls back to, and what mlx-lm's own loop does with a
streamed model). Every prompt is run in a process of its own, after a short one that warms up; the
arms take turns in an order that moves on with every round. The first token's bits must be the same
in all. Ratios are medians over the rounds, of pairs within a round.

`--cold` asks the system to forget the checkpoint's files before each timed prompt (Linux), and
afterwards each arm measures the disk. The bound is what a prompt could take at best: the larger of
the bytes that were read over that rate and of a prompt with everything in memory.
`--disk` makes reads as slow as those of such a disk, shared by all threads (not with `--io mmap`).
`--verbose` writes a line to stderr after every chunk of every layer: what is done, read and held by
then. With `--limit` an arm that takes longer is given up, and the others go on; shortly before, it
writes to stderr where each of its threads is.

On CUDA, MLX prepares attention anew for each length of the keys, which takes a while: give a
`--width` of 1024 or more, or the shapes and not the experts are what is timed.
"""

import argparse
import faulthandler
import hashlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from decode import TEXT, drop_from_page_cache, physical_nbytes, rotated

ARMS = ("mlx-lm", "resident", "layer-major", "chunked")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="folder, or demo (the bundled model)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512], help="prompt lengths")
    parser.add_argument("--slots", type=float, default=0.125, help="share of experts in slots")
    parser.add_argument("--width", type=int, default=128, help="tokens of a chunk")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop cached file pages first")
    parser.add_argument("--disk", type=float, help="let no more GB/s be read than this")
    parser.add_argument("--io", default="pread", help="StreamingConfig.io")
    parser.add_argument("--reference", type=Path, help="for mlx-lm, if MODEL is a vault")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="those to run")
    parser.add_argument(
        "--limit", type=float, help="seconds that an arm may take, loading included"
    )
    parser.add_argument("--verbose", action="store_true", help="report progress to stderr")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--arm", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        run_arm(args, args.arm[0], int(args.arm[1]))
    else:
        compare(args)


# ---- one prompt, in a process of its own ---------------------------------------------------------


def run_arm(args: argparse.Namespace, arm: str, tokens: int) -> None:
    if args.limit:
        faulthandler.dump_traceback_later(0.9 * args.limit)  # once, to stderr

    import mlx.core as mx
    import mlx_lm
    import numpy as np
    from mlx_lm.generate import generate_step as mlx_generate_step

    import smoe_mlx
    from smoe_mlx.generate import generate_step
    from smoe_mlx.hub import find_model

    begin = time.perf_counter()

    def note(text: str) -> None:
        if args.verbose:
            now = time.perf_counter() - begin
            print(f"{now:9.3f} s  {arm}: {text}", file=sys.stderr, flush=True)

    folder = find_model(args.model)
    step = mlx_generate_step if arm == "mlx-lm" else generate_step
    if arm == "mlx-lm":
        model, tokenizer = mlx_lm.load(str(args.reference or folder))
    else:
        config = smoe_mlx.StreamingConfig(
            slots=1.0 if arm == "resident" else args.slots,
            context=tokens + 1,
            prefill_step=min(args.width, tokens),
            io=args.io,
        )
        model, tokenizer = smoe_mlx.load(folder, config=config)
        if arm == "chunked":
            model._streaming.prefill.fallback = "asked for"
    text = tokenizer.encode(TEXT)
    prompt = mx.array((text * (tokens // len(text) + 1))[:tokens])

    def progress(done: int, total: int) -> None:
        if args.verbose:  # looking costs a little
            now = counters(model)
            held, spare = mx.get_active_memory() / 1e6, mx.get_cache_memory() / 1e6
            note(
                f"{done:,} of {total:,} tokens; {now['bytes'] / 1e6:,.0f} MB read, "
                f"{now['ahead']:,} experts ahead, "
                f"{now['wait']:.3f} s waited for; MLX holds {held:,.0f} MB, {spare:,.0f} MB spare"
            )

    def first_token(prompt: mx.array) -> mx.array:
        options = {"max_tokens": 1, "prefill_step_size": args.width}
        return next(iter(step(prompt, model, prompt_progress_callback=progress, **options)))[1]

    if args.disk:
        limit_reads(args.disk * 1e9)
    note("loaded, warming up")
    first_token(prompt[: args.width // 2])
    if args.cold:
        drop_from_page_cache(folder)
    note("warm")
    mx.reset_peak_memory()
    before, io, start = counters(model), physical_nbytes(), time.perf_counter()
    logprobs = first_token(prompt)
    seconds = time.perf_counter() - start
    note(f"first token after {seconds:.3f} s")
    used = {k: v - before[k] for k, v in counters(model).items()}
    # float32 takes every bit of float16 and bfloat16.
    bits = np.array(logprobs.astype(mx.float32)).tobytes()
    result = {
        "arm": arm,
        "tokens": tokens,
        "seconds": seconds,
        "bytes": used["bytes"],
        "wait": used["wait"],
        "passes": used["passes"],
        "ahead": used["ahead"],
        "experts_nbytes": None if arm == "mlx-lm" else smoe_mlx.stats(model).plan.experts_nbytes,
        "physical_bytes": None if io is None else physical_nbytes() - io,
        "peak_memory": mx.get_peak_memory(),
        "hash": hashlib.sha256(bits).hexdigest()[:16],
        "disk": disk_rate(model) if args.cold and arm != "mlx-lm" else 0.0,
    }
    print(json.dumps(result))


def limit_reads(rate: float) -> None:
    """Let all threads' reads together take as long as from a disk of `rate` bytes a second."""
    real, lock, free = os.preadv, threading.Lock(), 0.0

    def preadv(*args: object) -> int:
        nonlocal free
        n = real(*args)
        with lock:
            free = max(free, time.perf_counter()) + n / rate
            wait = free - time.perf_counter()
        time.sleep(max(0.0, wait))
        return n

    os.preadv = preadv


def disk_rate(model: object) -> float:
    """Bytes a second of the disk: random experts, read directly."""
    from smoe_mlx.store.probe import probe_disk

    cache = model._streaming.cache
    reader = cache.reader
    return probe_disk(reader.sources, cache.layouts, reader.threads).bytes_per_second


def counters(model: object) -> dict[str, float]:
    """What a streamed model has counted so far; zeros for another."""
    import smoe_mlx

    if not hasattr(model, "_streaming"):
        return dict.fromkeys(("bytes", "wait", "passes", "ahead"), 0)
    s = smoe_mlx.stats(model)
    ahead = s.bets.used + s.bets.late  # experts, begun before their layer's turn
    passes = s.prefill_passes
    return {"bytes": s.bytes_read, "wait": s.wait_seconds, "passes": passes, "ahead": ahead}


# ---- all arms ------------------------------------------------------------------------------------


def compare(args: argparse.Namespace) -> None:
    runs: list[dict] = []
    for i in range(args.rounds):
        for tokens in args.tokens:
            for arm in rotated(list(args.arms), i):
                run = run_apart(args, arm, tokens) | {"round": i}
                runs.append(run)
                if args.json:
                    args.json.write_text(
                        json.dumps({"options": vars(args), "runs": runs}, default=str)
                    )
                took = f"{run['seconds']:9.3f} s" if "hash" in run else f"  {run['failed']}"
                print(f"round {i + 1} {tokens:>7} {arm:<12}{took}", flush=True)
    print()
    print(table(args, runs))
    for tokens in args.tokens:
        hashes = {r["hash"] for r in runs if r["tokens"] == tokens and "hash" in r}
        if len(hashes) > 1:
            sys.exit(f"\nthe arms did NOT compute the same for {tokens} tokens: {sorted(hashes)}")
    if failed := sum("failed" in r for r in runs):
        sys.exit(f"\n{failed} of {len(runs)} runs failed")
    print("\nall arms computed the same bits")


def run_apart(args: argparse.Namespace, arm: str, tokens: int) -> dict:
    """What `run_arm` measured in a process of its own, or why it did not."""
    command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm, str(tokens)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        out, _ = process.communicate(timeout=args.limit)
    except subprocess.TimeoutExpired:
        process.kill()  # not waited for: what a driver has stopped may not even end
        return {"arm": arm, "tokens": tokens, "failed": f"not done after {args.limit:g} s"}
    if process.returncode:
        return {"arm": arm, "tokens": tokens, "failed": f"ended with {process.returncode}"}
    return json.loads(out.splitlines()[-1])


def table(args: argparse.Namespace, runs: list[dict]) -> str:
    """Medians over the rounds; speeds are against the same round's mlx-lm and chunked arms."""
    lines = [
        f"{'tokens':>7} {'arm':<12}{'seconds':>9}{'spread':>8}{'x mlx-lm':>10}{'x chunked':>11}"
        f"{'MB read':>9}{'of experts':>12}{'from disk':>11}{'peak MB':>9}"
        f"{'GB/s':>7}{'of bound':>10}"
    ]
    for tokens in args.tokens:
        done = [r for r in runs if r["tokens"] == tokens and "hash" in r]
        for arm in args.arms:
            mine = [r for r in done if r["arm"] == arm]
            if not mine:
                continue

            def middle(key: str, mine: list[dict] = mine) -> float:
                return statistics.median(r[key] or 0 for r in mine)

            def speed(other: str, mine: list[dict] = mine, done: list[dict] = done) -> str:
                theirs = {r["round"]: r["seconds"] for r in done if r["arm"] == other}
                ratios = [theirs[r["round"]] / r["seconds"] for r in mine if r["round"] in theirs]
                return f"{statistics.median(ratios):.2f}" if ratios else "-"

            seconds = [r["seconds"] for r in mine]
            size, disk = mine[0]["experts_nbytes"], "-"
            share = f"{middle('bytes') / size:.2f}" if size else "-"
            if mine[0]["physical_bytes"] is not None:
                disk = f"{middle('physical_bytes') / 1e6:.1f}"
            rate = over = "-"
            base = [r["seconds"] for r in done if r["arm"] in ARMS[:2]]
            if middle("disk"):
                rate = f"{middle('disk') / 1e9:.2f}"
                at_best = max(middle("bytes") / middle("disk"), min(base, default=0.0))
                over = f"{middle('seconds') / at_best:.2f}" if at_best else "-"
            lines.append(
                f"{tokens:>7} {arm:<12}{middle('seconds'):>9.3f}"
                f"{(max(seconds) - min(seconds)) / min(seconds):>8.0%}"
                f"{speed('mlx-lm'):>10}{speed('chunked'):>11}"
                f"{middle('bytes') / 1e6:>9.1f}{share:>12}{disk:>11}"
                f"{middle('peak_memory') / 1e6:>9.1f}{rate:>7}{over:>10}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
