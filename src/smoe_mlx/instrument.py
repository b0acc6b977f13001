"""The instrument panel: where every millisecond of decoding goes.

    with smoe_mlx.instrument(model) as panel:
        for response in smoe_mlx.stream_generate(model, tokenizer, prompt):
            ...
    print(panel)

MLX is lazy, so time can only be told apart where something is evaluated. While a model is
instrumented, `mx.eval` is called before and after each switch module, and before and after the LM
head. That makes it slower: read shares, not speeds. Results are the same. The classes of a few
modules are swapped for that time, so that a model that is not instrumented pays nothing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .cache.bets import BetStats
from .layers.lookahead import Predictor
from .layers.mixed import MixedSwitch
from .layers.switch import StreamingSwitchGLU, StreamingSwitchMLP
from .panel import Lap, Panel, PanelLayer, TokenTimes
from .stats import Streaming, streaming_of
from .store.probe import probe_disk

RANKS = (1, 2, 4)  # how many predicted experts the coverage is told for, in multiples of top-k


@contextmanager
def instrument(model: nn.Module, probe: bool = False) -> Iterator[Panel]:
    """Measure what decodes on `model` inside this context, by whatever loop.

    Args:
        model: one that `load` made.
        probe: measure the disk too, on the model's own files (about a second, direct reads).

    Yields:
        The panel. It is whole when the context ends.

    Raises:
        UnsupportedModelError: the model was not loaded by `smoe_mlx.load`.
        ValueError: the model is being instrumented already.
    """
    meter = _Meter(model, streaming_of(model))
    if probe:
        reader = meter.cache.reader
        meter.panel.disk = probe_disk(reader.sources, meter.cache.layouts, reader.threads)
    try:
        meter.swap_classes(model)
        yield meter.panel
        meter.close_token()
    finally:
        meter.restore_classes()
        meter.sum_up()


class _Meter:
    """Takes the time while a model runs. The clock is read at each boundary, and what has passed
    since the boundary before goes into one bucket: so the buckets add up, whatever happens."""

    def __init__(self, model: nn.Module, streaming: Streaming):
        if hasattr(type(model), "timed_sampling"):
            raise ValueError("this model is being instrumented already")
        self.cache = streaming.cache
        layouts = self.cache.layouts
        self.panel = Panel(layers=[PanelLayer(x.path) for x in layouts])
        self.swapped: list[tuple[nn.Module, type]] = []
        self.bets: list[tuple[Any, tuple[tuple[int, Predictor], ...]]] = []
        self.next_layer: dict[int, tuple[int, Predictor]] = {}
        self.token: TokenTimes | None = None
        self.start = self.last = self.waited = 0.0
        self.layer: int | None = None  # where the model is; None before and after its MoE layers
        self.uses = [np.zeros(x.num_experts, np.int64) for x in layouts]
        self.previous: list[set[int]] = [set() for _ in layouts]
        self.overlaps: list[list[float]] = [[] for _ in layouts]
        self.expected: dict[int, dict[int, set[int]]] = {}  # layer -> r -> experts
        self.covered: dict[int, list[float]] = {}  # r -> shares

    # ---- time --------------------------------------------------------------------------------

    def lap(self, bucket: str) -> None:
        """What has passed since the last lap was `bucket`, but for the waiting for reads in it."""
        if self.token is None:
            return
        now, waited = time.perf_counter(), self.cache.reader.stats.wait_seconds
        reads, start = waited - self.waited, self.last - self.start
        parts = [(bucket, now - self.last - reads)]
        if reads:
            parts.insert(0, ("reads", reads))
        for name, seconds in parts:
            setattr(self.token, name, getattr(self.token, name) + seconds)
            self.token.laps.append(Lap(name, self.layer, start, seconds))
            start += seconds
        self.last, self.waited = now, waited

    def evaluate(self, array: mx.array, bucket: str) -> None:
        self.lap("host")
        mx.eval(array)
        self.lap(bucket)

    def open_token(self) -> None:
        stats = self.cache.stats
        self.before = [(x.hits, x.misses) for x in stats.layers]
        self.bets_before = asdict(stats.bets)
        self.nbytes_before = self.cache.reader.stats.bytes
        self.expected.clear()
        self.token = TokenTimes()
        self.waited = self.cache.reader.stats.wait_seconds
        self.start = self.last = time.perf_counter()

    def close_token(self) -> None:
        """The token ended with the last lap."""
        token, self.token = self.token, None
        if token is None:
            return
        token.wall = self.last - self.start
        stats, panel = self.cache.stats, self.panel
        for layer, now, (hits, misses) in zip(panel.layers, stats.layers, self.before, strict=True):
            layer.hits += now.hits - hits
            layer.misses += now.misses - misses
            token.hits += now.hits - hits
            token.misses += now.misses - misses
        token.nbytes = self.cache.reader.stats.bytes - self.nbytes_before
        for f in fields(BetStats):
            more = getattr(stats.bets, f.name) - self.bets_before[f.name]
            setattr(panel.bets, f.name, getattr(panel.bets, f.name) + more)
        panel.tokens.append(token)

    # ---- boundaries --------------------------------------------------------------------------

    def swap_classes(self, model: nn.Module) -> None:
        switches = (StreamingSwitchGLU, StreamingSwitchMLP)
        modules = model.named_modules()
        heads = [m for path, m in modules if path.rpartition(".")[2] == "lm_head"]
        for _, module in modules:
            if isinstance(module, switches):
                self.swap_switch(module)
            elif isinstance(module, MixedSwitch):
                self.swap(module, __call__=self.before_mixed)
            elif not heads and isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
                self.swap(module, as_linear=self.around_head)
        for head in heads:
            self.swap(head, __call__=self.around_head)
        self.swap(model, __call__=self.around_model)
        type(model).timed_sampling = staticmethod(self.timed_sampling)

    def swap_switch(self, module: Any) -> None:
        self.swap(module, __call__=self.around_switch, in_waves=self.around_waves)
        self.bets.append((module, module._bets))
        for layer, predict in module._bets:
            if layer != module._layer:
                self.next_layer[module._layer] = layer, predict
        timed = [(layer, self.timed_prediction(predict)) for layer, predict in module._bets]
        module.bet(timed, module._hits_first)

    def swap(self, module: nn.Module, **methods: Callable[..., Any]) -> None:
        """Let `methods` be called as method(the method it replaces, module, arguments...)."""
        kind = type(module)

        def replaced(name: str) -> Callable[..., Any]:
            old, new = getattr(kind, name), methods[name]
            return lambda module, *args, **kwargs: new(old, module, *args, **kwargs)

        timed = type(kind.__name__, (kind,), {name: replaced(name) for name in methods})
        self.swapped.append((module, kind))
        module.__class__ = timed

    def restore_classes(self) -> None:
        for module, bets in self.bets:
            module.bet(bets, module._hits_first)
        for module, kind in reversed(self.swapped):
            module.__class__ = kind

    def around_model(
        self, call: Callable[..., Any], model: nn.Module, inputs: mx.array, *args: Any, **kw: Any
    ) -> Any:
        decodes = self.cache.defer is None and inputs.size == 1
        self.layer = None
        if self.token is not None and decodes:
            self.evaluate(inputs, "sampling")  # mlx-lm's loop gives what is not evaluated yet
        self.close_token()
        if not decodes:
            return call(model, inputs, *args, **kw)
        self.open_token()
        try:
            logits = call(model, inputs, *args, **kw)
            self.layer = None
            self.evaluate(logits, "dense")
        except BaseException:
            self.token = None  # not completed: it does not count
            raise
        return logits

    def around_head(self, call: Callable[..., Any], head: nn.Module, x: mx.array) -> mx.array:
        y: mx.array
        if self.token is None:
            y = call(head, x)
            return y
        self.layer = None
        self.evaluate(x, "dense")
        y = call(head, x)
        self.evaluate(y, "head")
        return y

    def before_mixed(
        self, call: Callable[..., Any], switch: Any, x: mx.array, indices: mx.array
    ) -> mx.array:
        if self.token is not None:
            self.layer = switch._parts[0]._layer
            self.evaluate(x, "dense")
            self.evaluate(indices, "routing")
        y: mx.array = call(switch, x, indices)
        return y

    def around_switch(
        self, call: Callable[..., Any], switch: Any, x: mx.array, indices: mx.array, *weights: Any
    ) -> mx.array:
        y: mx.array
        if self.token is None:
            y = call(switch, x, indices, *weights)
            return y
        self.layer = switch._layer
        self.evaluate(x, "dense")
        ids = np.array(indices if switch._true_indices is None else switch._true_indices)
        self.lap("routing")
        self.note(switch._layer, x, ids)
        self.lap("panel")
        y = call(switch, x, indices, *weights)
        self.evaluate(y, "experts")
        return y

    def around_waves(
        self, call: Callable[..., Any], switch: Any, *args: Any, **kw: Any
    ) -> Iterator[mx.array]:
        self.lap("host")
        for y in call(switch, *args, **kw):
            self.lap("experts")  # evaluated in there, wave by wave
            yield y

    def timed_prediction(self, predict: Predictor) -> Predictor:
        def timed(x: mx.array, top_k: int) -> mx.array:
            predicted = predict(x, top_k)
            if self.token is not None:
                self.evaluate(predicted, "routing")
            return predicted

        return timed

    def timed_sampling(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        """What the library's own loop calls to get from logits to a token on the host."""

        def timed(*args: Any) -> Any:
            self.lap("host")
            out = sample(*args)
            self.lap("sampling")
            return out

        return timed

    # ---- routing -----------------------------------------------------------------------------

    def note(self, layer: int, x: mx.array, ids: np.ndarray) -> None:
        """Count what a token was routed to, and ask the lookahead about the next layer."""
        count = self.cache.layouts[layer].num_experts
        chosen = {e for e in ids.ravel().tolist() if e < count}
        for r, experts in self.expected.pop(layer, {}).items():
            if chosen:
                self.covered.setdefault(r, []).append(len(chosen & experts) / len(chosen))
        self.uses[layer][list(chosen)] += 1
        if self.panel.tokens and chosen:
            self.overlaps[layer].append(len(chosen & self.previous[layer]) / len(chosen))
        self.previous[layer] = chosen
        if layer in self.next_layer:
            coming, predict = self.next_layer[layer]
            for r in (m * ids.shape[-1] for m in RANKS):
                if r > self.cache.layouts[coming].num_experts:
                    break
                predicted = np.array(predict(x, r)).ravel().tolist()
                if len(predicted) < r:  # a router that tells its choice, not its ranking
                    break
                self.expected.setdefault(coming, {})[r] = set(predicted)

    def sum_up(self) -> None:
        panel = self.panel
        for layer, shares in zip(panel.layers, self.overlaps, strict=True):
            layer.overlap = sum(shares) / len(shares) if shares else None
        total = sum(int(uses.sum()) for uses in self.uses)
        if total:
            most = np.zeros(max(len(uses) for uses in self.uses), np.int64)
            for uses in self.uses:
                most[: len(uses)] += np.sort(uses)[::-1]
            panel.most_used = (np.cumsum(most) / total).tolist()
        panel.predicted = [(r, sum(x) / len(x)) for r, x in sorted(self.covered.items())]
