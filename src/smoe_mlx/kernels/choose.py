"""Which layers use the kernels: what the user wants, what the machine can, what a self-test said.

Verdicts of self-tests are remembered in `kernels.json` in the user's cache folder, by machine,
versions, kernel text and geometry.
"""

import contextlib
import hashlib
import json
import math
import platform
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm

from ..device import names
from ..store.files import Known
from . import prompt_selftest
from .experts import FusedExperts, Geometry, Tiling, backend, kernel_text
from .prompt import ODD_BITS, PromptExperts, PromptTiling
from .prompt_selftest import TIMED_ROWS, PromptVerdict
from .route import FusedRouter
from .selftest import (
    LEAST_SPEEDUP,
    TIMED_TOKENS,
    Experts,
    Verdict,
    router_fault,
    self_test,
    time_router,
    try_launch,
)

KERNELS = ("auto", "stock", "fused")


class KernelChooser:
    """Gives each layer of one model the kernels, or not.

    Args:
        kernels: one of `KERNELS`.

    Attributes:
        fused: layers that use them, of `layers`.
        reasons: why others do not, and what the self-tests found.
    """

    def __init__(self, kernels: str):
        self.kernels = kernels
        self.fused = self.layers = 0
        self.reasons: list[str] = []
        self._chosen: dict[tuple[Geometry, bool, int], FusedExperts | None] = {}
        self._routers: dict[FusedRouter, FusedRouter | None] = {}

    def choose(
        self, geometry: Geometry | str, stock: Experts, activation: nn.Module, weighted: bool,
        added: int = 0,
    ) -> FusedExperts | None:  # fmt: skip
        """The kernels for a layer, or None: mlx-lm's operations.

        Args:
            geometry: from `eligible`.
            stock: mlx-lm's operations, to compare with.
            weighted: the block around leaves the weighted sum to them.
            added: how many arrays `Weights.shared` makes then.
        """
        self.layers += 1
        if self.kernels == "stock":
            return None
        if backend() is None:
            self._say("no GPU", warn=self.kernels == "fused")
            return None
        if isinstance(geometry, str):
            self._say(geometry, warn=self.kernels == "fused")
            return None
        key = geometry, weighted, added
        if key not in self._chosen:
            self._chosen[key] = self._decide(geometry, stock, activation, weighted, added)
        chosen = self._chosen[key]
        self.fused += chosen is not None
        return chosen

    def _decide(
        self, geometry: Geometry, stock: Experts, activation: nn.Module, weighted: bool, added: int
    ) -> FusedExperts | None:
        fused = FusedExperts(geometry)
        verdict = self._tested(
            str(geometry),
            lambda: _key(geometry, weighted, added),
            lambda: self_test(fused, stock, activation, weighted, added),
            lambda: try_launch(fused, added),
        )
        if verdict is None:
            return None
        if self.kernels == "auto":
            fused.max_tokens = verdict.max_tokens
        self._say(f"{geometry}: {verdict}, used up to {fused.max_tokens}")
        fused.prompt = self._decide_prompt(geometry, stock, activation)
        return fused if fused.max_tokens or fused.prompt else None

    def _decide_prompt(
        self, geometry: Geometry, stock: Experts, activation: nn.Module
    ) -> PromptExperts | None:
        """The kernels for many rows, from as many on as they are faster for."""
        prompt, what = PromptExperts(geometry), f"{geometry}, prompts"
        if not prompt.takes(geometry):
            self._say(f"{what}: matrix products are of 16-bit numbers")
            return None
        verdict = self._tested(
            what,
            lambda: _prompt_key(geometry),
            lambda: prompt_selftest.self_test(prompt, stock, activation),
            lambda: prompt_selftest.try_launch(prompt),
        )
        if verdict is None:
            return None
        least = verdict.min_rows if isinstance(verdict, PromptVerdict) else None
        self._say(f"{what}: {verdict}, " + (f"used from {least} on" if least else "not used"))
        prompt.min_rows = least or 0
        return prompt if least else None

    def _tested(
        self,
        what: str,
        key_of: Callable[[], str],
        test: Callable[[], Verdict],
        launch: Callable[[], None],
    ) -> Verdict | None:
        """What a self-test says now, or said on this machine before; None: `what` is not used."""
        try:
            key = key_of()
            verdict = VERDICTS.entries().get(key)
            if verdict is None:
                verdict = test()
                with contextlib.suppress(OSError):  # then it is found again next time
                    VERDICTS.add(key, verdict)
            elif not verdict.fault:
                launch()
        except Exception as e:  # whatever MLX, a driver or a compiler raises
            self._say(f"{what}: {str(e).strip() or type(e).__name__:.300}", warn=True)
            return None
        finally:
            mx.clear_cache()
        if verdict.fault:
            self._say(f"{what}: {verdict.fault}", warn=True)
            return None
        return verdict

    def choose_router(self, router: FusedRouter) -> FusedRouter | None:
        """The kernel for a block's routing, or None; asked for where experts use the kernels."""
        if router not in self._routers:
            # (A new one: that of another model has a kernel already.)
            self._routers[router] = self._decide_router(replace(router))
        return self._routers[router]

    def _decide_router(self, router: FusedRouter) -> FusedRouter | None:
        what = f"router, {router}"
        if not router.fits(mx.zeros((1, router.experts))):
            return None
        try:
            fault = router_fault(router)
            speedup = 0.0 if fault else time_router(router)
        except Exception as e:  # as above
            fault = f"{str(e).strip() or type(e).__name__:.300}"
        if fault:
            self._say(f"{what}: {fault}", warn=True)
            return None
        self._say(f"{what}: right, speed {speedup:.2f}x")
        return router if self.kernels == "fused" or speedup >= LEAST_SPEEDUP else None

    def _say(self, reason: str, warn: bool = False) -> None:
        if reason in self.reasons:
            return
        self.reasons.append(reason)
        if warn:
            warnings.warn(
                f"The expert kernels are not used: {reason}. mlx-lm's own operations compute "
                "these layers.",
                stacklevel=2,
            )

    def __str__(self) -> str:
        if self.kernels == "stock":
            return "mlx-lm's operations"
        what = f"fused in {self.fused} of {self.layers} layers"
        return "; ".join([what if self.fused else "mlx-lm's operations", *self.reasons])


