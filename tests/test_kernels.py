"""The expert kernels: their text runs here thread by thread (tests/emulator), on no GPU."""

import importlib.util
import itertools
import json
import math
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import emulator
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import random_model, random_tokens, resident, same_bits, save_checkpoint
from emulator import Change, Emulator, KernelFault
from mlx_lm.models import activations, deepseek_v41, gemma4_text, kimi_k3, muse_spark, step3p5
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwiGLU, SwitchMLP
from mlx_lm.utils import quantize_model

import smoe_mlx
from smoe_mlx import cli
from smoe_mlx.cache.experts import SharedExpertCache
from smoe_mlx.cli import selftest as command
from smoe_mlx.hub import find_model
from smoe_mlx.kernels import choose, experts, prompt_selftest, selftest
from smoe_mlx.kernels.choose import KernelChooser
from smoe_mlx.kernels.experts import (
    ACTIVATIONS,
    FusedExperts,
    Geometry,
    Tiling,
    activation_text,
    eligible,
    kernel_text,
)
from smoe_mlx.kernels.prompt import ODD_BITS, PromptExperts, PromptTiling, tiles
from smoe_mlx.kernels.prompt_selftest import TIMED_ROWS, PromptVerdict, ragged_call
from smoe_mlx.kernels.route import FusedRouter
from smoe_mlx.kernels.selftest import (
    Verdict,
    find_fault,
    random_call,
    random_experts,
    random_weights,
    reference,
)
from smoe_mlx.layers.switch import Projection, StreamingSwitchGLU
from smoe_mlx.load import load_model
from smoe_mlx.search import Setting
from smoe_mlx.store.files import MOST_KNOWN, MOST_KNOWN_NBYTES
from smoe_mlx.store.layout import TensorSpec
from smoe_mlx.tuned import find_tuned

load, tune = sys.modules["smoe_mlx.load"], sys.modules["smoe_mlx.tune"]  # not the functions

ROOT = Path(__file__).parents[1]
SWIGLU = ACTIVATIONS["mlx_lm.models.switch_layers.SwiGLU"]
BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32
ONES = mx.ones((2, 2))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Where compiled kernels are kept: the same folder for all workers of a run."""
    if emulator.compiler() is None:
        pytest.fail("no C++ compiler: these tests run kernels on the CPU. Install g++ or clang++.")
    base = tmp_path_factory.getbasetemp()
    return (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "kernels"


@pytest.fixture
def emulate(compiled, monkeypatch):
    """emulate("metal" or "cuda", ...): from here on the kernels run in an Emulator."""

    def start(backend: str = "metal", **options) -> Emulator:
        machine = Emulator(compiled, **options)
        for replacement in emulator.replacements(machine, backend):
            monkeypatch.setattr(*replacement)
        return machine

    return start


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """No test reads or writes the user's own verdicts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "smoe-mlx"


def swiglu(hidden, ffn, bits, group, dtype, down=None, mode="affine") -> Geometry:
    up = (bits, group)
    return Geometry(hidden, ffn, True, SWIGLU, up, down or up, False, False, dtype, mode)


SMALL = swiglu(64, 64, 4, 64, BF16)


def relative_error(y: mx.array, expected: mx.array) -> float:
    off = y.astype(F32) - expected
    return float(mx.sqrt(mx.square(off).mean() / mx.square(expected).mean()))


def assert_exact(
    geometry, tokens, top_k, activation=None, tilings=None, slots=5, weights=None, dtype=None
):
    """As right as the dtype allows: the error is that of rounding the float32 result, no more."""
    arrays = random_experts(geometry, slots)
    x, chosen = random_call(geometry, slots, tokens, top_k)
    fused = FusedExperts(geometry, tilings=tilings or (Tiling(), Tiling()))
    assert fused.fits(x, chosen)
    activation = SwiGLU() if activation is None else activation  # (an empty module is false)
    expected = reference(geometry, activation, arrays, x, chosen)
    if weights is not None:
        expected = selftest.in_float32(weights).sum(expected)
    y = fused(arrays, x, chosen, weights)
    assert (y.shape, y.dtype) == (expected.shape, dtype or geometry.dtype)
    rounding = relative_error(expected.astype(y.dtype), expected)
    assert relative_error(y, expected) <= 1.02 * rounding + 6e-7
    return y


# ---- the text ------------------------------------------------------------------------------------

SHAPES = [
    # hidden, ffn, bits, group, dtype, tokens, top-k
    (64, 64, 4, 64, BF16, 1, 2),
    (128, 32, 4, 32, F16, 16, 2),
    (256, 384, 4, 128, F32, 3, 5),
    (2880, 704, 4, 64, BF16, 1, 4),
    (128, 64, 2, 32, BF16, 2, 4),
    (320, 192, 2, 64, F16, 1, 8),
    (256, 128, 2, 128, F32, 4, 3),
    (96, 160, 8, 32, BF16, 2, 2),
    (192, 64, 8, 64, F32, 1, 16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts_equal_the_reference(shape, emulate):
    hidden, ffn, bits, group, dtype, tokens, top_k = shape
    emulate()
    assert_exact(swiglu(hidden, ffn, bits, group, dtype), tokens, top_k)


WEIGHTED = [
    # hidden, ffn, (bits, group) of gate and up, of down, mode, dtype, tokens, top-k
    (160, 96, (4, 32), (4, 32), "affine", BF16, 2, 3),
    (128, 192, (2, 64), (8, 32), "affine", F32, 1, 16),
    (256, 128, (3, 64), (3, 32), "affine", BF16, 2, 2),
    (128, 256, (5, 32), (6, 128), "affine", F16, 1, 5),
    (384, 128, (6, 64), (5, 64), "affine", F32, 1, 2),
    (64, 96, (4, 32), (4, 32), "mxfp4", F32, 2, 2),
    (96, 64, (8, 32), (8, 32), "mxfp8", F32, 2, 2),
    (64, 96, (4, 16), (4, 16), "nvfp4", F32, 2, 2),
]


@pytest.mark.parametrize("shape", WEIGHTED, ids=str)
def test_weighted_sums_equal_the_reference(shape, emulate):
    hidden, ffn, up, down, mode, dtype, tokens, top_k = shape
    emulate()
    geometry = swiglu(hidden, ffn, *up, dtype, down, mode)
    weights = random_weights(mx.zeros((tokens, top_k)), dtype)
    assert_exact(geometry, tokens, top_k, weights=weights)


def test_a_weight_that_is_nan(emulate):
    emulate()
    geometry = swiglu(64, 64, 8, 32, BF16, mode="mxfp8")
    arrays = random_experts(geometry, 2)
    codes = arrays["up_proj", "weight"].view(mx.uint8)
    first = mx.arange(codes.size).reshape(codes.shape) == 0
    for nan in (127, 255):
        sick = mx.where(first, mx.array(nan, mx.uint8), codes).view(mx.uint32)
        y = FusedExperts(geometry)(
            {**arrays, ("up_proj", "weight"): sick}, mx.ones((1, 64), BF16), mx.array([[0, 1]])
        )
        assert mx.isnan(y).all(axis=-1).tolist() == [[True, False]]


def test_formats_without_a_weighted_sum(emulate):
    emulate()
    assert_exact(swiglu(128, 128, 3, 32, BF16, (6, 64)), 2, 2)


def test_scores_of_another_type(emulate):
    """As mlx-lm: the sum is in the wider type, unless the block brings it back."""
    emulate()
    geometry = swiglu(64, 64, 4, 64, BF16)
    for cast, dtype in ((False, F32), (True, BF16)):
        weights = random_weights(ONES, F32, cast)
        assert_exact(geometry, 2, 2, weights=weights, dtype=dtype)


def test_the_weighted_sum_with_biases_and_without_a_gate(emulate):
    emulate()
    weights = random_weights(mx.zeros((3, 2)), F32)
    for gated, activation in ((True, activations.SwigluOAI()), (False, nn.ReLU2())):
        text = activation_text(activation, gated)
        geometry = replace(swiglu(128, 64, 4, 32, F32), gated=gated, activation=text)
        geometry = replace(geometry, up_bias=True, down_bias=True)
        assert_exact(geometry, 3, 2, activation, weights=weights)


ADDED = [
    # dtypes of x and scores, of the term, of the factor; of the result
    (F32, F32, F32, F32),
    (BF16, BF16, BF16, BF16),
    (F16, F32, None, F32),
    (BF16, BF16, None, BF16),
]


@pytest.mark.parametrize("backend", ["metal", "cuda"])
@pytest.mark.parametrize("types", ADDED, ids=str)
def test_what_is_added_to_the_sum(types, backend, emulate):
    machine = emulate(backend)
    dtype, term_type, factor_type, result = types
    weights = random_weights(mx.zeros((3, 2)), dtype)
    shared = [mx.random.normal((3, 128), key=mx.random.key(5)).astype(term_type)]
    if factor_type is not None:
        factor = mx.random.normal((3, 1), key=mx.random.key(6))
        shared.append(factor.astype(factor_type))
    weights = weights._replace(shared=lambda: tuple(shared))
    geometry = swiglu(128, 64, 4, 32, dtype)
    assert_exact(geometry, 3, 2, weights=weights, dtype=result)
    assert len(machine.names) == 2  # nothing but the two kernels


def test_what_cannot_be_added_by_the_kernel(emulate):
    """It is added by operations: a number, a row for all, what is no float, a factor of columns."""
    emulate()
    geometry, weights = swiglu(128, 64, 4, 32, F32), random_weights(mx.zeros((3, 2)), F32)
    row, column = mx.random.normal((128,)), mx.random.normal((3, 128))
    ints = mx.arange(384).reshape(3, 128)
    for shared in ((mx.array(2.5),), (row,), (ints,), (column, row), (column, mx.array([[3]]))):
        more = weights._replace(shared=lambda shared=shared: shared)
        assert_exact(geometry, 3, 2, weights=more, dtype=F32)


@pytest.mark.parametrize(("up", "down"), [(4, 8), (8, 2)])
def test_adding_gives_the_bits_of_converting(up, down, emulate):
    emulate()
    geometry, weights = swiglu(128, 64, up, 32, F32, (down, 32)), random_weights(ONES, F32)
    tilings = (Tiling(4, 4, 3, 0, False), Tiling(4, 4, 3, 2, True))
    a, b = (assert_exact(geometry, 2, 2, tilings=(t, t), weights=weights) for t in tilings)
    assert same_bits(a, b)


def test_qwen3_shapes(emulate):
    machine = emulate()
    assert_exact(swiglu(2048, 768, 4, 64, BF16), 1, 8)
    assert machine.threadgroup_bytes == experts.shared_nbytes(768, 4, 64)


def test_projections_with_their_own_format(emulate):
    emulate()
    assert_exact(swiglu(128, 64, 4, 32, BF16, down=(8, 64)), 2, 3)
    assert_exact(swiglu(128, 64, 2, 64, BF16, down=(4, 32)), 2, 3)


@pytest.mark.parametrize("tiling", [(8, 32, 1), (2, 16, 3), (3, 4, 2)])
def test_tilings(tiling, emulate):
    """Also those that leave rows over at the end."""
    emulate()
    assert_exact(swiglu(160, 96, 4, 32, F16), 2, 2, tilings=(Tiling(*tiling),) * 2)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4], SHAPES[7]], ids=str)
