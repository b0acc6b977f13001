"""Are the expert kernels right on this GPU, how fast are they, and what does a whole model gain?

    python benchmarks/kernels.py
    python benchmarks/kernels.py --sweep --model /tmp/bench/moe12 --seconds 470 --json kernels.json

1. Errors against a reference with sums in float64, those of mlx-lm's own operations beside them,
   with NaN and missing slots tried, for many geometries and activations; the routers.
2. Time of one layer's experts and their weighted sum, kernels against operations, in turns, each
   call fed by the one before, all experts in slots: all of it, and what the GPU alone takes.
3. With `--model`: decoding with `kernels="fused"`, with "stock", and by mlx-lm itself, in turns. A
   folder that is not there is made first, in the shape of 12 layers of Qwen3-30B-A3B.
4. Prompts: the kernels for many rows against sorted `gather_qmm`, and other divisions of the work.
   `--only prompts`: this alone, in a minute or so.
5. With `--sweep`: other divisions of the work, by the time of the GPU, and 2. with the best.

`--seconds` bounds the whole: what does not fit is named as left out. The first use of MLX's CUDA
build on a machine compiles for a minute or more; that is done first and not counted in any time.
"""

import argparse
import functools
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, gemma4_text, kimi_k3, step3p5
from mlx_lm.models.switch_layers import SwiGLU

from smoe_mlx.kernels import prompt_selftest, selftest
from smoe_mlx.kernels.experts import (
    SHARED_MEMORY,
    FusedExperts,
    Geometry,
    Tiling,
    activation_text,
    backend,
)
from smoe_mlx.kernels.prompt import PromptExperts, PromptTiling, tiles
from smoe_mlx.kernels.route import FusedRouter

START = time.perf_counter()
TOKENS = (1, 4, 8, 16)
SHAPES = {"Qwen3-30B-A3B": (2048, 768), "Qwen3-235B-A22B": (4096, 1536)}
EXPERTS, TOP_K = 128, 8
BUSY_US, CALLS = 12_000, 32  # the GPU is kept busy while calls are handed over; how many
BUSY_ROWS = 8192  # of the matrices that do it where a kernel has no clock
# (simdgroups, lanes of a row, rows of a lane, chunks ahead, codes by addition)
FIRST = [Tiling(*t) for t in (
    (4, 8, 1, 0, False), (4, 8, 1, 0, True), (4, 8, 1, 1, False), (4, 8, 1, 2, True),
    (8, 8, 1, 1, True), (16, 8, 1, 1, True), (4, 8, 2, 0, True), (4, 8, 2, 1, True),
    (8, 16, 1, 1, True), (16, 16, 1, 1, True), (16, 16, 1, 0, True), (16, 32, 1, 1, True),
    (16, 32, 1, 0, True), (4, 4, 1, 1, True),
)]  # fmt: skip
SECOND = [Tiling(*t) for t in (
    (4, 8, 1, 0, False), (4, 8, 1, 0, True), (4, 8, 1, 1, False), (4, 8, 1, 2, True),
    (4, 8, 2, 0, True), (4, 8, 2, 1, True), (4, 8, 4, 0, True), (4, 4, 1, 1, True),
    (4, 16, 1, 0, True), (4, 16, 1, 1, True), (4, 32, 1, 0, True), (4, 16, 2, 0, True),
)]  # fmt: skip

PROMPTS = (128, 512, 2048, 4096)
# (simdgroups, rows of a tile, columns of a simdgroup, step). Some need more threadgroup memory than
# Metal grants.
PROMPT = [PromptTiling(*t) for t in (
    (4, 64, 32, 64), (4, 32, 32, 64), (4, 16, 32, 64), (8, 64, 16, 64), (4, 128, 32, 64),
    (8, 64, 32, 64), (4, 64, 64, 64), (8, 128, 16, 64), (4, 64, 16, 128), (8, 32, 32, 64),
)]  # fmt: skip


def say(text: str = "") -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}" if text else "", flush=True)


