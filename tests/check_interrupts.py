"""Ctrl-C at random points of loads, prompts and decoding, beside another model.

    python tests/check_interrupts.py --times 500

Half of them are signals at a random time, half are raised at a random line of this library. After
each, the next answers of both models must be those of mlx-lm, slots and tables must agree, and no
descriptors or threads may be left. Prints figures as JSON; stops with status 1 otherwise.
"""

import argparse
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
from conftest import SlowReader, interrupt_at_line, make_checkpoint, resident
from mlx_lm.generate import generate_step as mlx_generate_step
from test_faults import TOKENS, answer, descriptors

import smoe_mlx
from smoe_mlx.generate import generate_step
from smoe_mlx.load import load_model

SOURCES = str(Path(smoe_mlx.__file__).parent)
MODES = ("exact", "wait", "lag1", "token")
PHASES = ("load", "prefill", *MODES)


def lines_of(action: Callable[[], object]) -> int:
    """How many lines of this library `action` runs."""
    source, lines = str(Path(smoe_mlx.__file__).parent), 0

    def trace(frame, event, arg):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(source):
            return None
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
    return lines


def interrupt_after(seconds: float, action: Callable[[], object]) -> bool:
    """Run `action` with a KeyboardInterrupt after so many seconds; whether it came."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        action()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
    return False


class Check:
    def __init__(self, folder: Path):
        self.folder = make_checkpoint(folder / "model", "qwen3_moe", "affine")
        steps = mlx_generate_step(mx.array(TOKENS[:9]), resident(self.folder), max_tokens=8)
        self.expected = [int(t) for t, _ in steps]
        load = sys.modules["smoe_mlx.load"]
        plain, self.models = load.ExpertReader, {}
        for kind, reader in (("quick", plain), ("slow", SlowReader)):  # the latter reads ahead
            load.ExpertReader = reader
            self.models |= {(kind, mode): self.load(mode) for mode in MODES}
        load.ExpertReader = plain
        self.lines, self.seconds, self.loaded = {}, {}, []
        for phase in PHASES:
            self.action(phase, "quick")()
            start = time.perf_counter()
            self.action(phase, "quick")()
            self.seconds[phase] = time.perf_counter() - start
            self.lines[phase] = lines_of(self.action(phase, "quick"))
        self.wrong(self.models.values())
        self.loaded.clear()
        self.threads = threading.active_count()
        self.descriptors = descriptors()

    def load(self, mode="exact"):
        config = smoe_mlx.StreamingConfig(slots=0.4, threads=2, debug=True, decode=mode)
        return load_model(self.folder, config=config)[0]

    def action(self, phase: str, kind: str) -> Callable[[], object]:
        """What is to be interrupted, and for decoding, what comes before it done already."""
        if phase == "load":  # Python loses an interrupt that comes while the model is freed
            return lambda: self.loaded.append(self.load())
        if phase == "prefill":
            model = self.models[kind, "exact"]
            return lambda: list(generate_step(mx.array(TOKENS), model, max_tokens=1))
        steps = generate_step(mx.array(TOKENS[:9]), self.models[kind, phase], max_tokens=8)
        next(steps)
        return lambda: list(steps)

    def wrong(self, models) -> str:
        """What is not as it should be, or ""."""
        for model in models:
            if (got := answer(model)) != self.expected:
                return f"{got}, not {self.expected}"
            model._streaming.cache.check()
        return ""

    def once(self, dice: random.Random) -> tuple[str, bool]:
        phase, kind = dice.choice(PHASES), dice.choice(("quick", "slow"))
        how = dice.choice(("signal", "line"))
        action, other = self.action(phase, kind), self.action(dice.choice(MODES), "quick")
        if how == "signal":
            came = interrupt_after(dice.uniform(1e-5, 1.1 * self.seconds[phase]), action)
        else:
            line = dice.randint(1, self.lines[phase])
            came = interrupt_at_line(line, action, SOURCES) is not None
        del action
        self.loaded.clear()
        other()  # was under way meanwhile
        hit = self.models[kind, phase if phase in MODES else "exact"]
        wrong = self.wrong([hit, dice.choice(list(self.models.values()))])
        gc.collect()
        now = threading.active_count(), descriptors()
        if now > (self.threads, self.descriptors) or now[1] > self.descriptors:
            wrong = f"{now} threads and descriptors, {self.threads, self.descriptors} before"
        if wrong:
            sys.exit(f"{phase}, {kind}, {how}: {wrong}")
        return f"{phase} by {how}", came


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=500, help="interrupts that came")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dice, came, late = random.Random(args.seed), Counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        check = Check(Path(folder))
        while came.total() < args.times:
            what, hit = check.once(dice)
            came[what] += hit
            late += not hit
    print(json.dumps({"interrupts": dict(sorted(came.items())), "late": late}, indent=1))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
