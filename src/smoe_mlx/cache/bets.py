"""Bets: experts that are read before anybody needs them, and whether that pays for a layer."""

from dataclasses import dataclass

from ..store.streamer import Reading

WEIGHT = 0.05  # of the latest outcome in a layer's score
ENOUGH = 0.3  # a layer whose share of bets that were needed is less stops betting...
TRY_EVERY = 32  # ...but for one call in so many


@dataclass
class BetStats:
    """Counters of bets: `used` were needed and there in time, `late` needed and still being read,
    `wasted` gave up their slot unused, `cancelled` were not begun when their layer had passed."""

    issued: int = 0
    used: int = 0
    late: int = 0
    wasted: int = 0
    cancelled: int = 0


@dataclass
class Bet:
    """One expert that is being read, or was, without having been asked for.

    `counts`: a `Judge` takes it into account.
    """

    slot: int
    reading: Reading
    counts: bool = True
    judged: bool = False
    given_up: bool = False


class Judge:
    """Decides whether a layer may bet, from how its bets went."""

    def __init__(self) -> None:
        self.score = 1.0
        self._calls = 0

    def allows(self, waiting: float) -> bool:
        """Whether to bet in this call.

        Args:
            waiting: the share f of the time in which the model waits for reads. Reading early can
                save no more than the rest of it, and what is read for nothing delays other reads:
                where bets are as many as misses and the share p of them is needed, (1 - p) f must
                be less than 1 - f.
        """
        self._calls += 1
        enough = max(ENOUGH, 2 - 1 / max(waiting, 0.5))  # up to a half, that is 0
        return self.score >= enough or self._calls % TRY_EVERY == 0

    def saw(self, bet: Bet, needed: bool) -> None:
        """The layer of a bet came, and needed it or not."""
        if not bet.judged:
            bet.judged = True
            if bet.counts:
                self.score += WEIGHT * (needed - self.score)