# ---- verdicts, remembered ------------------------------------------------------------------------


def _key(geometry: Geometry, weighted: bool, added: int = 0) -> str:
    """All that a verdict depends on, in a hash."""
    bodies = (("expert", geometry.activation), ("expert", "u"), ("sum", ""))
    texts = [kernel_text(backend() or "", body, (), a)["name"] for body, a in bodies]
    versions = [module.__version__ for module in (mx, mlx_lm)]
    parts: list[Any] = [*versions, platform.platform(), names(), texts, weighted, added, Tiling()]
    parts.append({**vars(geometry), "dtype": str(geometry.dtype)})
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _prompt_key(geometry: Geometry) -> str:
    """The same of a verdict on the kernels for prompts."""
    activations = (geometry.activation, "u")
    texts = [kernel_text(backend() or "", "prompt", (), a)["name"] for a in activations]
    parts = [_key(geometry, False), texts, PromptTiling(), ODD_BITS]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _verdict(entry: dict[str, Any]) -> Verdict:
    fault, speedup = entry["fault"], {int(n): s for n, s in entry["speedup"].items()}
    numbers = [entry["error"], entry["stock_error"], *speedup.values()]
    # (NaN is an error that a kernel may well have, with a fault.)
    if not isinstance(fault, str) or not all(isinstance(x, float) for x in numbers):
        raise ValueError("not a verdict")
    kinds: dict[frozenset[int], type[Verdict]] = {
        frozenset(TIMED_TOKENS): Verdict,
        frozenset(TIMED_ROWS): PromptVerdict,
    }
    kind = kinds.get(frozenset(speedup))
    if not fault and not (kind and all(math.isfinite(x) and x > 0 for x in numbers)):
        raise ValueError("not a verdict")
    return (kind or Verdict)(fault, entry["error"], entry["stock_error"], speedup)


VERDICTS = Known("kernels", 1, _verdict)
