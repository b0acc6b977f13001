"""Take back one decode step from any of mlx-lm's caches, without a copy of a KV buffer.

What makes it cheap: the step that replaces the one taken back writes the same rows, since it has as
many tokens. So a cache that writes rows at an offset only needs its counters back. The rows beyond
the offset are garbage, and are overwritten; the row that a full rotating cache overwrites is the
one that the true step evicts as well.

Two facts about MLX decide how things are kept. `a[i] = x` binds the object `a` to a new array, so
that small arrays must be remembered through an alias (`a[...]`). And that write is done in place
only while nobody else holds the buffer, so that large ones must not be.

A cache of an unknown class is remembered by aliases of all that it has: right, whatever it does,
but a class that writes in place would then copy its buffers at each step.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

# Caches whose buffers stay: what moves in one step.
COUNTERS: dict[type, tuple[str, ...]] = {
    KVCache: ("offset",),
    QuantizedKVCache: ("offset",),
    ChunkedKVCache: ("offset",),
    BatchKVCache: ("_idx", "offset", "left_padding", "_right_padding"),
}
# Caches whose buffers are the same objects afterwards, or the ones they were replaced by.
ROTATING = (RotatingKVCache, BatchRotatingKVCache)

State = Any


def alias(value: Any) -> Any:
    """The same, unharmed by what is written to `value` later."""
    if isinstance(value, mx.array):
        return value[...]
    if isinstance(value, dict):
        return {k: alias(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(alias(v) for v in value)
    return value


def takes_back_several(cache: Any) -> bool:
    """Whether a state may be restored after more than one step, and the first of them done again.

    A rotating cache has then lost a row that this one must see.
    """
    if isinstance(cache, CacheList):
        return all(map(takes_back_several, cache.caches))
    return type(cache) in COUNTERS


def remember(cache: Any) -> State:
    """The state of a cache, for `restore`, as long as steps of one and the same width follow."""
    if isinstance(cache, CacheList):
        return [remember(c) for c in cache.caches]
    state = vars(cache)
    counters = COUNTERS.get(type(cache))
    if counters is not None:  # an empty cache, too: its first buffer may stay
        return {k: alias(state[k]) for k in counters if k in state}
    kept = ("keys", "values") if isinstance(cache, ROTATING) else ()
    return {k: v if k in kept else alias(v) for k, v in state.items()}


def restore(cache: Any, state: State) -> None:
    """Put a cache back into a state that `remember` gave; more than once, if need be."""
    if isinstance(cache, CacheList):
        for c, s in zip(cache.caches, state, strict=True):
            restore(c, s)
        return
    attributes = vars(cache)
    if type(cache) not in COUNTERS:
        for name in attributes.keys() - state.keys():
            del attributes[name]
    kept = ("keys", "values") if isinstance(cache, ROTATING) else ()
    for name, value in state.items():
        attributes[name] = value if name in kept else alias(value)
