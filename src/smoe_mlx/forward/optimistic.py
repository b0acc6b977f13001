"""Optimistic decode: compute first, look at the routing afterwards.

The exact way stops at every MoE layer for the host to read what was routed where. Here slot numbers
come from a table in the graph, the next layers are built and started meanwhile, and the host
compares the routing with its own copy of the table later: one layer later (`lag1`), or when the
whole token is there (`token`). If an expert was not in memory, everything from its layer on is
thrown away: the prompt cache is put back, and the forward is called again. Layers before that one
return what they returned before, and what the host knows by now is claimed as in the exact way. So
no result ever depends on an expert that was not there. The routing that the failed pass computed
for later layers, mostly right, is read ahead.

Layers are resumed without knowing what they are: by their class, whose `__call__` is replaced, with
every argument that a layer may write to remembered. `self_test` resumes at several layers and
compares bits; a model that fails it is decoded the exact way.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, make_prompt_cache

from ..cache.experts import SharedExpertCache
from ..handover import flat
from ..kernels.experts import Weights
from ..layers.lookahead import look_up
from ..layers.mixed import MixedSwitch
from ..layers.switch import StreamingSwitchGLU, StreamingSwitchMLP
from .rollback import alias, remember, restore

Switch = StreamingSwitchGLU | StreamingSwitchMLP
ROUNDS = 4  # failed passes of one token before the rest of it goes the exact way


class _Miss(Exception):
    """An expert of the first unverified call was not in memory."""


class _Call:
    """One call of a switch module within the current pass, not verified yet."""

    __slots__ = ("ids", "layer", "lookup", "output", "place", "posted")

    def __init__(self, layer: int, place: int, ids: mx.array, lookup: mx.array, output: mx.array):
        self.layer, self.place, self.ids, self.lookup = layer, place, ids, lookup
        self.output, self.posted = output, None


class _Memo:
    """What a layer did: its result, its caches, and other arguments that it may have written to."""

    def __init__(self, out: Any, caches: list[Any], written: list[Any], calls: int):
        self.out, self.caches, self.written, self.calls = out, caches, written, calls


class OptimisticDecoder:
    """Decodes single tokens of a streamed model with the host's checks lagging behind.

    Attributes:
        refused: why this model cannot be decoded this way, or "".
        passes: forwards begun; `failed` of them were thrown away.
    """

    def __init__(self, model: nn.Module, experts: SharedExpertCache):
        self.experts = experts
        self.passes = self.failed = 0
        self.refused = _why_not(model)
        self._tested = False
        self._running = False
        self._thread = 0

    # ---- one token ---------------------------------------------------------------------------

    def step(
        self, model: nn.Module, tokens: mx.array, cache: list[Any], lag: int | None
    ) -> mx.array:
        """The logits [B, 1, vocab] after one token a row, evaluated; the caches have taken it in.

        Args:
            tokens: [B, 1].
            lag: how many layers the check stays behind. None: until the token is there.

        Raises:
            ExpertReadError, CheckpointChangedError: the caches are then as before.
        """
        with self.experts.lock:
            return self._step(model, tokens, cache, lag)

    def _step(
        self, model: nn.Module, tokens: mx.array, cache: list[Any], lag: int | None
    ) -> mx.array:
        experts = self.experts
        experts.settle()
        before = [remember(c) for c in cache]
        self._cache_ids = set(_ids(cache))
        self._lag, self._thread = lag, threading.get_ident()
        self._known: list[list[int]] = []  # the routing of verified calls, and of the missed one
        self._places: list[int] = []  # the layer calls that they were made in
        self._guesses: list[tuple[int, list[int]]] = []
        self._memos: dict[int, _Memo] = {}
        self._resume_at, self._exact_from = 0, 1 << 30
        for attempt in range(1, ROUNDS + 2):
            self._calls, self._places_seen = 0, 0
            self._unverified: list[_Call] = []
            self.passes += 1
            try:
                self._running, experts.defer = True, self._call
                try:
                    logits: mx.array = model(tokens, cache=cache)
                    mx.eval(logits, [c.ids for c in self._unverified])
                    while self._unverified:
                        self._verify()
                finally:
                    self._running, experts.defer = False, None
                break
            except _Miss:
                self.failed += 1
                # Before anything is evaluated again, let go of the failed pass: an array that
                # holds a KV buffer would have it copied.
                logits = mx.array(0)
                self._take_guesses()
                for c, state in zip(cache, before, strict=True):
                    restore(c, state)
                self._resume_at = self._places[-1]
                self._memos = {i: m for i, m in self._memos.items() if i < self._resume_at}
                if attempt == ROUNDS:
                    self._exact_from = len(self._known)
            except BaseException:
                self._unverified = []
                for c, state in zip(cache, before, strict=True):
                    restore(c, state)
                raise
        self._memos = {}
        return logits

    def _call(
        self,
        switch: Switch,
        layer: int,
        x: mx.array,
        indices: mx.array,
        ids: mx.array,
        weights: Weights | None,
    ) -> mx.array | None:
        """What a switch module calls instead of reading its routing. None: go on the exact way."""
        if threading.get_ident() != self._thread:
            return None
        n, self._calls = self._calls, self._calls + 1
        experts = self.experts
        if n < len(self._known):
            last = n == len(self._known) - 1
            guesses = self._guesses if last and experts.may_bet(layer) else ()
            return switch.with_ids(x, self._known[n], indices.shape, guesses, weights)
        if n >= self._exact_from:
            return None
        experts.land(layer)
        lookup = experts.lookup(layer)
        y = switch.by_lookup(x, indices, lookup, weights)
        call = _Call(layer, self._places_seen - 1, ids, lookup, y)
        self._unverified.append(call)
        if self._lag is not None:
            (call.posted,) = experts.handover.post([ids])
            while len(self._unverified) > self._lag:
                self._verify()
        return y

    def lossy_step(
        self, model: nn.Module, tokens: mx.array, cache: list[Any]
    ) -> tuple[mx.array, int]:
        """(logits [B, 1, vocab], experts that were left out because they were not in memory).

        Not the model's own answer: the seeds' staged decode. What was missing is read for later.
        """
        experts = self.experts
        calls: list[_Call] = []

        def call(
            switch: Switch,
            layer: int,
            x: mx.array,
            indices: mx.array,
            ids: mx.array,
            weights: Weights | None,
        ) -> mx.array:
            experts.land(layer)
            lookup = experts.lookup(layer)
            there = mx.take(mx.array(experts.table(layer) >= 0), indices)
            y = mx.where(there[..., None], switch.by_lookup(x, indices, lookup), 0)
            calls.append(_Call(layer, 0, ids, lookup, y))
            return y if weights is None else weights.sum(y)

        dropped = 0
        with experts.lock:
            experts.settle()
            experts.defer = call
            try:
                logits: mx.array = model(tokens, cache=cache)
                mx.eval(logits, [c.ids for c in calls])
            finally:
                experts.defer = None
            for c in calls:
                ids = self._ids_of(c)
                if not experts.saw(c.layer, ids, c.lookup):
                    table = experts.table(c.layer)
                    missing = [e for e in dict.fromkeys(ids) if table[e] < 0]
                    dropped += len(missing)
                    experts.prefetch(c.layer, missing)
        return logits, dropped

    def _verify(self) -> None:
        """Compare the routing of the first unverified call with the slots that it was given."""
        call = self._unverified.pop(0)
        ids = self._ids_of(call)
        self._known.append(ids)
        self._places.append(call.place)
        if not self.experts.saw(call.layer, ids, call.lookup):
            raise _Miss
        self.experts.hold(call.output)

    def _ids_of(self, call: _Call) -> list[int]:
        if call.posted is None:
            return flat(call.ids.tolist(), call.ids.shape)
        return self.experts.handover.take(call.posted)

    def _take_guesses(self) -> None:
        """What the failed pass would have used later."""
        self._guesses = []
        for call in self._unverified:
            count = self.experts.layouts[call.layer].num_experts
            ids = self._ids_of(call)
            self._guesses.append((call.layer, [e for e in ids if e < count]))
        self._unverified = []

    # ---- layers ------------------------------------------------------------------------------

    def layer_call(
        self, call: Callable[..., Any], layer: nn.Module, args: tuple[Any, ...], kw: dict[str, Any]
    ) -> Any:
        """Call a layer, or do what it did in the pass before."""
        if not self._running or threading.get_ident() != self._thread:
            return call(layer, *args, **kw)
        values = [*args, *(kw[name] for name in sorted(kw))]
        caches = [v for v in values if id(v) in self._cache_ids]
        others = [v for v in values if _can_be_written(v) and id(v) not in self._cache_ids]
        place, self._places_seen = self._places_seen, self._places_seen + 1
        if place < self._resume_at:
            memo = self._memos[place]
            for c, state in zip(caches, memo.caches, strict=True):
                restore(c, state)
            for value, contents in zip(others, memo.written, strict=True):
                _fill(value, contents)
            self._calls += memo.calls
            return _bring_back(memo.out, others)
        before = self._calls
        out = call(layer, *args, **kw)
        self._memos[place] = _Memo(
            _put_away(out, others),
            [remember(c) for c in caches],
            [_contents(v) for v in others],
            self._calls - before,
        )
        return out

    # ---- self-test ---------------------------------------------------------------------------

    def ready(self, model: nn.Module) -> bool:
        """Whether this model can be decoded this way. The first time, that is tried."""
        if not self._tested and not self.refused:
            with self.experts.lock:
                _swap_layer_classes(model, self)
                if not self._resumes_right(model):
                    self.refused = "a resumed pass differs from a whole one"
            self._tested = True  # not before: an error or an interrupt is no verdict
        return not self.refused

    def _resumes_right(self, model: nn.Module) -> bool:
        """Decode two tokens after a prompt of three, resumed at several layers and not."""
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([[1, 2, 3]]), cache=cache))
        before = [remember(c) for c in cache]

        def two_tokens(resume_at: int | None) -> tuple[list[mx.array], int]:
            for c, state in zip(cache, before, strict=True):
                restore(c, state)
            first = self._try_resume(model, mx.array([[4]]), cache, resume_at)
            places = self._places_seen
            second = model(mx.array([[5]]), cache=cache)
            mx.eval(first, second)
            return [first, second], places

        whole, places = two_tokens(None)
        for at in sorted({1, places // 2, places}):
            resumed, _ = two_tokens(at)
            if not all(mx.array_equal(a, b).item() for a, b in zip(whole, resumed, strict=True)):
                return False
        return True

    def _try_resume(
        self, model: nn.Module, tokens: mx.array, cache: list[Any], resume_at: int | None
    ) -> mx.array:
        """A forward the exact way; with `resume_at`, done again from that layer on."""
        self.experts.settle()
        before = [remember(c) for c in cache]
        self._cache_ids, self._thread = set(_ids(cache)), threading.get_ident()
        self._memos, self._calls = {}, 0
        for at in [0] if resume_at is None else [0, resume_at]:
            for c, state in zip(cache, before, strict=True):
                restore(c, state)
            self._resume_at, self._places_seen, self._running = at, 0, True
            try:
                logits: mx.array = model(tokens, cache=cache)
                mx.eval(logits)
            finally:
                self._running = False
        self._memos = {}
        return logits


def _why_not(model: nn.Module) -> str:
    roots = set()
    for path, module in model.named_modules():
        if isinstance(module, MixedSwitch):
            return "experts of one layer are quantised in several ways"
        if isinstance(module, (StreamingSwitchGLU, StreamingSwitchMLP)):
            if module.has_zero_experts:
                return "its routing names numbers that are no experts"
            roots.add(_list_path(path))
    if len(roots) != 1 or None in roots:
        return "its MoE layers are not in one list"
    return ""


def _list_path(path: str) -> str | None:
    """The path of the list of layers that a module is in."""
    names = path.split(".")
    return next((".".join(names[:i]) for i, name in enumerate(names) if name.isdigit()), None)


def _swap_layer_classes(model: nn.Module, decoder: OptimisticDecoder) -> None:
    """Let the layers of the list with MoE layers be called through the decoder, once."""
    switches = (StreamingSwitchGLU, StreamingSwitchMLP)
    path = next(p for p, m in model.named_modules() if isinstance(m, switches))
    layers: Sequence[nn.Module] = look_up(model, _list_path(path) or "")

    def resumable(kind: type) -> type:
        call = kind.__call__

        def through(layer: nn.Module, *args: Any, **kw: Any) -> Any:
            return decoder.layer_call(call, layer, args, kw)

        return type(kind.__name__, (kind,), {"__call__": through, "resumable": True})

    left = [layer for layer in layers if not getattr(type(layer), "resumable", False)]
    kinds = {kind: resumable(kind) for kind in {type(layer) for layer in left}}
    for layer in left:
        layer.__class__ = kinds[type(layer)]


# ---- arguments of layers, whatever they are ------------------------------------------------------


class _Argument:
    """In the place of an argument within a layer's result."""

    def __init__(self, index: int):
        self.index = index


