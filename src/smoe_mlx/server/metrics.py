"""Counters of the server, as Prometheus text."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ..stats import Stats


class Metrics:
    """What was asked and answered since the start. Threads may count at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds = {"prompt": 0.0, "generation": 0.0}
        self._tps = {"prompt": 0.0, "generation": 0.0}  # of the answer now or last

    def count(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._counts[name] += n

    @property
    def in_flight(self) -> int:
        """Connections under way."""
        return self._counts["in_flight"]

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While an answer is being generated."""
        self.count("busy")
        try:
            yield
        finally:
            self.count("busy", -1)

    @contextmanager
    def speed(self, prompt: int) -> Iterator[Callable[[Any], None]]:
        """One answer, after `prompt` tokens to prefill; the function takes each response."""
        start = time.perf_counter()
        first = 0.0

        def seen(response: Any) -> None:
            nonlocal first
            now = time.perf_counter()
            if not first:
                first = now
                self._seconds["prompt"] += now - start
                self._tps["prompt"] = prompt / (now - start)
            elif now > first:
                self._tps["generation"] = (response.generation_tokens - 1) / (now - first)

        try:
            yield seen
        finally:
            if first:
                self._seconds["generation"] += time.perf_counter() - first

    def text(self, queue: int, session_nbytes: int, models: dict[str, Stats]) -> str:
        """Prometheus text exposition format, version 0.0.4."""
        with self._lock:
            counts = dict(self._counts)
        lines: list[str] = []

        def family(name: str, kind: str, help_: str, samples: dict[str, float]) -> None:
            lines.append(f"# HELP smoe_{name} {help_}")
            lines.append(f"# TYPE smoe_{name} {kind}")
            lines.extend(f"smoe_{name}{labels} {value}" for labels, value in samples.items())

        def total(name: str, help_: str) -> None:
            family(f"{name}_total", "counter", help_, {"": counts.get(name, 0)})

        def gauge(name: str, help_: str, value: float) -> None:
            family(name, "gauge", help_, {"": value})

        total("requests", "Requests received.")
        total("errors", "Requests answered with an error.")
        total("cancelled", "Answers stopped because the client went away.")
        total("prompt_tokens", "Tokens of prompts.")
        total("cached_tokens", "Of them, those that a session held.")
        total("generated_tokens", "Tokens generated.")
        for what, seconds in self._seconds.items():
            family(f"{what}_seconds_total", "counter", "Time spent.", {"": seconds})
        for what, tps in self._tps.items():
            gauge(f"{what}_tokens_per_second", "Of the answer now or last.", round(tps, 3))
        gauge("queue", "Requests that wait.", queue)
        gauge("busy", "Answers being generated.", counts.get("busy", 0))
        gauge("in_flight", "Connections under way, this one included.", self.in_flight)
        gauge("sessions_bytes", "KV caches kept in memory.", session_nbytes)
        gauge("active_memory_bytes", "What MLX holds.", mx.get_active_memory())
        gauge("peak_memory_bytes", "Most that MLX held.", mx.get_peak_memory())
        for name, kind, help_ in (
            ("hits", "counter", "Experts that were in memory."),
            ("misses", "counter", "Experts that had to be read."),
            ("bytes_read", "counter", "Bytes of experts read."),
            ("wait_seconds", "counter", "Time that the model waited for reads."),
            ("hit_rate", "gauge", "Share of experts that were in memory."),
        ):
            samples = {f'{{model="{_escape(m)}"}}': getattr(s, name) for m, s in models.items()}
            suffix = "_total" if kind == "counter" else ""
            family(f"expert_{name}{suffix}", kind, help_, samples)
        family(
            "planned_memory_bytes",
            "gauge",
            "Memory planned for the model.",
            {f'{{model="{_escape(m)}"}}': s.plan.total for m, s in models.items()},
        )
        tuned = {m: s.tuned for m, s in models.items() if s.tuned}
        family(
            "tuned_info",
            "gauge",
            "Models that do as smoe-mlx tune found to be fastest.",
            {f'{{model="{_escape(m)}",settings="{_escape(t)}"}}': 1 for m, t in tuned.items()},
        )
        return "\n".join(lines) + "\n"


def _escape(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