def geometry(
    hidden: int, ffn: int, bits: int, group: int = 64, dtype: mx.Dtype = mx.bfloat16,
    activation: nn.Module | None = None, bias: bool = False, gated: bool = True,
    mode: str = "affine",
) -> tuple[Geometry, nn.Module]:  # fmt: skip
    activation = SwiGLU() if activation is None else activation
    text = activation_text(activation, gated)
    assert text is not None
    how = (bits, group)
    return Geometry(hidden, ffn, gated, text, how, how, bias, bias, dtype, mode), activation


def self_tests() -> list[tuple[str, Geometry, nn.Module]]:
    bf16, f16, f32 = mx.bfloat16, mx.float16, mx.float32
    oai = activations.SwigluOAI()
    cases = [
        geometry(2048, 768, 4), geometry(2048, 768, 2), geometry(4096, 1536, 4),
        geometry(4096, 1536, 2), geometry(2048, 768, 4, dtype=f16),
        geometry(2048, 768, 4, dtype=f32),
        geometry(2880, 2880, 4, 32, activation=oai, bias=True), geometry(2048, 768, 4, 32),
        geometry(2048, 768, 4, 128), geometry(2048, 768, 2, 32), geometry(2048, 768, 2, 128),
        geometry(2048, 768, 8), geometry(7168, 2048, 4), geometry(2880, 704, 2, dtype=f16),
        geometry(64, 64, 4), geometry(1024, 512, 4, dtype=f32, activation=gemma4_text.GeGLU()),
        geometry(1024, 512, 4, activation=kimi_k3.SiTU(1.0, 2.0)),
        geometry(1024, 512, 4, activation=step3p5.ClampedSwiGLU(7.0)),
        geometry(1024, 512, 4, activation=nn.ReLU2(), gated=False),
        geometry(1024, 512, 2, activation=nn.ReLU2(), gated=False, bias=True, dtype=bf16),
        *[geometry(2048, 768, bits) for bits in (3, 5, 6)],
        geometry(2880, 2880, 4, 32, activation=oai, bias=True, mode="mxfp4"),
        geometry(2048, 768, 8, 32, mode="mxfp8"), geometry(2048, 768, 4, 16, mode="nvfp4"),
        *[geometry(1024, 512, 4, activation=nn.GELU(approx), gated=False, bias=True, dtype=f16)
          for approx in ("precise", "none", "fast")],
    ]  # fmt: skip
    names = [type(a).__name__ + getattr(a, "_approx", "").replace("none", "") for _, a in cases]
    return [
        (f"{g} {name}{' bias' if g.up_bias else ''}", g, a)
        for name, (g, a) in zip(names, cases, strict=True)
    ]


def routers() -> list[FusedRouter]:
    """Of well-known models, and one for each option."""
    biased = {"sigmoid": True, "biased": True, "wide": True, "scale": 2.5}
    return [
        FusedRouter(128, 8, False, True, True),
        FusedRouter(512, 10, False, True, True),
        FusedRouter(8, 2, True, True, False),
        FusedRouter(32, 4, True, True, True),
        FusedRouter(128, 8, False, True, False, **biased),
        FusedRouter(256, 8, False, True, False, **biased, groups=8, kept=4),
        FusedRouter(
            96, 5, False, True, True, sigmoid=True, biased=True, groups=32, kept=2, never=True,
            wide=True, cast=True,
        ),
        # DeepSeek V2, Ernie 4.5, LFM2, Kimi Linear, Laguna
        FusedRouter(160, 6, False, False, False, groups=8, kept=3, greedy=True, scale=16.0),
        FusedRouter(64, 6, False, True, False, wide=True, least=1e-12),
        FusedRouter(
            32, 4, False, True, True, sigmoid=True, biased=True, bias_in="wide", eps=1e-6, scale=1.0
        ),
        FusedRouter(
            256, 8, False, True, False, sigmoid=True, biased=True, bias_in="narrow", eps=1e-20,
            scale=2.5,
        ),
        FusedRouter(256, 8, False, True, False, softplus=True, biased=True, wide=True),
    ]  # fmt: skip


