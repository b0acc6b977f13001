"""SharedExpertCache: every expert's true bytes in its slot, or an error and a cache that works."""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import interrupt_at_line
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors.numpy import save_file

from smoe_mlx.cache import experts as experts_module
from smoe_mlx.cache.bank import SlotBank, _page_aligned_zeros
from smoe_mlx.cache.experts import SharedExpertCache
from smoe_mlx.cache.stats import LayerStats
from smoe_mlx.cache.usage import Usage
from smoe_mlx.errors import BudgetError, CheckpointError, ExpertReadError
from smoe_mlx.store.layout import TensorSpec, layout_from_checkpoint
from smoe_mlx.store.reader import ExpertReader
from smoe_mlx.store.safetensors import Checkpoint

CACHE = str(Path(experts_module.__file__).parent)  # whose every line is interrupted
# Experts a layer; layers 0 and 1 are of one geometry, layer 2 is of another.
COUNTS = (5, 4, 6)
SHAPES = [
    {("up_proj", "weight"): ((3, 5), np.float32), ("up_proj", "scales"): ((3,), np.float16)},
    {("up_proj", "weight"): ((3, 5), np.float32), ("up_proj", "scales"): ((3,), np.float16)},
    {("fc1", "weight"): ((2, 4), np.uint32), ("fc1", "bias"): ((7,), np.uint8)},
]


class Model:
    """Three layers of experts in a file, and what the file holds."""

    def __init__(self, folder: Path):
        rng = np.random.default_rng(0)
        self.truth = [
            {
                key: rng.integers(1, 200, (count, *shape)).astype(dtype)
                for key, (shape, dtype) in shapes.items()
            }
            for count, shapes in zip(COUNTS, SHAPES, strict=True)
        ]
        save_file(
            {f"{i}.{p}.{k}": a for i, t in enumerate(self.truth) for (p, k), a in t.items()},
            folder / "model.safetensors",
        )
        self.checkpoint = Checkpoint(folder)
        self.layouts = [
            layout_from_checkpoint(
                self.checkpoint,
                f"layers.{i}",
                COUNTS[i],
                {(p, k): f"{i}.{p}.{k}" for p, k in SHAPES[i]},
            )
            for i in range(3)
        ]
        self.reader = FlakyReader(self.checkpoint.files, threads=2)

    def cache(self, slots_a: int = 9, slots_b: int = 6, **options) -> SharedExpertCache:
        self.reader.fail = None
        banks = [((0, 1), slots_a), ((2,), slots_b)]
        return SharedExpertCache(self.layouts, banks, self.reader, debug=True, **options)

    def assert_in_slots(self, cache: SharedExpertCache, layer: int, experts) -> None:
        """Each expert has a slot, and the slot's bytes are the file's."""
        bank = {key: np.array(a) for key, a in cache.arrays(layer).items()}
        for e in experts:
            slot = int(cache.table(layer)[e])
            assert slot >= 0, f"expert {e} of layer {layer} is not in memory"
            for key, a in self.truth[layer].items():
                assert bank[key][slot].tobytes() == a[e].tobytes(), (layer, e, key)


class FlakyReader(ExpertReader):
    """A reader that fails when it is told to, after it has spoilt some of the buffers."""

    fail: BaseException | None = None
    requests = 0

    def finish(self, *readings) -> None:
        if self.fail is not None:
            for reading in readings:
                self.cancel(reading)
                for read in reading.reads:
                    for buffer in read.buffers[::2]:
                        buffer[:] = bytes([0xEE]) * len(buffer)
            raise self.fail
        self.requests += sum(len(read.requests) for r in readings for read in r.reads)
        super().finish(*readings)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = Model(tmp_path_factory.mktemp("cache"))
    yield model
    model.reader.close()
    model.checkpoint.close()


def claim(cache: SharedExpertCache, layer: int, experts: list[int]) -> None:
    with cache.lock:
        cache.claim(layer, experts)


def in_memory(cache: SharedExpertCache, layer: int) -> set[int]:
    return set(np.flatnonzero(cache.table(layer) >= 0).tolist())


def lazy_sum(cache: SharedExpertCache, layer: int, expert: int) -> mx.array:
    """The sum of an expert's weight, not evaluated yet."""
    slot = int(cache.table(layer)[expert])
    key = ("up_proj", "weight") if layer < 2 else ("fc1", "weight")
    return cache.arrays(layer)[key][mx.array([slot])].sum()


def true_sum(model: Model, layer: int, expert: int) -> float:
    key = ("up_proj", "weight") if layer < 2 else ("fc1", "weight")
    return float(model.truth[layer][key][expert].sum())


