"""Replay: what a policy and a number of slots would have made of a recorded routing.

The product's own cache is run, with its policies and in its order, over experts of zero bytes. The
optimum (Belady) knows the future; no policy that loads an expert only when it is needed beats it.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .cache.experts import SharedExpertCache
from .cache.policy import POLICIES, Key
from .config import StreamingConfig
from .errors import BudgetError
from .layers.switch import SORT_FROM, without_zero_experts
from .plan import BankPlan, count_slots, format_bytes, plan_banks
from .store.layout import ExpertLayout, TensorSpec
from .store.reader import ExpertReader
from .trace import Trace

OPTIMAL = "optimal"
NO_LIMIT = 1 << 62  # of the size of an array: the trace says what shares a bank
NEVER = 1 << 62


@dataclass(frozen=True)
class Counts:
    """Lookups of one part of a trace; `nbytes` were read for the misses.

    Layers that hold all their experts look nothing up.
    """

    hits: int = 0
    misses: int = 0
    nbytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of lookups that found their expert in memory; 1.0 if there was none."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 1.0


@dataclass(frozen=True)
class Result:
    """What one policy made of a trace with this many slots."""

    policy: str
    slots: int
    prompt: Counts
    decode: Counts


def replay(trace: Trace, policy: str, slots: int) -> Result:
    """Run a policy over a trace, as the streamed model would have with this many slots.

    Raises:
        ValueError: no such policy.
        BudgetError: fewer slots than banks.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: one of {', '.join(POLICIES)}")
    layouts = [
        ExpertLayout("", n, (), *(np.zeros((0, n), np.int64),) * 2) for n in trace.num_experts
    ]
    banks = [(b.layers, b.slots) for b in _banks(trace, slots)]
    reader = ExpertReader([], threads=0)
    cache = SharedExpertCache(layouts, banks, reader, POLICIES[policy])
    zero = _layers_with_zero_experts(trace)
    before = cache.stats.layers
    parts = []
    for part in _split(trace, list(trace)):
        start = [(x.hits, x.misses) for x in before]
        with cache.lock:
            for layer, ids in part:
                _call(cache, layer, ids, layer in zero)
        parts.append(
            _count(
                trace,
                [x.hits - h for x, (h, _) in zip(before, start, strict=True)],
                [x.misses - m for x, (_, m) in zip(before, start, strict=True)],
            )
        )
    reader.close()
    return Result(policy, slots, *parts)


def _call(cache: SharedExpertCache, layer: int, ids: np.ndarray, has_zero_experts: bool) -> None:
    """The claims of one layer call, as the streaming modules make them."""
    if has_zero_experts:
        ids = without_zero_experts(cache, layer, ids)
    elif ids.size < SORT_FROM and cache.claim_few(layer, ids.ravel().tolist()) is not None:
        return
    for experts in cache.waves(layer, ids):
        cache.claim(layer, experts)


def optimal(trace: Trace, slots: int) -> Result:
    """The most hits that loading on demand can have, for prompt and decoding each by itself.

    As `replay`: layers of a bank share its slots, and the experts of one call are needed together.
    Decoding begins with the best that could be left of the prompt.

    Raises:
        BudgetError: fewer slots than banks.
    """
    prompt, decode = _split(trace, [(layer, _keys(layer, ids, trace)) for layer, ids in trace])
    hits: list[Counter[int]] = [Counter(), Counter()]
    misses: list[Counter[int]] = [Counter(), Counter()]
    for bank in _banks(trace, slots):
        if bank.slots >= bank.experts:
            continue
        parts = [
            [keys for layer, keys in part if layer in bank.layers] for part in (prompt, decode)
        ]
        seen = {key for keys in parts[0] for key in keys}
        for i, start in enumerate((set[Key](), seen)):
            found, missed = belady(parts[i], bank.slots, start)
            hits[i] += found
            misses[i] += missed
    layers = range(trace.num_layers)
    counts = [
        _count(trace, [h[i] for i in layers], [m[i] for i in layers])
        for h, m in zip(hits, misses, strict=True)
    ]
    return Result(OPTIMAL, slots, *counts)


