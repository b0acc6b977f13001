"""smoe-mlx tune: the fastest budget and options for a model on this machine, found by measuring.

A larger cache is not always better: it takes the room of the page cache, and where memory gets
scarce everything slows down. Nor are more threads, direct reads or bets. So the model itself
reads a prompt and decodes text of its own, a turn with one setting after the other. What counts is
how long a prompt and an answer of given lengths take. `Search` chooses, `_Model` takes the turns.
"""

import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_tokenizer

from .config import StreamingConfig
from .device import max_buffer_nbytes
from .errors import BudgetError
from .forward.decode import computes_beside_the_host
from .generate import generate_step
from .hub import find_model
from .layers.lookahead import look_up
from .load import install, install_bets, limit_memory, open_weights, plan_for
from .plan import BankPlan, format_bytes, plan_banks
from .search import (
    FEWEST_ROUNDS,
    KERNELS,
    SLOTS,
    NoTimeError,
    Search,
    Setting,
    Tried,
    all_choices,
    ratio_of,
)
from .skeleton import build_skeleton
from .store.cuda import make_uploader
from .store.reader import ExpertReader
from .tuned import OPTIONS, Tuned, remember

SECONDS = 120.0
PROMPT_TOKENS, GENERATION_TOKENS = 512, 256  # of the turn that should be fast
BUSY = 1.25  # turns of one setting differ by so much: the machine does other things
CONFIRMING = 0.2  # of the time is for the best setting against the defaults
TURNS = 60  # that should fit into the time
PROMPTS = 40  # so many should fit as well: else none are read during the search
FEWEST_TOKENS, MOST_TOKENS = 2, 32  # that are decoded in a turn
SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)  # of the slots that the memory holds
TEXT = (
    "The harbour was built for forty ships and holds four hundred. Every spring the council argues "
    "about a second pier, every summer somebody draws it, and every autumn the storms take a part "
    "of the first one away. The fishermen have an opinion about this, which is that"
)


