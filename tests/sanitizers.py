"""The kernels under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/check_kernels.py sanitizers

Each launch is a process of its own, in which every thread of the kernel is one of the system, every
buffer and every piece of threadgroup memory a heap block of exact size. Three workers that nothing
orders share the threadgroups. Memory is ordered by barriers alone: that a simdgroup's shuffles wait
for each other does not count. Results must have the bits of lockstep. Then faults are put into the
text, each of which must be found.
"""

import itertools
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from emulator import Change, Emulator, KernelFault, compilers, running_in

from smoe_mlx.kernels.experts import ABSENT, ACTIVATIONS, FusedExperts, Geometry, Tiling
from smoe_mlx.kernels.prompt import PromptExperts
from smoe_mlx.kernels.route import FusedRouter
from smoe_mlx.kernels.selftest import random_call, random_experts, random_weights, with_shared

SANITIZERS = {
    "thread": ("-fsanitize=thread", "-DSMEMU_TSAN"),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
}
FLAGS = ("-std=c++20", "-g", "-DSMEMU_THREADS")
WORKERS = 3
SLOTS = 3  # of a bank
NO_COMPILER = (
    "no compiler with sanitizers: install g++ (on Debian and Ubuntu with its libtsan, libasan and "
    "libubsan, which come with it), or clang++ with libclang-rt-dev"
)

Case = Callable[[], list[mx.array]]


def find_compiler() -> str | None:
    """The first compiler that makes programs with each sanitizer which also run."""

    def works(compiler: str, flags: tuple[str, ...], program: Path) -> bool:
        command = [compiler, *FLAGS, *flags, "-pthread", "-x", "c++", "-", "-o", str(program)]
        text = "#include <barrier>\nint main() { std::barrier<>(1).arrive_and_wait(); }\n"
        made = subprocess.run(command, input=text, capture_output=True, text=True)
        return made.returncode == 0 and subprocess.run([program]).returncode == 0

    with tempfile.TemporaryDirectory() as folder:
        for compiler in compilers():
            if all(works(compiler, flags, Path(folder, "a")) for flags in SANITIZERS.values()):
                return compiler
    return None


