"""What a plan must know of a model and no header says: top-k, widths, the memory of its caches.

mlx-lm's own model is asked: its forward is built, not run, on its own caches.
"""

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from .config import StreamingConfig
from .errors import CheckpointError
from .plan import PREFILL_STEPS, LayerShape, ModelShape
from .skeleton import Skeleton, Switch, replace_module


class _Probe(nn.Module):
    """Stands where experts will be and notes the number of experts a token is sent to."""

    def __init__(self, switch: Switch):
        super().__init__()
        self.top_k = 0
        for name, child in switch.module.items():
            self[name] = child

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self.top_k = indices.shape[-1]
        return mx.zeros((*indices.shape, x.shape[-1]), x.dtype)


def measure_shape(skeleton: Skeleton, options: StreamingConfig) -> ModelShape:
    """Top-k of every layer and the size of the KV cache, by building (not running) one forward.

    Args:
        options: `context` and how the KV cache is quantised count.

    Raises:
        CheckpointError: config.json gives a size that cannot be.
    """
    model, config = skeleton.model, skeleton.config
    probes = [_Probe(s) for s in skeleton.switches]
    for s, probe in zip(skeleton.switches, probes, strict=True):
        replace_module(model, s.path, probe)
    text = config.get("text_config") or config
    context = options.context
    if context is None:
        context = min(4096, _number(text, "max_position_embeddings", 4096))
    kv_nbytes = kv_beside = score_nbytes = 0
    itemsize = 2
    windows: set[int] = set()
    try:
        cache = make_prompt_cache(model)
        for c in cache:
            _watch_masks(c, context, windows)
        logits = model(mx.zeros((1, 1), mx.int32), cache=cache)
        itemsize = logits.dtype.size
        sizes = [_cache_nbytes(c, context) for c in cache]
        kv_nbytes = _kv_nbytes(cache, context, options)
        kv_beside = max(sizes, default=0) + _expanded_nbytes(text, itemsize) * context
        score_nbytes = _score_nbytes(model, text, cache, context, itemsize)
    except Exception:  # a forward that this backend cannot even build: plan without it
        pass
    finally:
        for s in skeleton.switches:
            replace_module(model, s.path, s.module)
    layers = tuple(
        LayerShape(
            probe.top_k or min(_number(text, "num_experts_per_tok", 1), s.num_experts),
            next(iter(s.linears.values())).input_dims,
            next(iter(s.linears.values())).output_dims,
        )
        for s, probe in zip(skeleton.switches, probes, strict=True)
    )
    hidden_size = _number(text, "hidden_size", layers[0].input_dims)
    heads = _number(text, "num_attention_heads", 1)
    return ModelShape(
        backbone_nbytes=sum(a.nbytes for _, a in tree_flatten(model) if isinstance(a, mx.array)),
        layers=layers,
        hidden_size=hidden_size,
        num_heads=heads,
        head_dim=_number(text, "head_dim", hidden_size // heads),
        vocab_size=_number(text, "vocab_size", 0),
        activation_itemsize=itemsize,
        context=context,
        kv_nbytes=kv_nbytes,
        kv_beside=kv_beside,
        score_nbytes=score_nbytes,
        mask_windows=tuple(sorted(windows)),
        keeps_buffers=mx.default_device() != mx.cpu,
    )


def _number(text: dict[str, Any], name: str, default: int) -> int:
    """A size that the config gives. mlx-lm may have built a model without a look at it."""
    value = text.get(name) or default
    if not isinstance(value, int | float) or not min(default, 1) <= value < 1 << 53:
        raise CheckpointError(f"config.json: {name} is {value!r:.40}, which no model can have.")
    return int(value)


def _kv_nbytes(cache: Sequence[Any], context: int, options: StreamingConfig) -> int:
    """Most bytes of a prompt cache on its way to `context` tokens, from its state after one."""
    plain = sum(_cache_nbytes(c, context) for c in cache)
    if options.kv_bits is None or options.quantized_kv_start >= context:
        return plain
    # mlx-lm quantises all of it after the chunk that reaches `start`: for a moment, both are there.
    chunk = options.prefill_step or PREFILL_STEPS[0]
    n = min(context, options.quantized_kv_start + chunk)
    both = sum(_cache_nbytes(c, n) + _quantised_nbytes(c, n, options) for c in cache)
    return max(both, sum(_quantised_nbytes(c, context, options) for c in cache))


def _quantised_nbytes(cache: Any, context: int, options: StreamingConfig) -> int:
    """As `_cache_nbytes`, of a cache that mlx-lm quantises if it can."""
    nbytes = _cache_nbytes(cache, context)
    if not hasattr(cache, "to_quantized") or isinstance(cache, RotatingKVCache):
        return nbytes
    size: int = cache.keys.dtype.size
    scales = 2 * size / options.kv_group_size
    return math.ceil(nbytes / size * ((options.kv_bits or 0) / 8 + scales))


def _cache_nbytes(cache: Any, context: int) -> int:
    """Bytes of one layer's cache after `context` tokens, from its state after one."""
    if isinstance(cache, CacheList):
        return sum(_cache_nbytes(c, context) for c in cache.caches)
    arrays = [a for _, a in tree_flatten(vars(cache)) if isinstance(a, mx.array)]
    nbytes = sum(a.nbytes for a in arrays)
    if isinstance(cache, ArraysCache):
        return nbytes  # a state of fixed size
    if isinstance(cache, RotatingKVCache):
        context = min(context, cache.max_size)
    if isinstance(cache, ChunkedKVCache):
        context = min(context, cache.chunk_size)
    step = getattr(cache, "step", 1) if isinstance(cache, (KVCache, RotatingKVCache)) else 1
    grown = max((a.shape[2] for a in arrays if a.ndim == 4), default=1)
    return nbytes * -(-context // step) * step // grown


def _expanded_nbytes(text: dict[str, Any], itemsize: int) -> int:
    """Keys and values that MLA makes of a cached latent for each head, for one position."""
    if not text.get("kv_lora_rank"):
        return 0
    dims = int(text.get("qk_nope_head_dim") or 128) + int(text.get("v_head_dim") or 128)
    return int(text.get("num_attention_heads") or 1) * dims * itemsize


def _score_nbytes(
    model: nn.Module, text: dict[str, Any], cache: list[Any], context: int, itemsize: int
) -> int:
    """What the widest attention layer writes out for each token of a prompt.

    Scores [heads, context] and a mask, where no kernel keeps them to itself: on a CPU, and for wide
    heads. Sinks cost two more: the scores with a sink in front, and without it again. MLA adds the
    scores of its rotated part on any backend, and an indexer its own, weighted and not. Recurrent
    layers for which there is no kernel keep the state after every token.
    """
    heads = int(text.get("num_attention_heads") or 1)
    rows = masks = 0
    if mx.default_device() == mx.cpu or int(text.get("head_dim") or 0) > 128:
        sinks = any("sink" in name for name, _ in tree_flatten(model.parameters()))
        rows, masks = heads * (3 if sinks else 1), 1
    if text.get("kv_lora_rank"):
        rows += heads
    rows += 2 * int(text.get("index_n_heads") or 0)
    states = [0]
    for c in cache:
        for a in c.cache if isinstance(c, ArraysCache) else ():
            if isinstance(a, mx.array) and a.shape[-1] == text.get("mamba_d_state"):
                states.append(a.nbytes * 16)  # Jamba copies the states of all tokens for each
            elif isinstance(a, mx.array) and not mx.metal.is_available():
                states.append(a.nbytes * 5 // 4)  # a quarter for what goes in and comes out
    return max((rows * itemsize + masks) * context, *states)


def _watch_masks(cache: Any, context: int, windows: set[int]) -> None:
    """Note in `windows` how far back each kind of mask array reaches that a forward asks for.

    A plain causal mask is no array. What is as wide as the keys reaches back to the beginning.
    """
    if isinstance(cache, CacheList):
        for c in cache.caches:
            _watch_masks(c, context, windows)
    elif isinstance(cache, (KVCache, RotatingKVCache)):
        make_mask = cache.make_mask
        rotating = isinstance(cache, RotatingKVCache)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if rotating or kwargs.get("return_array") or kwargs.get("window_size"):
                windows.add(cache.max_size if rotating else context)
            return make_mask(*args, **kwargs)

        cache.make_mask = watched
    elif not isinstance(cache, ArraysCache):
        windows.add(context)  # makes its own
