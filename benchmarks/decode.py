"""Compare the decode speed of mlx-lm with everything in memory and of smoe_mlx at several sizes.

    python benchmarks/decode.py
    python benchmarks/decode.py --model /tmp/bench/mid --tokens 48 --shares 1.0 0.5 0.25

Every arm runs in a process of its own, the arms take turns in an order that moves on with every
round, and every arm is fed the same text token by token, so that all route alike and all must
compute the same bits. The first tokens fill the caches and are not timed. The ratio is the speed
against mlx-lm over the same few tokens: the median of all such pairs, and the middle half of them.

On a machine that others use, `--lockstep` starts all arms at once and lets them take turns every
few tokens, so that what disturbs one disturbs all. It needs the memory of all arms together.

An arm is a share of the experts in slots, and with `--ways` each way of decoding with it: `none`,
`hits` (first), `look` (ahead), `both`, and `spec` (both, and two ranks as bets on the next token),
which all look at the routing layer by layer; `wait`, where the device waits for the answer; `lag1`
and `token`, which look later; and `auto`, the default, which chooses among these. The bound is what
a token could take at best: the larger of mlx-lm's time and the bytes that were read over the
bandwidth at which this arm reads random experts into its slots afterwards.
`--cold` drops the files from the page cache before every turn (Linux).

A forward ends when its token is there. Arms that hold all experts build the next forward while
one computes, as `generate` does for them (`--no-lookahead`: they wait too).
"""

import argparse
import hashlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

