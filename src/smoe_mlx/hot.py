"""Hot experts: idle time is for reading, what earlier runs used most first; pins if asked for."""

import contextlib
import hashlib
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.nn as nn

from .background import in_background
from .cache.policy import Key
from .cache.usage import Usage
from .device import using_mlx
from .errors import SmoeError
from .hub import DEMO_FOLDER
from .stats import Streaming, streaming_of
from .store.files import cache_folder

USAGE_FILE = "smoe-usage.json"


def prewarm(model: nn.Module, stop: Callable[[], bool] = lambda: False) -> int:
    """Read experts into free slots, the most used first.

    For idle time: call it from any thread while nothing is generated. It ends when no slot is free
    or the model is called, which waits for the end of one expert's read at most. It changes what
    is read later, never what is computed. Which were used most, `usage` knows (`StreamingConfig`);
    without it, any are read. Where that does not pay, with slots for less than two tokens' experts
    or for all, it does nothing.

    Args:
        model: one that `load` made.
        stop: asked before each expert; true ends it.

    Returns:
        How many experts were read.

    Raises:
        UnsupportedModelError: the model was not loaded by `smoe_mlx.load`.
        ExpertReadError, CheckpointChangedError: an expert could not be read.
    """
    using_mlx()
    streaming = streaming_of(model)
    keys = _worth_reading(streaming)
    return streaming.cache.prewarm(itertools.takewhile(lambda _: not stop(), keys))


def _worth_reading(streaming: Streaming) -> list[Key]:
    cache, plan = streaming.cache, streaming.plan
    if cache.holds_all or plan.slots < 2 * plan.expert_reads:
        return []
    return (cache.usage or Usage(cache.layouts)).ranked()


def prewarm_soon(streaming: Streaming) -> None:
    """Prewarm on a thread of its own, until the model is called for the first time."""
    cache, keys = streaming.cache, _worth_reading(streaming)
    if not keys:
        return
    for layer in range(len(cache.layouts)):
        cache.arrays(layer)  # allocated here: the default device is each thread's own

    def work(stop: threading.Event) -> None:
        with contextlib.suppress(SmoeError):  # whoever needs that expert will be told
            cache.prewarm(itertools.takewhile(lambda _: not stop.is_set(), keys))

    in_background("smoe-prewarm", work)


def pin_hot(streaming: Streaming) -> None:
    """Pin the most used experts of each layer, as many as `hot_per_layer` says."""
    cache, left = streaming.cache, [streaming.hot_per_layer] * len(streaming.cache.layouts)
    if cache.usage is None or not streaming.hot_per_layer:
        return
    hot = []
    for layer, e in cache.usage.ranked():
        if left[layer] and cache.usage.weight((layer, e)) > 0:
            left[layer] -= 1
            hot.append((layer, e))
    cache.pin_only(hot)


def find_usage_file(option: str | os.PathLike[str], folder: Path) -> Path:
    """Where the usage of the model in `folder` is kept. "auto": see `StreamingConfig`."""
    if os.fspath(option) != "auto":
        return Path(option).expanduser()
    if os.access(folder, os.W_OK) and folder != DEMO_FOLDER:
        return folder / USAGE_FILE
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    return cache_folder() / f"{name}-{USAGE_FILE}"
