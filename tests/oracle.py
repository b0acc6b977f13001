"""MLX's own Metal kernels, as Apple's compiler made them, beside ours: on this CPU.

    python tests/check_kernels.py oracle

MLX's wheel for macOS has its kernels as LLVM bitcode. Those that mlx-lm's experts call on a Mac,
three times each (`gather_qmv` for few tokens, `gather_qmm_rhs` for prompts), are compiled by clang
for this machine, linked to the emulator's runtime and run. So their errors are known without a Mac;
ours may not be larger.
"""

import importlib.metadata
import itertools
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from emulator import HALF, LAUNCH, METAL_LIMIT, Emulator, compiler, raw, running_in
from mlx_lm.models.switch_layers import SwiGLU
from sanitizers import SWIGLU

from smoe_mlx.kernels.experts import FusedExperts, Geometry
from smoe_mlx.kernels.prompt import PromptExperts
from smoe_mlx.kernels.prompt_selftest import ragged_call
from smoe_mlx.kernels.selftest import (
    Arrays,
    dequantized,
    random_call,
    random_experts,
    random_weights,
)

WHEEL = "macosx_14_0_arm64"
LIBRARY = "mlx/lib/mlx.metallib"
GROUP, SLOTS = 64, 8
FLOAT32_ERROR = 5e-7  # relative; a result of MLX's that is further off was not computed right here
# tokens, hidden, ffn, top-k. MLX has a kernel of its own for rows that are multiples of 512.
SHAPES = ((1, 1024, 512, 4), (2, 320, 192, 3), (1, 2048, 768, 8))
TYPES = {mx.bfloat16: "bfloat16_t", mx.float16: "float16_t", mx.float32: "float"}


# A product of matrices. In bitcode a lane has 64 numbers of each; the first two are its own.
MULTIPLY = "air.simdgroup_matrix_8x8_multiply_accumulate.v64f32.v64f32.v64f32.v64f32"
MULTIPLY_TEXT = f"""
declare void @air_multiply(ptr)
define internal <64 x float> @{MULTIPLY}(<64 x float> %a, <64 x float> %b, <64 x float> %c) {{
  %v = alloca [3 x <2 x float>]
  %vb = getelementptr <2 x float>, ptr %v, i32 1
  %vc = getelementptr <2 x float>, ptr %v, i32 2
  %a2 = shufflevector <64 x float> %a, <64 x float> %a, <2 x i32> <i32 0, i32 1>
  %b2 = shufflevector <64 x float> %b, <64 x float> %b, <2 x i32> <i32 0, i32 1>
  %c2 = shufflevector <64 x float> %c, <64 x float> %c, <2 x i32> <i32 0, i32 1>
  store <2 x float> %a2, ptr %v
  store <2 x float> %b2, ptr %vb
  store <2 x float> %c2, ptr %vc
  call void @air_multiply(ptr %v)
  %d2 = load <2 x float>, ptr %v
  %d = shufflevector <2 x float> %d2, <2 x float> %d2, <64 x i32> <i32 0, i32 1{", i32 0" * 62}>
  ret <64 x float> %d
}}
"""


class NoOracle(Exception):
    """Why it cannot be asked."""


