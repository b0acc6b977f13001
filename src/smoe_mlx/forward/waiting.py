"""Decoding while the device waits for the host, and not the host for the device.

The exact way builds a layer's experts when the host has seen the routing. Here a token is built and
started as a whole: in the graph, the device looks up the slots of each layer's experts in a table,
and asks the host if one is missing there, and waits for the answer (`Handover.ask`). A thread
beside the one that builds hears what was routed, has missing experts read, and answers. So building
and starting, most of what a layer costs the host, goes on beside reading and computing, and a layer
that lacks nothing waits for nobody. And the next token is built and started while one is computed
(`run`): which token that is, the device knows.

What makes it right: an expert leaves the table, and its slot is rewritten, only while the device
waits for an answer: then everything before has been computed, and nothing behind has begun. An
answer is given when all experts of its layer are in their slots, and the table says what is gone.
What the device found in the table is compared afterwards. A device that had to wait too long goes
on with what is there: then the token is taken back, and what was begun behind it, and decoded the
exact way. An error or an interrupt takes it back as well.

A device that cannot wait, a CPU, has not begun when the host answers: there it is the exact way.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cache.bookkeeping import Arrays
from ..cache.experts import SharedExpertCache
from ..device import using_mlx
from ..handover import Question, Table
from ..kernels.experts import Weights
from ..layers.switch import StreamingSwitchGLU, StreamingSwitchMLP
from .rollback import remember, restore, takes_back_several

AHEAD = 2  # tokens that are begun at once: one that is computed, and one that is built
START_EVERY = 3  # layers: to start what has been built costs nearly as much as to build it
FEW_LATE, MOST_LATE = 16, 1 / 64  # tokens, and the share of them, until this way is given up
MOST_SLOTS = 65536  # a slot number has 16 bits on its way


class _TakeBack(Exception):
    """This token cannot be decoded in this way."""


class _Call:
    """A call of a switch module: what the device asks, and the arrays that it computes with."""

    __slots__ = ("arrays", "bets", "layer", "question")

    def __init__(self, layer: int, question: Question, bets: Sequence[int], arrays: Arrays):
        self.layer, self.question, self.bets, self.arrays = layer, question, bets, arrays


# Makes the next token, and arrays that are wanted, of: how many tokens came before, a token [B, 1],
# and the logits [B, 1, vocab] after it. Nothing is evaluated yet. It is called again for a token
# that was taken back.
Sample = Callable[[int, mx.array, mx.array], tuple[mx.array | None, Sequence[mx.array]]]


class Decoded:
    """A token [B, 1] that has been decoded.

    Attributes:
        wanted: what `Sample` said, evaluated.
        take_back: puts the caches and MLX's random state back to before it.
    """

    wanted: Sequence[mx.array]

    def __init__(self, token: mx.array, cache: list[Any]):
        self.token = token
        self.next: mx.array | None = None
        self.take_back = functools.partial(
            _restore, cache, [remember(c) for c in cache], [key[...] for key in _keys()]
        )


class _Token(Decoded):
    """A token under way: its calls so far, and those that the device has been given."""

    def __init__(self, token: mx.array, cache: list[Any], talk: int):
        super().__init__(token, cache)
        self.talk = talk
        self.answering: Future[None] | None = None
        self.calls: list[_Call] = []
        self.started: SimpleQueue[_Call | None] = SimpleQueue()  # None: no more come
        self.count = 0  # of those
        self.after: mx.array | None = None  # the output of the last call, or of the token before
        self.over = False  # what asks needs no answer

    @property
    def outputs(self) -> list[mx.array]:
        return [*self.wanted, *([] if self.next is None else [self.next])]

    def hush(self) -> None:
        """Return when nothing is answered any more. (What is used without is still counted.)"""
        self.over = True
        self.started.put(None)
        if self.answering is not None:
            wait([self.answering])


class WaitingDecoder:
    """Decodes single tokens of a streamed model.

    Attributes:
        late: tokens that were taken back, nearly always since an answer came too late.
    """

    def __init__(self, experts: SharedExpertCache):
        self.experts = experts
        self.late = self._tokens = 0
        self._refused = False
        self._thread = 0
        self._token: _Token | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._tables: dict[int, Table] = {}

    @property
    def possible(self) -> bool:
        """Whether tokens may be decoded this way, as far as is known."""
        in_time = self.late <= FEW_LATE + self._tokens * MOST_LATE
        return in_time and not self._refused and self.experts.slots <= MOST_SLOTS

    def step(self, model: nn.Module, tokens: mx.array, cache: list[Any]) -> mx.array:
        """The logits [B, 1, vocab] after one token a row [B, 1], evaluated.

        Raises:
            ExpertReadError, CheckpointChangedError: the caches are then as before.
        """
        (done,) = self.run(model, tokens, cache, lambda n, token, logits: (None, [logits]), 1)
        return done.wanted[0]

    def run(
        self, model: nn.Module, token: mx.array, cache: list[Any], sample: Sample, count: int
    ) -> Sequence[Decoded]:
        """Decode up to `count` tokens, each begun while the one before is computed.

        Returns at least one: an error at a later one is left to who comes to it again.

        Raises:
            ExpertReadError, CheckpointChangedError: the caches are then as before.
        """
        if not all(map(takes_back_several, cache)):
            count = 1
        ahead = AHEAD if self.experts.handover.waits else 1
        tokens: list[_Token] = []
        done = 0  # how many of them
        with self.experts.lock:
            try:
                while done < count:
                    good = True
                    while good and len(tokens) < min(done + ahead, count):
                        at = tokens[-1].next if tokens else token
                        good = self._begin(model, at, cache, sample, tokens, len(tokens) == done)
                    if not good or not self._finish(tokens[done]):
                        self._stop(tokens[done:])
                        del tokens[done + 1 :]
                        self._redo(model, cache, sample, tokens[done], done)
                    done += 1
                    self._tokens += 1
            except BaseException as e:
                self._stop(tokens[done:])
                if not isinstance(e, Exception):
                    done = 0
                for first in tokens[done : done + 1]:
                    first.take_back()
                if not done:
                    raise
        return tokens[:done]

    def _begin(
        self,
        model: nn.Module,
        token: mx.array | None,
        cache: list[Any],
        sample: Sample,
        tokens: list[_Token],
        first: bool,
    ) -> bool:
        """Build and start one more. False: that cannot be.

        Args:
            first: nothing else is under way.
        """
        assert token is not None
        using_mlx()
        experts, handover = self.experts, self.experts.handover
        if first:
            experts.settle()
            experts.catch_up()
            self._write_tables()
        self._thread = threading.get_ident()
        self._token = new = _Token(token, cache, handover.begin())
        new.after = tokens[-1].after if tokens else None
        tokens.append(new)
        try:
            if handover.waits:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, "smoe-answer")
                new.answering = self._pool.submit(self._answer_all, new)
            experts.defer = self._call
            logits = model(token, cache=cache)
            self._listen(new)  # it may look at what it is given
            new.next, new.wanted = sample(len(tokens) - 1, token, logits)
            if handover.waits:
                self._start(new, *new.outputs)
            new.started.put(None)
            return True
        except _TakeBack:
            return False
        finally:
            experts.defer, self._token = None, None

    def _finish(self, token: _Token) -> bool:
        """Wait for a token. False: it must be taken back."""
        mx.eval(token.outputs)
        token.hush()
        try:
            if token.answering is not None:
                token.answering.result()
        except _TakeBack:
            return False
        in_time = all([self.experts.handover.in_time(c.question) for c in token.calls])
        token.calls.clear()
        return in_time

    def _redo(
        self, model: nn.Module, cache: list[Any], sample: Sample, token: _Token, n: int
    ) -> None:
        """Decode a token the exact way."""
        token.take_back()
        token.after = None  # perhaps it was not even started
        self.late += 1
        token.next, token.wanted = sample(n, token.token, model(token.token, cache=cache))
        mx.eval(token.outputs)

    def _stop(self, tokens: Sequence[_Token]) -> None:
        """Return when nothing of these is answered any more, come what may. The device runs
        through what will be thrown away."""
        interrupt = None
        while tokens:
            try:
                self.experts.handover.end(tokens[-1].talk)
                for token in tokens:
                    token.hush()
                break
            except KeyboardInterrupt as e:
                interrupt = e
        if interrupt is not None:
            raise interrupt

    def _call(
        self,
        switch: StreamingSwitchGLU | StreamingSwitchMLP,
        layer: int,
        x: mx.array,
        indices: mx.array,
        ids: mx.array,
        weights: Weights | None,
    ) -> mx.array | None:
        """What a switch module calls instead of reading its routing."""
        if threading.get_ident() != self._thread:
            return None
        experts, handover, token = self.experts, self.experts.handover, self._token
        assert token is not None
        if not handover.can_wait(indices, x):
            self._refused = True
            raise _TakeBack
        arrays = experts.arrays(layer)
        predicted = switch.predictions(x, indices, experts.bets_pay)
        after = x if token.after is None else token.after
        table = self._tables.get(layer)
        if table is None:
            table = self._tables[layer] = handover.table(len(experts.places(layer)))
            table.write(experts.places(layer))
        question = handover.ask([indices, *[p for _, p in predicted]], table, after, token.talk)
        if question is None:
            raise _TakeBack
        call = _Call(layer, question, [i for i, _ in predicted], arrays)
        y = token.after = switch.in_one(arrays, x, question.reply, weights)
        token.calls.append(call)
        if not handover.waits:
            self._answer(token, call)
        elif (len(token.calls) - 1) % START_EVERY == 0:
            self._start(token, y)
        return y

    def _listen(self, token: _Token) -> None:
        for call in token.calls[token.count :]:
            token.started.put(call)
        token.count = len(token.calls)

    def _start(self, token: _Token, *arrays: mx.array) -> None:
        self._listen(token)  # first: starting may wait for the device
        mx.async_eval(*arrays)  # type: ignore[no-untyped-call]

    # ---- beside the thread that builds, which holds the cache's lock ----------------------------

    def _answer_all(self, token: _Token) -> None:
        try:
            while (call := token.started.get()) is not None:
                self._answer(token, call)
        except BaseException:
            self.experts.handover.end(token.talk)  # the one that builds may wait for the device
            raise

    def _answer(self, token: _Token, call: _Call) -> None:
        """Hear what a layer was routed to, have its experts read, and answer."""
        experts, handover = self.experts, self.experts.handover
        try:
            (ids, *guesses), found = handover.hear(call.question, lambda: not token.over)
        except TimeoutError:
            raise _TakeBack from None
        if found is None and token.over:
            return
        places = experts.places(call.layer)
        if found is not None and found != [places[e] for e in ids]:
            raise _TakeBack  # cannot be
        stats = experts.stats.layers[call.layer]
        stats.calls += 1
        claimed = experts.claim_few(call.layer, ids, ahead=bool(call.bets))
        if claimed is None or experts.arrays(call.layer) is not call.arrays:
            raise _TakeBack  # too few slots, or the slots are elsewhere by now
        stats.waves += 1
        if found is not None:
            return  # the device goes on: no slot may change
        try:
            for layer, guess in zip(call.bets, guesses, strict=True):
                if experts.may_prefetch(layer):
                    experts.prefetch(layer, guess, settle=False)
            self._write_tables()
        finally:
            experts.finish_few()
        handover.answer(call.question, claimed[0])

    def _write_tables(self) -> None:
        for layer, table in list(self._tables.items()):  # the other thread may make one
            table.write(self.experts.places(layer))


def _restore(cache: list[Any], states: Sequence[Any], keys: Sequence[mx.array]) -> None:
    for c, state in zip(cache, states, strict=True):
        restore(c, state)
    for key, kept in zip(_keys(), keys, strict=True):
        key[...] = kept


def _keys() -> Any:
    """MLX's random state: arrays that it is read from, and can be written to."""
    return mx.random.state