def belady(
    calls: Sequence[Sequence[Key]], slots: int, start: Iterable[Key] = ()
) -> tuple[Counter[int], Counter[int]]:
    """Hits and misses by layer of the policy that evicts what is needed furthest in the future.

    Args:
        calls: the distinct keys that each call needs, all at once if there are slots for them. (If
            not, those with the nearest use stay afterwards: a bound all the same.)
        start: what is in memory before; if too many, those with the nearest use are.
    """
    uses: list[list[int]] = []  # when each key of a call is needed next
    following: dict[Key, int] = {}
    for i in range(len(calls) - 1, -1, -1):
        uses.append([following.get(key, NEVER) for key in calls[i]])
        following.update(dict.fromkeys(calls[i], i))
    uses.reverse()
    resident = set(start)
    furthest = [(-following.get(key, NEVER), key) for key in resident]
    heapq.heapify(furthest)
    hits, misses = Counter[int](), Counter[int]()

    def shrink(keep: Sequence[Key]) -> None:
        kept = []
        while len(resident) > slots:
            entry = heapq.heappop(furthest)  # uses that are past come last and are never reached
            if entry[1] in keep:
                kept.append(entry)
            else:
                resident.remove(entry[1])
        for entry in kept:
            heapq.heappush(furthest, entry)

    shrink(())
    for keys, nexts in zip(calls, uses, strict=True):
        for key in keys:
            (hits if key in resident else misses)[key[0]] += 1
        for key, use in zip(keys, nexts, strict=True):
            resident.add(key)
            heapq.heappush(furthest, (-use, key))
        shrink(keys if len(keys) <= slots else ())
    return hits, misses


def overlap(trace: Trace, distance: int = 1) -> list[float]:
    """For each layer, the share of a token's experts that the token `distance` before had too."""
    out = []
    for ids in _by_layer(trace, trace.ids):
        same = (ids[distance:, :, None] == ids[:-distance, None, :]).any(-1)
        out.append(float(same.mean()) if same.size else 0.0)
    return out


def foreseen(trace: Trace) -> list[float | None]:
    """For each layer, the share of a token's experts that the layer before had predicted; None
    where nothing was."""
    if trace.predicted is None:
        return [None] * trace.num_layers
    out: list[float | None] = []
    layers = _by_layer(trace, trace.ids), _by_layer(trace, trace.predicted)
    for ids, predicted in zip(*layers, strict=True):
        there = (predicted >= 0).any(-1)
        same = (ids[there, :, None] == predicted[there, None, :]).any(-1)
        out.append(float(same.mean()) if same.size else None)
    return out


def uses(trace: Trace) -> list[np.ndarray]:
    """For each layer [E]: how many tokens chose each expert."""
    return [
        np.bincount(ids[ids < n], minlength=n)
        for ids, n in zip(_by_layer(trace, trace.ids), trace.num_experts, strict=True)
    ]


def _by_layer(trace: Trace, numbers: np.ndarray) -> list[np.ndarray]:
    """The routing, or what was predicted of it, [tokens, k] of each layer."""
    rows: list[list[np.ndarray]] = [[] for _ in range(trace.num_layers)]
    for layer, ids in trace.by_call(numbers):
        rows[layer].append(ids)
    return [np.concatenate(x) if x else np.zeros((0, 1), np.int32) for x in rows]


def _keys(layer: int, ids: np.ndarray, trace: Trace) -> list[Key]:
    return [(layer, e) for e in np.unique(ids).tolist() if e < trace.num_experts[layer]]


def _split(trace: Trace, calls: list[Any]) -> tuple[list[Any], list[Any]]:
    return calls[: trace.prompt_calls], calls[trace.prompt_calls :]


def _layers_with_zero_experts(trace: Trace) -> set[int]:
    return {layer for layer, ids in trace if ids.max() >= trace.num_experts[layer]}


def _banks(trace: Trace, slots: int) -> tuple[BankPlan, ...]:
    """The banks that the product would plan for this many slots."""
    layouts = []
    none = np.zeros((0, 0), np.int64)
    for bank, n, nbytes in zip(trace.banks, trace.num_experts, trace.expert_nbytes, strict=True):
        spec = TensorSpec(f"bank {bank}", "weight", "U8", (nbytes,), nbytes)
        layouts.append(ExpertLayout("", n, (spec,), none, none))
    return plan_banks(layouts, slots, NO_LIMIT)


def _count(trace: Trace, hits: Sequence[int], misses: Sequence[int]) -> Counts:
    nbytes = sum(m * n for m, n in zip(misses, trace.expert_nbytes, strict=True))
    return Counts(sum(hits), sum(misses), nbytes)