def test_one(name: str, g: Geometry, activation: nn.Module) -> dict:
    fused, arrays = FusedExperts(g), selftest.random_experts(g, selftest.SLOTS)
    ways = [fused, selftest.operations(g, activation)]
    faults = [selftest.misses_fault(fused, arrays)]
    for added in (1, 2):  # a shared expert's output, alone and times a factor
        mine, theirs = selftest.measure_errors(g, activation, arrays, ways, added)
        faults.append(selftest.find_fault(fused, arrays, mine, theirs))
    fault = "; ".join(dict.fromkeys(filter(None, faults)))
    say(
        f"  {name:<44} error {mine.rms:.2e} (largest {mine.largest:.1e})   "
        f"mlx-lm {theirs.rms:.2e} ({theirs.largest:.1e})   {fault or 'ok'}"
    )
    return {"what": name, "error": mine.rms, "mlx_lm": theirs.rms, "fault": fault}


def name_of(router: FusedRouter) -> str:
    flags = ("by_logits", "norm", "last", "biased", "never", "wide", "cast", "greedy")
    said = [name for name in flags if getattr(router, name)]
    said += [f"bias_in={router.bias_in}"] * bool(router.bias_in)
    numbers = {name: getattr(router, name) for name in ("eps", "least", "scale")}
    said += [f"{name}={n:g}" for name, n in numbers.items() if n is not None]
    return f"router, {router}: {' '.join(said)}"


def test_router(router: FusedRouter) -> dict:
    name = name_of(router)
    fault = selftest.router_fault(router)
    logits = mx.random.normal((4096, router.experts)).astype(mx.bfloat16)
    bias = [mx.random.normal((router.experts,))] * router.biased
    ways = (router, selftest.route_operations(router))
    parts = mx.split(logits, 256)  # MLX's CUDA build does not sort 131,072 groups at once
    mine, theirs = (mx.concatenate([way(rows, *bias)[0] for rows in parts]) for way in ways)
    same = (mx.sort(mine, -1) == mx.sort(theirs, -1)).all(-1).mean().item()
    speedup = selftest.time_router(router)
    say(f"  {name:<64} {speedup:.2f}x, the same experts for {same:.2%}   {fault or 'ok'}")
    return {"what": name, "fault": fault, "speedup": speedup, "same": same}


def make_busy() -> Callable[[], mx.array]:
    """What keeps the GPU busy, for exactly so long where a kernel can tell the time."""
    if backend() != "cuda":
        big = mx.random.normal((BUSY_ROWS, BUSY_ROWS)).astype(mx.bfloat16)
        mx.eval(big)
        return lambda: functools.reduce(lambda y, _: (big @ y) * 1e-2, range(30), big)
    kernel = mx.fast.cuda_kernel(
        name="wait", input_names=["us"], output_names=["out"], source="""
          unsigned long long start, now;
          asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
          do {
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
          } while (now - start < 1000ull * (unsigned long long)us[0]);
          out[0] = us[0];
        """,
    )  # fmt: skip
    us, one = mx.array([BUSY_US], mx.uint32), (1, 1, 1)
    return lambda: kernel(
        inputs=[us], grid=one, threadgroup=one, output_shapes=[(1,)], output_dtypes=[mx.uint32]
    )[0]


def device_seconds(
    g: Geometry, arrays: selftest.Arrays, ways: list, tokens: int, rounds: int = 9
) -> tuple[list[float], list[float]]:
    """Seconds of the GPU for one call of each way: the calls are handed over while it is busy
    otherwise. Then the seconds that the host takes to hand one over."""
    calls = []
    for i in range(CALLS):
        x, slots = selftest.random_call(g, EXPERTS, tokens, TOP_K, i)
        calls.append((slots, selftest.random_weights(slots, x.dtype, seed=i)))
    mx.eval([w.scores for _, w in calls])
    busy = make_busy()

    def seconds(way) -> tuple[float, float]:
        y = x
        for slots, weights in calls if way is not None else ():
            y = way(arrays, y, slots, weights)
        first = busy()
        mx.synchronize()
        start = time.perf_counter()
        mx.async_eval(first)
        begun = time.perf_counter()
        mx.async_eval(y)
        handed_over = time.perf_counter()
        mx.synchronize()
        return time.perf_counter() - start, (handed_over - begun) / CALLS

    device: list[list[float]] = [[] for _ in ways]
    host: list[list[float]] = [[] for _ in ways]
    for i in range(rounds + 1):  # the first warms up
        for n, way in enumerate(ways):
            (nothing, _), (something, to_hand_over) = seconds(None), seconds(way)
            if i:
                device[n].append((something - nothing) / CALLS)
                host[n].append(to_hand_over)
    return [statistics.median(t) for t in device], [statistics.median(t) for t in host]


