"""How single tokens are decoded: which way, chosen by measuring.

Waiting at each layer for the host costs time that an optimistic pass saves; each miss costs an
optimistic pass what it has to do again. Which is more depends on the machine, the model, and how
much of it is in memory, and none of that is known beforehand. So the ways that the miss rate allows
are tried on a few tokens each, now and then, and the fastest one is taken. All give the same bits.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cache.experts import SharedExpertCache
from .optimistic import OptimisticDecoder
from .waiting import Decoded, Sample, WaitingDecoder

# "exact" looks at the routing layer by layer; "wait": waiting.py; the others: optimistic.py.
LAGS: dict[str, int | None] = {"lag1": 1, "token": None}
MODES = ("auto", "exact", "wait", *LAGS, "lossy")

NO_BETS = ", no bets"  # predicting may cost more than what it saves
WINDOW = 32  # tokens until the choice is looked at again
TRIAL = 8  # tokens for which a way is tried
WARM = 4  # before those: a way's first tokens take longer
RETRY = 1024  # tokens after which all are tried again
MOST_AT_ONCE, AT_ONCE_SECONDS = 8, 0.1  # of `run`: they come out together
SHORTEST_SECONDS = AT_ONCE_SECONDS / MOST_AT_ONCE  # of a token: with less there are no more of them
MOST_MISSED_CALLS = 0.4  # the share of layer calls with a miss up to which `lag1` is tried...
MOST_MISSES = 1.0  # ...and the number of them in a token up to which `token` is


class Chooser:
    """Picks a way for each token from how long tokens took. Knows no models and no clocks.

    Args:
        layers: MoE layers of the model.
        device_waits: "wait" is among the modes.
        looks_ahead: the first two modes are tried without bets as well ("exact, no bets").
    """

    def __init__(self, layers: int, device_waits: bool = False, looks_ahead: bool = False):
        self.layers = layers
        self._always = ["exact", "wait"] if device_waits else ["exact"]
        if looks_ahead:
            self._always += [mode + NO_BETS for mode in self._always]
        self.way = "exact"
        self.seconds: dict[str, float] = {}  # way -> median of its latest tokens
        self._plan = [("exact", WINDOW)]
        self._taken: list[float] = []
        self._missed = 0.0
        self._since_trial = RETRY

    def took(self, seconds: float, missed_calls: float) -> None:
        """The token was decoded in this `way`, and so many of its layer calls lacked an expert."""
        self._taken.append(seconds)
        self._missed += missed_calls
        self._since_trial += 1
        way, tokens = self._plan[0]
        if len(self._taken) < tokens:
            return
        self.seconds[way] = statistics.median(self._taken)
        missed = self._missed / len(self._taken)
        self._taken, self._missed = [], 0.0
        self._plan.pop(0)
        if not self._plan:
            self._decide(missed)
        self.way = self._plan[0][0]

    @property
    def mode(self) -> str:
        return self.way.removesuffix(NO_BETS)

    @property
    def left(self) -> int:
        """Tokens until the way may change."""
        return self._plan[0][1] - len(self._taken)

    def _decide(self, missed: float) -> None:
        """missed: layer calls of a token that lacked an expert."""
        ways = list(self._always)
        if missed <= MOST_MISSED_CALLS * self.layers:
            ways.append("lag1")
        if missed <= MOST_MISSES:
            ways.append("token")
        untried = any(w not in self.seconds for w in ways) or self._since_trial >= RETRY
        if len(ways) > 1 and untried:
            self._since_trial = 0
            self._plan = [(w, n) for w in ways for n in (WARM, TRIAL)]
        else:
            best = min((w for w in ways if w in self.seconds), key=self.seconds.__getitem__)
            self._plan = [(best, WINDOW)]


def computes_beside_the_host() -> bool:
    """Whether the default device works on while the host does something else. A CPU does not, and
    there waiting costs nothing that could be saved (benchmarks/sync.py)."""
    return mx.default_device() != mx.cpu


class Decoding:
    """Decodes the tokens of one streamed model.

    Args:
        looks_ahead: switch modules have been told to bet.

    Attributes:
        mode: "auto", or the one mode that is used ("auto" is "exact" on a CPU).
        tokens: how many were decoded with each mode.
        dropped: experts that were left out (only with "lossy").
    """

    def __init__(
        self,
        model: nn.Module,
        experts: SharedExpertCache,
        mode: str = "auto",
        looks_ahead: bool = False,
    ):
        self.mode = "exact" if mode == "auto" and not computes_beside_the_host() else mode
        self.optimistic = OptimisticDecoder(model, experts)
        self.waiting = WaitingDecoder(experts)
        self.tokens = dict.fromkeys(MODES[1:], 0)
        self.dropped = 0
        self._experts = experts
        self._chooser = Chooser(len(experts.layouts), experts.handover.waits, looks_ahead)
        self._start, self._missed, self._timed = 0.0, 0, False
        self._pace = AT_ONCE_SECONDS  # seconds that a token took, lately, of those begun early

    def step(self, model: nn.Module, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Logits [B, n, vocab] after tokens [B, n]. `done` follows when the first ones are there.

        Only single tokens are decoded in other ways than the exact one.

        Raises:
            ExpertReadError, CheckpointChangedError: an expert could not be read.
        """
        self._timed = False
        if tokens.shape[1] != 1 or self._experts.holds_all:
            logits: mx.array = model(tokens, cache=cache)
            return logits
        if self.mode != "auto":
            return self._step(model, tokens, cache, self.mode)
        self._timed = True
        with self._bets_as_chosen():
            return self._step(model, tokens, cache, self._chooser.mode)

    @contextlib.contextmanager
    def _bets_as_chosen(self) -> Iterator[None]:
        without = self.mode == "auto" and self._chooser.way.endswith(NO_BETS)
        self._experts.bets_allowed = not without
        try:
            yield
        finally:
            self._experts.bets_allowed = True

    def _step(self, model: nn.Module, tokens: mx.array, cache: list[Any], mode: str) -> mx.array:
        if self._timed:
            self._start = time.perf_counter()
            self._missed = self._experts.stats.missed_calls
        mode = self._way(model, mode)
        self.tokens[mode] += 1
        logits: mx.array
        if mode == "exact":
            logits = model(tokens, cache=cache)
        elif mode == "wait":
            logits = self.waiting.step(model, tokens, cache)
        elif mode == "lossy":
            logits, dropped = self.optimistic.lossy_step(model, tokens, cache)
            self.dropped += dropped
        else:
            logits = self.optimistic.step(model, tokens, cache, LAGS[mode])
        return logits

    def run(
        self, model: nn.Module, token: mx.array, cache: list[Any], sample: Sample, count: int
    ) -> Sequence[Decoded]:
        """Decode some tokens, each begun while the one before is computed; `count` at most.

        Args:
            token: [B, 1], the first.
            sample: see `Sample` (waiting.py).

        Returns none where that is not possible: then `step` it is.

        Raises:
            ExpertReadError, CheckpointChangedError: the caches are then as before.
        """
        auto = self.mode == "auto"
        mode = self._chooser.mode if auto else self.mode
        if mode != "wait" or not self._experts.handover.waits or self._experts.holds_all:
            return []
        if auto:
            count = min(count, self._chooser.left)
        count = min(count, MOST_AT_ONCE, int(AT_ONCE_SECONDS / self._pace))
        if count < 2 or self._way(model, mode) != mode:
            self._pace = max(0.9 * self._pace, SHORTEST_SECONDS)  # it is tried again
            return []
        start, missed = time.perf_counter(), self._experts.stats.missed_calls
        with self._bets_as_chosen():
            done = self.waiting.run(model, token, cache, sample, count)
        self.tokens[mode] += len(done)
        pace = (time.perf_counter() - start) / len(done)
        self._pace = max(pace, SHORTEST_SECONDS)
        for _ in done if auto else ():
            self._chooser.took(pace, (self._experts.stats.missed_calls - missed) / len(done))
        return done

    def _way(self, model: nn.Module, mode: str) -> str:
        """In which mode a token can be decoded, if not in this one."""
        # What looks at each call wants true ones, and in order.
        observed = self._experts.trace is not None or hasattr(type(model), "timed_sampling")
        if mode != "exact" and (observed or not self.optimistic.ready(model)):
            return "exact"
        return "exact" if mode == "wait" and not self.waiting.possible else mode

    def done(self) -> None:
        """The token of the last `step` is there."""
        timed, self._timed = self._timed, False
        if timed and not self.optimistic.refused:
            missed = self._experts.stats.missed_calls - self._missed
            self._chooser.took(time.perf_counter() - self._start, missed)
