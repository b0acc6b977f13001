"""What others say of the kernels' text: a command, not part of the test run.

    PATH=$PATH:/usr/lib/llvm-19/bin python tests/check_kernels.py   # or one of: clang, nvcc
    python tests/check_kernels.py sanitizers   # tests/sanitizers.py
    python tests/check_kernels.py oracle       # tests/oracle.py: downloads MLX's wheel for macOS

clang reads the Metal text as C++ for OpenCL, whose __global, __constant, __local and __private are
Metal's device, constant, threadgroup and thread: it notices pointers to the wrong kind of memory,
which the emulator cannot. nvcc compiles the CUDA text for Hopper and says how many registers it
takes, what it spills, and how many 16-byte loads came out. Exit status 1: something was refused,
spills, was found or is worse, or what it takes was not there.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulator
import mlx.core as mx
import oracle
import sanitizers

from smoe_mlx.kernels.experts import ACTIVATIONS, FusedExperts, Geometry, Tiling
from smoe_mlx.kernels.prompt import PromptExperts, PromptTiling
from smoe_mlx.kernels.route import FusedRouter
from smoe_mlx.kernels.selftest import random_call, random_experts, random_weights, with_shared
from smoe_mlx.store.files import cache_folder

OPENCL = r"""
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define constant __constant
#define thread __private
#define threadgroup __local
#define SM_SHARED(type, name, count) __local type name[count]
#define SM_FLOAT4(a, b, c, d) (float4)(a, b, c, d)
typedef unsigned int uint; typedef unsigned short ushort;
typedef unsigned char uint8_t; typedef unsigned int uint32_t;
typedef int int32_t; typedef long int64_t;
typedef unsigned long size_t;
typedef half float16_t; typedef __bf16 bfloat16_t;
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef float float4 __attribute__((ext_vector_type(4)));
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <class T> T simd_shuffle_down(T, ushort);
template <class T> T simd_shuffle_xor(T, ushort);
template <class T> T simd_shuffle(T, ushort);
typedef unsigned long ulong;
typedef ulong ulong2 __attribute__((ext_vector_type(2)));
#define ulong2(a, b) (ulong2)(a, b)
template <class T, int R, int C>
using simdgroup_matrix = T __attribute__((ext_vector_type(2)));  // what a lane has of one
template <class T, int R, int C> simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);
template <class M, class T>
void simdgroup_load(thread M&, const __local T*, ulong, ulong2 = ulong2(0, 0), bool = false);
template <class M, class N>
void simdgroup_multiply_accumulate(thread M&, thread N&, thread N&, thread M&);
template <class T, class U> T as_type(U u) { return __builtin_bit_cast(T, u); }
namespace metal { float exp(float); float tanh(float); float log(float); float sqrt(float); }
using namespace metal;
"""
CLANG = """
-x clcpp -cl-std=clc++2021 -target x86_64-linux-gnu -fsyntax-only -Wall -Wextra -Werror
-Wno-unused-parameter -Wno-unused-variable -Wno-undefined-internal -Wno-sign-compare
-Wno-sometimes-uninitialized
-Xclang -cl-ext=-all,+cl_khr_fp16,-__opencl_c_generic_address_space -
"""
UTILS = """
#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda/std/array>
namespace mlx::core::cu { using Shape = cuda::std::array<int32_t, 10>; }
"""
PROMPT_TILINGS = [
    PromptTiling(*t) for t in ((4, 32, 32, 64), (4, 128, 16, 64), (8, 64, 16, 64), (8, 128, 16, 64))
]
NVCC = "-std=c++17 -arch=sm_90a -Xptxas=-v"


def clang_text(name: str, source: str) -> str:
    """MLX's Metal text with its template arguments bound: an OpenCL kernel cannot be a template."""
    found = re.search(rf"\ntemplate \[\[host_name\(.*?\] decltype\({name}<(.*?)>\)", source)
    head = re.search(r"template <([^<>]*)>\n\[\[kernel\]\] void ", source)
    assert found, source
    assert head, source
    bound = ""
    for parameter, value in zip(head[1].split(", "), found[1].split(", "), strict=True):
        kind, _, n = parameter.rpartition(" ")
        bound += f"typedef {value} {n};\n" if kind == "typename" else f"enum {{ {n} = {value} }};\n"
    text = re.sub(r"\ntemplate \[\[host_name.*?;\n", "\n", source)
    text = text.replace(head[0], f"{bound}__kernel void ").replace(".thread_elements()", "")
    return OPENCL + '#line 1 "expert.metal"\n' + re.sub(r" \[\[\w+(\(\d+\))?\]\]", "", text)


