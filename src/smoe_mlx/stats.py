"""Counters of a streamed model, as a dataclass that prints itself."""

from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .cache.bets import BetStats
from .cache.experts import SharedExpertCache
from .cache.stats import LayerStats
from .config import StreamingConfig
from .errors import UnsupportedModelError
from .forward.decode import Decoding
from .kernels.choose import KernelChooser
from .plan import MemoryPlan, ModelShape, format_bytes
from .tuned import Tuned


@dataclass
class PrefillStats:
    """How prompts went through the model: in how many layer-major passes, or why in none."""

    passes: int = 0
    fallback: str = ""


@dataclass
class DraftStats:
    """Counters of speculative decoding.

    Attributes:
        passes: passes that checked drafts.
        drafted, accepted: tokens that were drafted, and those of them that came out.
        plain_passes: passes without drafts though they were asked for: there were none, or passes
            with drafts were not faster.
        note: why there could not be any, or "".
    """

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    plain_passes: int = 0
    note: str = ""


@dataclass
class Streaming:
    """What a streamed model carries besides its modules. `resize` puts another plan here."""

    cache: SharedExpertCache
    plan: MemoryPlan
    decoding: Decoding
    kernels: KernelChooser
    hot_per_layer: int = 0
    prefill: PrefillStats = field(default_factory=PrefillStats)
    drafts: DraftStats = field(default_factory=DraftStats)
    config: StreamingConfig = field(default_factory=StreamingConfig)
    shape: ModelShape | None = None
    tuned: Tuned | None = None