# ---- the report ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """A trace replayed by several policies at several numbers of slots, beside the optimum.

    Attributes:
        overlap: of each layer, the share of a token's experts that the token before had too.
        foreseen: of each layer, the share that the layer before had predicted; None where nothing
            was.
        results: budget by budget, the policies in the order given, then the optimum.
    """

    model: str
    tokens: int
    prompt_tokens: int
    num_experts: int
    layers: int
    top_k: int
    expert_nbytes: int
    overlap: tuple[float, ...]
    foreseen: tuple[float | None, ...]
    results: tuple[Result, ...]

    @property
    def decode_tokens(self) -> int:
        return self.tokens - self.prompt_tokens

    @property
    def policies(self) -> list[str]:
        return list(dict.fromkeys(r.policy for r in self.results))

    def of(self, policy: str) -> list[Result]:
        """The results of one policy, by slots."""
        return sorted((r for r in self.results if r.policy == policy), key=lambda r: r.slots)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        out = asdict(self)
        for row, r in zip(out["results"], self.results, strict=True):
            for part in ("prompt", "decode"):
                row[part]["hit_rate"] = getattr(r, part).hit_rate
        return out

    def __str__(self) -> str:
        mean = 100 * sum(self.overlap) / len(self.overlap)
        lines = [
            f"{self.model}: {self.tokens:,} tokens, {self.prompt_tokens:,} of them prompt; "
            f"{self.layers} layers, {self.num_experts:,} experts of "
            f"{format_bytes(self.expert_nbytes)}, {self.top_k} a token and layer",
            f"shared with the token before: {mean:.1f} % of a token's experts (by layer: "
            + " ".join(f"{100 * x:.0f}" for x in self.overlap)
            + ")",
        ]
        predicted = [x for x in self.foreseen if x is not None]
        if predicted:
            lines.append(
                f"foreseen by the layer before: {100 * sum(predicted) / len(predicted):.1f} % "
                "of a token's experts (by layer: "
                + " ".join("-" if x is None else f"{100 * x:.0f}" for x in self.foreseen)
                + ")"
            )
        for part, tokens in (("decode", self.decode_tokens), ("prompt", self.prompt_tokens)):
            if tokens:
                what = {"decode": "decoding", "prompt": "the prompt"}[part]
                lines += ["", f"{what}: hits, and bytes read a token", *self._table(part, tokens)]
        return "\n".join(lines)

    def _table(self, part: str, tokens: int) -> list[str]:
        lines = [f"{'slots':<17}" + "".join(f"{p:>20}" for p in self.policies)]
        for slots in sorted({r.slots for r in self.results}):
            line = f"{slots:>7,} {100 * slots / self.num_experts:6.1f} % "
            for policy in self.policies:
                counts = getattr(next(r for r in self.of(policy) if r.slots == slots), part)
                read = format_bytes(counts.nbytes / tokens)
                line += f"{100 * counts.hit_rate:9.1f} % {read:>8}"
            lines.append(line)
        return lines


def report(trace: Trace, policies: Sequence[str], budgets: Sequence[int | float]) -> Report:
    """Replay a trace by each policy at each budget.

    Args:
        budgets: as `slots` of `load`: experts over all layers (int), or a share of all (float).

    Raises:
        ValueError: no such policy.
        BudgetError: a budget that is no number of slots of this model.
    """
    results = []
    for slots in dict.fromkeys(_slots(trace, b) for b in budgets):
        results += [replay(trace, policy, slots) for policy in dict.fromkeys(policies)]
        results.append(optimal(trace, slots))
    return Report(
        model=trace.model,
        tokens=trace.tokens,
        prompt_tokens=trace.prompt_tokens,
        num_experts=sum(trace.num_experts),
        layers=trace.num_layers,
        top_k=max(trace.top_k),
        expert_nbytes=max(trace.expert_nbytes),
        overlap=tuple(overlap(trace)),
        foreseen=tuple(foreseen(trace)),
        results=tuple(results),
    )


def _slots(trace: Trace, budget: int | float) -> int:
    StreamingConfig(slots=budget)  # refuses what is no budget
    total = sum(trace.num_experts)
    slots = count_slots(budget, total, len(set(trace.banks)))
    if slots > total:
        raise BudgetError(f"slots={budget}: this model has {total} experts")
    return slots