class Sanitized(Emulator):
    """Launches are processes with a sanitizer; what it finds is a `KernelFault`."""

    def __init__(
        self, folder: Path, compiler: str, sanitizer: str,
        change: Callable[[str], str] = lambda text: text,
    ):  # fmt: skip
        super().__init__(folder, change=change)
        self.compiler, self.flags = compiler, (*FLAGS, *SANITIZERS[sanitizer])

    def _launch(
        self, shim: str, unit: str, buffers: list[np.ndarray], grid: list[int],
        threadgroup: list[int], limit: int, whole_blocks: bool,
    ) -> None:  # fmt: skip
        program = self._build(shim, f'{unit}\n#include "process.h"\n')
        sizes = [b.nbytes for b in buffers]
        numbers = [*grid, *threadgroup, 0, limit, WORKERS, whole_blocks, len(sizes), *sizes]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "buffers")
            file.write_bytes(b"".join([np.array(numbers, np.uint32), *buffers]))
            try:
                done = subprocess.run(
                    [program, file], capture_output=True, text=True, errors="replace",
                    timeout=600, env={"TSAN_OPTIONS": "halt_on_error=1"},
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise KernelFault("it does not end") from None
            if done.returncode or done.stderr:
                raise KernelFault(done.stderr or f"exit status {done.returncode}")
            data = file.read_bytes()[4 * len(numbers) :]
        for buffer, end in zip(buffers, np.cumsum(sizes), strict=True):
            found = np.frombuffer(data[end - buffer.nbytes : end], np.uint8)
            buffer.view(np.uint8)[:] = found


def run_experts(geometry: Geometry, tiling: Tiling = Tiling()) -> list[mx.array]:  # noqa: B008
    """Both kernels, the weighted sum, and all that can be added to them."""
    fused = FusedExperts(geometry, tilings=(tiling, tiling))
    arrays = random_experts(geometry, SLOTS)
    x, slots = random_call(geometry, SLOTS, 2, 3)
    weights = random_weights(slots, geometry.dtype)
    shared = with_shared(weights, geometry.hidden, 2)
    lookup = mx.array([2, 0, ABSENT, SLOTS, 1], mx.uint32)
    numbers = mx.array([[0, 2, 4], [3, 1, 0]], mx.uint32)
    return [
        fused(arrays, x, slots),
        fused(arrays, x, slots, weights),
        *fused.with_misses(arrays, x, numbers, shared, lookup),
    ]


def run_prompt(geometry: Geometry) -> list[mx.array]:
    """Tiles that are full, ragged, and of a slot that the bank lacks."""
    sizes = {0: 70, 2: 3, SLOTS: 2}
    slots = mx.concatenate([mx.full((n,), slot, mx.uint32) for slot, n in sizes.items()])
    x = mx.random.normal((40, geometry.hidden), key=mx.random.key(8)).astype(geometry.dtype)
    tokens = mx.random.randint(0, 40, slots.shape, mx.uint32, key=mx.random.key(9))
    many = PromptExperts(geometry)
    return [many(random_experts(geometry, SLOTS), x, tokens, slots, len(sizes))]


def run_router(router: FusedRouter) -> list[mx.array]:
    router = replace(router)  # a new one, without a kernel
    bias = [mx.random.normal((router.experts,), key=mx.random.key(2))] * router.biased
    logits = 3 * mx.random.normal((3, router.experts), key=mx.random.key(1))
    return [*router(logits, *bias), *router(logits.astype(mx.bfloat16), *bias)]


SWIGLU = ACTIVATIONS["mlx_lm.models.switch_layers.SwiGLU"]
CLIPPED = ACTIVATIONS["mlx_lm.models.activations.SwigluOAI"].format(_alpha="1.702f", _limit="7.0f")
FOUR = Geometry(160, 96, True, SWIGLU, (4, 32), (4, 32), False, False, mx.bfloat16)
TWO = replace(FOUR, hidden=256, ffn=128, up=(2, 64), down=(2, 32), dtype=mx.float16)
THREE = replace(FOUR, hidden=128, ffn=128, up=(3, 64), down=(3, 32), dtype=mx.float32)
MXFP4 = replace(FOUR, mode="mxfp4", activation=CLIPPED, up_bias=True, down_bias=True)
UNGATED = replace(
    FOUR, gated=False, activation=ACTIVATIONS["mlx.nn.layers.activations.ReLU2"], up=(8, 32)
)
BIASED = FusedRouter(48, 4, False, True, False, sigmoid=True, biased=True, groups=6, kept=2)

CASES: dict[str, Case] = {
    "experts of 4 bits": lambda: run_experts(FOUR),
    "experts of 2 bits": lambda: run_experts(TWO),
    "experts of 3 bits": lambda: run_experts(THREE),
    "experts of mxfp4 with biases": lambda: run_experts(MXFP4),
    "experts of 8 and 4 bits, no gate": lambda: run_experts(UNGATED, Tiling(3, 4, 3, 2, False)),
    "router by softmax": lambda: run_router(FusedRouter(40, 4, False, True, True)),
    "router by logits": lambda: run_router(FusedRouter(8, 2, True, True, False)),
    "router by sigmoid, in groups": lambda: run_router(BIASED),
    "router by groups' best": lambda: run_router(replace(BIASED, greedy=True, wide=True)),
    "router by softplus": lambda: run_router(
        FusedRouter(36, 3, False, False, True, softplus=True, scale=0.5)
    ),
    "prompts of 4 bits": lambda: run_prompt(FOUR),
    "prompts of 2 bits": lambda: run_prompt(TWO),
    "prompts of 3 bits": lambda: run_prompt(replace(THREE, dtype=mx.bfloat16)),
    "prompts of mxfp4 with biases": lambda: run_prompt(MXFP4),
}  # fmt: skip


class Fault(NamedTuple):
    """A change of the text of one case's kernels (`where`: of those by this name), and the report
    that must come of it."""

    where: str
    case: str
    old: str
    new: str
    sanitizer: str
    report: str


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup)"
SIMD_BARRIER = BARRIER.replace("thread", "simd", 1)
RACE = ("thread", "data race")
READ, WRITE = ("address", "READ of size"), ("address", "WRITE of size")
FAULTS = {
    "no barrier": Fault("smoe_expert", "experts of 4 bits", BARRIER, "", *RACE),
    "a simdgroup's barrier": Fault(
        "smoe_expert", "experts of 4 bits", BARRIER, SIMD_BARRIER, *RACE
    ),
    "no barrier before the sum": Fault("smoe_sum", "experts of 4 bits", BARRIER, "", *RACE),
    "no barrier before a step's numbers are used": Fault(
        "smoe_prompt", "prompts of 4 bits", "    SM_BARRIER();\n    }", "    }", *RACE
    ),
    "no barrier before they are replaced": Fault(
        "smoe_prompt", "prompts of 4 bits", "if (step > 0) {\n      SM_BARRIER();",
        "if (step > 0) {", *RACE,
    ),
    "threadgroups write the same": Fault(
        "smoe_sum", "experts of 4 bits", "uint32_t(N) + row] =", "uint32_t(N) + sm_thread] =",
        *RACE,
    ),
    "a row too many is read": Fault(
        "smoe_expert", "experts of 8 and 4 bits, no gate", "row < uint32_t(N) ? row : 0u", "row",
        *READ,
    ),
    "a slot too many is read": Fault(
        "smoe_expert", "experts of 4 bits", "expert < uint32_t(wu_shape[0])",
        "expert <= uint32_t(wu_shape[0])", *READ,
    ),
    "a row too many of a tile is read": Fault(
        "smoe_prompt", "prompts of 4 bits", "(r < count ? r : 0u)", "r", *READ
    ),
    "a token too many is written": Fault(
        "smoe_sum", "experts of 4 bits", "out[size_t(sm_y)", "out[size_t(sm_y + 1u)", *WRITE
    ),
    "a row too many of a tile is written": Fault(
        "smoe_prompt", "prompts of 4 bits", "i < count && column", "column", *WRITE
    ),
    "threadgroup memory is too small": Fault(
        "smoe_sum", "experts of 4 bits", "MAX_TOP_K * BLOCK", "2 * BLOCK", "address",
        "out of bounds",
    ),
    "a shift too far": Fault(
        "smoe_expert", "experts of 4 bits", "1u << k", "1u << (k + 31u)", "address",
        "shift exponent",
    ),
}  # fmt: skip