# ---- the turns -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """A prompt and its answer.

    Attributes:
        prompt_tokens, generation_tokens: of the prompt and of the answer.
        prompt_seconds: until the first token.
        token_seconds: of each one after it.
    """

    prompt_tokens: int
    generation_tokens: int
    prompt_seconds: float
    token_seconds: float

    @property
    def seconds(self) -> float:
        """What counts."""
        return self.prompt_seconds + self.generation_tokens * self.token_seconds

    def __str__(self) -> str:
        prompt, decoding = self.prompt_tokens / self.prompt_seconds, 1 / self.token_seconds
        return f"{self.seconds:.2f} s (prompt {prompt:.1f}, decoding {decoding:.2f} tok/s)"


def _reading(setting: Setting) -> tuple[int, str, int]:
    """What a prompt depends on."""
    return setting.slots, setting.io, setting.threads


def _typical(turns: Sequence[Turn]) -> Turn:
    """The medians of the turns of one setting."""
    return replace(
        turns[0],
        prompt_seconds=statistics.median(t.prompt_seconds for t in turns),
        token_seconds=statistics.median(t.token_seconds for t in turns),
    )


class _Model:
    """A model that takes turns, with a setting that changes between them.

    Attributes:
        until: seconds since the beginning after which there are no more turns.
        first: the turn before the search.
        each_prompt: whether there is time to read a prompt with each setting. Else it counts as in
            `first`.
        prompts: the latest seconds of a prompt with (slots, io, threads): nothing else matters.
        turns: all of each setting.
    """

    first: Turn

    def __init__(
        self,
        folder: Path,
        config: StreamingConfig,
        trust_remote_code: bool,
        seconds: float,
        prompt_tokens: int,
        generation_tokens: int,
        progress: Callable[[float, str], None],
    ):
        self.seconds, self.progress, self.start = seconds, progress, time.perf_counter()
        self.until = (1 - CONFIRMING) * seconds
        self.each_prompt = True
        self.prompts: dict[tuple[int, str, int], float] = {}
        self.turns: dict[Setting, list[Turn]] = {}
        checkpoint, vault = open_weights(folder)
        self.files = checkpoint.files if vault is None else [vault]
        self.skeleton = build_skeleton(folder, checkpoint, None, trust_remote_code, vault)
        self.config, self.plan = config, plan_for(self.skeleton, config)
        limit_memory(self.plan)
        model = self.model = self.skeleton.model
        reader = ExpertReader(self.files, config.threads, config.io, make_uploader())
        # All of them is stock, but what kernels there are is known.
        both = replace(config, kernels="auto")
        self.streaming = model._streaming = install(self.skeleton, reader, self.plan, both)
        self.streaming.config = config
        switches = [look_up(model, switch.path) for switch in self.skeleton.switches]
        parts = [part for s in switches for part in getattr(s, "_parts", [s])]
        self.fused = [(part, part.fused, part.router) for part in parts if part.fused is not None]
        self._use_kernels(False)
        mx.eval(model)
        if vault is not None:
            checkpoint.close()
        self.now = Setting(self.plan.slots, **{name: getattr(config, name) for name in OPTIONS})
        self.tokenizer = load_tokenizer(folder)
        text = self.tokenizer.encode(TEXT)
        self.prompt = (text * -(-prompt_tokens // len(text)))[:prompt_tokens]
        self.generation_tokens, self.tokens = generation_tokens, FEWEST_TOKENS
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
        if setting.kernels != now.kernels:
            self._use_kernels(setting.kernels == "auto")
        self.now = setting

    def _use_kernels(self, use: bool) -> None:
        for part, fused, router in self.fused:
            part.fused, part.router = (fused, router) if use else (None, None)

    def begin(self) -> None:
        """Take the first turn, and decide how much is done in the others."""
        self.read_prompt(FEWEST_TOKENS)  # kernels are compiled, and much is read
        self.decode(FEWEST_TOKENS)
        prompt_seconds = self.read_prompt()
        if prompt_seconds < self.seconds / 10:  # as for all later ones, files are in the page cache
            prompt_seconds = self.read_prompt()
        self.first = self._turn(prompt_seconds, self.decode(4))
        fit = 0.6 * self.seconds / TURNS / self.first.token_seconds
        self.tokens = max(FEWEST_TOKENS, min(MOST_TOKENS, int(fit), self.plan.context // 4))
        self.each_prompt = self.first.prompt_seconds <= self.seconds / PROMPTS
        if self.each_prompt:
            self.prompts[_reading(self.now)] = self.first.prompt_seconds
        else:
            self.until -= self.first.prompt_seconds  # for the one of the best setting

    def read_prompt(self, most: int | None = None) -> float:
        """Begin anew with the prompt, or so much of it; returns the seconds to the first token."""
        prompt = self.prompt[:most]
        self.cache = make_prompt_cache(self.model)
        start = time.perf_counter()
        steps = generate_step(mx.array(prompt), self.model, max_tokens=1, prompt_cache=self.cache)
        self.last = next(iter(steps))[0]
        self.used = len(prompt)
        return time.perf_counter() - start

    def decode(self, tokens: int) -> float:
        """Seconds a token, of so many or as many as there is time for in a turn.

        The text is sampled: a greedy one repeats itself.
        """
        if self.used + tokens + 2 > self.plan.context:
            if can_trim_prompt_cache(self.cache):
                self.used -= trim_prompt_cache(self.cache, self.used - len(self.prompt))
            else:
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

    def turn(self, setting: Setting, anew: bool = False) -> Turn:
        """Decode some tokens, after a few that are not counted.

        Args:
            anew: read the prompt also if this has been done with such a setting.

        Raises:
            NoTimeError: it is later than `until`.
        """
        if self.passed() > self.until:
            raise NoTimeError
        grows = setting.slots > self.now.slots
        self.apply(setting)
        stats, how = self.streaming.cache.stats, _reading(setting)
        if self.each_prompt and (anew or how not in self.prompts):
            self.prompts[how] = self.read_prompt()
            self.decode(self.tokens)  # until the slots hold what tokens use again
        before = stats.evictions
        self.decode(max(1, self.tokens // 4))
        for _ in range(4 * grows):  # until the new slots are filled
            if stats.evictions > before:
                break
            self.decode(self.tokens)
        prompt_seconds = self.prompts.get(how, self.first.prompt_seconds)
        turn = self._turn(prompt_seconds, self.decode(self.tokens))
        self.turns.setdefault(setting, []).append(turn)
        self.progress(self.passed(), f"{turn.seconds:.2f} s with {setting}")
        return turn

    def _turn(self, prompt_seconds: float, token_seconds: float) -> Turn:
        return Turn(len(self.prompt), self.generation_tokens, prompt_seconds, token_seconds)


# ---- the result ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One number of slots: the memory planned with it, and the seconds that a turn takes."""

    slots: int
    memory: int
    seconds: float


