"""generate / stream_generate: mlx-lm's text generation for a streamed model.

Same arguments, responses and tokens as `mlx_lm.generate`. Two things differ. No memory is wired
down: that has frozen machines whose model was larger than memory. And while experts are read from
disk, no step is computed ahead of the one that was asked for: each forward waits for its reads, so
looking ahead hides nothing, delays every token by a forward and wastes the last one.
"""

import functools
import math
import sys
import time
from array import array
from collections import deque
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
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .device import using_mlx
from .errors import NotFiniteError
from .forward.prefill import prefill
from .forward.waiting import Decoded
from .hot import pin_hot
from .speculative import Drafter, DraftModel, look_up, room_of
from .stats import streaming_of

# Freed buffers are given back to the system this often (as mlx-lm does).
CLEAR_CACHE_EVERY = 256
PROMPT_LOOKUP = 3  # tokens that have to match before drafts are worth a try (docs/performance.md)


def generate_step(
    prompt: mx.array, model: nn.Module, stream: Any = generation_stream, **options: Any
) -> Iterator[tuple[int, mx.array]]:
    """Yield (token, logprobs [vocab]) one after the other; arguments of mlx-lm's `generate_step`.

    `prefill_step_size` None takes what the memory plan chose (2048 where memory allows it).
    """
    for token, logprobs, _ in speculative_generate_step(prompt, model, None, stream, **options):
        yield token, logprobs