def _ids(caches: Sequence[Any]) -> list[int]:
    out = []
    for c in caches:
        out += [id(c), *(_ids(c.caches) if isinstance(c, CacheList) else [])]
    return out


def _can_be_written(value: Any) -> bool:
    if isinstance(value, (nn.Module, mx.array, type)):
        return False
    return isinstance(value, (dict, list)) or (hasattr(value, "__dict__") and not callable(value))


def _contents(value: Any) -> Any:
    return alias(value if isinstance(value, (dict, list)) else vars(value))


def _fill(value: Any, contents: Any) -> None:
    contents = alias(contents)
    if isinstance(value, list):
        value[:] = contents
        return
    items = value if isinstance(value, dict) else vars(value)
    items.clear()
    items.update(contents)


def _put_away(out: Any, arguments: Sequence[Any]) -> Any:
    for i, argument in enumerate(arguments):
        if out is argument:
            return _Argument(i)
    if isinstance(out, tuple):
        return tuple(_put_away(x, arguments) for x in out)
    return alias(out)


def _bring_back(out: Any, arguments: Sequence[Any]) -> Any:
    if isinstance(out, _Argument):
        return arguments[out.index]
    if isinstance(out, tuple):
        return tuple(_bring_back(x, arguments) for x in out)
    return alias(out)
