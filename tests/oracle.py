"""MLX's own Metal kernels, as Apple's compiler made them, beside ours: on this CPU.

    python tests/check_kernels.py oracle

MLX's wheel for macOS has its kernels as LLVM bitcode. Those of `gather_qmv`, which mlx-lm calls three
times for a token's experts on a Mac, are compiled by clang for this machine, linked to the emulator's
runtime and run. So their errors are known without a Mac; ours may not be larger.
"""

import importlib.metadata
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from emulator import HALF, LAUNCH, METAL_LIMIT, Emulator, compiler, raw
from mlx_lm.models.switch_layers import SwiGLU
from sanitizers import SWIGLU, running_in

from smoe_mlx.kernels.experts import FusedExperts, Geometry
from smoe_mlx.kernels.selftest import Arrays, random_call, random_experts, random_weights

WHEEL = "macosx_14_0_arm64"
LIBRARY = "mlx/lib/mlx.metallib"
GROUP, SLOTS = 64, 8
# tokens, hidden, ffn, top-k. MLX has a kernel of its own for rows that are multiples of 512.
SHAPES = ((1, 1024, 512, 4), (2, 320, 192, 3), (1, 2048, 768, 8))
TYPES = {mx.bfloat16: "bfloat16_t", mx.float16: "float16_t", mx.float32: "float"}
LEAST_ERROR = 2e-6  # as in the self-test


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
        except struct.error:
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
    """Runs `gather_qmv` of MLX's Metal library."""

    def __init__(self, folder: Path, library: bytes, clang: str):
        super().__init__(folder)
        self.library, self.clang = library, clang

    def gather_qmv(self, arrays: Arrays, projection: str, x: mx.array, slots: mx.array, bits: int):
        """x [pairs, K], slots [pairs] -> [pairs, N], as MLX calls it on a Mac."""
        w, scales, biases = (arrays[projection, kind] for kind in ("weight", "scales", "biases"))
        (pairs, k), n = x.shape, w.shape[1]
        fast = "fast_" if n % 8 == 0 and k % 512 == 0 else ""
        name = f"affine_gather_qmv_{fast}{TYPES[x.dtype]}_gs_{GROUP}_b_{bits}"
        out = np.full(pairs * n * x.dtype.size, 0xFF, np.uint8)
        i32, i64 = (lambda *v, t=t: np.array(v, t) for t in (np.int32, np.int64))
        buffers = {
            "w": raw(w), "scales": raw(scales), "biases": raw(biases), "x": raw(x),
            "lhs_indices": np.arange(pairs, dtype=np.uint32), "rhs_indices": raw(slots), "y": out,
            "in_vec_size": i32(k), "out_vec_size": i32(n),
            "x_batch_ndims": i32(1), "x_shape": i32(pairs, 1, k), "x_strides": i64(k, k, 1),
            "w_batch_ndims": i32(1), "w_shape": i32(*w.shape),
            "w_strides": i64(n * w.shape[2], w.shape[2], 1),
            "s_strides": i64(n * k // GROUP, k // GROUP, 1),
            "b_strides": i64(n * k // GROUP, k // GROUP, 1),
            "batch_ndims": i32(1), "batch_shape": i32(pairs), "lhs_strides": i64(1),
            "rhs_strides": i64(1),
        }  # fmt: skip
        self._run_bitcode(name, buffers, [32, n // 8 * 2, pairs], [32, 2, 1])
        return mx.array(out).view(x.dtype).reshape(pairs, n)

    def _run_bitcode(
        self, name: str, buffers: dict[str, np.ndarray], grid: list[int], threadgroup: list[int]
    ) -> None:
        self.object = self._compile_bitcode(name, [*buffers, "tid", "simd_gid", "simd_lid"])
        place = "air_uint3{t->g->gpos.x, t->g->gpos.y, t->g->gpos.z}, t->simd, t->lane"
        pointers = "".join(f"b[{i}], " for i in range(len(buffers)))
        unit = (
            f'#include "air.h"\nextern "C" void {name}('
            + "void*, " * len(buffers)
            + "air_uint3, uint32_t, uint32_t);\nstatic void entry(smemu::Thread* t, void** b) {\n"
            + f"  {name}({pointers}{place});\n}}\n{LAUNCH}"
        )
        every = list(buffers.values())
        self._launch("msl_shim.h", unit, every, grid, threadgroup, METAL_LIMIT, False)

    def _build(self, shim: str, unit: str) -> Path:
        return super()._build(shim, unit, self.object)

    def _compile_bitcode(self, name: str, arguments: list[str]) -> Path:
        """The object file of a kernel that has these arguments."""
        bitcode, path = find_bitcode(self.library, name), self.folder / f"{name}.o"
        if path.exists():
            return path
        text = self._run_clang(bitcode, "-S", "-emit-llvm", "-Xclang", "-disable-llvm-passes")
        said = re.findall(r'!{i32 (\d+), !"air\..*!"air\.arg_name", !"(\w+)"', text.decode())
        found = [argument for _, argument in sorted((int(i), a) for i, a in said)]
        if found != arguments:
            raise NoOracle(f"{name} has other arguments than are known: {', '.join(found)}")
        path.write_bytes(self._run_clang(bitcode, "-O2", "-fPIC", "-c", *HALF))
        return path

    def _run_clang(self, bitcode: bytes, *arguments: str) -> bytes:
        command = [self.clang, "-x", "ir", "-Wno-override-module", "-w", *arguments, "-", "-o", "-"]
        done = subprocess.run(command, input=bitcode, capture_output=True)
        if done.returncode:
            raise NoOracle(f"{self.clang} does not take the bitcode:\n{done.stderr.decode()}")
        return done.stdout


def find_clang() -> str | None:
    """The newest clang that knows how bitcode has been written since 2022."""
    names = ("clang", *(f"clang-{n}" for n in range(30, 15, -1)))
    return next((found for name in names if (found := shutil.which(name))), None)


def exact(arrays: Arrays, projection: str, x: np.ndarray, slots: np.ndarray, bits: int):
    """x [pairs, K], slots [pairs] -> [pairs, N], in float64."""
    w, scales, biases = (
        np.array(arrays[projection, kind].astype(dtype))
        for kind, dtype in (("weight", mx.uint32), ("scales", mx.float32), ("biases", mx.float32))
    )
    codes = w[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & ((1 << bits) - 1)
    codes = codes.reshape(*scales.shape, GROUP).astype(np.float64)
    weights = (codes * scales[..., None] + biases[..., None]).reshape(*w.shape[:2], -1)
    return np.stack([weights[slot] @ row for slot, row in zip(slots, x, strict=True)])


def error(y: mx.array, expected: np.ndarray) -> float:
    """Relative, root of the mean square."""
    off = np.array(y.astype(mx.float32), np.float64).reshape(expected.shape) - expected
    return float(np.sqrt(np.square(off).mean() / np.square(expected).mean()))


def compare(machine: Oracle, shape: tuple[int, ...], bits: int, dtype: mx.Dtype) -> list[float]:
    """Errors of one projection; of all three, and ours; of their weighted sums, and ours."""
    tokens, hidden, ffn, top_k = shape
    how = (bits, GROUP)
    geometry = Geometry(hidden, ffn, True, SWIGLU, how, how, False, False, dtype)
    arrays = random_experts(geometry, SLOTS)
    x, chosen = random_call(geometry, SLOTS, tokens, top_k)
    weights, slots = random_weights(chosen, dtype), chosen.reshape(-1)
    rows = mx.repeat(x, top_k, axis=0)
    gate, up = (machine.gather_qmv(arrays, f"{p}_proj", rows, slots, bits) for p in ("gate", "up"))
    h = SwiGLU()(up, gate)
    y = machine.gather_qmv(arrays, "down_proj", h, slots, bits)
    y = y.reshape(tokens, top_k, hidden)

    number = np.array(slots)
    wide = np.array(rows.astype(mx.float32), np.float64)
    g, u = (exact(arrays, f"{p}_proj", wide, number, bits) for p in ("gate", "up"))
    each = exact(arrays, "down_proj", g / (1 + np.exp(-g)) * u, number, bits)
    scores = np.array(weights.scores.astype(mx.float32), np.float64)
    expected = (each.reshape(y.shape) * scores[..., None]).sum(-2)
    with running_in(Emulator(machine.folder)):
        fused = FusedExperts(geometry, compiled=False)
        ours, ours_summed = fused(arrays, x, chosen), fused(arrays, x, chosen, weights)
    return [
        error(gate, g), error(y, each), error(ours, each), error(weights.sum(y), expected),
        error(ours_summed, expected),
    ]  # fmt: skip


def main(folder: Path) -> int:
    clang = find_clang()
    if clang is None or compiler() is None:
        print("no oracle: it takes clang 16 or newer, and a C++ compiler (g++ or clang++)")
        return 1
    larger = 0
    try:
        library = zipfile.ZipFile(find_wheel(folder)).read(LIBRARY)
        print("errors: one gather_qmv; three, ours; their weighted sums, ours")
        with tempfile.TemporaryDirectory() as name:
            machine = Oracle(Path(name), library, clang)
            for dtype in TYPES:
                for bits in (4, 2):
                    for shape in SHAPES:
                        one, three, ours, summed, ours_summed = compare(machine, shape, bits, dtype)
                        bad = not (ours <= max(three, LEAST_ERROR))
                        bad |= not (ours_summed <= max(summed, LEAST_ERROR))
                        larger += bad
                        print(
                            f"{TYPES[dtype]:10} {bits} bits, {shape}: {one:.2e}; {three:.2e}, "
                            f"{ours:.2e}; {summed:.2e}, {ours_summed:.2e}{' LARGER' * bad}",
                            flush=True,
                        )
    except (NoOracle, ValueError, KeyError, zipfile.BadZipFile, OSError) as why:
        print(f"no oracle: {why}")
        return 1
    print(f"{len(TYPES) * 2 * len(SHAPES)} cases; in {larger} our error is larger than MLX's")
    return larger > 0
