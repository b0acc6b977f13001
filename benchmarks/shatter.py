"""How fast shatter is, against the disk: what it takes to write the same bytes in one stream.

    python benchmarks/make_checkpoint.py --preset mid --out MID
    python benchmarks/shatter.py MID --rounds 3 [--bits 4]

Each shatter is a fresh process; right after it, as many bytes are written to the same folder in
4 MiB pieces and synced. Seconds are walls, memory is the peak resident size of the process.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

SCRIPT = """
import json, resource, sys, time, warnings
import smoe_mlx
warnings.simplefilter("ignore")
start = time.perf_counter()
smoe_mlx.shatter(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))
seconds = time.perf_counter() - start
unit = 1 if sys.platform == "darwin" else 1024
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit]))
"""


def write_plainly(path: Path, nbytes: int) -> float:
    """Seconds to write and sync `nbytes` of noise (some disks shorten zeros)."""
    block = os.urandom(4 << 20)
    start = time.perf_counter()
    with path.open("wb", buffering=0) as f:
        for _ in range(-(-nbytes // len(block))):
            f.write(block)
        os.fsync(f.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bits", type=int)
    parser.add_argument("--folder", type=Path, help="where to write; default: beside CHECKPOINT")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    options = json.dumps({"bits": args.bits} if args.bits else {})
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder or args.checkpoint.parent) as folder:
        for _ in range(args.rounds):
            out = Path(folder) / "vault"
            run = subprocess.run(
                [sys.executable, "-c", SCRIPT, args.checkpoint, out, options],
                stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            seconds, rss = json.loads(run.stdout.splitlines()[-1])
            nbytes = sum(p.stat().st_size for p in out.iterdir())
            shutil.rmtree(out)
            disk = write_plainly(Path(folder) / "plain", nbytes)
            rows.append({"seconds": seconds, "rss": rss, "nbytes": nbytes, "disk_seconds": disk})
            print(
                f"{nbytes / 1e9:.2f} GB written: shatter {seconds:.1f} s, "
                f"one stream {disk:.1f} s, peak {rss / 1e6:.0f} MB"
            )
    ratio = statistics.median(r["disk_seconds"] / r["seconds"] for r in rows)
    print(f"shatter writes at {ratio:.2f} of the disk's speed (median of {args.rounds})")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
