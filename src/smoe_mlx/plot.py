"""Plots of reports, with matplotlib (an optional extra, imported when a plot is asked for)."""

import os
from typing import Any

from .errors import SmoeError
from .panel import BUCKETS, Panel
from .replay import OPTIMAL, Report
from .tune import SLOTS, Tuning

# Of middle lightness, and told apart by marks as well: legible on white and on black.
COLOURS = ("#3b82f6", "#e07b00", "#12a150", "#c03dc0", "#0e9aa7", "#d64545")
MARKS = "os^Dvx"
GREY = "#808080"


def plot_report(report: Report, path: str | os.PathLike[str]) -> None:
    """Write hit rates and bytes read a token over slots, decoding, as PNG, SVG or PDF.

    Raises:
        SmoeError: matplotlib is missing, or the file cannot be written.
    """
    figure = new_figure()
    part = "decode" if report.decode_tokens else "prompt"
    tokens = report.decode_tokens or report.prompt_tokens
    left, right = figure.subplots(1, 2)
    mine = [p for p in report.policies if p != OPTIMAL]
    for i, policy in enumerate([*mine, OPTIMAL]):
        results = report.of(policy)
        style: dict[str, Any] = {"color": COLOURS[i % 6], "marker": MARKS[i % 6], "label": policy}
        if policy == OPTIMAL:
            style |= {"color": GREY, "marker": "", "linestyle": "--", "label": "optimal (Belady)"}
        share = [100 * r.slots / report.num_experts for r in results]
        counts = [getattr(r, part) for r in results]
        left.plot(share, [100 * c.hit_rate for c in counts], **style)
        right.plot(share, [c.nbytes / tokens / 1e6 for c in counts], **style)
    what = "decoding" if part == "decode" else "the prompt"
    for axes, label in (
        (left, f"lookups that hit, {what} (%)"),
        (right, f"read a token, {what} (MB)"),
    ):
        axes.set_xlabel("experts in memory (% of all)")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        _in_grey(axes)
    left.set_ylim(top=100)
    figure.suptitle(f"{report.model}: {tokens:,} tokens", color=GREY)
    _save(figure, path)


def plot_panel(panel: Panel, path: str | os.PathLike[str]) -> None:
    """Write one bar a token, the milliseconds of each bucket stacked, as PNG, SVG or PDF.

    Raises:
        SmoeError: matplotlib is missing, or the file cannot be written.
    """
    figure = new_figure()
    axes = figure.subplots()
    bottom = [0.0] * len(panel.tokens)
    colours = (*COLOURS, "#b8a100", GREY)  # the panel's own work in grey
    for (name, label), colour in zip(BUCKETS.items(), colours, strict=True):
        heights = [1e3 * getattr(t, name) for t in panel.tokens]
        numbers = range(1, len(heights) + 1)
        axes.bar(numbers, heights, 1.0, bottom, color=colour, label=label)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set_xlabel("token")
    axes.set_ylabel("time with the panel (ms)")
    axes.margins(x=0)
    _in_grey(axes, loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    _save(figure, path)


def plot_tuning(tuning: Tuning, path: str | os.PathLike[str]) -> None:
    """Write tokens a second over slots, and the speed of each option, as PNG, SVG or PDF.

    Raises:
        SmoeError: matplotlib is missing, or the file cannot be written.
    """
    options = [t for t in tuning.tried if t.name != SLOTS][::-1]
    figure = new_figure()
    left, *right = figure.subplots(1, 2 if options else 1, squeeze=False)[0]
    share = [100 * p.slots / tuning.num_experts for p in tuning.curve]
    left.plot(share, [p.tps for p in tuning.curve], color=COLOURS[0], marker="o", label="measured")
    for p in tuning.curve:
        if p.slots == tuning.best.slots:
            x = 100 * p.slots / tuning.num_experts
            left.plot([x], [p.tps], color=COLOURS[1], marker="s", linestyle="", label="best")
    left.set_xlabel("experts in memory (% of all)")
    left.set_ylabel("decoding (tok/s)")
    left.set_ylim(bottom=0)
    names = [", ".join(f"{k}={v}" for k, v in t.change.items()) for t in options]
    colours = [COLOURS[1] if t.taken else COLOURS[0] for t in options]
    for axes in right:
        axes.barh(names, [t.speedup for t in options], color=colours)
        axes.axvline(1.0, color=GREY, linestyle="--", label="the best setting then")
        axes.set_xlabel("speed against it (orange: taken)")
    for axes in (left, *right):
        _in_grey(axes)
    _save(figure, path)


def new_figure(width: float = 10, height: float = 4.2) -> Any:
    """An empty figure, in inches. Raises SmoeError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SmoeError("a plot needs matplotlib: pip install 'smoe-mlx[plots]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    try:
        figure.savefig(path, dpi=150, transparent=True)
    except (OSError, ValueError) as e:
        raise SmoeError(f"{path}: the plot cannot be written ({e})") from e


def _in_grey(axes: Any, **legend_place: Any) -> None:
    """Lines and letters that show on any background; the figure itself is transparent."""
    axes.grid(color=GREY, alpha=0.3)
    axes.tick_params(colors=GREY)
    axes.xaxis.label.set_color(GREY)
    axes.yaxis.label.set_color(GREY)
    for spine in axes.spines.values():
        spine.set_color(GREY)
    legend = axes.legend(framealpha=0, **legend_place)
    for text in legend.get_texts():
        text.set_color(GREY)
