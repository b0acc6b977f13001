"""How well the speed model foretells: forecast and measurement of six budgets, on two models.

    python benchmarks/forecast.py
    python benchmarks/forecast.py --cpu-time          # on a machine that others use too
    python benchmarks/forecast.py --models demo MID

Without `--models`: the demo, and a synthetic checkpoint of 2 GB, made for it, then removed (preset
`mid` of `make_checkpoint.py`). Each is what `smoe-mlx bench` does; nothing is fitted. At the end:
which decoding forecasts are off by more than 25 %, and whether the hit rate or the rest is why.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from decode import TEXT
from mlx_lm.utils import load_tokenizer

import smoe_mlx
from smoe_mlx.bench import BUDGETS, WITHIN, Bench, Run, bench
from smoe_mlx.hub import find_model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", help="folders, or demo")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--decode", default="exact", help="StreamingConfig.decode")
    parser.add_argument("--io", default="pread", help="StreamingConfig.io")
    parser.add_argument("--cpu-time", action="store_true", help="of the process, on a CPU")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = args.models or ["demo", make_mid(Path(folder))]
        results = [run(args, name) for name in models]
    print("\n".join(verdict(r) for r in results))
    if args.json:
        args.json.write_text(json.dumps([r.as_dict() for r in results], indent=2))


def make_mid(folder: Path) -> str:
    out = folder / "mid"
    script = Path(__file__).with_name("make_checkpoint.py")
    subprocess.run([sys.executable, script, "--preset", "mid", "--out", str(out)], check=True)
    return str(out)


def run(args: argparse.Namespace, name: str) -> Bench:
    folder = find_model(name)
    config = smoe_mlx.StreamingConfig(decode=args.decode, io=args.io)
    prompt = load_tokenizer(folder).encode(TEXT)[: args.prompt_tokens]
    clock = time.process_time if args.cpu_time else time.perf_counter
    result = bench(folder, prompt, config, BUDGETS, args.tokens, clock=clock)
    print(f"\n{folder.name}\n{result}\n", flush=True)
    return result


def verdict(result: Bench) -> str:
    """One line a model, and one for each budget that was not foretold."""
    off = [r for r in result.runs if abs(r.error) > WITHIN]
    worst = max((r.error for r in result.runs), key=abs)
    lines = [
        f"{Path(result.model).name}: {len(result.runs) - len(off)} of {len(result.runs)} within "
        f"{100 * WITHIN:.0f} %, the worst {100 * worst:+.0f} %"
    ]
    return "\n".join([*lines, *(f"  {r.slots:,} slots: {why(r)}" for r in off)])


def why(r: Run) -> str:
    rates = f"{100 * r.forecast.hit_rate:.0f} % forecast, {100 * r.hit_rate:.0f} % measured"
    if abs(r.error_with_hits) <= WITHIN:
        return f"{100 * r.error:+.0f} %, by the hit rate ({rates})"
    rest = f"{100 * r.error_with_hits:+.0f} % had the hit rate been known ({rates})"
    return f"{100 * r.error:+.0f} %, by compute, looks or reads: {rest}"


if __name__ == "__main__":
    main()
