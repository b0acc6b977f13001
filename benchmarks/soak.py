"""Mixed requests for minutes or hours: everything flat, and the token ids those of mlx-lm.

    python benchmarks/soak.py --minutes 60
    python benchmarks/soak.py --rounds 3 --seed 7

Each round loads the demo model with options drawn by chance (slots, decode mode, threads, ways to
read ahead, policy, remembered usage, pins), makes some requests (sampled or greedy, quantised or
rotating KV caches, drafts, prewarming meanwhile, some on another thread) and frees it. Some
requests are cancelled; in some, reads are slow, come short, or fail, or slots are given back and
taken again between two tokens or by another thread. Whatever comes out until then
must be what mlx-lm generates with everything in memory. After each round memory, descriptors and
threads are what they were after the first one. Stops with status 1 where that is not so.
"""

import argparse
import contextlib
import ctypes
import errno
import gc
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generate_step as mlx_generate_step

import smoe_mlx
from smoe_mlx.generate import speculative_generate_step
from smoe_mlx.hub import find_model

SLOTS = (8, 16, 0.1, 0.25, 0.5, 0.75, 511, 1.0)
WARM_UP = 8  # rounds after which memory is to grow no more
MOST_GROWTH = 0.1  # of resident memory, since then
MOST_MLX = 1 << 16  # bytes of MLX arrays, since the first round
ERRORS = (errno.EIO, errno.EAGAIN, errno.ENXIO, errno.ESTALE)


