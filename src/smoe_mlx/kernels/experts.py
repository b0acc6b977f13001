"""FusedExperts: a layer's routed experts by two kernels, in the place of mlx-lm's chain of ops.

The first computes gate, up and activation, the second down. What is between them, and every sum,
is float32. A pair (token, expert) is computed the same way whatever else is in the call.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from ..cache.bank import MX_DTYPES
from ..store.layout import TensorSpec

if TYPE_CHECKING:
    from ..layers.switch import Projection

Kernel = Callable[..., list[mx.array]]

MAX_TOP_K = 16
MAX_TOKENS = 16
BITS, GROUPS = (2, 4, 8), (32, 64, 128)
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
SHARED_MEMORY = 32768  # bytes of threadgroup memory that Metal grants
ABSENT = 0xFFFFFFFF  # a slot number that no bank has
INPUTS = ("inp", "slot", "wu", "su", "bu", "cu", "wg", "sg", "bg", "cg")

# What mlx-lm's activations compute, of u (the up projection's output, or fc1's) and g (the gate's).
# Braces name numbers that the activation has as attributes.
ACTIVATIONS = {
    "mlx_lm.models.switch_layers.SwiGLU": "sm_silu(g) * u",
    "mlx_lm.models.muse_spark.PreciseSwiGLU": "sm_silu(g) * u",
    "mlx_lm.models.activations.SwigluOAI": "(sm_at_least(sm_at_most(u, {_limit}), -{_limit})"
    " + 1.0f) * sm_at_most(g, {_limit}) * sm_sigmoid({_alpha} * sm_at_most(g, {_limit}))",
    "mlx_lm.models.step3p5.ClampedSwiGLU": "sm_at_most(sm_silu(g), {limit})"
    " * sm_at_least(sm_at_most(u, {limit}), -{limit})",
    "mlx_lm.models.deepseek_v41.DeepseekV41SwiGLU": "sm_silu(sm_at_most(g, {limit}))"
    " * sm_at_least(sm_at_most(u, {limit}), -{limit})",
    "mlx_lm.models.gemma4_text.GeGLU": "sm_gelu_tanh(g) * u",
    "mlx_lm.models.kimi_k3.SiTU": "{beta} * SM_TANH(g / {beta}) * sm_sigmoid(g)"
    " * ({linear_beta} * SM_TANH(u / {linear_beta}))",
    "mlx.nn.layers.activations.ReLU2": "sm_at_least(u, 0.0f) * sm_at_least(u, 0.0f)",
}


@dataclass(frozen=True)
class Geometry:
    """Everything about a layer's experts that the kernels depend on.

    Attributes:
        hidden, ffn: D, and the width between the projections; gated: gate and up, or fc1 alone.
        activation: C text of `u` and `g`.
        up, down: (bits, group size) of gate and up (fc1), and of down (fc2).
        up_bias, down_bias: whether the projections have a bias.
        dtype: of x, scales, biases and the result.
    """

    hidden: int
    ffn: int
    gated: bool
    activation: str
    up: tuple[int, int]
    down: tuple[int, int]
    up_bias: bool
    down_bias: bool
    dtype: mx.Dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).rpartition(".")[2]
        up, down = (f"q{bits}g{group}" for bits, group in (self.up, self.down))
        return f"{self.hidden} x {self.ffn} {up if up == down else f'{up}/{down}'} {dtype}"


def eligible(
    tensors: Sequence[TensorSpec], projections: Mapping[str, "Projection"], activation: object
) -> Geometry | str:
    """The geometry of experts that the kernels can compute, or why they cannot.

    Args:
        tensors: of one expert.
        projections: gate_proj, up_proj and down_proj, or fc1 and fc2.
        activation: the module that mlx-lm calls between them.
    """
    gated = "gate_proj" in projections
    firsts = ("up_proj", "gate_proj") if gated else ("fc1",)
    last = "down_proj" if gated else "fc2"
    kinds = {(t.projection, t.kind): t for t in tensors}
    formats = {}
    for name in (*firsts, last):
        p = projections[name]
        if p.mode != "affine" or p.bits not in BITS or p.group_size not in GROUPS:
            how = f"quantised as {p.mode}, {p.bits} bits, groups of {p.group_size}"
            return f"{name} is {'not quantised' if p.mode is None else how}"
        if not {(name, "scales"), (name, "biases")} <= kinds.keys():
            return f"{name} has no scales or no biases"
        formats[name] = (p.bits, p.group_size)
    up, down = formats[firsts[0]], formats[last]
    biased = {n: (n, "bias") in kinds for n in (*firsts, last)}
    if gated and (formats["gate_proj"], biased["gate_proj"]) != (up, biased["up_proj"]):
        return "gate_proj and up_proj are stored in different ways"
    ffn, hidden = kinds[firsts[0], "weight"].shape[0], kinds[last, "weight"].shape[0]
    for name, inputs, (bits, group) in ((firsts[0], hidden, up), (last, ffn, down)):
        if inputs % group or inputs * bits % 128:
            return f"{name} has rows of {inputs} numbers, not whole groups and 16-byte chunks"
        if shared_nbytes(inputs, bits, group) > SHARED_MEMORY:
            return f"{name} has rows of {inputs} numbers, too long for threadgroup memory"
    dtypes = {MX_DTYPES[t.dtype] for t in tensors if t.kind in ("scales", "biases", "bias")}
    dtype = dtypes.pop()
    if dtypes or dtype not in DTYPES:
        return "scales and biases are not all bfloat16, float16 or float32"
    text = activation_text(activation, gated)
    if text is None:
        return f"the activation {type(activation).__name__} is not known"
    return Geometry(hidden, ffn, gated, text, up, down, biased[firsts[0]], biased[last], dtype)


def activation_text(activation: object, gated: bool) -> str | None:
    """What the activation computes, as C text; None if it is not one of `ACTIVATIONS`."""
    kind = type(activation)
    text = ACTIVATIONS.get(f"{kind.__module__}.{kind.__qualname__}")
    if text is None or ("g" in re.findall(r"\b\w+\b", text)) != gated:
        return None
    numbers = {}
    for name in re.findall(r"{(\w+)}", text):
        value = getattr(activation, name, None)
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            return None
        numbers[name] = f"{float(value)!r}f"
    return text.format(**numbers)


def shared_nbytes(inputs: int, bits: int, group: int) -> int:
    """Threadgroup memory of a kernel whose rows have this many numbers."""
    return 4 * inputs + 4 * (inputs // min(group, 128 // bits))


def backend() -> str | None:
    """Whose kernels the default device runs: "metal", "cuda", or None on a CPU."""
    if mx.default_device() != mx.gpu:
        return None
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else None


def kernel_text(backend: str, activation: str) -> dict[str, str]:
    """Name, header and source. The name is one of the text: MLX finds compiled code by name."""
    folder = files("smoe_mlx.kernels")
    names = (f"{backend}.h", "common.h", f"{backend}_entry.h", "expert.h")
    prelude, common, entry, body = ((folder / name).read_text("ascii") for name in names)
    header = prelude + common
    header += f"SM_FN float sm_activation(float u, float g) {{\n  return {activation};\n}}\n"
    source = entry + body
    digest = hashlib.sha256((header + "\0" + source).encode()).hexdigest()
    return {"name": f"smoe_expert_{digest[:16]}", "header": header, "source": source}


def make_kernel(backend: str, activation: str) -> Kernel:
    """MLX's kernel object; it is compiled when it is first evaluated."""
    make: Any = mx.fast.metal_kernel if backend == "metal" else mx.fast.cuda_kernel
    text = kernel_text(backend, activation)
    return make(input_names=INPUTS, output_names=["out"], **text)  # type: ignore[no-any-return]


