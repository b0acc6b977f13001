"""Plots: legible on white and on black, told apart by the colour-blind, axes with their units."""

import itertools
import sys

import matplotlib.image
import mlx.core as mx
import numpy as np
import pytest
from conftest import random_tokens

import smoe_mlx
from smoe_mlx import SmoeError, instrument
from smoe_mlx.generate import generate_step
from smoe_mlx.load import load_model
from smoe_mlx.panel import BUCKETS
from smoe_mlx.plot import (
    BUCKET_STYLES,
    COLOURS,
    GREY,
    plot_lines,
    plot_panel,
    plot_report,
    plot_routing,
    plot_timeline,
)
from smoe_mlx.replay import report
from smoe_mlx.trace import Recorder

# Machado, Oliveira and Fernandes, A Physiologically-based Model for Simulation of Color Vision
# Deficiency (IEEE TVCG 15(6), 2009), severity 1, on linear RGB.
DEFICIENCIES = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                   [0.004733, 0.691367, 0.303900]],
    "none": np.eye(3),
}  # fmt: skip


def linear(colour):
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def luminance(colour):
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def lab(rgb):
    """CIE L*a*b* of linear sRGB, white point D65."""
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.fixture(scope="module")
def figures(tiny):
    """name -> function of a path that draws one of each kind of plot."""
    config = smoe_mlx.StreamingConfig(slots=0.4)
    model = load_model(tiny("qwen3_moe", "affine"), config=config)[0]

    def run(n=12):
        for _ in generate_step(mx.array(random_tokens(20)), model, max_tokens=n):
            pass

    with Recorder(model, "tiny") as recorder:
        run()
    trace = recorder.trace(20)
    with instrument(model) as panel:
        run()
    lines = {"a": ([1, 2], [3, 4]), "b": ([1, 2], [4, 3])}
    return {
        "report": lambda path=None: plot_report(report(trace, ["lru"], [0.25, 0.5]), path),
        "routing": lambda path=None: plot_routing(trace, path),
        "panel": lambda path=None: plot_panel(panel, path),
        "timeline": lambda path=None: plot_timeline(panel.tokens[3], path),
        "lines": lambda path=None: plot_lines(lines, "x (s)", "y (MB)", path, dashed=["b"]),
    }


NAMES = ["report", "routing", "panel", "timeline", "lines"]


@pytest.mark.parametrize("name", NAMES)
def test_axes_have_labels_and_the_figure_no_background(name, figures, tmp_path):
    figure = figures[name](tmp_path / "x.png")
    for axes in figure.axes:
        assert axes.get_ylabel(), "an axis without a label"
        assert axes.get_xlabel() or axes.get_label() == "<colorbar>"
        for text in (axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels()):
            if text.get_text():
                assert text.get_color() == GREY, f"{text} does not show on white or on black"
    image = matplotlib.image.imread(tmp_path / "x.png")
    assert image[0, 0, 3] == 0, "not transparent"
    assert image[..., 3].max() == 1, "nothing is drawn"


@pytest.mark.parametrize("name", NAMES)
def test_without_matplotlib_every_plot_says_what_to_install(name, figures, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SmoeError, match=r"pip install 'smoe-mlx\[plots\]'"):
        figures[name]()


def test_every_colour_shows_on_light_and_on_dark_pages():
    for colour in (*COLOURS, GREY):
        assert 1.05 / (luminance(colour) + 0.05) > 2.2, f"{colour} on white"
        assert (luminance(colour) + 0.05) / (luminance("#0d1117") + 0.05) > 3, f"{colour} on dark"


@pytest.mark.parametrize("kind", DEFICIENCIES)
def test_the_colour_blind_tell_colours_apart(kind):
    seen = {c: lab(DEFICIENCIES[kind] @ linear(c)) for c in COLOURS}
    for a, b in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[a] - seen[b]) > 10, f"{a} and {b} look alike"


def test_a_timeline_shows_all_of_a_token(figures):
    axes = figures["timeline"]().axes[0]
    spans = [box for c in axes.collections for box in (p.get_extents() for p in c.get_paths())]
    covered = sum(box.width for box in spans)
    assert covered == pytest.approx(axes.get_xlim()[1], rel=1e-6)
    assert len({round(box.y0, 3) for box in spans}) == len(axes.get_yticks())
    assert len(BUCKET_STYLES) == len(BUCKETS)
    assert len({str(style) for style in BUCKET_STYLES}) == len(BUCKETS)
