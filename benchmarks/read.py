"""How fast experts come from the disk, by reading mode, file and record size.

    python benchmarks/read.py CHECKPOINT VAULT [--seconds 2] [--rounds 3] [--json FILE]

CHECKPOINT is an MLX checkpoint, VAULT what `smoe-mlx shatter` made of it. Three parts, in one run:

1. the disk: large sequential direct reads of the vault, eight at a time;
2. random single records of the vault, eight in flight, by pread, direct and mmap, cold (page cache
   dropped) and warm; and of the checkpoint, whose experts lie in pieces;
3. what one missed expert costs: reads, bytes and milliseconds, from either file.

Each cold measurement is compared with part 1 done right before it; rounds are interleaved and
figures are medians. Dropping the page cache of a file needs
`posix_fadvise` (Linux); elsewhere only direct reads are cold.
"""

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from smoe_mlx.cache.bank import SlotBank
from smoe_mlx.load import open_weights
from smoe_mlx.skeleton import build_skeleton
from smoe_mlx.store.reader import ExpertReader, ReadRequest

BLOCK = 8 << 20
IN_FLIGHT = 8
BATCH = 64  # experts that are asked for at once


def sequential(path: Path, seconds: float) -> float:
    """Bytes a second of large sequential reads past the page cache, IN_FLIGHT at a time."""
    from smoe_mlx.store.files import OpenFile
    from smoe_mlx.store.reader import _File, _pages, _Read

    file = _File(OpenFile(path), "direct")
    count, done, start = file.size // BLOCK, 0, time.perf_counter()

    def one(i: int) -> int:
        file.read(_Read((0, i * BLOCK, _pages(BLOCK)[:BLOCK], ("block",))))
        return BLOCK

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        at = 0
        while time.perf_counter() - start < seconds:
            done += sum(pool.map(one, [(at + i) % count for i in range(32)]))
            at += 32
    return done / (time.perf_counter() - start)


class Source:
    """A checkpoint or vault, and requests for its experts."""

    def __init__(self, folder: Path):
        self.checkpoint, self.vault = open_weights(folder)
        skeleton = build_skeleton(folder, self.checkpoint, vault=self.vault)
        self.layouts = skeleton.layouts
        self.files = [self.vault] if self.vault else self.checkpoint.files
        kind = self.layouts[0].tensors
        self.experts = [
            (x, e) for x in self.layouts if x.tensors == kind for e in range(x.num_experts)
        ]
        self.bank = SlotBank(kind, min(BATCH, len(self.experts) // 4))

    def requests(self, rng: np.random.Generator) -> list[ReadRequest]:
        """Random experts of random layers, no two alike, one for each slot of the bank."""
        out: list[ReadRequest] = []
        chosen = rng.choice(len(self.experts), self.bank.slots, replace=False)
        for slot, i in enumerate(chosen.tolist()):
            layout, e = self.experts[i]
            out += layout.reads(e, self.bank.rows(slot))
        return out

    def drop_cache(self) -> None:
        if hasattr(os, "posix_fadvise"):
            for f in self.files:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def random_reads(source: Source, io: str, cold: bool, seconds: float, seed: int) -> dict:
    """Random experts, IN_FLIGHT at a time, for so many seconds."""
    rng = np.random.default_rng(seed)
    reader = ExpertReader(source.files, threads=IN_FLIGHT - 1, io=io)
    experts, spent = 0, 0.0
    if not cold:
        fixed = source.requests(np.random.default_rng(0))
        reader.read(fixed)
    reader.stats.bytes = reader.stats.reads = 0
    while spent < seconds:
        requests = source.requests(rng) if cold else fixed
        if cold:
            source.drop_cache()
        start = time.perf_counter()
        reader.read(requests)
        spent += time.perf_counter() - start
        experts += source.bank.slots
    used = source.layouts[0].expert_nbytes * experts
    out = {
        "GB/s": used / spent / 1e9,
        "read GB/s": reader.stats.bytes / spent / 1e9,
        "reads/expert": reader.stats.reads / experts,
        "bytes/expert": reader.stats.bytes / experts,
        "ms/expert": 1e3 * spent / experts,
    }
    reader.close()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("vault", type=Path)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sources = {"checkpoint": Source(args.checkpoint), "vault": Source(args.vault)}
    arms = [
        (name, io, cold)
        for name in sources
        for io in ("pread", "direct", "mmap")
        for cold in ((True,) if io == "direct" else (True, False))
    ]
    disk: list[float] = []
    results: dict[tuple, list[dict]] = {arm: [] for arm in arms}
    for r in range(args.rounds):
        for arm in arms:
            name, io, cold = arm
            if cold:  # right before each arm: shared disks change from second to second
                disk.append(sequential(sources["vault"].files[0].path, args.seconds / 2))
            results[arm].append(random_reads(sources[name], io, cold, args.seconds, r))
            results[arm][-1]["of disk"] = results[arm][-1]["read GB/s"] * 1e9 / disk[-1]
    best = statistics.median(disk)
    size = sources["vault"].layouts[0].expert_nbytes
    print(
        f"expert {size / 1e6:.2f} MB; disk, large sequential direct reads: {best / 1e9:.2f} GB/s\n"
    )
    print("file        io      cache  GB/s   of disk  reads/expert  MB read/expert  ms/expert")
    rows = []
    for (name, io, cold), runs in results.items():
        median = {k: statistics.median(x[k] for x in runs) for k in runs[0]}
        row = {"file": name, "io": io, "cold": cold, **median}
        rows.append(row)
        share = f"{row['of disk']:6.2f}" if cold else "     -"
        print(
            f"{name:<11} {io:<7} {'cold' if cold else 'warm':<5} {median['GB/s']:6.2f}  {share}  "
            f"{median['reads/expert']:12.2f}  {median['bytes/expert'] / 1e6:14.3f}  "
            f"{median['ms/expert']:9.3f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"disk": disk, "expert": size, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