def test_cuda_computes_the_same_bits(shape, emulate):
    hidden, ffn, bits, group, dtype, tokens, top_k = shape
    geometry = swiglu(hidden, ffn, bits, group, dtype)
    weights = random_weights(mx.zeros((tokens, top_k)), dtype) if bits != 8 else None
    emulate("metal")
    metal = assert_exact(geometry, tokens, top_k, weights=weights)
    machine = emulate("cuda")
    assert same_bits(assert_exact(geometry, tokens, top_k, weights=weights), metal)
    assert len(machine.names) == 2


def test_order_of_threads_changes_no_bit(emulate):
    geometry, router = swiglu(256, 384, 4, 128, F32), FusedRouter(60, 5, False, True, True)
    logits = mx.random.normal((3, 60))

    def compute(seed):
        emulate(seed=seed)
        y = assert_exact(geometry, 3, 5)
        weights = random_weights(mx.zeros((3, 5)), F32)
        return [y, assert_exact(geometry, 3, 5, weights=weights), *router(logits)]

    first = compute(0)
    for seed in (1, 2, 3):
        assert all(same_bits(a, b) for a, b in zip(compute(seed), first, strict=True))


def test_a_pair_does_not_depend_on_the_others(emulate):
    """What lets a layer compute experts in memory while others are read."""
    emulate()
    geometry = swiglu(128, 32, 4, 32, F16)
    arrays, fused = random_experts(geometry, 6), FusedExperts(geometry)
    x, chosen = random_call(geometry, 6, 16, 4)
    whole = fused(arrays, x, chosen)
    assert same_bits(fused(arrays, x[5:6], chosen[5:6, 1:3]), whole[5:6, 1:3])


def test_any_integers_and_leading_dimensions(emulate):
    emulate()
    geometry = swiglu(128, 32, 4, 32, F16)
    arrays, fused = random_experts(geometry, 6), FusedExperts(geometry)
    x, chosen = random_call(geometry, 6, 4, 2)
    y = fused(arrays, x, chosen)
    shaped = fused(arrays, x.reshape(2, 2, -1), chosen.reshape(2, 2, 2).astype(mx.int32))
    assert same_bits(shaped, y.reshape(2, 2, 2, -1))


# ---- activations and biases ----------------------------------------------------------------------

GATED = [
    SwiGLU(),
    muse_spark.PreciseSwiGLU(),
    activations.SwigluOAI(alpha=1.5, limit=0.75),
    step3p5.ClampedSwiGLU(0.5),
    deepseek_v41.DeepseekV41SwiGLU(0.5),
    gemma4_text.GeGLU(),
    kimi_k3.SiTU(0.75, 1.25),
]


@pytest.mark.parametrize("activation", GATED, ids=lambda a: type(a).__name__)
def test_gated_activations(activation, emulate):
    emulate()
    geometry = replace(swiglu(128, 64, 4, 32, F32), activation=activation_text(activation, True))
    assert_exact(geometry, 3, 2, activation)


UNGATED = [nn.ReLU2(), *map(nn.GELU, ("none", "precise", "tanh", "fast"))]


@pytest.mark.parametrize("activation", UNGATED, ids=lambda a: getattr(a, "_approx", "ReLU2"))
def test_activations_without_a_gate(activation, emulate):
    emulate()
    text = activation_text(activation, False)
    assert_exact(
        replace(swiglu(128, 64, 4, 32, F32), gated=False, activation=text), 3, 2, activation
    )


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_gelu_far_out(backend, emulate):
    """Against float64: where the tail vanishes, and at what is no number."""
    machine = emulate(backend)
    x = np.array([*np.linspace(-9, 9, 1021), -0.0, 60, -60, np.inf, np.nan], np.float32)
    for approx, expected in {
        "none": [v * math.erfc(-v / math.sqrt(2)) / 2 for v in x.astype(float)],
        "fast": x.astype(float) / (1 + np.exp(-1.702 * x.astype(float))),
    }.items():
        text = kernel_text(backend, "expert", (), f"sm_gelu_{approx}(u)")
        entry = text["source"].partition("constexpr")[0]
        make = machine.metal_kernel if backend == "metal" else machine.cuda_kernel
        source = (
            entry + "const uint32_t at = sm_block * 32u + sm_lane; (void)sm_y; (void)sm_thread;"
        )
        source += "(void)sm_simd; o[at] = sm_activation(x[at], 0.0f);"
        (o,) = make(
            name=f"gelu_{approx}", input_names=["x"], output_names=["o"], source=source,
            header=text["header"],
        )(
            [mx.pad(mx.array(x), (0, -len(x) % 32))], output_shapes=[(1056,)], output_dtypes=[F32],
            grid=(1056, 1, 1), threadgroup=(32, 1, 1), template=[("T", F32)],
        )  # fmt: skip
        assert np.allclose(np.array(o)[: len(x)], expected, 1e-6, 4e-7, equal_nan=True)


def test_phixtral_is_eligible():
    """mlx-lm's own module: experts by fc1, GELU and fc2, with biases."""
    module = SwitchMLP(128, 64, 4, bias=True)
    tensors = [
        replace(t, projection={"up_proj": "fc1", "down_proj": "fc2"}[t.projection])
        for t in specs(bias=("up_proj", "down_proj"), dtype="F16")
        if t.projection != "gate_proj"
    ]
    parts = {name: Projection(name, 64, 4, "affine") for name in ("fc1", "fc2")}
    found = eligible(tensors, parts, module.activation)
    assert (found.activation, found.gated, found.up_bias) == ("sm_gelu_precise(u)", False, True)


@pytest.mark.parametrize("gated", [True, False])
def test_expert_biases(gated, emulate):
    emulate()
    activation = activations.SwigluOAI() if gated else nn.ReLU2()
    geometry = replace(
        swiglu(128, 64, 4, 32, F32),
        gated=gated,
        activation=activation_text(activation, gated),
        up_bias=True,
        down_bias=True,
    )
    assert_exact(geometry, 3, 2, activation)


def test_all_activations_are_tried():
    tried = {f"{type(a).__module__}.{type(a).__qualname__}" for a in (*GATED, *UNGATED)}
    assert tried == set(ACTIVATIONS)


def test_activations_that_are_not_known():
    class SwiGLU(nn.Module):  # the name is not enough
        pass

    assert activation_text(SwiGLU(), True) is None
    assert activation_text(nn.Mish(), False) is None
    assert activation_text(nn.ReLU2(), True) is None
    assert activation_text(nn.GELU(), True) is None
    odd = nn.GELU()
    odd._approx = "none(u), exit"
    assert activation_text(odd, False) is None
    assert activation_text(kimi_k3.SiTU(1.0, None), True) is None
    for limit in (0, -1.0, math.inf, math.nan, "7", mx.array(7.0)):
        assert activation_text(deepseek_v41.DeepseekV41SwiGLU(limit), True) is None
    assert "7.0f" in activation_text(deepseek_v41.DeepseekV41SwiGLU(7), True)


