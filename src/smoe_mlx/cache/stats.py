"""Counters of the cache."""

from dataclasses import dataclass, field

from .bets import BetStats


@dataclass
class LayerStats:
    """Counters of one layer.

    A hit or a miss is one distinct expert that one call of the layer needed. Layers that hold all
    their experts are read as a whole and look nothing up: only `resident_calls` counts there.
    """

    hits: int = 0
    misses: int = 0
    missed_calls: int = 0
    calls: int = 0
    waves: int = 0
    resident_calls: int = 0


@dataclass
class CacheStats:
    """Counters since the cache was made."""

    layers: list[LayerStats]
    evictions: int = 0
    abandoned: int = 0
    prewarmed: int = 0
    bets: BetStats = field(default_factory=BetStats)

    @property
    def hits(self) -> int:
        return sum(x.hits for x in self.layers)

    @property
    def misses(self) -> int:
        return sum(x.misses for x in self.layers)

    @property
    def missed_calls(self) -> int:
        """Layer calls that lacked at least one expert."""
        return sum(x.missed_calls for x in self.layers)
