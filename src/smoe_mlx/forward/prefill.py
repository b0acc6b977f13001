"""Layer-major prefill: a prompt passes layer 0 before any of it passes layer 1, and each expert is
read once, however long the prompt.

mlx-lm's own forward is called for each chunk of the prompt, on the caller's own caches, and nothing
is evaluated: masks, offsets and cache updates come out as mlx-lm makes them, whatever the model,
because all of that is decided while the graph is built. At each switch module the graph has a gap,
an array whose bytes are still to be written. Then the chunks are evaluated side by side, from one
switch module to the next. There the host reads what all chunks were routed to, has those experts
read, and fills the gaps: MLX sees bytes when it evaluates, not when it builds.

What a gap holds depends on the layer. If all experts of the layer fit into the slots at once, it
holds slot numbers, and the outputs of a chunk exist only while that chunk is evaluated. If not, it
holds the outputs themselves, computed wave by wave over all chunks, each expert read once.

Other ways were tried. Running each layer by itself, or each mixer chunk by chunk, needs to know how
a model is put together. Pausing the forwards of all chunks inside the switch module (threads) makes
masks from caches that the chunks before have not written yet.
"""

import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache

from ..cache.experts import SharedExpertCache
from ..kernels.experts import Weights
from ..layers.lookahead import Predictor
from ..layers.switch import StreamingSwitchGLU, StreamingSwitchMLP, without_zero_experts
from ..stats import Streaming

Switch = StreamingSwitchGLU | StreamingSwitchMLP

# An expert is read ahead if the next layer's gate, asked early, has it in the upper half of its
# choices for so many tokens, or among them all if it does not rank them. (Of those, the demo model
# does not need 1 in 3,600, with prompts of 8 to 900 tokens.)
OFTEN, OFTEN_UNRANKED = 4, 16
# Of what a pass was told by gates. With more, and more than a few, it believes none.
MOST_WRONG, FEW_WRONG = 0.02, 2


def prefill(
    model: nn.Module,
    streaming: Streaming,
    prompt: mx.array,
    cache: list[Any],
    width: int,
    after_chunk: Callable[[list[Any]], None],
    progress: Callable[[int, int], None],
) -> mx.array:
    """Run a prompt through the model and return the logits [1, vocab] after its last token.

    The cache is then what mlx-lm's loop would have made of it. After any exception it holds the
    passes that were completed (one takes `MemoryPlan.pass_tokens` tokens, mostly the whole
    prompt), and nothing of the one that was not.

    Args:
        prompt: [T] tokens, T >= 1.
        cache: mlx-lm's prompt cache, empty or with a prefix.
        width: tokens of a chunk. As mlx-lm's loop, the last token is a chunk of its own.
        after_chunk: called with the cache after every chunk was built, e.g. to quantise it.
        progress: called with (tokens done, T) between chunks, layers and waves; it may raise.
            Tokens that passed some layers count for that share.

    Raises:
        ExpertReadError, CheckpointChangedError: an expert could not be read.
    """
    counts = streaming.prefill
    total = len(prompt)
    chunks = [prompt[i : min(i + width, total - 1)] for i in range(0, total - 1, width)]
    limit = streaming.plan.pass_tokens(width)
    passes: list[list[mx.array]] = [[]]
    for chunk in chunks:
        if sum(map(len, passes[-1])) + len(chunk) > limit and passes[-1]:
            passes.append([])
        passes[-1].append(chunk)
    passes[-1].append(prompt[total - 1 :])
    done, logits = 0, None
    for part in passes:
        tokens = sum(len(c) for c in part)

        def report(share: float, done: int = done, tokens: int = tokens) -> None:
            progress(min(done + int(share * tokens), total - 1), total)

        by_chunks = counts.fallback or streaming.cache.trace is not None  # traces are in call order
        if not by_chunks:
            layer_major = _Pass(streaming.cache, cache, after_chunk, report)
            try:
                logits = layer_major.run(model, part, emits=part is passes[-1])
                counts.passes += 1
            except NotLazyError as e:
                counts.fallback = by_chunks = str(e)
        if by_chunks:
            logits = _by_chunks(model, part, cache, after_chunk, report)
        done += tokens
    assert logits is not None  # the last part emits
    return logits


