"""StreamingSwitchGLU and StreamingSwitchMLP: mlx-lm's switch layers over a SharedExpertCache.

Same call, same result: `(x [..., D], indices [..., k]) -> [..., k, D]`. Top-k, weights and sum stay
with the model's own block, unless kernels are to compute them (blocks.py). The arithmetic is that
of `mlx_lm.models.switch_layers`, operation for operation, with slot numbers in place of expert
numbers. MLX is all that is imported, so that these layers serve models of other libraries too.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..cache.bookkeeping import Arrays
from ..cache.experts import SharedExpertCache
from ..device import using_mlx
from ..kernels.experts import FusedExperts, Weights
from ..kernels.route import FusedRouter
from .lookahead import Predictor

# mlx-lm sorts the rows by expert from this many (token, expert) pairs on.
SORT_FROM = 64
# Tokens in which a layer makes sure that computing hits first changes no bit.
HITS_FIRST_TRIALS = 2


# The projections of both kinds of experts, and what tensors each may have.
GLU, MLP = ("gate_proj", "up_proj", "down_proj"), ("fc1", "fc2")
KINDS = ("weight", "scales", "biases", "bias", "global_scale")
# (bits, group size) -> the mode of weights whose scales are bytes.
BYTE_MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}


class SwiGLU(nn.Module):
    """`activation(x_up, x_gate)` of most models: silu(x_gate) * x_up."""

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        return _swiglu(gate, x)


@functools.partial(mx.compile, shapeless=True)
def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    y: mx.array = nn.silu(gate) * x
    return y


@dataclass(frozen=True)
class Projection:
    """One linear map of an expert: its name in the bank, and how it is quantised (None: not)."""

    name: str
    group_size: int | None = None
    bits: int | None = None
    mode: str | None = None

    def __call__(
        self, arrays: Arrays, x: mx.array, indices: mx.array, sorted_indices: bool
    ) -> mx.array:
        """x [..., 1, I], indices [...] rows of the arrays -> [..., 1, O]."""
        weight = arrays[self.name, "weight"]
        if self.mode is None:
            x = mx.gather_mm(
                x, weight.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=sorted_indices
            )
        else:
            x = mx.gather_qmm(
                x,
                weight,
                arrays[self.name, "scales"],
                arrays.get((self.name, "biases")),
                rhs_indices=indices,
                transpose=True,
                group_size=self.group_size,
                bits=self.bits,
                mode=self.mode,
                global_scale=arrays.get((self.name, "global_scale")),
                sorted_indices=sorted_indices,
            )
        bias = arrays.get((self.name, "bias"))
        if bias is not None:
            x = x + mx.expand_dims(bias[indices], -2)
        return x


def quantisation(
    input_dims: int, weight: int, scales: int, byte_scales: bool
) -> tuple[int, int, str]:
    """(group size, bits, mode) from the lengths of the rows of `weight` (uint32) and `scales`.

    Affine, or one of the modes whose scales are bytes ("" if it is none of them).
    """
    group_size, bits = input_dims // max(scales, 1) or 1, weight * 32 // input_dims
    mode = BYTE_MODES.get((bits, group_size), "") if byte_scales else "affine"
    return group_size, bits, mode


def without_zero_experts(cache: SharedExpertCache, layer: int, ids: np.ndarray) -> np.ndarray:
    """Replace what is no expert by one that is needed or in memory anyway; its weight is 0."""
    real = ids < cache.layouts[layer].num_experts
    if real.all():
        return ids
    there = ids[real] if real.any() else np.flatnonzero(cache.table(layer) >= 0)
    return np.where(real, ids, there[0] if there.size else 0)


class _Early(NamedTuple):
    """A call's output y, built before its routing is known: `slots` are filled in afterwards."""

    arrays: Arrays
    slots: mx.array
    y: mx.array


