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


ROUTING = re.compile(
    r"(?:^    (?P<p>\w+) = mx\.softmax\((?P<logits>\w+), axis=(?P<axis>-1|1), precise=True\)\n)?"
    r"^    k = self\.(?P<top_k>\w+)\n"
    r"    (?P<ids>\w+) = (?:"
    r"mx\.argpartition\((?P<last>\w+), kth=-k, axis=-1\)\[\.\.\., -k:\]\n"
    r"    (?P=ids) = mx\.stop_gradient\((?P=ids)\)\n"
    r"|mx\.stop_gradient\("
    r"mx\.argpartition\(-(?P<first>\w+), kth=k - 1, axis=-1\)\[\.\.\., :k\]\)\n)"
    r"    (?P<scores>\w+) = mx\.take_along_axis\((?P<of>\w+), (?P=ids), axis=-1\)\n"
    r"(?P<then>    (?P=scores) = mx\.softmax\((?P=scores), axis=-1, precise=True\)\n)?"
    r"(?:    if self\.(?P<norm>\w+):\n        (?P=scores) "
    r"(?:/=|= (?P=scores) /) (?:mx\.sum\((?P=scores), |(?P=scores)\.sum\()"
    r"axis=-1, keepdims=True\)\n)?",
    re.M,
)


class Routing(NamedTuple):
    """What a block chooses experts by: `FusedRouter`'s arguments, or attributes that hold them."""

    top_k: str
    norm: str | bool
    by_logits: bool
    last: bool

    def arguments(self, block: Any) -> tuple[int, bool, bool, bool]:
        """`FusedRouter`'s, but for the number of experts."""
        norm = bool(getattr(block, self.norm)) if isinstance(self.norm, str) else self.norm
        return getattr(block, self.top_k), self.by_logits, norm, self.last


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
    text, count = WEIGHTED.subn(
        lambda m: (
            f"    {m[5]}self.{m[2]}.weighted({m[3]}, {m[4]}, {m[6]}, cast={m[7] is not None})"
        ),
        ast.unparse(ast.parse(source)),
    )
    text, more = IN_STEPS.subn(r"    \5 = self.\2.weighted(x, \3, \4, cast=False)", text)
    if count + more != 1 or f"self.{switch}.weighted(" not in text:
        return None
    text, routing = _exchange_routing(text, switch)
    made: dict[str, Any] = {}
    exec(compile(text, f"<{kind.__module__}.{kind.__qualname__}>", "exec"), call.__globals__, made)
    named = {"__call__": made["__call__"], "__module__": kind.__module__}
    return Recognised(type(kind.__name__, (kind,), named), routing)


def _exchange_routing(text: str, switch: str) -> tuple[str, Routing | None]:
    """The text with a router in the place of its own statements, wherever the router can."""
    m = ROUTING.search(text)
    if m is None or (m["p"] is None) == (m["then"] is None) or (m["then"] and m["norm"]):
        return text, None  # softmax before or after the choice, and weights made 1 but once
    logits = m["logits"] or m["of"]
    used_again = re.search(rf"\b({logits}|{m['of']}|k)\b", text[m.end() :])
    if used_again or not m["of"] == (m["first"] or m["last"]) == (m["p"] or m["of"]):
        return text, None
    flat = f" and {logits}.ndim == 2" if m["axis"] == "1" else ""
    text = (
        f"{text[: m.start()]}    if self.{switch}.routes({logits}){flat}:\n"
        f"        {m['ids']}, {m['scores']} = self.{switch}.router({logits})\n    else:\n"
        f"{textwrap.indent(m[0], '    ')}{text[m.end() :]}"
    )
    norm = m["norm"] or m["then"] is not None
    return text, Routing(m["top_k"], norm, m["p"] is None, m["last"] is not None)