def time_one(
    name: str, shape: tuple[int, int], bits: int, tokens: tuple[int, ...],
    tilings: tuple[Tiling, Tiling] = (Tiling(), Tiling()),
) -> dict:  # fmt: skip
    g, activation = geometry(*shape, bits)
    arrays = selftest.random_experts(g, EXPERTS)
    ways = [FusedExperts(g, tilings=tilings), selftest.operations(g, activation)]
    found: dict = {}
    for n in tokens:
        quick, slow = selftest.time_ways(g, arrays, ways, n, TOP_K, rounds=9)
        (quick_gpu, slow_gpu), (quick_host, slow_host) = device_seconds(g, arrays, ways, n)
        found[n] = {"fused_us": 1e6 * quick, "stock_us": 1e6 * slow, "speedup": slow / quick}
        found[n] |= {"fused_gpu_us": 1e6 * quick_gpu, "stock_gpu_us": 1e6 * slow_gpu}
        found[n] |= {"fused_host_us": 1e6 * quick_host, "stock_host_us": 1e6 * slow_host}
        say(
            f"  {name} {bits} bits, {n:>2} tokens: fused {1e6 * quick:8.1f} us   "
            f"mlx-lm {1e6 * slow:8.1f} us   {slow / quick:.2f}x   the GPU alone: "
            f"{1e6 * quick_gpu:8.1f} and {1e6 * slow_gpu:8.1f} us   {slow_gpu / quick_gpu:.2f}x   "
            f"to hand over: {1e6 * quick_host:.1f} and {1e6 * slow_host:.1f} us"
        )
    x, slots = selftest.random_call(g, EXPERTS, 1, TOP_K)
    weights, host = selftest.random_weights(slots, x.dtype), {}
    uncompiled = FusedExperts(g, tilings=tilings, compiled=False)
    for label, way in zip(("fused", "mlx-lm", "not compiled"), [*ways, uncompiled], strict=True):
        mx.eval(way(arrays, x, slots, weights))
        start = time.perf_counter()
        ys = [way(arrays, x, slots, weights) for _ in range(200)]
        host[label] = 1e6 * (time.perf_counter() - start) / len(ys)
        mx.eval(ys)
    texts = ", ".join(f"{label} {us:.1f}" for label, us in host.items())
    say(f"  {name} {bits} bits: the host builds one call in us: {texts}")
    return {"what": name, "bits": bits, "tilings": tilings, "tokens": found, "host_us": host}


def sweep(shape: tuple[int, int], bits: int) -> tuple[list[dict], tuple[Tiling, Tiling]]:
    """Each division of work in the place of the usual one, of one kernel at a time; the best."""
    g, _ = geometry(*shape, bits)
    arrays, usual, out = selftest.random_experts(g, EXPERTS), Tiling(), []
    pairs = [(usual, usual), *((t, usual) for t in FIRST), *((usual, t) for t in SECOND)]
    x, slots = selftest.random_call(g, EXPERTS, 1, TOP_K)
    weights, ways = selftest.random_weights(slots, x.dtype), []
    for pair in pairs:
        fused = FusedExperts(g, tilings=pair)
        try:
            mx.eval(fused(arrays, x, slots, weights))
            ways.append((pair, fused))
        except Exception as e:
            say(f"  {pair}: {str(e)[:200]}")
    total = dict.fromkeys([pair for pair, _ in ways], 0.0)
    for n in (1, 8):
        seconds, _ = device_seconds(g, arrays, [w for _, w in ways], n, rounds=5)
        for (pair, _), s in zip(ways, seconds, strict=True):
            first, second = (tuple(map(int, t)) for t in pair)
            say(f"  {bits} bits, {n} tokens, tilings {first} {second}: {1e6 * s:8.1f} us")
            out.append({"shape": shape, "bits": bits, "tokens": n, "tilings": pair, "us": 1e6 * s})
            total[pair] += s / seconds[0]
    best = [min((p for p in total if p[1 - i] == usual), key=lambda p: total[p])[i] for i in (0, 1)]
    return out, (best[0], best[1])