def _by_chunks(
    model: nn.Module,
    chunks: Sequence[mx.array],
    cache: list[Any],
    after_chunk: Callable[[list[Any]], None],
    report: Callable[[float], None],
) -> mx.array:
    """Chunk after chunk through the whole model, as mlx-lm: for what cannot go layer by layer."""
    for n, chunk in enumerate(chunks):
        logits: mx.array = model(chunk[None], cache=cache)[:, -1]
        after_chunk(cache)
        mx.eval([c.state for c in cache])
        mx.clear_cache()
        report((n + 1) / len(chunks))
    return logits


class NotLazyError(Exception):
    """A model whose forward cannot be built without evaluating it."""


class _Stop:
    """Where a chunk waits for a layer's experts; without a switch, the end of its forward.

    Attributes:
        updates: evaluated when the cache entries that were written since the stop before are.
        gap: slot numbers [..., k] if `fits`, else outputs [..., k, D]: written when they are known.
        filled: 1 once `gap` is, and `seen` is what it was when the output was evaluated.
        done: evaluated when the output is. A mere number: the output itself can be freed.
        guess: experts [..., k] that the next layer is predicted to choose.
    """

    guess: mx.array | None = None

    def __init__(
        self,
        switch: Switch | None = None,
        layer: int = -1,
        updates: mx.array | None = None,
    ):
        self.switch, self.layer, self.updates = switch, layer, updates

    def leave_gap(
        self, experts: SharedExpertCache, x: mx.array, indices: mx.array, ids: mx.array
    ) -> mx.array:
        assert self.switch is not None
        self.x, self.ids = x, ids
        self.fits = experts.fits(self.layer)
        self.arrays = experts.arrays(self.layer)
        self.filled = mx.zeros((1,), mx.uint8)
        self.seen = self.filled == 1
        if self.fits:
            self.gap = mx.zeros(indices.shape, mx.uint32)
            y = self.switch.in_one(self.arrays, x, mx.depends(self.gap, [self.seen]))
        else:
            like = self.switch.in_one(self.arrays, x, indices)  # for its type; not evaluated
            self.gap = mx.zeros(like.shape, like.dtype)
            y = mx.depends(self.gap, [self.seen])
        self.done = mx.depends(mx.array(0), [y])
        return y

    def fill(self, values: Any) -> None:
        _bytes_of(self.gap)[:] = _bytes_of(values)
        _bytes_of(self.filled)[:] = 1

    def check(self) -> None:
        """The output has been evaluated: it must not have been before its experts were there."""
        if not self.seen.item():
            raise NotLazyError("the model evaluates inside its forward")


