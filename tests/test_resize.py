"""Slots given back and taken again while a model runs: no bit changes, and memory is given back."""

import threading
import weakref
from pathlib import Path

import mlx.core as mx
import pytest
from conftest import random_tokens, resident, same_bits
from mlx_lm.generate import generate_step as mlx_generate_step
from mlx_lm.models.cache import make_prompt_cache
from test_cache import Model, claim, held_sum, in_memory

import smoe_mlx
from smoe_mlx import StreamingConfig, governor
from smoe_mlx.cache.bank import SlotBank
from smoe_mlx.cache.policy import POLICIES
from smoe_mlx.errors import BudgetError, ExpertReadError
from smoe_mlx.generate import generate_step
from smoe_mlx.governor import Governor, follow, resize
from smoe_mlx.load import load_model
from smoe_mlx.stats import streaming_of
from smoe_mlx.store.layout import TensorSpec

DEMO = Path(smoe_mlx.__file__).parent / "demo"
SIZES = [0.25, 16, 1.0, 0.1, 0.9, 9, 0.5, 1.0, 64]


def open_model(folder, **options):
    return load_model(folder, config=StreamingConfig(**{"slots": 0.5, "debug": True, **options}))[0]


def logits_of(model, between=lambda i: None, tokens=18):
    """Logits of a prompt of five and of some tokens, one by one, by the model's own decoding."""
    cache, ids = make_prompt_cache(model), random_tokens(5 + tokens)
    out = [model(mx.array([ids[:5]]), cache=cache)]
    for i, t in enumerate(ids[5:]):
        between(i)
        step = getattr(model, "_streaming", None)
        one = mx.array([[t]])
        y = model(one, cache=cache) if step is None else step.decoding.step(model, one, cache)
        mx.eval(y)
        out.append(y)
    return out


@pytest.fixture(scope="module")
def expected():
    return {folder: logits_of(resident(folder)) for folder in (DEMO,)}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    model = Model(tmp_path_factory.mktemp("resize"))
    yield model
    model.reader.close()
    model.checkpoint.close()


# ---- bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exact", "wait", "lag1", "token"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_resize_before_each_token_changes_no_bit(mode, policy, expected):
    model = open_model(DEMO, decode=mode, policy=policy)
    streaming_of(model).cache.pin(3, [5, 6])
    got = logits_of(model, lambda i: resize(model, slots=SIZES[i % len(SIZES)]))
    assert all(map(same_bits, got, expected[DEMO]))
    s = smoe_mlx.stats(model)
    assert s.misses > 0
    assert s.decoded[mode] > 10


@pytest.mark.parametrize("mode", ["exact", "wait", "lag1"])
def test_bets_are_dropped_and_change_no_bit(mode, expected, slow_disk):
    model = open_model(DEMO, decode=mode, spec=4)
    got = logits_of(model, lambda i: resize(model, slots=(0.3, 0.2)[i % 2]))
    assert all(map(same_bits, got, expected[DEMO]))
    bets = smoe_mlx.stats(model).bets
    assert bets.issued > 0


@pytest.mark.parametrize("arch", ["longcat_flash", "glm4_moe", "gpt_oss"])
def test_other_architectures(arch, tiny):
    model = open_model(tiny(arch))
    got = logits_of(model, lambda i: resize(model, slots=(0.3, 1.0, 0.6)[i % 3]), tokens=6)
    assert all(map(same_bits, got, logits_of(resident(tiny(arch)), tokens=6)))


@pytest.mark.parametrize("start", [0.25, 1.0])
def test_another_thread_resizes_while_the_model_generates(start):
    prompt = mx.array(random_tokens(80))
    want = [(t, p) for t, p in mlx_generate_step(prompt, resident(DEMO), max_tokens=40)]
    model, stop, errors = open_model(DEMO, slots=start, debug=False), threading.Event(), []

    def work():
        try:
            for i in range(10_000):
                resize(model, slots=SIZES[i % len(SIZES)])
                if stop.wait(0.002):
                    return
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        got = list(generate_step(prompt, model, max_tokens=40))
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert [t for t, _ in got] == [t for t, _ in want]
    assert all(same_bits(a, b) for (_, a), (_, b) in zip(got, want, strict=True))
    streaming_of(model).cache.check()