@dataclass(frozen=True)
class Tuning:
    """What was measured and found.

    Attributes:
        model, num_experts: the name as given, and its routed experts over all layers.
        start, best: the settings without tuning and with it.
        start_turn, best_turn: what a turn takes with them, side by side at the end if there was
            time for it.
        each_prompt: there was time to read a prompt with each setting; else only with these two.
        curve: by slots.
        tried: the alternatives, with their speed against the best setting until then.
        spread: how much turns of one setting differed: 1.1 by a tenth.
        turns, seconds: what it took.
        ended: why not all was tried, or "".
        kernels: why none were tried on a GPU, or "".
        kept: what `load` does from now on, or "".
    """

    model: str
    num_experts: int
    start: Setting
    best: Setting
    start_turn: Turn
    best_turn: Turn
    each_prompt: bool
    curve: tuple[Point, ...]
    tried: tuple[Tried, ...]
    turns: int
    seconds: float
    spread: float
    ended: str
    kernels: str
    kept: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        out = asdict(self)
        for name in ("start_turn", "best_turn"):
            out[name]["seconds"] = getattr(self, name).seconds
        return out

    def __str__(self) -> str:
        turn = self.start_turn
        lines = [
            f"what counts: the time of a turn, a prompt of {turn.prompt_tokens:,} tokens and an "
            f"answer of {turn.generation_tokens:,}",
            "",
            f"{'slots':>16}{'memory':>10}{'a turn':>10}",
        ]
        most = max((p.seconds for p in self.curve), default=1.0)
        for p in self.curve:
            share = 100 * p.slots / self.num_experts
            mark = " < best" if p.slots == self.best.slots else ""
            lines.append(
                f"{p.slots:>7,} ({share:5.1f} %){format_bytes(p.memory):>10}{p.seconds:>8.2f} s "
                f"{'#' * round(40 * p.seconds / most)}{mark}"
            )
        options = [t for t in self.tried if t.name != SLOTS]
        if options:
            lines += ["", f"{'option':<36}{'speed':>8}{'turns':>7}"]
        for t in options:
            what = ", ".join(f"{k}={v}" for k, v in t.change.items())
            lines.append(f"{what:<36}{t.speedup:>7.2f}x{t.turns:>7}  {t.verdict}")
        return "\n".join([*lines, "", *self._notes()])

    def _notes(self) -> list[str]:
        ended = f"; {self.ended}, so not all was tried" if self.ended else ""
        notes = [f"{self.turns} turns in {self.seconds:.0f} s{ended}"]
        if not self.each_prompt:
            prompt = self.start_turn.prompt_seconds
            notes.append(
                f"a prompt takes {prompt:.1f} s, too long to read one with each setting: until the "
                "last comparison, decoding alone counted. There is time for prompts with --seconds "
                f"{math.ceil(PROMPTS * prompt)}."
            )
        if self.spread > BUSY:
            notes.append(
                f"turns of one setting differed by {100 * (self.spread - 1):.0f} %: the machine is "
                "busy with other things. Tune again when it is not."
            )
        if self.best.slots == self.num_experts:
            notes.append("all experts are in memory, so how they are read was not tried further")
        if self.kernels:
            notes.append(f"kernels were not tried: {self.kernels}")
        for t in self.tried:
            if t.name == KERNELS and t.pays and not t.taken:
                notes.append(
                    f"the kernels would be {100 * (t.speedup - 1):.0f} % faster, but round "
                    "otherwise than mlx-lm (docs/kernels.md). To have them, tune with "
                    "--allow-kernels, or load with --kernels auto."
                )
        if self.best.kernels != "stock":
            notes.append("the kernels round otherwise than mlx-lm (docs/kernels.md)")
        if self.best == self.start and any(t.taken for t in self.tried):
            notes.append("what was taken was not faster than the defaults in the end")
        notes.append(f"without tuning: {self.start_turn} with {self.start}")
        if self.best == self.start:
            notes.append("nothing was faster by more than chance")
        else:
            speedup = self.start_turn.seconds / self.best_turn.seconds
            notes.append(f"best: {self.best_turn} with {self.best}, {speedup:.2f}x as fast")
        if self.kept:
            notes.append(f"kept, for load and the commands (not with --no-tuned): {self.kept}")
        return notes


