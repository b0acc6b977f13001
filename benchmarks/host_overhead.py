"""Measure what a streamed layer costs the host when every expert it needs is in memory.

    python benchmarks/host_overhead.py
    python benchmarks/host_overhead.py --model /tmp/bench/mid --tokens 32

The cache has a slot for every expert but one, so that no layer may skip the look at the routing;
the text has been fed once before, so that nothing is missed. Three methods:

1. Decode, several ways taking turns at every token in one process: mlx-lm as it is; mlx-lm with
   nothing but one host read of the routing in every layer; with slot numbers as well, in an array
   that the host makes or taken from a table in the graph; with outputs that are held; with both
   numbers by the library's own way (handover.py); smoe_mlx. The
   differences, per layer and token, are the cost of the read (the pipeline drains), of each part,
   and of the bookkeeping.
2. Stop watches around the parts of a layer's call. The wait for the routing and the building of
   the layer's operations, which mlx-lm does as well, are listed, but are no bookkeeping.
3. The call of one layer over and over, its routing known, less the building of its operations. No
   wait comes between, so that the processor's caches stay warm: the least that it can cost.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from decode import TEXT
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

import smoe_mlx
from smoe_mlx.handover import make_handover
from smoe_mlx.hub import find_model
from smoe_mlx.layers import switch

TARGET_US = 60
WAIT, BUILD, CALL = "wait for the routing", "build the operations", "the call itself"
KINDS = (switch.StreamingSwitchGLU, switch.StreamingSwitchMLP)
PARTS = (  # methods of the cache, as far as they are there
    "resident", "look_after", "waves", "claim", "claim_few", "table", "arrays", "hold",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="folder, or demo (the bundled model)")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--warmup", type=int, default=8, help="tokens of those that are not timed")
    parser.add_argument("--prompt-file", type=Path, help="text to feed, instead of the built-in")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    folder = find_model(args.model)
    streamed, tokenizer = load_all_but_one(folder)
    layers = len(smoe_mlx.stats(streamed).layers)
    text = args.prompt_file.read_text() if args.prompt_file else TEXT
    tokens = tokenizer.encode(text)[: args.tokens]
    decode(streamed, tokens)  # now all these experts are in memory
    misses = smoe_mlx.stats(streamed).misses

    figures = compare(folder, streamed, tokens, args.warmup, layers)
    figures |= repeat(streamed, tokens)
    figures |= break_down(streamed, tokens, args.warmup)
    new = smoe_mlx.stats(streamed).misses - misses
    if new:
        sys.exit(f"{new} experts were missed: these figures are not those of hits")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


def load_all_but_one(folder: Path) -> tuple[nn.Module, Any]:
    """The streamed model with one slot less than experts in every bank."""
    plan = smoe_mlx.plan(folder, slots=1.0)
    model, tokenizer = smoe_mlx.load(folder, slots=plan.num_experts - len(plan.banks))
    if any(b.slots >= b.experts for b in smoe_mlx.stats(model).plan.banks):
        sys.exit("a bank holds all its experts; this model's banks are too unlike each other")
    return model, tokenizer


def decode(model: nn.Module, tokens: list[int]) -> None:
    cache = make_prompt_cache(model)
    for token in tokens:
        mx.eval(mx.argmax(model(mx.array([[token]]), cache=cache)[0, -1]))


# ---- 1: differences ------------------------------------------------------------------------------


ARMS = (
    "mlx-lm", "+ read", "+ read, array", "+ read, table", "+ read, array, hold", "+ handover",
    "smoe_mlx",
)  # fmt: skip


class _Reading:
    """Switch layers that do in `arm` what a streamed layer must do, and learn nothing from it."""

    arm = ""
    held: list[mx.array] = []  # noqa: RUF012

    def __init__(self, kind: type):
        def call(module: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
            arm = _Reading.arm
            if "read" in arm:
                ids = indices.tolist()
                if "array" in arm:
                    indices = mx.array(ids, mx.uint32)
                elif "table" in arm:
                    indices = mx.take(table, indices)
            elif "handover" in arm:
                (ids,) = handover.read([indices])
                indices = handover.array(ids, indices.shape)
            y = stock(module, x, indices)
            if arm.endswith("hold"):
                if len(_Reading.held) >= 8:
                    mx.eval(_Reading.held)
                    _Reading.held = []
                _Reading.held.append(y)
            return y

        handover = make_handover()
        table = mx.arange(4096, dtype=mx.uint32)  # more than any model's experts
        mx.eval(table)
        stock, kind.__call__ = kind.__call__, call


def compare(
    folder: Path, streamed: nn.Module, tokens: list[int], warmup: int, layers: int
) -> dict[str, float]:
    for kind in (SwitchGLU, SwitchMLP):
        _Reading(kind)
    resident, _ = mlx_lm.load(str(folder))
    arms = {name: streamed if name == "smoe_mlx" else resident for name in ARMS}
    caches = {name: make_prompt_cache(model) for name, model in arms.items()}
    wall: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    names, answers = list(arms), set()
    for i, token in enumerate(tokens):
        answers.clear()
        for name in names[i % len(names) :] + names[: i % len(names)]:
            _Reading.arm = name
            start, cpu_start = time.perf_counter(), time.process_time()
            best = mx.argmax(arms[name](mx.array([[token]]), cache=caches[name])[0, -1])
            mx.eval(best)
            if i >= warmup:
                cpu[name].append(time.process_time() - cpu_start)
                wall[name].append(time.perf_counter() - start)
            answers.add(best.item())
        if len(answers) > 1:
            sys.exit(f"token {i}: the arms do not agree")

    def difference(times: dict[str, list[float]], a: str, b: str) -> float:
        pairs = zip(times[a], times[b], strict=True)
        return 1e6 * statistics.median(x - y for x, y in pairs) / layers

    print(f"{'decode':<24}{'ms/token':>10}{'CPU ms':>10}")
    for name in names:
        print(
            f"{name:<24}{1e3 * statistics.median(wall[name]):>10.2f}"
            f"{1e3 * statistics.median(cpu[name]):>10.2f}"
        )
    print(f"\n{'us per layer and token':<24}{'wall':>10}{'CPU':>10}")
    out = {}
    for label, a, b in (
        ("the read", "+ read", "mlx-lm"),
        ("an array of slots", "+ read, array", "+ read"),
        ("slots from a table", "+ read, table", "+ read"),
        ("held outputs", "+ read, array, hold", "+ read, array"),
        ("both by handover.py", "+ handover", "mlx-lm"),
        ("all but the read", "smoe_mlx", "+ read"),
        ("all", "smoe_mlx", "mlx-lm"),
    ):
        out[label] = difference(wall, a, b)
        out[f"{label}, CPU"] = difference(cpu, a, b)
        print(f"{label:<24}{out[label]:>10.1f}{out[f'{label}, CPU']:>10.1f}")
    return out


# ---- 3: over and over ----------------------------------------------------------------------------


def repeat(streamed: nn.Module, tokens: list[int], times: int = 2000) -> dict[str, float]:
    """Times one layer's call on the routing of one token."""
    calls = []

    def noting(call: Callable) -> Callable:
        def wrapped(module: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
            calls.append((module, x, indices))
            return call(module, x, indices)

        return wrapped

    with contextlib.ExitStack() as stack:
        for kind in KINDS:
            stack.enter_context(mock.patch.object(kind, "__call__", noting(kind.__call__)))
        decode(streamed, tokens[:1])
    module, x, indices = calls[-1]
    cache, layer = streamed._streaming.cache, len(calls) - 1
    slots = mx.array(cache.table(layer)[np.array(indices)].astype(np.uint32))
    mx.eval(x, indices, slots)
    whole, build = [], []
    for _ in range(times):
        start = time.perf_counter()
        y = module(x, indices)
        whole.append(time.perf_counter() - start)
        mx.eval(y)
        start = time.perf_counter()
        y = module.in_one(cache.arrays(layer), x, slots)
        build.append(time.perf_counter() - start)
        mx.eval(y)
    out = 1e6 * (statistics.median(whole) - statistics.median(build))
    print(f"\n{'over and over, us':<24}{out:>10.1f}")
    return {"over and over": out}


# ---- 2: stop watches -----------------------------------------------------------------------------


class Watches:
    """Seconds that wrapped functions spent in themselves: name -> one entry a call."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._inner: list[float] = []  # time in wrapped functions that the open ones called

    def around(self, name: str, function: Callable) -> Callable:
        entries, inner, clock = self.seconds[name], self._inner, time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                entries.append(clock() - start - inner.pop())
                if inner:
                    inner[-1] += clock() - start

        return timed


def watch(streamed: nn.Module, tokens: list[int], warmup: int, parts: Sequence[str]) -> dict:
    """Microseconds a call that each part took, beside those parts that it called."""
    watches = Watches()
    wait = watches.around(WAIT, mx.eval)
    cache = streamed._streaming.cache

    def waiting(call: Callable) -> Callable:
        def wrapped(module: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
            wait(indices)
            return call(module, x, indices)

        return wrapped

    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, function: Callable) -> None:
            stack.enter_context(mock.patch.object(owner, name, function))

        for name in parts:
            if hasattr(cache, name):
                replace(cache, name, watches.around(name, getattr(cache, name)))
        for kind in KINDS:
            replace(kind, "in_one", watches.around(BUILD, kind.in_one))
            replace(kind, "__call__", waiting(watches.around(CALL, kind.__call__)))
        decode(streamed, tokens)
    calls = len(watches.seconds[CALL])
    out = {}
    for name, entries in watches.seconds.items():
        if entries:  # a part may run more or less than once in a call
            kept = entries[len(entries) * warmup // len(tokens) :]
            out[name] = 1e6 * statistics.median(kept) * len(entries) / calls
    return out


def break_down(streamed: nn.Module, tokens: list[int], warmup: int) -> dict[str, float]:
    whole = watch(streamed, tokens, warmup, ())
    parts = watch(streamed, tokens, warmup, PARTS)
    print(f"\n{'stop watches, us':<24}{'a call':>10}")
    print(f"{WAIT:<24}{whole[WAIT]:>10.1f}")
    print(f"{BUILD:<24}{whole[BUILD]:>10.1f}")
    print(f"{'the bookkeeping':<24}{whole[CALL]:>10.1f}   target: under {TARGET_US}")
    for name in sorted(set(parts) - {WAIT, BUILD}, key=lambda n: -parts[n]):
        print(f"  {name:<22}{parts[name]:>10.1f}")
    print("(the parts in a run of their own: more watches take more time)")
    return {"stop watches": whole[CALL], **{f"part {k}": v for k, v in parts.items()}}


if __name__ == "__main__":
    main()
