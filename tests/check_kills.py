"""kill -9 at random moments of shatter, session and usage saves: the old state or the new.

    python tests/check_kills.py --times 200

Each time, a process that does such things is killed, and another looks at what it left. Shattering
is sometimes gone on with and sometimes killed again. Prints figures as JSON; stops with status 1
where something is neither the old state nor the new one.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

import smoe_mlx
from smoe_mlx.cache.usage import Usage
from smoe_mlx.server.session_files import SessionFiles
from smoe_mlx.store.layout import ExpertLayout, TensorSpec

KINDS = ("shatter", "session", "usage")


def fork(work: Callable[[], object]) -> int:
    """Run `work` in another process. This one has imported MLX and never used it: no threads."""
    pid = os.fork()
    if pid:
        return pid
    try:
        mx.set_default_device(mx.cpu)
        work()
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def run(work: Callable[[], object]) -> None:
    """Run `work` in another process, to its end."""
    _, status = os.waitpid(fork(work), 0)
    if status:
        sys.exit(f"status {status}")


def kill_after(seconds: float, work: Callable[[], object]) -> bool:
    """Whether the process that runs `work` was still at it when it was killed."""
    pid = fork(work)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if status not in (0, signal.SIGKILL):
        sys.exit(f"status {status}")
    return bool(status)


class Shatter:
    """Shattering the demo: nothing has its name before it is whole."""

    def __init__(self, folder: Path):
        self.source, self.dst = Path(smoe_mlx.__file__).parent / "demo", folder / "vault"
        self.partial = folder / "vault.partial"
        start = time.monotonic()
        run(self.work)
        self.seconds = time.monotonic() - start
        self.whole = {p.name: p.read_bytes() for p in self.dst.iterdir()}
        shutil.rmtree(self.dst)

    def work(self) -> None:
        smoe_mlx.shatter(self.source, self.dst)

    def check(self, dice: random.Random) -> str:
        there = self.dst.exists()
        if not there:
            if dice.random() < 0.3:
                return "left to the next"
            run(self.work)
        if {p.name: p.read_bytes() for p in self.dst.iterdir()} != self.whole:
            sys.exit("a vault that is not what was to be written")
        run(lambda: smoe_mlx.verify(self.dst, self.source))
        shutil.rmtree(self.dst)
        return "new" if there else "old, and gone on with"


class Session:
    """Saving KV caches one after the other; what was saved is there, what is there is whole."""

    seconds = 0.15

    def __init__(self, folder: Path):
        self.folder, self.saved = folder / "sessions", folder / "saved"

    def entry(self, number: int) -> SimpleNamespace:
        cache = [KVCache(), KVCache()]
        for c in cache:
            rows = mx.full((1, 2, 256, 64), float(number))
            c.update_and_fetch(rows, rows)
        tokens = np.full(256, number)
        return SimpleNamespace(kind="answer", asked=7, grows=True, tokens=tokens, cache=cache)

    def work(self) -> None:
        files = SessionFiles(self.folder, 1 << 30)
        with self.saved.open("w") as f:
            for number in range(1000):
                assert files.save("model", self.entry(number)) is not None
                f.write("x")  # one byte: written or not
                f.flush()

    def check(self, dice: random.Random) -> str:
        def look() -> None:
            said = len(self.saved.read_text()) if self.saved.exists() else 0
            files, found = SessionFiles(self.folder, 1 << 30), set()
            before = len(list(self.folder.glob("model/????????-*")))
            for path, about in files.index("model"):
                (number,) = set(about["tokens"].tolist())
                for c in files.load(path):
                    assert all((x == number).all().item() for x in c.keys_and_values())
                found.add(number)
            assert len(found) == before, "a session was dropped"
            assert found in (set(range(said)), set(range(said + 1))), (said, found)
            self.saved.write_text("new" if len(found) > said else "old")

        run(look)
        how = self.saved.read_text()
        self.saved.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)
        return how


class UsageFile:
    """Saving usage again and again: the file is the last one, or the one before it."""

    seconds = 0.1

    def __init__(self, folder: Path):
        self.path, self.saved = folder / "usage.json", folder / "saved"
        ids = np.zeros((1, 200), np.int64)
        spec = TensorSpec("up_proj", "weight", "F32", (2,), 8)
        self.layouts = [ExpertLayout(f"layers.{i}", 200, (spec,), ids, ids) for i in range(8)]

    def work(self) -> None:
        usage = Usage(self.layouts, self.path)
        with self.saved.open("w") as f:
            for number in range(1, 100_000):
                usage._set(dict.fromkeys(usage._weights, float(number)))
                usage.save()
                f.write("x")
                f.flush()

    def check(self, dice: random.Random) -> str:
        said = len(self.saved.read_text()) if self.saved.exists() else 0
        usage = Usage(self.layouts, self.path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            usage.load()
        weights = {usage.weight(key) for key in usage.ranked()}
        if weights not in ({float(said)}, {float(said + 1)}):
            sys.exit(f"usage: {said} were saved, the file holds {weights}")
        self.saved.unlink(missing_ok=True)
        usage.saw([(0, 0)])
        usage.save()
        if found := list(self.path.parent.glob("*.part")):
            sys.exit(f"usage: {found} is left")
        self.path.unlink()
        return "old" if weights == {float(said)} else "new"


def check(kind: str, times: int, seed: int) -> dict[str, int]:
    """How often there was what after a kill."""
    dice, states = random.Random(seed), Counter()
    with tempfile.TemporaryDirectory() as folder:
        subject = {"shatter": Shatter, "session": Session, "usage": UsageFile}[kind](Path(folder))
        while sum(states.values()) < times:
            if kill_after(dice.uniform(0, subject.seconds), subject.work):
                states[subject.check(dice)] += 1
            else:  # it had come to its end
                subject.check(dice)
    return dict(states)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=200, help="kills of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    args = parser.parse_args()
    print(json.dumps({kind: check(kind, args.times, args.seed) for kind in args.kinds}, indent=1))


if __name__ == "__main__":
    main()
