"""Are the kernels for many rows right on this machine, and faster than mlx-lm's operations?"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from . import selftest
from .experts import ABSENT, FusedExperts, Geometry
from .prompt import PromptExperts
from .selftest import LEAST_SPEEDUP, SLOTS, Experts, Verdict

SIZES = (0, 1, 17, 65, 0, 16, 2, 3)  # rows of each slot: below, at and above the ends of tiles
TIMED_ROWS = (8, 32, 256)  # an expert


@dataclass(frozen=True)
class PromptVerdict(Verdict):
    """What a self-test found; `speedup`: rows an expert -> how many times as fast."""

    def __str__(self) -> str:
        return super().__str__().replace(" tokens", " rows an expert")

    @property
    def min_rows(self) -> int | None:
        """Calls of at least so many rows an expert are faster by the kernels; None: none is."""
        least = None
        for rows in reversed(TIMED_ROWS):
            if self.speedup.get(rows, 0) < LEAST_SPEEDUP:
                break
            least = rows
        return least


def ragged_call(geometry: Geometry) -> tuple[mx.array, mx.array]:
    """(x [52, D], slots [52, 2]) with `SIZES` rows of each slot, in no order."""
    slots = mx.concatenate([mx.full((n,), e, mx.uint32) for e, n in enumerate(SIZES)])
    slots = mx.random.permutation(slots, key=mx.random.key(7)).reshape(-1, 2)
    x = mx.random.normal((slots.shape[0], geometry.hidden), key=mx.random.key(8))
    return x.astype(geometry.dtype), slots


def prompt_fault(way: Experts, arrays: selftest.Arrays, x: mx.array, slots: mx.array) -> str:
    """What is wrong beyond rounding, or ""."""
    y = way(arrays, x, slots, None)
    back = way(arrays, x[::-1], slots[::-1], None)[::-1]
    fewer = way(arrays, x[:40], slots[:40], None)
    if not mx.array_equal(y, back).item() or not mx.array_equal(y[:40], fewer).item():
        return "a row depends on the others of a call"
    sick = mx.arange(x.shape[0])[:, None] == 5
    nan = way(arrays, mx.where(sick, mx.array(float("nan"), x.dtype), x), slots, None)
    others = mx.where(sick[..., None], mx.array(0, y.dtype), mx.array(1, y.dtype))
    if not mx.isnan(nan[5]).all().item():
        return "NaN of one token is lost"
    if not mx.array_equal(mx.where(others > 0, nan, 0), mx.where(others > 0, y, 0)).item():
        return "NaN of one token reaches another"
    gone = (slots == 3) | (slots == 7)
    missing = mx.where(slots == 3, ABSENT, SLOTS).astype(mx.uint32)
    left = way(arrays, x, mx.where(gone, missing, slots), None)
    if not mx.array_equal(left, mx.where(gone[..., None], mx.array(0, y.dtype), y)).item():
        return "a missing slot is not left out"
    return ""


def self_test(prompt: PromptExperts, stock: Experts, activation: nn.Module) -> PromptVerdict:
    """Compare the kernels with the reference and with `stock`, and time both."""
    g = prompt.geometry
    fused = FusedExperts(g, max_tokens=0)
    fused.prompt = prompt
    way = selftest.operations(g, activation, fused)
    arrays = selftest.random_experts(g, SLOTS)
    x, slots = ragged_call(g)
    expected = selftest.reference(g, activation, arrays, x, slots)
    mine, theirs = (selftest.error_of(f(arrays, x, slots, None), expected) for f in (way, stock))
    fault = selftest.error_fault(mine, theirs) or prompt_fault(way, arrays, x, slots)
    arrays = selftest.random_experts(g, SLOTS, seed=1)  # as in selftest.self_test
    speedup = {}
    for rows in () if fault else TIMED_ROWS:
        quick, slow = selftest.time_ways(
            g, arrays, [way, stock], rows, top_k=SLOTS, rounds=3, weighted=False
        )
        speedup[rows] = slow / quick
    return PromptVerdict(fault, mine.rms, theirs.rms, speedup)


def try_launch(prompt: PromptExperts) -> None:
    """Compile and run both kernels once: what fails here would fail while a model runs."""
    g = prompt.geometry
    rows = mx.zeros((16,), mx.uint32)
    mx.eval(prompt(selftest.random_experts(g, 1), mx.zeros((1, g.hidden), g.dtype), rows, rows, 8))
