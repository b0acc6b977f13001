"""Panel: what `instrument` measured, as a dataclass that prints itself as a table."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from .cache.bets import BetStats
from .plan import format_bytes
from .store.probe import DiskProbe

BUCKETS = {
    "dense": "attention and dense work",
    "routing": "gate, and reading its choice",
    "reads": "waiting for reads",
    "experts": "experts",
    "head": "LM head",
    "sampling": "sampling",
    "host": "Python",
    "panel": "this panel itself",
}


class Lap(NamedTuple):
    """A stretch of a token's time: `seconds` of one bucket, from `start` seconds after its begin.

    `layer` is the MoE layer that it led to or was in (an index of `Panel.layers`), or None: before
    and after all of them. Waiting for reads comes first in the stretch it was found in.
    """

    bucket: str
    layer: int | None
    start: float
    seconds: float


@dataclass
class TokenTimes:
    """One forward of one position: seconds by bucket, which add up to `wall`, and its lookups.

    Attributes:
        dense: evaluating all that is neither gate, nor expert, nor LM head.
        routing: evaluating the gate and reading its choice on the host; also predictions.
        reads: waiting for expert reads. Experts that are in memory may compute meanwhile.
        experts: evaluating experts that did not overlap with reads.
        head, sampling: the LM head; from logits to a token on the host.
        host: Python, building the graph and keeping the cache, and the caller between tokens.
        panel: what the panel itself counts and predicts.
        nbytes: read from files, and finished within this token.
        hits, misses: as in `Stats`.
        laps: the same times in their order, one after the other without a gap.
    """

    wall: float = 0.0
    dense: float = 0.0
    routing: float = 0.0
    reads: float = 0.0
    experts: float = 0.0
    head: float = 0.0
    sampling: float = 0.0
    host: float = 0.0
    panel: float = 0.0
    nbytes: int = 0
    hits: int = 0
    misses: int = 0
    laps: list[Lap] = field(default_factory=list, repr=False)


@dataclass
class PanelLayer:
    """One MoE layer while decoding.

    Attributes:
        hits, misses: as in `LayerStats`; both are 0 where all experts are in memory.
        overlap: share of a token's experts that the token before had too; None before the second.
    """

    path: str
    hits: int = 0
    misses: int = 0
    overlap: float | None = None


@dataclass
class Panel:
    """What `instrument` measured. Prints itself as a table.

    Attributes:
        tokens: each forward of one position. Prompts, and forwards of several, are not in it.
        layers: hits, misses and overlap of each MoE layer.
        most_used: at index r - 1: the share of routed experts that were among the r experts which
            their layer used most, over all tokens of the panel.
        predicted: (r, the share of routed experts that were among the r which the lookahead
            predicted from the layer before); empty where there is no lookahead.
        bets: experts that were read ahead.
        plain_tps: tokens a second of the same tokens without the panel. Whoever knows it sets it.
        disk: the disk's bandwidth, if it was asked for.
    """

    tokens: list[TokenTimes] = field(default_factory=list)
    layers: list[PanelLayer] = field(default_factory=list)
    most_used: list[float] = field(default_factory=list)
    predicted: list[tuple[int, float]] = field(default_factory=list)
    bets: BetStats = field(default_factory=BetStats)
    plain_tps: float | None = None
    disk: DiskProbe | None = None

    def total(self, name: str) -> Any:
        """The sum over all tokens of a field of `TokenTimes`."""
        return sum(getattr(t, name) for t in self.tokens)

    @property
    def tps(self) -> float:
        """Tokens a second, with the panel."""
        return len(self.tokens) / self.total("wall") if self.tokens else 0.0

    @property
    def hit_rate(self) -> float | None:
        """Share of lookups that found their expert in memory; None if there was none."""
        lookups = self.total("hits") + self.total("misses")
        return self.total("hits") / lookups if lookups else None

    @property
    def waiting_rate(self) -> float | None:
        """Bytes read per second of waiting; more than the disk gives if reads were hidden."""
        return self.total("nbytes") / self.total("reads") if self.total("reads") else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. Laps are left out: they are many."""
        out = asdict(replace(self, tokens=[replace(t, laps=[]) for t in self.tokens]))
        for token in out["tokens"]:
            del token["laps"]
        out["predicted"] = [list(x) for x in self.predicted]
        out["seconds"] = {name: self.total(name) for name in ("wall", *BUCKETS)}
        for name in ("tps", "hit_rate", "waiting_rate"):
            out[name] = getattr(self, name)
        return out

    def __str__(self) -> str:
        if not self.tokens:
            return "instrument panel: no token was decoded"
        n, wall = len(self.tokens), self.total("wall")
        plain = "" if self.plain_tps is None else f", {self.plain_tps:.1f} tok/s without it"
        lines = [
            f"{n:,} tokens: {self.tps:.1f} tok/s with this panel{plain}",
            "The panel evaluates at every boundary, which takes time: read shares, not speeds.",
            "",
            f"{'':30}{'ms/token':>10}{'share':>9}",
        ]
        for name, label in BUCKETS.items():
            seconds = self.total(name)
            bar = "█" * round(30 * seconds / wall)
            lines.append(f"{label:30}{1e3 * seconds / n:10.3f}{100 * seconds / wall:7.1f} %  {bar}")
        lines += [f"{'wall time':30}{1e3 * wall / n:10.3f}{100:7.1f} %".rstrip(), ""]
        return "\n".join([*lines, *self._reading(), *self._coverage(), "", *self._by_layer()])

    def _reading(self) -> list[str]:
        n, rate = len(self.tokens), self.waiting_rate
        nbytes, bets = self.total("nbytes"), self.bets
        hits = "" if self.hit_rate is None else f"; {100 * self.hit_rate:.1f} % hits"
        lines = [f"read a token      {format_bytes(nbytes / n)}{hits}"]
        if rate is not None:
            over_all = nbytes / self.total("wall") / 1e9
            lines.append(
                f"bandwidth         {rate / 1e9:.2f} GB/s while waiting, {over_all:.2f} over all"
            )
        if self.disk is not None:
            lines.append(f"the disk's best   {self.disk}")
        lines.append(
            f"read ahead        {bets.issued:,}: {bets.used:,} in time, {bets.late:,} late, "
            f"{bets.wasted:,} for nothing, {bets.cancelled:,} not begun"
        )
        return lines

    def _coverage(self) -> list[str]:
        lines = []
        if self.most_used:
            e = len(self.most_used)
            ranks = sorted({max(1, round(e * share)) for share in (0.0625, 0.125, 0.25, 0.5)})
            parts = [f"{r} hold {100 * self.most_used[r - 1]:.0f} %" for r in ranks]
            lines.append(f"most used         of {e} experts {', '.join(parts)} of the routing")
        if self.predicted:
            parts = [f"top {r} hold {100 * share:.0f} %" for r, share in self.predicted]
            lines.append(f"lookahead         {', '.join(parts)} of the next layer's routing")
        return lines

    def _by_layer(self) -> list[str]:
        lines = ["layer      hits   misses   hit rate   as the token before"]
        for i, x in enumerate(self.layers):
            lookups = x.hits + x.misses
            rate = f"{100 * x.hits / lookups:8.1f} %" if lookups else " in memory"
            same = "-" if x.overlap is None else f"{100 * x.overlap:.1f} %"
            lines.append(f"{i:>5} {x.hits:>9,} {x.misses:>8,} {rate} {same:>21}")
        return lines
