"""One answer, generated from where a session left off."""

import contextlib
import copy
from collections.abc import Generator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache

from ..generate import generate_step, stream_generate
from ..plan import MemoryPlan
from .sessions import Kind, Sessions, held_tokens, only_grows


class Stopped(Exception):
    """Nobody waits for this answer any more. Raised by callers' progress callbacks."""


def stream_answer(
    sessions: Sessions,
    name: str,
    model: nn.Module,
    tokenizer: Any,
    prompt: list[int],
    cache: list[Any] | None,
    reused: int,
    marks: Sequence[tuple[int, Kind]] = (),
    **options: Any,
) -> Generator[GenerationResponse, None, None]:
    """`stream_generate` for a prompt whose first `reused` tokens are in `cache`.

    However it ends, what the cache then holds is put back into `sessions`; unless an error (other
    than `Stopped`) leaves that unknown.

    Args:
        name: of the model, in `sessions`.
        cache, reused: what `Sessions.take` returned.
        marks: where later prompts may depart from this one: (tokens, kind), the last at the end of
            the question. Kept for models whose cache cannot be cut there afterwards.
        options: what `stream_generate` takes besides.
    """
    cache = cache or make_prompt_cache(model)
    tokens = list(prompt)
    known = True
    try:
        if not only_grows(cache):
            prefill = {k: v for k, v in options.items() if k in _PREFILL_OPTIONS}
            for n, kind in marks:
                if reused < n < len(prompt):
                    part = mx.array(prompt[reused:n])
                    for _ in generate_step(
                        part, model, max_tokens=0, prompt_cache=cache, **prefill
                    ):
                        pass
                    sessions.put(name, prompt[:n], copy.deepcopy(cache), kind)
                    reused = n
        stream: Any = stream_generate(
            model, tokenizer, prompt[reused:], prompt_cache=cache, **options
        )
        with contextlib.closing(stream):
            for response in stream:
                tokens.append(response.token)
                yield response
    except Exception as e:
        known = isinstance(e, Stopped)
        raise
    finally:
        held = held_tokens(cache) if known else None
        if held is not None and held <= len(tokens):
            asked = min(marks[-1][0] if marks else len(prompt), held)
            sessions.put(name, tokens[:held], cache, asked=asked)


def kv_nbytes(plan: MemoryPlan, tokens: int) -> int:
    """What the KV cache of so many tokens takes, in bytes."""
    step = 256  # mlx-lm's caches grow by so many tokens
    return plan.kv_cache * -(-tokens // step) * step // plan.context


_PREFILL_OPTIONS = (
    "stream",
    "prefill_step_size",
    "kv_bits",
    "kv_group_size",
    "quantized_kv_start",
    "prompt_progress_callback",
)