def held_sum(
    model: Model, cache: SharedExpertCache, layer: int, expert: int
) -> tuple[mx.array, float]:
    """A sum that the cache holds, not evaluated yet, and what it must come to."""
    with cache.lock:
        y = lazy_sum(cache, layer, expert)
        cache.hold(y)
    return y, true_sum(model, layer, expert)


# ---- banks and layouts ---------------------------------------------------------------------------


def test_what_is_written_into_a_bank_s_rows_is_what_mlx_sees():
    specs = [
        TensorSpec("up", "weight", "BF16", (2, 3), 12),
        TensorSpec("up", "bias", "F32", (2,), 8),
    ]
    bank = SlotBank(specs, 4)
    assert bank.nbytes == 4 * 20
    rows = bank.rows(2)
    rows[0][:] = np.array([0x3F80, 0x4000, 0xC000, 0, 0x4040, 0x3F80], np.uint16).tobytes()
    rows[1][:] = np.array([5, -7], np.float32).tobytes()
    weight, bias = bank.arrays["up", "weight"], bank.arrays["up", "bias"]
    assert weight.dtype == mx.bfloat16
    assert weight[2].tolist() == [[1, 2, -2], [0, 3, 1]]
    assert bias[2].tolist() == [5, -7]
    for slot in (0, 1, 3):  # and the neighbours are untouched
        assert not mx.any(weight[slot]).item()
        assert not mx.any(bias[slot]).item()


def test_aligned_banks_begin_at_pages_and_hold_the_same():
    specs = [TensorSpec("up", k, "F16", (3, 5), 30) for k in ("weight", "scales")]
    bank = SlotBank(specs, 3)
    data = [np.arange(15, dtype=np.float16) + i for i in range(2)]
    for row, a in zip(bank.rows(1), data, strict=True):
        row[:] = a.tobytes()
    for spec, a in zip(specs, data, strict=True):
        array = bank.arrays["up", spec.kind]
        assert array.shape == (3, 3, 5)
        assert np.array(array)[1].ravel().tolist() == a.tolist()
        assert not mx.any(array[mx.array([0, 2])]).item()
    for row in bank.rows(0):
        assert np.frombuffer(row, np.uint8).ctypes.data % 4096 == 0


def test_a_bank_longer_than_mlx_counts_in_one_dimension_is_made_all_the_same():
    # Nothing is evaluated, so nothing is allocated.
    assert _page_aligned_zeros((4, 1 << 29), mx.uint8).shape == (4, 1 << 29)


def test_layout_finds_each_expert_of_stacked_tensors(model):
    for layer, layout in enumerate(model.layouts):
        assert layout.expert_nbytes == sum(a[0].nbytes for a in model.truth[layer].values())
        assert layout.nbytes == COUNTS[layer] * layout.expert_nbytes
        for t, spec in enumerate(layout.tensors):
            for e in range(layout.num_experts):
                file = model.checkpoint.files[layout.file_ids[t, e]]
                found = file.byte_range(int(layout.offsets[t, e]), spec.nbytes)
                assert found == model.truth[layer][spec.projection, spec.kind][e].tobytes()


@pytest.fixture
def scattered(tmp_path):
    """A tensor an expert, in two files."""
    for name, experts in [("model-1", (2, 0)), ("model-2", (1,))]:
        tensors = {f"e.{e}.w": np.full((2, 3), e, np.float32) for e in experts}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    save_file({"odd": np.zeros((2, 4), np.float32)}, tmp_path / "model-3.safetensors")
    checkpoint = Checkpoint(tmp_path)
    yield checkpoint
    checkpoint.close()


def test_the_reads_of_an_expert_name_what_they_read(model):
    layout, buffers = model.layouts[1], [memoryview(bytearray(60)), memoryview(bytearray(6))]
    for (file, offset, buffer, label), tensor, b in zip(
        layout.reads(2, buffers), layout.tensors, buffers, strict=True
    ):
        name = f"1.{tensor.name}"
        info = model.checkpoint.tensors[name][1]
        assert (file, offset, buffer) == (0, info.offset + 2 * tensor.nbytes, b)
        assert label == (tensor.name, "expert 2", "layers.1")
    with pytest.raises(ValueError, match="shorter"):
        list(layout.reads(2, buffers[:1]))


def test_layout_and_cache_take_a_tensor_an_expert_from_several_files(scattered):
    sources = {("up", "weight"): [f"e.{e}.w" for e in range(3)]}
    layout = layout_from_checkpoint(scattered, "layers.0", 3, sources)
    assert layout.file_ids.tolist() == [[0, 1, 0]]
    reader = ExpertReader(scattered.files, threads=0)
    cache = SharedExpertCache([layout], [((0,), 2)], reader, debug=True)
    for e in (0, 1, 2):
        claim(cache, 0, [e])
        slot = int(cache.table(0)[e])
        assert np.array(cache.arrays(0)["up", "weight"])[slot].tolist() == [[e] * 3] * 2
    reader.close()


