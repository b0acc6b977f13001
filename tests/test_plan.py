"""Plans: budgets in, slots out, and every byte accounted for."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from smoe_mlx.config import StreamingConfig, parse_bytes
from smoe_mlx.errors import BudgetError
from smoe_mlx.plan import (
    INTERPRETER_NBYTES,
    OVERHEAD_NBYTES,
    PREFILL_STEPS,
    LayerShape,
    MemoryPlan,
    ModelShape,
    activation_nbytes,
    format_bytes,
    group_layers,
    make_plan,
    plan_banks,
    split_layers,
)
from smoe_mlx.store.layout import ExpertLayout, TensorSpec

NO_LIMIT = 1 << 46


def make_layout(experts: int, sizes: tuple[int, ...]) -> ExpertLayout:
    """A layer of `experts`, each of tensors of so many bytes."""
    tensors = tuple(TensorSpec("up_proj", f"t{i}", "U8", (n,), n) for i, n in enumerate(sizes))
    nowhere = np.zeros((len(sizes), experts), np.int64)
    return ExpertLayout("layer", experts, tensors, nowhere, nowhere)


def make_shape(layouts, top_k=1, **changes) -> ModelShape:
    shape = ModelShape(
        backbone_nbytes=1000,
        layers=tuple(LayerShape(min(top_k, x.num_experts), 8, 4) for x in layouts),
        hidden_size=8,
        num_heads=2,
        head_dim=4,
        vocab_size=100,
        activation_itemsize=2,
        context=4096,
        kv_nbytes=500,
    )
    return replace(shape, **changes)


geometries = st.sampled_from([(10,), (4, 4), (1000, 8, 8), (77,), (50_000,)])
# A model: layers of up to three geometries in any order, with uneven expert counts.
models = st.lists(st.builds(make_layout, st.integers(1, 12), geometries), min_size=1, max_size=8)


def plan_of(layouts, shape=None, *, max_buffer=NO_LIMIT, available=0, **options) -> MemoryPlan:
    shape = shape or make_shape(layouts)
    return make_plan(layouts, shape, StreamingConfig(**options), max_buffer, available)


# ---- banks ---------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(models, st.integers(1, 120), st.sampled_from([NO_LIMIT, 200_000, 50_000]))
def test_banks_share_out_exactly_the_slots_asked_for(layouts, slots, max_buffer):
    parts = split_layers(layouts, max_buffer)
    total = sum(most for _, most in parts)  # all experts, unless an array would be too large
    if max_buffer == NO_LIMIT:
        assert total == sum(x.num_experts for x in layouts)
        assert len(parts) == len(group_layers(layouts))
    try:
        banks = plan_banks(layouts, slots, max_buffer)
    except BudgetError as e:
        least = int(re.search(r"at least (\d+)", str(e))[1])
        assert slots < least == len(parts)
        plan_banks(layouts, least, max_buffer)
        return
    assert sorted(i for b in banks for i in b.layers) == list(range(len(layouts)))
    assert sum(b.slots for b in banks) == min(slots, total)
    for b in banks:
        assert len({layouts[i].tensors for i in b.layers}) == 1
        assert b.experts == sum(layouts[i].num_experts for i in b.layers)
        assert 1 <= b.slots <= b.experts
        assert b.expert_nbytes == layouts[b.layers[0]].expert_nbytes
        assert b.nbytes == b.slots * b.expert_nbytes
        # its share, give or take the one slot that every bank must have
        assert max_buffer < NO_LIMIT or abs(b.slots - min(slots, total) * b.experts / total) <= len(
            banks
        )


@given(models)
def test_banks_with_a_slot_for_each_expert_hold_all(layouts):
    banks = plan_banks(layouts, 10_000, NO_LIMIT)
    assert all(b.slots == b.experts for b in banks)
    assert sum(b.nbytes for b in banks) == sum(x.nbytes for x in layouts)


def test_layers_of_one_geometry_share_one_bank_wherever_they_are():
    layouts = [make_layout(4, (10,)), make_layout(4, (99,)), make_layout(6, (10,))]
    assert group_layers(layouts) == [(0, 2), (1,)]
    assert [b.layers for b in plan_banks(layouts, 7, NO_LIMIT)] == [(0, 2), (1,)]


def test_a_geometry_is_split_where_its_array_would_be_too_large():
    layouts = [make_layout(4, (100, 10))] * 4
    assert [b.layers for b in plan_banks(layouts, 16, 1600)] == [(0, 1, 2, 3)]
    assert [b.layers for b in plan_banks(layouts, 16, 1599)] == [(0, 1), (2, 3)]
    assert [b.layers for b in plan_banks(layouts, 16, 400)] == [(0,), (1,), (2,), (3,)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(models, st.integers(1, 120), st.integers(1, 8))
@example([make_layout(4, (100,))] * 3, 12, 6)  # 6 slots fit; banks of 8 and 4 are made
@example([make_layout(12, (10,)), make_layout(2, (10,))], 14, 12)
def test_no_array_is_larger_than_the_device_takes(layouts, slots, fit):
    widest = max(t.nbytes for x in layouts for t in x.tensors)
    most = max(x.num_experts for x in layouts)
    max_buffer = max(fit, most) * widest  # so that a layer of its own always fits
    assume(slots >= len(layouts))
    for b in plan_banks(layouts, slots, max_buffer):
        for t in layouts[b.layers[0]].tensors:
            assert b.slots * t.nbytes <= max_buffer


# ---- plans ---------------------------------------------------------------------------------------


def check_plan(plan: MemoryPlan, layouts, shape: ModelShape) -> None:
    assert plan.total == (
        plan.backbone
        + plan.slots_nbytes
        + plan.kv_cache
        + plan.activations
        + plan.prompt_states
        + plan.buffer_cache
        + plan.overhead
    )
    assert plan.slots == sum(b.slots for b in plan.banks)
    assert plan.slots_nbytes == sum(b.slots * b.expert_nbytes for b in plan.banks)
    assert (plan.backbone, plan.kv_cache) == (shape.backbone_nbytes, shape.kv_nbytes)
    assert plan.activations == activation_nbytes(shape, plan.prefill_step)
    assert plan.prefill_step <= plan.prefill_tokens <= plan.context
    assert plan.prefill_tokens in (plan.context, *range(0, plan.context, plan.prefill_step))
    assert plan.num_experts == sum(x.num_experts for x in layouts)
    assert plan.experts_nbytes == sum(x.nbytes for x in layouts)
    assert plan.minimum <= plan.useful <= plan.full
    assert all(1 <= b.slots <= b.experts for b in plan.banks)


@settings(max_examples=100, deadline=None)
@given(models, st.floats(0, 1.2), st.sampled_from([None, 1, 64, 2048]))
def test_a_plan_stays_within_the_memory_and_its_parts_add_up(layouts, share, step):
    shape = make_shape(layouts)
    full = plan_of(layouts, shape, slots=1.0, prefill_step=step).full
    least = plan_of(layouts, shape, slots=1.0, prefill_step=step).minimum
    memory = least + int(share * (full - least))
    try:
        plan = plan_of(layouts, shape, memory=memory, prefill_step=step)
    except BudgetError:
        assert step is None  # see test_any_memory_from_the_minimum_on_works
        return
    check_plan(plan, layouts, shape)
    assert plan.total <= plan.memory == memory
    if memory >= full and step is not None:  # else see test_what_is_said_to_hold_everything_does
        assert plan.slots == plan.num_experts
    if plan.slots < plan.num_experts and len(plan.banks) == 1 and step is not None:
        one_more = plan.total + plan.banks[0].expert_nbytes
        assert one_more > memory, "memory was left unused"


@settings(max_examples=100, deadline=None)
@given(models, st.integers(1, 100), st.sampled_from([1, 64, 2048]))
def test_slots_are_taken_as_they_are_given(layouts, slots, step):
    shape = make_shape(layouts)
    assume(slots >= len(group_layers(layouts)))
    plan = plan_of(layouts, shape, slots=slots, prefill_step=step)
    check_plan(plan, layouts, shape)
    assert plan.slots == min(slots, plan.num_experts)
    assert plan.memory is None
    if plan.slots < plan.num_experts:
        assert plan.prefill_tokens == plan.context


@given(models, st.floats(0, 1, exclude_min=True))
def test_a_share_of_slots_is_rounded_and_always_works(layouts, share):
    plan = plan_of(layouts, slots=share)
    assert plan.slots == max(len(group_layers(layouts)), round(share * plan.num_experts))


def test_narrow_chunks_have_more_graph_and_go_fewer_tokens_at_once():
    layouts = [make_layout(8, (10,))] * 4
    plan = plan_of(layouts, slots=8, context=4096)
    tokens = [plan.pass_tokens(width) for width in (1, 16, 256, 2048)]
    assert tokens == sorted(tokens)
    assert tokens[-1] == 4096
    for width, n in zip((1, 16, 256, 2048), tokens, strict=True):
        assert (n - width) * plan.token_state + (n - width) // width * plan.chunk_graph <= (
            plan.prompt_states
        )


def test_no_forward_is_wider_than_kernels_stand():
    layouts = [make_layout(64, (10,))]
    assert plan_of(layouts, make_shape(layouts, top_k=1), slots=8).prefill_step == 2048
    plan = plan_of(layouts, make_shape(layouts, top_k=32), slots=8, prefill_step=4096)
    assert plan.prefill_step == plan.widest_step == 1024


def test_too_few_slots_are_refused_with_the_number_that_works():
    layouts = [make_layout(4, (10,)), make_layout(4, (20,)), make_layout(4, (30,))]
    with pytest.raises(BudgetError, match="at least 3") as caught:
        plan_of(layouts, slots=2)
    assert "2 slots" in str(caught.value)
    assert plan_of(layouts, slots=3).slots == 3


@settings(max_examples=100, deadline=None)
@given(models, st.sampled_from([1, 64, 2048]))
def test_the_minimum_is_the_least_memory_that_works(layouts, step):
    least = plan_of(layouts, slots=1.0, prefill_step=step).minimum
    plan = plan_of(layouts, memory=least, prefill_step=step)
    assert plan.slots == len(group_layers(layouts))
    assert plan.minimum == plan.total == least
    with pytest.raises(BudgetError):
        plan_of(layouts, memory=least - 1, prefill_step=step)


def check_useful(layouts, top_k: int) -> None:
    shape = make_shape(layouts, top_k=top_k)
    reads = sum(min(top_k, x.num_experts) for x in layouts)
    first = plan_of(layouts, shape, slots=1.0, prefill_step=64)
    assert first.expert_reads == reads
    assert plan_of(layouts, shape, memory=first.useful, prefill_step=64).slots >= reads


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 3))
def test_useful_holds_the_experts_of_one_token(counts, top_k):
    check_useful([make_layout(n, (1000, 8, 8)) for n in counts], top_k)


def test_useful_holds_the_experts_of_one_token_whatever_their_sizes():
    kinds = [(3, (10,)), (4, (4, 4)), (5, (10,)), (10, (4, 4)), (12, (1000, 8, 8))]
    check_useful([make_layout(*k) for k in kinds], top_k=3)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(models, st.integers(1, 100))
@example([make_layout(n, (size,)) for n, size in [(8, 10), (14, 4), (12, 1016)]], 14)
def test_one_slot_more_takes_no_slot_from_any_bank(layouts, slots):
    assume(slots >= len(group_layers(layouts)))
    fewer, more = (plan_banks(layouts, n, NO_LIMIT) for n in (slots, slots + 1))
    assert all(a.slots <= b.slots for a, b in zip(fewer, more, strict=True))


@settings(max_examples=100, deadline=None)
@given(models, st.lists(st.integers(0, 400_000), min_size=2, max_size=6))
def test_more_memory_never_gives_fewer_slots_at_one_prefill_step(layouts, extras):
    least = plan_of(layouts, slots=1.0, prefill_step=64).minimum
    slots = [
        plan_of(layouts, memory=least + extra, prefill_step=64).slots for extra in sorted(extras)
    ]
    assert slots == sorted(slots)


# One layer of 100 experts of 10 kB, whose activations at 2048 tokens are about 4 MB.
plain = [make_layout(100, (100_000,))]
plain_shape = make_shape(plain, hidden_size=512)


@pytest.mark.parametrize("spare", [0, 300_000])
def test_any_memory_from_the_minimum_on_works(spare):
    least = plan_of(plain, plain_shape, slots=1).minimum
    assert plan_of(plain, plain_shape, memory=least + spare).slots >= 1


@pytest.mark.parametrize("experts", [12, 100])
def test_what_is_said_to_hold_everything_does(experts):
    layouts = [make_layout(experts, (50_000,))]
    full = plan_of(layouts, slots=1).full
    plan = plan_of(layouts, memory=full)
    assert plan.slots == plan.num_experts


def test_the_prefill_step_grows_with_the_memory():
    least = plan_of(plain, plain_shape, slots=1).minimum
    steps = [
        plan_of(plain, plain_shape, memory=least + 5_000_000 * i).prefill_step for i in range(2, 40)
    ]
    assert steps == sorted(steps)
    assert steps[-1] == PREFILL_STEPS[0]
    assert steps[0] < steps[-1]


def test_one_token_s_experts_come_before_a_wide_prefill():
    layouts = [make_layout(50, (100_000,))]
    shape = make_shape(layouts)
    useful = plan_of(layouts, shape, slots=1.0).useful
    assert (
        plan_of(layouts, shape, memory=useful).slots
        >= plan_of(layouts, shape, slots=1.0).expert_reads
    )


def test_more_memory_never_gives_fewer_slots():
    least = plan_of(plain, plain_shape, slots=1).minimum
    slots = [plan_of(plain, plain_shape, memory=least + 1_000_000 * i).slots for i in range(8, 200)]
    assert slots == sorted(slots)


def test_memory_for_a_prompt_s_states_is_given_in_whole_chunks():
    """Chunks are not cut, so that less than one more would lie idle."""
    options = {"shape": replace(plain_shape, context=1024), "prefill_step": 64}
    least = plan_of(plain, slots=1, **options).minimum
    plans = [plan_of(plain, memory=least + 250_000 * i, **options) for i in range(50)]
    chunks = {p.prefill_tokens / p.prefill_step for p in plans if p.slots < p.num_experts}
    assert chunks >= {1, 2}
    assert all(n == int(n) for n in chunks)


def amount_in(error: BudgetError) -> str:
    return re.search(r"at least ([\d.]+ [kMGT]?B)", str(error))[1]


def test_too_little_memory_is_refused_with_what_it_is_needed_for():
    shape = make_shape(plain, backbone_nbytes=70_000_000)
    with pytest.raises(BudgetError) as caught:
        plan_of(plain, shape, memory="12MB")
    for words in ("'12MB'", "too small", "70 MB", "4096 tokens", amount_in(caught.value)):
        assert words in str(caught.value)


@pytest.mark.parametrize("backbone", [0, 2_222_222, 44_444_444, 123_456_789_012])
def test_the_amount_that_the_error_names_then_works(backbone):
    shape = make_shape(plain, backbone_nbytes=backbone)
    with pytest.raises(BudgetError) as caught:
        plan_of(plain, shape, memory=1)
    assert plan_of(plain, shape, memory=amount_in(caught.value)).slots >= 1


def test_without_a_budget_the_plan_leaves_the_system_its_share():
    shape = make_shape(plain)
    plan = plan_of(plain, shape, available=(2 << 30) + INTERPRETER_NBYTES + 20_000_000)
    assert plan.memory is None
    assert plan.slots > 0
    assert plan.total <= 20_000_000
    large = 100 << 30
    layouts = [make_layout(100, (2 << 30,))]
    plan = plan_of(layouts, shape, available=large)
    assert plan.system >= 0.1 * large
    assert plan.page_cache == large // 8
    assert plan.total + plan.interpreter + plan.page_cache + plan.system == plan.available == large


def test_the_page_cache_gets_no_room_where_it_would_not_help():
    layouts, shape, large = [make_layout(100, (2 << 30,))], make_shape(plain), 100 << 30
    direct = plan_of(layouts, shape, available=large, io="direct")
    assert direct.page_cache == 0
    assert direct.slots > plan_of(layouts, shape, available=large).slots
    everything = plan_of(layouts, shape, available=4 * large)
    assert everything.page_cache == 0
    assert everything.slots == everything.num_experts


@settings(max_examples=50, deadline=None, derandomize=True)
@given(models, st.floats(0, 1.5))
def test_the_page_cache_takes_nothing_that_a_token_needs(layouts, share):
    shape = make_shape(layouts)
    first = plan_of(layouts, shape, slots=1.0)
    room = first.useful + int(share * (first.full - first.useful))
    plan = plan_of(layouts, shape, available=(2 << 30) + INTERPRETER_NBYTES + room)
    assert plan.slots >= min(first.expert_reads, first.num_experts)
    assert plan.system >= 2 << 30


def test_freed_buffers_are_in_the_plan_of_a_device_that_keeps_them():
    keeps = make_shape(plain, keeps_buffers=True)
    plan = plan_of(plain, keeps, memory="30MB")
    assert plan.buffer_cache == plan.activations // 2 > 0
    check_plan(plan, plain, keeps)
    assert plan.total <= 30_000_000
    assert plan_of(plain, memory="30MB").buffer_cache == 0


def test_without_a_budget_and_without_memory_the_error_says_so():
    with pytest.raises(BudgetError, match="can be used on this machine"):
        plan_of(plain, available=1 << 30)


def test_auto_memory_is_that_of_no_budget():
    assert StreamingConfig(memory="auto") == StreamingConfig()
    assert StreamingConfig(memory="auto", slots=4).slots == 4
    with pytest.raises(BudgetError, match="not a memory size"):
        StreamingConfig(memory="automatic")


def test_the_largest_buffer_bounds_a_plan_s_banks():
    layouts = [make_layout(8, (1000,))] * 4
    plan = plan_of(layouts, slots=32, max_buffer=16_000)
    assert [b.slots for b in plan.banks] == [16, 16]


@settings(max_examples=100, deadline=None)
@given(models, st.integers(1, 100))
def test_the_printed_plan_holds_the_plan_s_numbers(layouts, slots):
    assume(slots >= len(group_layers(layouts)))
    plan = plan_of(layouts, slots=slots)
    lines = str(plan).splitlines()

    def line(name: str) -> str:
        return next(x for x in lines if x.startswith(name))

    for name, nbytes in [
        ("backbone", plan.backbone),
        ("expert slots", plan.slots_nbytes),
        ("KV cache", plan.kv_cache),
        ("activations", plan.activations),
        ("overhead", OVERHEAD_NBYTES),
        ("total", plan.total),
        ("on disk", plan.experts_nbytes),
        ("smallest", plan.minimum),
        ("useful", plan.useful),
        ("everything", plan.full),
    ]:
        assert format_bytes(nbytes) in line(name)
    assert f"{plan.slots:,} of {plan.num_experts:,} experts" in line("expert slots")
    assert f"{plan.expert_reads:,} of them" in line("on disk")
    assert f"{plan.prefill_step:,} prompt tokens" in line("activations")


def test_the_printed_plan_says_of_how_much_memory():
    assert "of 50 MB given" in str(plan_of(plain, memory="50MB"))


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(0, 10**6))
def test_activations_grow_with_the_tokens_and_their_scores(tokens, more, scores):
    shape = make_shape(plain, score_nbytes=scores)
    a, b = (activation_nbytes(shape, n) for n in (tokens, tokens + more))
    assert 0 < a < b
    assert b - a >= more * scores


# ---- sizes as text -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("12GB", 12_000_000_000), ("12GiB", 12 << 30), ("12G", 12_000_000_000),
        ("800M", 800_000_000), ("800MB", 800_000_000), ("16MiB", 16 << 20),
        ("1.5kB", 1500), ("1.5KiB", 1536), ("2TB", 2 * 10**12), ("2TiB", 2 << 40),
        ("7", 7), ("7B", 7), (" 12 gb ", 12_000_000_000), ("12gib", 12 << 30),
        (5, 5), (5.9, 5), (1e9, 10**9),
    ],
)  # fmt: skip
def test_parse_bytes_reads(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", " ", "GB", "0", "0GB", "-1", "-5GB", "12 parsecs", "12GBs", "1,5GB", "1e9", "0x10", ".5GB",
     "12G B", "12PB", "12 GB free", "nan", "inf", 0, -1, -0.5, float("nan"), True, False, None, [],
     b"12GB"],
)  # fmt: skip
def test_parse_bytes_refuses(text):
    with pytest.raises(BudgetError, match="not a memory size") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["12iB", "12\u212aB", float("inf"), "9" * 400, 0.5, "0.5B"])
def test_parse_bytes_refuses_these_as_well(text):
    with pytest.raises(BudgetError):
        parse_bytes(text)


@given(st.integers(1, 10**13), st.sampled_from(["", "B", "kB", "MiB", "GB", "TiB", "m", "g"]))
def test_parse_bytes_of_whole_numbers_is_exact(n, unit):
    size = {"": 1, "b": 1, "kb": 10**3, "mib": 1 << 20, "gb": 10**9, "tib": 1 << 40, "m": 10**6,
            "g": 10**9}[unit.lower()]  # fmt: skip
    assume(n * size < 1 << 53)
    assert parse_bytes(f"{n}{unit}") == parse_bytes(f" {n} {unit.lower()}") == n * size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1, "1 B"), (999, "999 B"), (1000, "1 kB"), (7840, "7.84 kB"), (12_345, "12.3 kB"),
     (456_000_000, "456 MB"), (12_300_000_000, "12.3 GB"), (5 * 10**15, "5000 TB")],
)  # fmt: skip
def test_format_bytes(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize("nbytes", [999_600, 999_500_000])
def test_format_bytes_never_prints_four_figures(nbytes):
    assert not format_bytes(nbytes).startswith("1000")


@given(st.integers(1, 10**14))
def test_format_bytes_can_be_read_back(n):
    assert parse_bytes(format_bytes(n)) == pytest.approx(n, rel=0.005)


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"memory": "12GB", "slots": 3}, {"memory": "lots"}, {"memory": 0}, {"slots": 0}, {"slots": -1},
     {"slots": 0.0}, {"slots": 1.5}, {"slots": float("nan")}, {"slots": True}, {"slots": "3"}],
)  # fmt: skip
def test_a_budget_of_another_kind_is_refused(options):
    with pytest.raises(BudgetError):
        StreamingConfig(**options)


@pytest.mark.parametrize(
    "options",
    [{"context": 0}, {"prefill_step": 0}, {"threads": -1}, {"context": 1.5}, {"threads": "8"}],
)
def test_an_option_out_of_range_is_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        StreamingConfig(**options)


def test_the_smallest_legal_options_are_taken():
    config = StreamingConfig(slots=1, context=1, prefill_step=1, threads=0)
    assert (config.slots, config.context, config.prefill_step, config.threads) == (1, 1, 1, 0)
    assert StreamingConfig(slots=1.0).slots == 1.0
