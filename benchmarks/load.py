"""How long a load takes, and what it holds: of a 235B-shaped checkpoint, or of any other.

    python benchmarks/make_checkpoint.py --preset qwen3-235b-sparse --out BIG
    python benchmarks/load.py BIG --lazy

Each run is a fresh process; imports are not counted. `--lazy` leaves the backbone unread too, which
is all that a sparse checkpoint is good for: what is timed is the skeleton, the headers, the plan.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import gc, json, resource, sys, time
from pathlib import Path
import mlx.core as mx
import smoe_mlx
from smoe_mlx.load import load_model

def peak_rss():
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size * (1 if sys.platform == "darwin" else 1024)

gc.collect()
before = peak_rss()
start = time.perf_counter()
config = smoe_mlx.StreamingConfig(slots=int(sys.argv[2]))
model, _ = load_model(Path(sys.argv[1]), lazy=sys.argv[3] == "1", config=config)
seconds = time.perf_counter() - start
plan = smoe_mlx.stats(model).plan
print(json.dumps({"seconds": seconds, "rss": peak_rss() - before, "mlx": mx.get_peak_memory(),
                  "experts": plan.num_experts, "bytes": plan.experts_nbytes}))
"""


def run(model: Path, slots: int, lazy: bool) -> dict:
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), str(slots), str(int(lazy))],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(out.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--lazy", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    runs = [run(args.model, args.slots, args.lazy) for _ in range(args.rounds)]
    median = {k: statistics.median(r[k] for r in runs) for k in runs[0]}
    print(
        f"{median['experts']:,.0f} experts, {median['bytes'] / 1e9:.1f} GB: "
        f"{median['seconds']:.2f} s, {median['rss'] / 1e6:.0f} MB more resident, "
        f"{median['mlx'] / 1e6:.1f} MB in MLX"
    )


if __name__ == "__main__":
    main()