RESIDENT = "mlx-lm"
WAYS = {
    "none": {"hits_first": False, "lookahead": False, "decode": "exact"},
    "hits": {"hits_first": True, "lookahead": False, "decode": "exact"},
    "look": {"hits_first": False, "lookahead": True, "decode": "exact"},
    "both": {"hits_first": True, "lookahead": True, "decode": "exact"},
    "spec": {"hits_first": True, "lookahead": True, "spec": 2, "decode": "exact"},
    "wait": {"decode": "wait"},
    "lag1": {"decode": "lag1"},
    "token": {"decode": "token"},
    "auto": {},
}
SHARES = [1.0, 0.75, 0.5, 0.25, 0.125]
MODES = ("exact", "wait", "lag1", "token")  # of decoding (docs/decode.md)
MOST_TOKENS = 4096  # of one run that is routed by a trace
TEXT = """\
When the survey ship came back to the harbour in the spring, nobody on the quay believed that the
crew had wintered on the ice. They had left with eleven men, a stove, two sledges and a library of
forty books, and they returned with the same eleven men, half a sledge, and no books at all. The
captain, asked about it by the customs officer, said that paper burns better than it reads when the
coal is gone, but that every volume had been read aloud first, twice, from the title to the index.
The officer wrote this down, since there was no tariff on it, and let them pass.

It was the carpenter who told the longer story, in the evenings, to anyone who would pay for his
supper. In November the rudder had frozen fast. By December the sun was a rumour in the south. They
measured the thickness of the ice each noon and entered it in a table: 41 cm, 58 cm, 73 cm, 90 cm.
The cook kept a second table, of flour and beans, whose numbers went the other way. "If you draw
both on one sheet," said the carpenter, "the lines cross on the ninth of March, and what happens
after that is not arithmetic any more."

The program that computes such a crossing is short. A function takes two lists of measurements,
finds the first index at which one is larger than the other, and returns it, or None if there is
no such index:

    def crossing(ice, flour):
        for day, (a, b) in enumerate(zip(ice, flour)):
            if a > b:
                return day
        return None

What it does not compute is the mood of the people who wait for that day. The mate took to carving
chess pieces out of walrus ivory and lost every game he played with them. The surgeon, who had only
one patient, a frostbitten toe, wrote a treatise on it in three parts, with a bibliography of works
that he remembered. And the youngest of them, a boy who had been hired to keep the lamps, learned
the names of all the stars which could be seen from the deck, and when he had run out of names in
the almanac he gave new ones to the rest: the Kettle, the Broken Oar, the Two Sisters, the Debt.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="folder, or demo (the bundled model)")
    parser.add_argument("--reference", type=Path, help="for mlx-lm, if MODEL is a vault")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to time")
    parser.add_argument("--warmup", type=int, default=64, help="tokens before the timed ones")
    parser.add_argument("--prompt-file", type=Path, help="text to feed, instead of the built-in")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, metavar="SHARE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lockstep", action="store_true", help="take turns within a round")
    parser.add_argument("--turn", type=int, default=8, help="tokens of one turn")
    parser.add_argument("--threads", type=int, default=None, help="StreamingConfig.threads")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="of reading ahead, for each share")
    parser.add_argument("--policy", default=None, help="StreamingConfig.policy")
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache")
    parser.add_argument("--io", default=None, help="StreamingConfig.io")
    parser.add_argument("--no-lookahead", action="store_true")
    parser.add_argument(
        "--kernels", default="stock", help="StreamingConfig.kernels; other bits than mlx-lm's"
    )
    parser.add_argument("--trace", type=Path, help="route as this trace (smoe-mlx trace) says")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--plot", type=Path, help="write a plot (PNG, SVG or PDF)")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trace and args.warmup + args.tokens >= MOST_TOKENS:
        parser.error(f"--trace goes for {MOST_TOKENS - 1} tokens")
    if args.tokens % args.turn:
        parser.error("--tokens must be a multiple of --turn")
    if args.arm:
        run_arm(args)
    else:
        compare(args)


# ---- one arm, in a process of its own ------------------------------------------------------------


def run_arm(args: argparse.Namespace) -> None:
    """Warm up, then time one turn for each line that comes in; then print what was measured."""
    import mlx.core as mx
    import mlx_lm
    import numpy as np
    from mlx_lm.models.cache import make_prompt_cache

    import smoe_mlx
    from smoe_mlx.hub import find_model

    folder = find_model(args.model)
    start = time.perf_counter()
    if args.arm == RESIDENT:
        model, tokenizer = mlx_lm.load(str(args.reference or folder))
    else:
        share, _, way = args.arm.partition(":")
        share = float(share)
        names = ("threads", "io", "policy", "kernels")
        options = {k: getattr(args, k) for k in names if getattr(args, k) is not None}
        config = smoe_mlx.StreamingConfig(slots=share, **options, **(WAYS[way] if way else {}))
        model, tokenizer = smoe_mlx.load(folder, config=config)
        plan = smoe_mlx.stats(model).plan
        if abs(plan.slots - share * plan.num_experts) > len(plan.banks):
            sys.exit(f"asked for {share:.0%} of {plan.num_experts} experts, got {plan.slots}")
    progress = {"tokens": 0}
    if args.trace:
        route_by_trace(model, args.trace, progress)
    load_seconds = time.perf_counter() - start
    text = args.prompt_file.read_text() if args.prompt_file else TEXT
    tokens = tokenizer.encode(text)
    if len(tokens) < args.warmup + args.tokens:
        sys.exit(f"the text has {len(tokens)} tokens, {args.warmup + args.tokens} are needed")

    cache = make_prompt_cache(model)
    holds_all = args.arm == RESIDENT or float(args.arm.partition(":")[0]) == 1.0
    ahead = holds_all and not args.no_lookahead
    logits = None

    def forward(tokens: mx.array) -> mx.array:
        if holds_all:
            return model(tokens, cache=cache)
        return model._streaming.decoding.step(model, tokens, cache)

    def step(token: int) -> mx.array:
        nonlocal logits
        progress["tokens"] += 1
        logits = forward(mx.array([[token]]))[0, -1]
        best = mx.argmax(logits)
        mx.async_eval(best, logits)
        return best

    def feed(tokens: list[int]) -> tuple[list[int], list[float]]:
        """The most likely next token after each, and the seconds each took."""
        nonlocal logits
        out, seconds, last = [], [], None
        before = time.perf_counter()
        while len(seconds) < len(tokens):
            if not holds_all and not args.no_lookahead:
                done = several(model, tokens[len(out) :], cache, progress)
                if done:
                    out += [d.wanted[0].item() for d in done]
                    logits = done[-1].wanted[1]
                    now = time.perf_counter()
                    seconds += [(now - before) / len(done)] * len(done)
                    before = now
                    continue
            best = step(tokens[len(seconds)])
            if not ahead:
                out.append(best.item())
                if not holds_all:
                    model._streaming.decoding.done()
            elif last is not None:
                out.append(last.item())
            last = best
            now = time.perf_counter()
            seconds.append(now - before)
            before = now
        if ahead:
            out.append(last.item())
            seconds[-1] += time.perf_counter() - before
        return out, seconds

    feed(tokens[: args.warmup])
    tokens = tokens[args.warmup : args.warmup + args.tokens]
    before, cpu, io = counters(model), time.process_time(), physical_nbytes()
    print("ready", flush=True)
    out, seconds = [], []
    for start in range(0, args.tokens, args.turn):
        sys.stdin.readline()
        if args.cold:
            drop_from_page_cache(folder)
        best, took = feed(tokens[start : start + args.turn])
        out += best
        seconds += took
        print("done", flush=True)
    cpu = time.process_time() - cpu
    if io is not None:
        io = physical_nbytes() - io
    used = {k: v - before[k] for k, v in counters(model).items()}
    if not holds_all and not used["lookups"]:
        sys.exit("no expert was looked up: this arm does not stream")
    if not holds_all and args.cold:
        drop_from_page_cache(folder)
    # float32 takes every bit of float16 and bfloat16.
    bits = np.array(logits.astype(mx.float32)).tobytes()
    result = {
        "arm": args.arm,
        "ms_per_token": 1e3 * sum(seconds) / len(seconds),
        "median_ms": 1e3 * statistics.median(seconds),
        "fastest_ms": 1e3 * min(seconds),
        "cpu_ms_per_token": 1e3 * cpu / len(seconds),
        "hit_rate": used["hits"] / used["lookups"] if used["lookups"] else 1.0,
        "bytes_per_token": used["bytes"] / len(seconds),
        "physical_bytes_per_token": None if io is None else io / len(seconds),
        "wait_ms_per_token": 1e3 * used["wait"] / len(seconds),
        "bandwidth": None if holds_all else bandwidth_into_slots(model),
        "bets": used["bets"],
        "modes": {mode: used[mode] for mode in MODES},
        "peak_memory": mx.get_peak_memory(),
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        "load_seconds": load_seconds,
        "hash": hashlib.sha256(json.dumps(out).encode() + bits).hexdigest()[:16],
        "seconds": seconds,
    }
    print(json.dumps(result))


def several(model: object, tokens: list[int], cache: list, progress: dict[str, int]) -> list:
    """Decode the first of these tokens, as many as can be begun early: `Decoded`s, of which each
    wanted (what is most likely next, logits [vocab])."""
    import mlx.core as mx

    if not model._streaming.cache.handover.waits:
        return []
    first, fed = mx.array([tokens[:1]]), progress["tokens"]
    begun = {id(first): (1, first)}  # an array keeps its id as long as it lives
    kind = type(model)

    def counted(model, token, *args, **kw):
        progress["tokens"] = fed + begun[id(token)][0]
        return kind.__call__(model, token, *args, **kw)

    def forced(n, token, logits):
        coming = mx.array([tokens[n + 1 : n + 2] or [0]])
        begun[id(coming)] = n + 2, coming
        return coming, [mx.argmax(logits[0, -1]), logits[0, -1]]

    if not model._streaming.decoding.optimistic.ready(model):
        return []
    model.__class__ = type(kind.__name__, (kind,), {"__call__": counted})
    try:
        done = model._streaming.decoding.run(model, first, cache, forced, len(tokens))
    finally:
        model.__class__ = kind
    progress["tokens"] = fed + len(done)
    return list(done)


def route_by_trace(model: object, path: Path, progress: dict[str, int]) -> None:
    """Let every switch module of a model, mlx-lm's or streamed, compute what a trace says.

    A model with random weights routes like no trained one. The router still runs, gives the
    weights, and is waited for; only its choice is replaced. The trace's decoded tokens are used,
    again from the start when they run out; a layer that it lacks takes one that it has, from
    another place in the text. Where the model has m times as many experts, each expert of the trace
    stands for m, of which a draw takes one for 64 tokens.

    If the trace has what its model's lookahead predicted, the gates that are asked about a coming
    layer answer with that, and a layer of which nothing was predicted has no lookahead. A failed
    pass of `lag1` and `token` knows the trace's routing of later layers too well: of these it is
    left with what was predicted.
    """
    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

    from smoe_mlx.layers.switch import StreamingSwitchGLU, StreamingSwitchMLP
    from smoe_mlx.trace import load_trace

    trace = load_trace(path)

    def by_layer(numbers):
        rows = [[] for _ in range(trace.num_layers)]
        for layer, some in list(trace.by_call(numbers))[trace.prompt_calls :]:
            rows[layer].extend(some)
        return [np.array(x) for x in rows]

    chosen = by_layer(trace.ids)
    predicted = None if trace.predicted is None else by_layer(trace.predicted)
    kinds = (SwitchGLU, SwitchMLP, StreamingSwitchGLU, StreamingSwitchMLP)
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, kinds)]
    found.sort(key=lambda x: [int(p) if p.isdigit() else -1 for p in x[0].split(".")])
    foreseen = {}  # layer of the cache -> what is predicted of it, [tokens, k]

    def on_device(rows):
        # Where the model computes: what the host makes for each token would have to go there.
        rows = mx.array(rows)
        mx.eval(rows)
        return rows

    def routed(indices, rows):
        if indices.size != rows.shape[-1]:
            return indices  # a prompt, or another top-k
        # Not known before the router's own choice is.
        return rows[progress["tokens"]].reshape(indices.shape) + (indices & 0)

    for number, (_, switch) in enumerate(found):
        layer, shift = number % trace.num_layers, 997 * (number // trace.num_layers)
        streamed = isinstance(switch, (StreamingSwitchGLU, StreamingSwitchMLP))
        experts = switch._num_experts if streamed else next(iter(switch.children().values()))
        experts = experts if streamed else experts.num_experts
        ratio, rest = divmod(experts, trace.num_experts[layer])
        if rest or not ratio:
            sys.exit(f"{path}: {trace.num_experts[layer]} experts cannot stand for {experts}")
        draw = np.random.default_rng(number).integers(ratio, size=(997, trace.num_experts[layer]))

        kind = type(switch)
        call = kind.__call__

        def widened(rows, shift=shift, ratio=ratio, draw=draw):
            at = np.arange(MOST_TOKENS)
            ids = rows[(at + shift) % len(rows)]
            return (ids * ratio + draw[at[:, None] // 64 % len(draw), ids]).astype(np.int32)

        rows = on_device(widened(chosen[layer]))

        def through(switch, x, indices, *weights, call=call, rows=rows):
            return call(switch, x, routed(indices, rows), *weights)

        switch.__class__ = type("Routed", (kind,), {"__call__": through})
        if streamed and predicted and predicted[layer].min() >= 0:
            foreseen[switch._layer] = widened(predicted[layer])

    if not predicted or not hasattr(model, "_streaming"):
        return

    def by_trace(predict, rows):
        return lambda x, top_k: routed(predict(x, top_k), rows)

    for _, switch in found:
        bets = []
        for coming, predict in switch._bets:
            if coming == switch._layer:
                bets.append((coming, predict))
            elif coming in foreseen:
                bets.append((coming, by_trace(predict, on_device(foreseen[coming]))))
        switch.bet(bets, switch._hits_first)

    optimistic = model._streaming.decoding.optimistic
    take = optimistic._take_guesses

    def take_guesses():
        take()
        optimistic._guesses = [
            (layer, foreseen[layer][progress["tokens"]].tolist())
            for layer, _ in optimistic._guesses
            if layer in foreseen
        ]

    optimistic._take_guesses = take_guesses


def counters(model: object) -> dict[str, float]:
    """What a streamed model has counted so far; zeros for another."""
    import smoe_mlx

    if not hasattr(model, "_streaming"):
        return dict.fromkeys(("hits", "lookups", "bytes", "wait", "bets", *MODES), 0)
    s = smoe_mlx.stats(model)
    return {
        "hits": s.hits,
        "lookups": s.hits + s.misses,
        "bytes": s.bytes_read,
        "wait": s.wait_seconds,
        "bets": s.bets.issued,
        **{mode: s.decoded[mode] for mode in MODES},
    }


def bandwidth_into_slots(model: object, seconds: float = 1.0, at_once: int = 8) -> float:
    """Bytes a second at which random experts come into slots, nothing else going on."""
    cache = model._streaming.cache
    cache.settle()
    draw = random.Random(0)
    read, busy = cache.reader.stats.bytes, 0.0
    while busy < seconds:
        some = [i for i in range(len(cache.layouts)) if -1 in cache.table(i)]
        if not some:
            return 0.0
        layer = draw.choice(some)
        experts = cache.layouts[layer].num_experts
        table = cache.table(layer)
        missing = [e for e in draw.sample(range(experts), experts) if table[e] < 0][:at_once]
        start = time.perf_counter()
        with cache.lock:
            cache.claim(layer, missing)
        busy += time.perf_counter() - start
    return (cache.reader.stats.bytes - read) / busy


def drop_from_page_cache(folder: Path) -> None:
    """Ask the system to forget a checkpoint's files (Linux)."""
    for path in filter(Path.is_file, folder.iterdir()):
        with path.open("rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def physical_nbytes() -> int | None:
    """Bytes that this process had read from storage, not from the page cache (Linux)."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return int(next(x for x in lines if x.startswith("read_bytes")).split()[1])


# ---- all arms ------------------------------------------------------------------------------------


class Arm:
    """The process of one arm of the benchmark that is run, warmed up; `what` says which."""

    def __init__(self, *what: str):
        command = [sys.executable, sys.argv[0], *sys.argv[1:], "--arm", *what]
        pipe = subprocess.PIPE
        self.what = what
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.expect("ready")

    def line(self) -> str:
        text = self.process.stdout.readline()
        if not text:
            sys.exit(f"arm {' '.join(self.what)} failed ({self.process.wait()})")
        return text

    def expect(self, word: str) -> None:
        if self.line().strip() != word:
            sys.exit(f"arm {' '.join(self.what)} did not say {word!r}")

    def turn(self) -> None:
        print(file=self.process.stdin, flush=True)
        self.expect("done")

    def result(self) -> dict:
        out = json.loads(self.line())
        self.process.communicate()
        return out


def rotated(names: list, by: int) -> list:
    return names[by % len(names) :] + names[: by % len(names)]


def compare(args: argparse.Namespace) -> None:
    shares = [str(s) for s in args.shares]
    if args.ways:
        shares = [s if s == "1.0" else f"{s}:{way}" for s in shares for way in args.ways]
    names = [RESIDENT, *dict.fromkeys(shares)]
    runs: dict[str, list[dict]] = {name: [] for name in names}
    turns = args.tokens // args.turn

    def keep(arm: Arm) -> None:
        (name,), out = arm.what, arm.result()
        print(f"{name:<11}{out['ms_per_token']:9.2f} ms", flush=True)
        runs[name].append(out)

    for i in range(args.rounds):
        print(f"round {i + 1}", flush=True)
        if args.lockstep:
            arms = [Arm(name) for name in rotated(names, i)]
            for t in range(turns):
                for arm in rotated(arms, t):
                    arm.turn()
            for arm in arms:
                keep(arm)
        else:
            for name in rotated(names, i):
                arm = Arm(name)
                for _ in range(turns):
                    arm.turn()
                keep(arm)
    print()
    print(table(names, runs, args.turn))
    print()
    for name in names[1:]:
        modes = {mode: sum(r["modes"][mode] for r in runs[name]) for mode in MODES}
        if any(modes.values()):
            print(tokens_by_mode(name, modes))
    if args.plot:
        plot(names, runs, args.plot)
    if args.json:
        args.json.write_text(json.dumps({"options": vars(args), "runs": runs}, default=str))
    alike = names if args.kernels == "stock" else names[1:]
    hashes = {r["hash"] for name in alike for r in runs[name]}
    if len(hashes) > 1:
        sys.exit("\nthe arms did NOT compute the same: " + ", ".join(sorted(hashes)))
    whose = "all arms" if alike == names else "all arms but mlx-lm"
    print(f"\n{whose} computed the same bits ({hashes.pop()})")


def tokens_by_mode(name: str, modes: dict[str, int]) -> str:
    taken = ", ".join(f"{n:,} {mode}" for mode, n in modes.items() if n)
    return f"{name:<11}tokens decoded: {taken}"


def plot(names: list[str], runs: dict[str, list[dict]], path: Path) -> None:
    """Median milliseconds a token of each arm, and the bound of each where it is known."""
    from smoe_mlx.plot import new_figure

    grey = "#808080"
    figure = new_figure(10, 0.8 + 0.32 * len(names))
    axes = figure.add_subplot()
    times = {n: statistics.median(r["ms_per_token"] for r in runs[n]) for n in names}
    axes.barh(names, list(times.values()), color="#4477aa", label="measured")
    for i, name in enumerate(names):
        rate = statistics.median(r["bandwidth"] or 0 for r in runs[name])
        nbytes = statistics.median(r["bytes_per_token"] for r in runs[name])
        bound = max(times[RESIDENT], 1e3 * nbytes / rate) if rate else times[RESIDENT]
        axes.plot(
            [bound] * 2, [i - 0.4, i + 0.4], color="#cc3311", label="bound" if not i else None
        )
    axes.invert_yaxis()
    axes.set_xlabel("time a token (ms)", color=grey)
    axes.set_ylabel("slots: way", color=grey)
    axes.tick_params(colors=grey)
    axes.grid(axis="x", color=grey, alpha=0.3)
    for text in axes.legend(framealpha=0).get_texts():
        text.set_color(grey)
    figure.savefig(path, dpi=150, transparent=True)


def by_turns(run: dict, turn: int) -> list[float]:
    seconds = run["seconds"]
    return [sum(seconds[i : i + turn]) for i in range(0, len(seconds), turn)]


def table(names: list[str], runs: dict[str, list[dict]], turn: int) -> str:
    """Medians over the rounds."""
    lines = [
        f"{'arm':<11}{'ms/token':>9}{'spread':>8}{'CPU ms':>8}{'ratio':>8}{'(middle half)':>16}"
        f"{'hits':>8}{'MB/token':>10}{'from disk':>11}{'peak MB':>9}"
        f"{'GB/s':>7}{'of bound':>10}{'bets':>7}"
    ]
    resident_ms = statistics.median(r["ms_per_token"] for r in runs[RESIDENT])
    base = [t for run in runs[RESIDENT] for t in by_turns(run, turn)]
    for name in names:

        def middle(key: str, name: str = name) -> float:
            return statistics.median(r[key] or 0 for r in runs[name])

        ms = [r["ms_per_token"] for r in runs[name]]
        times = [t for run in runs[name] for t in by_turns(run, turn)]
        ratios = [b / t for b, t in zip(base, times, strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        disk = "-"
        if runs[name][0]["physical_bytes_per_token"] is not None:
            disk = f"{middle('physical_bytes_per_token') / 1e6:.2f}"
        speed = over = "-"
        if runs[name][0]["bandwidth"]:
            speed = f"{middle('bandwidth') / 1e9:.2f}"
            bound = max(resident_ms, 1e3 * middle("bytes_per_token") / middle("bandwidth"))
            over = f"{middle('ms_per_token') / bound:.2f}"
        lines.append(
            f"{name:<11}{middle('ms_per_token'):>9.2f}{(max(ms) - min(ms)) / min(ms):>8.0%}"
            f"{middle('cpu_ms_per_token'):>8.2f}{ratio:>8.3f}{f'({low:.3f}-{high:.3f})':>16}"
            f"{middle('hit_rate'):>8.1%}{middle('bytes_per_token') / 1e6:>10.2f}"
            f"{disk:>11}{middle('peak_memory') / 1e6:>9.1f}"
            f"{speed:>7}{over:>10}{middle('bets') / len(runs[name][0]['seconds']):>7.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
