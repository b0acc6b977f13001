"""What a program does to arrays, found by running it on symbols.

A `Symbol` is an array that is not there. Every operation on it gives another one, whose text says
in Python what was done. So two programs do the same if they end in the same text, however they
word it; what they decide by plain numbers (`if n_group > 1`) is decided as always. What would need
an array's values, or its shape, raises TypeError.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Symbol:
    """An array, or what is known of one: `text` is how it is computed."""

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text

    @property
    def dtype(self) -> Any:
        """float32 where that is sure."""
        of_float32 = self.text.startswith(("mx.sigmoid(", "mx.softmax("))
        of_float32 = of_float32 and self.text.endswith(".astype(mx.float32))")
        return mx.float32 if of_float32 else Symbol(f"{self}.dtype")

    def __getattr__(self, name: str) -> Any:
        if name in ("T", "shape", "ndim", "size"):
            return Symbol(f"{self}.{name}")
        if not hasattr(mx.array, name) or name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **options: Symbol(f"{self}.{name}({_arguments(args, options)})")

    def __getitem__(self, key: Any) -> Any:
        if self.text.endswith(".shape") and key in (slice(1), slice(2), slice(3)):
            return tuple(Symbol(f"{self}[{i}]") for i in range(key.stop))  # to be unpacked
        parts = key if isinstance(key, tuple) else (key,)
        return Symbol(f"{self}[{', '.join(_index(part) for part in parts)}]")

    def __neg__(self) -> "Symbol":
        return Symbol(f"(-{self})")

    def __bool__(self) -> bool:
        raise TypeError("this depends on what is in an array")

    def __eq__(self, other: object) -> Any:
        raise TypeError("this depends on an array")

    __hash__ = None  # type: ignore[assignment]
    __iter__ = None


def _operator(sign: str, swapped: bool = False) -> Callable[[Symbol, Any], Symbol]:
    def compute(a: Symbol, b: Any) -> Symbol:
        left, right = (b, a) if swapped else (a, b)
        return Symbol(f"({_text(left)} {sign} {_text(right)})")

    return compute


for _name, _sign in {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "matmul": "@"}.items():
    setattr(Symbol, f"__{_name}__", _operator(_sign))
    setattr(Symbol, f"__r{_name}__", _operator(_sign, swapped=True))


def _text(value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return f"mx.{str(value).rpartition('.')[2]}"
    if isinstance(value, tuple):
        return f"({', '.join(_text(v) for v in value)}{',' * (len(value) == 1)})"
    if not isinstance(value, (Symbol, bool, int, float, str, types.NoneType)):
        raise TypeError(f"{type(value).__name__} is not looked into")
    return str(value) if isinstance(value, Symbol) else repr(value)


def _arguments(args: tuple[Any, ...], options: dict[str, Any]) -> str:
    named = [f"{name}={_text(value)}" for name, value in sorted(options.items())]
    return ", ".join([*map(_text, args), *named])


def _index(part: Any) -> str:
    if isinstance(part, slice) and part.step is None:
        return ":".join("" if n is None else _text(n) for n in (part.start, part.stop))
    return "..." if part is ... else _text(part)


def _expand_dims(x: Symbol, axis: Any) -> Symbol:
    return x[..., None] if axis == -1 else Symbol(f"mx.expand_dims({x}, {_text(axis)})")


class _Operations:
    """In the place of `mlx.core`."""

    def __getattr__(self, name: str) -> Any:
        real = getattr(mx, name)
        if not callable(real) or isinstance(real, mx.Dtype):
            return real
        if name == "stop_gradient":
            return lambda x: x
        if name == "array":  # of one number, that any type holds
            return lambda value, dtype=None: Symbol(f"mx.array({_text(value + 0.0)})")
        if name == "expand_dims":
            return _expand_dims
        if name in ("sum", "flatten", "unflatten"):  # as its method
            return lambda x, *args, **options: Symbol(f"{x}.{name}({_arguments(args, options)})")
        return lambda *args, **options: Symbol(f"mx.{name}({_arguments(args, options)})")


ACTIVATIONS = {nn.Softmax: "mx.softmax({}, axis=-1)", nn.Sigmoid: "mx.sigmoid({})"}


class ModuleSymbol:
    """A module: its arrays are symbols, its modules are called on symbols, all else is itself."""

    def __init__(self, module: nn.Module, text: str):
        self._module, self._text = module, text

    def __getattr__(self, name: str) -> Any:
        value, text = getattr(self._module, name), f"{self._text}.{name}"
        if isinstance(value, mx.array):
            return Symbol(text)
        if isinstance(value, types.MethodType):
            return functools.partial(on_symbols(value.__func__), self)
        return ModuleSymbol(value, text) if isinstance(value, nn.Module) else value

    def __call__(self, *args: Any) -> Any:
        kind: Any = type(self._module)
        if kind in ACTIVATIONS:
            return Symbol(ACTIVATIONS[kind].format(*args))
        if not kind.__module__.startswith("mlx."):
            try:
                return on_symbols(kind.__call__)(self, *args)
            except Exception:  # then it is not looked into
                pass
        return Symbol(f"{self._text}({_arguments(args, {})})")


def on_symbols(function: Any) -> Callable[..., Any]:
    """The same function, of symbols."""
    return _with_names(function, symbol_names(function.__globals__))


def symbol_names(names: dict[str, Any]) -> dict[str, Any]:
    """A module's global names, for its code to run on symbols."""
    made = {**names, "mx": _Operations()}
    if names.get("nn") is nn:
        functions = {"softplus": lambda x: Symbol(f"nn.softplus({x})")}
        made["nn"] = types.SimpleNamespace(**{**vars(nn), **functions})
    for name, value in names.items():
        # (What mx.compile makes of a function has its code too.)
        if hasattr(value, "__code__") and getattr(value, "__globals__", None) is names:
            made[name] = _with_names(value, made)
    return made


def _with_names(function: Any, names: dict[str, Any]) -> Callable[..., Any]:
    return types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
