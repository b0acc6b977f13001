"""FusedExperts: a layer's routed experts by two kernels, in the place of mlx-lm's chain of ops.

The first computes gate, up and activation, the second down and, where the block is known to want
it, the weighted sum over a token's experts. What is between them, and every sum, is float32. A
pair (token, expert) is computed the same way whatever else is in the call.
"""

import functools
import hashlib
import math
import operator
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
    from .prompt import PromptExperts

Kernel = Callable[..., list[mx.array]]
Arrays = Mapping[tuple[str, str], mx.array]

MAX_TOP_K = 16
MAX_TOKENS = 16
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
# Other modes: (bits, group size), and how a code becomes a float (common.h).
MODES = {"mxfp4": ((4, 32), 2), "mxfp8": ((8, 32), 3), "nvfp4": ((4, 16), 4)}
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
SHARED_MEMORY = 32768  # bytes of threadgroup memory that Metal grants
ABSENT = 0xFFFFFFFF  # a slot number that no bank has
# Names of a tensor in the kernels: a letter, then "u" (up, down, fc1 or fc2) or "g" (gate).
LETTERS = {"weight": "w", "scales": "s", "biases": "b", "bias": "a"}
STAND_INS = {
    "lookup": "slot", "correction": "logits", "addend": "score", "factor": "score", "bu": "su",
    "au": "su", "wg": "wu", "sg": "su", "bg": "su", "ag": "su",
}  # fmt: skip

# What mlx-lm's activations compute, of u (the up projection's output, or fc1's) and g (the gate's).
# Braces name numbers that the activation has as attributes, or a word.
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
    "mlx.nn.layers.activations.GELU": "sm_gelu_{_approx}(u)",
}