# ---- the self-test sees what is broken -----------------------------------------------------------

SICK = swiglu(256, 64, 2, 32, BF16)  # two groups in a chunk
FAULTS = {
    "nothing": ("", ""),
    "no barrier": ("  SM_BARRIER();", ""),
    "scales of a neighbour": ("uint32_t(PARTS) + uint32_t(p) :", "uint32_t(PARTS) :"),
    "a place is left out": ("uint32_t k = 0u; k", "uint32_t k = 1u; k"),
    "places are swapped": ("float(score[pair])", "float(score[pair ^ 1u])"),
    "h in another order": ("4u * quad + row % 4u", "4u * quad + (row ^ 1u) % 4u"),
    "no look-up": ("LOOKUP ? uint32_t(lookup[number]) : number", "number"),
    "a sum that forgets lanes": ("step = COUNT / 2", "step = COUNT / 4"),
    "no offsets": (".offset[p] * sum", ".offset[p] * 0.0f"),
    "the gate twice": ("dg[r] = 0.0f;", "dg[r] = 1.0f;"),
    "up for gate": ("return sm_silu(g) * u", "return sm_silu(u) * g"),
    "a missing slot is read": (
        "const bool there = expert < uint32_t(wu_shape[0])",
        "const bool there = expert != 0xffffffffu",
    ),
    "a missing slot counts": ("sm_activation(u, g) : 0.0f", "sm_activation(u, g) : 1.0f"),
    "NaN is lost": ("there ? sm_act", "there && u == u ? sm_act"),
    "one row is wrong": ("sm_activation(u, g) :", "sm_activation(u, row == 7u ? -g : g) :"),
    "nothing is added": ("if (ADDED > 0) {", "if (false) {"),
    "another token's is added": ("addend[size_t(sm_y)", "addend[size_t(sm_y ^ 1u)"),
    "no factor": ("? float(factor[sm_y]) * more", "? more"),
    "the first token's factor": ("float(factor[sm_y])", "float(factor[0])"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault, emulate, monkeypatch):
    monkeypatch.setattr(selftest, "CASES", ((1, 8), (5, 3)))
    change = Change(*FAULTS[fault])
    emulate(change=change)
    fused, arrays = FusedExperts(SICK), random_experts(SICK, selftest.SLOTS)
    ways = [fused, stock_way(SICK)]
    mine, theirs = selftest.measure_errors(SICK, SwiGLU(), arrays, ways, added=2)
    found = find_fault(fused, arrays, mine, theirs)
    assert any(change.found), "the kernel has changed"
    assert bool(found) == (fault != "nothing"), found


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_misses(backend, emulate):
    machine = emulate(backend)
    fused, arrays = FusedExperts(SICK), random_experts(SICK, selftest.SLOTS)
    assert selftest.misses_fault(fused, arrays) == ""
    x, slots = mx.zeros((2, 1, 256), BF16), mx.zeros((2, 1, 16), mx.uint32)
    assert same_bits(fused.with_misses(arrays, x, slots)[1], mx.zeros((2, 1), mx.uint32))
    gone = mx.full((2, 1, 16), experts.ABSENT, mx.uint32)
    assert fused.with_misses(arrays, x, gone)[1].tolist() == [[65535], [65535]]
    before = len(machine.names)
    fused(arrays, x, slots)
    assert not any("miss" in name for name in machine.names[before:])


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("const uint32_t e = LOOKUP ?", "const uint32_t e = false ?", "not told"),
        ("k = 0u; k < uint32_t(slot_shape[1])", "k = 1u; k < uint32_t(slot_shape[1])", "not told"),
        ("0u : 1u << k", "0u : 1u", "not told"),
        ("slot[sm_y + k]", "slot[sm_y]", "not told"),
        ("miss[sm_y / uint32_t(slot_shape[1])]", "miss[0]", "not told"),
        ("e < uint32_t(wu_shape[0]) ? 0u", "e != 0xffffffffu ? 0u", "not told"),
        ("= bits;", "= bits; out[0] = 0.0f;", "changes"),
    ],
)
def test_wrong_misses_are_seen(old, new, fault, emulate):
    found = []
    emulate(change=lambda text: found.append(old in text) or text.replace(old, new))
    fault_seen = selftest.misses_fault(FusedExperts(SICK), random_experts(SICK, selftest.SLOTS))
    assert fault in fault_seen
    assert any(found)


def run_text(source: str, emulate, dtype=F32, **options) -> np.ndarray:
    text = kernel_text("metal", "sum", ())
    source = text["source"].partition("constexpr")[0] + source
    machine = emulate(**options)
    kernel = machine.metal_kernel(
        name="t", input_names=["x"], output_names=["o"], source=source, header=text["header"],
    )  # fmt: skip
    (o,) = kernel(
        [mx.arange(128).astype(dtype)], output_shapes=[(128,)], output_dtypes=[dtype],
        grid=(128, 1, 1), threadgroup=(64, 1, 1), template=[("T", dtype)],
    )  # fmt: skip
    return np.array(o.astype(F32))


AT = "const uint at = sm_block * 64 + sm_thread;\n"
SWAP = "SM_SHARED(float, t, 64);\nt[sm_thread] = x[at];\nBARRIER\no[at] = t[63 - sm_thread];"


def test_the_emulator_sees_faults(emulate):
    """Else a kernel that passes would say little."""
    group = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    good = AT + SWAP.replace("BARRIER", group)
    expected = np.concatenate([np.arange(64)[::-1], np.arange(64, 128)[::-1]])
    for seed in (0, 1, 2):
        assert np.array_equal(run_text(good, emulate, seed=seed), expected)
        for none in ("", "simdgroup_barrier(mem_flags::mem_threadgroup);"):
            wrong = run_text(AT + SWAP.replace("BARRIER", none), emulate, seed=seed)
            assert not np.array_equal(wrong, expected)
    divergent = "float v;\nif (sm_lane < 8) v = simd_sum(x[0]);\nelse v = simd_sum(x[1]);\n"
    large = "SM_SHARED(float, t, 10240);\nt[sm_thread] = 1;\no[at] = t[sm_thread];"
    for text, fault in (
        (SWAP.replace("BARRIER", f"if (sm_thread < 40) {group}"), "already returned"),
        ("if (sm_lane > 20) return;\no[at] = simd_sum(x[at]);", "already returned"),
        (divergent + "o[at] = v;", "divergent"),
        (large, "over the limit"),
    ):
        with pytest.raises(KernelFault, match=fault):
            run_text(AT + text, emulate)
    assert np.isnan(run_text(AT + "SM_SHARED(float, t, 64);\no[at] = t[sm_thread];", emulate)).all()
    with pytest.raises(RuntimeError, match=r"bfloat|no viable"):
        run_text(AT + "o[at] = x[at] * 2.0f;", emulate, dtype=BF16)


# ---- routing -------------------------------------------------------------------------------------

SIGMOID = {"sigmoid": True, "biased": True}
ROUTERS = [
    # experts, k, by logits, renormalised, from the end
    FusedRouter(128, 8, False, True, True),
    FusedRouter(60, 4, False, False, False),
    FusedRouter(8, 2, True, True, False),
    FusedRouter(513, 16, False, False, True),
    FusedRouter(3, 3, True, True, True),
    FusedRouter(40, 8, True, True, True, wide=True),
    FusedRouter(256, 8, False, True, False, **SIGMOID, groups=8, kept=4, wide=True, scale=2.5),
    FusedRouter(6, 1, False, False, False, **SIGMOID, wide=True, scale=1.0),
    FusedRouter(72, 4, False, True, False, **SIGMOID, eps=1e-3),
    FusedRouter(
        96, 5, False, True, True, **SIGMOID, groups=32, kept=2, never=True, wide=True, cast=True
    ),
    FusedRouter(40, 4, False, True, False, groups=4, kept=3, wide=True, eps=1e-20),
    FusedRouter(160, 6, False, False, False, groups=8, kept=3, greedy=True, scale=16.0),
    FusedRouter(64, 6, False, True, False, wide=True, least=0.75),
    FusedRouter(32, 4, False, True, True, **SIGMOID, bias_in="wide", eps=1e-6, scale=1.5),
    FusedRouter(96, 8, False, True, False, **SIGMOID, bias_in="narrow", eps=1e-20, scale=2.5),
    FusedRouter(64, 4, False, True, False, **SIGMOID, groups=8, kept=3, bias_in="narrow"),
    FusedRouter(40, 5, False, True, False, softplus=True, biased=True, wide=True),
    FusedRouter(36, 3, False, False, True, softplus=True, scale=0.5),
]


def exact_keys(router, logits, bias):
    """(scores in float32, what is chosen by [..., E]): each step rounded once to its own type."""
    dtype, scores = logits.dtype, logits.astype(F32)
    if router.sigmoid:
        scores = mx.sigmoid(scores)
    elif router.softplus:
        scores = mx.sqrt(mx.logaddexp(scores, 0))
    else:
        scores = mx.softmax(scores, axis=-1)
    keys = scores if router.wide else scores.astype(dtype)
    if bias and router.bias_in == "narrow":
        keys = keys + bias[0].astype(keys.dtype)
    elif bias:
        keys = keys.astype(F32) + bias[0].astype(F32)
    return scores, keys


