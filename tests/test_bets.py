"""Reading ahead: bets, hits first, lookahead. None of it may change a result or lose a slot."""

import errno
import signal
import threading
import time
from collections import deque

import mlx.core as mx
import numpy as np
import pytest
from conftest import (
    CONFIGS,
    STREAMED,
    SlowReader,
    interrupt_at_line,
    random_tokens,
    resident,
    same_bits,
)
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from test_cache import CACHE, COUNTS, Model, held_sum

from smoe_mlx import ExpertReadError, StreamingConfig, stats
from smoe_mlx.cache.bank import SlotBank
from smoe_mlx.cache.bets import TRY_EVERY, WEIGHT, Bet, Judge
from smoe_mlx.cache.experts import SharedExpertCache
from smoe_mlx.generate import generate_step
from smoe_mlx.layers.lookahead import make_predictor
from smoe_mlx.layers.switch import StreamingSwitchGLU
from smoe_mlx.load import load_model
from smoe_mlx.store.reader import ExpertReader
from smoe_mlx.store.streamer import Reading, Streamer

TOKENS = random_tokens(40)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = Model(tmp_path_factory.mktemp("bets"))
    model.reader.close()
    model.reader = SlowReader(model.checkpoint.files)
    yield model
    model.reader.close()
    model.checkpoint.close()


def make(model, slots_a=5, slots_b=3) -> SharedExpertCache:
    model.reader.fail, model.reader.seconds, model.reader.gate = None, 0.0, None
    banks = [((0, 1), slots_a), ((2,), slots_b)]
    return SharedExpertCache(model.layouts, banks, model.reader, debug=True)


def decode(cache, layer, ids, bets=(), ahead=True):
    """What a streaming module does for one token; returns (slots, experts that came late)."""
    with cache.lock:
        claimed = cache.claim_few(layer, ids, ahead=ahead)
        assert claimed is not None
        try:
            for to, experts in bets:
                cache.prefetch(to, experts)
        finally:
            cache.finish_few()
        return claimed


def bytes_are_right(model, cache, layer, ids, slots):
    for e, slot in zip(ids, slots, strict=True):
        assert cache.table(layer)[e] == slot
    model.assert_in_slots(cache, layer, ids)


def land(cache):
    """Wait for all bets to be read."""
    deadline = time.time() + 10
    while not all(b.reading.done for bank in cache._banks for b in bank.bets.values()):
        assert time.time() < deadline
        time.sleep(0.001)


# ---- the cache -----------------------------------------------------------------------------------


class SlotRules(RuleBasedStateMachine):
    """What holds for `cache` in any order of rules: held outputs come to what they must, and the
    bytes of whatever is in memory are right."""

    model: Model
    cache: SharedExpertCache | None = None
    held: tuple | list[tuple[mx.array, float]] = ()  # outputs, and what they must come to

    @rule()
    def evaluate(self):
        for y, expected in self.held:
            assert y.item() == expected
        self.held = []

    @invariant()
    def everything_agrees(self):
        if self.cache is None:
            return
        if self.cache._loading is None:
            self.cache.check()
        for bank in self.cache._banks:
            for layer, e in bank.owners().values():
                self.model.assert_in_slots(self.cache, layer, [e])

    def teardown(self):
        self.evaluate()
        for bank in self.cache._banks if self.cache else ():
            for key in list(bank.bets):
                self.cache._drop(bank, key)


