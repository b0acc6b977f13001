"""MemoryPlan: from a budget in bytes to slots, chunk sizes and limits. The one place that computes
bytes: it drives the allocation, and the reports quote it.

Works from headers and shapes alone; no weight is read.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .config import StreamingConfig, parse_bytes
from .errors import BudgetError
from .store.layout import ExpertLayout, TensorSpec

PREFILL_STEPS = (2048, 1024, 512, 256, 128, 64)  # mlx-lm's default first
# MLX kernels have been silently wrong beyond so many rows of routed pairs (mlx-lm issue 1585).
MAX_ROWS = 32768
# Small buffers, masks, samplers and the like; measured, not derived.
OVERHEAD_NBYTES = 4 << 20
# Hidden states that a waiting token holds: measured 2.1 to 5.8, LongCat's doubled layers the most.
STATES = 6
# The graph of one chunk's way through a layer, not yet evaluated: measured 115 kB, of the host.
GRAPH_NBYTES = 128 << 10
# What the plan leaves alone when it is made from the memory that is available: for the rest of the
# system; for files where experts come through the page cache (a cache that takes this room has been
# slower than a smaller one); and for Python, its libraries and a tokenizer, measured at 0.2 GB.
SYSTEM_SHARE, SYSTEM_NBYTES = 0.1, 2 << 30
PAGE_CACHE_SHARE = 0.125
INTERPRETER_NBYTES = 256 << 20
# Buffers that MLX keeps for later when they are freed (on GPUs): at most this share of the
# activations, which is where they come from.
BUFFER_CACHE_SHARE = 0.5


@dataclass(frozen=True)
class LayerShape:
    """What the plan must know of one MoE layer, besides where its bytes are."""

    top_k: int
    input_dims: int
    hidden_dims: int


@dataclass(frozen=True)
class ModelShape:
    """What the plan must know of a model.

    Attributes:
        kv_nbytes: the KV cache of `context` tokens.
        kv_beside: keys and values of one layer beside its cache, as it grows or as MLA expands it.
        score_nbytes: what attention writes out for each token, beside its inputs and outputs.
        mask_windows: of the mask arrays that a forward keeps, a byte each.
        keeps_buffers: the backend keeps freed buffers for later (MLX's GPUs).
    """

    backbone_nbytes: int
    layers: tuple[LayerShape, ...]
    hidden_size: int
    num_heads: int
    head_dim: int
    vocab_size: int
    activation_itemsize: int
    context: int
    kv_nbytes: int
    kv_beside: int = 0
    score_nbytes: int = 0
    mask_windows: tuple[int, ...] = ()
    keeps_buffers: bool = False


@dataclass(frozen=True)
class BankPlan:
    """One slot bank: the layers that share it (by index) and its number of slots."""

    layers: tuple[int, ...]
    slots: int
    experts: int
    expert_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.slots * self.expert_nbytes


@dataclass(frozen=True)
class MemoryPlan:
    """Where the memory goes. All sizes in bytes.

    Attributes:
        backbone: everything that is not a routed expert.
        banks: the slot banks; `slots` (experts) and `slots_nbytes` sum them up.
        kv_cache: for `context` tokens.
        context: tokens.
        activations: at the widest point of a forward of `prefill_step` tokens.
        prefill_step: tokens of a prompt that are computed at a time.
        widest_step: the most tokens of a forward, whatever is asked for.
        prompt_states: what a prompt holds on its way through the model layer by layer, beside the
            chunk that is computed.
        token_state: of that, for each token.
        chunk_graph: of that, for each chunk of `prefill_step` tokens.
        buffer_cache: freed buffers that MLX may keep for later.
        overhead: what MLX needs besides.
        memory: the budget that was asked for, or None.
        available: without one: what the machine could give.
        interpreter: of it, what Python and its libraries take.
        page_cache: of it, what is left to files.
        experts_nbytes: all routed experts, as they lie on disk.
        num_experts: all routed experts, over all layers.
        minimum: the smallest `memory` that works.
        useful: the smallest that holds the experts of one whole token. Below it, hardly any expert
            is still there when it comes again.
        full: the smallest with everything in memory.
        expert_reads: experts that one token is routed to, over all layers.
    """

    backbone: int
    banks: tuple[BankPlan, ...]
    kv_cache: int
    context: int
    activations: int
    prefill_step: int
    widest_step: int
    prompt_states: int
    token_state: int
    chunk_graph: int
    buffer_cache: int
    overhead: int
    memory: int | None
    available: int | None
    interpreter: int
    page_cache: int
    experts_nbytes: int
    num_experts: int
    minimum: int
    useful: int
    full: int
    expert_reads: int

    @property
    def slots(self) -> int:
        """Experts that there is room for, over all layers."""
        return sum(b.slots for b in self.banks)

    @property
    def slots_nbytes(self) -> int:
        """What their slots take."""
        return sum(b.nbytes for b in self.banks)

    @property
    def total(self) -> int:
        """What MLX will have allocated at its peak."""
        fixed = self.backbone + self.kv_cache + self.buffer_cache + self.overhead
        return fixed + self.slots_nbytes + self.activations + self.prompt_states

    @property
    def system(self) -> int:
        """What a plan from the memory that is available leaves free."""
        taken = self.total + self.interpreter + self.page_cache
        return 0 if self.available is None else self.available - taken

    def pass_tokens(self, width: int) -> int:
        """Tokens of a prompt that go layer by layer at once, in chunks of `width`."""
        return width + self.prompt_states * width // (self.token_state * width + self.chunk_graph)

    @property
    def prefill_tokens(self) -> int:
        """`pass_tokens` in chunks of `prefill_step`."""
        return self.pass_tokens(self.prefill_step)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        names = ("slots", "slots_nbytes", "prefill_tokens", "total", "system")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}

    def __str__(self) -> str:
        share = 100 * self.slots / self.num_experts
        rows = [
            ("backbone", self.backbone, "read once, stays"),
            ("expert slots", self.slots_nbytes,
             f"{self.slots:,} of {self.num_experts:,} experts ({share:.1f} %)"),
            ("KV cache", self.kv_cache, f"{self.context:,} tokens"),
            ("activations", self.activations, f"{self.prefill_step:,} prompt tokens at a time"),
            ("prompt states", self.prompt_states,
             f"{self.prefill_tokens:,} prompt tokens layer by layer"),
            ("buffer cache", self.buffer_cache, "freed buffers that MLX keeps"),
            ("overhead", self.overhead, ""),
        ]  # fmt: skip
        given = "" if self.memory is None else f"of {format_bytes(self.memory)} given"
        lines = [*_table(rows), "-" * 24, *_table([("total", self.total, given)])]
        if self.available is not None:
            rows = [
                ("interpreter", self.interpreter, "Python, libraries, tokenizer"),
                ("page cache", self.page_cache, "left to files"),
                ("system", self.system, "left free"),
            ]
            available = ("available", self.available, "could be had without swapping")
            lines += [*_table(rows), "-" * 24, *_table([available])]
        lines += [
            "",
            f"on disk       {format_bytes(self.experts_nbytes):>10}   all routed experts, "
            f"{self.expert_reads:,} of them for one token",
            f"smallest      {format_bytes(self.minimum):>10}   works, slowly",
            f"useful from   {format_bytes(self.useful):>10}   holds one token's experts",
            f"everything    {format_bytes(self.full):>10}   nothing is read twice",
        ]
        return "\n".join(lines)


def _table(rows: Sequence[tuple[str, int, str]]) -> list[str]:
    return [f"{n:<14}{format_bytes(b):>10}   {note}".rstrip() for n, b, note in rows]


def format_bytes(n: float, up: bool = False) -> str:
    """12.3 GB, 456 MB, 7.8 kB: decimal units, three figures, the last one rounded (or `up`)."""
    unit, size = next((u, s) for u, s in _DECIMAL if abs(n) >= 0.9995 * s or s == 1)
    value = n / size
    digits = 0 if size == 1 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    if up:
        value = math.ceil(round(value * 10**digits, 6)) / 10**digits
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} {unit}"


_DECIMAL = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))


def activation_nbytes(shape: ModelShape, tokens: int) -> int:
    """An upper estimate of what one forward of `tokens` tokens holds at its widest point.

    The widest point is inside a MoE layer (a routed pair: row gathered, both hidden maps, their
    product, the output in two orders, weighted and summed) or inside attention (queries, keys,
    values and the output, normed, rotated, scaled and transposed; and what `score_nbytes` says),
    beside a few hidden states. Factors measured on a CPU, where MLX allocates up to a hundred
    operations ahead.
    """
    size = shape.activation_itemsize
    experts = size * max(x.top_k * (6 * x.input_dims + 3 * x.hidden_dims) for x in shape.layers)
    attention = size * 13 * shape.num_heads * shape.head_dim + shape.score_nbytes
    per_token = max(experts, attention) + size * 4 * shape.hidden_size
    logits = 4 * shape.vocab_size * max(size, 4)
    return tokens * per_token + logits + shape.kv_beside


def state_nbytes(shape: ModelShape, step: int, outputs: bool) -> int:
    """An upper estimate of what one token holds while others of its prompt pass the same layer.

    Hidden states before and after a norm or two, what the router made of them, rows of masks; and
    where the experts of a layer do not fit into the slots at once, the `outputs` of its experts.
    """
    size = shape.activation_itemsize
    masks = sum(min(shape.context, w + step) for w in shape.mask_windows)
    routed = max(x.top_k * (8 + x.input_dims * size * outputs) for x in shape.layers)
    return STATES * shape.hidden_size * size + routed + masks


def group_layers(layouts: Sequence[ExpertLayout]) -> list[tuple[int, ...]]:
    """Layers whose experts are made of the same tensors, by index."""
    groups: dict[tuple[TensorSpec, ...], list[int]] = {}
    for i, layout in enumerate(layouts):
        groups.setdefault(layout.tensors, []).append(i)
    return [tuple(g) for g in groups.values()]


def split_layers(
    layouts: Sequence[ExpertLayout], max_buffer_nbytes: int
) -> list[tuple[tuple[int, ...], int]]:
    """The banks of a model, as (layers, most slots): one a geometry.

    A geometry whose arrays could pass `max_buffer_nbytes` is split into banks of fewer layers.
    """
    parts = []
    for layers in group_layers(layouts):
        widest = max(t.nbytes for t in layouts[layers[0]].tensors)
        most = max(1, max_buffer_nbytes // widest)  # rows of the largest array
        experts = sum(layouts[i].num_experts for i in layers)
        n = min(len(layers), -(-experts // most))
        size, extra = divmod(len(layers), n)
        at = 0
        for i in range(n):
            part = layers[at : at + size + (i < extra)]
            at += len(part)
            parts.append((part, min(most, sum(layouts[i].num_experts for i in part))))
    return parts


def plan_banks(
    layouts: Sequence[ExpertLayout], slots: int, max_buffer_nbytes: int
) -> tuple[BankPlan, ...]:
    """Deal `slots` out to banks in proportion to their experts, at least one to each.

    By the method of Sainte-Lague: one slot more never takes a slot away from any bank.

    Raises:
        BudgetError: a single slot for each bank is more than `slots`.
    """
    parts = split_layers(layouts, max_buffer_nbytes)
    if slots < len(parts):
        raise BudgetError(
            f"{slots} slots are too few: this model needs at least {len(parts)} "
            f"(one for each of its {len(parts)} kinds of experts)."
        )
    experts = [sum(layouts[i].num_experts for i in layers) for layers, _ in parts]
    dealt = [1] * len(parts)
    left = slots - len(parts)
    if len(parts) == 1:
        dealt, left = [min(slots, parts[0][1])], 0
    queue = [(-n / 3, i) for i, n in enumerate(experts) if parts[i][1] > 1]
    heapq.heapify(queue)
    while left and queue:
        _, i = heapq.heappop(queue)
        dealt[i] += 1
        left -= 1
        if dealt[i] < parts[i][1]:
            heapq.heappush(queue, (-experts[i] / (2 * dealt[i] + 1), i))
    return tuple(
        BankPlan(layers, n, e, layouts[layers[0]].expert_nbytes)
        for (layers, _), n, e in zip(parts, dealt, experts, strict=True)
    )


def count_slots(slots: int | float, total: int, fewest: int) -> int:
    """`slots` of `StreamingConfig` as a number: a float is a share of `total`."""
    return max(fewest, round(slots * total)) if isinstance(slots, float) else slots


def make_plan(
    layouts: Sequence[ExpertLayout],
    shape: ModelShape,
    config: StreamingConfig,
    max_buffer_nbytes: int,
    available_nbytes: int,
    most_slots: int | None = None,
) -> MemoryPlan:
    """Turn a budget into slots.

    Args:
        most_slots: have no more, whatever the memory holds.
        max_buffer_nbytes: the largest array the device takes.
        available_nbytes: memory that could be had on this machine, for a config without a budget.

    Raises:
        BudgetError: the budget is too small; the message says what would do.
    """
    parts = split_layers(layouts, max_buffer_nbytes)
    total, fewest = sum(most for _, most in parts), len(parts)
    reads = sum(s.top_k for s in shape.layers)
    kv, context = shape.kv_nbytes, shape.context

    def activations(step: int) -> int:
        return activation_nbytes(shape, step)

    def buffers(step: int) -> int:
        return int(shape.keeps_buffers * BUFFER_CACHE_SHARE * activations(step))

    def fixed(step: int) -> int:
        held = shape.backbone_nbytes + kv + OVERHEAD_NBYTES
        return held + activations(step) + buffers(step)

    graph = GRAPH_NBYTES * len(shape.layers)

    def longest(step: int, outputs: bool) -> int:
        """For a prompt as long as the context, of which one step is among the activations."""
        token = state_nbytes(shape, step, outputs)
        return -(-(context - step) * (token * step + graph) // step)

    def whole_chunks(room: float, step: int, outputs: bool) -> int:
        """What of `room` the states of a prompt can use: as many chunks as fit, or all."""
        most = longest(step, False)
        if room >= most and not outputs:
            return most
        chunk = state_nbytes(shape, step, outputs) * step + graph
        return max(0, int(min(room, most)) // chunk * chunk)

    def outputs(slots: int) -> bool:
        banks = plan_banks(layouts, slots, max_buffer_nbytes)
        return any(b.slots < max(layouts[i].num_experts for i in b.layers) for b in banks)

    def slots_nbytes(slots: int) -> int:
        return sum(b.nbytes for b in plan_banks(layouts, slots, max_buffer_nbytes))

    def slots_in(room: float) -> int:
        most = total if most_slots is None else min(total, max(most_slots, fewest))
        return _most_slots(slots_nbytes, int(room), fewest, most)

    steps = [config.prefill_step] if config.prefill_step else list(PREFILL_STEPS)
    widest = max(1, MAX_ROWS // max(s.top_k for s in shape.layers))
    steps = sorted({min(s, context, widest) for s in steps}, reverse=True)
    memory = None if config.memory is None else parse_bytes(config.memory)
    available, page_cache = None, 0
    if config.slots is not None:
        step, slots = steps[0], config.slots
        slots = count_slots(slots, total, fewest)
        states = longest(step, outputs(slots)) if slots < total else 0
    else:
        room = memory
        if room is None:
            available = available_nbytes
            room = usable_nbytes(available)
            rest = room - fixed(steps[-1]) - slots_nbytes(min(max(reads, fewest), total))
            if room < fixed(steps[-1]) + slots_nbytes(total) and config.io != "direct":
                page_cache = max(0, min(int(PAGE_CACHE_SHARE * available), rest))
                room -= page_cache
        slots = slots_in(room - fixed(steps[-1]))
        if slots < fewest:
            least = fixed(steps[-1]) + slots_nbytes(fewest)
            raise BudgetError(
                (
                    f"memory={config.memory!r} is too small"
                    if memory is not None
                    else f"about {format_bytes(max(room, 0))} can be used on this machine"
                )
                + f": this model needs at least {format_bytes(least, up=True)} "
                f"({format_bytes(shape.backbone_nbytes)} of it backbone) "
                f"for a context of {context} tokens."
            )
        states = 0
        if slots < total:
            # A wide prefill reads less in all: leave it up to a quarter of what is not backbone,
            # and an eighth of the rest to the hidden states of a prompt.
            free = room - shape.backbone_nbytes - kv - OVERHEAD_NBYTES
            widths = {s: activations(s) + buffers(s) for s in steps}
            wide = max(min(free / 4, widths[steps[0]]), widths[steps[-1]])
            step = next((s for s in steps if widths[s] <= wide), steps[-1])
            states = whole_chunks((free - wide) / 8, step, False)
            enough = reads if slots >= reads else fewest  # fewer get hardly any hits
            slots = max(enough, slots_in(free - wide - states))
        rest = room - slots_nbytes(slots)
        step = next((s for s in steps if fixed(s) + states <= rest), steps[-1])
        states = whole_chunks(min(states, rest - fixed(step)), step, outputs(slots))
    banks = plan_banks(layouts, slots, max_buffer_nbytes)
    if config.hot_per_layer:
        for bank in banks:
            _check_pins(bank, max(shape.layers[i].top_k for i in bank.layers), config)
    return MemoryPlan(
        backbone=shape.backbone_nbytes,
        banks=banks,
        kv_cache=kv,
        context=context,
        activations=activations(step),
        prefill_step=step,
        widest_step=widest,
        prompt_states=states,
        token_state=state_nbytes(shape, step, outputs(slots)),
        chunk_graph=graph,
        buffer_cache=buffers(step),
        overhead=OVERHEAD_NBYTES,
        memory=memory,
        available=available,
        interpreter=0 if available is None else INTERPRETER_NBYTES,
        page_cache=page_cache,
        experts_nbytes=sum(x.nbytes for x in layouts),
        num_experts=sum(x.num_experts for x in layouts),
        minimum=fixed(steps[-1]) + slots_nbytes(fewest),
        useful=fixed(steps[-1]) + slots_nbytes(max(fewest, min(reads, total))),
        full=fixed(steps[-1]) + slots_nbytes(total),
        expert_reads=reads,
    )


def _check_pins(bank: BankPlan, top_k: int, config: StreamingConfig) -> None:
    """Beside its pins, a bank must have room for the experts of one token in one layer."""
    most = (bank.slots - top_k) // len(bank.layers)
    if config.hot_per_layer > max(0, most) and bank.slots < bank.experts:
        raise BudgetError(
            f"hot_per_layer={config.hot_per_layer} pins {len(bank.layers)} layers' most used "
            f"experts, but they share {bank.slots} slots, and a token needs {top_k} at a time: "
            f"at most {max(0, most)}. Pin fewer, or give the cache more memory."
        )


def _most_slots(nbytes_of, room: int, fewest: int, total: int) -> int:  # type: ignore[no-untyped-def]
    """The most slots that fit into `room` bytes, or fewer than `fewest` if none do."""
    low, high = fewest - 1, total
    while low < high:
        middle = (low + high + 1) // 2
        if nbytes_of(middle) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def usable_nbytes(available: int) -> int:
    """What MLX may take of the available memory: the system and the interpreter keep the rest."""
    return available - max(SYSTEM_NBYTES, int(SYSTEM_SHARE * available)) - INTERPRETER_NBYTES
