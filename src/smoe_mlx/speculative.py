"""Speculative decoding: where drafts come from, and whether they pay.

Several tokens in one pass share its fixed cost, and an expert that two of them want is read once.
But a pass over n tokens wants up to n times as many experts, and a draft that is wrong has wasted
its share. So drafts are used while they are measured to be faster, and only then.
"""

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import CacheList, RotatingKVCache, trim_prompt_cache

from .stats import DraftStats, Streaming

DECAY = 0.9  # weight of a pass's time and tokens after one more of its kind
ENOUGH = 4  # passes of each kind before they are compared
TRY_EVERY = 16  # while drafts pay: passes until one without measures what that takes now
PRICE = 0.03  # while they do not: share of the time that tries may cost


def look_up(tokens: "array[int]", n: int, match: int) -> list[int]:
    """Draft n tokens: what followed the last `match` tokens where they came last (prompt lookup
    decoding). None if they did not come before."""
    t = np.frombuffer(tokens, np.int64)
    after = np.arange(match, len(t))  # where an earlier occurrence could go on
    for i in range(1, match + 1):
        if not after.size:
            return []
        after = after[t[after - i] == t[-i]]
    if not after.size:
        return []
    drafts: list[int] = t[after[-1] : after[-1] + n].tolist()
    for i in range(n - len(drafts)):  # the text repeats itself: so do the drafts
        drafts.append(drafts[i])
    return drafts


class DraftModel:
    """Drafts the most likely tokens of a smaller model.

    Whatever a draft is, what is sampled stays the same: the model's own choice decides. So drafts
    need neither the sampler nor the logits processors, which see what they would see without.

    It takes turns with other threads, by the lock of its own experts if it is streamed. Call it
    with no other model's lock held: two models may draft for each other.

    Args:
        cache: the draft model's prompt cache.
        step_size: tokens that pass the draft model at a time.
        streaming: of the model that it drafts for.
    """

    def __init__(self, model: nn.Module, cache: list[Any], step_size: int, streaming: Streaming):
        self.model, self.cache, self.step_size = model, cache, step_size
        self.counts = streaming.drafts
        self._experts = getattr(model, "_streaming", streaming).cache
        self._known = 0  # tokens of the text that the cache holds...
        self._guesses: list[int] = []  # ...and the drafts that it holds beyond

    def __call__(self, tokens: "array[int]", n: int) -> list[int]:
        """n drafts that follow `tokens`; none if they could not be taken back."""
        if stuck := kinds_without_room(self.cache, len(tokens) - self._known + n):
            self.counts.note = f"{stuck} of the draft model cannot take tokens back"
            return []
        with self._experts.lock:
            logits = self._feed(tokens)
            drafts: list[mx.array] = []
            for i in range(n):
                if i:
                    logits = self.model(drafts[-1][None], cache=self.cache)
                drafts.append(mx.argmax(logits[:, -1], axis=-1))
                mx.async_eval(drafts[-1])  # type: ignore[no-untyped-call]
            out: list[int] = mx.concatenate(drafts).tolist()  # type: ignore[assignment]
            self._experts.settle()  # all is evaluated
        self._guesses = out[:-1]
        return out

    def feed(self, tokens: "array[int]") -> None:
        """Make the cache hold `tokens`: those it held, but for the last, and more."""
        with self._experts.lock:
            self._feed(tokens)
            self._experts.settle()

    def _feed(self, tokens: "array[int]") -> mx.array:
        """Returns logits [1, n, vocab] of the last n of them, not evaluated."""
        right = 0
        for guess, token in zip(self._guesses, tokens[self._known :], strict=False):
            if guess != token:
                break
            right += 1
        held = self._known + len(self._guesses)
        self._known, self._guesses = min(self._known + right, len(tokens)), []
        trim_prompt_cache(self.cache, held - self._known)
        while (more := len(tokens) - self._known) > 2:  # as mlx-lm, no head but for the last
            self._pass(tokens, min(self.step_size, more - 1))
            mx.eval([c.state for c in self.cache])
        return self._pass(tokens, more) if more else mx.array([])

    def _pass(self, tokens: "array[int]", n: int) -> mx.array:
        chunk = tokens[self._known : self._known + n].tolist()
        self._known += n
        logits: mx.array = self.model(mx.array([chunk]), cache=self.cache)
        return logits