@pytest.mark.parametrize(
    ("names", "experts", "words"),
    [
        (["absent"], 3, ["'absent'"]),
        (["e.0.w", "e.1.w", "gone"], 3, ["'gone'"]),
        (["e.0.w", "e.1.w"], 3, ["3 experts", "2 tensors"]),
        (["e.0.w", "e.1.w", "odd"], 3, ["'odd'", "model-3.safetensors"]),
        ("odd", 3, ["'odd'", "model-3.safetensors", "3 experts"]),
    ],
)
def test_layout_refuses_what_does_not_fit_by_name(scattered, names, experts, words):
    with pytest.raises(CheckpointError) as caught:
        layout_from_checkpoint(scattered, "layers.7.mlp", experts, {("up", "weight"): names})
    for word in words:
        assert word in str(caught.value)


def test_layout_of_a_layer_with_a_single_expert_of_its_own(scattered):
    layout = layout_from_checkpoint(scattered, "layers.0", 1, {("up", "weight"): ["e.0.w"]})
    assert layout.tensors[0].shape == (2, 3)


def test_layout_refuses_a_tensor_that_two_files_hold(tmp_path):
    for name in ("model-1.safetensors", "model-2.safetensors"):
        save_file({"w": np.zeros((3, 2), np.float32)}, tmp_path / name)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"'w'.*model-1.*model-2"):
        layout_from_checkpoint(checkpoint, "layers.0", 3, {("up", "weight"): "w"})
    checkpoint.close()


# ---- the cache against a model of it -------------------------------------------------------------


class BankModel:
    """A bank as a list of keys, the least recently used first."""

    def __init__(self, slots: int):
        self.slots = slots
        self.order: list[tuple[int, int]] = []
        self.pinned: set[tuple[int, int]] = set()

    @property
    def keys(self) -> set[tuple[int, int]]:
        return {*self.order, *self.pinned}

    def claim(self, keys: list[tuple[int, int]], fails: bool = False) -> int:
        """Returns the number of hits."""
        hits = [k for k in keys if k in self.keys]
        for k in hits:
            if k in self.order:
                self.order.remove(k)
                self.order.append(k)
        missing = [k for k in keys if k not in hits]
        for _ in range(len(missing) - (self.slots - len(self.keys))):
            victims = [k for k in self.order if k not in keys]
            if not victims:
                raise LookupError
            self.order.remove(victims[0])
        if not fails:
            self.order += missing
        return len(hits)


