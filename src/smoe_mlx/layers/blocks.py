"""MoE blocks that leave the weighted sum, and the routing, to kernels.

Around their experts most of mlx-lm's blocks do the same: scores, top-k, weights, and in the end
`y = (y * scores[..., None]).sum(axis=-2)`. The sum is recognised in the block's source, the routing
by what the statements before do to symbols, however they say it (symbols.py). The block's class is
replaced by one whose `__call__` is the same text with those statements exchanged; gates, shared
experts and all else stay mlx-lm's own. A block that does something else is left as it is.
"""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import mlx.nn as nn

from ..kernels.route import FusedRouter
from ..kernels.selftest import route_operations
from .symbols import ModuleSymbol, Symbol, on_symbols, symbol_names

# Sources are compared as `ast.unparse` writes them.
WEIGHTED = re.compile(
    r"^    (\w+) = self\.(\w+)\((\w+), (\w+)\)\n"
    r"    (\1 = |return )\(\1 \* (\w+)\[\.\.\., None\](\.astype\(mx\.float32\))?\)"
    r"\.sum\(axis=-2\)(\.astype\(\1\.dtype\))?"
    r"(?=\.|\n|$)",
    re.M,
)
IN_STEPS = re.compile(  # gpt-oss
    r"^    (x) = self\.(\w+)\(x, (\w+)\)\n"
    r"    x = x \* mx\.expand_dims\((\w+), axis=-1\)\n"
    r"    (\w+) = x\.sum\(axis=-2\)$(?!(?s:.)*\bx\b)",
    re.M,
)
BIAS = r"self\.[\w.]+(?:\.astype\(mx\.float32\))?"  # an array of the block's


class Recognised(NamedTuple):
    """A block's class, changed, and the text of its `__call__`."""

    kind: type
    text: str


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
            f"    {m[5]}self.{m[2]}.weighted("
            f"{m[3]}, {m[4]}, {m[6]}{m[7] or ''}, cast={m[8] is not None})"
        ),
        ast.unparse(ast.parse(source)),
    )
    text, more = IN_STEPS.subn(r"    \5 = self.\2.weighted(x, \3, \4, cast=False)", text)
    if count + more != 1 or f"self.{switch}.weighted(" not in text:
        return None
    return _with_text(kind, text)


def _with_text(kind: type, text: str) -> Recognised:
    made: dict[str, Any] = {}
    call: Any = kind.__call__
    exec(compile(text, f"<{kind.__module__}.{kind.__qualname__}>", "exec"), call.__globals__, made)
    named = {"__call__": made["__call__"], "__module__": kind.__module__}
    return Recognised(type(kind.__name__, (kind,), named), text)


class Routing(NamedTuple):
    """How a block chooses experts, and the block's class with a router in its place."""

    router: FusedRouter
    kind: type


def recognise_routing(
    block: nn.Module, recognised: Recognised, switch: str, experts: int
) -> Routing | None:
    """The router that computes what a block does to choose experts; None if there is none.

    Args:
        recognised, switch: of the block's class, as above; experts: E.
    """
    (function,) = ast.parse(recognised.text).body
    assert isinstance(function, ast.FunctionDef)
    body, names = function.body, symbol_names(type(block).__call__.__globals__)
    m = re.search(rf"self\.{switch}\.weighted\(\w+, (\w+), (\w+)[.,]", recognised.text)
    assert m is not None
    ids, scores = m.groups()
    values: dict[str, Any] = {a.arg: Symbol(a.arg) for a in function.args.args}
    values["self"] = ModuleSymbol(block, "self")
    before = [dict(values)]  # each statement
    found, end = None, 0
    for i, statement in enumerate(body):
        if f"self.{switch}.weighted(" in ast.unparse(statement):
            break
        try:
            exec(compile(ast.Module([statement], []), "<block>", "exec"), names, values)
        except Exception:  # then it is not looked into
            made = _names(statement, ast.Store)
            returns = any(isinstance(node, ast.Return) for node in ast.walk(statement))
            if made & values.keys() or returns:
                return None
            values |= {name: Symbol(name) for name in made}
        before.append(dict(values))
        if isinstance(values.get(ids), Symbol) and isinstance(values.get(scores), Symbol):
            this = _find_router(str(values[ids]), str(values[scores]), experts)
            if this not in (None, found):
                found, end = this, i + 1
    if found is None or (found.bias and _shape_of(block, found.bias) != (experts,)):
        return None
    # Statements before, that serve nothing else, are not needed either.
    needed = _names(ast.parse(found.logits), ast.Load)
    kept = needed.union(*(_names(s, ast.Load) for s in body[end:])) - {ids, scores}
    start = end
    while start and (made := _names(body[start - 1], ast.Store)) and not made & kept:
        start -= 1
    if any(str(before[start].get(name, name)) != name for name in needed - {"self"}):
        return None  # by then it is something else
    (branch,) = ast.parse(
        f"if self.{switch}.routes((_logits := {found.logits})){found.only_if}:\n"
        f"    {ids}, {scores} = self.{switch}.router(_logits{found.bias and ', '}{found.bias})\n"
    ).body
    assert isinstance(branch, ast.If)
    branch.orelse = body[start:end]
    function.body = [*body[:start], branch, *body[end:]]
    return Routing(found.router, _with_text(type(block), ast.unparse(function)).kind)


