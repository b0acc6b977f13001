"""Project what Qwen3-235B-A22B will do on Macs that nobody here has: plan, trace and speed model.

    python benchmarks/projection.py

The plan is made from the real model's shape (sparse files: headers, no weights), with 70 % of the
machine's memory available, as the doctor takes it. The forecast is the doctor's, with the parts
below in the place of measured ones. No routing of the model is to be had, so hit rates are those of
a trace (`--trace`, or the demo model's, recorded here) in two ways: with the same share of all
experts in memory, and with the experts of as many tokens; and those of the default curve. What
`doubling` says takes the second.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from decode import TEXT

import smoe_mlx
from smoe_mlx.doctor import AVAILABLE_SHARE, SIM_LATENCY
from smoe_mlx.load import open_weights
from smoe_mlx.plan import MemoryPlan, ModelShape, make_plan
from smoe_mlx.replay import replay
from smoe_mlx.shape import measure_shape
from smoe_mlx.skeleton import build_skeleton
from smoe_mlx.speed import Compute, Forecast, default_hit_rate, forecast
from smoe_mlx.store.layout import ExpertLayout
from smoe_mlx.store.probe import DiskProbe
from smoe_mlx.trace import Recorder, Trace, force, load_trace

MAX_BUFFER = 1 << 46
LAYERS = 94
# Measured by others, each on its own machine:
EXPERTS_RATE = 158e9  # bytes a second of quantised experts on an M4 Pro's GPU (S-MoE)
BACKBONE_RATE = 207e9  # of the backbone's matrices there, the lower end (S-MoE: 207-285)
SYNC = 0.2e-3  # seconds that a look at a layer's routing costs (flash-moe on MLX)
PROMPT_TOKEN = 1 / 90  # seconds, reading included (slotstream, M4 Pro 24 GB: 86-93 tok/s)
PROMPT_TOKENS = 45  # of S-MoE's benchmark


@dataclass(frozen=True)
class Mac:
    """A machine: bytes of memory, bytes a second of its disk, GPU against an M4 Pro's."""

    name: str
    memory: float
    disk: float
    gpu: float


MACS = (
    Mac("32 GB M4 Air", 32e9, 2.4e9, 120 / 273),  # disk: streamlx; GPU: memory bandwidths
    Mac("48 GB M4 Pro", 48e9, 6.3e9, 1.0),  # disk: S-MoE
    Mac("64 GB M5 Pro", 64e9, 11.5e9, 1.0),  # disk, cold: slotstream; GPU: at least as fast
)
# What S-MoE measured on its 48 GB M4 Pro: slots, bytes of an expert, seconds of all but reading.
SMOE = {"slots": 15e9 / 9.72e6, "expert": 117e9 / (LAYERS * 128), "other": 0.209, "disk": 6.3e9}
SMOE_TPS, SMOE_MISSED = 1.43, 3.07e9