def tune(
    path_or_repo: str | os.PathLike[str],
    config: StreamingConfig | None = None,
    seconds: float = SECONDS,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[float, str], None] = lambda passed, what: None,
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    generation_tokens: int = GENERATION_TOKENS,
    allow_kernels: bool = False,
) -> Tuning:
    """Find the slots and options with which a turn is fastest, within `seconds`, and remember
    them: `load` uses them from then on, unless it is asked for anything else.

    All settings that are taken give the same bits, but with `allow_kernels`. A Ctrl-C ends it; the
    best so far is kept.

    Args:
        path_or_repo: as for `load`.
        config: `memory` limits it (None: what this machine has free); options that it names
            otherwise than by default are where the search begins.
        seconds: of this, a fifth goes to a last comparison with the defaults.
        revision: as for `load`.
        trust_remote_code: as for `load`.
        progress: called with the seconds passed, and what was measured last.
        prompt_tokens: of the prompt in a turn.
        generation_tokens: of the answer. Fewer are decoded, and counted as so many.
        allow_kernels: take `kernels="auto"` if it is faster, though it rounds otherwise than
            mlx-lm (docs/kernels.md). Else it is only measured.

    Returns:
        What was measured and found. `print` it for a table.

    Raises:
        BudgetError: too little memory, or too little for one token's experts or for the turn.
        ValueError: slots, kernels, or what changes bits, is asked for.
        ModelNotFoundError, UnsupportedModelError, CheckpointError, VaultError: as `load`.
    """
    config = replace(config or StreamingConfig(), tuned=False, usage=None, govern=False)
    if config.slots is not None or config.decode == "lossy" or config.hot_per_layer:
        raise ValueError("tune finds the slots; no slots, hot_per_layer or decode='lossy' with it")
    if config.kernels != "stock":
        raise ValueError("tune tries the kernels itself: no kernels with it, but allow_kernels")
    if prompt_tokens < 1 or generation_tokens < 1:
        raise ValueError("prompt_tokens and generation_tokens: whole numbers from 1 on")
    folder = find_model(path_or_repo, revision)
    tokens = prompt_tokens, generation_tokens
    model = _Model(folder, config, trust_remote_code, seconds, *tokens, progress)
    try:
        found = _tune(model, str(path_or_repo), allow_kernels)
    finally:
        model.close()
    start, best, memory = found.start, found.best, model.plan.memory
    same = best.slots == start.slots and best.io == start.io  # direct reads get more slots
    slots = None if same else best.slots
    kept = Tuned(slots, best.options, memory, date.today().isoformat())
    tuned = None if best == start and memory is None else kept
    if found.ended == "interrupted" and best == start:
        return found  # nothing was found, and what earlier runs found is not forgotten
    try:
        remember(folder, tuned)
        found = replace(found, kept=str(tuned or ""))
    except OSError as e:
        warnings.warn(f"what was found cannot be remembered: {e}", stacklevel=2)
    return found


