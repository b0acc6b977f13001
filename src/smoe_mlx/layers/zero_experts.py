"""Blocks with zero experts (LongCat): routing may name numbers that are no experts.

mlx-lm's block rewrites such numbers to expert 0 with weight 0 before it calls the switch module,
which then cannot tell them from true ones and would read expert 0 for nothing.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .switch import StreamingSwitchGLU, StreamingSwitchMLP


def tell_true_routing(block: nn.Module, switch: StreamingSwitchGLU | StreamingSwitchMLP) -> None:
    """Let `switch` know what the block's router chose, if the block has zero experts."""
    if not getattr(block, "zero_expert_num", 0) or "router" not in block:
        return
    router = block.router
    switch.has_zero_experts = True

    class Telling(type(router)):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> Any:
            indices, weights = super().__call__(x)
            switch.expect(indices)
            return indices, weights

    router.__class__ = Telling
