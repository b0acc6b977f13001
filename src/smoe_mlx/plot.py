"""Plots of what this package measures, with matplotlib (an optional extra, imported when needed).

Each function returns the figure, which a notebook shows (after `%matplotlib inline`), and writes it
to a file if it is given one. Figures have no background and letters of middle grey, for light and
dark pages. Colours are Okabe and Ito's (Color Universal Design, 2008), which colour-blind people
tell apart; lines have marks besides.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .errors import SmoeError
from .panel import BUCKETS, Panel, TokenTimes
from .replay import OPTIMAL, Report, overlap, uses
from .search import SLOTS
from .trace import Trace
from .tune import Tuning

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKS = "os^Dvx"
GREY = "#808080"
# Of the panel's buckets. Grey is too close to green for some, so that the last two are hatched.
BUCKET_STYLES = [{"color": c} for c in COLOURS] + [
    {"facecolor": "none", "edgecolor": GREY, "hatch": h, "linewidth": 0} for h in ("....", "////")
]
DISTANCES = (1, 2, 4, 8, 16, 32, 64)
File = str | os.PathLike[str] | None


def plot_lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    xlabel: str,
    ylabel: str,
    path: File = None,
    *,
    axes: Any = None,
    dashed: Sequence[str] = (),
) -> Any:
    """Draw lines: {label: (x, y)}. Labels tell units. y begins at 0.

    Args:
        path: a PNG, SVG or PDF file to write.
        axes: matplotlib's, of a figure of `new_figure`; None: of a figure of its own.
        dashed: labels of lines that are a bound or a reference: grey, dashed, without marks.

    Returns:
        The figure.

    Raises:
        SmoeError: matplotlib is missing, or the file cannot be written.
    """
    if axes is None:
        axes = new_figure(7).subplots()
    coloured = [label for label in series if label not in dashed]
    for label, (x, y) in series.items():
        style: dict[str, Any] = {"color": GREY, "linestyle": "--"}
        if label not in dashed:
            i = coloured.index(label) % len(COLOURS)
            style = {"color": COLOURS[i], "marker": MARKS[i]}
        axes.plot(x, y, label=label, **style)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    _in_grey(axes)
    if len(series) > 1:
        _legend(axes)
    return _finished(axes.figure, path)


def plot_report(report: Report, path: File = None) -> Any:
    """Draw hit rates and bytes read a token over slots, decoding. As `plot_lines`."""
    figure = new_figure()
    part = "decode" if report.decode_tokens else "prompt"
    tokens = report.decode_tokens or report.prompt_tokens
    mine = [p for p in report.policies if p != OPTIMAL]
    hits, read = {}, {}
    for policy in (*mine, OPTIMAL):
        results = report.of(policy)
        share = [100 * r.slots / report.num_experts for r in results]
        counts = [getattr(r, part) for r in results]
        label = "optimal (Belady)" if policy == OPTIMAL else policy
        hits[label] = share, [100 * c.hit_rate for c in counts]
        read[label] = share, [c.nbytes / tokens / 1e6 for c in counts]
    what = "decoding" if part == "decode" else "the prompt"
    for axes, series, label in zip(
        figure.subplots(1, 2),
        (hits, read),
        (f"lookups that hit, {what} (%)", f"read a token, {what} (MB)"),
        strict=True,
    ):
        x = "experts in memory (% of all)"
        plot_lines(series, x, label, axes=axes, dashed=["optimal (Belady)"])
    figure.axes[0].set_ylim(top=100)
    figure.suptitle(f"{report.model}: {tokens:,} tokens", color=GREY)
    return _finished(figure, path)


def plot_routing(trace: Trace, path: File = None) -> Any:
    """Draw how a router behaves: uses of each expert, overlap between tokens, coverage.

    Left, for each layer, its experts from the most to the least used. Middle, the share of a
    token's experts that a token some way before had too. Right, the share of the routing that went
    to the most used experts. Bands reach from the lowest to the highest layer. As `plot_lines`.
    """
    called = [i for i, k in enumerate(trace.top_k) if k]
    counts = [np.sort(x)[::-1] / max(x.sum(), 1) for x in uses(trace)]
    experts = max(trace.num_experts)
    figure = new_figure(13)
    left, middle, right = figure.subplots(1, 3)

    heat = np.full((trace.num_layers, experts), np.nan)
    for i in called:
        heat[i, : len(counts[i])] = counts[i] * len(counts[i])
    image = left.imshow(heat, aspect="auto", cmap="cividis", interpolation="nearest")
    bar = figure.colorbar(image, ax=left)
    bar.set_label("uses (times an even share)", color=GREY)
    bar.ax.tick_params(colors=GREY)
    left.set_xlabel("experts of a layer, most used first")
    left.set_ylabel("MoE layer")
    _in_grey(left, grid=False)

    tokens = min(np.bincount(np.repeat(*trace.calls.T))[called].tolist(), default=0)
    distances = [d for d in DISTANCES if d < tokens]
    shares = 100 * np.array([np.array(overlap(trace, d))[called] for d in distances])
    chance = 100 * float(np.mean([trace.top_k[i] / trace.num_experts[i] for i in called]))
    _band(middle, distances, shares, "mean of layers")
    middle.axhline(chance, color=GREY, linestyle="--", label="chance")
    middle.set_xscale("log", base=2)
    middle.set_xticks(distances, [str(d) for d in distances])
    middle.set_xlabel("distance of the two tokens (tokens)")
    middle.set_ylabel("experts in common (%)")

    at = np.linspace(0, 1, 65)
    rows = [np.interp(at, np.linspace(0, 1, len(c) + 1), [0, *np.cumsum(c)]) for c in counts]
    _band(right, 100 * at, 100 * np.array([rows[i] for i in called]).T, "mean of layers", mark="")
    right.plot([0, 100], [0, 100], color=GREY, linestyle="--", label="if all were used alike")
    right.set_xlabel("most used experts of a layer (%)")
    right.set_ylabel("of the layer's routing (%)")
    for axes in (middle, right):
        axes.set_ylim(0, 100)
        _in_grey(axes)
        _legend(axes)
    return _finished(figure, path)


def plot_panel(panel: Panel, path: File = None) -> Any:
    """Draw one bar a token, the milliseconds of each bucket stacked. As `plot_lines`."""
    figure = new_figure()
    axes = figure.subplots()
    bottom = [0.0] * len(panel.tokens)
    for (name, label), style in zip(BUCKETS.items(), BUCKET_STYLES, strict=True):
        heights = [1e3 * getattr(t, name) for t in panel.tokens]
        axes.bar(range(1, len(heights) + 1), heights, 1.0, bottom, label=label, **style)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("token")
    axes.set_ylabel("time with the panel (ms)")
    axes.margins(x=0)
    _in_grey(axes)
    _legend(axes, loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    return _finished(figure, path)


def plot_timeline(token: TokenTimes, path: File = None) -> Any:
    """Draw one token of a panel from left to right, a row for each MoE layer. As `plot_lines`."""
    layers = 1 + max((x.layer for x in token.laps if x.layer is not None), default=0)
    figure = new_figure(height=min(1.6 + 0.3 * (layers + 1), 16))
    axes = figure.subplots()
    for (name, label), style in zip(BUCKETS.items(), BUCKET_STYLES, strict=True):
        for row in range(layers + 1):
            here = [x for x in token.laps if (name, row) == (x.bucket, _row(x.layer, layers))]
            spans = [(1e3 * x.start, 1e3 * x.seconds) for x in here]
            axes.broken_barh(spans, (row - 0.4, 0.8), label=label if row == 0 else None, **style)
    axes.set_yticks(range(layers + 1), [*map(str, range(layers)), "after"])
    axes.set_ylim(layers + 0.6, -0.6)
    axes.set_xlim(0, 1e3 * token.wall)
    axes.set_xlabel("time since the token began, with the panel (ms)")
    axes.set_ylabel("MoE layer")
    _in_grey(axes)
    _legend(axes, loc="center left", bbox_to_anchor=(1, 0.5))
    return _finished(figure, path)


def plot_tuning(tuning: Tuning, path: File = None) -> Any:
    """Draw the time of a turn over slots, and the speed of each option. As `plot_lines`."""
    options = [t for t in tuning.tried if t.name != SLOTS][::-1]
    figure = new_figure()
    left, *right = figure.subplots(1, 2 if options else 1, squeeze=False)[0]
    share = [100 * p.slots / tuning.num_experts for p in tuning.curve]
    seconds = [p.seconds for p in tuning.curve]
    left.plot(share, seconds, color=COLOURS[0], marker="o", label="measured")
    for p in tuning.curve:
        if p.slots == tuning.best.slots:
            x = 100 * p.slots / tuning.num_experts
            left.plot([x], [p.seconds], color=COLOURS[1], marker="s", linestyle="", label="best")
    left.set_xlabel("experts in memory (% of all)")
    turn = tuning.start_turn
    left.set_ylabel(f"a turn of {turn.prompt_tokens:,} + {turn.generation_tokens:,} tokens (s)")
    left.set_ylim(0, 1.1 * max(seconds, default=1.0))
    names = [", ".join(f"{k}={v}" for k, v in t.change.items()) for t in options]
    colours = [COLOURS[1] if t.taken else COLOURS[0] for t in options]
    for axes in right:
        axes.barh(names, [t.speedup for t in options], color=colours)
        axes.axvline(1.0, color=GREY, linestyle="--", label="the best setting then")
        axes.set_xlabel("speed against it (orange: taken)")
    for axes in (left, *right):
        _in_grey(axes)
        _legend(axes, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return _finished(figure, path)


def new_figure(width: float = 10, height: float = 4.2) -> Any:
    """An empty figure, in inches. Raises SmoeError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SmoeError("a plot needs matplotlib: pip install 'smoe-mlx[plots]'") from None
    return Figure((width, height), dpi=100, facecolor="none", layout="constrained")