def median_seconds(work: Callable[[], mx.array], rounds: int) -> float:
    found = []
    for i in range(rounds + 1):  # the first warms up
        mx.synchronize()
        start = time.perf_counter()
        mx.eval(work())
        if i:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def time_prompts(
    name: str, shape: tuple[int, int], bits: int, prompts: tuple[int, ...] = PROMPTS,
    tilings: list[PromptTiling] = PROMPT, experts: int = EXPERTS, top_k: int = TOP_K,
    until: float = math.inf,
) -> list[dict]:  # fmt: skip
    """One layer's experts without the weighted sum, for many tokens: each division of the work."""
    g, activation = geometry(*shape, bits)
    few, call = selftest.random_experts(g, selftest.SLOTS), prompt_selftest.ragged_call(g)
    expected = selftest.reference(g, activation, few, *call)
    arrays = selftest.random_experts(g, experts, seed=1)
    stock = selftest.operations(g, activation, experts=experts)
    error = selftest.error_of(stock(few, *call, None), expected).rms
    say(f"  {name} {bits} bits: error of mlx-lm's operations {error:.2e}")
    calls, slow = {}, {}
    for n in prompts:
        calls[n] = selftest.random_call(g, experts, n, top_k)
        slow[n] = median_seconds(lambda c=calls[n]: stock(arrays, *c, None), 3)
        tflops = 6e-12 * g.hidden * g.ffn * n * top_k / slow[n]
        say(f"  {name} {bits} bits, {n:>4} tokens: mlx-lm {1e3 * slow[n]:8.3f} ms {tflops:6.1f} T")
    out = []
    for tiling in tilings:
        if backend() == "metal" and tiling.shared_nbytes > SHARED_MEMORY:
            continue
        what = f"{name} {bits} bits, tiling {tuple(tiling)}"
        if time.perf_counter() - START > until:
            say(f"  LEFT OUT, no time: {what}")
            continue
        try:
            out.append(check_tiling(what, g, activation, tiling, few, call, expected))
            out[-1] |= time_tiling(what, g, activation, tiling, arrays, calls, slow, stock)
        except Exception as e:
            say(f"  FAILED: {what}: {type(e).__name__}: {str(e)[:600]}")
            out.append({"what": what, "fault": f"{type(e).__name__}: {str(e)[:300]}"})
    for n in prompts:
        best = min((o for o in out if n in o.get("ms", ())), key=lambda o: o["ms"][n], default=None)
        if best is not None:
            speedup = 1e3 * slow[n] / best["ms"][n]
            say(f"  BEST at {n:>4} tokens: {best['what']}: {best['ms'][n]:.3f} ms, {speedup:.2f}x")
    return out


def check_tiling(
    what: str, g: Geometry, activation: nn.Module, tiling: PromptTiling, few: selftest.Arrays,
    call: tuple[mx.array, mx.array], expected: mx.array,
) -> dict:  # fmt: skip
    fused = FusedExperts(g, max_tokens=0)
    fused.prompt = PromptExperts(g, tilings=(tiling, tiling))
    way = selftest.operations(g, activation, fused)
    error = selftest.error_of(way(few, *call, None), expected).rms
    fault = prompt_selftest.prompt_fault(way, few, *call)
    say(f"  {what}: error {error:.2e}   {fault or 'ok'}")
    return {"what": what, "fault": fault, "error": error}