def speculative_generate_step(
    prompt: mx.array,
    model: nn.Module,
    draft_model: nn.Module | None = None,
    stream: Any = generation_stream,
    *,
    num_draft_tokens: int = 3,
    prompt_lookup: int | bool = False,
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
) -> Iterator[tuple[int, mx.array, bool]]:
    """Yield (token, logprobs [vocab], whether it was drafted), with or without drafts.

    Arguments are those of mlx-lm's `speculative_generate_step` and `generate_step`, and:

    Args:
        draft_model: drafts tokens (docs/speculative.md). A `prompt_cache` then holds the model's
            entries and after them the draft model's.
        num_draft_tokens: most tokens that are drafted for one pass.
        prompt_lookup: draft what followed the last so many tokens where they came before. True
            is 3.

    Raises:
        ValueError: options that do not go together, or an empty prompt.
    """
    using_mlx()
    streaming = streaming_of(model)
    plan = streaming.plan
    step_size = min(prefill_step_size or plan.prefill_step, plan.widest_step)
    drafting = draft_model is not None or prompt_lookup
    if draft_model is not None and prompt_lookup:
        raise ValueError("give either draft_model or prompt_lookup")
    if drafting and input_embeddings is not None:
        raise ValueError("drafts and input_embeddings do not go together")
    if drafting and num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens={num_draft_tokens}: at least 1")
    if prompt_lookup < 0:
        raise ValueError(f"prompt_lookup={prompt_lookup}: a number of tokens, or False")
    if input_embeddings is not None or (streaming.cache.holds_all and not drafting):
        for token, logprobs in mlx_generate_step(
            prompt,
            model,
            stream,
            max_tokens=max_tokens,
            sampler=sampler,
            logits_processors=logits_processors,
            max_kv_size=max_kv_size,
            prompt_cache=prompt_cache,
            prefill_step_size=step_size,
            kv_bits=kv_bits,
            kv_group_size=kv_group_size,
            quantized_kv_start=quantized_kv_start,
            prompt_progress_callback=prompt_progress_callback,
            input_embeddings=input_embeddings,
        ):
            _refuse_nan(token, logprobs)
            yield token, logprobs, False
        return
    if len(prompt) == 0:
        raise ValueError("the prompt is empty")
    cache = make_prompt_cache(model, max_kv_size) if prompt_cache is None else prompt_cache
    drafter = second = None
    if draft_model is not None:
        draft_cache = make_prompt_cache(draft_model)
        if prompt_cache is not None:
            own = len(make_prompt_cache(model))
            if len(prompt_cache) != own + len(draft_cache):
                raise ValueError(
                    f"prompt_cache has {len(prompt_cache)} entries: with a draft model, give the "
                    f"model's {own} and then the draft model's {len(draft_cache)}"
                )
            cache, draft_cache = prompt_cache[:own], prompt_cache[own:]
        second = DraftModel(draft_model, draft_cache, step_size, streaming)
        drafter = Drafter(second, num_draft_tokens, streaming.drafts)
    elif prompt_lookup:
        match = PROMPT_LOOKUP if prompt_lookup is True else prompt_lookup
        propose = functools.partial(look_up, match=match)
        drafter = Drafter(propose, num_draft_tokens, streaming.drafts)
    progress = prompt_progress_callback or (lambda done, total: None)
    sampler = sampler or (lambda logprobs: mx.argmax(logprobs, axis=-1))
    quantized_from = math.inf if kv_bits is None else quantized_kv_start
    quantize_cache = functools.partial(
        maybe_quantize_kv_cache,
        quantized_kv_start=quantized_kv_start,
        kv_group_size=kv_group_size,
        kv_bits=kv_bits,
    )
    seen = prompt[:0]  # what logits processors look at

    def pick(logits: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array]:
        nonlocal seen
        if logits_processors:
            seen = mx.concatenate([seen, tokens])
            for process in logits_processors:
                logits = process(seen, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return sampler(logprobs), logprobs

    def evaluated(token: mx.array, logprobs: mx.array) -> tuple[int, mx.array]:
        mx.eval(token, logprobs)
        number, row = int(token.item()), logprobs.squeeze(0)  # type: ignore[arg-type]
        _refuse_nan(number, row)
        return number, row

    def emit(logits: mx.array, tokens: mx.array) -> tuple[int, mx.array]:
        return evaluated(*pick(logits, tokens))

    seen_before = [seen]  # each token of a run

    def pick_in_run(n: int, tokens: mx.array, logits: mx.array) -> tuple[mx.array, list[mx.array]]:
        nonlocal seen
        seen = seen_before[n]
        token, logprobs = pick(logits[:, -1, :], tokens[0])
        seen_before[n + 1 :] = [seen]
        return token.reshape(1, 1).astype(prompt.dtype), [token, logprobs]

    timed = getattr(type(model), "timed_sampling", None)  # while `instrument` is on
    sample = emit if timed is None else timed(emit)

    text: array[int] = array("q", prompt.tolist())  # type: ignore[arg-type]
    drafts: list[int] = []
    n = row = 0
    ahead = 0  # tokens in the cache beyond all but the last of the text
    run: deque[Decoded] = deque()  # tokens after which those that come next are known already
    may_run = drafter is None and kv_bits is None and timed is None
    seconds = 0.0  # that the last pass took
    pin_hot(streaming)
    try:
        with streaming.cache.lock, mx.stream(stream):
            total = len(prompt)
            progress(0, total)
            logits = prefill(model, streaming, prompt, cache, step_size, quantize_cache, progress)
            token, logprobs = emit(logits, prompt)
            streaming.cache.settle()  # all is evaluated: another thread may take its turn
            progress(total, total)
        if second is not None and room_of(cache) >= 2:
            with mx.stream(stream):
                second.feed(text)
        text.append(token)
        from_draft = False
        while n != max_tokens:
            yield token, logprobs, from_draft
            n += 1
            if n % CLEAR_CACHE_EVERY == 0:
                mx.clear_cache()
            if n == max_tokens:
                break
            start = time.perf_counter()
            left = max_tokens - n if max_tokens > 0 else sys.maxsize
            if ahead and not from_draft:
                trim_prompt_cache(cache, ahead)
                ahead = 0
            if drafter is not None and not from_draft:
                if seconds:
                    drafter.saw(drafts, row + 1, seconds)
                most = min(step_size, left) - 1
                with mx.stream(stream):
                    drafts = drafter(text, cache, most, quantized_from)
            with streaming.cache.lock, mx.stream(stream):
                if from_draft:  # the last pass went on from this very token
                    row, ahead = row + 1, ahead - 1
                elif not run:
                    tokens = mx.array([[token, *drafts]], prompt.dtype)
                    if may_run:
                        seen_before[:] = [seen]
                        run.extend(streaming.decoding.run(model, tokens, cache, pick_in_run, left))
                        seen = seen_before[len(run)]
                    if not run:
                        logits = streaming.decoding.step(model, tokens, cache)
                        quantize_cache(cache)
                        row, ahead, seconds = 0, len(drafts), 0.0
                if run:
                    token, logprobs = evaluated(*run.popleft().wanted)
                else:
                    token, logprobs = sample(logits[:, row, :], mx.array([token], prompt.dtype))
                    streaming.decoding.done()
                streaming.cache.settle()
            text.append(token)
            from_draft = row < len(drafts) and token == drafts[row]
            streaming.drafts.accepted += from_draft
            seconds += time.perf_counter() - start
    finally:
        if ahead:
            trim_prompt_cache(cache, ahead)
        if run:
            run[0].take_back()
        if second is not None and prompt_cache is not None and n:
            with mx.stream(stream):
                second.feed(text[:-1])
            prompt_cache[:] = cache + draft_cache  # entries were replaced if they were quantised
        streaming.cache.settle()
        if streaming.cache.usage is not None:
            streaming.cache.usage.save()


def _refuse_nan(token: int, logprobs: mx.array) -> None:
    """Raise for NaN, of which samplers make token 0: only then it is worth a look."""
    if token == 0 and mx.isnan(logprobs[0]).item():
        raise NotFiniteError(
            "the model computed NaN. Its weights are damaged (smoe-mlx verify), or too large for "
            "their type."
        )


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: nn.Module | None = None,
    stream: Any = generation_stream,
    **kwargs: Any,
) -> Iterator[GenerationResponse]:
    """Generate text and yield it piece by piece, as `mlx_lm.stream_generate`.

    Args:
        model: one that `load` made.
        tokenizer: what came with it.
        prompt: text, or token ids [tokens].
        max_tokens: tokens to generate at most; -1 for no limit.
        draft_model: an mlx-lm model with the same tokenizer, whose guesses are checked several at
            a time; `num_draft_tokens` (3) for one pass.
        stream: the MLX stream to compute on.
        kwargs: mlx-lm's options, such as `sampler`, `logits_processors`, `max_kv_size`,
            `prompt_cache`, `prefill_step_size`, `kv_bits`, `prompt_progress_callback`. And
            `prompt_lookup`: draft what followed the last so many tokens where they came before;
            True is 3 (docs/speculative.md). What is called back holds up other threads that use
            this model, and must not wait for them.

    Yields:
        mlx-lm's `GenerationResponse`: `text`, `token`, `logprobs` [vocabulary], `from_draft`,
        `prompt_tokens`, `generation_tokens`, both as `_tps` (tokens a second), `peak_memory` (GB,
        of the whole process), `finish_reason` ("stop", "length" or None).

    Raises:
        UnsupportedModelError: the model was not loaded by `smoe_mlx.load`.
        ExpertReadError, CheckpointChangedError: an expert could not be read.
        NotFiniteError: the model computed NaN.
        ValueError: an empty prompt, `max_tokens` 0, or options that do not go together.
    """
    if max_tokens == 0:
        raise ValueError("max_tokens must not be 0 (-1 for no limit)")
    streaming_of(model)
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=special)
    prompt = mx.array(prompt)  # type: ignore[arg-type]
    detokenizer = tokenizer.detokenizer
    start = time.perf_counter()
    prompt_tps = 0.0

    def response(
        n: int, token: int, logprobs: mx.array, from_draft: bool, finish: str | None
    ) -> GenerationResponse:
        return GenerationResponse(
            text=detokenizer.last_segment,
            token=token,
            logprobs=logprobs,
            from_draft=from_draft,
            prompt_tokens=prompt.size,
            prompt_tps=prompt_tps,
            generation_tokens=n,
            generation_tps=n / (time.perf_counter() - start),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish,
        )

    n = 0
    for token, logprobs, from_draft in speculative_generate_step(
        prompt, model, draft_model, stream, max_tokens=max_tokens, **kwargs
    ):
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
        yield response(n, token, logprobs, from_draft, None)
    detokenizer.finalize()
    yield response(n, token, logprobs, from_draft, finish)


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """Generate text and return it, as `mlx_lm.generate`.

    Args:
        model: as for `stream_generate`.
        tokenizer: as for `stream_generate`.
        prompt: as for `stream_generate`.
        verbose: print the text as it comes, then one line of what it took.
        kwargs: all other options of `stream_generate`.

    Returns:
        The text that was generated.

    Raises:
        UnsupportedModelError, ExpertReadError, CheckpointChangedError, NotFiniteError, ValueError:
            as `stream_generate`.
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
        if dropped := streaming_of(model).decoding.dropped:
            print(f"LOSSY: {dropped:,} experts left out, not the model's own answer")
    return text