@dataclass(frozen=True)
class Model:
    """The layouts and the shape of one quantisation."""

    name: str
    layouts: list[ExpertLayout]
    shape: ModelShape

    def plan(self, memory: float) -> MemoryPlan:
        config = smoe_mlx.StreamingConfig()
        available = int(AVAILABLE_SHARE * memory)
        return make_plan(self.layouts, self.shape, config, MAX_BUFFER, available)

    def forecast(self, mac: Mac, hits: Callable[[MemoryPlan], float]) -> Forecast:
        plan = self.plan(mac.memory)
        expert = plan.experts_nbytes / plan.num_experts
        token = plan.expert_reads * expert / EXPERTS_RATE + plan.backbone / BACKBONE_RATE
        compute = Compute(token / mac.gpu, LAYERS * SYNC, PROMPT_TOKEN / mac.gpu)
        disk = DiskProbe(mac.disk, int(expert), "direct", SIM_LATENCY)
        config = smoe_mlx.StreamingConfig()
        return forecast(plan, config, compute, disk, None, PROMPT_TOKENS, hits(plan))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", help="of smoe-mlx trace (default: one of the demo model)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    trace = demo_trace() if args.trace is None else load_trace(args.trace)
    with tempfile.TemporaryDirectory() as folder:
        q4, q2 = (open_model(Path(folder), bits) for bits in (4, 2))
    q2 = replace(q2, shape=replace(q2.shape, backbone_nbytes=q4.shape.backbone_nbytes))
    ways: dict[str, Callable[[MemoryPlan], float]] = {
        "share": lambda plan: hit_rate(trace, plan.slots / plan.num_experts * experts_of(trace)),
        "tokens": lambda plan: hit_rate(trace, plan.slots / plan.expert_reads * sum(trace.top_k)),
        "curve": default_hit_rate,
    }
    print(f"trace: {trace.model}, {trace.tokens:,} tokens\n")
    check(trace)
    rows = []
    print(
        "\n| Mac | experts | in memory | tokens' worth | hits: share, tokens, curve "
        "| tok/s: share, tokens, curve | ms: compute, syncs, reading | first token |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    for mac in MACS:
        for model in (q4, q2):
            plan = model.plan(mac.memory)
            told = {name: model.forecast(mac, way) for name, way in ways.items()}
            rows.append(
                {"mac": mac.name, "experts": model.name, "slots": plan.slots}
                | {name: f.as_dict() for name, f in told.items()}
            )
            f = told["tokens"]
            print(
                f"| {mac.name}, {mac.disk / 1e9:.1f} GB/s | {model.name} "
                f"| {plan.slots:,} ({100 * plan.slots / plan.num_experts:.0f} %) "
                f"| {plan.slots / plan.expert_reads:.1f} "
                f"| {', '.join(f'{100 * x.hit_rate:.0f} %' for x in told.values())} "
                f"| {', '.join(f'{1 / x.token.likely:.2f}' for x in told.values())} "
                f"| {1e3 * f.compute:.0f}, {1e3 * f.syncs:.0f}, {1e3 * f.reading:.0f} "
                f"| {f.prompt.likely:.0f} s |"
            )
    print("\n| Mac | experts | tok/s | with nothing read | twice: disk | twice: memory |")
    print("| --- | --- | --- | --- | --- | --- |")
    for mac in MACS:
        for model in (q4, q2):
            print(doubling(mac, model, ways["tokens"]))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


def demo_trace() -> Trace:
    """The routing of the demo model on a text, token by token."""
    model, tokenizer = smoe_mlx.load("demo", slots=1.0)
    with Recorder(model, "demo") as recorder:
        for _ in force(model, tokenizer.encode(TEXT)[:512], 512):
            pass
    return recorder.trace()


def open_model(folder: Path, bits: int) -> Model:
    out = folder / f"q{bits}"
    script = Path(__file__).with_name("make_checkpoint.py")
    options = ["--preset", "qwen3-235b-sparse", "--bits", str(bits), "--out", str(out)]
    subprocess.run([sys.executable, script, *options], check=True, stdout=subprocess.DEVNULL)
    checkpoint, _ = open_weights(out)
    skeleton = build_skeleton(out, checkpoint)
    shape = measure_shape(skeleton, smoe_mlx.StreamingConfig())
    checkpoint.close()
    return Model(f"Q{bits}", skeleton.layouts, replace(shape, keeps_buffers=True))


def experts_of(trace: Trace) -> int:
    return sum(trace.num_experts)


def hit_rate(trace: Trace, slots: float) -> float:
    """Of the trace's own model with so many slots, under LRU."""
    result = replay(trace, "lru", max(1, min(round(slots), experts_of(trace))))
    counts = result.decode if result.decode.hits + result.decode.misses else result.prompt
    return counts.hit_rate


def check(trace: Trace) -> None:
    """The same sum with S-MoE's own parts, beside what it measured."""
    for name, slots in (
        ("tokens", SMOE["slots"] / (LAYERS * 8) * sum(trace.top_k)),
        ("share", SMOE["slots"] / (LAYERS * 128) * experts_of(trace)),
    ):
        hits = hit_rate(trace, slots)
        missed = LAYERS * 8 * SMOE["expert"] * (1 - hits)
        rate = 1 / (SMOE["other"] + missed / SMOE["disk"])
        print(
            f"S-MoE, by {name}: {100 * hits:.0f} % hits, {missed / 1e9:.2f} GB read a token "
            f"(measured {SMOE_MISSED / 1e9:.2f}), {rate:.2f} tok/s (measured {SMOE_TPS})"
        )


def doubling(mac: Mac, model: Model, hits: Callable[[MemoryPlan], float]) -> str:
    """What it would take to be twice as fast: another disk, or more memory."""
    now = model.forecast(mac, hits)
    goal = now.token.likely / 2

    def least(change: Callable[[float], Mac], most: float) -> float | None:
        low, high = 1.0, most
        if model.forecast(change(high), hits).token.likely > goal:
            return None
        while high / low > 1.02:
            middle = (low * high) ** 0.5
            fast = model.forecast(change(middle), hits).token.likely <= goal
            low, high = (low, middle) if fast else (middle, high)
        return high

    disk = least(lambda x: replace(mac, disk=mac.disk * x), 1000)
    memory = least(lambda x: replace(mac, memory=mac.memory * x), 512e9 / mac.memory)
    gigabytes = {
        "disk": "no disk" if disk is None else f"{disk * mac.disk / 1e9:.0f} GB/s",
        "memory": "no memory" if memory is None else f"{memory * mac.memory / 1e9:.0f} GB",
    }
    return (
        f"| {mac.name} | {model.name} | {1 / now.token.likely:.2f} "
        f"| {1 / (now.compute + now.syncs):.1f} | {gigabytes['disk']} | {gigabytes['memory']} |"
    )


if __name__ == "__main__":
    main()