def find_wheel(folder: Path) -> Path:
    """MLX's wheel for macOS of the version that is installed: downloaded, if it is not in here."""
    version = importlib.metadata.version("mlx")
    pattern = f"mlx_metal-{version}-*{WHEEL}.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", f"mlx-metal=={version}", "--no-deps"]
        command += ["--platform", WHEEL, "--only-binary=:all:", "--dest", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise NoOracle(f"pip could not download mlx-metal {version}:\n{done.stderr}")
    return next(folder.glob(pattern))


def find_bitcode(library: bytes, name: str) -> bytes:
    """The bitcode of a function in a Metal library.

    The layout is what MLX's own library shows: where the list of functions and the bitcode begin is
    in the header; an entry has its size, then fields of a name, a size and data, then ENDT.

    Raises:
        ValueError: it is no Metal library, ends early, or lacks the function.
    """

    def numbers(form: str, data: bytes, at: int) -> tuple[int, ...]:
        try:
            return struct.unpack_from("<" + form, data, at)
        except (struct.error, OverflowError):
            raise ValueError("the Metal library ends early, or is damaged") from None

    if library[:4] != b"MTLB":
        raise ValueError("not a Metal library")
    (at,), (start,) = numbers("Q", library, 24), numbers("Q", library, 72)
    (count,) = numbers("I", library, at)
    at += 4
    for _ in range(count):
        (size,) = numbers("I", library, at)
        entry, fields, i = library[at : at + size], {}, 4
        while entry[i : i + 4] != b"ENDT":
            (n,) = numbers("H", entry, i + 4)
            fields[entry[i : i + 4]] = entry[i + 6 : i + 6 + n]
            i += 6 + n
        if fields.get(b"NAME") == name.encode() + b"\0":
            offset = numbers("3Q", fields.get(b"OFFT", b""), 0)[2]
            (size,) = numbers("Q", fields.get(b"MDSZ", b""), 0)
            bitcode = library[start + offset : start + offset + size]
            if len(bitcode) != size or bitcode[:4] != b"\xde\xc0\x17\x0b":
                raise ValueError("the Metal library ends early, or is damaged")
            return bitcode
        at += size
    raise ValueError(f"the Metal library has no {name}")


class Oracle(Emulator):
    """Runs kernels of MLX's Metal library."""

    workers = 1  # what is threadgroup memory in bitcode is one static array here

    def __init__(self, folder: Path, library: bytes, clang: str):
        super().__init__(folder)
        self.library, self.clang = library, clang

    def gather_qmv(
        self, arrays: Arrays, projection: str, x: mx.array, slots: mx.array, bits: int
    ) -> mx.array:
        """x [rows, K], slots [rows] -> [rows, N], as MLX calls it for few tokens."""
        w, scales, biases = (arrays[projection, kind] for kind in ("weight", "scales", "biases"))
        (rows, k), n = x.shape, w.shape[1]
        fast = "fast_" if n % 8 == 0 and k % 512 == 0 else ""
        name = f"affine_gather_qmv_{fast}{TYPES[x.dtype]}_gs_{GROUP}_b_{bits}"
        out = np.full(rows * n * x.dtype.size, 0xFF, np.uint8)
        words, groups = w.shape[2], k // GROUP
        buffers = {
            "w": raw(w), "scales": raw(scales), "biases": raw(biases), "x": raw(x),
            "lhs_indices": i32(*range(rows)), "rhs_indices": raw(slots), "y": out,
            "in_vec_size": i32(k), "out_vec_size": i32(n), "x_batch_ndims": i32(1),
            "x_shape": i32(rows, 1, k), "x_strides": i64(k, k, 1), "w_batch_ndims": i32(1),
            "w_shape": i32(*w.shape), "w_strides": i64(n * words, words, 1),
            "s_strides": i64(n * groups, groups, 1), "b_strides": i64(n * groups, groups, 1),
            "batch_ndims": i32(1), "batch_shape": i32(rows), "lhs_strides": i64(1),
            "rhs_strides": i64(1),
        }  # fmt: skip
        places = ["tid", "simd_gid", "simd_lid"]
        self._run_bitcode(name, buffers, places, [32, n // 8 * 2, rows], [32, 2, 1])
        return mx.array(out).view(x.dtype).reshape(rows, n)

    def gather_qmm(
        self, arrays: Arrays, projection: str, x: mx.array, slots: mx.array, bits: int
    ) -> mx.array:
        """The same, as MLX calls it for many rows, in the order of their slots; K and N are
        multiples of 32."""
        w, scales, biases = (arrays[projection, kind] for kind in ("weight", "scales", "biases"))
        (rows, k), (count, n, _) = x.shape, w.shape
        name = f"affine_gather_qmm_rhs_nt_{TYPES[x.dtype]}_gs_{GROUP}_b_{bits}"
        out = np.full(rows * n * x.dtype.size, 0xFF, np.uint8)
        buffers = {
            "x": raw(x), "w": raw(w), "scales": raw(scales), "biases": raw(biases),
            "offsets": i32(*np.searchsorted(np.array(slots), np.arange(count))), "y": out,
            "M": i32(rows), "N": i32(n), "K": i32(k), "num_groups": i32(count),
        }  # fmt: skip
        places = ["tid", "simd_group_id", "simd_lane_id"]
        grid = [n // 32 * 32, 2 * (rows // 16 + count), 1]
        self._run_bitcode(f"{name}_bm_16_bn_32_bk_32_wm_1_wn_2", buffers, places, grid, [32, 2, 1])
        return mx.array(out).view(x.dtype).reshape(rows, n)

    def _run_bitcode(
        self, name: str, buffers: dict[str, np.ndarray], places: list[str], grid: list[int],
        threadgroup: list[int],
    ) -> None:  # fmt: skip
        """Run a kernel whose arguments are these, by name, and where a thread is."""
        self.object = self._compile_bitcode(name, [*buffers, *places])
        where = "air_uint3{t->g->gpos.x, t->g->gpos.y, t->g->gpos.z}, t->simd, t->lane"
        pointers = "".join(f"b[{i}], " for i in range(len(buffers)))
        unit = (
            f'#include "air.h"\nextern "C" void {name}('
            + "void*, " * len(buffers)
            + "air_uint3, uint32_t, uint32_t);\nstatic void entry(smemu::Thread* t, void** b) {\n"
            + f"  {name}({pointers}{where});\n}}\n{LAUNCH}"
        )
        every = list(buffers.values())
        self._launch("msl_shim.h", unit, every, grid, threadgroup, METAL_LIMIT, False)

    def _build(self, shim: str, unit: str) -> Path:
        return super()._build(shim, unit, self.object)

    def _compile_bitcode(self, name: str, arguments: list[str]) -> Path:
        """The object file of a kernel that has these arguments."""
        path = self.folder / f"{name}.o"
        if path.exists():
            return path
        bitcode = find_bitcode(self.library, name)
        text = self._run_clang(bitcode, "-S", "-emit-llvm", "-Xclang", "-disable-llvm-passes")
        said = re.findall(r'!{i32 (\d+), !"air\..*!"air\.arg_name", !"(\w+)"', text)
        found = [argument for _, argument in sorted((int(i), a) for i, a in said)]
        if found != arguments:
            raise NoOracle(f"{name} has other arguments than are known: {', '.join(found)}")
        text = re.sub(rf"^declare .*@{MULTIPLY}.*$", lambda _: MULTIPLY_TEXT, text, flags=re.M)
        text = re.sub(r'externally_initialized (constant i8) undef, section ".*?"', r"\1 1", text)
        self._run_clang(text.encode(), "-O2", "-fPIC", "-c", *HALF, to=path)
        return path

    def _run_clang(self, given: bytes, *arguments: str, to: Path | str = "-") -> str:
        command = [self.clang, "-x", "ir", "-Wno-override-module", "-w", *arguments, "-"]
        done = subprocess.run([*command, "-o", to], input=given, capture_output=True)
        if done.returncode:
            raise NoOracle(f"{self.clang} does not take the bitcode:\n{done.stderr.decode()}")
        return done.stdout.decode()


def i32(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def i64(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def find_clang() -> str | None:
    """The newest clang, of those that know how bitcode has been written since 2022."""
    names = (*(f"clang-{n}" for n in range(30, 15, -1)), "clang")
    return next((found for name in names if (found := shutil.which(name))), None)


def exact(arrays: Arrays, projection: str, x: np.ndarray, slots: mx.array, bits: int) -> np.ndarray:
    """The same in float64."""
    weights = [
        np.array(dequantized(arrays, projection, slot, (bits, GROUP), "affine"))
        for slot in range(SLOTS)
    ]
    return np.stack([weights[slot] @ row for slot, row in zip(slots.tolist(), x, strict=True)])


def experts(
    project: Callable[..., Any], activation: Callable[..., Any], arrays: Arrays, x: Any,
    slots: mx.array, bits: int,
) -> tuple[Any, Any]:  # fmt: skip
    """Of rows x, each with its slot: their first projection, and what their experts compute."""
    gate, up = (project(arrays, f"{p}_proj", x, slots, bits) for p in ("gate", "up"))
    return gate, project(arrays, "down_proj", activation(up, gate), slots, bits)


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), np.float64)


def error(y: mx.array, expected: np.ndarray) -> float:
    """Relative, root of the mean square."""
    off = float64(y).reshape(expected.shape) - expected
    return float(np.sqrt(np.square(off).mean() / np.square(expected).mean()))


def decode_errors(machine: Oracle, geometry: Geometry, tokens: int, top_k: int) -> list[float]:
    """Of MLX's one projection; of its three, and ours; of their weighted sums, and ours."""
    arrays, bits = random_experts(geometry, SLOTS), geometry.up[0]
    x, slots = random_call(geometry, SLOTS, tokens, top_k)
    weights = random_weights(slots, geometry.dtype)
    rows, flat = mx.repeat(x, top_k, axis=0), slots.reshape(-1)
    one, three = experts(machine.gather_qmv, SwiGLU(), arrays, rows, flat, bits)
    exact_one, exact_three = experts(exact, swiglu, arrays, float64(rows), flat, bits)
    each = exact_three.reshape(tokens, top_k, -1)
    summed = (each * float64(weights.scores)[..., None]).sum(-2)
    with running_in(Emulator(machine.folder)):
        fused = FusedExperts(geometry)
        ours, ours_summed = fused(arrays, x, slots), fused(arrays, x, slots, weights)
    theirs = weights.sum(three.reshape(ours.shape))
    pairs = (one, exact_one), (three, exact_three), (ours, each), (theirs, summed)
    return [error(y, e) for y, e in (*pairs, (ours_summed, summed))]


def prompt_errors(machine: Oracle, geometry: Geometry) -> list[float]:
    """Of MLX's one projection; of its three, and ours."""
    arrays, bits = random_experts(geometry, SLOTS), geometry.up[0]
    x, slots = ragged_call(geometry)
    order = mx.argsort(slots.reshape(-1))
    slots, tokens = slots.reshape(-1)[order], order // slots.shape[-1]
    one, three = experts(machine.gather_qmm, SwiGLU(), arrays, x[tokens], slots, bits)
    exact_one, exact_three = experts(exact, swiglu, arrays, float64(x[tokens]), slots, bits)
    with running_in(Emulator(machine.folder)):
        ours = PromptExperts(geometry)(arrays, x, tokens, slots, SLOTS)
    return [error(one, exact_one), error(three, exact_three), error(ours, exact_three)]


def swiglu(up: np.ndarray, gate: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


def compare(machine: Oracle) -> int:
    """In how many cases our error is larger than MLX's."""
    larger = cases = 0
    print("errors of MLX's one projection; its three, ours; their weighted sums, ours")
    for dtype, bits in itertools.product(TYPES, (4, 2)):
        for shape in SHAPES:
            tokens, hidden, ffn, top_k = shape
            form = (bits, GROUP)
            geometry = Geometry(hidden, ffn, True, SWIGLU, form, form, False, False, dtype)
            found = {"decoding": decode_errors(machine, geometry, tokens, top_k)}
            if PromptExperts.takes(geometry) and hidden <= 1024:
                found["a prompt"] = prompt_errors(machine, geometry)
            for what, (one, *others) in found.items():
                if not one <= max(mx.finfo(dtype).eps, FLOAT32_ERROR):
                    raise NoOracle(f"{geometry}, {what}: MLX's kernel is {one:.2g} off here")
                pairs = list(zip(others[::2], others[1::2], strict=True))
                bad = any(not ours <= theirs for theirs, ours in pairs)
                errors = "; ".join(f"{theirs:.2e}, {ours:.2e}" for theirs, ours in pairs)
                said = f"{one:.2e}; {errors}{' LARGER' * bad}"
                print(f"{geometry}, {what}: {said}", flush=True)
                larger, cases = larger + bad, cases + 1
    print(f"{cases} cases; in {larger} our error is larger than MLX's")
    return larger


def main(folder: Path) -> int:
    clang = find_clang()
    if clang is None or compiler() is None:
        print("no oracle: it takes clang, 16 or newer, and a C++ compiler (g++ or clang++)")
        return 1
    try:
        wheel = find_wheel(folder)
        try:
            with zipfile.ZipFile(wheel) as opened:
                library = opened.read(LIBRARY)
        except (zipfile.BadZipFile, KeyError, EOFError) as why:
            raise NoOracle(f"{wheel}: {why}. Remove it to have it downloaded again.") from None
        with tempfile.TemporaryDirectory() as name:
            return compare(Oracle(Path(name), library, clang)) > 0
    except (NoOracle, ValueError, OSError) as why:
        print(f"no oracle: {why}")
        return 1
