"""FusedRouter: from a router's logits to experts and weights by one kernel."""

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from .experts import DTYPES, MAX_TOKENS, MAX_TOP_K, Kernel, backend, make_kernel, result_type

MAX_EXPERTS = 1024  # 32 for each lane
MAX_GROUPS = 32  # one for each lane


@dataclass(frozen=True)
class FusedRouter:
    """Scores, top-k and weights of few tokens, as several of mlx-lm's routers make them.

    `selftest.route_operations` says the same in mlx-lm's operations.

    Attributes:
        experts, top_k: E and k.
        by_logits: the k largest logits are chosen, else the k largest scores.
        norm: a token's weights add up to 1.
        last: of equal experts the last are chosen and the order is ascending, as by
            `argpartition(p, kth=-k)[..., -k:]` on a GPU, else as by `argpartition(-p)[..., :k]`.
        sigmoid: what scores are of a logit, else they are softmax over all experts.
        biased: a bias [E] is added to scores while experts are chosen.
        groups, kept: only experts of so many of so many groups are chosen, of those whose best two
            add up to most; others count as 0, or with `never` as -inf.
        wide: scores and weights are float32, else of the logits' dtype.
        cast: wide weights are brought back to the logits' dtype.
        eps: is added to the sum that weights are divided by.
        scale: of weights.
        softplus: scores are the root of a logit's softplus.
        bias_in: the type in which scores and bias are added: "" that of both, "wide" float32,
            "narrow" the scores' own.
        greedy: groups are kept by their best expert alone, and scores of others are 0.
        least: the least sum that weights are divided by.
    """

    experts: int
    top_k: int
    by_logits: bool
    norm: bool
    last: bool
    sigmoid: bool = False
    biased: bool = False
    groups: int = 1
    kept: int = 1
    never: bool = False
    wide: bool = False
    cast: bool = False
    eps: float | None = None
    scale: float | None = None
    softplus: bool = False
    bias_in: str = ""
    greedy: bool = False
    least: float | None = None

    def __str__(self) -> str:
        kind = "sigmoid" if self.sigmoid else "softplus" if self.softplus else "softmax"
        groups = f", {self.kept} of {self.groups} groups" if self.groups > 1 else ""
        return f"{self.top_k} of {self.experts} by {kind}{groups}"

    def fits(self, logits: mx.array) -> bool:
        """Whether this call can be computed here."""
        return (
            logits.shape[-1] == self.experts <= MAX_EXPERTS
            and 0 < self.top_k <= min(MAX_TOP_K, self.experts)
            and 0 < self.kept <= self.groups <= MAX_GROUPS
            and self.experts % self.groups == 0
            and (self.groups == 1 or self.groups < self.experts)  # two in each
            and 0 < logits.size <= MAX_TOKENS * self.experts
            and logits.dtype in DTYPES
            and backend() is not None
        )

    def __call__(self, logits: mx.array, bias: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """logits [..., E], bias [E] -> experts [..., k] uint32, weights [..., k]."""
        return self._call(logits) if bias is None else self._call(logits, bias)

    @functools.cached_property
    def _call(self) -> Callable[..., tuple[mx.array, mx.array]]:
        return mx.compile(self._run)  # as FusedExperts: MLX replays what it has traced

    def _run(self, logits: mx.array, bias: mx.array | None = None) -> tuple[mx.array, mx.array]:
        rows, shape = logits.reshape(-1, self.experts), (*logits.shape[:-1], self.top_k)
        dtype = mx.float32 if self.wide and not self.cast else logits.dtype
        key = mx.float32 if self.wide or self.bias_in == "wide" else logits.dtype
        if bias is not None and not self.bias_in:
            key = result_type(key, bias.dtype)
        ids, scores = self._kernel(
            inputs=[rows] if bias is None else [rows, bias],
            template=[("T", logits.dtype), ("O", dtype), ("KEY", key), *self._constants],
            output_shapes=[shape, shape],
            output_dtypes=[mx.uint32, dtype],
            grid=(32, rows.shape[0], 1),
            threadgroup=(32, 1, 1),
        )
        return ids, scores

    @functools.cached_property
    def _kernel(self) -> Kernel:
        inputs = ["logits", *["correction"] * self.biased]
        return make_kernel(backend() or "", "route", inputs, ["ids", "scores"])

    @functools.cached_property
    def _constants(self) -> list[tuple[str, int]]:
        numbers = self.eps or 0.0, self.least or 0.0, 1.0 if self.scale is None else self.scale
        eps, least, scale = struct.unpack("3i", struct.pack("3f", *numbers))  # their bits
        constants = {
            "E": self.experts, "TOP_K": self.top_k, "BY_LOGITS": self.by_logits,
            "NORM": self.norm, "LAST": self.last, "SIGMOID": self.sigmoid, "BIASED": self.biased,
            "GROUPS": self.groups, "DROP": self.groups - self.kept, "NEVER": self.never,
            "WIDE": self.wide, "EPS": eps, "LEAST": least, "SCALE": scale,
            "SOFTPLUS": self.softplus, "GREEDY": self.greedy,
        }  # fmt: skip
        return [(name, int(n)) for name, n in constants.items()]