# ---- the cache -----------------------------------------------------------------------------------


def test_graphs_built_before_keep_their_bytes(small):
    cache = small.cache(6, 4)
    claim(cache, 0, [0, 1, 2])
    claim(cache, 2, [3, 4])
    held = [held_sum(small, cache, 0, 2), held_sum(small, cache, 2, 3)]
    for sizes in ((2, 1), (8, 5), (1, 2), (9, 6), (3, 3)):
        cache.resize(sizes)
        for layer in range(3):
            claim(cache, layer, [0])
    for y, value in held:
        assert y.item() == value


def test_the_experts_that_stay_are_the_latest(small):
    cache = small.cache(6, 4)
    for e in (0, 1, 2, 3):
        claim(cache, 0, [e])
    claim(cache, 0, [0])
    cache.resize((2, 4))
    assert in_memory(cache, 0) == {0, 3}
    read = small.reader.requests
    claim(cache, 0, [0, 3])
    assert small.reader.requests == read
    small.assert_in_slots(cache, 0, [0, 3])


def test_from_all_to_few_and_back(small):
    cache = small.cache()
    assert cache.holds_all
    for layer in range(3):
        cache.resident(layer)
    cache.resize((4, 3))
    assert not cache.holds_all
    assert cache.resident(0) is None
    for layer in range(3):
        small.assert_in_slots(cache, layer, in_memory(cache, layer))
    assert len(in_memory(cache, 0)) + len(in_memory(cache, 1)) == 4
    cache.resize((100, 100))
    assert cache.holds_all
    assert cache.bank_slots == [9, 6]
    for layer in range(3):
        cache.resident(layer)
        small.assert_in_slots(cache, layer, range(small.layouts[layer].num_experts))


def test_a_bet_that_comes_after_a_bank_holds_all_is_not_read(small):
    """Its slot would be the row of another expert."""
    cache = small.cache(6, 4)
    claim(cache, 0, [0])
    cache.resize((9, 6))
    cache.resident(1)
    with cache.lock:
        cache.prefetch(0, [1, 2])
    assert cache.stats.bets.issued == 0
    small.assert_in_slots(cache, 1, range(4))


def test_pins_stay_and_what_leaves_them_no_slot_is_refused(small):
    cache = small.cache(6, 4)
    cache.pin(0, [1, 2])
    claim(cache, 1, [0, 1, 2])
    with pytest.raises(BudgetError, match="2 pinned"):
        cache.resize((2, 4))
    assert cache.bank_slots == [6, 4]
    for sizes in ((3, 4), (9, 6), (3, 1)):  # by way of all: pins are read again
        cache.resize(sizes)
    assert {1, 2} <= in_memory(cache, 0)
    claim(cache, 0, [0])
    claim(cache, 1, [3])
    small.assert_in_slots(cache, 0, [1, 2])


def test_pins_are_read_again_in_the_place_of_what_the_last_claim_left(small):
    cache = small.cache(3, 4)
    cache.pin(1, [0])
    claim(cache, 0, [3, 4])
    cache.resize((9, 4))
    claim(cache, 0, [3, 4])
    cache.resize((2, 4))  # these two would be all that is left
    assert in_memory(cache, 1) == {0}
    assert len(in_memory(cache, 0)) == 1


def test_a_pin_that_cannot_be_read_again_is_none_and_whoever_needs_it_is_told_why(small):
    cache = small.cache(6, 4)
    cache.pin(0, [1])
    cache.resize((9, 6))
    small.reader.fail = ExpertReadError(5, "injected")
    cache.resize((4, 4))
    assert not cache._banks[0].pinned
    with pytest.raises(ExpertReadError, match="injected"):
        claim(cache, 0, [1])
    small.reader.fail = None
    claim(cache, 0, [0, 1, 2])
    small.assert_in_slots(cache, 0, [0, 1, 2])