class Tiling(NamedTuple):
    """How a kernel divides its work: simdgroups in a threadgroup, lanes that share a row of
    weights, rows that a lane works on at a time."""

    simds: int = 4
    lanes: int = 8
    rows: int = 1


class FusedExperts:
    """Computes what `StreamingSwitchGLU` or `StreamingSwitchMLP` would, for few tokens.

    Args:
        geometry: from `eligible`.
        max_tokens: calls with more are left to the caller.
        tilings: of the first kernel and of the second.
    """

    def __init__(
        self,
        geometry: Geometry,
        max_tokens: int = MAX_TOKENS,
        tilings: tuple[Tiling, Tiling] = (Tiling(), Tiling()),
    ):
        self.geometry, self.max_tokens, self.tilings = geometry, max_tokens, tilings
        self._kernels: tuple[Kernel, Kernel] | None = None

    def fits(self, x: mx.array, slots: mx.array) -> bool:
        """Whether this call can be computed here."""
        k = slots.shape[-1]
        return (
            k <= MAX_TOP_K
            and 0 < slots.size <= k * self.max_tokens
            and x.dtype == self.geometry.dtype
            and x.shape[:-1] == slots.shape[:-1]
            and backend() is not None
        )

    def __call__(
        self, arrays: Mapping[tuple[str, str], mx.array], x: mx.array, slots: mx.array
    ) -> mx.array:
        """x [..., D], slots [..., k] (rows of the arrays; 0 for those they lack) -> [..., k, D]."""
        g = self.geometry
        if self._kernels is None:
            where = backend() or ""
            self._kernels = (make_kernel(where, g.activation), make_kernel(where, "u"))
        first, second = self._kernels
        pairs = slots.reshape(-1, slots.shape[-1])
        up, gate, down = ("up_proj", "gate_proj", "down_proj") if g.gated else ("fc1", "fc1", "fc2")

        def tensors(name: str, bias: bool) -> list[mx.array]:
            kinds = ("weight", "scales", "biases", "bias" if bias else "scales")
            return [arrays[name, kind] for kind in kinds]

        def launch(
            kernel: Kernel,
            inp: mx.array,
            weights: list[mx.array],
            rows: int,
            dtype: mx.Dtype,
            tiling: Tiling,
            **constants: int,
        ) -> mx.array:
            threads = 32 * tiling.simds
            blocks = -(-rows // (tiling.simds * (32 // tiling.lanes) * tiling.rows))
            template = [("T", dtype), ("N", rows), ("K", inp.shape[-1]), *constants.items()]
            (out,) = kernel(
                inputs=[inp, pairs, *weights],
                template=[*template, *zip(("SIMDS", "LANES", "ROWS"), tiling, strict=True)],
                output_shapes=[(pairs.size, rows)],
                output_dtypes=[dtype],
                grid=(blocks * threads, pairs.size, 1),
                threadgroup=(threads, 1, 1),
            )
            return out

        h = launch(
            first, x.reshape(-1, g.hidden), [*tensors(up, g.up_bias), *tensors(gate, g.up_bias)],
            g.ffn, mx.float32, self.tilings[0],
            BITS=g.up[0], GROUP=g.up[1], GATED=int(g.gated), BIAS=int(g.up_bias), PER_TOKEN=1,
        )  # fmt: skip
        y = launch(
            second, h, 2 * tensors(down, g.down_bias), g.hidden, g.dtype, self.tilings[1],
            BITS=g.down[0], GROUP=g.down[1], GATED=0, BIAS=int(g.down_bias), PER_TOKEN=0,
        )  # fmt: skip
        return y.reshape(*slots.shape, g.hidden)