@dataclass(frozen=True)
class Geometry:
    """Everything about a layer's experts that the kernels depend on.

    Attributes:
        hidden, ffn: D, and the width between the projections; gated: gate and up, or fc1 alone.
        activation: C text of `u` and `g`.
        up, down: (bits, group size) of gate and up (fc1), and of down (fc2).
        up_bias, down_bias: whether the projections have a bias.
        dtype: of x, biases, the result, and affine scales.
        mode: "affine" or one of `MODES`.
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
    mode: str = "affine"

    def __str__(self) -> str:
        dtype = str(self.dtype).rpartition(".")[2]
        kind = "q" if self.mode == "affine" else self.mode[:-1]
        up, down = (f"{kind}{bits}g{group}" for bits, group in (self.up, self.down))
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
        affine = p.mode == "affine" and p.bits in BITS and p.group_size in GROUPS
        if not affine and (p.bits, p.group_size) != MODES.get(p.mode or "", (None,))[0]:
            how = f"quantised as {p.mode}, {p.bits} bits, groups of {p.group_size}"
            return f"{name} is {'not quantised' if p.mode is None else how}"
        if not {(name, "scales"), *[(name, "biases")] * affine} <= kinds.keys():
            return f"{name} has no scales or no biases"
        if (name, "global_scale") in kinds:
            return f"{name} has a global scale"
        assert p.bits is not None
        assert p.group_size is not None
        formats[name] = (p.bits, p.group_size)
    modes = {str(projections[name].mode) for name in formats}
    if len(modes) > 1:
        return f"some are quantised as {', some as '.join(sorted(modes))}"
    up, down = formats[firsts[0]], formats[last]
    biased = {n: (n, "bias") in kinds for n in (*firsts, last)}
    if gated and (formats["gate_proj"], biased["gate_proj"]) != (up, biased["up_proj"]):
        return "gate_proj and up_proj are stored in different ways"
    ffn, hidden = kinds[firsts[0], "weight"].shape[0], kinds[last, "weight"].shape[0]
    for name, inputs, (bits, group) in ((firsts[0], hidden, up), (last, ffn, down)):
        if inputs % group or inputs % chunk(bits):
            whole = f"whole groups and chunks of {chunk(bits)}"
            return f"{name} has rows of {inputs} numbers, not {whole}"
        if shared_nbytes(inputs, bits, group) > SHARED_MEMORY:
            return f"{name} has rows of {inputs} numbers, too long for threadgroup memory"
    (mode,) = modes
    floats = ("scales", "biases", "bias") if mode == "affine" else ("bias",)
    dtypes = {MX_DTYPES[t.dtype] for t in tensors if t.kind in floats}
    # Other modes without biases do not say what x is: nearly always this, and `fits` looks again.
    dtype = dtypes.pop() if dtypes else mx.bfloat16
    if dtypes or dtype not in DTYPES:
        return "scales and biases are not all bfloat16, float16 or float32"
    text = activation_text(activation, gated)
    if text is None:
        return f"the activation {type(activation).__name__} is not known"
    biases = biased[firsts[0]], biased[last]
    return Geometry(hidden, ffn, gated, text, up, down, *biases, dtype, mode)


def activation_text(activation: object, gated: bool) -> str | None:
    """What the activation computes, as C text; None if it is not one of `ACTIVATIONS`."""
    kind = type(activation)
    text = ACTIVATIONS.get(f"{kind.__module__}.{kind.__qualname__}")
    if text is None or ("g" in re.findall(r"\b\w+\b", text)) != gated:
        return None
    numbers: dict[str, str] = {}
    for name in re.findall(r"{(\w+)}", text):
        value = getattr(activation, name, None)
        if name == "_approx" and value in ("none", "precise", "tanh", "fast"):
            numbers[name] = value
        elif isinstance(value, (int, float)) and 0 < value < math.inf:
            numbers[name] = f"{float(value)!r}f"
        else:
            return None
    return text.format(**numbers)


def shared_nbytes(inputs: int, bits: int, group: int) -> int:
    """Threadgroup memory of the first kernel for rows of this many numbers."""
    return 4 * inputs + 4 * (inputs // min(group, chunk(bits)))


def chunk(bits: int) -> int:
    """How many codes the kernels load at a time: of 16 bytes, or 128, where words share codes."""
    return 128 // bits if 32 % bits == 0 else 128


def backend() -> str | None:
    """Whose kernels the default device runs: "metal", "cuda", or None on a CPU."""
    if mx.default_device() != mx.gpu:
        return None
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else None


def kernel_text(
    backend: str, body: str, inputs: Sequence[str], activation: str = ""
) -> dict[str, str]:
    """Name, header and source. The name is one of the text: MLX finds compiled code by name.

    Args:
        body: the files that have it, without suffixes: "expert", "expert+miss", "sum", "route" or
            "prompt".
        inputs: those that the kernel is given.
        activation: C text of `u` and `g`.
    """
    folder = files(__package__)

    def text(file: str) -> str:  # MLX handles all of it in every call: no comments
        return re.sub(r"^ *//.*\n| +//.*", "", (folder / file).read_text("ascii"), flags=re.M)

    header = text(f"{backend}.h") + text("common.h")
    if body == "prompt":
        header += text(f"{backend}_matrix.h")
    if activation:
        header += f"SM_FN float sm_activation(float u, float g) {{ return {activation}; }}\n"
    for name, other in STAND_INS.items():  # what is not given is not used either, but named
        if name not in inputs:
            header += f"#define {name} {other}\n"
    source = "".join(text(f"{part}.h") for part in (f"{backend}_entry", *body.split("+")))
    digest = hashlib.sha256((header + source).encode()).hexdigest()
    return {
        "name": f"smoe_{body.replace('+', '_')}_{digest[:16]}",
        "header": header,
        "source": source,
    }


def make_kernel(
    backend: str, body: str, inputs: Sequence[str], outputs: Sequence[str], activation: str = ""
) -> Kernel:
    """MLX's kernel object; it is compiled when it is first evaluated."""
    make: Any = mx.fast.metal_kernel if backend == "metal" else mx.fast.cuda_kernel
    text = kernel_text(backend, body, inputs, activation)
    kernel: Kernel = make(input_names=inputs, output_names=outputs, **text)
    return kernel


class Tiling(NamedTuple):
    """How a kernel divides its work.

    simds: simdgroups in a threadgroup (with the weighted sum: one a place of the top-k, instead).
    lanes: that share a row of weights. rows: that a lane works on at a time, no more than lanes.
    ahead: chunks of a row that are on their way while one is used. add: codes of 2, 4 and 8 bits
    become floats by an addition in the place of a conversion, the same numbers.
    """

    simds: int = 4
    lanes: int = 8
    rows: int = 1
    ahead: int = 1
    add: bool = True

    @property
    def simd_rows(self) -> int:
        """Rows of one simdgroup."""
        return 32 // self.lanes * self.rows


class Weights(NamedTuple):
    """What a block does with the experts' outputs y [..., k, D]: `(y * scores[..., None]).sum(-2)`.

    scores: [..., k]. cast: the sum is brought back to y's dtype. shared: makes what is added then
    (say a shared expert's output), [..., D], and perhaps a factor of it [..., 1].
    """

    scores: mx.array
    cast: bool = False
    shared: Callable[[], tuple[mx.array, ...]] | None = None

    def sum(self, y: mx.array) -> mx.array:
        """[..., k, D] -> [..., D], by mlx-lm's operations."""
        out = (y * self.scores[..., None]).sum(axis=-2)
        out = out.astype(y.dtype) if self.cast else out
        return out if self.shared is None else out + functools.reduce(operator.mul, self.shared())