class _Found(NamedTuple):
    """A router, and texts: of its logits, of its bias or "", and of a condition."""

    router: FusedRouter
    logits: str
    bias: str
    only_if: str


@functools.cache
def _find_router(ids: str, weights: str, experts: int) -> _Found | None:
    """The router whose operations on symbols end in these texts."""
    texts = tuple(re.sub(r"\baxis=1\b", "axis=-1", text) for text in (ids, weights))
    only_if = "" if texts == (ids, weights) else " and _logits.ndim == 2"
    for router in _routers_like(texts[0], texts[1], experts):
        operations = on_symbols(route_operations(router))
        # What are its logits and its bias? Where that is guessed wrong, the texts differ.
        pattern = re.escape(str(operations(Symbol("LOGITS"), Symbol("BIAS"))[0]))
        pattern = pattern.replace("LOGITS", "(?P<logits>.+?)", 1).replace("LOGITS", ".+?")
        pattern = pattern.replace("BIAS", f"(?P<bias>{BIAS})", 1).replace("BIAS", BIAS)
        m = re.fullmatch(pattern, texts[0])
        if m is None or (only_if and "axis" in m["logits"]):
            continue
        logits, bias = m["logits"], m.groupdict().get("bias", "")
        if texts == tuple(map(str, operations(Symbol(logits), Symbol(bias)))):
            return _Found(router, logits, bias, only_if)
    return None


def _routers_like(ids: str, weights: str, experts: int) -> Iterator[FusedRouter]:
    """Those that may be meant: the numbers are in the texts."""

    def number(pattern: str, text: str) -> Any:
        m = re.search(pattern, text)
        return ast.literal_eval(m[1]) if m else None

    first, last = (number(p, ids) for p in (r"\[\.\.\., :(\d+)\]$", r"\[\.\.\., -(\d+):\]$"))
    groups = number(r"shape=\((\d+), -1\)", ids) or 1
    dropped = number(r"\[\.\.\., :(\d+), :\]", ids) or 0
    sigmoid = "mx.sigmoid(" in ids
    by_logits = not sigmoid and "mx.softmax(" not in ids
    for norm, biased, wide, cast in product((True, False), repeat=4) if first or last else ():
        if (norm or not by_logits) and not (biased and by_logits) and not (cast and not wide):
            yield FusedRouter(
                experts, first or last, by_logits, norm, last is not None, sigmoid, biased,
                groups, groups - dropped, "array(-inf)" in ids, wide, cast,
                number(r"keepdims=True\) \+ ([\d.e-]+)\)", weights),
                number(r" \* ([\d.e+-]+)\)(?:\.astype\(.*\))?$", weights),
            )  # fmt: skip


def _shape_of(block: nn.Module, bias: str) -> tuple[int, ...]:
    path = bias.removesuffix(".astype(mx.float32)").split(".")[1:]
    array: Any = functools.reduce(getattr, path, block)
    return tuple(array.shape)


def _names(node: ast.AST, context: type) -> set[str]:
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in names if isinstance(n.ctx, context)}
