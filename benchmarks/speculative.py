"""Compare decoding with and without drafts: time, bytes read, and what became of the drafts.

    python benchmarks/speculative.py
    python benchmarks/speculative.py --model MID --slots 0.25 --io direct --num-draft-tokens 3 6

Ways: `plain`; `lookup` (drafts from the text itself) and `draft` (from a draft model), as they are
used; and both as `-always`, for what it would cost not to measure whether they pay. Texts:
`free` is prose, sampled; `code` and `table` are structured, greedy. For the demo the draft model is
its own first layers (`--draft-layers`), which shows the mechanism rather than a good draft model.

Every way has a process of its own. All start at once and take turns every few tokens, in an order
that moves on, so that what disturbs one disturbs all. The tokens must be the same in all. The ratio
is the speed against `plain` over the same tokens: the median over all turns, and their middle half.
"""

import argparse
import hashlib
import json
import statistics
import sys
import time
from pathlib import Path

from decode import TEXT, Arm, rotated

WAYS = ("plain", "lookup", "lookup-always", "draft", "draft-always")
CODE = '''\
class Config:
    """Settings of the server."""

    def __init__(self, values):
        self.host = values.get("host")
        self.port = values.get("port")
        self.path = values.get("path")
        self.user = values.get("user")
        self.name = values.get("name")

    def get_host(self):
        return self.host

    def get_port(self):
        return self.port

    def get_path(self):
'''
TABLE = "".join(
    f'{{"id": {i}, "name": "{name}", "type": "string", "required": {required}}},\n'
    for i, (name, required) in enumerate(
        [("host", "true"), ("port", "true"), ("path", "false"), ("user", "true"), ("key", "false")]
    )
)
TEXTS = {"free": (TEXT[:1200], 0.8), "code": (CODE, 0.0), "table": (TABLE, 0.0)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="folder, or demo (the bundled model)")
    parser.add_argument("--draft-model", help="folder of a draft model")
    parser.add_argument("--draft-layers", type=int, default=2, help="of MODEL, without one")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[3])
    parser.add_argument("--prompt-lookup", type=int, default=3, help="tokens that must match")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--tokens", type=int, default=257, help="the first is not timed")
    parser.add_argument("--turn", type=int, default=32, help="tokens of one turn")
    parser.add_argument("--slots", type=float, default=0.25, help="share of experts in slots")
    parser.add_argument("--io", default="pread", help="StreamingConfig.io")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--arm", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if (args.tokens - 1) % args.turn:
        parser.error("--tokens must be one more than a multiple of --turn")
    if args.arm:
        run_arm(args, *args.arm)
    else:
        compare(args)


# ---- one way, in a process of its own ------------------------------------------------------------


def run_arm(args: argparse.Namespace, name: str, way: str, num_draft_tokens: str) -> None:
    """Read the prompt, then time one turn for each line that comes in; then print the results."""
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.sample_utils import make_sampler

    import smoe_mlx
    from smoe_mlx.generate import speculative_generate_step
    from smoe_mlx.hub import find_model
    from smoe_mlx.speculative import Payoff

    config = smoe_mlx.StreamingConfig(slots=args.slots, io=args.io)
    model, tokenizer = smoe_mlx.load(args.model, config=config)
    options: dict = {"num_draft_tokens": int(num_draft_tokens)}
    if way.startswith("lookup"):
        options["prompt_lookup"] = args.prompt_lookup
    if way.startswith("draft"):
        options["draft_model"] = mlx_lm.load(str(find_model(args.draft_model or args.model)))[0]
        if not args.draft_model:
            backbone = options["draft_model"].model
            backbone.layers = backbone.layers[: args.draft_layers]
    if way.endswith("-always"):
        Payoff.allows = lambda self: True
    text, temp = TEXTS[name]
    mx.random.seed(1)
    steps = speculative_generate_step(
        mx.array(tokenizer.encode(text)),
        model,
        max_tokens=args.tokens,
        sampler=make_sampler(temp),
        **options,
    )
    tokens = [next(steps)[0]]
    before = smoe_mlx.stats(model).bytes_read
    turns, cpu = [], 0.0
    print("ready", flush=True)
    for _ in range(0, args.tokens - 1, args.turn):
        sys.stdin.readline()
        start, cpu_start = time.perf_counter(), time.process_time()
        tokens += [next(steps)[0] for _ in range(args.turn)]
        turns.append(time.perf_counter() - start)
        cpu += time.process_time() - cpu_start
        print("done", flush=True)
    s = smoe_mlx.stats(model)
    result = {
        "turns": turns,
        "cpu_ms": 1e3 * cpu / (len(tokens) - 1),
        "bytes": (s.bytes_read - before) / (len(tokens) - 1),
        "passes": s.drafts.passes + s.drafts.plain_passes or args.tokens - 1,
        "drafted": s.drafts.drafted,
        "accepted": s.drafts.accepted,
        "hash": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16],
    }
    print(json.dumps(result))


# ---- all ways ------------------------------------------------------------------------------------


def compare(args: argparse.Namespace) -> None:
    ways = [("plain", "1")] + [
        (way, str(n)) for way in args.ways if way != "plain" for n in args.num_draft_tokens
    ]
    runs: dict[tuple[str, str, str], list[dict]] = {}
    for i in range(args.rounds):
        for name in args.texts:
            print(f"round {i + 1}: {name}", flush=True)
            arms = [Arm(name, *way) for way in rotated(ways, i)]
            for t in range((args.tokens - 1) // args.turn):
                for arm in rotated(arms, t):
                    arm.turn()
            for arm in arms:
                runs.setdefault(arm.what, []).append(arm.result())
    print()
    print(table(args, ways, runs))
    if args.json:
        out = {"options": vars(args), "runs": {" ".join(k): v for k, v in runs.items()}}
        args.json.write_text(json.dumps(out, default=str))
    for name in args.texts:
        if len({r["hash"] for what, rs in runs.items() if what[0] == name for r in rs}) > 1:
            sys.exit(f"\n{name}: the ways did NOT give the same tokens")
    print("\nall ways gave the same tokens")


def table(args: argparse.Namespace, ways: list, runs: dict) -> str:
    lines = [
        f"{'text':<7}{'way':<14}{'drafts':>7}{'ms/token':>10}{'x plain':>9}{'(middle half)':>15}"
        f"{'CPU ms':>8}{'tokens/pass':>13}{'accepted':>10}{'of drafted':>12}{'kB/token':>10}"
    ]
    for name in args.texts:
        base = [t for r in runs[name, "plain", "1"] for t in r["turns"]]
        for way, n in ways:
            mine = runs[name, way, n]

            def middle(key: str, mine: list[dict] = mine) -> float:
                return statistics.median(r[key] for r in mine)

            times = [t for r in mine for t in r["turns"]]
            ratios = [b / t for b, t in zip(base, times, strict=True)]
            low, ratio, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            lines.append(
                f"{name:<7}{way:<14}{'-' if way == 'plain' else n:>7}"
                f"{1e3 * statistics.median(times) / args.turn:>10.2f}{ratio:>9.2f}"
                f"{f'({low:.2f}-{high:.2f})':>15}{middle('cpu_ms'):>8.2f}"
                f"{(args.tokens - 1) / middle('passes'):>13.2f}{middle('accepted'):>10.0f}"
                f"{middle('drafted'):>12.0f}{middle('bytes') / 1e3:>10.0f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
