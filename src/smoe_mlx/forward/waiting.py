"""Decoding while the device waits for the host, and not the host for the device.

The exact way builds a layer's experts when the host has seen the routing. Here a token is built and
started as a whole: in the graph, the device looks up the slots of each layer's experts in a table,
and asks the host if one is missing there, and waits for the answer (`Handover.ask`). A thread
beside the one that builds hears what was routed, has missing experts read, and answers. So building
and starting, most of what a layer costs the host, goes on beside reading and computing, and a layer
that lacks nothing waits for nobody.

What makes it right: an expert leaves the table, and its slot is rewritten, only while the device
waits for an answer: then everything before has been computed, and nothing behind has begun. An
answer is given when all experts of its layer are in their slots, and the table says what is gone.
What the device found in the table is compared afterwards. A device that had to wait too long goes
on with what is there: then the token is taken back, and decoded the exact way. An error or an
interrupt takes it back as well.

A device that cannot wait, a CPU, has not begun when the host answers: there it is the exact way.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cache.bookkeeping import Arrays
from ..cache.experts import SharedExpertCache
from ..device import using_mlx
from ..handover import Handover, Question, Table
from ..kernels.experts import Weights
from ..layers.switch import StreamingSwitchGLU, StreamingSwitchMLP
from .rollback import remember, restore

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


class _Token:
    """A token under way: its calls so far, and those that the device has been given."""

    def __init__(self, talk: int):
        self.talk = talk
        self.calls: list[_Call] = []
        self.started: SimpleQueue[_Call | None] = SimpleQueue()  # None: no more come
        self.count = 0  # of those
        self.after: mx.array | None = None  # the output of the last call
        self.over = False  # what has not been answered needs no answer


class WaitingDecoder:
    """Decodes single tokens of a streamed model.

    Attributes:
        late: tokens that were taken back, nearly always since an answer came too late. (MLX may
            wait for the device itself while it starts something, the first time that it does.)
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
        with self.experts.lock:
            self._tokens += 1
            logits = self._step(model, tokens, cache)
            if logits is None:
                self.late += 1
                logits = model(tokens, cache=cache)
        return logits

    def _step(self, model: nn.Module, tokens: mx.array, cache: list[Any]) -> mx.array | None:
        """None: the token was taken back."""
        using_mlx()
        experts, handover = self.experts, self.experts.handover
        experts.settle()
        experts.catch_up()
        before = [remember(c) for c in cache]
        self._write_tables()
        self._thread = threading.get_ident()
        self._token = token = _Token(handover.begin())
        answering: Future[None] | None = None
        try:
            if handover.waits:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, "smoe-answer")
                answering = self._pool.submit(self._answer_all, token)
            experts.defer = self._call
            logits: mx.array = model(tokens, cache=cache)
            if answering is not None:
                self._start(token, logits)
            mx.eval(logits)
            _stop(token, answering)
            if answering is not None:
                answering.result()
            if not all([handover.in_time(c.question) for c in token.calls]):
                raise _TakeBack
            return logits
        except BaseException as e:
            _stop(token, answering, handover)
            for c, state in zip(cache, before, strict=True):
                restore(c, state)
            if isinstance(e, _TakeBack):
                return None
            raise
        finally:
            experts.defer, self._token = None, None

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

    def _start(self, token: _Token, y: mx.array) -> None:
        # They are answered while this thread is at it: starting may wait for the device.
        for call in token.calls[token.count :]:
            token.started.put(call)
        token.count = len(token.calls)
        mx.async_eval(y)  # type: ignore[no-untyped-call]

    # ---- beside the thread that builds, which holds the cache's lock ----------------------------

    def _answer_all(self, token: _Token) -> None:
        try:
            while (call := token.started.get()) is not None:
                if not token.over:
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
        for layer, table in self._tables.items():
            table.write(self.experts.places(layer))


def _stop(token: _Token, answering: Future[None] | None, handover: Handover | None = None) -> None:
    """Return when nothing is answered any more, come what may.

    Args:
        handover: of a device that is to run through what will be thrown away.
    """
    interrupt = None
    while True:
        try:
            token.over = True
            if handover is not None:
                handover.end(token.talk)
            token.started.put(None)
            if answering is not None:
                wait([answering])
            break
        except KeyboardInterrupt as e:
            interrupt = e
    if interrupt is not None:
        raise interrupt
