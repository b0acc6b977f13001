"""MoE blocks that leave the weighted sum, and the routing, to kernels.

Around their experts most of mlx-lm's blocks do the same: scores, top-k, weights, and in the end
`y = (y * scores[..., None]).sum(axis=-2)`, and often `y = y + self.shared_experts(x)`. Sum and
routing are recognised by what the block's statements do to symbols, however they say it
(symbols.py). The block's class is replaced by one whose `__call__` is the same text with those
statements exchanged; gates, shared experts and all else stay mlx-lm's own. A block that does
something else is left as it is.
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

# What the weighted sum of a block's experts does, on symbols.
SUM = re.compile(
    r"\((?:EXPERTS(?P<wide>\.astype\(mx\.float32\))? \* (?P<scores>\w+)\[\.\.\., None\]"
    r"(?P<wide_scores>\.astype\(mx\.float32\))?|(?P<first>\w+)\[\.\.\., None\] \* EXPERTS)\)"
    r"\.sum\((?:axis=)?(?P<axis>-2|1)\)(?P<cast>\.astype\(EXPERTS\.dtype\))?"
)
# What says the same where a condition is met.
SAME_IF = (
    (r"\baxis=1\b", "axis=-1", "_logits.ndim == 2"),
    (r"\.reshape\(\(1, 1, -1\)\)", "", "_logits.ndim == 3"),
    (r"\.reshape\((\w+)\.shape\[0\], \1\.shape\[1\], (\d+), -1\)",
     r".unflatten(axis=-1, shape=(\2, -1))", r"_logits.shape[:-1] == \1.shape[:2]"),
    (r"\.reshape\((\w+)\.shape\[0\], \1\.shape\[1\], -1\)",
     ".flatten(-2, -1)", r"_logits.shape[:-1] == \1.shape[:2]"),
)  # fmt: skip
BIAS = r"self\.[\w.]+(?:\.astype\(mx\.float32\))?"  # an array of the block's


class Recognised(NamedTuple):
    """A block's class, changed, and the text of its `__call__`. added: how many arrays it has added
    to the sum (`Weights.shared`)."""

    kind: type
    text: str
    added: int


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
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    added = _leave_sum(function, switch, symbol_names(call.__globals__))
    if added is None:
        return None
    text = ast.unparse(function)
    return Recognised(_with_text(kind, text), text, added)


def _leave_sum(function: ast.FunctionDef, switch: str, names: dict[str, Any]) -> int | None:
    """Exchange the statements that call the experts and add up their outputs, and those that add
    shared experts.

    Returns how many arrays are added to the sum; None if there is no such sum.
    """
    body, call = function.body, f"self.{switch}("
    if ast.unparse(function).count(call) != 1:
        return None
    start = next(i for i, s in enumerate(body) if call in ast.unparse(s))
    match body[start]:
        case ast.Assign(
            [ast.Name(experts)],
            ast.Call(ast.Attribute(ast.Name("self")), [ast.Name(x), ast.Name(ids)], []) as called,
        ):
            pass
        case _:
            return None
    local = {a.arg for a in function.args.args} | _names(function, ast.Store)
    values: dict[str, Any] = {name: Symbol(name) for name in local}

    def evaluate(node: ast.AST) -> str:
        try:
            code = compile(ast.Expression(node), "<block>", "eval")  # type: ignore[arg-type]
            return str(eval(code, names, values))
        except Exception:  # then it is not looked into
            return ""

    for i, statement in enumerate(body[:start]):  # a name for scores[..., None]
        match statement:
            case ast.Assign([ast.Name(name)], value):
                m = re.fullmatch(r"(\w+)\[\.\.\., None\]", evaluate(value))
                if m and not any({name, m[1]} & _names(s, ast.Store) for s in body[i + 1 : start]):
                    values[name] = Symbol(m[0])
    values[experts] = Symbol("EXPERTS")
    steps: dict[str, ast.expr] = {experts: called}  # names that are made on the way
    for i, statement in enumerate(body[start + 1 :], start + 1):
        if not isinstance(statement, (ast.Assign, ast.Return)) or statement.value is None:
            return None
        found = ((node, SUM.fullmatch(evaluate(node))) for node in ast.walk(statement.value))
        node, m = next((pair for pair in found if pair[1]), (None, None))  # the outermost
        if node is not None and m is not None:
            scores = m["scores"] or m["first"]
            scores += ".astype(mx.float32)" if m["wide"] or m["wide_scores"] else ""
            text = f"self.{switch}.weighted({x}, {ids}, {scores}, cast={m['cast'] is not None})"
            if m["axis"] == "1":  # the same for rows of tokens
                text += f" if {x}.ndim == 2 else {ast.unparse(_filled(node, steps))}"
            changed = _exchanged(statement, node, _expression(text))
            unmade = steps.keys() - _names(changed, ast.Store)
            if any(_names(s, ast.Load) & unmade for s in body[i + 1 :]):
                return None
            if _names(changed, ast.Load) & (steps.keys() - {x}):
                return None
            body[start : i + 1] = [changed]
            return _leave_shared(body, start, {x, ids, *_names(_expression(scores), ast.Load)})
        match statement:
            case ast.Assign([ast.Name(name)], value) if "EXPERTS" in evaluate(value):
                values[name], steps[name] = Symbol(evaluate(value)), _filled(value, steps)
            case _:
                return None
    return None


def _leave_shared(body: list[ast.stmt], start: int, used: set[str]) -> int:
    """Have what is added to the sum next (`if ...: y = y + shared(x)`) added with it, as the
    product of so many arrays; 0 if there is nothing of the kind.

    Args:
        start: the statement with the sum; used: names in it.
    """
    match body[start : start + 2]:
        case [
            ast.Assign([ast.Name(total)], ast.Call(ast.Attribute(attr="weighted")) as weighted),
            following,
        ]:
            pass
        case _:
            return 0
    test, steps, rest = None, body[start + 1 :], []
    if isinstance(following, ast.If) and not following.orelse:
        test, steps, rest = following.test, following.body, body[start + 2 :]
    inner: dict[str, ast.expr] = {}  # names that are made on the way
    for step in steps:
        match step:
            case ast.Assign([ast.Name(name)], ast.expr() as value):
                pass
            case ast.Return(ast.expr() as value):
                name = ""
            case _:
                return 0
        term = _other_of_sum(value, total)
        if term is not None:
            break
        if not name or name in {total, *used} or total in _names(value, ast.Load):
            return 0
        inner[name] = _filled(value, inner)
    else:
        return 0
    last = steps.index(step)
    rest += steps[last + 1 :]
    unmade = inner.keys() | ({total} - {name})
    if any(_names(s, ast.Load) & unmade for s in rest):
        return 0
    if test is not None:
        of_this = _names(test, ast.Load) & {total, *inner}
        if of_this or name != total or step is not steps[-1]:
            return 0
    match _filled(term, inner):
        case ast.BinOp(
            ast.Call(ast.Attribute(ast.Name("mx"), "sigmoid")) as factor, ast.Mult(), term
        ):
            added, shared = 2, f"lambda: ({ast.unparse(term)}, {ast.unparse(factor)})"
        case term:
            added, shared = 1, f"lambda: ({ast.unparse(term)},)"
    if test is not None:
        shared = f"({shared}) if {ast.unparse(test)} else None"
    weighted.keywords.append(ast.keyword("shared", _expression(shared)))
    if test is None:
        body[start : start + last + 2] = [_exchanged(step, value, weighted)]
    else:
        del body[start + 1]
    return added


def _other_of_sum(value: ast.expr, total: str) -> ast.expr | None:
    """What is added to `total`, if that is what the expression does."""
    match value:
        case ast.BinOp(ast.Name(name), ast.Add(), other) if name == total:
            pass
        case ast.BinOp(other, ast.Add(), ast.Name(name)) if name == total:
            pass
        case _:
            return None
    return None if total in _names(other, ast.Load) else other


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


class _Exchange(ast.NodeTransformer):
    def __init__(self, exchange: Callable[[ast.AST], ast.expr | None]):
        self._exchange = exchange

    def visit(self, node: ast.AST) -> ast.AST:
        return self._exchange(node) or self.generic_visit(node)


def _exchanged(statement: ast.stmt, old: ast.AST, new: ast.expr) -> ast.stmt:
    """The statement with another expression in the place of one in it."""
    exchange = _Exchange(lambda node: new if node is old else None)
    changed: Any = exchange.visit(statement)
    return ast.fix_missing_locations(changed)  # type: ignore[no-any-return]


def _filled(node: ast.AST, values: dict[str, ast.expr]) -> ast.expr:
    """The expression with names replaced by what they stand for."""
    exchange = _Exchange(lambda n: values.get(n.id) if isinstance(n, ast.Name) else None)
    filled: Any = exchange.visit(_expression(ast.unparse(node)))
    return filled  # type: ignore[no-any-return]


def _with_text(kind: type, text: str) -> type:
    made: dict[str, Any] = {}
    call: Any = kind.__call__
    exec(compile(text, f"<{kind.__module__}.{kind.__qualname__}>", "exec"), call.__globals__, made)
    named = {"__call__": made["__call__"], "__module__": kind.__module__}
    return type(kind.__name__, (kind,), named)


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
    needed = _names(ast.parse(f"{found.logits}{found.only_if}"), ast.Load) - {"_logits"}
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
    return Routing(found.router, _with_text(type(block), ast.unparse(function)))


class _Found(NamedTuple):
    """A router, and texts: of its logits, of its bias or "", and of a condition."""

    router: FusedRouter
    logits: str
    bias: str
    only_if: str


@functools.cache
def _find_router(ids: str, weights: str, experts: int) -> _Found | None:
    """The router whose operations on symbols end in these texts."""
    texts, only_if = (ids, weights), ""
    for pattern, same, condition in SAME_IF:
        m = re.search(pattern, ids)
        if m is not None:
            texts = re.sub(pattern, same, texts[0]), re.sub(pattern, same, texts[1])
            only_if += f" and {m.expand(condition)}"
    for router in _routers_like(texts[0], texts[1], experts):
        operations = on_symbols(route_operations(router))
        # What are its logits and its bias? Where that is guessed wrong, the texts differ.
        pattern = re.escape(str(operations(Symbol("LOGITS"), Symbol("BIAS"))[0]))
        pattern = pattern.replace("LOGITS", "(?P<logits>.+?)", 1).replace("LOGITS", ".+?")
        pattern = pattern.replace("BIAS", f"(?P<bias>{BIAS})", 1).replace("BIAS", BIAS)
        m = re.fullmatch(pattern, texts[0])
        if m is None or m["logits"] not in ids:
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
    sigmoid, softplus = "mx.sigmoid(" in ids, "nn.softplus(" in ids
    by_logits = not sigmoid and not softplus and "mx.softmax(" not in ids
    greedy = ".max(axis=-1, keepdims=True)" in ids
    bias_in = "narrow" if ".dtype)" in ids else ""
    bias_in = "wide" if ".astype(mx.float32) + self." in ids else bias_in
    for norm, biased, wide, cast in product((True, False), repeat=4) if first or last else ():
        if (norm or not by_logits) and not (biased and by_logits) and not (cast and not wide):
            yield FusedRouter(
                experts, first or last, by_logits, norm, last is not None, sigmoid, biased,
                groups, groups - dropped, "array(-inf)" in ids, wide, cast,
                number(r"keepdims=True\) \+ ([\d.e-]+)\)", weights),
                number(r" \* ([\d.e+-]+)\)(?:\.astype\(.*\))?$", weights),
                softplus, bias_in if biased else "", greedy,
                number(r"keepdims=True\), ([\d.e-]+)\)\)", weights),
            )  # fmt: skip


def _shape_of(block: nn.Module, bias: str) -> tuple[int, ...]:
    path = bias.removesuffix(".astype(mx.float32)").split(".")[1:]
    array: Any = functools.reduce(getattr, path, block)
    return tuple(array.shape)


def _names(node: ast.AST, context: type) -> set[str]:
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in names if isinstance(n.ctx, context)}