@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_routers(router, emulate):
    emulate()
    assert selftest.router_fault(router) == ""
    bias = [mx.random.normal((router.experts,), key=mx.random.key(2))] * router.biased
    for dtype in (F32, BF16):
        shape = (2, 3, router.experts)
        logits = 3 * mx.random.normal(shape, key=mx.random.key(1)).astype(dtype)
        assert router.fits(logits)
        ids, weights = router(logits, *bias)
        stock_ids, stock_weights = selftest.route_operations(router)(logits, *bias)
        assert (ids.shape, weights.dtype) == (stock_ids.shape, stock_weights.dtype)
        exact, keys = exact_keys(router, logits, bias)
        expected = mx.take_along_axis(exact, ids, axis=-1)
        if router.norm:
            total = expected.sum(axis=-1, keepdims=True) + (router.eps or 0.0)
            expected = expected / mx.maximum(total, router.least or 0.0)
        expected = expected * (1.0 if router.scale is None else router.scale)
        rounding = relative_error(expected.astype(weights.dtype), expected)
        assert relative_error(weights, expected) <= 1.02 * rounding + 2e-6
        # The same experts, up to those that rounding makes equal.
        if router.sigmoid and not router.wide and dtype != F32:
            # (mlx-lm rounds within a sigmoid of 16 bits, too.)
            if router.groups > 1:
                continue
            stock_ids = mx.argsort(keys, axis=-1)[..., -router.top_k :]
        mine, theirs = (mx.sort(mx.take_along_axis(keys, i, -1), -1) for i in (ids, stock_ids))
        assert mx.array_equal(mine, theirs).item()


def test_types_in_which_a_bias_is_added(emulate):
    """In bfloat16 256 + 1 is 256, and 1/284 is lost beside 1: then the first of equal ones wins."""
    emulate()
    logits = mx.array([[0.957, 0.957, 1.0, 90.0]], BF16)  # scores 185 / 256 twice, 187 / 256, 1
    kind = FusedRouter(4, 1, False, False, False, **SIGMOID)
    for bias_in, bias, dtype, expected in (
        ("wide", [256.0, 256, 256, 0], F32, 2),
        ("narrow", [256.0, 256, 256, 0], F32, 0),
        ("", [256.0, 256, 256, 0], F32, 2),
        ("", [256.0, 256, 256, 0], BF16, 0),
        ("", [256.0, 256, 256, 0], F16, 2),  # of both: float32
        ("narrow", [1.0, 1 + 0.9 / 256, 0, 0], F32, 0),  # the bias itself is rounded
        ("wide", [1.0, 1 + 0.9 / 256, 0, 0], F32, 1),
    ):
        ids, _ = replace(kind, bias_in=bias_in)(logits, mx.array(bias, dtype))
        assert ids.item() == expected, (bias_in, dtype)
    grouped = FusedRouter(8, 1, False, False, False, **SIGMOID, groups=4, kept=1)
    logits = mx.array([[90.0, 0, 0, 0, 0, 0, 0, 0]], BF16)
    bias = mx.array([128.0, 128, 128, 128, 0, 0, 0, 0])
    for bias_in, expected in (("wide", 0), ("narrow", 2)):  # 129 and 128 is 256, as 128 and 128
        assert replace(grouped, bias_in=bias_in)(logits, bias)[0].item() == expected


def test_greedy_groups(emulate):
    """A group with the best expert is kept, though another's two best add up to more; what is left
    out weighs nothing, should it be chosen all the same."""
    emulate()
    router = FusedRouter(6, 4, False, False, False, groups=3, kept=1, greedy=True)
    logits = mx.log(mx.array([[0.3, 0.02, 0.28, 0.28, 0.06, 0.06]]))
    ids, weights = router(logits)
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert mx.allclose(weights, mx.array([[0.3, 0.02, 0, 0]]), 1e-5, 0).item()
    ids, _ = replace(router, greedy=False)(logits)
    assert ids.tolist()[0][:2] == [2, 3]


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_softplus_far_out(backend, emulate):
    """Against float64: log(1 + exp(x)) of small numbers is no logarithm of 1 in float32."""
    emulate(backend)
    x = np.array([-90, -80, -40, -17, -9, -3, -1e-3, 0, 1e-3, 2, 9, 30, 90], np.float32)
    router = FusedRouter(13, 13, False, False, True, softplus=True)
    ids, weights = router(mx.array(x[None]))
    assert ids.tolist() == [[*range(13)]]
    expected = np.sqrt(np.logaddexp(x.astype(float), 0))
    assert np.allclose(np.array(weights)[0], expected, 1e-6, 0)


@pytest.mark.parametrize("backend", ["metal", "cuda"])
@pytest.mark.parametrize("never", [False, True])
def test_groups(backend, never, emulate):
    """Of equal groups the first are left out, as by sorting; experts left out may still win."""
    emulate(backend)
    router = FusedRouter(8, 3, False, False, False, **SIGMOID, groups=4, kept=2, never=never)
    logits = mx.zeros((1, 8))
    for bias, expected in (
        ([2.0, 0, 0, 2, 2, 0, 0, 2], [4, 7, 5]),
        ([2.0, 0, 1, 2, 2, 0, 1, 2], [3, 7, 2]),
        ([-2.0, -1, -3, -1, -2, -1, -1, -4], [1, 5, 0] if never else [2, 3, 6]),
        ([-math.inf] * 8, [0, 1, 2]),
    ):
        assert router(logits, mx.array(bias))[0].tolist() == [expected]


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_equal_experts_are_chosen_as_by_sorting(backend, emulate):
    emulate(backend)
    logits = mx.array([[1.0, 2, 2, 0, 2, 1, 2, 1]])
    assert FusedRouter(8, 3, False, True, False)(logits)[0].tolist() == [[1, 2, 4]]
    assert FusedRouter(8, 3, True, True, True)(logits)[0].tolist() == [[2, 4, 6]]
    assert FusedRouter(8, 6, True, False, True)(logits)[0].tolist() == [[5, 7, 1, 2, 4, 6]]
    nothing = mx.full((1, 8), -math.inf)
    assert sorted(FusedRouter(8, 8, True, True, False)(nothing)[0].tolist()[0]) == [*range(8)]


PLAIN = (40, 4, False, False, True)
GROUPED = FusedRouter(
    64, 4, False, True, False, **SIGMOID, groups=8, kept=2, wide=True, eps=0.1, scale=2.5
)
GREEDY = FusedRouter(160, 6, False, False, False, groups=8, kept=3, greedy=True, scale=16.0)
LEAST = FusedRouter(64, 4, False, True, False, wide=True, least=0.99)
SOFTPLUS = FusedRouter(64, 4, False, False, True, softplus=True, wide=True)
NARROW = FusedRouter(64, 4, False, True, False, **SIGMOID, bias_in="narrow")


@pytest.mark.parametrize(
    ("old", "new", "fault", "router"),
    [
        ("left &= ~(1u << j)", "left &= ~0u", "other experts", FusedRouter(*PLAIN)),
        ("if (other_id != 0xffffffffu &&", "if (m < 16 && other_id != 0xffffffffu &&", "other ex",
         FusedRouter(*PLAIN)),
        ("my_score / sum", "my_score / chosen", "other weights", FusedRouter(*PLAIN)),
        ("total == total", "true", "NaN", FusedRouter(40, 4, True, True, True)),
        ("total == total", "true", "NaN", GROUPED),
        ("static_cast<KEY>(float(correction[e]))", "0.0f", "other experts", GROUPED),
        ("v[j] < 0.0f ? small", "v[j] > 0.0f ? small", "other", GROUPED),
        ("rank += other < mine", "rank += other > mine", "other experts", GROUPED),
        ("first + second", "first", "other experts", GROUPED),
        ("second = low > second", "second = low > first", "other experts", GROUPED),
        ("< uint32_t(DROP)", "<= uint32_t(DROP)", "other experts", GROUPED),
        ("NEVER ? -SM_INFINITY : 0.0f", "2.0f", "other experts", GROUPED),
        ("chosen + SM_AS_FLOAT(uint32_t(EPS))", "chosen", "other weights", GROUPED),
        ("* SM_AS_FLOAT(uint32_t(SCALE))", "", "other weights", GROUPED),
        ("GREEDY ? first : two", "two", "other experts", GREEDY),
        ("SM_AS_FLOAT(uint32_t(LEAST)))", "0.0f)", "other weights", LEAST),
        ("SM_SQRT(sm_softplus(v[j]))", "sm_softplus(v[j])", "other", SOFTPLUS),
        ("v > 0.0f ? v + tail : tail", "tail", "other experts", SOFTPLUS),
        ("ALONE ? v[j] : v[j] / total", "v[j] / total", "other", replace(SOFTPLUS, biased=True)),
        ("WIDE ? score : float(static_cast<T>(score))", "WIDE ? score : 0.0f", "other ex", NARROW),
    ],
)  # fmt: skip
def test_wrong_routers_are_seen(old, new, fault, router, emulate):
    change = Change(old, new)
    emulate(change=change)
    assert fault in selftest.router_fault(replace(router))  # a new one, of no other test
    assert all(change.found)