class BetMachine(SlotRules):
    """Whatever is bet on, claimed, held and failed, in whatever order: bytes are right."""

    @initialize(slots_a=st.integers(2, 8), slots_b=st.integers(1, 5), slow=st.booleans())
    def make(self, slots_a, slots_b, slow):
        self.cache = make(self.model, slots_a, slots_b)
        self.model.reader.seconds = 0.001 * slow
        self.held = []

    def room(self, layer):
        return self.cache._bank_of[layer].slots

    @rule(data=st.data(), layer=st.integers(0, 2), ahead=st.booleans(), fails=st.booleans())
    def decode(self, data, layer, ahead, fails):
        one = st.integers(0, COUNTS[layer] - 1)
        ids = data.draw(st.lists(one, min_size=1, max_size=4))
        bets = []
        for to in data.draw(st.lists(st.integers(0, 2), max_size=2)):
            one = st.integers(0, COUNTS[to] - 1)
            bets.append((to, data.draw(st.lists(one, min_size=1, max_size=4, unique=True))))
        if len(set(ids)) > self.room(layer):
            assert self.cache.claim_few(layer, ids) is None
            return
        if fails:
            self.model.reader.fail = ExpertReadError(errno.EIO, "injected")
        try:
            slots, _ = decode(self.cache, layer, ids, bets, ahead)
            bytes_are_right(self.model, self.cache, layer, ids, slots)
        except ExpertReadError:
            pass  # injected here, or in a bet before
        finally:
            self.model.reader.fail = None

    @rule(which=st.integers(0, 100))
    def hold(self, which):
        # What is in memory depends on the threads, what hypothesis draws must not.
        keys = sorted(k for b in self.cache._banks for k in b.owners().values())
        if not keys:
            return
        layer, e = keys[which % len(keys)]
        self.held.append(held_sum(self.model, self.cache, layer, e))

    @rule(layer=st.integers(0, 2))
    def pin(self, layer):
        bank = self.cache._bank_of[layer]
        if len(bank.pinned | {(layer, 0)}) < bank.slots:
            try:
                self.cache.pin(layer, [0])
                self.cache.unpin(layer, [0])
            except ExpertReadError:
                pass


