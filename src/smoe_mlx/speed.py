"""The speed model: how fast a model will be, from parts that were measured on this machine.

    seconds a token = compute + syncs + max(0, reading - overlap)

`compute` is a forward whose experts are all in memory. `syncs` is what it costs that the host looks
at the routing of every MoE layer. `reading` is the missing experts' bytes at the disk's bandwidth,
and a latency for each layer that lacks some. `overlap` is reading that other work hides.
docs/speed.md says where each comes from, and how well it foretells.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from .config import StreamingConfig
from .errors import TraceError
from .load import install, plan_for
from .plan import MemoryPlan
from .replay import replay
from .shape import measure_shape
from .skeleton import Skeleton
from .store.probe import DiskProbe
from .store.reader import SLOW_SECONDS, ExpertReader, ReadRequest
from .store.streamer import Reading
from .trace import Trace

TOKENS = 16  # that are timed, of which the median counts
PROMPT_TOKENS = 128
MOST_SECONDS = 5.0  # after which no further one is timed
FIRST_SECONDS = 15.0  # after which not even one is finished
# Hit rates while decoding, with a share `s` of all experts in memory: s^0.5. The demo model under
# LRU has 0.28-0.45 at 12.5 %, 0.42-0.59 at 25 %, 0.71-0.86 at 50 % (docs/policies.md). A router
# that chose evenly, every token anew, would have s; one that repeats itself much, s^0.25.
CURVE, EVEN_CURVE, NARROW_CURVE = 0.5, 1.0, 0.25
# Reading that compute hides, as a share of compute, where experts are read ahead.
OVERLAP = 0.25
# What measured parts are off by between one run and another, up and down.
SPREAD = 1.25


@dataclass(frozen=True)
class Compute:
    """Seconds of a forward with every expert in memory.

    Attributes:
        token: of one token, the host looking at nothing on the way.
        syncs: more than that where the host looks at the routing of each layer, finds no expert
            there, and does the cache's bookkeeping.
        prompt_token: of one token of a prompt, without LM head.
    """

    token: float
    syncs: float
    prompt_token: float


@dataclass(frozen=True)
class Speed:
    """A forecast, in seconds: the likely value, and a band around it."""

    low: float
    likely: float
    high: float

    def rates(self, tokens: int = 1) -> tuple[float, float, float]:
        """Tokens a second: from `high`, from `likely`, from `low`."""
        return tokens / self.high, tokens / self.likely, tokens / self.low


@dataclass(frozen=True)
class Forecast:
    """What decoding and a prompt will take.

    Attributes:
        hit_rate: of lookups while decoding; `traced` if it is from a trace.
        token: seconds a token.
        compute, syncs, reading, hidden: what `token.likely` is made of, in seconds: reading is all
            of it, `hidden` the part that costs nothing.
        nbytes: read a token.
        prompt: seconds for a prompt of `prompt_tokens`, none of its experts being in memory.
    """

    hit_rate: float
    traced: bool
    token: Speed
    compute: float
    syncs: float
    reading: float
    hidden: float
    nbytes: float
    prompt: Speed
    prompt_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


# ---- the parts -----------------------------------------------------------------------------------


class _NoReads(ExpertReader):
    """Leaves memory as it is: zeros, in which kernels take the time that they take for experts."""

    def __init__(self) -> None:
        super().__init__([], threads=0)

    def reading(
        self, requests: Sequence[ReadRequest], bet: bool = False, apart: bool = False
    ) -> Reading:
        return super().reading((), bet)


class _Enough(Exception):
    """A token has taken too long, and `layer` layers have been computed of it."""

    def __init__(self, layer: int):
        self.layer = layer


def measure_compute(
    skeleton: Skeleton, config: StreamingConfig, clock: Callable[[], float] = time.perf_counter
) -> Compute:
    """Time forwards of a model whose backbone is read and whose experts are zeros.

    It takes the memory of the backbone and a few experts. The model gives no answers and can be
    used for nothing else afterwards. Where one token takes too long, it is what it would have taken
    at the pace of its first layers, and so is one of a prompt.
    """
    config = replace(config, memory=None, decode="exact", lookahead=False, usage=None)
    config = replace(config, slots=1.0, hot_per_layer=0)
    plan = plan_for(skeleton, config, available=0)
    # Slots for one layer or two: no expert is still there when its layer comes again.
    few = 2 * max(s.top_k for s in measure_shape(skeleton, config).layers) * len(plan.banks)
    plan = plan_for(skeleton, replace(config, slots=min(few, plan.slots)), available=0)
    model = skeleton.model
    reader = _NoReads()
    streaming = install(skeleton, reader, plan, config)
    experts = streaming.cache
    mx.eval(model.parameters())

    def unseen(
        switch: Any, layer: int, x: mx.array, indices: mx.array, _: mx.array, weights: Any
    ) -> mx.array:
        y: mx.array = switch.by_lookup(x, indices, experts.lookup(layer), weights)
        return y

    caches = {defer: make_prompt_cache(model) for defer in (None, unseen)}

    def step(defer: Any) -> None:  # as generation does it
        experts.defer = defer
        logits = model(mx.array([[1]]), cache=caches[defer])[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        mx.eval(mx.argmax(logprobs, axis=-1), logprobs)

    def run_prompt() -> None:
        cache = make_prompt_cache(model)
        model(prompt, cache=cache)
        mx.eval([c.state for c in cache])  # not the logits

    def enough(layer: int, *_: object) -> None:
        if layer and clock() - start > FIRST_SECONDS:
            raise _Enough(layer)

    try:
        start = clock()
        experts.trace = enough  # called before each layer's experts are computed
        step(None)
        experts.trace = None
        looks, token = _medians([partial(step, None), partial(step, unseen)], TOKENS, clock)
        # A device that is slow at tokens is no quicker at each one of a prompt: try fewer.
        most = max(2, min(PROMPT_TOKENS, int(MOST_SECONDS / token)))
        prompt = mx.array([[i % 256 for i in range(min(most, plan.context, plan.widest_step))]])
        (prompt_seconds,) = _medians([run_prompt], 3, clock)
    except _Enough as e:
        token = (clock() - start) * len(skeleton.layouts) / e.layer
        return Compute(token, 0.0, token)
    finally:
        experts.defer = experts.trace = None
        experts.settle()
        reader.close()
    return Compute(token, max(0.0, looks - token), prompt_seconds / prompt.size)


def _medians(
    runs: Sequence[Callable[[], None]], times: int, clock: Callable[[], float]
) -> list[float]:
    """Of up to `times` rounds after a first one, fewer if they take long; what disturbs one run
    disturbs all."""
    start = time.perf_counter()
    seconds: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    while not seconds[0] or (
        len(seconds[0]) < times and time.perf_counter() - start < MOST_SECONDS * len(runs)
    ):
        for run, mine in zip(runs, seconds, strict=True):
            before = clock()
            run()
            mine.append(clock() - before)
    return list(map(statistics.median, seconds))


# ---- the forecast --------------------------------------------------------------------------------


def default_hit_rate(plan: MemoryPlan, exponent: float = CURVE) -> float:
    """Hit rate while decoding where no trace tells. With fewer slots than a token has experts,
    those of one layer have gone when its turn comes again: 0."""
    if plan.slots < plan.expert_reads:
        return 0.0
    return math.pow(plan.slots / plan.num_experts, exponent)


def traced_hit_rate(trace: Trace, plan: MemoryPlan, policy: str) -> float:
    """Hit rate of a trace, replayed with the plan's slots.

    Raises:
        TraceError: it is of another model.
    """
    if sum(trace.num_experts) != plan.num_experts or sum(trace.top_k) != plan.expert_reads:
        raise TraceError(
            f"the trace is of a model with {sum(trace.num_experts)} experts, "
            f"{sum(trace.top_k)} a token; this one has {plan.num_experts}, {plan.expert_reads}"
        )
    result = replay(trace, policy, plan.slots)
    return (result.decode if result.decode.hits + result.decode.misses else result.prompt).hit_rate


def forecast(
    plan: MemoryPlan,
    config: StreamingConfig,
    compute: Compute,
    disk: DiskProbe,
    trace: Trace | None = None,
    prompt_tokens: int = 512,
    hit_rate: float | None = None,
) -> Forecast:
    """Seconds a token and for a prompt, with the plan's slots.

    The hit rate is that of the trace if there is one, else the one given, else the default curve's.
    """
    layers = sum(len(b.layers) for b in plan.banks)
    top_k = plan.expert_reads / layers
    expert_nbytes = plan.experts_nbytes / plan.num_experts
    slow = disk.latency_seconds + disk.record_nbytes / disk.bytes_per_second > SLOW_SECONDS
    ahead = OVERLAP if config.lookahead and config.threads and slow else 0.0
    prompt_tokens = min(prompt_tokens, plan.context)

    def decode(hit_rate: float, overlap: float, spread: float) -> dict[str, float]:
        """The parts of a token's time; spread: how much slower everything is."""
        missing = layers * (1 - hit_rate**top_k)  # layers that lack an expert
        nbytes = plan.expert_reads * (1 - hit_rate) * expert_nbytes
        syncs = 0.0 if plan.slots == plan.num_experts else compute.syncs
        if config.decode in ("auto", "token") and missing <= 1:
            syncs = min(syncs, missing * compute.token / 2)  # half is done again
        reading = nbytes / disk.bytes_per_second + missing * disk.latency_seconds
        hidden = min(reading, overlap * compute.token)
        seconds = spread * (compute.token + syncs + reading - hidden)
        return {"seconds": seconds, "syncs": syncs, "reading": reading, "hidden": hidden,
                "nbytes": nbytes}  # fmt: skip

    def prompt(overlap: float, spread: float) -> float:
        passes = math.ceil(prompt_tokens / max(1, plan.prefill_tokens))
        once = 1 - plan.expert_reads / plan.num_experts  # share that one token does not need
        share = 1 - math.pow(once, prompt_tokens / passes)
        nbytes = passes * share * plan.experts_nbytes
        reading = nbytes / disk.bytes_per_second + passes * layers * disk.latency_seconds
        work = compute.prompt_token * prompt_tokens + compute.token
        return spread * (work + max(0.0, reading - overlap * work))

    if plan.slots == plan.num_experts:
        rates = [1.0] * 3
    elif trace is not None:
        rates = [traced_hit_rate(trace, plan, config.policy)] * 3
    elif hit_rate is not None:
        rates = [hit_rate] * 3
    else:
        rates = [default_hit_rate(plan, x) for x in (NARROW_CURVE, CURVE, EVEN_CURVE)]
    likely = decode(rates[1], ahead, 1.0)
    return Forecast(
        hit_rate=rates[1],
        traced=trace is not None,
        token=Speed(
            decode(rates[0], 2 * ahead, 1 / SPREAD)["seconds"],
            likely["seconds"],
            decode(rates[2], 0.0, SPREAD)["seconds"],
        ),
        compute=compute.token,
        syncs=likely["syncs"],
        reading=likely["reading"],
        hidden=likely["hidden"],
        nbytes=likely["nbytes"],
        prompt=Speed(prompt(1.0, 1 / SPREAD), prompt(2 * ahead, 1.0), prompt(0.0, SPREAD)),
        prompt_tokens=prompt_tokens,
    )