class _Pass:
    """Some chunks of a prompt on their way through the model."""

    def __init__(
        self,
        experts: SharedExpertCache,
        cache: list[Any],
        after_chunk: Callable[[list[Any]], None],
        report: Callable[[float], None],
    ):
        self.experts, self.cache = experts, cache
        self.after_chunk, self.report = after_chunk, report
        self.thread = threading.get_ident()
        self.rows: list[list[_Stop]] = []  # [chunk][stop]
        self.last_update: dict[int, int] = {}  # cache entry -> the last stop that follows a write
        self.saved: list[Callable[[], Any] | None] = [_snapshot(entry) for entry in cache]
        self.tokens = 0
        self.expected = set[int]()  # experts that the next layer is predicted to need
        self.right = self.wrong = 0  # predictions of this pass
        self.known = np.array(0)  # [E]: how often the chunks so far chose each expert of a layer
        self.room = 0  # experts of the next layer that can be in memory beside this one's

    def run(self, model: nn.Module, chunks: Sequence[mx.array], emits: bool) -> mx.array | None:
        """The logits after the last chunk, if it is to emit a token."""
        # Held to the end: another thread's claims would move what the gaps are filled with.
        with self.experts.lock:
            try:
                self.experts.settle()
                logits = self.build(model, chunks, emits)
                self.evaluate(logits)
                return logits
            except BaseException:
                self.restore()
                raise

    # ---- build -------------------------------------------------------------------------------

    def build(self, model: nn.Module, chunks: Sequence[mx.array], emits: bool) -> mx.array | None:
        self.experts.defer = self.stop
        try:
            for chunk in chunks:
                self.rows.append([])
                self.marks = [_leaves(c) for c in self.cache]
                self.written: dict[int, int] = {}  # cache entry -> the stop that follows its write
                logits: mx.array = model(chunk[None], cache=self.cache)[:, -1]
                self.add(_Stop())
                self.after_chunk(self.cache)
                self.tokens += len(chunk)
                self.note_updates()
        finally:
            self.experts.defer = None
        if any([s.switch for s in row] != [s.switch for s in self.rows[0]] for row in self.rows):
            raise NotLazyError("the model calls its layers in an order that depends on the chunk")
        order = [s.layer for s in self.rows[0] if s.switch is not None]
        self.following = dict(itertools.pairwise(order))
        return logits if emits else None  # their graph would keep the cache as it was

    def stop(
        self,
        switch: Switch,
        layer: int,
        x: mx.array,
        indices: mx.array,
        ids: mx.array,
        weights: Weights | None,
    ) -> mx.array | None:
        """What a switch module calls instead of computing: its output, still to be filled in."""
        if threading.get_ident() != self.thread:
            return None
        stop = _Stop(switch, layer)
        self.add(stop)
        y = stop.leave_gap(self.experts, x, indices, ids)
        return y if weights is None else weights.sum(y)

    def add(self, stop: _Stop) -> None:
        row = self.rows[-1]
        for i, entry in enumerate(self.cache):
            leaves = _leaves(entry)
            if not _same(leaves, self.marks[i]):
                self.marks[i] = leaves
                self.written[i] = len(row)
        row.append(stop)

    def note_updates(self) -> None:
        """Tell each stop of a chunk, now built, which cache entries were last written before it."""
        row = self.rows[-1]
        for s in set(self.written.values()):
            leaves = [_leaves(self.cache[i]) for i, at in self.written.items() if at == s]
            arrays = [a for a in itertools.chain(*leaves) if isinstance(a, mx.array)]
            # Not the arrays themselves: the next chunk writes into the same objects.
            row[s].updates = mx.depends(mx.array(0), arrays)
        for i, s in self.written.items():
            self.last_update[i] = max(self.last_update.get(i, 0), s)

    # ---- evaluate ----------------------------------------------------------------------------

    def evaluate(self, logits: mx.array | None) -> None:
        stops = len(self.rows[0])
        if self.rows[0][0].switch is not None:
            self.room = self.experts.room_ahead(self.rows[0][0].layer, 0)
        # What comes after a chunk's last cache update is for its logits only. Where nobody asks for
        # them, let go of it: it would keep the cache as it was at that chunk.
        ends = []
        for row in self.rows:
            end = max((s for s in range(stops) if row[s].updates is not None), default=0)
            if logits is not None and row is self.rows[-1]:
                end = stops
            row[end:stops] = [_Stop(updates=stop.updates) for stop in row[end:stops]]
            ends.append(end)
        for s in range(stops):
            waiting = []
            self.known = np.array(0)
            # If all chunks will want experts of the next layer, some may be read ahead.
            coming = self.following.get(self.rows[0][s].layer)
            if not all(s + 1 < end for end in ends):
                coming = None
            predict = self.predictor(self.rows[0][s], coming)
            for j, row in enumerate(self.rows):
                if s > ends[j]:
                    continue
                stop, before = row[s], row[s - 1] if s else None
                wanted = [] if stop.updates is None else [stop.updates]
                if before is not None:
                    wanted.append(before.done)
                if s < ends[j] and stop.switch is not None:
                    wanted += [stop.x, stop.ids]
                    if predict is not None:
                        stop.guess = predict(stop.x, max(1, stop.ids.shape[-1] // 2))
                        wanted.append(stop.guess)
                    waiting.append(stop)
                elif s < ends[j] and logits is not None:
                    wanted.append(logits)
                mx.eval(wanted)
                if before is not None:
                    before.check()
                    row[s - 1] = _Stop()  # frees what it held
                self.report((s + (j + 1) / len(self.rows)) / stops)
                if waiting and row is not self.rows[-1]:
                    self.read_known(waiting[-1])
            self.experts.settle()
            self.release(s)
            mx.clear_cache()
            if waiting:
                self.serve(waiting, (s + 1) / stops, coming)

    def serve(self, stops: list[_Stop], share: float, coming: int | None) -> None:
        """Have the experts of one layer for all chunks, and fill the gaps.

        Args:
            coming: the layer of which experts may be read meanwhile.
        """
        experts, first = self.experts, stops[0]
        layer, switch = first.layer, first.switch
        assert switch is not None
        ids = [without_zero_experts(experts, layer, np.array(s.ids)) for s in stops]
        flat = np.concatenate([i.ravel() for i in ids])
        waves = experts.waves(layer, flat)
        needed = self.expected.intersection(itertools.chain(*waves))
        self.right += len(needed)
        self.wrong += len(self.expected) - len(needed)
        self.expected = set()
        stats = experts.stats.layers[layer]
        stats.calls += 1
        stats.waves += len(waves)
        if first.fits:
            experts.claim(layer, waves[0])
            if len(waves) > 1 or any(s.arrays is not experts.arrays(layer) for s in stops):
                raise RuntimeError("expert slots were taken away while a prompt was using them")
            table = experts.table(layer).astype(np.uint32)
            self.room = 0 if coming is None else experts.room_ahead(coming, len(waves[0]))
            if coming is not None and experts.may_prefetch(coming):
                self.read_ahead(coming, stops, len(waves[0]))
            for stop, i in zip(stops, ids, strict=True):
                stop.fill(table[i])
                experts.hold(stop.done)
            experts.keep_most_used(layer, flat)
        else:
            calls = [(s.x, i) for s, i in zip(stops, ids, strict=True)]
            outputs = switch.in_waves(calls, waves, lambda: self.report(share))
            for stop, y in zip(stops, outputs, strict=True):
                stop.fill(y)

    def predictor(self, stop: _Stop, coming: int | None) -> Predictor | None:
        """What guesses a coming layer's experts from the input of this one, if that is of use."""
        if coming is None or not stop.fits or not self.experts.reader.slow:
            return None
        assert stop.switch is not None
        return next((predict for i, predict in stop.switch._bets if i == coming), None)

    def read_ahead(self, coming: int, stops: list[_Stop], used: int) -> None:
        """Let experts of the coming layer be read while this one computes with `used` of its own.

        Those that it is predicted to choose often, as many as there is room for. Where nothing
        predicts them: all, if this layer needed all of its own and there is room for all.
        """
        experts, layer, room = self.experts, stops[0].layer, self.room
        count = experts.layouts[coming].num_experts
        guesses = [s.guess for s in stops if s.guess is not None]
        if guesses and self.wrong <= FEW_WRONG + MOST_WRONG * (self.right + self.wrong):
            often = OFTEN if guesses[0].shape[-1] < stops[0].ids.shape[-1] else OFTEN_UNRANKED
            flat = np.concatenate([np.array(g).ravel() for g in guesses])
            times, there = np.bincount(flat, minlength=count), experts.table(coming) >= 0
            wanted = _most_wanted(times, there, often)[:room]
            self.expected = {e for e in wanted if not there[e]}
        elif used == experts.layouts[layer].num_experts and room >= count:
            wanted = list(range(count))
        else:
            return
        experts.prefetch(coming, wanted, judged=False)

    def read_known(self, stop: _Stop) -> None:
        """Let experts be read that this chunk and those before it need of a layer, while others
        come up to it.

        The layer before is still in use, by those others: there is only the room beside it.
        """
        experts, layer = self.experts, stop.layer
        if not (stop.fits and experts.reader.slow):
            return
        there = experts.table(layer) >= 0
        count = len(there)
        self.known = self.known + np.bincount(np.array(stop.ids).ravel(), minlength=count)[:count]
        if not experts.may_prefetch(layer):
            return
        times = self.known.copy()
        for e in experts.bet_on(layer):
            there[e], times[e] = True, max(1, times[e])
        wanted = _most_wanted(times, there, 1)[: self.room]
        # What is still to be evaluated reads slots of the claim alone, which no bet takes.
        experts.prefetch(layer, wanted, judged=False, settle=False)

    # ---- undo --------------------------------------------------------------------------------

    def release(self, s: int) -> None:
        """Keep no copy of what can be undone by trimming: entries that are complete by now."""
        for i, last in self.last_update.items():
            if last == s and _trims(self.cache[i]):
                self.saved[i] = None

    def restore(self) -> None:
        """Put the prompt cache back to what it was before this pass."""
        self.rows.clear()
        for i, saved in enumerate(self.saved):
            if saved is None:
                self.cache[i].trim(self.tokens)
            else:
                self.cache[i] = saved()


def _most_wanted(times: np.ndarray, there: np.ndarray, least: int) -> list[int]:
    """Experts that were chosen so many times, the most frequent first.

    Those that are in memory come before them, however seldom they were chosen: they are not to be
    evicted for one that is not.
    """
    chosen = np.where(there, times > 0, times >= least)
    order = np.lexsort((-times, ~there))
    return order[chosen[order]].tolist()  # type: ignore[no-any-return]


# ---- prompt caches, whatever their class ---------------------------------------------------------


def _trims(entry: Any) -> bool:
    """Whether `trim` undoes all writes: true where a cache only ever grows."""
    if isinstance(entry, CacheList):
        return all(map(_trims, entry.caches))
    return type(entry) in (KVCache, QuantizedKVCache)


def _leaves(value: Any) -> list[Any]:
    """The arrays and plain values that a cache entry is made of."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, dict):
        return _leaves(list(value.values()))
    if isinstance(value, (list, tuple)):
        return list(itertools.chain.from_iterable(map(_leaves, value)))
    if hasattr(value, "__dict__") and not callable(value):
        return _leaves(list(vars(value).values()))
    return [value]


def _same(a: list[Any], b: list[Any]) -> bool:
    """Whether nothing was written between two looks at an entry (each write moves an offset)."""
    return len(a) == len(b) and all(
        x is y or (not isinstance(x, mx.array) and not isinstance(y, mx.array) and x == y)
        for x, y in zip(a, b, strict=True)
    )


def _snapshot(value: Any) -> Callable[[], Any]:
    """Remember a cache entry; the function returned makes the same object be as it was."""
    if isinstance(value, mx.array):
        alias = copy.copy(value)  # shares the data; writing to `value` then leaves it alone
        return lambda: alias
    if isinstance(value, dict):
        items = {k: _snapshot(v) for k, v in value.items()}
        return lambda: {k: v() for k, v in items.items()}
    if isinstance(value, (list, tuple)):
        parts = [_snapshot(v) for v in value]
        return lambda: type(value)(v() for v in parts)
    if hasattr(value, "__dict__") and not callable(value):
        fields = _snapshot(vars(value))

        def restore() -> Any:
            now = fields()
            vars(value).clear()
            vars(value).update(now)
            return value

        return restore
    return lambda: value


def _bytes_of(array: Any) -> np.ndarray:
    """A view of the bytes of a contiguous array, which is evaluated for it; writable if MLX's."""
    return np.frombuffer(memoryview(array), np.uint8)