def _tune(model: _Model, name: str, allow_kernels: bool) -> Tuning:
    plan, start = model.plan, model.now
    if plan.slots < plan.expert_reads:
        raise BudgetError(
            f"{plan.slots:,} slots are fewer than the {plan.expert_reads:,} experts of one token, "
            f"and then nothing else matters: {format_bytes(plan.useful, up=True)} is the least."
        )
    if len(model.prompt) + model.generation_tokens > plan.context:
        raise BudgetError(
            f"a prompt of {len(model.prompt):,} tokens and {model.generation_tokens:,} more are "
            f"longer than the context of {plan.context:,} that is planned for: give a longer "
            "context, or fewer tokens."
        )
    mx.random.seed(0)
    model.begin()
    shares = {max(plan.expert_reads, round(share * plan.slots)) for share in SHARES}
    slots = sorted({plan.slots, *shares}, reverse=True)
    on_gpu = computes_beside_the_host()
    choices = all_choices(slots, on_gpu, bool(model.fused))
    search = Search(
        lambda setting: model.turn(setting).seconds, start, plan.num_experts, choices, allow_kernels
    )
    search.run()
    spread = statistics.median(search.spreads or [1.0])
    best, turns = search.best, model.turns
    if search.ended != "interrupted":
        confirmed = _confirm(model, start, best)
        turns = confirmed or turns
        believed = spread <= BUSY if confirmed is None else _is_faster(confirmed, best, start)
        best = best if believed else start
    start_turn = _typical(turns.get(start, [model.first]))
    points = [
        Point(n, replace(plan, banks=model.banks(n)).total, search.curve[n])
        for n in sorted(search.curve)
    ]
    return Tuning(
        model=name,
        num_experts=plan.num_experts,
        start=start,
        best=best,
        start_turn=start_turn,
        best_turn=start_turn if best == start else _typical(turns[best]),
        each_prompt=model.each_prompt,
        curve=tuple(points),
        tried=tuple(search.tried.values()),
        turns=sum(map(len, model.turns.values())),
        seconds=model.passed(),
        spread=spread,
        ended=search.ended,
        kernels="; ".join(model.streaming.kernels.reasons) if on_gpu and not model.fused else "",
    )


def _confirm(model: _Model, start: Setting, best: Setting) -> dict[Setting, list[Turn]] | None:
    """Turns of both side by side, or None if there is no time for them.

    What was found has to be faster there too. Without, it is believed unless the machine is busy.
    """
    turns: dict[Setting, list[Turn]] = {start: [], best: []}
    model.until += CONFIRMING * model.seconds
    try:
        for _ in range(FEWEST_ROUNDS):
            for setting in sorted(turns, key=lambda s: -s.slots):
                turns[setting].append(model.turn(setting, anew=True))
        if not model.each_prompt and best != start:
            model.apply(best)
            prompt_seconds = model.read_prompt()
            turns[best] = [replace(t, prompt_seconds=prompt_seconds) for t in turns[best]]
    except (NoTimeError, KeyboardInterrupt):
        return None
    return turns


def _is_faster(turns: dict[Setting, list[Turn]], best: Setting, start: Setting) -> bool:
    return ratio_of([t.seconds for t in turns[best]], [t.seconds for t in turns[start]]) <= 1
