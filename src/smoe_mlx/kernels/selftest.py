"""Are the kernels right on this machine, and faster than mlx-lm's operations?

Random experts of a geometry are computed by the kernels, by mlx-lm's operations in the model's
dtype ("stock"), and for reference with sums in float64, on the CPU. (Sums in float32 are no
reference for float32: MLX's own on a CPU err by 1.3e-6 of them, the kernels by 3e-7.)
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwiGLU

from ..layers.switch import Projection, StreamingSwitchGLU, StreamingSwitchMLP, put_back
from .experts import ABSENT, FusedExperts, Geometry, Weights, activation_text
from .route import FusedRouter

Arrays = dict[tuple[str, str], mx.array]
# (arrays, x, slots, weights or None) -> [..., k, D], or [..., D] if there are weights
Experts = Callable[[Arrays, mx.array, mx.array, Weights | None], mx.array]

SLOTS = 8  # of the bank that is tested with
CASES = ((1, 2), (1, 8), (5, 3), (16, 2))  # (tokens, top-k)
ERROR_SLACK = 1.05  # of stock's error
TIMED_TOKENS = (1, 4, 16)
LEAST_SPEEDUP = 1.05
CHAIN = 16  # calls in a row that are timed together, each with the output of the one before


@dataclass(frozen=True)
class Errors:
    """Against the reference, over all cases: root of the mean square and largest, both relative
    to the reference's root mean square."""

    rms: float
    largest: float