class FusedExperts:
    """Computes what `StreamingSwitchGLU` or `StreamingSwitchMLP` would, for few tokens.

    Args:
        geometry: from `eligible`.
        max_tokens: calls with more are left to the caller.
        tilings: of the first kernel and of the second.
        compiled: a call is traced once for each of its shapes, and replayed by MLX then, which
            costs the host less.

    Attributes:
        prompt: computes calls of many rows.
    """

    def __init__(
        self,
        geometry: Geometry,
        max_tokens: int = MAX_TOKENS,
        tilings: tuple[Tiling, Tiling] = (Tiling(), Tiling()),
        compiled: bool = True,
    ):
        self.geometry, self.max_tokens, self.tilings = geometry, max_tokens, tilings
        self.compiled = compiled
        self.prompt: PromptExperts | None = None
        g = geometry
        ups = ("up_proj", "gate_proj") if g.gated else ("fc1",)
        kinds = ("weight", *(("scales", "biases") if g.mode == "affine" else ("scales",)))
        up, down = (kinds + ("bias",) * bias for bias in (g.up_bias, g.down_bias))
        self._up = [(name, kind) for name in ups for kind in up]
        self._down = [("down_proj" if g.gated else "fc2", kind) for kind in down]
        self._kernels: dict[tuple[str, ...], Kernel] = {}
        self._calls: dict[tuple[int, ...], Callable[..., list[mx.array]]] = {}

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
        self,
        arrays: Arrays,
        x: mx.array,
        slots: mx.array,
        weights: Weights | None = None,
        lookup: mx.array | None = None,
    ) -> mx.array:
        """x [..., D], slots [..., k] -> [..., k, D], or [..., D] if weighted and summed.

        Args:
            slots: rows of the arrays; those that they lack give 0.
            lookup: [E] uint32: `slots` are numbers of experts, whose slots are in here.
        """
        (y,) = self._run(False, arrays, x, slots, weights, lookup)
        return y

    def with_misses(
        self,
        arrays: Arrays,
        x: mx.array,
        slots: mx.array,
        weights: Weights | None = None,
        lookup: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """The same, and misses [...] uint32: bit k of a token is set where the arrays lack the slot
        of its place k (with `lookup`: where that has `ABSENT`, say)."""
        y, misses = self._run(True, arrays, x, slots, weights, lookup)
        return y, misses

    def _run(
        self,
        misses: bool,
        arrays: Arrays,
        x: mx.array,
        slots: mx.array,
        weights: Weights | None,
        lookup: mx.array | None,
    ) -> list[mx.array]:
        given = [x, slots]
        added: tuple[mx.array, ...] = ()
        if weights is not None:
            added = () if weights.shared is None else weights.shared()
            given += [weights.scores, *added]
        if lookup is not None:
            given.append(lookup)
        cast = weights is not None and weights.cast
        way = (weights is not None, cast, len(added), lookup is not None, misses)
        call = self._calls.get(way)
        if call is None:
            call = self._calls[way] = self._make_call(*way)
        return call(*given, *[arrays[key] for key in (*self._up, *self._down)])

    def _make_call(
        self, weighted: bool, cast: bool, added: int, looked_up: bool, misses: bool
    ) -> Callable[..., list[mx.array]]:
        """Both kernels as a function of arrays alone."""

        def call(x: mx.array, slots: mx.array, *more: mx.array) -> list[mx.array]:
            given = list(more)
            weights = Weights(given.pop(0), cast) if weighted else None
            if weights is not None and added:
                terms = tuple(given.pop(0) for _ in range(added))
                weights = weights._replace(shared=lambda: terms)
            lookup = given.pop(0) if looked_up else None
            arrays = dict(zip((*self._up, *self._down), given, strict=True))
            h, *missing = self._first(misses, arrays, x, slots, lookup)
            return [self._second(arrays, h, slots, weights, lookup), *missing]

        return mx.compile(call) if self.compiled else call

    def _first(
        self,
        misses: bool,
        arrays: Arrays,
        x: mx.array,
        slots: mx.array,
        lookup: mx.array | None,
    ) -> list[mx.array]:
        """Gate, up and activation: x [..., D], slots [..., k] -> [pairs, F] float32, in an order
        that `_second` knows; then `with_misses`' second array, if it is asked for."""
        g, tiling = self.geometry, self.tilings[0]
        inputs = {"inp": x.reshape(-1, g.hidden), "slot": slots.reshape(-1, slots.shape[-1])}
        constants = {"SIMDS": tiling.simds, "FIRST": True, "NEXT": chunk(g.down[0])}
        constants |= {"GATED": g.gated, "BIAS": g.up_bias}
        constants |= self._constants(g.up, tiling, g.hidden)
        return self._launch(
            "expert+miss" if misses else "expert", g.activation, inputs, lookup, arrays, self._up,
            constants, (slots.size, g.ffn), mx.float32, tiling.simds,
            tiling.simds * tiling.simd_rows, slots.shape[:-1] if misses else None,
        )  # fmt: skip

    def _second(
        self,
        arrays: Arrays,
        h: mx.array,
        slots: mx.array,
        weights: Weights | None = None,
        lookup: mx.array | None = None,
    ) -> mx.array:
        """Down: h [pairs, F], slots [..., k] -> [..., k, D]; weighted and summed -> [..., D]."""
        g, tiling, top_k = self.geometry, self.tilings[1], slots.shape[-1]
        inputs = {"inp": h, "slot": slots.reshape(-1, top_k)}
        constants = {"BIAS": g.down_bias, **self._constants(g.down, tiling, g.ffn)}
        if weights is None:
            constants |= {"SIMDS": tiling.simds, "FIRST": False, "NEXT": 4, "GATED": False}
            (y,) = self._launch(
                "expert", "u", inputs, lookup, arrays, self._down, constants,
                (slots.size, g.hidden), g.dtype, tiling.simds, tiling.simds * tiling.simd_rows,
            )  # fmt: skip
            return y.reshape(*slots.shape, g.hidden)
        dtype = g.dtype if weights.cast else result_type(g.dtype, weights.scores.dtype)
        inputs["score"] = weights.scores
        if weights.shared is not None:
            added, shape = weights.shared(), slots.shape[:-1]
            shapes = [(*shape, g.hidden), (*shape, 1)][: len(added)]
            if [a.shape for a in added] != shapes or not {a.dtype for a in added} <= {*DTYPES}:
                y = self._second(arrays, h, slots, weights._replace(shared=None), lookup)
                return y + functools.reduce(operator.mul, added)
            inputs |= zip(("addend", "factor"), added)  # noqa: B905 (the second may lack)
            dtype = functools.reduce(result_type, [dtype, *(a.dtype for a in added)])
            constants["ADDED"] = len(added)
        (y,) = self._launch(
            "sum", "", inputs, lookup, arrays, self._down,
            {"MAX_TOP_K": MAX_TOP_K, "ADDED": 0, **constants}, (slots.size // top_k, g.hidden),
            dtype, top_k, tiling.simd_rows,
        )  # fmt: skip
        return y.reshape(*slots.shape[:-1], g.hidden)

    def _constants(self, how: tuple[int, int], tiling: Tiling, inputs: int) -> dict[str, int]:
        bits, group = how
        code = int(tiling.add and 32 % bits == 0)
        if self.geometry.mode != "affine":
            code = MODES[self.geometry.mode][1]
        return {
            "K": inputs, "BITS": bits, "GROUP": group, "HOW": code,
            "LANES": tiling.lanes, "ROWS": tiling.rows, "AHEAD": tiling.ahead,
        }  # fmt: skip

    def _launch(
        self,
        body: str,
        activation: str,
        inputs: dict[str, mx.array],
        lookup: mx.array | None,
        arrays: Arrays,
        tensors: Sequence[tuple[str, str]],
        constants: dict[str, int],
        shape: tuple[int, int],
        dtype: mx.Dtype,
        simds: int,
        block: int,
        misses: tuple[int, ...] | None = None,
    ) -> list[mx.array]:
        """Run a kernel that makes an array of this shape, in blocks of so many of its columns.

        misses: the shape of a second one, if it makes that.
        """
        if lookup is not None:
            inputs["lookup"] = lookup
        for projection, kind in tensors:
            side = "g" if projection == "gate_proj" else "u"
            inputs[LETTERS[kind] + side] = arrays[projection, kind]
        key = (body, activation, *inputs)
        kernel = self._kernels.get(key)
        if kernel is None:
            outputs = ["out"] if misses is None else ["out", "miss"]
            kernel = make_kernel(backend() or "", body, list(inputs), outputs, activation)
            self._kernels[key] = kernel
        constants = {"N": shape[1], "LOOKUP": lookup is not None, **constants}
        return kernel(
            inputs=list(inputs.values()),
            template=[("T", dtype), *((name, int(value)) for name, value in constants.items())],
            output_shapes=[shape] if misses is None else [shape, misses],
            output_dtypes=[dtype] if misses is None else [dtype, mx.uint32],
            grid=(-(-shape[1] // block) * simds * 32, shape[0], 1),
            threadgroup=(simds * 32, 1, 1),
        )


def result_type(a: mx.Dtype, b: mx.Dtype) -> mx.Dtype:
    """The type of a product of arrays of these types."""
    return mx.result_type(mx.zeros((), a), mx.zeros((), b))