def test_logits_that_do_not_fit(emulate):
    emulate()
    router = FusedRouter(64, 4, False, True, True)
    assert router.fits(mx.zeros((16, 64)))
    assert not router.fits(mx.zeros((17, 64)))
    assert not router.fits(mx.zeros((1, 63)))
    assert not router.fits(mx.zeros((1, 64), mx.int32))
    assert not FusedRouter(1025, 4, False, True, True).fits(mx.zeros((1, 1025)))
    assert not FusedRouter(64, 17, False, True, True).fits(mx.zeros((1, 64)))
    for groups, kept in ((64, 32), (3, 1), (0, 0), (4, 0), (4, 5)):
        grouped = FusedRouter(64, 4, False, True, True, groups=groups, kept=kept)
        assert not grouped.fits(mx.zeros((1, 64)))


# ---- names and text ------------------------------------------------------------------------------


def test_names_tell_texts_apart(monkeypatch):
    some = ("inp", "slot")
    texts = [
        kernel_text(backend, body, inputs, activation)
        for backend in ("metal", "cuda")
        for body in ("expert", "expert+miss", "sum", "route")
        for inputs in (some, (*some, "lookup"))
        for activation in (SWIGLU, "u", "u * 2.0f")
    ]
    assert len({t["name"] for t in texts}) == 48
    assert texts[0] == kernel_text("metal", "expert", some, SWIGLU)


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_text_is_what_metal_takes(backend):
    bodies = ("expert+miss", "sum", "route")
    for text in itertools.chain(*(kernel_text(backend, b, (), SWIGLU).values() for b in bodies)):
        assert text.isascii()
        for line in text.splitlines():
            code = line.partition("//")[0]
            assert "double" not in code
            assert not any(t.count(".") and not t.endswith("f") for t in numbers_of(code)), line


def numbers_of(code: str) -> list[str]:
    words = code.replace("(", " ").replace(")", " ").replace(",", " ").replace(";", " ").split()
    return [w for w in words if w[0].isdigit()]


# ---- what is eligible, what is dispatched --------------------------------------------------------


