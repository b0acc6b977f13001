"""Runs the text of a Metal or CUDA kernel on a CPU, its threads in lockstep.

Metal: MLX itself writes the text, while a graph is exported, also in a build without Metal. CUDA:
written here by the rules of MLX's cuda_kernel. Either is compiled by a C++ compiler behind a shim
that gives the language's names their meaning (msl_shim.h, cuda_shim.h), over runtime.h, which runs
one threadgroup after the other and reports what a GPU would leave undefined: barriers that not all
threads reach, simdgroup operations in divergent code, more than 32 KB of threadgroup memory.
Threadgroup memory and outputs begin as NaN. It is right, not fast, and tells nothing about speed.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from smoe_mlx.kernels import choose, experts, prompt, route

HERE = Path(__file__).parent
HALF = ["-mf16c"] * (platform.machine() == "x86_64")  # else half costs a call each
METAL_LIMIT, CUDA_LIMIT = 32768, 49152  # bytes of threadgroup memory

real_metal_kernel = mx.fast.metal_kernel
_ATTRIBUTES = {
    "thread_index_in_simdgroup": "t->lane",
    "simdgroup_index_in_threadgroup": "t->simd",
    "thread_index_in_threadgroup": "t->index",
    "threadgroup_position_in_grid": "uint3{t->g->gpos.x, t->g->gpos.y, t->g->gpos.z}",
    "threads_per_threadgroup": "uint3{t->g->gdim.x, t->g->gdim.y, t->g->gdim.z}",
}
_CUDA_TYPES = {
    mx.int32: "int32_t", mx.uint32: "uint32_t", mx.uint8: "uint8_t", mx.float32: "float",
    mx.float16: "__half", mx.bfloat16: "__nv_bfloat16",
}  # fmt: skip
LAUNCH = """
extern "C" int smemu_launch(void** b, const uint32_t* g, const uint32_t* tg,
                            const smemu::Options* o, uint64_t* st, char* err, int n) {
  return smemu::launch(entry, b, g, tg, o, st, err, n);
}
"""


class KernelFault(RuntimeError):
    """The kernel did what is undefined on a GPU."""


def compilers() -> list[str]:
    """The C++ compilers that are there, of $CXX, c++, g++ and clang++."""
    names = (os.environ.get("CXX") or "", "c++", "g++", "clang++")
    return [found for name in names if name and (found := shutil.which(name))]


def compiler() -> str | None:
    """The first of them."""
    return next(iter(compilers()), None)


class Change:
    """Puts `new` in the place of `old` into the text of kernels, or of those that have `where`.

    Attributes:
        found: whether `old` was in it, of each such text.
    """

    def __init__(self, old: str, new: str, where: str = ""):
        self.old, self.new, self.where = old, new, where
        self.found: list[bool] = []

    def __call__(self, text: str) -> str:
        if self.where not in text:
            return text
        self.found.append(self.old in text)
        return text.replace(self.old, self.new)


def replacements(machine: Any, backend: str) -> list[tuple[Any, str, Any]]:
    """(object, attribute, value): with these, kernels are of this backend, and made by `machine`,
    an `Emulator` or what has its two methods."""
    modules = (experts, choose, prompt, route)
    return [
        (mx.fast, "metal_kernel", machine.metal_kernel),
        (mx.fast, "cuda_kernel", machine.cuda_kernel),
        (mx, "compile", lambda function: function),  # an Emulator looks at arrays
        *[(module, "backend", lambda: backend) for module in modules],
    ]


@contextmanager
def running_in(machine: Any, backend: str = "metal") -> Iterator[None]:
    """In this context, `replacements` are made."""
    with ExitStack() as stack:
        for replacement in replacements(machine, backend):
            stack.enter_context(patch.object(*replacement))
        yield


class _Options(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint32) for n in ("seed", "tg_limit", "workers", "cuda_grid")]


class Emulator:
    """`metal_kernel` and `cuda_kernel` in the place of those of `mx.fast`.

    Args:
        folder: where compiled kernels are kept.
        seed: the order in which threads run: 0 forward, 1 backward, else shuffled.
        change: applied to each kernel's text before it is compiled, to break it.
    """

    flags: tuple[str, ...] = ("-std=c++17", "-shared", "-fPIC")
    workers = 2  # threads that share the threadgroups

    def __init__(
        self, folder: Path, seed: int = 0, change: Callable[[str], str] = lambda text: text
    ):
        self.folder, self.seed, self.change = folder, seed, change
        self.compiler = compiler() or "c++"
        self.threadgroup_bytes = 0  # of the last launch
        self.names: list[str] = []  # of kernels launched

    def metal_kernel(self, **made_with: Any) -> Callable[..., list[mx.array]]:
        kernel = real_metal_kernel(**made_with)

        def call(inputs: Sequence[mx.array], **launch: Any) -> list[mx.array]:
            traced = trace(kernel, inputs, launch)
            unit = _metal_unit(traced["name"], self.change(traced["source"]))
            pieces = []
            for a, (shape, strides, ndim) in zip(inputs, traced["shapes"], strict=True):
                pieces.append(raw(a))
                if shape:
                    pieces.append(np.array(a.shape, np.int32))
                assert (strides, ndim) == (False, False), "not needed so far"
            self.names.append(traced["name"])
            return self._run("msl_shim.h", unit, pieces, METAL_LIMIT, False, **launch)

        return call

    def cuda_kernel(
        self, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str,
        header: str,
    ) -> Callable[..., list[mx.array]]:  # fmt: skip
        def call(inputs: Sequence[mx.array], **launch: Any) -> list[mx.array]:
            function, text = cuda_text(
                name, input_names, inputs, output_names, launch["output_dtypes"],
                launch["template"], header, source,
            )  # fmt: skip
            pieces = []
            for n, a in zip(input_names, inputs, strict=True):
                pieces.append(raw(a))
                if f"{n}_shape" in source:
                    pieces.append(np.array([*a.shape, *[0] * (10 - a.ndim)], np.int32))
            self.names.append(function)
            unit = _cuda_unit(function, self.change(text))
            return self._run("cuda_shim.h", unit, pieces, CUDA_LIMIT, True, **launch)

        return call

    def _run(
        self, shim: str, unit: str, pieces: list[np.ndarray], limit: int, whole_blocks: bool, *,
        output_shapes: Any, output_dtypes: Any, grid: Any, threadgroup: Any, template: Any,
    ) -> list[mx.array]:  # fmt: skip
        outputs = []
        for shape, dtype in zip(output_shapes, output_dtypes, strict=True):
            nbytes = int(np.prod(shape)) * dtype.size
            outputs.append(np.full(nbytes, 0xFF, np.uint8))  # NaN
        self._launch(shim, unit, [*pieces, *outputs], [*grid], [*threadgroup], limit, whole_blocks)
        return [
            mx.array(o).view(dtype).reshape(shape)
            for o, shape, dtype in zip(outputs, output_shapes, output_dtypes, strict=True)
        ]

    def _launch(
        self, shim: str, unit: str, buffers: list[np.ndarray], grid: list[int],
        threadgroup: list[int], limit: int, whole_blocks: bool,
    ) -> None:  # fmt: skip
        """Run a kernel on these buffers."""
        library = ctypes.CDLL(str(self._build(shim, unit)))
        pointers = (ctypes.c_void_p * len(buffers))(*[b.ctypes.data for b in buffers])
        three, seen, fault = ctypes.c_uint32 * 3, (ctypes.c_uint64 * 4)(), bytearray(512)
        message = (ctypes.c_char * 512).from_buffer(fault)
        options = _Options(self.seed, limit, self.workers, whole_blocks)
        failed = library.smemu_launch(
            pointers, three(*grid), three(*threadgroup), ctypes.byref(options), seen, message, 512
        )
        if failed:
            raise KernelFault(message.value.decode())
        self.threadgroup_bytes = seen[3]

    def _build(self, shim: str, unit: str, *objects: Path) -> Path:
        headers = [p.read_text() for p in sorted(HERE.glob("*.h"))]
        flags = ["-O1", "-ffp-contract=off", "-w", "-pthread", *HALF, *self.flags]
        if platform.system() == "Darwin":
            flags += ["-D_XOPEN_SOURCE"]  # for ucontext
        # The shim is precompiled beside a copy of it: it takes longer than a kernel.
        folder = self.folder / digest(*headers, *flags)
        if not (folder / f"{shim}.gch").exists():
            folder.mkdir(parents=True, exist_ok=True)
            for path in HERE.glob("*.h"):
                part = folder / f"{path.name}.{os.getpid()}"
                part.write_text(path.read_text())
                os.utime(part, (0, 0))  # clang refuses what was precompiled from a newer file
                part.replace(folder / path.name)
            self._compile([*flags, "-x", "c++-header", str(folder / shim)], folder / f"{shim}.gch")
        built = folder / f"{digest(shim, unit, *map(str, objects))}.so"
        if not built.exists():
            text = built.with_suffix(f".{os.getpid()}.cpp")
            text.write_text(unit)
            command = [*flags, "-include", str(folder / shim), str(text), *map(str, objects)]
            self._compile(command, built)
        return built

    def _compile(self, arguments: list[str], output: Path) -> None:
        part = output.with_suffix(f".{os.getpid()}.part")
        command = [self.compiler, *arguments, "-o", str(part)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            errors = [x for x in done.stderr.splitlines() if "error" in x] or [done.stderr]
            raise RuntimeError("\n".join(e.rpartition("error: ")[2] for e in errors[:5]))
        part.replace(output)


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


def raw(array: mx.array) -> np.ndarray:
    array = mx.contiguous(array)
    mx.eval(array)
    return np.array(array.view(mx.uint8)).reshape(-1)


def trace(kernel: Any, inputs: Sequence[mx.array], launch: dict[str, Any]) -> dict[str, Any]:
    """The CustomKernel that MLX would run: name, text, which inputs pass shape, strides, ndim."""
    found = []

    def look(event: dict[str, Any]) -> None:
        if event.get("type") == "primitive" and event["name"] == "CustomKernel":
            found.append(event["arguments"])

    mx.export_function(look, lambda *xs: kernel(inputs=list(xs), stream=mx.gpu, **launch), *inputs)
    (arguments,) = found
    return {"name": arguments[0], "source": arguments[1], "shapes": arguments[8]}


def _metal_unit(name: str, text: str) -> str:
    signature = re.search(rf"\[\[kernel\]\] void {name}\(\n(.*?)\) {{\n", text, re.S)
    template = re.search(rf"\ntemplate \[\[host_name\(.*?\] decltype\({name}(<.*?>)\)", text)
    assert signature, text
    assert template, text
    arguments, buffers = [], 0
    for line in re.split(r",\n", signature[1]):
        if "[[buffer(" in line:
            kind = re.sub(r"\b(device|constant)\b|\[\[.*", "", line).rsplit(maxsplit=1)[0].strip()
            star = "*" if kind.endswith("&") else ""
            arguments.append(f"{star}({kind.rstrip('*& ')}*)b[{buffers}]")
            buffers += 1
        else:
            attribute = re.search(r"\[\[(\w+)\]\]", line)
            assert attribute, line
            arguments.append(_ATTRIBUTES[attribute[1]])
    body = re.sub(r"\ntemplate \[\[host_name.*?;\n", "\n", text)
    body = re.sub(r" \[\[\w+(\(\d+\))?\]\]", "", body).replace("[[kernel]] ", "")
    return (
        f'#line 1 "{name}.metal"\n{body}\n'
        "static void entry(smemu::Thread* t, void** b) {\n"
        f"  {name}{template[1]}({', '.join(arguments)});\n}}\n{LAUNCH}"
    )


def cuda_text(
    name: str,
    input_names: Sequence[str],
    inputs: Sequence[mx.array],
    output_names: Sequence[str],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, Any]],
    header: str,
    source: str,
) -> tuple[str, str]:
    """(function, text) as MLX's cuda_kernel hands it to NVRTC."""
    function, constants, signature = f"custom_kernel_{name}", "", []
    for key, value in template:
        if isinstance(value, mx.Dtype):
            function += f"_{str(value).rpartition('.')[2]}_t"
            constants += f"  using {key} = {_CUDA_TYPES[value]};\n"
        else:
            function += f"_{value}"
            constants += f"  constexpr int {key} = {value};\n"
    for n, a in zip(input_names, inputs, strict=True):
        signature.append(f"    const {_CUDA_TYPES[a.dtype]}* {n}")
        if f"{n}_shape" in source:
            signature.append(f"    const __grid_constant__ Shape {n}_shape")
    for n, dtype in zip(output_names, output_dtypes, strict=True):
        signature.append(f"    {_CUDA_TYPES[dtype]}* {n}")
    return function, (
        '#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
        + header
        + "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
        + f"__global__ void {function}(\n"
        + ",\n".join(signature)
        + f") {{\n{constants}\n{source}\n}}\n\n}} // namespace mlx::core::cu\n"
    )


def _cuda_unit(function: str, text: str) -> str:
    body = re.sub(r"^#include.*\n", "", text, flags=re.M)
    body = body.replace("namespace cg = cooperative_groups;", "")
    body = body.replace("__shared__ type name[count]", "SM_SHARED_EMU(type, name, count)")
    signature = re.search(rf"__global__ void {function}\(\n(.*?)\) {{", body, re.S)
    assert signature, text
    arguments = []
    for i, line in enumerate(re.split(r",\n", signature[1])):
        kind = line.strip().rsplit(maxsplit=1)[0].replace("__grid_constant__ ", "")
        arguments.append(f"({kind})b[{i}]" if kind.endswith("*") else f"*({kind}*)b[{i}]")
    return (
        f'#line 1 "{function}.cu"\n{body}\n'
        "static void entry(smemu::Thread*, void** b) {\n"
        f"  mlx::core::cu::{function}({', '.join(arguments)});\n}}\n{LAUNCH}"
    )