def room_of(cache: Iterable[Any], quantized_from: float = math.inf) -> float:
    """Tokens that may be written to a prompt cache so that `trim` can take all of them back.

    Args:
        quantized_from: tokens at which the KV cache is going to be quantised, which a draft that is
            not accepted must not bring about.
    """
    return min((_room(entry, quantized_from) for entry in cache), default=math.inf)


def kinds_without_room(cache: Iterable[Any], tokens: int) -> str:
    """The kinds of entries that could not take back so many tokens, or ""."""
    return ", ".join(sorted({type(c).__name__ for c in cache if room_of([c]) < tokens}))


def _room(entry: Any, quantized_from: float) -> float:
    if isinstance(entry, CacheList):
        return room_of(entry.caches)
    if not entry.is_trimmable():
        return 0
    if isinstance(entry, RotatingKVCache):  # once full it forgets
        end = entry.max_size
    elif hasattr(entry, "to_quantized"):
        end = quantized_from
    else:
        return math.inf
    return end - entry.offset - 1  # type: ignore[no-any-return]


class Drafter:
    """Drafts for one text, while they pay and can be taken back.

    Args:
        propose: (tokens, n) -> at most n drafts.
        num_draft_tokens: most of them for one pass.
        counts: what becomes of them.
    """

    def __init__(
        self,
        propose: Callable[["array[int]", int], list[int]],
        num_draft_tokens: int,
        counts: DraftStats,
    ):
        self.propose, self.num_draft_tokens, self.counts = propose, num_draft_tokens, counts
        self.payoff = Payoff()

    def __call__(
        self, tokens: "array[int]", cache: list[Any], most: float, quantized_from: float
    ) -> list[int]:
        """At most `most` drafts that follow `tokens`, the last of which is not in the cache yet."""
        n = min(self.num_draft_tokens, most, room_of(cache, quantized_from) - 1)
        drafts: list[int] = []
        if n >= 1:
            if self.payoff.allows():
                drafts = self.propose(tokens, int(n))
        elif stuck := kinds_without_room(cache, 2):
            self.counts.note = f"{stuck} cannot take tokens back"
        self.counts.passes += bool(drafts)
        self.counts.plain_passes += not drafts
        self.counts.drafted += len(drafts)
        return drafts

    def saw(self, drafts: list[int], tokens: int, seconds: float) -> None:
        """A pass with these drafts gave so many tokens in so many seconds, drafting included."""
        self.payoff.saw(bool(drafts), tokens, seconds)


@dataclass
class _Pace:
    """Tokens and seconds of passes, the latest weighing most. The first only warms up."""

    passes: int = -1
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.passes += 1
        if self.passes:
            self.tokens = DECAY * self.tokens + tokens
            self.seconds = DECAY * self.seconds + seconds

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Payoff:
    """Whether passes with drafts give tokens faster than passes without, by those seen lately."""

    def __init__(self) -> None:
        self._plain, self._drafted = _Pace(), _Pace()
        self._since_plain = 0
        self._wait = 0.0  # passes until the next try, while drafts do not pay

    def allows(self) -> bool:
        """Whether the coming pass should have drafts. Ask once for each pass."""
        plain, drafted = self._plain, self._drafted
        if plain.passes < ENOUGH:
            return False
        if drafted.passes < ENOUGH or self._lost(drafted.tokens, drafted.seconds) < 0:
            return self._since_plain < TRY_EVERY
        self._wait -= 1
        return self._wait < 0

    def saw(self, drafted: bool, tokens: int, seconds: float) -> None:
        """A pass gave so many tokens in so many seconds, drafting included."""
        if drafted:
            self._since_plain += 1
            self._drafted.add(tokens, seconds)
            self._wait = self._lost(tokens, seconds) / PRICE
        else:
            self._since_plain = 0
            self._plain.add(tokens, seconds)

    def _lost(self, tokens: float, seconds: float) -> float:
        """By how many passes without drafts these tokens were late; negative if they were early."""
        return seconds * self._plain.speed - tokens