class _StreamingSwitch(nn.Module):
    """What both kinds share: from expert numbers to slots, and back to the caller's order."""

    def __init__(self, cache: SharedExpertCache, layer: int, activation: nn.Module):
        super().__init__()
        self.activation = activation
        self._cache = cache
        self._layer = layer
        self._num_experts = cache.layouts[layer].num_experts
        self._trials = HITS_FIRST_TRIALS
        self.has_zero_experts = False  # then `expect` is called before each call
        self.fused: FusedExperts | None = None  # kernels in the place of mlx-lm's operations
        self.router: FusedRouter | None = None  # the same, of the block around
        self.bet((), hits_first=True)
        self._set_true_indices(None)

    def _set_true_indices(self, indices: mx.array | None) -> None:
        # Past nn.Module, which would keep an array among its parameters, slow to look up.
        object.__setattr__(self, "_true_indices", indices)

    @property
    def cache(self) -> SharedExpertCache:
        """Where the experts come from, and what was counted there."""
        return self._cache

    def _experts(self, arrays: Arrays, x: mx.array, idx: mx.array, in_order: bool) -> mx.array:
        raise NotImplementedError

    def bet(self, bets: Sequence[tuple[int, Predictor]], hits_first: bool) -> None:
        """How single tokens are decoded.

        Args:
            bets: (layer, what predicts its experts from this module's x): they are read early.
            hits_first: compute the experts that are in memory while others are being read.
        """
        # Past nn.Module, as above.
        object.__setattr__(self, "_bets", tuple(bets))
        self._hits_first = hits_first

    def expect(self, indices: mx.array) -> None:
        """Routing of the coming call as the router made it: numbers from E on are no experts.

        For blocks that rewrite such numbers to expert 0 with weight 0, so that it is not read.
        """
        self._set_true_indices(indices)

    def __call__(self, x: mx.array, indices: mx.array, weights: Weights | None = None) -> mx.array:
        """x [..., D], indices [..., k] (any integer type, in [0, E)) -> [..., k, D].

        Args:
            weights: return their sum [..., D] instead.

        Raises:
            ExpertReadError, CheckpointChangedError: the bytes of an expert could not be read.
            SmoeError: the process was forked from one that had used MLX.
        """
        using_mlx()
        true: mx.array | None = self._true_indices
        if self._cache.trace is not None:
            ids = np.array(indices if true is None else true)
            self._cache.trace(self._layer, ids, x, self._bets)
        arrays = self._cache.resident(self._layer)
        if arrays is not None:
            return self.in_one(arrays, x, indices, weights)
        if self._cache.defer is not None:
            self._set_true_indices(None)
            ids_of = indices if true is None else true
            y = self._cache.defer(self, self._layer, x, indices, ids_of, weights)
            if y is not None:
                return y
        if indices.size < SORT_FROM and true is None:
            return self._few(x, indices, weights)
        self._set_true_indices(None)
        ids = np.array(indices if true is None else true)  # the one host read of a layer
        with self._cache.lock:
            self._cache.look_after()
            if true is not None:
                ids = without_zero_experts(self._cache, self._layer, ids)
            waves = self._cache.waves(self._layer, ids)
            stats = self._cache.stats.layers[self._layer]
            stats.calls += 1
            stats.waves += len(waves)
            if len(waves) > 1:
                y = next(self.in_waves([(x, ids)], waves))
                return y if weights is None else weights.sum(y)
            self._cache.claim(self._layer, waves[0])
            slots = mx.array(self._cache.table(self._layer)[ids].astype(np.uint32))
            y = self.in_one(self._cache.arrays(self._layer), x, slots, weights)
            if ids.size >= SORT_FROM:
                mx.eval(y)  # large: holding it would cost memory, and a sync is nothing here
            else:
                self._cache.hold(y)
            return y

    def weighted(
        self,
        x: mx.array,
        indices: mx.array,
        scores: mx.array,
        cast: bool,
        shared: Callable[[], tuple[mx.array, ...]] | None = None,
    ) -> mx.array:
        """`(self(x, indices) * scores[..., None]).sum(axis=-2)` [..., D] and, as `Weights` says,
        what is added to it, for blocks.py."""
        return self(x, indices, Weights(scores, cast, shared))

    def routes(self, logits: mx.array) -> bool:
        """Whether `router` takes these logits, for blocks.py."""
        return self.router is not None and not self.training and self.router.fits(logits)

    def _few(self, x: mx.array, indices: mx.array, weights: Weights | None) -> mx.array:
        """A few rows: what decoding does."""
        cache, layer, shape = self._cache, self._layer, indices.shape
        if cache.is_complete(layer):
            with cache.lock:
                if cache.is_complete(layer):
                    y = self.by_lookup(x, indices, cache.lookup(layer), weights)
                    cache.saw_later(layer, indices)
                    cache.hold(y)
                    return y
        predicted = self.predictions(x, indices, cache.may_bet)
        # The one host read of a layer.
        posted = cache.handover.post([indices, *[experts for _, experts in predicted]])
        early = self._build_early(x, shape, weights)
        ids, *guesses = [cache.handover.take(p) for p in posted]
        bets = [(i, experts) for (i, _), experts in zip(predicted, guesses, strict=True)]
        return self.with_ids(x, ids, shape, bets, weights, early)

    def predictions(
        self, x: mx.array, indices: mx.array, may_bet: Callable[[int], bool]
    ) -> list[tuple[int, mx.array]]:
        """(layer, experts that it will probably need) of the layers that may bet."""
        k = indices.shape[-1]
        if indices.size != k:  # not one token
            return []
        return [(i, predict(x, k)) for i, predict in self._bets if may_bet(i)]

    def _build_early(
        self, x: mx.array, shape: tuple[int, ...], weights: Weights | None
    ) -> _Early | None:
        """The graph of a call's experts, while the device still computes the routing."""
        cache = self._cache
        if self.fused is not None or not cache.handover.fills:
            return None
        with cache.lock:
            arrays, slots = cache.arrays(self._layer), cache.handover.blank(shape)
        return _Early(arrays, slots, self.in_one(arrays, x, slots, weights))

    def by_lookup(
        self, x: mx.array, indices: mx.array, lookup: mx.array, weights: Weights | None = None
    ) -> mx.array:
        """The host does not look: slots come from a table [E] in the graph, right or wrong."""
        return self.in_one(self._cache.arrays(self._layer), x, indices, weights, lookup)

    def with_ids(
        self,
        x: mx.array,
        ids: list[int],
        shape: tuple[int, ...],
        bets: Sequence[tuple[int, list[int]]],
        weights: Weights | None = None,
        early: _Early | None = None,
    ) -> mx.array:
        """A few rows whose experts the host knows.

        Args:
            ids: the routing [*shape], flat.
            bets: (layer, experts) to be read meanwhile.
            early: of `_build_early`, for this call.
        """
        cache, layer = self._cache, self._layer
        one_token = len(ids) == shape[-1]
        with cache.lock:
            cache.look_after()
            cache.catch_up()
            stats = cache.stats.layers[layer]
            stats.calls += 1
            claimed = cache.claim_few(layer, ids, ahead=one_token and self._hits_first)
            if claimed is None:
                array = np.array(ids).reshape(shape)
                waves = cache.waves(layer, array)
                stats.waves += len(waves)
                y = next(self.in_waves([(x, array)], waves))
                return y if weights is None else weights.sum(y)
            stats.waves += 1
            slots, coming = claimed
            try:
                for i, experts in bets:
                    cache.prefetch(i, experts)
                if coming and len(coming) == len(set(ids)):  # none to compute meanwhile
                    cache.finish_few()
                    coming = ()
                arrays = cache.arrays(layer)
                if early is not None and early.arrays is arrays and not coming:
                    cache.handover.fill(early.slots, slots)
                    y = early.y
                else:
                    rows = cache.handover.array(slots, shape)
                    # By the kernels all of them take less time than starting them twice.
                    if coming and self._fused_for(x, rows) is None:
                        y = self._in_two(x, ids, slots, coming, rows, weights)
                    else:
                        cache.finish_few()
                        y = self.in_one(arrays, x, rows, weights)
            finally:
                cache.finish_few()
            # The device starts while the host builds what leads to the next look at a routing.
            mx.async_eval(y)  # type: ignore[no-untyped-call]
            cache.hold(y)
            return y

    def _in_two(
        self,
        x: mx.array,
        ids: list[int],
        slots: list[int],
        coming: Collection[int],
        rows: mx.array,
        weights: Weights | None,
    ) -> mx.array:
        """One token, of whose experts some are still being read: compute the others meanwhile.

        rows: `slots` in the shape of the routing.
        """
        arrays, array = self._cache.arrays(self._layer), self._cache.handover.array
        first = [i for i, e in enumerate(ids) if e not in coming]
        last = [i for i, e in enumerate(ids) if e in coming]

        def compute(places: Sequence[int]) -> mx.array:
            chosen = array([slots[i] for i in places], (*rows.shape[:-1], len(places)))
            return self.in_one(arrays, x, chosen)

        parts = [compute(first)]
        mx.async_eval(parts[0])  # type: ignore[no-untyped-call]
        self._cache.finish_few()
        parts.append(compute(last))
        back = [0] * len(ids)
        for at, i in enumerate(first + last):
            back[i] = at
        y = mx.take(mx.concatenate(parts, axis=-2), array(back, (len(back),)), axis=-2)
        if weights is not None:
            y = weights.sum(y)
        if self._trials:
            # Kernels may add up in another order for another number of rows (MLX's on CUDA do).
            whole = self.in_one(arrays, x, rows, weights)
            if not mx.array_equal(y, whole).item():
                self._hits_first = False
                return whole
            self._trials -= 1
        return y

    def _fused_for(self, x: mx.array, indices: mx.array) -> FusedExperts | None:
        """The kernels, if they compute this call."""
        fused = self.fused
        usable = fused is not None and not self.training and fused.fits(x, indices)
        return fused if usable else None

    def _in_order(
        self, arrays: Arrays, x: mx.array, tokens: mx.array, slots: mx.array, experts: int
    ) -> mx.array:
        """x [tokens, 1, D] of the given tokens [n] by slots [n], in order -> [n, 1, D].

        Args:
            experts: no more than so many different slots.
        """
        prompt = self.fused.prompt if self.fused is not None and not self.training else None
        if prompt is not None and prompt.fits(x, slots, experts):
            return prompt(arrays, x, tokens, slots, experts)[:, None]
        return self._experts(arrays, x[tokens], slots, True)

    def in_one(
        self,
        arrays: Arrays,
        x: mx.array,
        indices: mx.array,
        weights: Weights | None = None,
        lookup: mx.array | None = None,
    ) -> mx.array:
        """As mlx-lm's SwitchGLU.__call__; then the weighted sum, if there are weights.

        Args:
            indices: rows of the arrays; with `lookup` [E], experts, whose rows are in there.
        """
        if (fused := self._fused_for(x, indices)) is not None:
            return fused(arrays, x, indices, weights, lookup)
        if lookup is not None:
            indices = mx.take(lookup, indices)
        x = mx.expand_dims(x, (-2, -3))
        in_order = indices.size >= SORT_FROM
        if in_order:
            rows = indices.flatten()
            order = mx.argsort(rows)  # what one expert computes, side by side
            tokens = order // indices.shape[-1]
            x = self._in_order(arrays, x.flatten(0, -3), tokens, rows[order], self._num_experts)
            x = mx.unflatten(x[mx.argsort(order)], 0, indices.shape)
        else:
            x = self._experts(arrays, x, indices, False)
        y = x.squeeze(-2)
        return y if weights is None else weights.sum(y)

    def in_waves(
        self,
        calls: Sequence[tuple[mx.array, np.ndarray]],
        waves: list[list[int]],
        before_wave: Callable[[], object] = lambda: None,
    ) -> Iterator[mx.array]:
        """More distinct experts than slots: load some, compute their rows, load the next.

        calls: (x [..., D], ids [..., k]); yields the output of each, [..., k, D].
        """
        wave_of = np.empty(self._num_experts, np.int32)
        for w, experts in enumerate(waves):
            wave_of[experts] = w
        outputs: list[list[mx.array]] = [[] for _ in calls]
        orders: list[list[np.ndarray]] = [[] for _ in calls]
        for w, experts in enumerate(waves):
            before_wave()
            self._cache.claim(self._layer, experts)
            table = self._cache.table(self._layer)
            for n, (x, ids) in enumerate(calls):
                flat = ids.ravel()
                pairs = np.flatnonzero(wave_of[flat] == w)
                if not pairs.size:
                    continue
                slots = table[flat[pairs]]
                order = np.argsort(slots, kind="stable")
                pairs, slots = pairs[order], slots[order]
                rows = mx.expand_dims(x.reshape(-1, x.shape[-1]), -2)  # [tokens, 1, D]
                tokens = mx.array(pairs // ids.shape[-1])
                places = mx.array(slots.astype(np.uint32))
                arrays = self._cache.arrays(self._layer)
                if ids.size >= SORT_FROM:
                    y = self._in_order(arrays, rows, tokens, places, len(experts))
                else:
                    y = self._experts(arrays, rows[tokens], places, False)
                mx.eval(y)  # before the next wave rewrites these slots
                outputs[n].append(y)
                orders[n].append(pairs)
        for n, (_, ids) in enumerate(calls):
            y = put_back(outputs[n], orders[n], ids.shape)
            outputs[n].clear()
            yield y


def put_back(
    outputs: Sequence[mx.array], orders: Sequence[np.ndarray], shape: tuple[int, ...]
) -> mx.array:
    """Join outputs [n, D], whose rows belong to the routed pairs `orders` [n] -> [*shape, D]."""
    order = np.concatenate(orders)
    back = np.empty(order.size, np.uint32)
    back[order] = np.arange(order.size, dtype=np.uint32)
    y = mx.concatenate(list(outputs))[mx.array(back)]
    return y.reshape(*shape, y.shape[-1])


class StreamingSwitchGLU(_StreamingSwitch):
    """`mlx_lm.models.switch_layers.SwitchGLU` whose experts come from a `SharedExpertCache`.

    Called as `(x [..., D], indices [..., k]) -> [..., k, D]`.

    Args:
        cache: holds the experts.
        layer: this module's index in the cache's layouts.
        gate_proj: its name in the layout, and how it is quantised.
        up_proj: likewise.
        down_proj: likewise.
        activation: called as `activation(x_up, x_gate)`, as mlx-lm does. None: SwiGLU.
    """

    def __init__(
        self,
        cache: SharedExpertCache,
        layer: int,
        gate_proj: Projection,
        up_proj: Projection,
        down_proj: Projection,
        activation: nn.Module | None = None,
    ):
        super().__init__(cache, layer, SwiGLU() if activation is None else activation)
        self._gate, self._up, self._down = gate_proj, up_proj, down_proj

    def _experts(self, arrays: Arrays, x: mx.array, idx: mx.array, in_order: bool) -> mx.array:
        x_up = self._up(arrays, x, idx, in_order)
        x_gate = self._gate(arrays, x, idx, in_order)
        return self._down(arrays, self.activation(x_up, x_gate), idx, in_order)


class StreamingSwitchMLP(_StreamingSwitch):
    """`mlx_lm.models.switch_layers.SwitchMLP` whose experts come from a `SharedExpertCache`.

    Called as `(x [..., D], indices [..., k]) -> [..., k, D]`.

    Args:
        cache: holds the experts.
        layer: this module's index in the cache's layouts.
        fc1: its name in the layout, and how it is quantised.
        fc2: likewise.
        activation: called as `activation(x)`. None: GELU (approx="precise"), as mlx-lm's.
    """

    def __init__(
        self,
        cache: SharedExpertCache,
        layer: int,
        fc1: Projection,
        fc2: Projection,
        activation: nn.Module | None = None,
    ):
        default = nn.GELU(approx="precise")
        super().__init__(cache, layer, default if activation is None else activation)
        self._fc1, self._fc2 = fc1, fc2

    def _experts(self, arrays: Arrays, x: mx.array, idx: mx.array, in_order: bool) -> mx.array:
        return self._fc2(
            arrays, self.activation(self._fc1(arrays, x, idx, in_order)), idx, in_order
        )
