"""Routing traces: recorded from a streamed model, kept in a self-describing .npz file.

A trace is every call of every MoE layer, in order, with the expert numbers that the router chose,
and those that the lookahead had said it would. `replay.py` runs eviction policies over it.
"""

import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from types import TracebackType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from .errors import TraceError
from .layers.lookahead import Predictor
from .stats import streaming_of
from .store.files import replacing

VERSION = 1
MAX_HEADER_NBYTES = 1 << 20
MAX_ARRAY_NBYTES = 1 << 30
MAX_LAYERS, MAX_EXPERTS, MAX_TOKENS = 1 << 12, 1 << 20, 1 << 31
LISTS = ("num_experts", "top_k", "expert_nbytes", "banks")
LIMITS = (MAX_EXPERTS, MAX_EXPERTS, 1 << 50, MAX_LAYERS)
NUMBERS = ("prompt_tokens", "prompt_calls", "tokens")
MEMBERS = {"header.npy", "calls.npy", "ids.npy", "predicted.npy"}


@dataclass(frozen=True)
class Trace:
    """The routing of one run of a model.

    Attributes:
        model: its name.
        num_experts: E of each MoE layer.
        top_k: experts that a token has in each layer; 0 for a layer that was not called.
        expert_nbytes: bytes of one expert of each layer.
        banks: the slot bank of each layer; layers of one number share their slots.
        tokens: that passed the model, `prompt_tokens` of them as the prompt, in the first
            `prompt_calls` calls.
        calls: [calls, 2] int32, in order: layer, tokens n.
        ids: [sum of n * k] int32, the experts of all calls one after the other, a token's top-k
            side by side. Numbers from E on are no experts (models with zero experts).
        predicted: as `ids`, what the lookahead of the layer before said of each call; -1 where it
            said nothing (the first layer, calls of several tokens). None: there was no lookahead.
    """

    model: str
    num_experts: tuple[int, ...]
    top_k: tuple[int, ...]
    expert_nbytes: tuple[int, ...]
    banks: tuple[int, ...]
    tokens: int
    prompt_tokens: int
    prompt_calls: int
    calls: np.ndarray = field(repr=False)
    ids: np.ndarray = field(repr=False)
    predicted: np.ndarray | None = field(default=None, repr=False)

    @property
    def num_layers(self) -> int:
        return len(self.num_experts)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        """(layer, ids [n, k]) of each call, in order."""
        return self.by_call(self.ids)

    def by_call(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """(layer, numbers [n, k]) of each call, in order, of numbers that lie as `ids` do."""
        at = 0
        for layer, n in self.calls.tolist():
            k = self.top_k[layer]
            yield layer, numbers[at : at + n * k].reshape(n, k)
            at += n * k

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace; a file of this name is replaced when the new one is whole."""
        header = {"format": "smoe-mlx trace", "version": VERSION, "model": self.model}
        header |= {name: getattr(self, name) for name in NUMBERS}
        header |= {name: list(getattr(self, name)) for name in LISTS}
        arrays: dict[str, Any] = {
            "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
            "calls": self.calls.astype(np.int32),
            "ids": self.ids.astype(np.int32),
        }
        if self.predicted is not None:
            arrays["predicted"] = self.predicted.astype(np.int32)
        try:
            with replacing(path) as f:
                np.savez_compressed(f, **arrays)
        except OSError as e:
            raise TraceError(f"{path}: cannot be written ({e.strerror or e}).") from e


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read what `Trace.save` wrote. Nothing in the file is executed; its sizes are bounded.

    Raises:
        TraceError: there is no such file, or it is damaged or no trace.
    """
    try:
        with zipfile.ZipFile(path) as z:
            header = _array(z, "header", np.uint8, 1, MAX_HEADER_NBYTES)
            calls = _array(z, "calls", np.int32, 2, MAX_ARRAY_NBYTES)
            ids = _array(z, "ids", np.int32, 1, MAX_ARRAY_NBYTES)
            predicted = None
            if not MEMBERS.issuperset(z.namelist()):
                raise ValueError("unknown arrays")
            if "predicted.npy" in z.namelist():
                predicted = _array(z, "predicted", np.int32, 1, MAX_ARRAY_NBYTES)
        return _checked(json.loads(header.tobytes()), calls, ids, predicted)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file. Make one with smoe-mlx trace.") from None
    except OSError as e:
        raise TraceError(f"{path}: cannot be read ({e.strerror or e}).") from e
    except Exception as e:  # zipfile, zlib, numpy and json raise a dozen kinds on damage
        raise TraceError(
            f"{path}: damaged, or no trace of smoe-mlx ({str(e) or type(e).__name__:.200}). "
            "Record it again with smoe-mlx trace."
        ) from e


def _array(z: zipfile.ZipFile, name: str, dtype: type, ndim: int, limit: int) -> np.ndarray:
    info = z.getinfo(f"{name}.npy")
    if info.file_size > limit + 4096:
        raise ValueError(f"{name} is larger than {limit} bytes")
    if info.compress_size > os.path.getsize(z.filename or ""):  # it would be allocated
        raise ValueError(f"{name} is larger than the file")
    data = z.read(info)  # no more than file_size, and its checksum is compared
    f = BytesIO(data)
    if np.lib.format.read_magic(f) != (1, 0):
        raise ValueError(f"{name} has an unknown version")
    shape, in_columns, stored = np.lib.format.read_array_header_1_0(f)
    if stored != np.dtype(dtype) or in_columns or len(shape) != ndim:
        raise ValueError(f"{name} is {stored} {shape}")
    return np.frombuffer(data, dtype, offset=f.tell()).reshape(shape)


def _checked(
    header: Any, calls: np.ndarray, ids: np.ndarray, predicted: np.ndarray | None
) -> Trace:
    def need(ok: bool, what: str) -> None:
        if not ok:
            raise ValueError(what)

    need(isinstance(header, dict) and header.get("format") == "smoe-mlx trace", "no trace header")
    need(header.get("version") == VERSION, f"version {header.get('version')!r:.20}, not {VERSION}")
    need(isinstance(header.get("model"), str), "no model name")
    for name in NUMBERS:
        need(_is_whole(header.get(name), MAX_TOKENS), f"{name} is no whole number")
    lists = [header.get(name) for name in LISTS]
    for name, values, limit in zip(LISTS, lists, LIMITS, strict=True):
        ok = isinstance(values, list) and all(_is_whole(v, limit) for v in values)
        need(ok, f"{name} is no list of whole numbers")
    num_experts, top_k, nbytes, banks = (tuple(values) for values in lists)
    layers = len(num_experts)
    need(1 <= layers <= MAX_LAYERS, "bad number of layers")
    need(len(top_k) == len(nbytes) == len(banks) == layers, "lists of unequal length")
    need(min(num_experts) >= 1 and sum(num_experts) <= MAX_EXPERTS, "bad number of experts")
    need(len(calls) > 0 and calls.shape[1] == 2, "no calls")
    layer, n = calls.T.astype(np.int64)
    need(bool((layer >= 0).all() and (layer < layers).all()), "a call of no layer")
    sizes = n * np.array(top_k)[layer]
    need(bool((sizes >= 1).all() and (sizes <= ids.size).all()), "a call of a bad size")
    need(int(sizes.sum()) == ids.size, "calls and ids disagree")
    need(bool((ids >= 0).all()), "negative expert numbers")
    if predicted is not None:
        need(predicted.shape == ids.shape, "ids and predicted disagree")
        known = predicted < np.repeat(np.array(num_experts)[layer], sizes)
        need(bool(((predicted >= -1) & known).all()), "predictions of no experts")
    need(header["prompt_calls"] <= len(calls), "more calls for the prompt than in all")
    need(header["prompt_tokens"] <= header["tokens"], "more tokens in the prompt than in all")
    numbers = {name: header[name] for name in NUMBERS}
    return Trace(
        header["model"], num_experts, top_k, nbytes, banks, **numbers,
        calls=calls, ids=ids, predicted=predicted,
    )  # fmt: skip


def _is_whole(value: Any, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


class Recorder:
    """Records the routing of a streamed model between `with Recorder(model) as r:` and its end.

    `trace` gives what was recorded.

    Raises:
        UnsupportedModelError: the model was not loaded by `smoe_mlx.load`.
    """

    def __init__(self, model: nn.Module, name: str = "") -> None:
        self._streaming = streaming_of(model)
        self._name = name
        self._top_k = [0] * len(self._streaming.cache.layouts)
        self._calls: list[tuple[int, int]] = []
        self._ids: list[np.ndarray] = []
        self._predicted: list[np.ndarray] = []
        self._coming: dict[int, np.ndarray] = {}  # what is predicted of layers' next calls

    def __enter__(self) -> "Recorder":
        self._streaming.cache.trace = self._record
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._streaming.cache.trace = None

    def _record(
        self, layer: int, ids: np.ndarray, x: mx.array, bets: Sequence[tuple[int, Predictor]]
    ) -> None:
        k = ids.shape[-1]
        if k != (self._top_k[layer] or k):
            raise TraceError(
                f"layer {layer} has {k} experts a token now, {self._top_k[layer]} before"
            )
        self._top_k[layer] = k
        self._calls.append((layer, ids.size // k))
        self._ids.append(ids.astype(np.int32).ravel())
        self._predicted.append(np.full(ids.size, -1, np.int32))
        coming = self._coming.pop(layer, None)
        if ids.size != k:  # several tokens: they are not decoded
            return
        if coming is not None:
            self._predicted[-1][: coming.size] = coming[:k]
        for i, predict in bets:
            if i != layer:
                self._coming[i] = np.array(predict(x, k)).ravel()

    def trace(self, prompt_tokens: int = 0) -> Trace:
        """What was recorded, of which the first `prompt_tokens` tokens were the prompt.

        Raises:
            TraceError: the model was not run.
        """
        if not self._calls:
            raise TraceError("nothing was recorded: the model was not run")
        calls = np.array(self._calls, np.int32)
        # Generation may be a token ahead of what it has given out, so count tokens, not calls: the
        # prompt ends where the first layer is called after it has seen all of it.
        first = np.flatnonzero(calls[:, 0] == calls[0, 0])
        seen = np.cumsum(calls[first, 1]) - calls[first, 1]
        after = first[seen >= prompt_tokens]
        prompt_calls = int(after[0]) if len(after) else len(calls)
        layouts, plan = self._streaming.cache.layouts, self._streaming.plan
        bank_of = {layer: i for i, bank in enumerate(plan.banks) for layer in bank.layers}
        decoded = int(calls[first[first >= prompt_calls], 1].sum())
        predicted = np.concatenate(self._predicted)
        return Trace(
            model=self._name,
            num_experts=tuple(x.num_experts for x in layouts),
            top_k=tuple(self._top_k),
            expert_nbytes=tuple(x.expert_nbytes for x in layouts),
            banks=tuple(bank_of[i] for i in range(len(layouts))),
            tokens=prompt_tokens + decoded,
            prompt_tokens=prompt_tokens,
            prompt_calls=prompt_calls,
            calls=calls,
            ids=np.concatenate(self._ids),
            predicted=predicted if predicted.max() >= 0 else None,
        )


def force(model: nn.Module, tokens: Sequence[int], window: int) -> Iterable[int]:
    """Pass `tokens` through a streamed model one by one, as decoding would, whatever it predicts.

    Every `window` tokens the KV cache starts anew. Yields how many tokens have passed.
    """
    cache = make_prompt_cache(model)
    for i, token in enumerate(tokens):
        if i and i % window == 0:
            cache = make_prompt_cache(model)
        model(mx.array([[token]]), cache=cache)
        mx.eval([c.state for c in cache])  # the logits are not needed
        yield i + 1
    streaming_of(model).cache.settle()