class Checker:
    """Kernels that are compiled in the place of being run."""

    def __init__(self, clang: str | None, nvcc: str | None, folder: Path):
        self.clang, self.nvcc, self.folder = clang, nvcc, folder
        self.failed = 0

    def metal_kernel(self, **made_with: Any) -> Any:
        kernel = emulator.real_metal_kernel(**made_with)

        def call(inputs: Sequence[mx.array], **launch: Any) -> list[mx.array]:
            traced = emulator.trace(kernel, inputs, launch)
            text = clang_text(traced["name"], traced["source"])
            assert self.clang is not None
            done = subprocess.run(
                [self.clang, *CLANG.split()], input=text, capture_output=True, text=True
            )
            self.say("clang", traced["name"].split("_")[3], launch, done.returncode, done.stderr)
            return outputs(launch)

        return call

    def cuda_kernel(
        self, name: str, input_names: Any, output_names: Any, source: str, header: str
    ) -> Any:
        def call(inputs: Sequence[mx.array], **launch: Any) -> list[mx.array]:
            _, text = emulator.cuda_text(
                name, input_names, inputs, output_names, launch["output_dtypes"],
                launch["template"], header, source,
            )  # fmt: skip
            path = self.folder / "expert.cu"
            path.write_text(text)
            command = [str(self.nvcc), *NVCC.split(), f"-I{self.folder}", str(path)]
            command += ["-cubin", "-o", str(self.folder / "out.cubin"), "-keep", "-keep-dir"]
            done = subprocess.run([*command, self.folder], capture_output=True, text=True)
            ptx = (self.folder / "expert.ptx").read_text() if done.returncode == 0 else ""
            spilled = any(int(n) for n in re.findall(r"(\d+) bytes spill", done.stderr))
            found = re.findall(r"\d+ registers|\d+ bytes smem|\d+ bytes spill \w+", done.stderr)
            loads = len(re.findall(r"ld\.global\.v4\.(?:b|u)32", ptx))
            said = ", ".join([*found, f"{loads} loads of 16 bytes"])
            self.say(
                "nvcc", name.split("_")[1], launch, done.returncode or spilled, done.stderr, said
            )
            return outputs(launch)

        return call

    def say(
        self, who: str, what: str, launch: Any, failed: int, stderr: str, more: str = ""
    ) -> None:
        self.failed += bool(failed)
        values = [f"{name}={str(v).rpartition('.')[2]}" for name, v in launch["template"]]
        print(
            f"{who}: {what} {' '.join(values)}: {'REFUSED' if failed else 'ok'} {more}", flush=True
        )
        if failed:
            print(stderr[:2000], flush=True)


def outputs(launch: Any) -> list[mx.array]:
    pairs = zip(launch["output_shapes"], launch["output_dtypes"], strict=True)
    return [mx.zeros(shape, dtype) for shape, dtype in pairs]


def geometries() -> list[tuple[Geometry, Tiling]]:
    swiglu = ACTIVATIONS["mlx_lm.models.switch_layers.SwiGLU"]
    usual = Geometry(2048, 768, True, swiglu, (4, 64), (4, 64), False, False, mx.bfloat16)
    two = replace(usual, up=(2, 64), down=(2, 64))
    mixed = replace(usual, up=(2, 32), down=(8, 64), up_bias=True, down_bias=True)
    others = [
        replace(usual, dtype=mx.float16), replace(two, dtype=mx.float32), mixed,
        *[replace(usual, up=(bits, 64), down=(bits, 64)) for bits in (3, 5, 6, 8)],
        replace(usual, up=(4, 32), down=(4, 32), mode="mxfp4", up_bias=True, down_bias=True),
        replace(usual, up=(8, 32), down=(8, 32), mode="mxfp8"),
        replace(usual, up=(4, 16), down=(4, 16), mode="nvfp4"),
        replace(usual, gated=False, activation=ACTIVATIONS["mlx.nn.layers.activations.ReLU2"]),
        replace(usual, gated=False, activation="sm_gelu_precise(u)", up_bias=True, down_bias=True),
        replace(usual, gated=False, activation="sm_gelu_none(u)"),
        replace(usual, activation=ACTIVATIONS["mlx_lm.models.gemma4_text.GeGLU"]),
    ]  # fmt: skip
    tilings = [
        *(Tiling(ahead=n, add=add) for n in (0, 1, 2) for add in (False, True)),
        Tiling(rows=2), Tiling(16, 16), Tiling(16, 32),
    ]  # fmt: skip
    return [(g, t) for g in (usual, two) for t in tilings] + [(g, Tiling()) for g in others]