def is_found(fault: Fault, folder: Path, compiler: str) -> bool:
    """Whether the right thing is reported of a case with this fault."""
    change = Change(fault.old, fault.new, fault.where)
    with running_in(Sanitized(folder, compiler, fault.sanitizer, change)):
        try:
            CASES[fault.case]()
        except KernelFault as error:
            return any(change.found) and fault.report in str(error)
    return False


def what_is_wrong(run: Case, folder: Path, compiler: str, sanitizer: str) -> str:
    """What is found in a case, or ""."""
    with running_in(Emulator(folder)):
        expected = run()
    try:
        with running_in(Sanitized(folder, compiler, sanitizer)):
            found = run()
    except KernelFault as error:
        return str(error)
    pairs = zip(found, expected, strict=True)
    same = all(mx.array_equal(a, b, equal_nan=True).item() for a, b in pairs)
    return "" if same else "other bits than in lockstep"


def main() -> int:
    compiler = find_compiler()
    if compiler is None:
        print(NO_COMPILER)
        return 1
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for sanitizer, (case, run) in itertools.product(SANITIZERS, CASES.items()):
            fault = what_is_wrong(run, folder, compiler, sanitizer)
            wrong += bool(fault)
            print(f"{sanitizer}: {case}: {fault or 'nothing found'}", flush=True)
        for what, seeded in FAULTS.items():
            found = is_found(seeded, folder, compiler)
            wrong += not found
            how = "found" if found else "MISSED"
            print(f"{seeded.sanitizer}: seeded: {what}: {how}", flush=True)
    cases = f"{len(SANITIZERS) * len(CASES)} cases, {len(FAULTS)} seeded faults"
    print(f"{cases}: {wrong} wrong")
    return wrong > 0
