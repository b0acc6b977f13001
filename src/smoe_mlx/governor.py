"""Slots given back and taken again while a model runs: by hand, or as memory gets scarce.

What is computed does not change: see `SharedExpertCache.resize`.
"""

import contextlib
import threading
import warnings
import weakref
from dataclasses import dataclass, replace

import mlx.nn as nn

from .background import in_background
from .device import available_nbytes, max_buffer_nbytes, using_mlx
from .errors import SmoeError
from .machine import memory_pressure
from .plan import SYSTEM_NBYTES, MemoryPlan, make_plan, plan_banks
from .stats import Streaming, streaming_of

SECONDS = 1.0  # between two looks at the pressure
SCARCE, PLENTY = 0.5, 0.1  # pressure from which slots are given back, and up to which taken again
SCARCE_LOOKS, PLENTY_LOOKS = 2, 30  # so many looks in a row
STEP = 0.75  # of the slots are left each time


def resize(
    model: nn.Module, *, memory: str | int | float | None = None, slots: int | float | None = None
) -> MemoryPlan:
    """Give the experts of a loaded model more or less memory.

    From any thread, also while the model generates: it waits for the end of a token, or of a
    prompt's pass. The most useful experts stay in memory. While slots are moved, up to one array of
    the old bank (a third of it or so) is there beside the new one.

    Args:
        model: one that `load` made.
        memory: as for `load`. With neither, the plan is made from what is available now.
        slots: as for `load`.

    Returns:
        The new plan.

    Raises:
        UnsupportedModelError: the model was not loaded by `smoe_mlx.load`.
        BudgetError: it is too little. Nothing has changed then.
    """
    using_mlx()
    streaming = streaming_of(model)
    assert streaming.shape is not None
    cache = streaming.cache
    config = replace(streaming.config, memory=memory, slots=slots)
    available = 0
    if memory is None and slots is None:
        available = available_nbytes() + streaming.plan.total  # it may keep what it has
    plan = make_plan(cache.layouts, streaming.shape, config, max_buffer_nbytes(), available)
    cache.resize([b.slots for b in plan.banks])
    streaming.config, streaming.plan = config, plan
    return plan


@dataclass
class Governor:
    """Which share of its slots a model should hold, from readings of the pressure.

    Attributes:
        share: of the planned slots.
    """

    share: float = 1.0
    _scarce: int = 0
    _plenty: int = 0

    def saw(self, pressure: float) -> float:
        """`share` after another reading. Between the two thresholds, it stays as it is."""
        self._scarce = self._scarce + 1 if pressure >= SCARCE else 0
        self._plenty = self._plenty + 1 if pressure <= PLENTY else 0
        if self._scarce == SCARCE_LOOKS:
            self._scarce = 0
            self.share *= STEP
        elif self._plenty == PLENTY_LOOKS:
            self._plenty = 0
            self.share = min(1.0, self.share / STEP)
        return self.share


def govern(streaming: Streaming) -> None:
    """Watch the memory pressure on a thread of its own, as long as the model lives: give slots back
    when memory is scarce, down to one token's experts, and take them again when it is not."""
    cache, governor = weakref.ref(streaming), Governor()

    def work(stop: threading.Event) -> None:
        whole = None
        while not stop.wait(SECONDS):
            alive = cache()
            if alive is None:
                break
            # What was planned when the share was last 1 is what it is a share of.
            whole = alive.plan if governor.share == 1.0 or whole is None else whole
            with contextlib.suppress(SmoeError):  # pins, or a file that went: leave it as it is
                follow(alive, whole, governor.saw(memory_pressure()))
            del alive

    if not in_background("smoe-govern", work):
        warnings.warn("no thread could be started to watch the memory pressure.", stacklevel=2)


def follow(streaming: Streaming, whole: MemoryPlan, share: float) -> None:
    """Have this share of the slots of `whole`; no more than memory is available for."""
    plan, cache = streaming.plan, streaming.cache
    least = min(whole.slots, max(whole.expert_reads, len(whole.banks)))
    slots = max(least, round(share * whole.slots))
    if slots == plan.slots:
        return
    banks = plan_banks(cache.layouts, slots, max_buffer_nbytes())
    more = sum(b.nbytes for b in banks) - plan.slots_nbytes
    if more > 0 and available_nbytes() < more + SYSTEM_NBYTES:
        return
    cache.resize([b.slots for b in banks])
    streaming.plan = replace(plan, banks=banks)