def prompts() -> list[tuple[Geometry, PromptTiling | None]]:
    every = [g for g, t in geometries() if t == Tiling() and PromptExperts.takes(g)]
    return [(g, None) for g in every] + [(g, t) for g in every[:2] for t in PROMPT_TILINGS]


def routers() -> list[FusedRouter]:
    biased = {"sigmoid": True, "biased": True, "wide": True, "scale": 2.5}
    return [
        FusedRouter(128, 8, False, True, True),
        FusedRouter(512, 10, False, True, True),
        FusedRouter(60, 4, True, True, False),
        FusedRouter(128, 8, False, True, False, **biased),
        FusedRouter(256, 8, False, True, False, **biased, groups=8, kept=4),
        FusedRouter(128, 4, False, True, True, groups=4, kept=2, never=True, wide=True, cast=True),
        FusedRouter(160, 6, False, False, False, groups=8, kept=3, greedy=True, scale=16.0),
        FusedRouter(64, 6, False, True, False, wide=True, least=1e-12),
        FusedRouter(256, 8, False, True, False, sigmoid=True, biased=True, bias_in="narrow"),
        FusedRouter(256, 8, False, True, False, softplus=True, biased=True, wide=True),
    ]


def compile_all(backend: str) -> None:
    """Make every kernel that is to be looked at."""
    for geometry, tiling in geometries():
        fused = FusedExperts(geometry, tilings=(tiling, tiling))
        arrays = random_experts(geometry, 1)
        for top_k in (2, 8) if backend == "metal" else (8,):
            x, slots = random_call(geometry, 1, 1, top_k)
            fused(arrays, x, slots, random_weights(slots, geometry.dtype))
        if tiling == Tiling():
            weights = random_weights(slots, geometry.dtype)
            for added in (1, 2):
                fused(arrays, x, slots, with_shared(weights, geometry.hidden, added))
            fused(arrays, x, slots, lookup=mx.zeros((8,), mx.uint32))
            fused.with_misses(arrays, x, slots, lookup=mx.zeros((8,), mx.uint32))
    for geometry, shape in prompts():
        arrays = random_experts(geometry, 1)
        tilings = None if shape is None else (shape, shape)
        many = PromptExperts(geometry, tilings=tilings)
        rows = mx.zeros((80,), mx.uint32)
        many(arrays, mx.zeros((1, geometry.hidden), geometry.dtype), rows, rows, 1)
    for router in routers():
        logits = mx.zeros((1, router.experts), mx.bfloat16)
        router(logits, *[mx.zeros((router.experts,))] * router.biased)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    checks = ("clang", "nvcc", "sanitizers", "oracle")
    parser.add_argument("check", nargs="?", choices=checks, help="default: clang and nvcc")
    parser.add_argument("--cache", type=Path, help="oracle: where MLX's wheel is kept")
    asked = parser.parse_args()
    mx.set_default_device(mx.cpu)
    if asked.check == "sanitizers":
        return sanitizers.main()
    if asked.check == "oracle":
        return oracle.main(asked.cache or cache_folder())
    clang, nvcc = shutil.which("clang"), shutil.which("nvcc")
    with tempfile.TemporaryDirectory() as folder:
        utils = Path(folder, "mlx/backend/cuda/device/utils.cuh")
        utils.parent.mkdir(parents=True)
        utils.write_text(UTILS)
        checker = Checker(clang, nvcc, Path(folder))
        for backend, found in (("metal", clang), ("cuda", nvcc)):
            name = "clang" if backend == "metal" else "nvcc"
            if name != (asked.check or name):
                continue
            if found is None:
                print(f"not checked: no {name} on PATH")
                checker.failed += 1
                continue
            with emulator.running_in(checker, backend):
                compile_all(backend)
    return checker.failed > 0


if __name__ == "__main__":
    sys.exit(main())