def test_bets_and_claims_in_any_order(model):
    BetMachine.model = model
    run_state_machine_as_test(
        BetMachine,
        settings=settings(
            max_examples=60, stateful_step_count=30, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


def test_a_bet_that_is_needed_is_a_hit(model):
    cache = make(model, slots_a=8)
    decode(cache, 0, [0, 1], bets=[(1, [2, 3])])
    land(cache)
    before = model.reader.stats.requests
    slots, late = decode(cache, 1, [3, 2])
    assert not late
    bytes_are_right(model, cache, 1, [3, 2], slots)
    assert cache.stats.layers[1].hits == 2
    assert (cache.stats.bets.issued, cache.stats.bets.used) == (2, 2)
    assert model.reader.stats.requests - before == 2 * 2


def test_a_bet_that_is_still_being_read_is_waited_for_and_read_once(model):
    cache = make(model, slots_a=8)
    decode(cache, 0, [0])
    before = model.reader.stats.requests
    model.reader.gate = threading.Event()
    with cache.lock:
        cache.claim_few(0, [0])
        cache.prefetch(1, [2])
    threading.Timer(0.05, model.reader.gate.set).start()
    slots, _ = decode(cache, 1, [2])
    bytes_are_right(model, cache, 1, [2], slots)
    assert cache.stats.bets.late == 1
    assert cache.stats.layers[1].misses == 1
    assert model.reader.stats.requests - before == 2


class Gated:
    """A streamer of one thread that waits at a gate in its first read, and notes the order."""

    def __init__(self):
        self.order, self.gate = [], threading.Event()
        self.streamer = Streamer(self.read_one, threads=1)

    def read_one(self, read):
        self.order.append(read)
        assert self.gate.wait(10)

    def add(self, *reads, bet=True):
        reading = Reading(reads, bet)
        self.streamer.add(reading)
        return reading

    def until(self, condition):
        deadline = time.time() + 10
        while not condition():
            assert time.time() < deadline
            time.sleep(0.001)


def test_a_demand_goes_before_bets():
    g = Gated()
    bets = g.add("bet 1", "bet 2", "bet 3")
    g.until(lambda: g.order)
    demand = g.add("a", "b", bet=False)
    g.gate.set()
    g.until(lambda: demand.done)
    time.sleep(0.01)
    assert g.order == ["bet 1", "a", "b"]  # no bet while somebody still waits
    g.streamer.forget(demand)
    g.until(lambda: bets.done)
    assert g.order == ["bet 1", "a", "b", "bet 2", "bet 3"]
    g.streamer.stop()


def test_nothing_of_a_reading_that_is_quiet_is_read_any_more():
    reading = Reading(["a", "b", "c"])
    assert not reading.begun
    assert reading.take() == "a"
    assert reading.begun
    assert not reading.done
    ended = []

    def end():
        time.sleep(0.01)
        ended.append(True)
        reading.taken_is_done(None)

    thread = threading.Thread(target=end)
    thread.start()
    reading.quiet()
    assert ended, "came back while a thread was reading"
    thread.join()
    assert reading.done
    assert reading.take() is None
    assert reading.error is None


def test_bets_leave_half_of_the_threads_to_demands():
    lock, ends = threading.Lock(), threading.Event()
    counts = {"now": 0, "most": 0}

    def read_one(read):
        with lock:
            counts["now"] += 1
            counts["most"] = max(counts.values())
        ends.wait(0.01)
        with lock:
            counts["now"] -= 1

    streamer = Streamer(read_one, threads=4)
    demand = Reading(range(4))
    streamer.add(demand)  # all threads are there
    assert len(streamer.threads) == 4
    demand.quiet()
    streamer.forget(demand)
    deadline = time.time() + 10
    for _ in range(2):
        counts["most"] = 0
        bets = [Reading(range(3), bet=True) for _ in range(4)]
        for bet in bets:
            streamer.add(bet)
        while not all(bet.done for bet in bets):
            assert time.time() < deadline
            time.sleep(0.001)
        assert 1 <= counts["most"] <= 2
    streamer.stop()


def test_a_bet_that_is_promoted_overtakes_others():
    g = Gated()
    first, second = g.add("1"), g.add("2")
    g.until(lambda: g.order)
    needed = g.add("3")
    g.streamer.promote(needed)
    g.gate.set()
    g.until(lambda: needed.done)
    assert g.order == ["1", "3"]
    assert (needed.bet, needed.queued) == (False, True)
    g.streamer.forget(needed)
    g.until(lambda: first.done and second.done)
    assert g.order == ["1", "3", "2"]
    g.streamer.stop()


def test_a_bet_that_is_promoted_has_more_threads():
    """Bets keep half of them free."""
    side_by_side = threading.Barrier(3, timeout=10)

    def read_one(read):
        if read is not None:
            side_by_side.wait()

    streamer = Streamer(read_one, threads=2)
    demand, bet = Reading([None, None]), Reading(range(3), bet=True)
    streamer.add(demand)  # all threads are there
    demand.quiet()
    streamer.forget(demand)
    deadline = time.time() + 10
    while not streamer._wake.empty():
        assert time.time() < deadline
    streamer.add(bet)
    while not bet.begun or not streamer._wake.empty():
        assert time.time() < deadline
    streamer.promote(bet)
    bet.work(read_one)
    bet.quiet()
    assert bet.error is None
    streamer.stop()


def test_a_thread_that_comes_too_late_for_the_last_read_counts_as_gone():
    """The caller takes reads without the lock; a helper that stayed would be waited for forever."""

    class Snatched(deque):  # empty by the time that a thread gets there
        def popleft(self):
            self.clear()
            return super().popleft()

    reading = Reading(["the last"])
    reading.todo = Snatched(reading.todo)
    assert reading.take() is None
    assert reading.done


def test_an_interrupt_while_a_bet_is_cancelled_is_not_lost(model):
    class Interrupted(threading.Condition):
        """Of those who wait, the first is interrupted; then the read may end."""

        waits = 0

        def wait(self, timeout=None):
            self.waits += 1
            if self.waits == 1:
                signal.raise_signal(signal.SIGINT)
            reader.gate.set()
            return super().wait(timeout)

    reader = SlowReader(model.checkpoint.files)
    reader.gate = threading.Event()
    bank = SlotBank(model.layouts[0].tensors, 1)
    offset = int(model.layouts[0].offsets[0, 0])
    reading = reader.reading([(0, offset, bank.rows(0)[0], ("x",))], bet=True)
    reading.changed = Interrupted()
    reader.start(reading)
    deadline = time.time() + 10
    while not reading.begun:
        assert time.time() < deadline
        time.sleep(0.001)
    # Ignored where the tests were started in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            reader.cancel(reading)
    finally:
        signal.signal(signal.SIGINT, before)
    assert reading.changed.waits == 2
    assert reading.done
    reader.close()


def test_a_bet_that_is_needed_before_it_was_queued_leaves_nothing_open(model):
    """As an interrupt in `prefetch` can leave it: bets that come later are read all the same."""
    reader = SlowReader(model.checkpoint.files)
    bank = SlotBank(model.layouts[0].tensors, 2)
    offset = int(model.layouts[0].offsets[0, 0])
    first, second = (
        reader.reading([(0, offset, bank.rows(i)[0], ("x",))], bet=True) for i in range(2)
    )
    reader.finish(first)
    reader.start(second)
    deadline = time.time() + 10
    while not second.done:
        assert time.time() < deadline
        time.sleep(0.001)
    reader.close()


def test_bets_evict_nothing_that_the_claim_needs(model):
    cache = make(model, slots_a=3)
    decode(cache, 0, [0, 1])
    slots, _ = decode(cache, 0, [0, 1], bets=[(1, [0, 1, 2, 3])])
    bytes_are_right(model, cache, 0, [0, 1], slots)
    assert cache.stats.bets.issued == 1
    assert [b.reading.bet for b in cache._bank_of[1].bets.values()] == [True]  # demands go first


def test_bets_that_landed_before_their_layer_count_when_it_is_known_who_was_needed(model):
    cache = make(model, slots_a=6)
    decode(cache, 0, [0], bets=[(1, [2, 3])])
    cache.land(1)
    cache.land(1)  # nothing is left to wait for
    bytes_are_right(model, cache, 1, [2, 3], cache.table(1)[[2, 3]])
    layer, bets = cache.stats.layers[1], cache.stats.bets
    assert (layer.hits, layer.misses, layer.missed_calls, bets.used, bets.wasted) == (0,) * 5
    for _ in range(2):
        assert cache.saw(1, [2, 2], cache.lookup(1))
    assert (layer.hits, layer.misses, layer.calls, layer.waves) == (1, 1, 2, 2)
    assert (bets.issued, bets.used, bets.wasted) == (2, 1, 1)


def test_a_resize_forgets_who_landed(model):
    cache = make(model, slots_a=6)
    decode(cache, 0, [0], bets=[(1, [2])])
    cache.land(1)
    cache.resize([5, 3])
    decode(cache, 1, [2])
    hits = cache.stats.layers[1].hits
    assert cache.saw(1, [2], cache.lookup(1))
    assert (cache.stats.layers[1].hits, cache.stats.bets.used) == (hits + 1, 0)


def test_bets_that_are_dropped_are_wasted_or_were_cancelled_in_time(model, monkeypatch):
    cache = make(model, slots_a=6)
    decode(cache, 0, [0], bets=[(1, [2])])
    land(cache)
    monkeypatch.setattr(model.reader, "start", lambda reading: None)
    decode(cache, 0, [0], bets=[(1, [3, 1])])
    cache.resize([5, 3])
    bets = cache.stats.bets
    assert (bets.issued, bets.wasted, bets.cancelled) == (3, 1, 2)


def test_a_layer_is_judged_by_each_of_its_bets_once(model):
    cache = make(model, slots_a=8)
    decode(cache, 0, [0], bets=[(1, [2])])
    land(cache)
    decode(cache, 1, [0])
    decode(cache, 1, [1])
    assert cache._judges[1].score == pytest.approx(1 - WEIGHT)
    decode(cache, 0, [0], bets=[(1, [3])])
    land(cache)
    decode(cache, 1, [3])
    assert cache._judges[1].score == pytest.approx(1 - WEIGHT + WEIGHT * WEIGHT)
    assert [cache._judges[i].score for i in (0, 2)] == [1, 1]


def test_a_bet_that_cannot_be_read_is_given_up_when_it_lands(model):
    cache = make(model, slots_a=6)
    decode(cache, 0, [0])
    model.reader.fail = ExpertReadError(errno.EIO, "injected")
    decode(cache, 0, [0], bets=[(1, [2])])
    cache.land(1)
    assert not cache._bank_of[1].bets
    cache.check()
    model.reader.fail = None
    decode(cache, 1, [2])
    model.assert_in_slots(cache, 1, [2])


def test_wrong_bets_give_their_slots_back(model):
    cache = make(model, slots_a=4)
    decode(cache, 0, [0], bets=[(1, [1, 2])])
    land(cache)
    decode(cache, 1, [0])
    for e in range(4):
        decode(cache, 1, [e])
        decode(cache, 0, [e % COUNTS[0]])
    assert cache.stats.bets.used + cache.stats.bets.wasted == 2
    assert not cache._bank_of[0].bets


def test_a_failed_bet_costs_nothing_until_it_is_needed(model):
    cache = make(model, slots_a=6)
    decode(cache, 0, [0])
    model.reader.fail = ExpertReadError(errno.EIO, "injected")
    decode(cache, 0, [0], bets=[(1, [1])])
    land(cache)
    slots, _ = decode(cache, 0, [0])
    bytes_are_right(model, cache, 0, [0], slots)
    with pytest.raises(ExpertReadError):
        decode(cache, 1, [1])
    model.reader.fail = None
    slots, _ = decode(cache, 1, [1])
    bytes_are_right(model, cache, 1, [1], slots)


def test_pins_survive_new_memory_after_an_interrupted_claim(model):
    cache = make(model, slots_a=6)
    cache.pin(0, [1])
    bank = cache._bank_of[0]
    with cache.lock:
        cache._start(bank, 1, [0])  # and an interrupt came, before `_finish`
        cache._abandon([bank])
    cache.check()
    assert bank.pinned == {(0, 1)}
    model.assert_in_slots(cache, 0, [1])


def test_what_a_failed_bet_was_for_is_read_when_it_is_needed(model):
    cache = make(model, slots_a=6)
    decode(cache, 0, [0])
    model.reader.fail = ExpertReadError(errno.EAGAIN, "injected")
    decode(cache, 0, [0], bets=[(1, [1])])
    land(cache)
    model.reader.fail = None
    slots, _ = decode(cache, 1, [1])
    bytes_are_right(model, cache, 1, [1], slots)
    assert cache.stats.bets.wasted == 1


def test_an_interrupt_at_any_line_while_betting_loses_no_slot(model):
    for n in range(1, 1000):
        cache = make(model, slots_a=4)
        cache._debug = False
        decode(cache, 0, [0, 1], bets=[(1, [2])])
        land(cache)
        where = interrupt_at_line(
            n, lambda cache=cache: decode(cache, 1, [2, 3, 2], bets=[(0, [2]), (1, [1])]), CACHE
        )
        decode(cache, 1, [2, 3])
        cache.check()
        for bank in cache._banks:
            for layer, e in bank.owners().values():
                model.assert_in_slots(cache, layer, [e])
        decode(cache, 0, [0, 1, 2, 3])
        model.assert_in_slots(cache, 0, [0, 1, 2, 3])
        if where is None:
            break
    assert n > 60


class ThreadsOnly:
    """A gate that holds up the reader's threads, and nobody else."""

    def __init__(self):
        self.open = threading.Event()

    def wait(self, seconds):
        if threading.current_thread() is not threading.main_thread():
            self.open.wait(seconds)


def everything_is_right(model, cache):
    cache.check()
    for bank in cache._banks:
        for layer, e in bank.owners().values():
            model.assert_in_slots(cache, layer, [e])


def test_an_interrupt_while_a_bet_is_given_up_does_not_make_it_look_read(model):
    for n in range(1, 1000):
        cache = make(model, slots_a=6)
        cache._debug = False
        model.reader.gate = gate = ThreadsOnly()
        # Demands are this thread's; another one is at the first bet, and the second waits.
        decode(cache, 0, [0], bets=[(1, [2, 3])], ahead=False)
        where = interrupt_at_line(n, lambda cache=cache: decode(cache, 1, [0], ahead=False), CACHE)
        gate.open.set()
        decode(cache, 1, [2, 3])
        everything_is_right(model, cache)
        if where is None:
            break
    assert n > 60


@pytest.mark.parametrize("ahead", [False, True])
def test_an_interrupt_while_a_failed_claim_is_taken_back_does_not_make_it_look_read(model, ahead):
    for n in range(1, 1000):
        cache = make(model, slots_a=4)
        cache._debug = False
        decode(cache, 0, [0, 1])
        model.reader.fail = ExpertReadError(errno.EIO, "injected")

        def fail(cache=cache):
            with pytest.raises(ExpertReadError):
                decode(cache, 0, [0, 2, 3], ahead=ahead)

        where = interrupt_at_line(n, fail, CACHE)
        model.reader.fail = None
        cache.prewarm([(1, 0), (1, 1)])
        decode(cache, 0, [0])  # there already: nothing is begun
        everything_is_right(model, cache)
        decode(cache, 0, [2, 3])
        everything_is_right(model, cache)
        if where is None:
            break
    assert n > 60


@pytest.mark.parametrize("sizes", [[4, 3], [2, 3], [9, 6]], ids=str)
def test_an_interrupt_at_any_line_of_a_resize_leaves_no_table_of_other_memory(model, sizes):
    for n in range(1, 1000):
        cache = make(model, slots_a=5)
        cache._debug = False
        decode(cache, 2, [1, 3])
        decode(cache, 0, [3, 2, 1])
        cache.pin(1, [2])
        with cache.lock:
            cache.claim_few(0, [3])
            cache.prefetch(1, [3])
            cache.finish_few()
        land(cache)
        where = interrupt_at_line(n, lambda cache=cache: cache.resize(sizes), CACHE)
        if not all(b.holds_all for b in cache._banks):
            everything_is_right(model, cache)
            decode(cache, 1, [3])
            decode(cache, 0, [0, 1][: cache.bank_slots[0] - 1])
            everything_is_right(model, cache)
        if where is None:
            break
    assert cache.bank_slots == sizes
    assert n > 60


def hand_over(model, cache):
    """Another thread holds an output that may still read slots: the memory is left to it."""
    held, settled = threading.Event(), threading.Event()

    def build():
        cache.hold(held_sum(model, cache, 0, 0)[0] + 1)
        held.set()
        settled.wait(10)

    thread = threading.Thread(target=build)
    thread.start()
    held.wait(10)
    cache.settle()
    settled.set()
    thread.join()
    assert cache.stats.abandoned == 1


def test_a_claim_waits_unless_it_is_to_return_ahead(model):
    cache = make(model, slots_a=4)
    decode(cache, 0, [0])
    with cache.lock:
        slots, coming = cache.claim_few(0, [0, 1])
        assert not coming
        bytes_are_right(model, cache, 0, [0, 1], slots)


def test_a_claim_whose_end_was_never_waited_for_goes_with_its_memory(model):
    cache = make(model, slots_a=4)
    decode(cache, 0, [0])
    with cache.lock:
        _, coming = cache.claim_few(0, [0, 1], ahead=True)
    assert list(coming) == [1]  # an interrupt came before `finish_few`
    hand_over(model, cache)
    assert cache.prewarm([(1, 2)]) == 1
    decode(cache, 1, [2])
    everything_is_right(model, cache)


def test_a_layer_whose_bets_are_wrong_stops_and_tries_again():
    judge = Judge()

    class Made:
        judged, counts = False, True

    for _ in range(100):
        bet = Made()
        judge.saw(bet, False)
        judge.saw(bet, True)  # judged once
    assert sum(judge.allows(0.0) for _ in range(TRY_EVERY)) == 1
    for _ in range(100):
        judge.saw(Made(), True)
    assert all(judge.allows(0.0) for _ in range(10))


@pytest.mark.parametrize(
    ("needed", "waiting", "pays"),
    [(3, 0.5, True), (3, 0.9, False), (3, 0.75, True), (3, 0.83, False), (4, 0.97, True),
     (2, 0.6, True), (2, 0.7, False), (1, 0.4, False)],
)  # fmt: skip
def test_bets_must_be_better_the_less_time_a_disk_rests(needed, waiting, pays):
    """needed: of four. With a share p of them needed they pay while (1 - p) f < 1 - f."""
    judge = Judge()
    for n in range(400):
        judge.saw(Bet(0, Reading([])), n % 4 < needed)
    assert (sum(judge.allows(waiting) for _ in range(TRY_EVERY)) > 1) == pays


def test_without_threads_there_are_no_bets(model):
    reader = ExpertReader(model.checkpoint.files, threads=0)
    cache = SharedExpertCache(model.layouts, [((0, 1), 5), ((2,), 3)], reader, debug=True)
    slots, late = decode(cache, 0, [0, 1])
    assert not late
    assert not cache.may_bet(1)
    bytes_are_right(model, cache, 0, [0, 1], slots)
    reader.close()


# ---- the model -----------------------------------------------------------------------------------


WAYS = {
    "hits first": {"lookahead": False},
    "lookahead": {"hits_first": False},
    "both": {},
    "spec": {"spec": 2},
    "none": {"hits_first": False, "lookahead": False},
}


@pytest.mark.parametrize("arch", STREAMED)
def test_reading_ahead_changes_no_bit(arch, tiny, slow_disk):
    folder = tiny(arch, "affine")
    reference = resident(folder)
    expected = list(step_logits(reference))
    for way in ("both", "spec"):
        for slots in (0.5, 3):
            config = StreamingConfig(slots=slots, debug=True, **WAYS[way])
            model, _ = load_model(folder, config=config)
            for a, b in zip(step_logits(model), expected, strict=True):
                assert same_bits(a, b), (way, slots)


def step_logits(model, n=10):
    """Logits of a few tokens, one by one, behind a short prompt."""
    if hasattr(model, "make_cache"):
        cache = model.make_cache()
    else:
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(model)
    yield model(mx.array([TOKENS[:5]]), cache=cache)
    for t in TOKENS[5 : 5 + n]:
        y = model(mx.array([[t]]), cache=cache)
        mx.eval(y)
        yield y


@pytest.mark.parametrize("way", WAYS)
def test_ways_on_the_demo(way, slow_disk):
    """Real routing: bits as mlx-lm's, and the ways are really taken."""
    from pathlib import Path

    import smoe_mlx

    demo = Path(smoe_mlx.__file__).parent / "demo"
    config = StreamingConfig(slots=0.25, debug=True, **WAYS[way])
    model, _ = load_model(demo, config=config)
    reference = resident(demo)
    prompt = mx.array(TOKENS[:20])
    tokens = generate_step(prompt, model, max_tokens=24)
    expected = [next(tokens)[0]]
    before = stats(model).bets  # the prompt's
    expected += [t for t, _ in tokens]
    from mlx_lm.generate import generate_step as mlx_step

    assert [int(t) for t, _ in mlx_step(prompt, reference, max_tokens=24)] == expected
    bets = stats(model).bets
    ahead = way in ("lookahead", "both", "spec")
    assert (bets.issued > before.issued) == ahead
    assert (bets.used + bets.late > before.used + before.late) == ahead


def test_where_the_number_of_rows_changes_bits_hits_do_not_go_first(tiny, slow_disk):
    """As on CUDA: kernels that add up in another order for another number of rows."""
    folder = tiny("qwen3_moe", "affine")
    config = StreamingConfig(slots=0.5, debug=True)
    model, _ = load_model(folder, config=config)
    trusting, _ = load_model(folder, config=config)
    plain, _ = load_model(folder, config=StreamingConfig(slots=0.5, hits_first=False))
    for m in (model, trusting, plain):
        for _, switch in m.named_modules():
            if isinstance(switch, StreamingSwitchGLU):
                experts = switch._experts
                if m is trusting:
                    switch._trials = 0

                def shaped(arrays, x, idx, in_order, experts=experts):
                    return experts(arrays, x, idx, in_order) + 1e-4 * idx.size

                object.__setattr__(switch, "_experts", shaped)
    expected = list(step_logits(plain, 20))
    assert all(same_bits(a, b) for a, b in zip(step_logits(model, 20), expected, strict=True))
    assert not all(
        same_bits(a, b) for a, b in zip(step_logits(trusting, 20), expected, strict=True)
    )
    switches = [m for _, m in model.named_modules() if isinstance(m, StreamingSwitchGLU)]
    assert not any(s._hits_first for s in switches)


def test_hits_are_computed_before_misses_are_there(tiny, slow_disk, monkeypatch):
    """The order of events: hits are under way when the claim waits for the rest."""
    config = StreamingConfig(slots=0.5, lookahead=False, debug=True)
    model, _ = load_model(tiny("qwen3_moe", "affine"), config=config)
    list(step_logits(model, 3))
    events = []
    cache = model._streaming.cache
    finish, evaluate = cache.finish_few, mx.async_eval
    top_k = CONFIGS["qwen3_moe"]["num_experts_per_tok"]

    def start(y):
        if not isinstance(y, list):  # else routing, on its way to the host
            events.append("all" if y.shape[-2] == top_k else "hits")
        evaluate(y)

    monkeypatch.setattr(cache, "finish_few", lambda: (events.append("wait"), finish())[1])
    monkeypatch.setattr(mx, "async_eval", start)
    list(step_logits(model, 20))
    assert "hits" in events
    calls = " ".join(events).split(" all")
    # Twice: nothing was there to begin with.
    assert {call.strip() for call in calls} == {"wait", "wait wait", "hits wait wait", ""}


@pytest.mark.parametrize("arch", STREAMED)
def test_predictors_answer_with_experts(arch, tiny):
    model, _ = load_model(tiny(arch, "affine"), config=StreamingConfig(slots=0.5))
    modules = [
        (path, m) for path, m in model.named_modules() if type(m).__name__.startswith("Streaming")
    ]
    found = [b for _, m in modules for b in m._bets]
    without = {"deepseek_v41", "gemma4", "gemma4_text", "kimi_k3", "nemotron_h_latent",
               "longcat_flash", "longcat_flash_ngram"}  # fmt: skip
    assert bool(found) == (len(modules) > 1 and arch not in without), (len(modules), len(found))
    cache = model._streaming.cache
    for layer, predict in found:
        x = mx.random.normal((1, 1, dims_of(cache.layouts[layer])))
        ids = np.array(predict(x, 2))
        assert ids.size >= 2
        assert ids.min() >= 0
        assert ids.max() < cache.layouts[layer].num_experts


def dims_of(layout) -> int:
    """D: what the last projection puts out."""
    down = next(t for t in layout.tensors if t.name in ("down_proj.weight", "fc2.weight"))
    return down.shape[0]


def test_a_prediction_is_the_next_gate_on_this_input(tiny):
    """With equal norms, it is what the next layer's gate says of the same vector."""
    model, _ = load_model(tiny("qwen3_moe", None), config=StreamingConfig(slots=0.5))
    here, there = (f"model.layers.{i}.mlp.switch_mlp" for i in (0, 1))
    predict = make_predictor(model, here, there, CONFIGS["qwen3_moe"]["hidden_size"], 8)
    x = mx.random.normal((1, 1, CONFIGS["qwen3_moe"]["hidden_size"]))
    a, b = (model.model.layers[i].post_attention_layernorm.weight for i in (0, 1))
    scores = np.array(model.model.layers[1].mlp.gate(x * (b / a)))[0, 0]
    assert set(np.array(predict(x, 3)).ravel()) == set(np.argsort(scores)[-3:])


def test_a_bet_goes_with_the_memory_that_it_was_read_into(model):
    cache = make(model, slots_a=4)
    decode(cache, 0, [0])
    with cache.lock:
        cache.claim_few(0, [0])
        cache.prefetch(1, [2])
        cache.finish_few()
    assert (1, 2) in cache._bank_of[1].bets
    hand_over(model, cache)
    assert not cache._bank_of[1].bets
    decode(cache, 1, [2])
    everything_is_right(model, cache)