@dataclass(frozen=True)
class Stats:
    """Counters since the model was loaded.

    Attributes:
        hits, misses: distinct experts that a call of a layer needed and found, or had to read.
            Layers that hold all their experts look nothing up.
        evictions: experts that made room for others.
        bytes_read, reads: what came from the files, and in how many system calls.
        wait_seconds: time in which the model waited for reads.
        calls: layer calls that looked at the routing.
        waves: groups of experts that were worked through; more than `calls` if slots ran short.
        resident_calls: layer calls that needed no look at the routing.
        io: how experts are read: "pread", "direct" or "mmap".
        prefill_passes: times that a prompt, or as much of it as the memory plan takes at once, went
            through the model layer by layer.
        prefill_fallback: why prompts go chunk by chunk instead, or "".
        decoded: tokens decoded in each mode, as far as `stream_generate` decoded them.
        failed_passes: forwards that were done again because an expert was missing, or came later
            than a device waits.
        decode_fallback: why the model is decoded only the exact way, or "".
        dropped: experts that `decode="lossy"` left out. Unless 0, answers are not the model's own.
        kernels: what computes the experts of few tokens, and what the self-test of the kernels
            found.
        tuned: what `smoe-mlx tune` found and was done, or "".
        peak_memory: most bytes that MLX held, of all it did in this process.
        plan: what was planned.
        prewarmed: experts that were read in idle time, because earlier runs used them most.
        bets: experts that were read ahead, before their layer asked for them.
        drafts: speculative decoding.
        layers: the counters of each MoE layer.
    """

    hits: int
    misses: int
    evictions: int
    bytes_read: int
    reads: int
    wait_seconds: float
    calls: int
    waves: int
    resident_calls: int
    io: str
    prefill_passes: int
    prefill_fallback: str
    decoded: dict[str, int]
    failed_passes: int
    decode_fallback: str
    dropped: int
    kernels: str
    tuned: str
    peak_memory: int
    plan: MemoryPlan
    prewarmed: int
    bets: BetStats
    drafts: DraftStats
    layers: tuple[LayerStats, ...]

    @property
    def hit_rate(self) -> float:
        """Share of lookups that found their expert in memory; 1.0 if there was none."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        out = asdict(self)
        out["hit_rate"] = self.hit_rate
        out["plan"] = self.plan.as_dict()
        return out

    def __str__(self) -> str:
        n = self.plan.num_experts
        lines = [
            f"experts in slots  {self.plan.slots:,} of {n:,} ({100 * self.plan.slots / n:.1f} %)",
            f"hits / misses     {self.hits:,} / {self.misses:,} ({100 * self.hit_rate:.1f} % hits)",
            f"evictions         {self.evictions:,}",
            f"read              {format_bytes(self.bytes_read)} in {self.reads:,} reads"
            + {"pread": "", "direct": " past the page cache", "mmap": " by mmap"}[self.io],
            f"waited for reads  {self.wait_seconds:.2f} s",
            f"read ahead        {self.bets.issued:,}: {self.bets.used:,} in time, "
            f"{self.bets.late:,} late, {self.bets.wasted:,} for nothing, "
            f"{self.bets.cancelled:,} not begun",
            f"read when idle    {self.prewarmed:,} experts",
            f"layer calls       {self.calls:,} by routing ({self.waves:,} waves), "
            f"{self.resident_calls:,} without",
            f"prompts           {self.prefill_passes:,} passes layer by layer"
            + (f"; chunk by chunk: {self.prefill_fallback}" if self.prefill_fallback else ""),
            "decoded           "
            + (", ".join(f"{n:,} {mode}" for mode, n in self.decoded.items() if n) or "by mlx-lm")
            + (f"; {self.failed_passes:,} passes done again" if self.failed_passes else "")
            + (f"; only exact: {self.decode_fallback}" if self.decode_fallback else ""),
            f"experts by        {self.kernels}",
            *([f"as tuned          {self.tuned}"] if self.tuned else []),
            f"peak memory       {format_bytes(self.peak_memory)} "
            f"(plan {format_bytes(self.plan.total)})",
        ]
        d = self.drafts
        if d != DraftStats():
            lines.append(
                f"drafts            {d.accepted:,} of {d.drafted:,} tokens accepted in "
                f"{d.passes:,} passes; {d.plain_passes:,} passes without"
                + (f"; {d.note}" if d.note else "")
            )
        if self.dropped:
            lines.append(f"LOSSY             {self.dropped:,} experts left out: not exact answers")
        return "\n".join(lines)


def streaming_of(model: nn.Module) -> Streaming:
    """The streaming part of a model that `smoe_mlx.load` made.

    Raises:
        UnsupportedModelError: the model is not streamed.
    """
    streaming: Streaming | None = getattr(model, "_streaming", None)
    if streaming is None:
        raise UnsupportedModelError("this model was not loaded by smoe_mlx.load")
    return streaming


def stats(model: nn.Module) -> Stats:
    """The counters of a model that `smoe_mlx.load` made.

    Args:
        model: the model.

    Returns:
        A copy of the counters, which does not change any more. `print` it for a table.

    Raises:
        UnsupportedModelError: the model is not streamed.
    """
    streaming = streaming_of(model)
    cache, reader = streaming.cache, streaming.cache.reader
    layers = tuple(LayerStats(**asdict(x)) for x in cache.stats.layers)
    return Stats(
        hits=cache.stats.hits,
        misses=cache.stats.misses,
        evictions=cache.stats.evictions,
        bytes_read=reader.stats.bytes,
        reads=reader.stats.reads,
        wait_seconds=reader.stats.wait_seconds,
        calls=sum(x.calls for x in layers),
        waves=sum(x.waves for x in layers),
        resident_calls=sum(x.resident_calls for x in layers),
        io=reader.io,
        prefill_passes=streaming.prefill.passes,
        prefill_fallback=streaming.prefill.fallback,
        decoded=dict(streaming.decoding.tokens),
        failed_passes=streaming.decoding.optimistic.failed + streaming.decoding.waiting.late,
        decode_fallback=streaming.decoding.optimistic.refused,
        dropped=streaming.decoding.dropped,
        kernels=str(streaming.kernels),
        tuned=str(streaming.tuned or ""),
        peak_memory=mx.get_peak_memory(),
        plan=streaming.plan,
        prewarmed=cache.stats.prewarmed,
        bets=BetStats(**asdict(cache.stats.bets)),
        drafts=DraftStats(**asdict(streaming.drafts)),
        layers=layers,
    )
