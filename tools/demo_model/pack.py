"""Compress the encoded corpus for transport, and unpack it.

python pack.py pack   --data DIR --out DIR
python pack.py unpack --data DIR --out DIR
"""

import argparse
import concurrent.futures
import lzma
import pathlib

FILTERS = [dict(id=lzma.FILTER_LZMA2, preset=9, dict_size=1 << 26, lc=3, lp=1, pb=1)]
PART = 24_000_000


def squeeze(job):
    source, at, target = job
    with open(source, "rb") as f:
        f.seek(at)
        target.write_bytes(lzma.compress(f.read(PART), format=lzma.FORMAT_XZ, filters=FILTERS))


def expand(path):
    return lzma.decompress(path.read_bytes())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["pack", "unpack"])
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ProcessPoolExecutor() as pool:
        if args.step == "pack":
            jobs = [
                (path, at, args.out / f"{path.stem}.{at // PART:02d}.xz")
                for path in sorted(args.data.glob("*.bin"))
                for at in range(0, path.stat().st_size, PART)
            ]
            list(pool.map(squeeze, jobs))
        else:
            for name in ("train", "heldout"):
                with open(args.out / f"{name}.bin", "wb") as f:
                    for block in pool.map(expand, sorted(args.data.glob(f"{name}.*.xz"))):
                        f.write(block)