def random_experts(geometry: Geometry, slots: int, seed: int = 0) -> Arrays:
    """A bank of random experts, (projection, kind) -> [slots, ...]; outputs are about 1."""
    g = geometry
    up, down = (("gate_proj", "up_proj"), "down_proj") if g.gated else (("fc1",), "fc2")
    key = mx.random.key(seed)
    arrays: Arrays = {}
    for name in (*up, down):
        rows, inputs = (g.hidden, g.ffn) if name == down else (g.ffn, g.hidden)
        (bits, group), bias = (g.down, g.down_bias) if name == down else (g.up, g.up_bias)
        key, *keys = mx.random.split(key, 5)
        codes = mx.random.randint(
            0, 256, (slots, rows, inputs * bits // 8), mx.uint8, key=keys[0]
        )  # as bytes: 32-bit numbers would come from floats, their low bits all zero
        arrays[name, "weight"] = codes.view(mx.uint32)
        if bias:
            arrays[name, "bias"] = mx.random.normal((slots, rows), key=keys[3]).astype(g.dtype)
        groups = (slots, rows, inputs // group)
        if g.mode != "affine":  # e4m3 has a deviation of about 100, e2m1 of 2.9
            unit = inputs**-0.5 / (100 if bits == 8 else 2.9)
            exponents = round(math.log2(unit)) + mx.random.randint(-1, 2, groups, key=keys[1])
            if g.mode == "nvfp4":
                arrays[name, "scales"] = mx.to_fp8(2.0**exponents * 0.75)
            else:
                arrays[name, "scales"] = (127 + exponents).astype(mx.uint8)
            if bits == 8:  # no NaN
                codes = mx.where((codes & 127) == 127, mx.array(0, mx.uint8), codes)
                arrays[name, "weight"] = codes.view(mx.uint32)
            continue
        # Codes spread evenly over 2^bits values have a deviation of 2^bits / sqrt(12).
        unit = (12 / inputs) ** 0.5 / (1 << bits)
        scales = unit * mx.random.uniform(0.5, 1.5, groups, key=keys[1])
        middle = -((1 << bits) - 1) / 2 * scales
        offsets = middle + unit * mx.random.normal(groups, key=keys[2])
        arrays[name, "scales"] = scales.astype(g.dtype)
        arrays[name, "biases"] = offsets.astype(g.dtype)
    mx.eval(list(arrays.values()))
    return arrays


def random_call(
    geometry: Geometry, slots: int, tokens: int, top_k: int, seed: int = 0
) -> tuple[mx.array, mx.array]:
    """(x [tokens, D], slot numbers [tokens, top_k]): a token's differ if there are enough."""
    keys = mx.random.split(mx.random.key(1000 + seed), 2)
    x = mx.random.normal((tokens, geometry.hidden), key=keys[0]).astype(geometry.dtype)
    order = mx.argsort(mx.random.uniform(shape=(tokens, slots), key=keys[1]), axis=-1)
    chosen = order[:, mx.arange(top_k) % slots].astype(mx.uint32)
    mx.eval(x, chosen)
    return x, chosen


def reference(
    geometry: Geometry, activation: nn.Module, arrays: Arrays, x: mx.array, slots: mx.array
) -> mx.array:
    """What experts compute, x [tokens, D], slots [tokens, k] -> [tokens, k, D] float32.

    Each projection is rounded to float32 once; its sums are float64.
    """
    g = geometry
    numbers = np.array(slots).ravel()
    used = np.unique(numbers).tolist()
    pairs = [np.flatnonzero(numbers == slot) for slot in used]

    def project(name: str, x: mx.array, how: tuple[int, int]) -> mx.array:
        outputs = []
        bias = arrays.get((name, "bias"))
        with mx.stream(mx.cpu):  # GPUs have no float64
            for slot, places in zip(used, pairs, strict=True):
                y = x[mx.array(places)].astype(mx.float64)
                y = y @ dequantized(arrays, name, slot, how, g.mode).T
                if bias is not None:
                    y = y + bias[slot].astype(mx.float64)
                outputs.append(y.astype(mx.float32))
                mx.eval(outputs)  # one slot's weights at a time
        return put_back(outputs, pairs, numbers.shape)

    rows = mx.repeat(x.astype(mx.float32), slots.shape[-1], axis=0)
    if g.gated:
        h = activation(project("up_proj", rows, g.up), project("gate_proj", rows, g.up))
    else:
        h = activation(project("fc1", rows, g.up))
    y = project("down_proj" if g.gated else "fc2", h, g.down)
    return y.reshape(*slots.shape, g.hidden)


def dequantized(arrays: Arrays, name: str, slot: int, how: tuple[int, int], mode: str) -> mx.array:
    """A slot's weights [rows, inputs] of a projection in float64, exact. On the CPU."""
    bits, group = how
    codes, scales = arrays[name, "weight"][slot], arrays[name, "scales"][slot]
    if mode != "affine":  # these products have at most six bits
        return mx.dequantize(
            codes, scales, group_size=group, bits=bits, mode=mode, dtype=mx.float32
        ).astype(mx.float64)
    one, none = mx.ones(scales.shape), mx.zeros(scales.shape)
    numbers = mx.unflatten(mx.dequantize(codes, one, none, group, bits), -1, (-1, group))
    offsets = arrays[name, "biases"][slot]
    scale, offset = (a.astype(mx.float64)[..., None] for a in (scales, offsets))
    return (numbers.astype(mx.float64) * scale + offset).flatten(-2)


def operations(
    geometry: Geometry,
    activation: nn.Module,
    fused: FusedExperts | None = None,
    experts: int = SLOTS,
) -> Experts:
    """mlx-lm's operations for so many experts of this geometry, as the streaming modules call them.

    Args:
        fused: kernels that are called where they fit.
    """
    g = geometry
    names = ("gate_proj", "up_proj", "down_proj") if g.gated else ("fc1", "fc2")
    parts = {name: Projection(name, g.up[1], g.up[0], g.mode) for name in names[:-1]}
    parts[names[-1]] = Projection(names[-1], g.down[1], g.down[0], g.mode)
    kind: Any = StreamingSwitchGLU if g.gated else StreamingSwitchMLP
    nothing = SimpleNamespace(layouts=[SimpleNamespace(num_experts=experts)])  # no cache is asked
    module = kind(nothing, 0, **parts, activation=activation)
    module.fused = fused
    module.eval()
    return module.in_one  # type: ignore[no-any-return]


def random_weights(slots: mx.array, dtype: mx.Dtype, cast: bool = True, seed: int = 0) -> Weights:
    """Scores of each token that add up to 1."""
    scores = mx.softmax(mx.random.normal(slots.shape, key=mx.random.key(2000 + seed)), axis=-1)
    return Weights(scores.astype(dtype), cast)


def with_shared(weights: Weights, hidden: int, added: int) -> Weights:
    """The same with one or two random arrays for `Weights.shared`, of the scores' dtype."""
    shape, dtype = weights.scores.shape[:-1], weights.scores.dtype
    keys = mx.random.split(mx.random.key(3000), 2)
    term = mx.random.normal((*shape, hidden), key=keys[0]).astype(dtype)
    factor = mx.random.uniform(shape=(*shape, 1), key=keys[1]).astype(dtype)
    return weights._replace(shared=lambda: (term, factor)[:added])


def in_float32(weights: Weights) -> Weights:
    """The same numbers in float32, and so is their sum."""
    shared = weights.shared
    wide = Weights(weights.scores.astype(mx.float32))
    if shared is None:
        return wide
    return wide._replace(shared=lambda: tuple(a.astype(mx.float32) for a in shared()))


def error_of(y: mx.array, expected: mx.array) -> Errors:
    """Of one call; `expected` in float32."""
    off = (y.astype(mx.float32) - expected) / mx.sqrt(mx.square(expected).mean())
    return Errors(float(mx.sqrt(mx.square(off).mean())), float(mx.abs(off).max()))


def measure_errors(
    geometry: Geometry, activation: nn.Module, arrays: Arrays, ways: Sequence[Experts],
    added: int = 0,
) -> list[Errors]:  # fmt: skip
    """The errors of each way of computing the experts, and their weighted sums, over `CASES`.

    Args:
        added: so many arrays are added to other weighted sums.
    """
    found: list[list[Errors]] = [[] for _ in ways]
    calls = [random_call(geometry, SLOTS, tokens, top_k) for tokens, top_k in CASES]
    pairs = [(mx.repeat(x, slots.shape[1], axis=0), slots.reshape(-1, 1)) for x, slots in calls]
    rows, numbers = (mx.concatenate(list(parts)) for parts in zip(*pairs, strict=True))
    right = reference(geometry, activation, arrays, rows, numbers)
    for x, slots in calls:
        each, right = right[: slots.size], right[slots.size :]
        each = each.reshape(*slots.shape, -1)
        plain = random_weights(slots, geometry.dtype)
        more = [with_shared(plain, geometry.hidden, added)] if added else []
        kinds: list[Weights | None] = [None, plain, *more]
        for weights in kinds:
            expected = each if weights is None else in_float32(weights).sum(each)
            for way, errors in zip(ways, found, strict=True):
                errors.append(error_of(way(arrays, x, slots, weights), expected))
    return [
        Errors(
            math.sqrt(sum(e.rms**2 for e in some) / len(some)),
            float(np.max([e.largest for e in some])),  # max() of Python forgets NaN
        )
        for some in found
    ]


def error_fault(errors: Errors, stock: Errors) -> str:
    """Whether errors are larger than those of mlx-lm's operations; or ""."""
    if not errors.rms <= ERROR_SLACK * stock.rms:
        return f"an error of {errors.rms:.2g}, mlx-lm's operations {stock.rms:.2g}"
    if not errors.largest <= 2 * stock.largest:
        return f"a largest error of {errors.largest:.2g}, mlx-lm's operations {stock.largest:.2g}"
    return ""


def find_fault(fused: FusedExperts, arrays: Arrays, errors: Errors, stock: Errors) -> str:
    """What is wrong with the kernels on this machine, or ""."""
    if fault := error_fault(errors, stock):
        return fault
    x, slots = random_call(fused.geometry, SLOTS, 5, 3)
    sick = mx.where(mx.arange(5)[:, None] == 2, mx.array(float("nan"), x.dtype), x)
    gone = mx.array([[0, 0, 0], [ABSENT, 0, 0], [0, 0, 0], [0, SLOTS, 0], [0, 0, 0]], mx.uint32)
    table = (mx.arange(SLOTS, dtype=mx.uint32) + 3) % SLOTS
    for weights in (None, random_weights(slots, x.dtype)):
        plain = fused(arrays, x, slots, weights)
        y = fused(arrays, sick, slots, weights)
        if not mx.isnan(y[2]).all().item() or not _same_rows(y, plain, [0, 1, 3, 4]):
            return "NaN of one token is lost, or reaches another"
        y = fused(arrays, x, mx.where(gone > 0, gone, slots), weights)
        if weights is None:
            expected = mx.where((gone > 0)[..., None], mx.array(0, plain.dtype), plain)
        else:
            there = Weights(mx.where(gone > 0, mx.array(0, x.dtype), weights.scores), True)
            expected = fused(arrays, x, slots, there)
        if not mx.array_equal(y, expected).item():
            return "a missing slot is not left out"
    y = fused(arrays, x, slots, weights, table)
    if not mx.array_equal(y, fused(arrays, x, table[slots], weights)).item():
        return "slots are not looked up right"
    return ""


def misses_fault(fused: FusedExperts, arrays: Arrays) -> str:
    """What is wrong with `with_misses` on this machine, or "". For who is to use it."""
    x, slots = random_call(fused.geometry, SLOTS, 5, 3)
    lookup = mx.array([3, ABSENT, 0, 7, SLOTS, 1, 2, 4], mx.uint32)
    for table in (None, lookup):
        numbers = slots if table is not None else lookup[slots]
        places = mx.left_shift(mx.array(1, mx.uint32), mx.arange(3, dtype=mx.uint32))
        expected = mx.where(lookup[slots] >= SLOTS, places, 0).sum(axis=-1)
        for weights in (None, random_weights(slots, x.dtype)):
            y, misses = fused.with_misses(arrays, x, numbers, weights, table)
            if not mx.array_equal(misses, expected).item():
                return "misses are not told right"
            if not mx.array_equal(y, fused(arrays, x, numbers, weights, table)).item():
                return "telling misses changes what is computed"
    return ""


def _same_rows(a: mx.array, b: mx.array, rows: list[int]) -> bool:
    return bool(mx.array_equal(a[mx.array(rows)], b[mx.array(rows)]).item())


def time_ways(
    geometry: Geometry, arrays: Arrays, ways: Sequence[Experts], tokens: int, top_k: int = 8,
    rounds: int = 5, weighted: bool = True,
) -> list[float]:  # fmt: skip
    """Seconds of one call of each way: medians over rounds in which they take turns.

    Args:
        weighted: with the weighted sum over a token's experts.
    """
    slots = next(iter(arrays.values())).shape[0]
    calls = []
    for i in range(CHAIN):
        x, chosen = random_call(geometry, slots, tokens, min(top_k, slots), i)
        calls.append((x, chosen, random_weights(chosen, x.dtype, seed=i) if weighted else None))
    mx.eval([w.scores for _, _, w in calls if w is not None])
    seconds: list[list[float]] = [[] for _ in ways]
    for i in range(rounds + 1):  # the first warms up
        for way, found in zip(ways, seconds, strict=True):
            mx.synchronize()
            start = time.perf_counter()
            x = calls[0][0]
            for _, chosen, weights in calls:
                y = way(arrays, x, chosen, weights)
                x = y if weighted else y[:, 0]
            mx.eval(x)
            if i:
                found.append((time.perf_counter() - start) / CHAIN)
    return [statistics.median(s) for s in seconds]


@dataclass(frozen=True)
class Verdict:
    """What a self-test found.

    Attributes:
        fault: what is wrong with the kernels, or "": they are right.
        error, stock_error: relative, root of the mean square.
        speedup: tokens of a call -> how many times as fast as mlx-lm's operations.
    """

    fault: str
    error: float
    stock_error: float
    speedup: dict[int, float]

    def __str__(self) -> str:
        times = ", ".join(f"{s:.2f}x at {n}" for n, s in sorted(self.speedup.items()))
        return (
            f"{self.fault or 'right'}; error {self.error:.2g} (mlx-lm's {self.stock_error:.2g})"
            + (f", speed {times} tokens" if times else "")
        )

    @property
    def max_tokens(self) -> int:
        """Calls of up to this many tokens are faster by the kernels."""
        best = 0
        for tokens in TIMED_TOKENS:
            if self.speedup.get(tokens, 0) < LEAST_SPEEDUP:
                break
            best = tokens
        return best


def self_test(
    fused: FusedExperts, stock: Experts, activation: nn.Module, weighted: bool = True,
    added: int = 0,
) -> Verdict:  # fmt: skip
    """Compare the kernels with the reference and with `stock`, and time both.

    Args:
        weighted: time them with the weighted sum.
        added: test other sums too, to which so many arrays are added.
    """
    g = fused.geometry
    arrays = random_experts(g, SLOTS)
    mine, theirs = measure_errors(g, activation, arrays, [fused, stock], added)
    fault = find_fault(fused, arrays, mine, theirs)
    # Others for timing: the CPU has looked at these, which on CUDA moves them to slower memory.
    arrays = random_experts(g, SLOTS, seed=1)
    speedup = {}
    for tokens in () if fault else TIMED_TOKENS:
        quick, slow = time_ways(g, arrays, [fused, stock], tokens, weighted=weighted)
        speedup[tokens] = slow / quick
    return Verdict(fault, mine.rms, theirs.rms, speedup)


def try_launch(fused: FusedExperts, added: int = 0) -> None:
    """Compile and run every kernel once: what fails here would fail while a model runs."""
    g = fused.geometry
    arrays = random_experts(g, 1)
    for top_k in (1, 8):  # MLX gives inputs of fewer than 8 numbers another type on Metal
        x, slots = random_call(g, 1, 1, top_k)
        weights = random_weights(slots, g.dtype)
        mx.eval(fused(arrays, x, slots), fused(arrays, x, slots, weights))
        if added:
            mx.eval(fused(arrays, x, slots, with_shared(weights, g.hidden, added)))


# ---- routers -------------------------------------------------------------------------------------


def route_operations(router: FusedRouter) -> Callable[..., tuple[mx.array, mx.array]]:
    """What `router` computes, by the operations of mlx-lm's routers."""
    r, k = router, router.top_k

    def route(logits: mx.array, bias: Any = None) -> tuple[mx.array, mx.array]:
        keys = scores = logits if r.by_logits else _scores(r, logits)
        if r.biased and r.bias_in == "narrow":
            keys = scores + bias.astype(scores.dtype)
        elif r.biased:
            keys = (scores.astype(mx.float32) if r.bias_in == "wide" else scores) + bias
        if r.kept < r.groups:
            keys = mx.unflatten(keys, axis=-1, shape=(r.groups, -1))
            if r.greedy:
                best = keys.max(axis=-1, keepdims=True)
            else:
                best = mx.topk(keys, 2, axis=-1).sum(axis=-1, keepdims=True)
            drop = r.groups - r.kept
            worst = mx.argpartition(best, kth=drop - 1, axis=-2)[..., :drop, :]
            nothing = mx.array(-mx.inf if r.never else 0.0, scores.dtype)
            keys = mx.flatten(mx.put_along_axis(keys, worst, nothing, axis=-2), -2, -1)
            scores = keys if r.greedy else scores
        if r.last:
            ids = mx.argpartition(keys, kth=-k, axis=-1)[..., -k:]
        else:
            ids = mx.argpartition(-keys, kth=k - 1, axis=-1)[..., :k]
        weights = mx.take_along_axis(scores, ids, axis=-1)
        if r.by_logits:
            weights = _scores(r, weights)
        elif r.norm:
            total = weights.sum(axis=-1, keepdims=True)
            total = total if r.eps is None else total + r.eps
            weights = weights / (total if r.least is None else mx.maximum(total, r.least))
        if r.scale is not None:
            weights = weights * r.scale
        return ids, weights.astype(logits.dtype) if r.cast else weights

    return route


def _scores(router: FusedRouter, logits: mx.array) -> mx.array:
    if router.wide:
        logits = logits.astype(mx.float32)
    if router.sigmoid:
        return mx.sigmoid(logits)
    if router.softplus:
        return mx.sqrt(nn.softplus(logits))
    if router.wide:
        return mx.softmax(logits, axis=-1)
    return mx.softmax(logits, axis=-1, precise=True)


def router_fault(router: FusedRouter) -> str:
    """What is wrong with a router's kernel on this machine, or ""."""
    tokens, count = 5, router.experts
    keys = mx.random.split(mx.random.key(3), 2)
    order = mx.argsort(mx.random.uniform(shape=(tokens, count), key=keys[0]), axis=-1)
    logits = (order.astype(mx.float32) - count / 2) * (16 / count)  # no two of them near
    bias = [0.2 * mx.random.uniform(shape=(count,), key=keys[1])] * router.biased
    # In 16 bits, where none of what is chosen, nor groups, are so near that rounding matters.
    step = 7 if router.groups == 1 else count // router.groups
    turned = (mx.arange(count) + step * mx.arange(tokens)[:, None]) % count
    narrow = ((turned - count).astype(mx.float32) * (16 / count)).astype(mx.bfloat16)
    one = [4.0 * (mx.arange(count) == count // 2)] * router.biased
    for x, b, off in ((logits, bias, 1e-5), (narrow, one, 1e-2)):
        with mx.stream(mx.cpu):
            expected, weights = route_operations(router)(x.astype(mx.float32), *b)
        ids, scores = router(x, *b)
        place, other = mx.argsort(ids, axis=-1), mx.argsort(expected, axis=-1)
        expected, weights = (mx.take_along_axis(a, other, axis=-1) for a in (expected, weights))
        if not mx.array_equal(mx.take_along_axis(ids, place, axis=-1), expected).item():
            return "the router's kernel chooses other experts"
        if not mx.allclose(mx.take_along_axis(scores, place, axis=-1), weights, off, 0.0).item():
            return "the router's kernel gives other weights"
    if not mx.isnan(router(mx.where(order == 0, mx.nan, logits), *bias)[1]).all().item():
        return "the router's kernel loses NaN"
    return ""


def time_router(router: FusedRouter, rounds: int = 5) -> float:
    """How many times as fast as mlx-lm's operations it is, for one token."""
    shape = (CHAIN, 1, router.experts)
    narrow = router.fits(mx.zeros((1, router.experts), mx.bfloat16))
    dtype = mx.bfloat16 if narrow else mx.float32
    tokens = list(mx.random.normal(shape, key=mx.random.key(4)).astype(dtype))
    bias = [mx.zeros((router.experts,))] * router.biased
    mx.eval(tokens, bias)
    ways: list[Callable[..., tuple[mx.array, mx.array]]] = [router, route_operations(router)]
    seconds: list[list[float]] = [[], []]
    for i in range(rounds + 1):  # the first warms up
        for way, found in zip(ways, seconds, strict=True):
            mx.synchronize()
            start = time.perf_counter()
            last = mx.zeros((1, 1), dtype)
            for logits in tokens:  # each waits for the one before
                last = way(logits + (0 * last[:, :1]).astype(dtype), *bias)[1]
            mx.eval(last)
            if i:
                found.append(time.perf_counter() - start)
    return statistics.median(seconds[1]) / statistics.median(seconds[0])


def usual_geometries() -> dict[str, tuple[Geometry, nn.Module]]:
    """Experts that many people run: name -> (geometry, activation)."""
    out: dict[str, tuple[Geometry, nn.Module]] = {}
    for name, hidden, ffn, bits, group, mode, activation, bias in (
        ("Qwen3-30B-A3B, 4 bits", 2048, 768, 4, 64, "affine", SwiGLU(), False),
        ("Qwen3-30B-A3B, 2 bits", 2048, 768, 2, 64, "affine", SwiGLU(), False),
        ("Qwen3-235B-A22B, 4 bits", 4096, 1536, 4, 64, "affine", SwiGLU(), False),
        ("gpt-oss, mxfp4", 2880, 2880, 4, 32, "mxfp4", SwigluOAI(), True),
    ):
        text, how = activation_text(activation, True) or "", (bits, group)
        geometry = Geometry(hidden, ffn, True, text, how, how, bias, bias, mx.bfloat16, mode)
        out[name] = (geometry, activation)
    return out
