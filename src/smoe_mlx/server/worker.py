"""The thread that generates: one request after the other, in the order of arrival."""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any

import mlx.core as mx
from mlx_lm.server import (
    CompletionRequest,
    GenerationArguments,
    GenerationContext,
    Response,
    ResponseGenerator,
    _format_top_logprobs,
    _make_logits_processors,
    _make_sampler,
)

from ..errors import SmoeError
from ..hot import prewarm
from ..plan import MemoryPlan
from ..stats import streaming_of
from .errors import RequestError
from .fleet import Fleet
from .metrics import Metrics
from .sessions import Kind, Sessions
from .text import StopWords, plain_words
from .turn import Stopped, kv_nbytes, stream_answer

PROGRESS_SECONDS = 0.5  # between two words about the progress of a prompt


@dataclass
class Request(CompletionRequest):
    """A request, and what its client and its protocol need to know of the answer.

    Attributes:
        gone: whether the client has closed the connection.
        ctx: mlx-lm's context of the answer, once there is one.
        stop_word: the stop word that ended the answer.
        counts: only the tokens of the prompt are wanted.
    """

    gone: Any = field(default=lambda: False)
    ctx: GenerationContext | None = None
    stop_word: str | None = None
    counts: bool = False


class Generator(ResponseGenerator):
    """mlx-lm's response generator, generating with this library and keeping sessions."""

    def __init__(self, fleet: Fleet, sessions: Sessions, metrics: Metrics, max_queue: int):
        self.sessions, self.metrics, self.max_queue = sessions, metrics, max_queue
        self.ready = threading.Event()
        self.failure: BaseException | None = None
        self._idle = False  # since it used its idle time last
        super().__init__(fleet, sessions)

    def wait_ready(self) -> None:
        """Wait until the first model is loaded; raises what prevented that."""
        self.ready.wait()
        if self.failure is not None:
            raise self.failure

    def generate(
        self, request: Any, generation_args: GenerationArguments, progress_callback: Any = None
    ) -> Any:
        if self.requests.qsize() >= self.max_queue:
            raise RequestError(503, "too many requests are waiting; try again later", "overloaded")
        ctx, responses = super().generate(request, generation_args, progress_callback)
        request.ctx = ctx
        self.metrics.count("prompt_tokens", len(ctx.prompt))
        self.metrics.count("cached_tokens", ctx.prompt_cache_count)
        return ctx, self._while_wanted(request, responses)

    def _while_wanted(self, request: Request, responses: Iterator[Any]) -> Iterator[Any]:
        # Batches do not look at the connection, only whether these are still asked for.
        with self.metrics.busy():
            for response in responses:
                if request.gone():
                    raise Stopped
                self.metrics.count("generated_tokens")
                yield response

    def _run_generate(self) -> None:
        try:
            self.model_provider.load_default()
            self.ready.set()
            super()._run_generate()
            self.sessions.evict()
        except BaseException as e:
            self.failure = e
        finally:
            self.ready.set()
            mx.clear_streams()  # else MLX aborts the process at its end
            self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        while True:
            try:
                self.requests.get_nowait()[0].put(self._stopped())
            except Empty:
                return

    def _stopped(self) -> RequestError:
        why = "the server is stopping" if self._stop else "generation has failed; see the log"
        return RequestError(503, why, "overloaded")

    def _next_request(self, timeout: float | None = None) -> Any:
        """Requests whose client has gone are left out before a model is loaded for them."""
        if timeout is not None:  # no batch is under way
            self._use_idle_time()
        found = super()._next_request(timeout)
        if found is not None:
            self._idle = False
        if found is not None and found[1].gone():
            found[0].put(Stopped())
            self.metrics.count("cancelled")
            return None
        return found

    def _use_idle_time(self) -> None:
        """Read experts into free slots, the most used first, until a request comes."""
        model = self.model_provider.model
        if self._idle or model is None or streaming_of(model).cache.usage is None:
            return
        self._idle = True
        with contextlib.suppress(SmoeError):  # whoever needs that expert will be told
            prewarm(model, lambda: self._stop or not self.requests.empty())

    def _log_cache_stats(self) -> None:
        """/metrics tells it."""

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        try:
            plain = plain_words(tokenizer, request.messages)
            found = super()._tokenize(plain, request, args)
        except Exception as e:  # templates raise what they like
            raise RequestError(400, f"the messages cannot be put into a prompt: {e}") from e
        fleet: Any = self.model_provider
        context, n = fleet.resident[fleet.model_key].plan.context, len(found[0])
        if n == 0:
            raise RequestError(400, "the prompt is empty")
        if any(not 0 <= t < len(tokenizer) for t in args.logits.logit_bias or ()):
            raise RequestError(400, f"logit_bias: there are {len(tokenizer)} tokens")
        if n >= context and not request.counts:
            raise RequestError(
                400,
                f"the prompt has {n} tokens; memory is planned for a context of {context}. "
                "Start the server with a larger --context.",
                "context_length_exceeded",
            )
        args.max_tokens = min(args.max_tokens, context - n)
        return found

    def _serve_single(self, request: Any, stream: Any) -> None:
        rqueue, request, args = request
        try:
            self._answer(rqueue, request, args, stream)
        except Stopped as e:
            self.metrics.count("cancelled")
            rqueue.put(self._stopped() if self._stop else e)
        except Exception as e:
            if not isinstance(e, RequestError):
                logging.exception("a request failed")
                e = RequestError(500, f"{type(e).__name__}: {e}")
            rqueue.put(e)

    def _answer(self, rqueue: Queue, request: Request, args: Any, stream: Any) -> None:
        """mlx-lm's `_serve_single`, which calls mlx-lm's generation by name, with ours."""
        fleet: Any = self.model_provider
        name, model, tokenizer = fleet.model_key, fleet.model, fleet.tokenizer
        prompt, segments, types, initial_state, _ = self._tokenize(tokenizer, request, args)
        plan: MemoryPlan = fleet.resident[name].plan
        _, text_sm = self._make_state_machine(name, tokenizer, args.stop_words)
        if request.counts:
            rqueue.put(_context(tokenizer, text_sm, initial_state, prompt, 0))
            rqueue.put(None)
            return
        # The answer's own cache is part of what sessions have, unless they have their own memory.
        own = self.cli_args.prompt_cache_bytes is not None
        reserve = 0 if own else kv_nbytes(plan, len(prompt) + args.max_tokens)
        sampler, processors = _make_sampler(args, tokenizer), _make_logits_processors(args)
        cache, reused = self.sessions.take(name, prompt, reserve)
        ctx = _context(tokenizer, text_sm, initial_state, prompt, reused)
        rqueue.put(ctx)
        last_word = time.monotonic()

        def check() -> None:
            if self._stop or ctx._should_stop or request.gone():
                raise Stopped()

        def progress(done: int, total: int) -> None:
            nonlocal last_word
            check()
            if time.monotonic() - last_word >= PROGRESS_SECONDS:
                last_word = time.monotonic()
                rqueue.put((reused + done, reused + total))

        if args.seed is not None:
            mx.random.seed(args.seed % (1 << 64))
        stop_words = StopWords(args.stop_words)
        responses = stream_answer(
            self.sessions,
            name,
            model,
            tokenizer,
            prompt,
            cache,
            reused,
            _marks(segments, types, len(prompt)),
            stream=stream,
            max_tokens=args.max_tokens,
            sampler=sampler,
            logits_processors=processors,
            prefill_step_size=self.cli_args.prefill_step_size,
            kv_bits=self.cli_args.kv_bits,
            kv_group_size=self.cli_args.kv_group_size,
            quantized_kv_start=self.cli_args.quantized_kv_start,
            prompt_progress_callback=progress,
        )
        with contextlib.closing(responses), self.metrics.speed(len(prompt) - reused) as seen:
            for r in responses:
                seen(r)
                text, finish = r.text, r.finish_reason
                top = _format_top_logprobs(r.logprobs, args.top_logprobs, tokenizer)
                logprob = r.logprobs[r.token].item()
                if finish != "stop" and (found := stop_words.find(text)):
                    text, request.stop_word = found
                    if text:  # mlx-lm drops the text of a response that says "stop"
                        rqueue.put(Response(text, r.token, logprob, None, top))
                    text, finish = "", "stop"
                rqueue.put(Response(text, r.token, logprob, finish, top))
                if finish is not None:
                    break
                check()
            rqueue.put(None)  # keeping the session may take a moment


def _context(
    tokenizer: Any, text_sm: Any, initial_state: str, prompt: list[int], reused: int
) -> GenerationContext:
    return GenerationContext(
        has_thinking=tokenizer.has_thinking,
        has_tool_calling=tokenizer.has_tool_calling,
        tool_parser=tokenizer.tool_parser,
        text_sm=text_sm,
        initial_state=initial_state,
        prompt=prompt,
        prompt_cache_count=reused,
    )


def _marks(segments: list[list[int]], types: list[str], total: int) -> list[tuple[int, Kind]]:
    """Where a later prompt may depart: where mlx-lm's segments "system" and "user" end. One token
    of the prompt has to be left to ask."""
    ends = dict(zip(types, itertools.accumulate(map(len, segments)), strict=True))
    marks: list[tuple[int, Kind]] = [(ends["system"], "system")] if "system" in ends else []
    return [*marks, (min(ends.get("user", total), total - 1), "prompt")]