def time_tiling(
    what: str, g: Geometry, activation: nn.Module, tiling: PromptTiling, arrays: selftest.Arrays,
    calls: dict, slow: dict, stock: selftest.Experts,
) -> dict:  # fmt: skip
    """Milliseconds of whole calls, and of the two kernels with their tiles."""
    experts = next(iter(arrays.values())).shape[0]
    fused = FusedExperts(g, max_tokens=0)
    fused.prompt = prompt = PromptExperts(g, tilings=(tiling, tiling))
    way = selftest.operations(g, activation, fused, experts)
    found: dict = {"ms": {}, "kernels_ms": {}}
    for n, (x, slots) in calls.items():
        y, other = way(arrays, x, slots, None), stock(arrays, x, slots, None)
        off = selftest.error_of(y, other.astype(mx.float32)).rms
        quick = median_seconds(lambda: way(arrays, x, slots, None), 5)  # noqa: B023
        order = mx.argsort(slots.flatten())
        rows, tokens = slots.flatten()[order], order // slots.shape[1]
        mx.eval(rows, tokens)
        alone = median_seconds(lambda: prompt(arrays, x, tokens, rows, experts), 5)  # noqa: B023
        begins = median_seconds(lambda: tiles(rows, tiling.rows, experts), 5)  # noqa: B023
        tflops = 6e-12 * g.hidden * g.ffn * slots.size / quick
        found["ms"][n], found["kernels_ms"][n] = 1e3 * quick, 1e3 * alone
        say(
            f"  {what}, {n:>4} tokens: {1e3 * quick:8.3f} ms {tflops:6.1f} T   "
            f"{slow[n] / quick:6.2f}x mlx-lm   the kernels alone {1e3 * alone:8.3f} ms, of which "
            f"the tiles {1e3 * begins:.3f}   {off:.1e} from mlx-lm's"
        )
    return found


