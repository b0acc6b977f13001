"""The search of `smoe-mlx tune`: which setting is the fastest. Knows no model and no clock."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .config import StreamingConfig
from .tuned import OPTIONS

MARGIN = 0.03  # by which another setting has to be faster to be taken
ROUNDS, FEWEST_ROUNDS = 4, 3  # that the last one has to win; where the time is over before
HOPELESS = 1.5  # times slower in the first turn: no second one
SLOTS, KERNELS = "slots", "kernels"
# What each option is tried at, one option after the other. Those of `READING` matter only while
# experts are read.
READING: dict[str, list[dict[str, Any]]] = {
    "io": [{"io": io} for io in ("pread", "direct", "mmap")],
    "threads": [{"threads": n} for n in (0, 4, 8, 16, 32)],
    "reading ahead": [
        {"lookahead": True, "spec": 0},
        {"lookahead": False, "spec": 0},
        {"lookahead": True, "spec": 2},
        {"lookahead": True, "spec": 4},
    ],
}
DECODING: dict[str, list[dict[str, Any]]] = {
    "decode": [{"decode": mode} for mode in ("auto", "exact", "wait", "lag1", "token")]
}


def all_choices(
    slots: Sequence[int], decoding: bool, kernels: bool
) -> dict[str, list[dict[str, Any]]]:
    """What is tried: slots, io, and so on. The page cache wants room and direct reads do not, so
    each is tried with more and with fewer slots as well."""
    choices: dict[str, list[dict[str, Any]]] = {SLOTS: [{SLOTS: n} for n in slots]}
    if kernels:
        choices[KERNELS] = [{KERNELS: how} for how in ("stock", "auto")]
    choices |= READING
    for io, n in (
        ("direct", max(slots)),
        ("pread", min(slots, key=lambda n: abs(2 * n - max(slots)))),
    ):
        choices["io"] = [*choices["io"], {"io": io, SLOTS: n}]
    return {**choices, **DECODING} if decoding else choices


@dataclass(frozen=True)
class Setting:
    """What is tuned: the number of slots, and options of `StreamingConfig`."""

    slots: int
    io: str = StreamingConfig.io
    threads: int = StreamingConfig.threads
    lookahead: bool = StreamingConfig.lookahead
    spec: int = StreamingConfig.spec
    decode: str = StreamingConfig.decode
    kernels: str = StreamingConfig.kernels

    @property
    def options(self) -> dict[str, Any]:
        """Without the slots: arguments of `StreamingConfig`."""
        return {name: getattr(self, name) for name in OPTIONS}

    def __str__(self) -> str:
        ahead = f"{'' if self.lookahead else 'no '}lookahead, spec {self.spec}"
        kernels = "" if self.kernels == "stock" else f", kernels {self.kernels}"
        return (
            f"{self.slots:,} slots, {self.io}, {self.threads} threads, {ahead}, "
            f"decode {self.decode}{kernels}"
        )


@dataclass(frozen=True)
class Tried:
    """One alternative: `speedup` over the best setting until then, in so many turns of each.

    Attributes:
        pays: it is faster, by more than chance.
        taken: it became the best setting: it pays, and may be taken.
    """

    name: str
    change: dict[str, Any]
    speedup: float
    turns: int
    pays: bool
    taken: bool

    @property
    def verdict(self) -> str:
        if self.pays:
            return "taken" if self.taken else "pays, with other bits"
        return "does not pay" if self.speedup < 1 + MARGIN else "may be chance"


class NoTimeError(Exception):
    """The time for measuring is over."""


@dataclass
class Search:
    """Finds the fastest setting by successive halving, one coordinate after the other.

    In each race the settings take turns; the slower half has no further ones. The last one has to
    win `ROUNDS` new rounds against the best setting (those before chose it, and some luck with it),
    in the median by more than `MARGIN`, and by more than the best setting's own turns differ.
    Coordinates are gone through until none changes any more.

    Args:
        measure: seconds that a turn takes with this setting. It raises `NoTimeError` when the time
            is over; that, and a Ctrl-C, end the search: what was found is kept.
        best: the setting to begin with, and the best one so far.
        num_experts: with so many slots nothing is read.
        choices: the changes to try, by name of the coordinate.
        allow_kernels: else kernels are measured, but not taken: they give other bits.

    Attributes:
        tried: the latest result of each alternative.
        curve: slots -> seconds of a turn, with the options that were best then.
        spreads: of each race, how the turns of one setting differ: 1.1 if by a tenth.
        ended: why before all was tried: "", "out of time" or "interrupted".
    """

    measure: Callable[[Setting], float]
    best: Setting
    num_experts: int
    choices: dict[str, list[dict[str, Any]]]
    allow_kernels: bool = False
    tried: dict[tuple[str, str], Tried] = field(default_factory=dict)
    curve: dict[int, float] = field(default_factory=dict)
    spreads: list[float] = field(default_factory=list)
    ended: str = ""

    def run(self) -> None:
        """Search until nothing gets better."""
        try:
            while True:
                before = self.best
                for name, changes in self.choices.items():
                    if name in READING and self.best.slots == self.num_experts:
                        continue
                    self._race(name, changes)
                    if name == SLOTS:
                        self._race(SLOTS, self._between())
                if self.best == before:
                    return
        except NoTimeError:
            self.ended = "out of time"
        except KeyboardInterrupt:
            self.ended = "interrupted"

    def _between(self) -> list[dict[str, Any]]:
        """Halfway to the numbers of slots beside the best one."""
        slots, best = sorted({*self.curve, self.best.slots}), self.best.slots
        beside = [n for n in (slots.index(best) - 1, slots.index(best) + 1) if 0 <= n < len(slots)]
        return [{SLOTS: (slots[n] + best) // 2} for n in beside]

    def _race(self, name: str, changes: Sequence[dict[str, Any]]) -> None:
        best = self.best
        others = {s: c for c in reversed(changes) if (s := replace(best, **c)) != best}
        turns: dict[Setting, list[float]] = {best: [], **{s: [] for s in others}}
        alive, won = list(others), 0
        try:
            for i in itertools.count():
                if not alive or won == ROUNDS:
                    break
                alone = len(alive) == 1
                # A cache that is made smaller is at once what it would have been all the time; one
                # that is made larger has to be filled first: from many slots to few.
                order = sorted([best, *alive], key=lambda s: -s.slots)
                order = order[::-1] if i % 2 and name != SLOTS else order
                for setting in order:
                    turns[setting].append(self.measure(setting))
                if alone:
                    alive = [s for s in alive if turns[s][-1] < turns[best][-1]]
                    won += len(alive)
                    continue
                alive.sort(key=lambda s: ratio_of(turns[s], turns[best]))
                least = HOPELESS if i == 0 else 1 + MARGIN
                alive = [s for s in alive if ratio_of(turns[s], turns[best]) < least]
                alive = alive[: max(1, math.ceil(len(alive) / 2))]
        finally:
            self._judge(name, best, others, turns, alive if won >= FEWEST_ROUNDS else [])

    def _judge(
        self,
        name: str,
        best: Setting,
        others: dict[Setting, dict[str, Any]],
        turns: dict[Setting, list[float]],
        winner: Sequence[Setting],
    ) -> None:
        """Take the winner if it is faster by enough, and keep what is known of the others."""
        if not turns[best]:
            return
        ratios = {s: ratio_of(turns[s], turns[best]) for s in others if turns[s]}
        margin = MARGIN
        if len(turns[best]) >= FEWEST_ROUNDS:  # by less than turns differ, it may be chance
            low, _, high = statistics.quantiles(turns[best], n=4)
            self.spreads.append(high / low)
            margin = max(MARGIN, 1 - low / high)
        for s, change in others.items():
            if s in ratios:
                pays = s in winner and ratios[s] < 1 - margin
                taken = pays and (name != KERNELS or self.allow_kernels)
                self.best = s if taken else self.best
                result = Tried(name, change, 1 / ratios[s], len(turns[s]), pays, taken)
                self.tried[name, str(change)] = result
        if name == SLOTS:
            seconds = statistics.median(turns[best])
            self.curve[best.slots] = seconds
            self.curve |= {s.slots: seconds * ratio for s, ratio in ratios.items()}


def ratio_of(mine: Sequence[float], base: Sequence[float]) -> float:
    """The median over the rounds of seconds against the other's in the same round."""
    return statistics.median(a / b for a, b in zip(mine, base, strict=False))
