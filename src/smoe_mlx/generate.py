"""generate / stream_generate: mlx-lm's text generation for a streamed model.

Same arguments, responses and tokens as `mlx_lm.generate`. Two things differ. No memory is wired
down: that has frozen machines whose model was larger than memory. And while experts are read from
disk, no step is computed ahead of the one that was asked for: each forward waits for its reads, so
looking ahead hides nothing, delays every token by a forward and wastes the last one.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import (
    DEFAULT_QUANTIZED_KV_START,
    GenerationResponse,
    generation_stream,
    maybe_quantize_kv_cache,
)
from mlx_lm.generate import generate_step as mlx_generate_step
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .forward.prefill import prefill
from .hot import pin_hot
from .stats import streaming_of

# Freed buffers are given back to the system this often (as mlx-lm does).
CLEAR_CACHE_EVERY = 256


def generate_step(
    prompt: mx.array,
    model: nn.Module,
    stream: Any = generation_stream,
    *,
    max_tokens: int = 256,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: list[Callable[[mx.array, mx.array], mx.array]] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: Any = None,
    prefill_step_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    input_embeddings: mx.array | None = None,
) -> Iterator[tuple[int, mx.array]]:
    """Yield (token, logprobs [vocab]) one after the other; arguments of mlx-lm's `generate_step`.

    `prefill_step_size` None takes what the memory plan chose (2048 where memory allows it).
    """
    streaming = streaming_of(model)
    plan = streaming.plan
    step_size = min(prefill_step_size or plan.prefill_step, plan.widest_step)
    options = {
        "max_tokens": max_tokens,
        "sampler": sampler,
        "logits_processors": logits_processors,
        "max_kv_size": max_kv_size,
        "prompt_cache": prompt_cache,
        "prefill_step_size": step_size,
        "kv_bits": kv_bits,
        "kv_group_size": kv_group_size,
        "quantized_kv_start": quantized_kv_start,
        "prompt_progress_callback": prompt_progress_callback,
        "input_embeddings": input_embeddings,
    }
    if streaming.cache.holds_all or input_embeddings is not None:
        yield from mlx_generate_step(prompt, model, stream, **options)
        return
    if len(prompt) == 0:
        raise ValueError("the prompt is empty")
    cache = prompt_cache or make_prompt_cache(model, max_kv_size=max_kv_size)
    progress = prompt_progress_callback or (lambda done, total: None)
    sampler = sampler or (lambda logprobs: mx.argmax(logprobs, axis=-1))
    quantize_cache = functools.partial(
        maybe_quantize_kv_cache,
        quantized_kv_start=quantized_kv_start,
        kv_group_size=kv_group_size,
        kv_bits=kv_bits,
    )
    seen = prompt[:0]  # what logits processors look at

    def emit(logits: mx.array, tokens: mx.array) -> tuple[int, mx.array]:
        nonlocal seen
        if logits_processors:
            seen = mx.concatenate([seen, tokens])
            for process in logits_processors:
                logits = process(seen, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        token = sampler(logprobs)
        mx.eval(token, logprobs)
        return int(token.item()), logprobs.squeeze(0)  # type: ignore[arg-type]

    timed = getattr(type(model), "timed_sampling", None)  # while `instrument` is on
    sample = emit if timed is None else timed(emit)

    def step(tokens: mx.array) -> tuple[int, mx.array]:
        logits = streaming.decoding.step(model, tokens[None], cache)[:, -1, :]
        quantize_cache(cache)
        sampled = sample(logits, tokens)
        streaming.decoding.done()
        return sampled

    pin_hot(streaming)
    try:
        with mx.stream(stream):
            total = len(prompt)
            progress(0, total)
            logits = prefill(model, streaming, prompt, cache, step_size, quantize_cache, progress)
            token, logprobs = emit(logits, prompt)
            progress(total, total)
        n = 0
        while n != max_tokens:
            yield token, logprobs
            n += 1
            if n % CLEAR_CACHE_EVERY == 0:
                mx.clear_cache()
            if n != max_tokens:
                with mx.stream(stream):
                    token, logprobs = step(mx.array([token], prompt.dtype))
    finally:
        streaming.cache.settle()
        if streaming.cache.usage is not None:
            streaming.cache.usage.save()


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: nn.Module | None = None,
    stream: Any = generation_stream,
    **kwargs: Any,
) -> Iterator[GenerationResponse]:
    """Generate text and yield it piece by piece; arguments and responses of mlx-lm's function.

    Raises:
        UnsupportedModelError: the model was not loaded by `smoe_mlx.load`.
        ExpertReadError, CheckpointChangedError: an expert could not be read.
    """
    if max_tokens == 0:
        raise ValueError("max_tokens must not be 0 (-1 for no limit)")
    streaming = streaming_of(model)
    if draft_model is not None:
        kwargs.setdefault("prefill_step_size", streaming.plan.prefill_step)
        yield from mlx_stream_generate(
            model, tokenizer, prompt, max_tokens, draft_model, stream, **kwargs
        )
        return
    kwargs.pop("num_draft_tokens", None)
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=special)
    prompt = mx.array(prompt)  # type: ignore[arg-type]
    detokenizer = tokenizer.detokenizer
    start = time.perf_counter()
    prompt_tps = 0.0

    def response(n: int, token: int, logprobs: mx.array, finish: str | None) -> GenerationResponse:
        return GenerationResponse(
            text=detokenizer.last_segment,
            token=token,
            logprobs=logprobs,
            from_draft=False,
            prompt_tokens=prompt.size,
            prompt_tps=prompt_tps,
            generation_tokens=n,
            generation_tps=n / (time.perf_counter() - start),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish,
        )

    n = 0
    for token, logprobs in generate_step(prompt, model, stream, max_tokens=max_tokens, **kwargs):
        n += 1
        if n == 1:
            prompt_tps = prompt.size / (time.perf_counter() - start)
            start = time.perf_counter()
        if token in tokenizer.eos_token_ids:
            finish = "stop"
            break
        detokenizer.add_token(token)
        if n == max_tokens:
            finish = "length"
            break
        yield response(n, token, logprobs, None)
    detokenizer.finalize()
    yield response(n, token, logprobs, finish)


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """Generate text and return it; arguments of `mlx_lm.generate`, errors of `stream_generate`.

    With `verbose`, print the text as it comes, then one line of what it took.
    """
    text = ""
    for r in stream_generate(model, tokenizer, prompt, **kwargs):
        text += r.text
        if verbose:
            print(r.text, end="", flush=True)
    if verbose:
        print(
            f"\n\n{r.prompt_tokens} prompt tokens at {r.prompt_tps:.1f} tok/s, "
            f"{r.generation_tokens} at {r.generation_tps:.1f} tok/s, "
            f"peak memory {r.peak_memory:.3f} GB"
        )
    return text