def decode(folder: Path, shares: list[float], tokens: int, rounds: int) -> dict:
    """Tokens a second of each arm, in turns; the ratio is against mlx-lm in the same round."""
    import mlx_lm
    from mlx_lm.models.cache import make_prompt_cache

    import smoe_mlx

    if not folder.exists():
        say(f"  making {folder}")
        script = Path(__file__).parent / "make_checkpoint.py"
        command = [sys.executable, str(script), "--preset", "qwen3-30b-12l", "--out", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    arms = {"mlx-lm": mlx_lm.load(str(folder))[0]}
    for share in shares:
        for kernels in ("stock", "fused"):
            config = smoe_mlx.StreamingConfig(slots=share, kernels=kernels)
            model = arms[f"{share:g} {kernels}"] = smoe_mlx.load(folder, config=config)[0]
            say(f"  loaded {share:g} {kernels}: {smoe_mlx.stats(model).kernels}")
    prompt = mx.array([[(i * 7919) % 1000 + 10 for i in range(16)]])
    caches, last, speeds = {}, {}, {name: [] for name in arms}
    for name, model in arms.items():
        caches[name] = make_prompt_cache(model)
        last[name] = mx.argmax(model(prompt, cache=caches[name])[:, -1], axis=-1)[:, None]
        mx.eval(last[name])
    for i in range(rounds + 1):  # the first warms up
        for name, model in arms.items():
            start = time.perf_counter()
            y = last[name]
            for _ in range(tokens):  # as mlx-lm: the next forward is built while one computes
                y = mx.argmax(model(y, cache=caches[name])[:, -1], axis=-1)[:, None]
                mx.async_eval(y)
            mx.eval(y)
            last[name] = y
            if i:
                speeds[name].append(tokens / (time.perf_counter() - start))
    out = {}
    for name, found in speeds.items():
        ratios = [a / b for a, b in zip(found, speeds["mlx-lm"], strict=True)]
        out[name] = {"tok_s": statistics.median(found), "ratio": statistics.median(ratios)}
        say(f"  {name:<12} {out[name]['tok_s']:8.1f} tok/s   {out[name]['ratio']:.3f} x mlx-lm")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="checkpoint folder, for the third part")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0], help="of slots, for it")
    parser.add_argument("--tokens", type=int, default=48, help="of one turn, for it")
    parser.add_argument("--rounds", type=int, default=5, help="for it")
    parser.add_argument("--only", choices=["prompts"], help="this part alone")
    parser.add_argument("--sweep", action="store_true", help="try other divisions of the work")
    parser.add_argument("--seconds", type=float, default=200, help="for all; default: 200")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    args = parser.parse_args()

    found: dict = {"errors": [], "times": [], "routers": [], "prompts": [], "sweep": [], "best": []}
    found |= {"decode": {}, "failed": []}
    found["machine"] = {k: str(v) for k, v in mx.device_info().items()}
    say(f"MLX {mx.__version__}, {platform.platform()}, {found['machine']}")
    where = backend()
    if where is None:
        raise SystemExit("no GPU is MLX's default device here: there is nothing to measure")
    say(f"kernels for {where}")
    try:
        small = geometry(64, 64, 4)[0]
        selftest.try_launch(FusedExperts(small))
    except Exception as e:  # whether it is mx.compile that fails: then measure without it
        say(f"FAILED, so that nothing is compiled by mx.compile: {str(e)[:1500]}")
        mx.compile = lambda function: function
        found["failed"].append(f"mx.compile: {str(e)[:300]}")

    def step(name: str, seconds: float, work) -> object:
        """Run a step if there is time for it; a step that fails does not end the others."""
        if time.perf_counter() - START + seconds > args.seconds:
            say(f"LEFT OUT, no time: {name}")
            found["failed"].append(f"left out: {name}")
            return None
        try:
            return work()
        except Exception as e:
            say(f"FAILED: {name}: {type(e).__name__}: {str(e)[:1500]}")
            found["failed"].append(f"{name}: {str(e)[:300]}")
            return None
        finally:
            mx.clear_cache()
            if args.json:
                args.json.write_text(json.dumps(found, indent=1) + "\n")

    def add(kind: str, result: object) -> None:
        if result is not None:
            found[kind].extend(result if isinstance(result, list) else [result])

    def prompts() -> None:
        name, shape = next(iter(SHAPES.items()))
        say("prompts, top 8 of 128 (simdgroups, rows, columns, step); T: TFLOPS of all of a call")
        for bits, share in ((4, 0.6), (2, 0.9)):
            past = time.perf_counter() - START
            until = past + share * (args.seconds - past)
            work = lambda b=bits, u=until: time_prompts(name, shape, b, until=u)  # noqa: E731
            add("prompts", step(f"prompts, {bits} bits", 20, work))

    def end() -> None:
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
        checked = [*found["errors"], *found["routers"], *found["prompts"]]
        wrong = [e["what"] for e in checked if e["fault"]]
        tested = f"{len(found['errors'])} geometries and {len(found['routers'])} routers tested"
        say(f"{tested}, {len(wrong)} wrong {wrong or ''}")
        say(f"failed or left out: {found['failed'] or 'nothing'}")
        raise SystemExit(bool(wrong or any("left out" not in f for f in found["failed"])))

    if args.only == "prompts":
        prompts()
        end()
    tests = self_tests()
    say("errors, relative to the root mean square of the reference:")
    for name, g, activation in tests[:2]:
        add("errors", step(name, 10, lambda n=name, g=g, a=activation: test_one(n, g, a)))
    best: dict = {}

    def try_sweep(name: str, shape: tuple[int, int], bits: int) -> list[dict]:
        found, best[name, bits] = sweep(shape, bits)
        return found

    for i, (name, shape) in enumerate(SHAPES.items()):
        say("time of one layer's experts and their weighted sum, top 8 of 128:")
        for bits in (4, 2):
            work = lambda n=name, s=shape, b=bits: time_one(n, s, b, TOKENS)  # noqa: E731
            add("times", step(f"{name} {bits} bits", 15, work))
        if i == 0 and args.model is not None:
            say(f"decoding, {args.model}:")
            work = lambda: decode(args.model, args.shares, args.tokens, args.rounds)  # noqa: E731
            found["decode"] = step("decode", 60, work) or {}
    say("routers, against mlx-lm's operations:")
    for router in routers():
        add("routers", step(name_of(router), 5, lambda r=router: test_router(r)))
    if args.sweep:
        say("time of the GPU for other tilings (simdgroups, lanes, rows, ahead, addition):")
        for name, shape in SHAPES.items():
            for bits in (4, 2):
                work = lambda n=name, s=shape, b=bits: try_sweep(n, s, b)  # noqa: E731
                add("sweep", step(f"sweep, {name} {bits} bits", 60, work))
        for (name, bits), pair in best.items():
            say(f"  {name} {bits} bits, with the best: {pair}")
            work = lambda n=name, b=bits, t=pair: time_one(n, SHAPES[n], b, (1, 8), t)  # noqa: E731
            add("best", step(f"best of {name} {bits} bits", 10, work))
    say("more errors:")
    for name, g, activation in tests[2:]:
        add("errors", step(name, 5, lambda n=name, g=g, a=activation: test_one(n, g, a)))
    prompts()
    end()


if __name__ == "__main__":
    main()