def specs(dtype="BF16", bias=(), bits=4, group=64, hidden=128, ffn=64) -> list[TensorSpec]:
    out = []
    for name, (rows, inputs) in {
        "gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn),
    }.items():  # fmt: skip
        groups = (rows, inputs // group)
        out.append(TensorSpec(name, "weight", "U32", (rows, inputs * bits // 32), 1))
        out += [TensorSpec(name, kind, dtype, groups, 1) for kind in ("scales", "biases")]
        if name in bias:
            out.append(TensorSpec(name, "bias", dtype, (rows,), 1))
    return out


def projections(**changes) -> dict[str, Projection]:
    usual = {"group_size": 64, "bits": 4, "mode": "affine"}
    names = ("gate_proj", "up_proj", "down_proj")
    return {
        n: Projection(n, **{**usual, **changes.get(n, changes.get("every", {}))}) for n in names
    }


def test_eligible():
    found = eligible(specs(), projections(), SwiGLU())
    assert found == swiglu(128, 64, 4, 64, BF16)
    biased = eligible(specs(bias=("gate_proj", "up_proj")), projections(), SwiGLU())
    assert biased == replace(found, up_bias=True)
    wide = eligible(specs(hidden=7168), projections(), SwiGLU())
    assert wide == swiglu(7168, 64, 4, 64, BF16)


@pytest.mark.parametrize(
    ("why", "tensors", "parts", "activation"),
    [
        ("mxfp8", specs(), projections(every={"mode": "mxfp8", "group_size": 32}), SwiGLU()),
        ("nvfp4", specs(), projections(every={"mode": "nvfp4", "group_size": 32}), SwiGLU()),
        ("some", specs(), projections(up_proj={"mode": "mxfp4", "group_size": 32}), SwiGLU()),
        ("not quantised", specs(), projections(up_proj={"mode": None}), SwiGLU()),
        ("7 bits", specs(), projections(down_proj={"bits": 7}), SwiGLU()),
        ("groups of 16", specs(), projections(every={"group_size": 16}), SwiGLU()),
        ("different ways", specs(), projections(gate_proj={"bits": 2}), SwiGLU()),
        ("different ways", specs(bias=("gate_proj",)), projections(), SwiGLU()),
        ("not whole groups", specs(ffn=96), projections(), SwiGLU()),
        ("too long", specs(hidden=8192), projections(), SwiGLU()),
        ("not known", specs(), projections(), nn.GELU()),
        ("no scales", [t for t in specs() if t.kind != "biases"], projections(), SwiGLU()),
        ("not all", [*specs()[:-1], specs("F32")[-1]], projections(), SwiGLU()),
    ],
)
def test_not_eligible(why, tensors, parts, activation):
    reason = eligible(tensors, parts, activation)
    assert isinstance(reason, str)
    assert why in reason


def test_two_bits_need_whole_chunks():
    two = {"bits": 2, "group_size": 32}
    assert "chunks of 64" in eligible(
        specs(bits=2, group=32, ffn=96), projections(every=two), SwiGLU()
    )
    assert not isinstance(
        eligible(specs(bits=2, group=32, ffn=192), projections(every=two), SwiGLU()), str
    )


def test_calls_that_do_not_fit(emulate):
    emulate()
    fused = FusedExperts(swiglu(128, 64, 4, 64, BF16), max_tokens=4)
    x, slots = mx.zeros((4, 128), BF16), mx.zeros((4, 16), mx.uint32)
    assert fused.fits(x, slots)
    assert not fused.fits(mx.zeros((5, 128), BF16), mx.zeros((5, 2), mx.uint32))
    assert not fused.fits(x, mx.zeros((4, 17), mx.uint32))
    assert not fused.fits(x.astype(F32), slots)
    assert not fused.fits(x[:1], slots)


def test_no_gpu_no_kernels():
    assert experts.backend() is None
    fused = FusedExperts(swiglu(128, 64, 4, 64, BF16))
    assert not fused.fits(mx.zeros((1, 128), BF16), mx.zeros((1, 2), mx.uint32))


def test_compiled_calls_take_new_arrays(monkeypatch):
    """What mx.compile replays is a function of every array that it is given. (No kernel runs.)"""

    def first(self, misses, arrays, x, slots, lookup):
        rows = slots if lookup is None else lookup[slots]
        return [x[:, None] + arrays["up_proj", "scales"][rows].sum(-1), *[rows.sum(-1)] * misses]

    def second(self, arrays, h, slots, weights=None, lookup=None):
        y = h + arrays["down_proj", "scales"][slots].sum((-1, -2))[..., None]
        return y if weights is None else weights.sum(y)

    monkeypatch.setattr(FusedExperts, "_first", first)
    monkeypatch.setattr(FusedExperts, "_second", second)
    geometry = swiglu(64, 64, 4, 64, F32)
    compiled, plain = FusedExperts(geometry), FusedExperts(geometry, compiled=False)
    for seed in range(3):
        arrays = random_experts(geometry, 6, seed)
        for tokens in (1, 4):
            x, slots = random_call(geometry, 6, tokens, 2, seed)
            lookup = mx.random.permutation(6, key=mx.random.key(seed)).astype(mx.uint32)
            plain_sum = random_weights(slots, F32, seed=seed)
            one, two = (selftest.with_shared(plain_sum, 64, n) for n in (1, 2))
            for weights in (None, plain_sum, one, two):
                for table in (None, lookup):
                    y = compiled(arrays, x, slots, weights, table)
                    expected = plain(arrays, x, slots, weights, table)
                    assert mx.allclose(y, expected, 1e-6, 1e-6).item()
                    y, misses = compiled.with_misses(arrays, x, slots, weights, table)
                    assert mx.allclose(y, expected, 1e-6, 1e-6).item()
                    rows = slots if table is None else table[slots]
                    assert mx.array_equal(misses, rows.sum(-1)).item()


# ---- prompts -------------------------------------------------------------------------------------

# hidden, ffn, (bits, group) of gate and up, of down, mode, dtype
MANY = [
    (96, 160, (4, 32), (4, 32), "affine", BF16),
    (128, 64, (2, 64), (8, 32), "affine", F16),
    (256, 128, (3, 32), (4, 128), "affine", BF16),
    (128, 128, (5, 64), (6, 32), "affine", F16),
    (64, 96, (4, 32), (4, 32), "mxfp4", BF16),
    (96, 64, (8, 32), (8, 32), "mxfp8", F16),
    (64, 96, (4, 16), (4, 16), "nvfp4", BF16),
]


def as_rounded(geometry, activation, arrays, x, slots):
    """What PromptExperts should compute but for the order of sums: weights, and h, are of T."""
    g = geometry

    def project(name, x, how):
        bits, group = how
        weight, scales, biases, bias = (
            arrays.get((name, kind)) for kind in ("weight", "scales", "biases", "bias")
        )
        if biases is not None:
            scales, biases = scales.astype(F32), biases.astype(F32)
        w = mx.dequantize(weight, scales, biases, group, bits, g.mode, dtype=F32)
        w = w.astype(g.dtype).astype(F32)[slots]
        y = (w @ x[..., None].astype(F32)).squeeze(-1)
        return y if bias is None else y + bias[slots].astype(F32)

    x = mx.broadcast_to(x[:, None], (*slots.shape, g.hidden))
    if g.gated:
        h = activation(project("up_proj", x, g.up), project("gate_proj", x, g.up))
    else:
        h = activation(project("fc1", x, g.up))
    return project("down_proj" if g.gated else "fc2", h.astype(g.dtype), g.down)


def assert_prompt(geometry, activation=None, tiling=None):
    activation = SwiGLU() if activation is None else activation
    arrays, (x, slots) = random_experts(geometry, selftest.SLOTS), ragged_call(geometry)
    fused = FusedExperts(geometry, max_tokens=0)
    fused.prompt = PromptExperts(geometry, tilings=tiling and (tiling, tiling))
    y = selftest.operations(geometry, activation, fused)(arrays, x, slots)
    expected = as_rounded(geometry, activation, arrays, x, slots)
    assert (y.shape, y.dtype) == (expected.shape, geometry.dtype)
    rounding = relative_error(expected.astype(y.dtype), expected)
    assert relative_error(y, expected) <= 1.05 * rounding
    return y


@pytest.mark.parametrize("shape", MANY, ids=str)
def test_prompts_equal_the_reference(shape, emulate):
    hidden, ffn, up, down, mode, dtype = shape
    emulate()
    assert_prompt(swiglu(hidden, ffn, *up, dtype, down, mode))


@pytest.mark.parametrize("gated", [True, False])
def test_prompts_with_biases_and_without_a_gate(gated, emulate):
    emulate("cuda")
    activation = activations.SwigluOAI() if gated else nn.ReLU2()
    geometry = replace(
        swiglu(128, 96, 4, 32, BF16), gated=gated, up_bias=True, down_bias=True,
        activation=activation_text(activation, gated),
    )  # fmt: skip
    assert_prompt(geometry, activation)


def test_prompts_by_other_threads_and_tilings(emulate):
    """No bit depends on the order of threads, the language, or how the work is divided."""
    geometry = swiglu(160, 96, 4, 32, F16)  # neither is a multiple of what a block does
    machine = emulate()
    first = assert_prompt(geometry)
    assert machine.threadgroup_bytes == PromptTiling().shared_nbytes
    assert PromptTiling().shared_nbytes <= experts.SHARED_MEMORY
    assert ODD_BITS.shared_nbytes <= experts.SHARED_MEMORY
    for backend, seed, tiling in (
        ("metal", 1, None), ("metal", 2, (2, 16, 48, 32)), ("cuda", 3, None),
        ("cuda", 0, (8, 32, 16, 128)), ("cuda", 1, (1, 128, 16, 64)),
    ):  # fmt: skip
        emulate(backend, seed=seed)
        assert same_bits(assert_prompt(geometry, tiling=tiling and PromptTiling(*tiling)), first)


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_tiles(rows):
    rng = np.random.default_rng(rows)
    for sizes in ([1], [rows], [rows + 1], [0, 0, 5 * rows, 1], *rng.integers(0, 3 * rows, (9, 7))):
        slots = np.repeat(rng.permutation(50)[: len(sizes)], sizes)
        if not slots.size:
            continue
        expected = [i for i, s in enumerate(slots) if (i - np.argmax(slots == s)) % rows == 0]
        found = tiles(mx.array(slots.astype(np.uint32)), rows, len(sizes)).tolist()
        assert found[: len(expected)] == expected
        assert set(found[len(expected) :]) == {slots.size}  # at least one: where the last tile ends


TILE_FAULTS = {
    "nothing": ("", ""),
    "no barrier": ("      SM_BARRIER();\n    }", "    }"),
    "another tile's rows": ("row[begin + (r < count", "row[(r < count"),
    "a tile too short": ("tile[sm_y + 1u]) - begin", "tile[sm_y + 1u]) - begin - 1u"),
    "tiles that stop early": ("(16 * m) < count", "(16 * m + 16) < count"),
    "the slot of the first row": ("slot[begin]", "slot[0]"),
    "no offsets": ("                  offset;", "                  0.0f;"),
    "scales of a neighbour": ("q[j].scale[e * 8 * PARTS / CODES]", "q[j].scale[0]"),
    "a chunk is left out": ("c < uint32_t(CHUNKS)", "c + 1u < uint32_t(CHUNKS)"),
    "up and gate swapped": ("gate ? wg4 : wu4", "gate ? wu4 : wg4"),
    "a missing slot is read": ("expert < uint32_t(wu_shape[0])", "expert != 0xffffffffu"),
    "a missing slot counts": ("sm_activation(u, g) : 0.0f", "sm_activation(u, g) : 1.0f"),
    "a column is lost": ("column < uint32_t(N)) {", "column + 2u < uint32_t(N)) {"),
    "NaN is lost": ("there ? sm_act", "there && u == u ? sm_act"),
    "the first rows again": ("a[m], b[n]", "a[0], b[n]"),
    "lanes of another row": ("* low) + sm_fragment_row", "* (1 - low)) + sm_fragment_row"),
}


@pytest.mark.parametrize("fault", TILE_FAULTS)
def test_faults_in_prompts_are_seen(fault, emulate, fast):
    change = Change(*TILE_FAULTS[fault])
    emulate(change=change)
    geometry = swiglu(128, 64, 2, 32, BF16)  # two groups in a chunk
    stock = selftest.operations(geometry, SwiGLU())
    found = prompt_selftest.self_test(PromptExperts(geometry), stock, SwiGLU()).fault
    assert any(change.found), "the kernel has changed"
    assert bool(found) == (fault != "nothing"), found


def test_from_how_many_rows_on():
    def least(*speedup):
        times = dict(zip(TIMED_ROWS, speedup, strict=True))
        return PromptVerdict("", 1e-3, 2e-3, times).min_rows

    assert TIMED_ROWS == (8, 32, 256)
    assert [least(2.0, 2.0, 2.0), least(2.0, 0.9, 2.0), least(0.9, 1.06, 2.0)] == [8, 256, 32]
    assert least(2.0, 2.0, 1.04) is None
    prompt = PromptExperts(SMALL, min_rows=8)
    assert not prompt.fits(mx.zeros((1, 64), BF16), mx.zeros((64,)), 8)  # no GPU


# ---- who chooses ---------------------------------------------------------------------------------


def stock_way(geometry):
    def stock(arrays, x, slots, weights=None):
        y = reference(geometry, SwiGLU(), arrays, x, slots).astype(geometry.dtype)
        return y if weights is None else weights.sum(y)

    return stock


@pytest.fixture
def fast(monkeypatch):
    """Timing says what the test wants: fast.times = {tokens, or rows an expert: speedup}."""

    class Times:
        times = dict.fromkeys((*selftest.TIMED_TOKENS, *TIMED_ROWS), 2.0)

    def time_ways(geometry, arrays, ways, tokens, weighted, **more):
        return [1.0, Times.times[tokens]]

    monkeypatch.setattr(selftest, "time_ways", time_ways)
    monkeypatch.setattr(choose, "time_router", lambda router: Times.times[1])
    return Times


def chosen(kernels, geometry=SMALL):
    chooser = KernelChooser(kernels)
    return chooser, chooser.choose(geometry, selftest.operations(SMALL, SwiGLU()), SwiGLU(), True)


def test_auto_takes_what_is_faster(emulate, fast, cache_folder):
    emulate()
    chooser, fused = chosen("auto")
    assert fused.max_tokens == 16
    assert str(chooser).startswith("fused in 1 of 1 layers; 64 x 64 q4g64 bfloat16: right; error")
    for file in cache_folder.iterdir():
        file.unlink()
    prompts = dict.fromkeys(TIMED_ROWS, 0.9)
    fast.times = prompts | {1: 1.5, 4: 0.9, 16: 3.0}
    assert chosen("auto")[1].max_tokens == 1
    assert chosen("fused")[1].max_tokens == 16  # speed is not asked for
    for file in cache_folder.iterdir():
        file.unlink()
    fast.times = prompts | {1: 0.9, 4: 2.0, 16: 3.0}
    assert chosen("auto")[1] is None


def test_prompts_take_the_kernels_from_where_they_are_faster(emulate, fast, cache_folder):
    emulate()
    for kernels in ("auto", "fused"):  # "fused" does not ask for speed of few tokens alone
        fast.times[8] = 0.9
        chooser, fused = chosen(kernels)
        assert fused.prompt.min_rows == 32
        assert "prompts: right; error 0.003" in str(chooser)
        assert "256 rows an expert, used from 32 on" in str(chooser)
        for rows, fits in ((4 * 32 - 1, False), (4 * 32, True)):
            slots = mx.zeros((rows,), mx.uint32)
            assert fused.prompt.fits(mx.zeros((1, 64), BF16), slots, 4) == fits
            assert not fused.prompt.fits(mx.zeros((1, 64), F16), slots, 4)
        for file in cache_folder.iterdir():
            file.unlink()
    fast.times[256] = 0.9
    chooser, fused = chosen("auto")
    assert (fused.max_tokens, fused.prompt) == (16, None)
    assert "rows an expert, not used" in str(chooser)


def test_prompts_alone(emulate, fast):
    """Where the kernels are slower for few tokens, prompts may still use theirs."""
    emulate()
    fast.times[1] = 0.9
    fused = chosen("auto")[1]
    assert (fused.max_tokens, fused.prompt.min_rows) == (0, 8)
    assert not fused.fits(mx.zeros((1, 64), BF16), mx.zeros((1, 8), mx.uint32))


def test_prompts_of_32_bits_keep_mlx_lms(emulate):
    emulate()
    chooser = KernelChooser("fused")
    assert chooser._decide_prompt(swiglu(64, 64, 4, 64, F32), None, SwiGLU()) is None
    assert "prompts: matrix products are of 16-bit numbers" in str(chooser)


@pytest.mark.parametrize("remembered", [False, True])
def test_prompts_whose_kernels_fail(remembered, emulate, fast):
    """Then mlx-lm's operations compute prompts, and the kernels few tokens."""
    if remembered:
        emulate()
        assert chosen("auto")[1].prompt is not None
    emulate(change=lambda text: text.replace("sm_clear(sums", "no_such_function(sums"))
    with pytest.warns(UserWarning, match=r"prompts: .*no_such_function") as seen:
        fused = chosen("auto")[1]
    assert len(seen) == 1
    assert (fused.max_tokens, fused.prompt) == (16, None)


def test_stock_does_not_even_look(emulate, monkeypatch):
    emulate()
    monkeypatch.setattr(choose, "self_test", None)
    chooser, fused = chosen("stock")
    assert fused is None
    assert str(chooser) == "mlx-lm's operations"


def test_on_a_cpu():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chooser, fused = chosen("auto")
    assert fused is None
    assert "no GPU" in str(chooser)
    chooser = KernelChooser("fused")
    with pytest.warns(UserWarning, match="no GPU"):
        assert chooser.choose(SMALL, stock_way(SMALL), SwiGLU(), True) is None
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        assert chooser.choose(SMALL, stock_way(SMALL), SwiGLU(), True) is None


def test_wrong_kernels_are_not_used(emulate, fast):
    emulate(change=lambda text: text.replace(".offset[p] * sum", ".offset[p] * 0.0f"))
    for kernels in ("auto", "fused"):
        with pytest.warns(UserWarning, match="an error of") as seen:
            assert chosen(kernels)[1] is None
        assert len(seen) == 1


@pytest.mark.parametrize("remembered", [False, True])
def test_kernels_that_do_not_compile(remembered, emulate, fast):
    if remembered:
        emulate()
        assert chosen("auto")[1] is not None
    emulate(change=lambda text: text.replace("SM_BARRIER();", "no_such_function();"))
    with pytest.warns(UserWarning, match="no_such_function") as seen:
        assert chosen("auto")[1] is None
    assert len(seen) == 1


def test_verdicts_are_remembered(emulate, fast, monkeypatch):
    emulate()
    first, _ = chosen("auto")
    for module in (choose, prompt_selftest):
        monkeypatch.setattr(module, "self_test", None)  # not called again
    second, fused = chosen("auto")
    assert str(second) == str(first)
    assert fused.max_tokens == 16
    monkeypatch.undo()


def test_another_machine_is_another_verdict(emulate, monkeypatch):
    emulate()
    keys = {
        choose._key(SMALL, True),
        choose._key(replace(SMALL, ffn=128), True),
        choose._key(SMALL, False),
        choose._prompt_key(SMALL),
    }
    monkeypatch.setattr(choose.platform, "platform", lambda: "another")
    keys.add(choose._key(SMALL, True))
    monkeypatch.setattr(mx, "__version__", "9.9", raising=False)
    keys.add(choose._key(SMALL, True))
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "another"})
    keys.add(choose._key(SMALL, True))
    emulate("cuda")
    keys.add(choose._key(SMALL, True))
    assert len(keys) == 8


def good_file(key: str) -> dict:
    entry = {
        "fault": "",
        "error": 1e-3,
        "stock_error": 2e-3,
        "speedup": {"1": 2.0, "4": 2.0, "16": 2.0},
    }
    return {"format": choose.VERDICTS.format, "entries": {key: entry}}


def hostile_files() -> dict[str, bytes]:
    def text(change) -> bytes:
        document = good_file("k")
        change(document, document["entries"]["k"])
        return json.dumps(document).encode()

    return {
        "empty": b"",
        "binary": bytes(range(256)),
        "not json": b"{",
        "deep": b"[" * 100_000,
        "a list": b"[]",
        "null": b"null",
        "large": json.dumps({**good_file("k"), "x": "y" * MOST_KNOWN_NBYTES}).encode(),
        "another format": text(lambda d, e: d.update(format="x")),
        "another version": text(lambda d, e: d.update(format=choose.VERDICTS.format + "0")),
        "no verdicts": text(lambda d, e: d.pop("entries")),
        "verdicts are a list": text(lambda d, e: d.update(entries=[])),
        "no speedup": text(lambda d, e: e.pop("speedup")),
        "speedup of few": text(lambda d, e: e.update(speedup={"1": 2.0})),
        "speedup is no number": text(lambda d, e: e["speedup"].update({"1": "2"})),
        "speedup is true": text(lambda d, e: e["speedup"].update({"1": True})),
        "speedup is negative": text(lambda d, e: e["speedup"].update({"4": -1.0})),
        "speedup is infinite": text(lambda d, e: e["speedup"].update({"4": math.inf})),
        "tokens are words": text(lambda d, e: e["speedup"].update({"many": 2.0})),
        "error is NaN": text(lambda d, e: e.update(error=math.nan)),
        "error is text": text(lambda d, e: e.update(error="0.1")),
        "fault is no text": text(lambda d, e: e.update(fault=0)),
    }


@pytest.mark.parametrize("name", hostile_files())
def test_damaged_verdicts_are_ignored_and_replaced(name, cache_folder):
    cache_folder.mkdir(parents=True)
    (cache_folder / "kernels.json").write_bytes(hostile_files()[name])
    assert choose.VERDICTS.entries() == {}
    choose.VERDICTS.add("k", Verdict("", 1e-3, 2e-3, {1: 2.0, 4: 2.0, 16: 2.0}))
    assert set(choose.VERDICTS.entries()) == {"k"}


def test_a_good_file_is_believed(cache_folder):
    cache_folder.mkdir(parents=True)
    (cache_folder / "kernels.json").write_text(json.dumps(good_file("k")))
    assert choose.VERDICTS.entries()["k"].max_tokens == 16


def test_verdicts_in_odd_places(cache_folder, monkeypatch, emulate, fast):
    verdict = Verdict("", 1e-3, 2e-3, {1: 2.0, 4: 2.0, 16: 2.0})
    cache_folder.mkdir(parents=True)
    os.mkfifo(cache_folder / "kernels.json")  # opening it would wait for ever
    assert choose.VERDICTS.entries() == {}
    (cache_folder / "kernels.json").unlink()
    (cache_folder / "kernels.json").mkdir()
    assert choose.VERDICTS.entries() == {}
    for _ in range(2):
        with pytest.raises(OSError, match="kernels"):
            choose.VERDICTS.add("k", verdict)
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    emulate()
    assert chosen("auto")[1] is not None
    assert choose.VERDICTS.entries() == {}


def test_faults_with_nan_are_remembered(cache_folder):
    verdict = Verdict("an error of nan", math.nan, 2e-3, {})
    choose.VERDICTS.add("k", verdict)
    assert choose.VERDICTS.entries()["k"].fault == "an error of nan"
    for i in range(MOST_KNOWN + 5):
        if i in (0, MOST_KNOWN + 4):
            choose.VERDICTS.add(str(i), verdict)
    assert list(cache_folder.iterdir()) == [cache_folder / "kernels.json"]


# ---- a whole model -------------------------------------------------------------------------------


def logits_of(kernels: str, slots: float, tokens: list[int]) -> tuple[mx.array, object]:
    config = smoe_mlx.StreamingConfig(slots=slots, kernels=kernels, debug=True)
    model, _ = smoe_mlx.load("demo", config=config)
    return model(mx.array([tokens])), model


@pytest.mark.parametrize("slots", [1.0, 0.25])
def test_a_streamed_model(slots, emulate, fast):
    tokens = random_tokens(7)
    expected, _ = logits_of("stock", slots, tokens)
    machine = emulate()
    got, model = logits_of("fused", slots, tokens)
    assert len(machine.names) > 3 * 8
    for body in ("expert", "sum", "route"):
        assert any(f"smoe_{body}_" in name for name in machine.names)
    assert "fused in 8 of 8 layers" in smoe_mlx.stats(model).kernels
    off = float(mx.abs(got - expected).max()) / float(mx.abs(expected).max())
    assert 0 < off < 0.05
    (first, *_) = (m for _, m in model.named_modules() if getattr(m, "fused", None))
    call = mx.zeros((1, 1, first.fused.geometry.hidden), got.dtype), mx.zeros((1, 1, 2), mx.uint32)
    assert first._fused_for(*call) is first.fused
    model.train()  # kernels have no gradient
    assert first._fused_for(*call) is None
    stock, model = logits_of("stock", slots, tokens)
    assert same_bits(stock, expected)
    assert all(not hasattr(m, "fused") or m.fused is None for _, m in model.named_modules())
    long, _ = logits_of("fused", slots, tokens * 3)  # more tokens than the kernels take
    assert same_bits(long, logits_of("stock", slots, tokens * 3)[0])


@pytest.fixture(scope="module")
def in_bfloat16(tmp_path_factory):
    """A small model like the demo, which is float32."""
    config = json.loads((find_model("demo") / "config.json").read_text())
    for name in ("quantization", "quantization_config"):
        config.pop(name, None)
    config |= {"num_hidden_layers": 2, "num_experts": 16, "num_experts_per_tok": 4}
    model, config = quantize_model(random_model(config, BF16), config, 64, 4)
    return save_checkpoint(tmp_path_factory.mktemp("models") / "bfloat16", model, config)


@pytest.mark.parametrize("slots", [1.0, 0.25])
def test_a_long_prompt_of_a_streamed_model(slots, emulate, fast, in_bfloat16):
    """In one wave and in several."""
    tokens = mx.array([random_tokens(33)])  # 8.25 rows an expert

    def streamed(kernels):
        config = smoe_mlx.StreamingConfig(slots=slots, kernels=kernels, debug=True)
        return load_model(in_bfloat16, config=config)[0]

    expected = streamed("stock")(tokens)
    machine = emulate()
    model = streamed("fused")
    for rows, used in ((8, True), (100, False)):
        for part in model.modules():
            if isinstance(part, StreamingSwitchGLU):
                part.fused.prompt.min_rows = rows
        machine.names.clear()
        got = model(tokens)
        assert any("smoe_prompt_" in name for name in machine.names) == used
        assert same_bits(got, expected) != used
        assert relative_error(got, expected.astype(F32)) < 0.1  # (on a CPU, mlx-lm rounds much)


def test_a_streamed_model_with_groups(emulate, fast, tiny):
    folder, tokens = tiny("deepseek_v3", "affine"), mx.array([random_tokens(3)])
    expected = resident(folder)(tokens)
    machine = emulate()
    model, _ = load_model(folder, config=smoe_mlx.StreamingConfig(slots=1.0, kernels="fused"))
    got = model(tokens)
    assert any("smoe_route_" in name for name in machine.names)
    kernels = model._streaming.kernels
    assert "2 of 8 by sigmoid, 1 of 2 groups: right" in str(kernels)
    assert {added for _, _, added in kernels._chosen} == {1}  # the shared expert's output
    assert mx.allclose(got, expected, 1e-3, 1e-4).item()


def test_experts_that_come_later_change_no_bit(emulate, fast, slow_disk, monkeypatch):
    """The kernels wait for what is still being read, and are launched once for all experts."""
    emulate()
    monkeypatch.delattr("smoe_mlx.layers.switch._StreamingSwitch._in_two")
    claim_few, late = SharedExpertCache.claim_few, []

    def claim(*args, **options):
        claimed = claim_few(*args, **options)
        late.append(len(claimed[1]))
        return claimed

    monkeypatch.setattr(SharedExpertCache, "claim_few", claim)

    def decode(slots: float) -> list[mx.array]:
        config = smoe_mlx.StreamingConfig(slots=slots, kernels="fused", decode="exact", debug=True)
        model, _ = smoe_mlx.load("demo", config=config)
        cache = make_prompt_cache(model)
        return [model(mx.array([[token]]), cache=cache) for token in random_tokens(3)]

    everything = decode(1.0)
    for a, b in zip(decode(0.25), everything, strict=True):
        assert same_bits(a, b)
    assert any(late)  # and were there before the launch


def test_tuning_turns_the_kernels_on_and_off(emulate, fast):
    """As one model between turns: with them it launches kernels, without it is as `load` has it."""
    machine = emulate()
    config = smoe_mlx.StreamingConfig(memory="30MB", tuned=False)
    model = tune._Model(find_model("demo"), config, False, 60, 8, 8, lambda *_: None)
    tokens = random_tokens(3)
    model.begin()
    for kernels in ("stock", "auto", "stock"):
        model.apply(Setting(256, kernels=kernels))
        machine.names.clear()
        assert model.decode(2) > 0
        for body in ("expert", "sum", "route"):
            assert any(f"smoe_{body}_" in x for x in machine.names) == (kernels == "auto")
        logits = model.model(mx.array([tokens]))
        expected, _ = logits_of("stock" if kernels == "stock" else "fused", 0.5, tokens)
        assert same_bits(logits, expected)
    model.close()


@pytest.mark.parametrize("allow", [False, True])
def test_tune_keeps_the_kernels_only_where_allowed(allow, emulate, fast, monkeypatch):
    """The emulator knows no speed: here a token says how long it took."""
    emulate()
    monkeypatch.setattr(tune._Model, "read_prompt", lambda self, most=None: 1.0)
    seconds = {"stock": 1.0, "auto": 0.8}
    monkeypatch.setattr(tune._Model, "decode", lambda self, tokens: seconds[self.now.kernels])
    found = smoe_mlx.tune("demo", seconds=1e6, allow_kernels=allow)
    assert found.best.kernels == ("auto" if allow else "stock")
    assert found.best.slots == found.start.slots
    kept = find_tuned(find_model("demo"), smoe_mlx.StreamingConfig())
    model, _ = smoe_mlx.load("demo")
    if allow:
        assert kept.options["kernels"] == "auto"
        assert "kernels=auto" in found.kept
        assert "the kernels round otherwise than mlx-lm" in str(found)
        assert "fused in 8 of 8 layers" in smoe_mlx.stats(model).kernels
    else:
        assert kept is None
        assert "pays, with other bits" in str(found)
        assert "the kernels would be 25 % faster" in str(found)
        assert "--allow-kernels" in str(found)
        assert smoe_mlx.stats(model).kernels == "mlx-lm's operations"


def test_tune_says_why_it_has_no_kernels(emulate, monkeypatch):
    monkeypatch.setattr(tune._Model, "read_prompt", lambda self, most=None: 1.0)
    monkeypatch.setattr(tune._Model, "decode", lambda self, tokens: 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "kernels" not in str(smoe_mlx.tune("demo", seconds=1e6))  # a CPU: not a word
    emulate()
    monkeypatch.setattr(tune, "computes_beside_the_host", lambda: True)
    monkeypatch.setattr(load, "eligible", lambda *_: "7 bits are none of 2, 3, 4, 5, 6, 8")
    assert "kernels were not tried: 7 bits" in str(smoe_mlx.tune("demo", seconds=1e6))


def test_the_benchmark_of_prompts(emulate, capsys):
    spec = importlib.util.spec_from_file_location("kernels", ROOT / "benchmarks/kernels.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    emulate("cuda")
    benchmark.backend = lambda: "cuda"
    tilings = [PromptTiling(), PromptTiling(8, 128, 64)]  # the second is too large
    out = benchmark.time_prompts("small", (64, 64), 4, (16, 32), tilings, experts=8, top_k=4)
    assert [bool(o["fault"]) for o in out] == [False, True]
    assert out[0].keys() == {"what", "fault", "error", "ms", "kernels_ms"}
    assert set(out[0]["ms"]) == {16, 32}
    said = capsys.readouterr().out
    assert "FAILED: small 4 bits, tiling (8, 128, 64, 64): KernelFault" in said
    assert "BEST at   32 tokens: small 4 bits, tiling (4, 64, 32, 64)" in said


def test_the_command(emulate, fast, monkeypatch, capsys):
    monkeypatch.setattr(command, "usual_geometries", lambda: {"small": (SMALL, SwiGLU())})
    assert cli.main(["selftest"]) == 1
    assert "no GPU" in capsys.readouterr().err
    emulate()
    monkeypatch.setattr(command, "backend", lambda: "metal")
    assert cli.main(["selftest"]) == 0
    said = capsys.readouterr().out
    assert "small (64 x 64 q4g64 bfloat16): right; error 0.0016 (mlx-lm's " in said
    assert "2.00x at 16 tokens" in said
    assert "small, prompts (64 x 64 q4g64 bfloat16): right; error 0.003" in said
    assert "2.00x at 256 rows an expert" in said
    for broken, fault in (("0.0f", "an error of"), ("nothing_like_it", "FAILED")):
        emulate(
            change=lambda text, b=broken: text.replace("q.offset[p] =", f"q.offset[p] = {b}; //")
        )
        assert cli.main(["selftest"]) == 1
        said = capsys.readouterr()
        assert fault in said.out
        assert "not right here for small, small, prompts;" in said.err


def test_options_are_checked():
    with pytest.raises(ValueError, match="kernels='quick': one of auto, stock, fused"):
        smoe_mlx.StreamingConfig(kernels="quick")
