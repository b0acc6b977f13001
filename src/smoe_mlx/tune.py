"""smoe-mlx tune: the fastest budget and options for a model on this machine, found by measuring.

A larger cache is not always better: it takes the room of the page cache, and where memory gets
scarce everything slows down. Nor are more threads, direct reads or bets. So the model itself
decodes text of its own, a few tokens a turn, with one setting after the other; nothing that changes
a bit of the results is tried. `Search` knows no model and no clock; `_Model` takes the turns.
"""

import itertools
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_tokenizer

from .config import StreamingConfig
from .device import max_buffer_nbytes
from .errors import BudgetError
from .forward.decode import computes_beside_the_host
from .generate import generate_step
from .hub import find_model
from .load import install, install_bets, limit_memory, open_weights, plan_for
from .plan import BankPlan, format_bytes, plan_banks
from .skeleton import build_skeleton
from .store.cuda import make_uploader
from .store.reader import ExpertReader
from .tuned import OPTIONS, Tuned, remember

SECONDS = 120.0
MARGIN = 0.03  # by which another setting has to be faster to be taken
ROUNDS, FEWEST_ROUNDS = 4, 3  # that the last one has to win; where the time is over before
BUSY = 1.25  # turns of one setting differ by so much: the machine does other things
HOPELESS = 1.5  # times slower in the first turn: no second one
CONFIRMING = 0.2  # of the time is for the best setting against the defaults
TURNS = 60  # that should fit into the time
FEWEST_TOKENS, MOST_TOKENS = 2, 32  # of a turn
PROMPT_TOKENS = 64
SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)  # of the slots that the memory holds
SLOTS = "slots"
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
    "decode": [{"decode": mode} for mode in ("auto", "exact", "lag1", "token")]
}
TEXT = (
    "The harbour was built for forty ships and holds four hundred. Every spring the council argues "
    "about a second pier, every summer somebody draws it, and every autumn the storms take a part "
    "of the first one away. The fishermen have an opinion about this, which is that"
)


def all_choices(slots: Sequence[int], decoding: bool) -> dict[str, list[dict[str, Any]]]:
    """What is tried: slots, io, and so on. The page cache wants room and direct reads do not, so
    each is tried with more and with fewer slots as well."""
    choices = {SLOTS: [{SLOTS: n} for n in slots], **READING}
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

    @property
    def options(self) -> dict[str, Any]:
        """Without the slots: arguments of `StreamingConfig`."""
        return {name: getattr(self, name) for name in OPTIONS}


@dataclass(frozen=True)
class Tried:
    """One alternative: `speedup` over the best setting until then, in so many turns of each."""

    name: str
    change: dict[str, Any]
    speedup: float
    turns: int
    taken: bool

    @property
    def verdict(self) -> str:
        if self.taken:
            return "taken"
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
        measure: seconds a token in a turn with this setting. It raises `NoTimeError` when the time
            is over; that, and a Ctrl-C, end the search: what was found is kept.
        best: the setting to begin with, and the best one so far.
        num_experts: with so many slots nothing is read.
        choices: the changes to try, by name of the coordinate.

    Attributes:
        tried: the latest result of each alternative.
        curve: slots -> seconds a token, with the options that were best then.
        start_seconds: a token with the first setting, in the first race.
        speedup: of the best setting over the first one.
        spreads: of each race, how the turns of one setting differ: 1.1 if by a tenth.
        ended: why before all was tried: "", "out of time" or "interrupted".
    """

    measure: Callable[[Setting], float]
    best: Setting
    num_experts: int
    choices: dict[str, list[dict[str, Any]]]
    tried: dict[tuple[str, str], Tried] = field(default_factory=dict)
    curve: dict[int, float] = field(default_factory=dict)
    start_seconds: float = 0.0
    speedup: float = 1.0
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
                alive.sort(key=lambda s: _ratio(turns[s], turns[best]))
                least = HOPELESS if i == 0 else 1 + MARGIN
                alive = [s for s in alive if _ratio(turns[s], turns[best]) < least]
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
        ratios = {s: _ratio(turns[s], turns[best]) for s in others if turns[s]}
        margin = MARGIN
        if len(turns[best]) >= FEWEST_ROUNDS:  # by less than turns differ, it may be chance
            low, _, high = statistics.quantiles(turns[best], n=4)
            self.spreads.append(high / low)
            margin = max(MARGIN, 1 - low / high)
        for s in winner:
            if ratios[s] < 1 - margin:
                self.best = s
                self.speedup /= ratios[s]
        for s, change in others.items():
            if s in ratios:
                result = Tried(name, change, 1 / ratios[s], len(turns[s]), s == self.best)
                self.tried[name, str(change)] = result
        seconds = statistics.median(turns[best])
        self.start_seconds = self.start_seconds or seconds
        if name == SLOTS:
            self.curve[best.slots] = seconds
            self.curve |= {s.slots: seconds * ratio for s, ratio in ratios.items()}


def _ratio(mine: Sequence[float], base: Sequence[float]) -> float:
    """The median over the rounds of seconds against the other's in the same round."""
    return statistics.median(a / b for a, b in zip(mine, base, strict=False))


