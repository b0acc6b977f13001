"""Lookahead: which experts will a coming layer want? Its own gate, asked too early, says.

The input of one MoE block is the residual after attention, normalised. The next block's input
differs from it by what this block, and the attention in between, will add, and by the weights of
its norm. So the next block's own router is asked about this block's input, rescaled by the ratio of
the two norms' weights. (Seeds: S-MoE's router lookahead; Pre-gated MoE, arXiv 2308.12066, trains a
gate for it.) What it answers is a bet: nothing is ever computed with it.

Knows where mlx-lm's models keep routers and norms, by name. Where it finds none, or none that takes
this input, there is no lookahead.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

ROUTERS = ("gate", "router")
# The norm before the MoE block; the first that a layer has.
NORMS = (
    "pre_mlp_layernorm", "pre_ff_layernorm", "ffn_norm", "post_attention_layernorm", "norm",
)  # fmt: skip

Predictor = Callable[[mx.array, int], mx.array]  # x [..., D], k -> experts [..., at least k]


def look_up(model: nn.Module, path: str) -> Any:
    """The module at `path` ("model.layers.3.mlp")."""
    found: Any = model
    for key in path.split(".") if path else ():
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


def make_predictor(
    model: nn.Module, here: str, there: str, dims: int, experts: int, extra: int = 0
) -> Predictor | None:
    """Predict the k likeliest experts of the switch at `there` from the input of that at `here`.

    Args:
        here, there: paths of switch modules; the same path for more of a layer's own ranks.
        dims, experts: D and E of `there`.
        extra: ranks beyond the k-th.
    """
    block = look_up(model, _parent(there))
    if getattr(block, "zero_expert_num", 0):  # its router tells the switch of every call
        return None
    router = next((block[name] for name in ROUTERS if isinstance(block.get(name), nn.Module)), None)
    if router is None:
        return None
    norms = (_norm_before(model, here), _norm_before(model, there))
    scale: mx.array | None = None

    def predict(x: mx.array, top_k: int) -> mx.array:
        nonlocal scale
        if here != there and None not in norms:
            if scale is None:
                before, after = (norm.weight.astype(mx.float32) for norm in norms)  # type: ignore[union-attr]
                ratio = mx.where(mx.abs(before) < 1e-6, 1.0, after / before)
                ratio = mx.clip(ratio, -1e3, 1e3).astype(x.dtype)
                mx.eval(ratio)  # no other thread could do it
                scale = ratio
            x = x * scale
        out = router(x)
        if isinstance(out, mx.array):  # scores of all experts
            count = min(top_k + extra, experts)
            return mx.argpartition(out, kth=-count, axis=-1)[..., -count:]
        ids: mx.array = next(a for a in out if mx.issubdtype(a.dtype, mx.integer))
        return ids

    try:  # builds a graph, and evaluates nothing
        out = router(mx.zeros((1, 1, dims)))
        parts = (out,) if isinstance(out, mx.array) else out
        ints = [a for a in parts if mx.issubdtype(a.dtype, mx.integer)]
        scores = isinstance(out, mx.array) and out.shape[-1] == experts
        fits = scores or (bool(ints) and here != there)
    except Exception:  # not a router of this input
        return None
    return predict if fits else None


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _norm_before(model: nn.Module, switch: str) -> nn.RMSNorm | None:
    """The norm whose output goes into the block of a switch."""
    path = _parent(switch)
    while path and not path.rpartition(".")[2].isdigit():
        path = _parent(path)
    if not path:
        return None
    layer = look_up(model, path)
    norm = next((layer[name] for name in NORMS if name in layer), None)
    return norm if type(norm) is nn.RMSNorm else None
