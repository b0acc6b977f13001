"""smoe-mlx bench: the speed that was forecast, beside the one that is measured, at some budgets.

The parts of the forecast are measured first (`speed.measure_compute`, `probe_disk`), the routing is
recorded in a run of its own, and then each budget is run. Nothing is fitted to those runs.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from .config import StreamingConfig
from .generate import generate_step
from .load import load_model, open_weights
from .plan import format_bytes
from .skeleton import build_skeleton
from .speed import Compute, Forecast, forecast, measure_compute
from .stats import streaming_of
from .store.probe import DiskProbe, probe_disk
from .trace import Recorder

WITHIN = 0.25  # what a forecast may be off by
ERRORS = ("error", "error_with_hits", "prompt_error")
BUDGETS = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Run:
    """One budget: what was forecast, and what was measured (seconds a token, seconds a prompt).

    `hits_known` is the forecast of a token had the hit rate been foreseen.
    """

    slots: int
    memory: int
    forecast: Forecast
    hits_known: float
    token: float
    hit_rate: float
    prompt: float

    @property
    def error(self) -> float:
        """Of the forecast tokens a second: 0.1 if they were a tenth too many."""
        return self.token / self.forecast.token.likely - 1

    @property
    def error_with_hits(self) -> float:
        """As `error`, had the hit rate been foreseen: what is left is compute, looks and reads."""
        return self.token / self.hits_known - 1

    @property
    def prompt_error(self) -> float:
        return self.prompt / self.forecast.prompt.likely - 1


@dataclass(frozen=True)
class Bench:
    """The runs, and the parts that the forecasts were made of."""

    model: str
    num_experts: int
    compute: Compute
    disk: DiskProbe
    runs: tuple[Run, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        out = asdict(self)
        for row, run in zip(out["runs"], self.runs, strict=True):
            row |= {name: getattr(run, name) for name in ERRORS}
        return out

    def __str__(self) -> str:
        ms = 1e3
        c, latency = self.compute, self.disk.latency_seconds * ms
        lines = [
            f"a token with all experts in memory {c.token * ms:.2f} ms, looking at the routing "
            f"{c.syncs * ms:.2f} ms more, a prompt's token {c.prompt_token * ms:.2f} ms",
            f"disk {self.disk}, {latency:.3f} ms latency",
            "",
            f"{'slots':>16}{'memory':>10}{'hits, forecast':>16}{'hits':>8}{'tok/s, forecast':>18}"
            f"{'tok/s':>9}{'error':>8}{'hits known':>12}{'prompt s, fc.':>15}{'s':>8}{'error':>8}",
        ]
        for r in self.runs:
            share = 100 * r.slots / self.num_experts
            lines.append(
                f"{r.slots:>7,} ({share:5.1f} %){format_bytes(r.memory):>10}"
                f"{100 * r.forecast.hit_rate:>14.1f} %{100 * r.hit_rate:>6.1f} %"
                f"{1 / r.forecast.token.likely:>18.2f}{1 / r.token:>9.2f}{100 * r.error:>+6.0f} %"
                f"{100 * r.error_with_hits:>+10.0f} %"
                f"{r.forecast.prompt.likely:>15.2f}{r.prompt:>8.2f}{100 * r.prompt_error:>+6.0f} %"
            )
        off = [r for r in self.runs if abs(r.error) > WITHIN]
        lines.append("")
        lines.append(
            f"{len(self.runs) - len(off)} of {len(self.runs)} decoding forecasts are within "
            f"{100 * WITHIN:.0f} %"
        )
        return "\n".join(lines)


def bench(
    folder: Path,
    prompt: Sequence[int],
    config: StreamingConfig,
    budgets: Sequence[int | float] = BUDGETS,
    tokens: int = 48,
    trust_remote_code: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Bench:
    """Forecast and measure each budget (as `slots` of `load`): a prompt, then `tokens` tokens.

    Args:
        clock: `time.process_time` counts what the process computes, whoever else computes too: for
            shared machines, on a CPU, with experts in the page cache.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    checkpoint, vault = open_weights(folder)
    skeleton = build_skeleton(folder, checkpoint, vault=vault, **options)
    files = checkpoint.files if vault is None else [vault]
    compute = measure_compute(skeleton, config, clock)

    total = sum(x.num_experts for x in skeleton.layouts)
    budgets = sorted(budgets, key=lambda b: b * total if isinstance(b, float) else b)
    first = replace(config, memory=None, slots=budgets[0])
    model, _ = load_model(folder, config=first, **options)
    with Recorder(model, str(folder)) as recorder:
        _generate(model, prompt, tokens, clock)
    trace = recorder.trace(len(prompt))
    del model
    disk = probe_disk(files, skeleton.layouts, config.threads, io=config.io, clock=clock)
    runs = []
    for slots in budgets:
        model, _ = load_model(folder, config=replace(first, slots=slots), **options)
        streaming = streaming_of(model)
        plan, stats = streaming.plan, streaming.cache.stats
        told = forecast(plan, config, compute, disk, trace, len(prompt))
        _generate(model, prompt[:2], 4, clock)  # kernels are compiled, the self-test is made
        prompt_seconds, seconds, hits, misses = _generate(model, prompt, tokens, clock, stats)
        rate = hits / (hits + misses) if hits + misses else 1.0
        known = forecast(plan, config, compute, disk, prompt_tokens=len(prompt), hit_rate=rate)
        times = known.token.likely, seconds, rate, prompt_seconds
        runs.append(Run(plan.slots, plan.total, told, *times))
        del model, streaming
    for file in files:
        file.close()
    return Bench(str(folder), total, compute, disk, tuple(runs))


def _generate(
    model: Any,
    prompt: Sequence[int],
    tokens: int,
    clock: Callable[[], float],
    stats: Any = None,
) -> tuple[float, float, int, int]:
    """(seconds to the first token, seconds of one after it, hits and misses of those after it)."""
    start, times, before = clock(), [], (0, 0)
    for i, _ in enumerate(generate_step(mx.array(list(prompt)), model, max_tokens=tokens)):
        times.append(clock())
        if i == 0 and stats is not None:
            before = stats.hits, stats.misses
    seconds = [b - a for a, b in itertools.pairwise(times)]
    now = (stats.hits, stats.misses) if stats is not None else before
    return times[0] - start, statistics.mean(seconds), now[0] - before[0], now[1] - before[1]