# ---- plan and memory -----------------------------------------------------------------------------


def test_memory_is_given_back_and_the_plan_says_so():
    model = open_model(DEMO, slots=400)
    logits_of(model, tokens=3)
    streaming = streaming_of(model)
    nbytes, before = streaming.cache.layouts[0].expert_nbytes, mx.get_active_memory()
    plan = resize(model, slots=100)
    assert (plan.slots, streaming.plan, streaming.cache.slots) == (100, plan, 100)
    assert before - mx.get_active_memory() == pytest.approx(300 * nbytes, rel=0.01)
    plan = resize(model, memory="25MB")
    assert plan.total <= 25_000_000
    assert smoe_mlx.stats(model).plan is plan
    with pytest.raises(BudgetError, match="at least"):
        resize(model, memory="5MB")
    assert streaming.plan is plan
    assert streaming.cache.slots == plan.slots


# ---- the governor --------------------------------------------------------------------------------


def shares(readings) -> list[float]:
    g = Governor()
    return [g.saw(x) for x in readings]


def test_a_bank_that_moves_lets_go_of_each_array_in_turn():
    tensors = [TensorSpec("up_proj", str(i), "U8", (1 << 20,), 1 << 20) for i in range(4)]
    bank = SlotBank(tensors, 2)
    bank.rows(1)[0][:4] = b"here"
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    bank = bank.moved(2, [1, 0])
    assert bytes(bank.rows(0)[0][:4]) == b"here"
    assert mx.get_peak_memory() - before < 1.5 * 2 * (1 << 20), "more than one array twice"


def test_slots_go_when_memory_stays_scarce():
    assert shares([0.9]) == [1.0]
    assert shares([0.9, 0.2, 0.9, 0.2]) == [1.0] * 4
    assert shares([0.9] * 4) == [1.0, 0.75, 0.75, 0.75**2]


def test_between_the_thresholds_nothing_moves():
    assert shares([0.9, 0.9] + [0.3] * 200)[-1] == 0.75
    assert shares([0.9, 0.9, *[*[0.0] * 29, 0.3] * 10])[-1] == 0.75


def test_slots_come_back_late_and_no_more_than_were_planned():
    got = shares([0.9] * 4 + [0.0] * 200)
    assert got[4 + 28] == 0.75**2
    assert got[4 + 29] == 0.75
    assert got[-1] == 1.0


def test_a_model_follows(monkeypatch):
    model = open_model(DEMO, slots=0.5)
    streaming = streaming_of(model)
    whole = streaming.plan
    for share, slots in ((1.0, 256), (0.75, 192), (0.01, 64), (1.0, 256)):
        follow(streaming, whole, share)
        assert streaming.cache.slots == streaming.plan.slots == slots
        assert streaming.plan.total == whole.total - (256 - slots) * whole.banks[0].expert_nbytes
    follow(streaming, whole, 0.5)
    monkeypatch.setattr(governor, "available_nbytes", lambda: 1 << 30)
    follow(streaming, whole, 1.0)
    assert streaming.plan.slots == 128, "took memory that others need"


def test_a_governed_model_gives_slots_back_and_can_be_freed(monkeypatch):
    shrunk = threading.Event()

    def follow_and_tell(streaming, whole, share):
        follow(streaming, whole, share)
        if streaming.cache.slots < 256:
            shrunk.set()

    monkeypatch.setattr(governor, "SECONDS", 0.01)
    monkeypatch.setattr(governor, "memory_pressure", lambda: 1.0)
    monkeypatch.setattr(governor, "follow", follow_and_tell)
    model = open_model(DEMO, govern=True)
    assert shrunk.wait(20)
    gone = weakref.ref(streaming_of(model))
    thread = next(t for t in threading.enumerate() if t.name == "smoe-govern")
    del model
    thread.join(20)
    assert not thread.is_alive()
    assert gone() is None


def test_without_a_thread_to_be_had_a_model_loads_and_says_that_nobody_watches(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    with pytest.warns(UserWarning, match="watch the memory pressure"):
        open_model(DEMO, slots=100, govern=True)