# ---- the turns -----------------------------------------------------------------------------------


class _Model:
    """A model that decodes text of its own, with a setting that changes between turns."""

    def __init__(
        self,
        folder: Path,
        config: StreamingConfig,
        trust_remote_code: bool,
        seconds: float,
        progress: Callable[[float, str], None],
    ):
        self.seconds, self.progress, self.start = seconds, progress, time.perf_counter()
        self.share = 1 - CONFIRMING
        self.turns = 0
        checkpoint, vault = open_weights(folder)
        self.files = checkpoint.files if vault is None else [vault]
        self.skeleton = build_skeleton(folder, checkpoint, None, trust_remote_code, vault)
        self.config, self.plan = config, plan_for(self.skeleton, config)
        limit_memory(self.plan)
        model = self.model = self.skeleton.model
        reader = ExpertReader(self.files, config.threads, config.io, make_uploader())
        self.streaming = model._streaming = install(self.skeleton, reader, self.plan, config)
        self.streaming.config = config
        mx.eval(model)
        if vault is not None:
            checkpoint.close()
        self.now = Setting(self.plan.slots, **{name: getattr(config, name) for name in OPTIONS})
        self.tokenizer = load_tokenizer(folder)
        self.prompt = self.tokenizer.encode(TEXT)[: min(PROMPT_TOKENS, self.plan.context // 2)]
        self.tokens = FEWEST_TOKENS
        self.cache: Any = None

    def close(self) -> None:
        self.streaming.cache.reader.close()
        for file in self.files:
            file.close()

    def passed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self.start

    def banks(self, slots: int) -> tuple[BankPlan, ...]:
        return plan_banks(self.streaming.cache.layouts, slots, max_buffer_nbytes())

    def apply(self, setting: Setting) -> None:
        """Let the model go on with this setting."""
        cache, now = self.streaming.cache, self.now
        if setting.slots != now.slots:
            banks = self.banks(setting.slots)
            cache.resize([b.slots for b in banks])
            self.streaming.plan = replace(self.plan, banks=banks)
        if (setting.io, setting.threads) != (now.io, now.threads):
            cache.settle()
            old, uploader = cache.reader, make_uploader()
            cache.reader = ExpertReader(self.files, setting.threads, setting.io, uploader)
            old.close()
        if (setting.lookahead, setting.spec) != (now.lookahead, now.spec):
            install_bets(self.skeleton, replace(self.config, **setting.options))
        if setting.decode != now.decode:
            self.streaming.decoding.mode = setting.decode
        self.now = setting

    def read_prompt(self) -> float:
        """Begin anew with the prompt; returns its tokens a second."""
        self.cache = make_prompt_cache(self.model)
        start = time.perf_counter()
        steps = generate_step(
            mx.array(self.prompt), self.model, max_tokens=1, prompt_cache=self.cache
        )
        self.last = next(iter(steps))[0]
        self.used = len(self.prompt)
        return len(self.prompt) / (time.perf_counter() - start)

    def decode(self, tokens: int) -> float:
        """Seconds a token, of so many or as many as there is time for in a turn.

        The text is sampled: a greedy one repeats itself.
        """
        if self.used + tokens + 2 > self.plan.context:
            self.read_prompt()
        most = self.seconds / TURNS
        times: list[float] = []
        steps = generate_step(
            mx.array([self.last]),
            self.model,
            max_tokens=tokens + 1,
            sampler=make_sampler(0.8),
            prompt_cache=self.cache,
        )
        for token, _ in steps:
            times.append(time.perf_counter())
            self.last = token
            if len(times) > FEWEST_TOKENS and times[-1] - times[0] > most:
                break
        steps.close()  # type: ignore[attr-defined]
        self.used += len(times)
        return (times[-1] - times[0]) / (len(times) - 1)

    def turn(self, setting: Setting) -> float:
        """Seconds a token, after a few that are not counted.

        Raises:
            NoTimeError: `share` of the time is over.
        """
        if self.passed() > self.share * self.seconds:
            raise NoTimeError
        grows = setting.slots > self.now.slots
        self.apply(setting)
        stats = self.streaming.cache.stats
        before = stats.evictions
        self.decode(max(1, self.tokens // 4))
        for _ in range(4 * grows):  # until the new slots are filled
            if stats.evictions > before:
                break
            self.decode(self.tokens)
        seconds = self.decode(self.tokens)
        self.turns += 1
        self.progress(self.passed(), f"{1 / seconds:.2f} tok/s with {_short(setting)}")
        return seconds


def _short(s: Setting) -> str:
    ahead = f"ahead {'1' if s.lookahead else '0'}+{s.spec}"
    return f"{s.slots:,} slots, {s.io}, {s.threads} threads, {ahead}, {s.decode}"


# ---- the result ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One number of slots: the memory planned with it, and tokens a second."""

    slots: int
    memory: int
    tps: float


@dataclass(frozen=True)
class Tuning:
    """What was measured and found.

    Attributes:
        model, num_experts: the name as given, and its routed experts over all layers.
        start, best: the settings without tuning and with it.
        start_tps, best_tps: their tokens a second, in turns side by side at the end.
        prompt_tokens, start_prompt_tps, best_prompt_tps: of the prompt; 0 if there was no time.
        curve: by slots.
        tried: the alternatives, with their speed against the best setting until then.
        spread: how much turns of one setting differed: 1.1 by a tenth.
        turns, seconds: what it took.
        ended: why not all was tried, or "".
    """

    model: str
    num_experts: int
    start: Setting
    best: Setting
    start_tps: float
    best_tps: float
    prompt_tokens: int
    start_prompt_tps: float
    best_prompt_tps: float
    curve: tuple[Point, ...]
    tried: tuple[Tried, ...]
    turns: int
    seconds: float
    spread: float
    ended: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{'slots':>16}{'memory':>10}{'tok/s':>9}"]
        most = max((p.tps for p in self.curve), default=1.0)
        for p in self.curve:
            share = 100 * p.slots / self.num_experts
            mark = " <" if p.slots == self.best.slots else ""
            lines.append(
                f"{p.slots:>7,} ({share:5.1f} %){format_bytes(p.memory):>10}{p.tps:>9.2f} "
                f"{'#' * round(40 * p.tps / most)}{mark}"
            )
        options = [t for t in self.tried if t.name != SLOTS]
        if options:
            lines += ["", f"{'option':<36}{'speed':>8}{'turns':>7}"]
        for t in options:
            what = ", ".join(f"{k}={v}" for k, v in t.change.items())
            lines.append(f"{what:<36}{t.speedup:>7.2f}x{t.turns:>7}  {t.verdict}")
        ended = f"; {self.ended}, so not all was tried" if self.ended else ""
        lines += ["", f"{self.turns} turns in {self.seconds:.0f} s{ended}"]
        if self.spread > BUSY:
            lines.append(
                f"turns of one setting differed by {100 * (self.spread - 1):.0f} %: the machine is "
                "busy with other things. Tune again when it is not."
            )
        if self.best == self.start:
            lines.append(
                f"best: what is done anyway ({_short(self.start)}), {self.start_tps:.2f} tok/s"
            )
        else:
            lines.append(
                f"best: {_short(self.best)}: {self.best_tps:.2f} tok/s, without tuning "
                f"{self.start_tps:.2f} ({self.best_tps / self.start_tps:.2f}x)"
            )
        if self.start_prompt_tps and self.best_prompt_tps:
            lines.append(
                f"a prompt of {self.prompt_tokens}: {self.best_prompt_tps:.1f} tok/s, without "
                f"tuning {self.start_prompt_tps:.1f}"
            )
        return "\n".join(lines)


def tune(
    path_or_repo: str | os.PathLike[str],
    config: StreamingConfig | None = None,
    seconds: float = SECONDS,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[float, str], None] = lambda passed, what: None,
) -> Tuning:
    """Find the fastest slots and options for a model within `seconds`, and remember them: `load`
    uses them from then on, unless it is asked for anything else.

    All settings give the same bits. A Ctrl-C ends it; the best so far is kept.

    Args:
        path_or_repo: as for `load`.
        config: `memory` limits it (None: what this machine has free); options that it names
            otherwise than by default are where the search begins.
        seconds: of this, a fifth goes to a last comparison with the defaults.
        revision: as for `load`.
        trust_remote_code: as for `load`.
        progress: called with the seconds passed, and what was measured last.

    Returns:
        What was measured and found. `print` it for a table.

    Raises:
        BudgetError: too little memory, or too little for one token's experts.
        ValueError: slots, or what changes bits, is asked for.
        ModelNotFoundError, UnsupportedModelError, CheckpointError, VaultError: as `load`.
    """
    config = replace(config or StreamingConfig(), tuned=False, usage=None, govern=False)
    if config.slots is not None or config.decode == "lossy" or config.hot_per_layer:
        raise ValueError("tune finds the slots; no slots, hot_per_layer or decode='lossy' with it")
    folder = find_model(path_or_repo, revision)
    model = _Model(folder, config, trust_remote_code, seconds, progress)
    try:
        found = _tune(model, str(path_or_repo))
    finally:
        model.close()
    start, best, memory = found.start, found.best, model.plan.memory
    same = best.slots == start.slots and best.io == start.io  # direct reads get more slots
    slots, tps = None if same else best.slots, (found.best_tps, found.start_tps)
    tuned = Tuned(slots, best.options, memory, *tps, date.today().isoformat())
    try:
        remember(folder, None if best == start and memory is None else tuned)
    except OSError as e:
        warnings.warn(f"what was found cannot be remembered: {e}", stacklevel=2)
    return found


def _tune(model: _Model, name: str) -> Tuning:
    plan, start = model.plan, model.now
    if plan.slots < plan.expert_reads:
        raise BudgetError(
            f"{plan.slots:,} slots are fewer than the {plan.expert_reads:,} experts of one token, "
            f"and then nothing else matters: {format_bytes(plan.useful, up=True)} is the least."
        )
    mx.random.seed(0)
    model.read_prompt()  # kernels are compiled, the self-test is made
    model.decode(2)
    prompt_tps = [model.read_prompt(), 0.0]
    token = model.decode(4)
    fit = 0.6 * model.seconds / TURNS / token
    model.tokens = max(FEWEST_TOKENS, min(MOST_TOKENS, int(fit), plan.context // 4))
    shares = {max(plan.expert_reads, round(share * plan.slots)) for share in SHARES}
    slots = sorted({plan.slots, *shares}, reverse=True)
    choices = all_choices(slots, computes_beside_the_host())
    search = Search(model.turn, start, plan.num_experts, choices)
    search.run()
    model.share = 1.0
    token = search.start_seconds or token
    tps, best = (1 / token, search.speedup / token), search.best
    spread = statistics.median(search.spreads or [1.0])
    if search.ended != "interrupted":
        believed = start if spread > BUSY else best
        tps, best = _confirm(model, start, best) or (tps, believed)
    if search.ended != "interrupted" and model.passed() < model.seconds:
        model.apply(best)
        prompt_tps[1] = model.read_prompt()
    points = [
        Point(n, replace(plan, banks=model.banks(n)).total, 1 / search.curve[n])
        for n in sorted(search.curve)
    ]
    return Tuning(
        model=name,
        num_experts=plan.num_experts,
        start=start,
        best=best,
        start_tps=tps[0],
        best_tps=tps[1],
        prompt_tokens=len(model.prompt),
        start_prompt_tps=prompt_tps[0],
        best_prompt_tps=prompt_tps[1],
        curve=tuple(points),
        tried=tuple(search.tried.values()),
        turns=model.turns,
        seconds=model.passed(),
        spread=spread,
        ended=search.ended,
    )


def _confirm(
    model: _Model, start: Setting, best: Setting
) -> tuple[tuple[float, float], Setting] | None:
    """(tokens a second of both, the best one): what was found has to be faster side by side too.

    None if there is no time for it. Then it is believed, unless the machine is busy.
    """
    turns: dict[Setting, list[float]] = {start: [], best: []}
    try:
        for _ in range(FEWEST_ROUNDS):
            for setting in sorted(turns, key=lambda s: -s.slots):
                turns[setting].append(model.turn(setting))
    except (NoTimeError, KeyboardInterrupt):
        return None
    before, after = (1 / statistics.median(turns[s]) for s in (start, best))
    if _ratio(turns[best], turns[start]) > 1:
        best, after = start, before
    return (before, after), best
