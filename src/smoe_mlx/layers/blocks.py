"""MoE blocks that leave the weighted sum, and the routing, to kernels.

Around their experts most of mlx-lm's blocks do the same: softmax, top-k, and in the end
`y = (y * scores[..., None]).sum(axis=-2)`. A block is recognised by its source. Its class is
replaced by one whose `__call__` is the same text with those statements exchanged; gates, shared
experts and all else stay mlx-lm's own. A block that says it in other words is left as it is.
"""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

# Sources are compared as `ast.unparse` writes them.
WEIGHTED = re.compile(
    r"^    (\w+) = self\.(\w+)\((\w+), (\w+)\)\n"
    r"    (\1 = |return )\(\1 \* (\w+)\[\.\.\., None\]\)\.sum\(axis=-2\)(\.astype\(\1\.dtype\))?"
    r"(?=\.|\n|$)",
    re.M,
)
IN_STEPS = re.compile(  # gpt-oss
    r"^    (x) = self\.(\w+)\(x, (\w+)\)\n"
    r"    x = x \* mx\.expand_dims\((\w+), axis=-1\)\n"
    r"    (\w+) = x\.sum\(axis=-2\)$(?!(?s:.)*\bx\b)",
    re.M,
)


class Routing(NamedTuple):
    """What a text chooses experts by: `FusedRouter`'s arguments, and what the block calls them."""

    text: str
    logits: str
    result: str
    top_k: str  # an attribute of the block
    by_logits: bool
    norm: str | bool  # an attribute, or always or never
    last: bool

    def arguments(self, block: Any) -> tuple[int, bool, bool, bool]:
        """`FusedRouter`'s, but for the number of experts."""
        norm = bool(getattr(block, self.norm)) if isinstance(self.norm, str) else self.norm
        return getattr(block, self.top_k), self.by_logits, norm, self.last


_FROM_THE_END = """
gates = mx.softmax(gates, axis=-1, precise=True)
k = self.top_k
inds = mx.argpartition(gates, kth=-k, axis=-1)[..., -k:]
inds = mx.stop_gradient(inds)
scores = mx.take_along_axis(gates, inds, axis=-1)
if self.norm_topk_prob:
"""
ROUTINGS = [
    Routing(  # qwen3_moe, mellum
        _FROM_THE_END + "    scores /= mx.sum(scores, axis=-1, keepdims=True)",
        "gates", "inds, scores", "top_k", False, "norm_topk_prob", True,
    ),
    Routing(  # qwen3_next, qwen3_5
        _FROM_THE_END + "    scores = scores / scores.sum(axis=-1, keepdims=True)",
        "gates", "inds, scores", "top_k", False, "norm_topk_prob", True,
    ),
    Routing(  # qwen2_moe
        """
gates = mx.softmax(gates, axis=-1, precise=True)
k = self.top_k
inds = mx.stop_gradient(mx.argpartition(-gates, kth=k - 1, axis=-1)[..., :k])
scores = mx.take_along_axis(gates, inds, axis=-1)""",
        "gates", "inds, scores", "top_k", False, False, False,
    ),
    Routing(  # olmoe
        """
routing_weights = mx.softmax(router_logits, axis=1, precise=True)
k = self.top_k
indices = mx.stop_gradient(mx.argpartition(-routing_weights, kth=k - 1, axis=-1)[..., :k])
scores = mx.take_along_axis(routing_weights, indices, axis=-1)
if self.norm_topk_prob:
    scores = scores / scores.sum(axis=-1, keepdims=True)""",
        "router_logits", "indices, scores", "top_k", False, "norm_topk_prob", False,
    ),
    Routing(  # mixtral, jamba
        """
k = self.num_experts_per_tok
inds = mx.stop_gradient(mx.argpartition(-gates, kth=k - 1, axis=-1)[..., :k])
scores = mx.take_along_axis(gates, inds, axis=-1)
scores = mx.softmax(scores, axis=-1, precise=True)""",
        "gates", "inds, scores", "num_experts_per_tok", True, True, False,
    ),
]  # fmt: skip


class Recognised(NamedTuple):
    """A block's class that can use kernels, and how it routes, if that can be done by one."""

    kind: type
    routing: Routing | None


@functools.cache
def recognise(kind: type, switch: str) -> Recognised | None:
    """The class to be used in the place of a block's; None if the block does something else.

    Args:
        switch: the attribute that holds the experts.
    """
    call: Callable[..., Any] = kind.__call__
    try:
        source = textwrap.dedent(inspect.getsource(call))
    except (OSError, TypeError):
        return None
    if not source.startswith("def __call__(") or call.__closure__:
        return None
    text, routing = ast.unparse(ast.parse(source)), None
    text, count = WEIGHTED.subn(
        lambda m: (
            f"    {m[5]}self.{m[2]}.weighted({m[3]}, {m[4]}, {m[6]}, cast={m[7] is not None})"
        ),
        text,
    )
    text, more = IN_STEPS.subn(r"    \5 = self.\2.weighted(x, \3, \4, cast=False)", text)
    if count + more != 1 or f"self.{switch}.weighted(" not in text:
        return None
    for candidate in ROUTINGS:
        old = textwrap.indent(candidate.text, "    ") + "\n"
        before, found, after = text.partition(old)
        if found and not re.search(rf"\b({candidate.logits}|k)\b", after):
            routing = candidate
            text = (
                f"{before}\n    if self.{switch}.routes({routing.logits}):\n"
                f"        {routing.result} = self.{switch}.router({routing.logits})\n    else:"
                f"{textwrap.indent(old, '    ')}{after}"
            )
            break
    made: dict[str, Any] = {}
    exec(compile(text, f"<{kind.__module__}.{kind.__qualname__}>", "exec"), call.__globals__, made)
    named = {"__call__": made["__call__"], "__module__": kind.__module__}
    return Recognised(type(kind.__name__, (kind,), named), routing)