def _row(layer: int | None, layers: int) -> int:
    return layers if layer is None else layer


def _band(axes: Any, x: Any, rows: np.ndarray, label: str, mark: str = MARKS[0]) -> None:
    """The mean of each of `rows` [x, layers], and a band from their least to their most."""
    axes.plot(x, rows.mean(1), color=COLOURS[0], marker=mark, label=label)
    band = {"color": COLOURS[0], "alpha": 0.25, "linewidth": 0, "label": "lowest to highest layer"}
    axes.fill_between(x, rows.min(1), rows.max(1), **band)


def _finished(figure: Any, path: File) -> Any:
    if path is not None:
        try:
            figure.savefig(path, dpi=150, transparent=True)
        except (OSError, ValueError) as e:
            raise SmoeError(f"{path}: the plot cannot be written ({e})") from e
    return figure


def _in_grey(axes: Any, grid: bool = True) -> None:
    """Lines and letters that show on any background."""
    axes.set_facecolor("none")
    if grid:
        axes.grid(color=GREY, alpha=0.3)
        axes.set_axisbelow(True)
    axes.tick_params(colors=GREY)
    axes.xaxis.label.set_color(GREY)
    axes.yaxis.label.set_color(GREY)
    for spine in axes.spines.values():
        spine.set_color(GREY)


def _legend(axes: Any, **place: Any) -> None:
    axes.legend(framealpha=0, labelcolor=GREY, **place)