class Disk:
    """os.preadv that is slow, comes short or fails with the chances given."""

    def __init__(self, dice: random.Random):
        self.real, self.dice = os.preadv, dice
        self.slow = self.short = self.fail = 0.0
        self.failed = 0

    def __call__(self, fd, buffers, offset, *flags):
        chance = self.dice.random()
        if chance < self.fail:
            self.failed += 1
            code = self.dice.choice(ERRORS)
            raise OSError(code, os.strerror(code))
        if chance < self.fail + self.short:
            first = memoryview(buffers[0])
            return self.real(fd, [first[: max(1, len(first) // 3)]], offset, *flags)
        if chance < self.fail + self.short + self.slow:
            time.sleep(0.0005)
        return self.real(fd, buffers, offset, *flags)


@dataclass
class Footprint:
    """What a round leaves behind: bytes, and numbers of descriptors and threads."""

    mlx: int
    rss: int
    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> "Footprint":
        gc.collect()
        mx.clear_cache()
        with contextlib.suppress(AttributeError):  # freed memory that glibc keeps is no leak
            ctypes.CDLL(None).malloc_trim(0)
        descriptors = len(os.listdir("/dev/fd"))
        return cls(mx.get_active_memory(), _rss(), descriptors, _threads())


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))  # MLX's own as well
    except OSError:
        return threading.active_count()


def _rss() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # macOS keeps the highest one only
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@dataclass
class Report:
    seed: int
    rounds: int = 0
    tokens: int = 0
    compared: int = 0
    requests: Counter = field(default_factory=Counter)  # how they ended
    modes: Counter = field(default_factory=Counter)  # tokens by how they were decoded
    bets: int = 0
    evictions: int = 0
    resizes: int = 0
    prewarmed: int = 0
    accepted: int = 0
    footprints: list[Footprint] = field(default_factory=list)
    seconds: float = 0.0

    def wrong(self) -> str:
        """What has grown, or ""."""
        first, last = self.footprints[0], self.footprints[-1]
        for name in ("mlx", "descriptors", "threads"):
            slack = MOST_MLX if name == "mlx" else 0
            if getattr(last, name) > getattr(first, name) + slack:
                return f"{name}: {getattr(first, name)} after the first round, now {last}"
        if self.rounds > WARM_UP:
            warm = max(f.rss for f in self.footprints[:WARM_UP])
            if last.rss > (1 + MOST_GROWTH) * warm:
                return f"resident memory: {warm} after {WARM_UP} rounds, now {last.rss}"
        return ""

    def figures(self) -> dict:
        warm, last = self.footprints[min(WARM_UP, self.rounds) - 1], self.footprints[-1]
        return {**vars(self), "footprints": {"warm": vars(warm), "end": vars(last)}}

    def __str__(self) -> str:
        warm, last = self.footprints[min(WARM_UP, self.rounds) - 1], self.footprints[-1]
        ended = ", ".join(f"{n:,} {how}" for how, n in self.requests.most_common())
        modes = ", ".join(f"{m} {n:,}" for m, n in self.modes.most_common() if n)
        return (
            f"{self.seconds / 60:.1f} min, seed {self.seed}: {self.rounds:,} loads, "
            f"{sum(self.requests.values()):,} requests ({ended})\n"
            f"{self.tokens:,} tokens, {self.compared:,} compared with mlx-lm's: all equal\n"
            f"decoded: {modes}; {self.accepted:,} drafts accepted\n"
            f"{self.evictions:,} evictions, {self.resizes:,} resizes, {self.bets:,} bets, "
            f"{self.prewarmed:,} prewarmed\n"
            f"resident memory {warm.rss / 1e6:.1f} -> {last.rss / 1e6:.1f} MB, "
            f"MLX {warm.mlx / 1e6:.1f} -> {last.mlx / 1e6:.1f} MB, "
            f"descriptors {warm.descriptors} -> {last.descriptors}, "
            f"threads {warm.threads} -> {last.threads}"
        )


def make_sampler(temperature: float, seed: int):
    """The same tokens on every thread: each has a random state of its own."""
    seeds = itertools.count(seed)
    if not temperature:
        return lambda logprobs: mx.argmax(logprobs, axis=-1)
    return lambda logprobs: mx.random.categorical(
        logprobs / temperature, key=mx.random.key(next(seeds))
    )


class Soak:
    """Rounds of requests, and the model with everything in memory to compare with."""

    def __init__(self, seed: int, folder: Path):
        self.dice = random.Random(seed)
        self.disk = Disk(random.Random(seed))
        self.report = Report(seed)
        self.demo = find_model("demo")
        self.reference, self.tokenizer = mlx_lm.load(str(self.demo))
        text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
        self.text = self.tokenizer.encode(text[:2500])
        self.usage = folder / "usage.json"
        # The same for all: MLX keeps a thread of its own for each that has evaluated something.
        self.other_thread, self.idle_thread = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        for thread in (self.other_thread, self.idle_thread):
            thread.submit(self._expected, [1, 2], 1, 0.5, 0, {}).result()
        self._expected([1, 2], 1, 0.5, 0, {})

    def _expected(self, prompt, most, temperature, seed, options) -> list[int]:
        """mlx-lm's tokens."""
        sampler = make_sampler(temperature, seed)
        prompt = mx.array(prompt)
        steps = mlx_generate_step(
            prompt, self.reference, max_tokens=most, sampler=sampler, **options
        )
        return [int(t) for t, _ in steps]

    def round(self, requests: int) -> None:
        """Load, make some requests, free."""
        start, dice = time.perf_counter(), self.dice
        config = smoe_mlx.StreamingConfig(
            slots=dice.choice(SLOTS),
            decode=dice.choice(("auto", "exact", "wait", "lag1", "token")),
            threads=dice.choice((0, 1, 2, 4)),
            io=dice.choice(("pread", "pread", "direct")),
            policy=dice.choice(("lru", "lfu")),
            hits_first=dice.random() < 0.7,
            lookahead=dice.random() < 0.7,
            spec=dice.choice((0, 0, 2)),
            usage=dice.choice((None, self.usage)),
            hot_per_layer=0,
            debug=dice.random() < 0.2,
        )
        model, _ = smoe_mlx.load(self.demo, config=config)
        for _ in range(requests):
            how = self._request(model, config)
            self.report.requests[how] += 1
        s = smoe_mlx.stats(model)
        self.report.modes.update(s.decoded)
        self.report.evictions += s.evictions
        self.report.bets += s.bets.issued
        self.report.prewarmed += model._streaming.cache.stats.prewarmed
        self.report.accepted += model._streaming.drafts.accepted
        del model, s
        self.report.rounds += 1
        self.report.footprints.append(Footprint.now())
        self.report.seconds += time.perf_counter() - start
        if self.report.wrong():  # a thread that was joined takes a moment to leave the system
            time.sleep(2)
            self.report.footprints[-1] = Footprint.now()
        if wrong := self.report.wrong():
            sys.exit(f"round {self.report.rounds}: {wrong}\n{config}")

    def _request(self, model, config) -> str:
        """One request with whatever may go wrong with it. Returns how it ended."""
        dice, disk = self.dice, self.disk
        n, at = dice.choice((1, 2, 7, 30, 64, 150)), dice.randrange(len(self.text) - 200)
        prompt, most = mx.array(self.text[at : at + n]), dice.randrange(2, 40)
        seed, temperature = dice.randrange(1 << 30), dice.choice((0.0, 0.0, 0.8))
        options = dice.choice(({}, {}, {"max_kv_size": 32}, {"kv_bits": 8, "kv_group_size": 32}))
        extra = dice.choice(({}, {}, {"prompt_lookup": 2}, {"draft_model": self.reference}))
        if options or temperature:  # drafts of one text are compared with mlx-lm's plain way only
            extra = {}
        resize_at = {i: dice.choice(SLOTS) for i in range(most) if dice.random() < 0.04}
        cancel_after = dice.randrange(most) if dice.random() < 0.2 else -1
        disk.slow, disk.short = dice.choice((0, 0.3)), dice.choice((0, 0, 0.1))
        if config.io == "direct":  # a system that stops inside a page there is taken for broken
            disk.short = 0.0
        disk.fail = dice.choice((0, 0, 0, 0.01, 0.2))
        got: list[int] = []
        ended = "finished"

        def run() -> None:
            nonlocal ended
            sampler = make_sampler(temperature, seed)
            steps = speculative_generate_step(
                prompt, model, max_tokens=most, sampler=sampler, **options, **extra
            )
            try:
                for token, _, _ in steps:
                    got.append(int(token))
                    if slots := resize_at.get(len(got)):
                        self._resize(model, slots)
                    if len(got) == cancel_after:
                        ended = "cancelled"
                        break
            except smoe_mlx.ExpertReadError as e:
                if "expert" not in str(e):
                    raise
                ended = "failed"
            finally:
                steps.close()

        apart = dice.random() < 0.15
        helper, chance, slots = None, dice.random(), dice.choice(SLOTS)
        if chance < 0.2:
            helper = self.idle_thread.submit(self._prewarm, model)
        elif chance < 0.3:
            helper = self.idle_thread.submit(self._resize, model, slots)
        if apart:
            self.other_thread.submit(run).result()
        else:
            run()
        if helper is not None:
            helper.result()
        disk.slow = disk.short = disk.fail = 0.0
        if ended == "failed" and not disk.failed:
            sys.exit("a read failed that nobody let fail")
        self.report.tokens += len(got)
        if got and dice.random() < 0.5:
            expected = self._expected(prompt, len(got), temperature, seed, options)
            if got != expected:
                sys.exit(f"not mlx-lm's tokens\n{got}\n{expected}\n{config}\n{options}{extra}")
            self.report.compared += len(got)
        return ended

    def _resize(self, model, slots: int | float) -> None:
        smoe_mlx.resize(model, slots=slots)
        self.report.resizes += 1

    @staticmethod
    def _prewarm(model) -> None:
        with contextlib.suppress(smoe_mlx.ExpertReadError):
            smoe_mlx.prewarm(model)


def soak(minutes: float = 0.0, rounds: int = 0, requests: int = 10, seed: int = 0) -> Report:
    """Rounds until both limits are reached. Exits the process where something is wrong."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        run = Soak(seed, Path(folder))
        os.preadv = run.disk
        try:
            end = time.monotonic() + 60 * minutes
            while run.report.rounds < rounds or time.monotonic() < end:
                run.round(requests)
        finally:
            os.preadv = run.disk.real
    return run.report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3, help="at least so many")
    parser.add_argument("--requests", type=int, default=10, help="in a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    args = parser.parse_args()
    report = soak(args.minutes, args.rounds, args.requests, args.seed)
    print(report, flush=True)
    if args.json:
        args.json.write_text(json.dumps(report.figures(), indent=1))
    os._exit(0)  # MLX aborts at exit where a thread that had generated has ended


if __name__ == "__main__":
    main()