class CacheMachine(RuleBasedStateMachine):
    model: Model  # set by the test

    @initialize(slots_a=st.integers(1, 8), slots_b=st.integers(1, 5))
    def make(self, slots_a, slots_b):
        self.cache = self.model.cache(slots_a, slots_b)
        self.banks = [BankModel(slots_a), BankModel(slots_b)]
        self.hits = [0] * 3
        self.misses = [0] * 3
        self.held: list[tuple[mx.array, float]] = []

    def bank(self, layer: int) -> BankModel:
        return self.banks[layer // 2]

    def some_experts(self, data, layer: int) -> list[int]:
        """Distinct experts, in some order, that fit into memory beside what is pinned."""
        bank = self.bank(layer)
        wanted = data.draw(st.permutations(range(COUNTS[layer])))
        pinned = [e for e in wanted if (layer, e) in bank.pinned]
        others = [e for e in wanted if e not in pinned][: bank.slots - len(bank.pinned)]
        fitting = [e for e in wanted if e in pinned or e in others]
        return fitting[: data.draw(st.integers(1, len(fitting)))]

    def claimed(self, layer: int, experts: list[int]) -> None:
        """Take note of a claim that succeeded and look at its slots."""
        hits = self.bank(layer).claim([(layer, e) for e in experts])
        self.hits[layer] += hits
        self.misses[layer] += len(experts) - hits
        self.model.assert_in_slots(self.cache, layer, experts)

    @rule(data=st.data(), layer=st.integers(0, 2))
    def claim(self, data, layer):
        experts = self.some_experts(data, layer)
        claim(self.cache, layer, experts)
        self.claimed(layer, experts)

    @rule(data=st.data(), layer=st.integers(0, 2))
    def claim_in_vain(self, data, layer):
        experts = self.some_experts(data, layer)
        keys = [(layer, e) for e in experts]
        reads = any(k not in self.bank(layer).keys for k in keys)
        self.model.reader.fail = ExpertReadError(errno.EIO, "injected")
        try:
            claim(self.cache, layer, experts)
            assert not reads, "a failed read was not reported"
        except ExpertReadError:
            assert reads
        finally:
            self.model.reader.fail = None
        hits = self.bank(layer).claim(keys, fails=reads)
        self.hits[layer] += 0 if reads else hits

    @rule(layer=st.integers(0, 2))
    def claim_more_than_fits(self, layer):
        bank = self.bank(layer)
        if len({(layer, e) for e in range(COUNTS[layer])} | bank.pinned) <= bank.slots:
            return
        with pytest.raises(LookupError):
            claim(self.cache, layer, list(range(COUNTS[layer])))
        with pytest.raises(LookupError):
            bank.claim([(layer, e) for e in range(COUNTS[layer])])

    @rule(data=st.data(), layer=st.integers(0, 2))
    def want_in_waves(self, data, layer):
        ids = data.draw(
            st.lists(st.integers(0, COUNTS[layer] - 1), min_size=1, max_size=8).map(np.array)
        )
        wanted, bank, hits = set(ids.tolist()), self.bank(layer), self.hits[layer]
        there = {e for e in wanted if (layer, e) in bank.keys}
        waves = self.cache.waves(layer, ids)
        assert sorted(e for w in waves for e in w) == sorted(wanted)
        if len(wanted) <= bank.slots - len(bank.pinned):
            assert len(waves) == 1
        for wave in waves:
            claim(self.cache, layer, wave)
            self.claimed(layer, wave)
        assert self.hits[layer] - hits == len(there), "a wave evicted what a later one needed"

    @rule(data=st.data(), layer=st.integers(0, 2))
    def pin(self, data, layer):
        bank = self.bank(layer)
        experts = data.draw(st.lists(st.integers(0, COUNTS[layer] - 1), min_size=1, max_size=3))
        keys = {(layer, e) for e in experts}
        if len(bank.pinned | keys) >= bank.slots:
            with pytest.raises(BudgetError):
                self.cache.pin(layer, experts)
            return
        self.cache.pin(layer, experts)
        for e in dict.fromkeys(experts):
            self.claimed(layer, [e])
            bank.pinned.add((layer, e))
            bank.order = [k for k in bank.order if k != (layer, e)]

    @rule(data=st.data(), layer=st.integers(0, 2))
    def unpin(self, data, layer):
        bank = self.bank(layer)
        experts = data.draw(st.lists(st.integers(0, COUNTS[layer] - 1), min_size=1, max_size=3))
        self.cache.unpin(layer, experts)
        for e in experts:
            if (layer, e) in bank.pinned:
                bank.pinned.remove((layer, e))
                bank.order.append((layer, e))

    @rule(slots_a=st.integers(1, 8), slots_b=st.integers(1, 5))
    def resize(self, slots_a, slots_b):
        sizes = [slots_a, slots_b]
        if any(n <= len(b.pinned) for n, b in zip(sizes, self.banks, strict=True)):
            with pytest.raises(BudgetError, match="too few"):
                self.cache.resize(sizes)
            return
        self.cache.resize(sizes)
        for n, bank in zip(sizes, self.banks, strict=True):
            bank.slots = n
            while len(bank.keys) > n:
                bank.order.pop(0)

    @precondition(lambda self: self.banks[0].keys | self.banks[1].keys)
    @rule(data=st.data())
    def hold(self, data):
        layer, e = data.draw(st.sampled_from(sorted(self.banks[0].keys | self.banks[1].keys)))
        self.held.append(held_sum(self.model, self.cache, layer, e))

    @rule(how=st.sampled_from(["settle", "eval", "look after"]))
    def settle(self, how):
        if how == "settle":
            self.cache.settle()
        elif how == "look after":
            with self.cache.lock:
                self.cache.look_after()
        for y, expected in self.held:
            assert y.item() == expected
        self.held = []

    @invariant()
    def everything_agrees(self):
        self.cache.check()
        for layer in range(3):
            bank = self.bank(layer)
            expected = {e for i, e in bank.keys if i == layer}
            assert in_memory(self.cache, layer) == expected
            self.model.assert_in_slots(self.cache, layer, expected)
            stats = self.cache.stats.layers[layer]
            assert (stats.hits, stats.misses) == (self.hits[layer], self.misses[layer])
        assert (self.cache.stats.hits, self.cache.stats.misses) == (
            sum(self.hits),
            sum(self.misses),
        )
        for bank in self.banks:
            assert len(bank.keys) <= bank.slots
        assert self.cache.stats.abandoned == 0

    def teardown(self):
        if hasattr(self, "held"):
            self.settle("eval")


def test_the_cache_does_as_a_plain_model_of_it_says(model):
    CacheMachine.model = model
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            phases=[Phase.generate],  # add Phase.shrink for a shorter story: it takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_hits_misses_and_evictions_are_counted(model):
    cache = model.cache(slots_a=3)
    for experts in ([0, 1], [1, 2], [3], [2, 3], [0]):
        claim(cache, 0, experts)
    assert (cache.stats.layers[0].hits, cache.stats.layers[0].misses) == (3, 5)
    assert cache.stats.evictions == 2
    assert in_memory(cache, 0) == {0, 2, 3}


def test_one_read_brings_all_misses_of_a_claim(model):
    cache = model.cache(slots_a=4)
    claim(cache, 0, [1])
    before = model.reader.requests
    claim(cache, 0, [0, 1, 3])
    assert model.reader.requests - before == 2 * len(SHAPES[0])
    claim(cache, 0, [3, 0])
    assert model.reader.requests - before == 2 * len(SHAPES[0])


def test_layers_of_one_bank_compete_and_other_banks_do_not(model):
    cache = model.cache(slots_a=3, slots_b=2)
    claim(cache, 2, [0, 1])
    claim(cache, 0, [0, 1])
    claim(cache, 1, [0, 1, 2])
    assert (in_memory(cache, 0), in_memory(cache, 1)) == (set(), {0, 1, 2})
    assert in_memory(cache, 2) == {0, 1}


def test_a_failed_read_publishes_nothing_and_the_next_one_works(model):
    cache = model.cache(slots_a=3)
    claim(cache, 0, [0, 1])
    for error in (ExpertReadError(errno.EIO, "injected"), KeyboardInterrupt(), MemoryError()):
        model.reader.fail = error
        with pytest.raises(type(error)):
            claim(cache, 0, [1, 2, 3])
        assert in_memory(cache, 0) == {1}
        cache.check()
    model.reader.fail = None
    claim(cache, 0, [1, 2, 3])
    model.assert_in_slots(cache, 0, (1, 2, 3))
    assert (cache.stats.hits, cache.stats.misses) == (1, 4)


def test_pinned_experts_survive_a_storm(model):
    cache = model.cache(slots_a=3)
    cache.pin(0, [2, 4])
    for e in (0, 1, 3, 0, 1, 3):
        claim(cache, 0, [e])
        claim(cache, 1, [e])
    assert in_memory(cache, 0) == {2, 4}
    cache.unpin(0, [2])
    claim(cache, 1, [0, 1])
    assert in_memory(cache, 0) == {4}
    model.assert_in_slots(cache, 0, [4])


def lose_to_eviction(bank):
    bank.policy.discard((0, 1))


def spoil_table(bank):
    bank.tables[0][1] = bank.tables[0][0]


def spoil_free(bank):
    bank.free.append(int(bank.tables[0][1]))


def free_twice(bank):
    bank.free.append(bank.free[0])


def lose_slot(bank):
    bank.free.pop()


def lose_pinned(bank):
    bank.pinned.add((1, 3))


@pytest.mark.parametrize(
    "spoil", [lose_to_eviction, spoil_table, spoil_free, free_twice, lose_slot, lose_pinned]
)
def test_the_self_check_notices(model, spoil):
    cache = model.cache(slots_a=4)
    claim(cache, 0, [0, 1])
    cache.check()
    spoil(cache._banks[0])
    with pytest.raises(AssertionError):
        cache.check()
    with pytest.raises(AssertionError):
        claim(cache, 0, [0])  # as `debug` is on


@pytest.mark.parametrize(
    ("banks", "error"),
    [
        ([((0, 1, 2), 9)], ValueError),  # two geometries in one bank
        ([((0, 1), 0), ((2,), 1)], BudgetError),
        ([((0, 1), 9)], ValueError),  # a layer without a bank
    ],
)
def test_banks_that_make_no_sense_are_refused(model, banks, error):
    with pytest.raises(error):
        SharedExpertCache(model.layouts, banks, model.reader)


def test_a_layer_in_two_banks_is_refused(model):
    with pytest.raises(ValueError, match="bank"):
        SharedExpertCache(model.layouts, [((0, 1), 3), ((1,), 3), ((2,), 3)], model.reader)


def test_no_slot_is_made_that_could_never_be_used(model):
    cache = model.cache(slots_a=1000, slots_b=3)
    assert cache.slots == 9 + 3
    sizes = [x.expert_nbytes for x in model.layouts]
    assert cache.nbytes == 9 * sizes[0] + 3 * sizes[2]
    assert not cache.holds_all
    assert model.cache(9, 6).holds_all


def test_memory_is_as_large_as_said(model):
    cache = model.cache(slots_a=4, slots_b=3)
    allocated = sum(a.nbytes for layer in (0, 2) for a in cache.arrays(layer).values())
    assert allocated == cache.nbytes


# ---- slot lifetime -------------------------------------------------------------------------------


def test_an_output_that_is_held_sees_the_bytes_it_was_built_on(model):
    cache = model.cache(slots_a=2)
    claim(cache, 0, [0, 1])
    with cache.lock:
        y = lazy_sum(cache, 0, 0)
        cache.hold(y)
    claim(cache, 1, [2, 3])
    assert in_memory(cache, 0) == set()
    assert y.item() == true_sum(model, 0, 0)


def test_an_output_that_is_not_held_sees_what_came_after(model):
    """The control: without it, the test above would pass whatever `hold` does."""
    cache = model.cache(slots_a=2)
    claim(cache, 0, [0, 1])
    y = lazy_sum(cache, 0, 0)
    slot = int(cache.table(0)[0])
    claim(cache, 1, [2, 3])
    now = next(e for e in (2, 3) if cache.table(1)[e] == slot)
    assert y.item() == true_sum(model, 1, now) != true_sum(model, 0, 0)


def test_a_hit_evaluates_nothing(model):
    cache = model.cache(slots_a=3)
    claim(cache, 0, [0, 1])
    with cache.lock:
        cache.hold(lazy_sum(cache, 0, 0))
    claim(cache, 0, [1, 0])
    assert len(cache._pending) == 1
    cache.settle()
    assert cache._pending == []


def test_a_pin_waits_for_what_is_held_too(model):
    cache = model.cache(slots_a=2)
    claim(cache, 0, [0, 1])
    with cache.lock:
        y = lazy_sum(cache, 0, 0)
        cache.hold(y)
    cache.pin(1, [3])
    assert y.item() == true_sum(model, 0, 0)


class OtherThread:
    """Claims, builds and holds a lazy output on a thread of its own, and evaluates it there."""

    def __init__(self, cache: SharedExpertCache, layer: int, experts: list[int]):
        self.built, self.go_on = threading.Event(), threading.Event()
        self.value: object = None
        self.thread = threading.Thread(target=self.run, args=(cache, layer, experts))
        self.thread.start()
        assert self.built.wait(30)

    def run(self, cache, layer, experts) -> None:
        try:
            with cache.lock:
                cache.claim(layer, experts)
                y = lazy_sum(cache, layer, experts[0])
                cache.hold(y)
            self.built.set()
            self.go_on.wait(30)
            self.value = y.item()
        except BaseException as e:
            self.value = e
        finally:
            self.built.set()

    def result(self) -> object:
        self.go_on.set()
        self.thread.join()
        return self.value


def test_another_thread_may_take_over_while_an_output_is_not_evaluated(model):
    cache = model.cache(slots_a=2)
    other = OtherThread(cache, 0, [0, 1])
    claim(cache, 1, [2, 3])
    with cache.lock:
        y = lazy_sum(cache, 1, 2)
        cache.hold(y)
    assert cache.stats.abandoned == 1
    claim(cache, 0, [3, 4])
    assert other.result() == true_sum(model, 0, 0)
    assert y.item() == true_sum(model, 1, 2)
    model.assert_in_slots(cache, 0, (3, 4))
    assert cache.stats.abandoned == 1
    cache.check()


def test_a_thread_that_ends_without_evaluating_leaves_a_cache_that_works(model):
    cache = model.cache(slots_a=2)
    other = OtherThread(cache, 0, [0, 1])
    assert other.result() == true_sum(model, 0, 0)  # here it did, and nothing is abandoned
    claim(cache, 1, [0, 1])
    assert cache.stats.abandoned == 0
    thread = threading.Thread(
        target=lambda: cache.hold(lazy_sum(cache, 1, 0)),
    )
    thread.start()
    thread.join()
    claim(cache, 0, [2, 3])  # the thread's output is evaluated, or left with its memory
    model.assert_in_slots(cache, 0, (2, 3))


def test_an_abandoned_output_costs_other_banks_nothing_if_they_hold_all(model):
    cache = model.cache(slots_a=2, slots_b=6)
    rows = cache.resident(2)
    other = OtherThread(cache, 0, [0, 1])
    claim(cache, 1, [0])
    assert cache.stats.abandoned == 1
    assert cache.resident(2) is rows
    other.result()


def test_a_claim_that_abandons_has_its_hits_in_memory_too(model):
    cache = model.cache(slots_a=3)
    other = OtherThread(cache, 0, [0, 1])
    try:
        claim(cache, 0, [1, 2])  # a hit and a miss
        model.assert_in_slots(cache, 0, (1, 2))
    finally:
        assert other.result() == true_sum(model, 0, 0)


def test_pins_outlive_a_hand_over(model):
    cache = model.cache(slots_a=3)
    cache.pin(1, [3])
    other = OtherThread(cache, 0, [0, 1])
    try:
        for e in (0, 1, 2):
            claim(cache, 1, [e])
            cache.settle()
        claim(cache, 0, [0, 1])
        assert cache.stats.abandoned == 1
        model.assert_in_slots(cache, 1, [3])
    finally:
        other.result()


# ---- banks that hold all -------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_resident_layers_are_the_file_in_the_order_of_its_experts(model, order):
    model.reader.fail = None
    cache = SharedExpertCache(model.layouts, [(order, 9), ((2,), 6)], model.reader, debug=True)
    for _ in range(2):
        for layer in (1, 0, 2):
            rows = cache.resident(layer)
            assert set(rows) == set(model.truth[layer])
            for key, a in model.truth[layer].items():
                np.testing.assert_array_equal(np.array(rows[key]), a)
    assert [x.resident_calls for x in cache.stats.layers] == [2, 2, 2]
    assert (cache.stats.hits, cache.stats.misses, cache.stats.evictions) == (0, 0, 0)


def test_a_resident_layer_is_read_once_and_only_when_needed(model):
    cache = model.cache()
    before = model.reader.requests
    cache.resident(0)
    assert model.reader.requests - before == COUNTS[0] * len(SHAPES[0])
    cache.resident(0)
    assert model.reader.requests - before == COUNTS[0] * len(SHAPES[0])


def test_layers_that_may_lose_experts_have_no_rows_of_their_own(model):
    cache = model.cache(slots_a=8)
    assert cache.resident(0) is None
    assert cache.resident(1) is None
    assert cache.resident(2) is not None
    assert cache.stats.layers[0].resident_calls == 0


def test_a_failed_read_of_a_resident_layer_publishes_nothing(model):
    cache = model.cache()
    model.reader.fail = ExpertReadError(errno.EIO, "injected")
    with pytest.raises(ExpertReadError):
        cache.resident(0)
    assert in_memory(cache, 0) == set()
    model.reader.fail = None
    for key, a in cache.resident(0).items():
        np.testing.assert_array_equal(np.array(a), model.truth[0][key])


def test_resident_rows_share_the_bank_s_memory(model):
    cache = model.cache()
    rows = cache.resident(0)
    mx.synchronize()
    before = mx.get_active_memory()
    assert cache.resident(1) is not None
    assert mx.get_active_memory() - before < model.layouts[1].nbytes
    assert rows["up_proj", "weight"].shape == (COUNTS[0], 3, 5)


def test_a_claim_in_a_bank_that_holds_all_leaves_other_layers_rows_alone(model):
    cache = model.cache()
    rows = cache.resident(0)
    try:
        claim(cache, 1, [0, 1])
    except ValueError:
        return
    for key, a in model.truth[0].items():
        np.testing.assert_array_equal(np.array(rows[key]), a)


# ---- slots from a table in the graph -------------------------------------------------------------


def counts(cache, layer):
    x = cache.stats.layers[layer]
    return {"calls": x.calls, "waves": x.waves, "hits": x.hits, "misses": x.misses}


def test_what_a_graph_took_from_the_table_counts_and_is_used_just_now(model):
    cache = model.cache(slots_a=2)
    claim(cache, 0, [0, 1])
    before = counts(cache, 0)
    table = cache.lookup(0)
    assert cache.lookup(0) is table
    assert table.tolist() == np.maximum(cache.table(0), 0).tolist()
    assert cache.saw(0, [0, 0], table)
    assert counts(cache, 0) == before | {"calls": 1, "waves": 1, "hits": before["hits"] + 1}
    claim(cache, 0, [2])
    assert in_memory(cache, 0) == {0, 2}, "what was used last was evicted"
    assert cache.lookup(0) is not table


def test_a_table_that_has_changed_or_lacks_an_expert_is_not_taken_for_right(model):
    cache = model.cache(slots_a=3)
    claim(cache, 0, [0, 1])
    before, table = counts(cache, 0), cache.lookup(0)
    assert not cache.saw(0, [0, 4], table)
    assert not cache.saw(1, [0], table)
    claim(cache, 0, [2])
    assert not cache.saw(0, [0], table), "an expert may have moved since"
    assert cache.saw(0, [0], cache.lookup(0))
    assert counts(cache, 0)["calls"] == before["calls"] + 1


def test_calls_of_complete_layers_are_counted_before_they_pile_up(model):
    cache = model.cache(slots_a=8)
    assert not cache.is_complete(1)
    claim(cache, 1, range(COUNTS[1]))
    assert cache.is_complete(1)
    assert not cache.is_complete(0)
    before = counts(cache, 1)
    for _ in range(3):  # as many as there are layers
        cache.saw_later(1, mx.array([[1, 2]]))
    assert counts(cache, 1) == before
    cache.saw_later(1, mx.array([[1, 3]]))
    assert counts(cache, 1)["hits"] == before["hits"] + 8
    assert counts(cache, 1)["calls"] == 4
    cache.catch_up()
    assert counts(cache, 1)["calls"] == 4


def test_calls_of_other_threads_are_left_out_and_no_others(model):
    cache = model.cache(slots_a=8)
    cache.usage = Usage(model.layouts)
    claim(cache, 1, range(COUNTS[1]))
    with ThreadPoolExecutor() as other:
        other.submit(cache.saw_later, 1, mx.array([[0]])).result()
    cache.saw_later(1, mx.array([[1]]))
    before, used = counts(cache, 1)["hits"], [cache.usage.weight((1, e)) for e in (0, 1)]
    cache.catch_up()
    assert counts(cache, 1)["hits"] == before + 1
    assert [cache.usage.weight((1, e)) > w for e, w in enumerate(used)] == [False, True]


def test_a_claim_that_misses_is_counted_once_however_many_it_misses(model):
    cache = model.cache(slots_a=4)
    claim(cache, 0, [0, 1])
    claim(cache, 0, [1])
    claim(cache, 0, [1, 2])
    with cache.lock:
        cache.claim_few(0, [3, 3, 1])
    assert cache.stats.layers[0].missed_calls == cache.stats.missed_calls == 3
    assert (cache.stats.hits, cache.stats.misses) == (3, 4)
    assert cache.stats.layers[0].resident_calls == 0


def test_rows_of_a_bank_that_holds_all_are_counted_as_such(model):
    cache = model.cache()
    for _ in range(2):
        assert cache.resident(1) is not None
    assert cache.stats.layers[1] == LayerStats(resident_calls=2)
    assert cache.stats.layers[0] == LayerStats(0, 0, 0, 0, 0, 0)


def test_pins_that_fill_most_of_a_bank_leave_waves_of_one(model):
    cache = model.cache(slots_a=4)
    cache.pin(0, [1, 3])
    assert cache.waves(0, np.array([0, 1])) == [[0, 1]]
    claim(cache, 0, [4])
    # Those in memory first, pinned ones with the first wave, never more than there is room for.
    assert cache.waves(0, np.array([0, 1, 2, 3, 4])) == [[4, 0, 1, 3], [2]]
    assert cache.waves(0, np.array([1, 3, 1])) == [[1, 3]]
    assert cache.waves(1, np.array([0, 1, 2])) == [[0, 1], [2]]


def test_hits_of_a_few_ids_are_used_just_now(model):
    cache = model.cache(slots_a=2)
    cache._debug = False  # else all claims take the long way
    claim(cache, 0, [0, 1])
    with cache.lock:
        cache.claim_few(0, [0, 0])
        cache.claim_few(0, [2])
    assert in_memory(cache, 0) == {0, 2}


def test_where_no_layer_can_keep_an_expert_they_go_in_the_order_of_their_use(model):
    cache = model.cache(slots_a=5)
    claim(cache, 0, [0, 1, 2])
    cache.keep_most_used(0, np.array([0, 0, 1]))
    claim(cache, 1, [0, 1, 2])
    assert in_memory(cache, 0) == {1, 2}


# ---- interruptions -------------------------------------------------------------------------------


def test_an_interrupt_at_any_line_of_a_claim_loses_no_slot(model):
    for n in range(1, 1000):
        cache = model.cache(slots_a=3)
        cache._debug = False
        claim(cache, 0, [0, 1, 2])
        where = interrupt_at_line(n, lambda cache=cache: claim(cache, 1, [0, 1]), CACHE)
        cache.check()
        for layer in (0, 1):
            model.assert_in_slots(cache, layer, in_memory(cache, layer))
        claim(cache, 1, [1, 2, 3])
        if where is None:
            break
    assert n > 20


def test_an_interrupt_at_any_line_of_a_claim_keeps_what_is_held(model):
    for n in range(1, 1000):
        cache = model.cache(slots_a=2)
        cache._debug = False
        claim(cache, 0, [0, 1])
        with cache.lock:
            y = lazy_sum(cache, 0, 0)
            cache.hold(y)
        where = interrupt_at_line(n, lambda cache=cache: claim(cache, 1, [0, 1]), CACHE)
        try:
            claim(cache, 1, [2, 3])
        except LookupError:  # slots were lost: see the test above
            continue
        assert y.item() == true_sum(model, 0, 0), where
        if where is None:
            break
    assert n > 20
