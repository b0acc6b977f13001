"""The slot protocol in any order, with failures and interrupts anywhere: what a layer computes from
is always the right expert's bytes."""

import contextlib
import errno
import threading

import mlx.core as mx
import numpy as np
from conftest import interrupt_at_line
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    rule,
    run_state_machine_as_test,
)
from test_bets import SlotRules, make
from test_bets import model as model
from test_cache import CACHE, COUNTS, lazy_sum, true_sum

from smoe_mlx.cache.experts import SharedExpertCache
from smoe_mlx.cache.policy import LFU, LRU
from smoe_mlx.errors import BudgetError, ExpertReadError

LAYERS = st.integers(0, 2)
WEIGHTS = [("up_proj", "weight")] * 2 + [("fc1", "weight")]


class SlotMachine(SlotRules):
    """Everything that decoding does to the cache, exact and optimistic, and idle time besides."""

    @initialize(
        slots_a=st.integers(1, 8), slots_b=st.integers(1, 5), slow=st.booleans(),
        policy=st.sampled_from([LRU, LFU]),
    )  # fmt: skip
    def make(self, slots_a, slots_b, slow, policy):
        self.model.reader.fail, self.model.reader.gate = None, None
        self.model.reader.seconds = 0.0005 * slow
        banks = [((0, 1), slots_a), ((2,), slots_b)]
        self.cache = SharedExpertCache(self.model.layouts, banks, self.model.reader, policy)
        self.held = []
        self.unverified: list[tuple] = []

    def trouble(self, data):
        """Draw what goes wrong during the next action: (reads fail, line of an interrupt)."""
        kind = data.draw(st.sampled_from(["", "", "", "fail", "interrupt"]))
        return kind == "fail", data.draw(st.integers(1, 120)) if kind == "interrupt" else 0

    def act(self, data, action, trouble=None) -> bool:
        """Do it, perhaps with trouble; whether it came to its end."""
        fails, line = trouble or self.trouble(data)
        done = []

        def run():
            action()
            done.append(True)

        if fails:
            self.model.reader.fail = ExpertReadError(errno.EIO, "injected")
        try:
            if line:
                interrupt_at_line(line, run, CACHE)
            else:
                run()
        except ExpertReadError:
            pass  # injected, here or into a bet before
        finally:
            self.model.reader.fail = None
        return bool(done)

    def ids(self, data, layer, most=4, unique=False):
        one = st.integers(0, COUNTS[layer] - 1)
        return data.draw(st.lists(one, min_size=1, max_size=most, unique=unique))

    def by_lookup(self, layer, ids):
        """(table, an output that takes its slots from it, what it must be), not evaluated."""
        lookup = self.cache.lookup(layer)
        rows = self.cache.arrays(layer)[WEIGHTS[layer]][mx.take(lookup, mx.array(ids))]
        return lookup, rows.sum(), sum(true_sum(self.model, layer, e) for e in ids)

    # ---- the exact way ---------------------------------------------------------------------------

    @rule(data=st.data(), layer=LAYERS, ahead=st.booleans())
    def decode(self, data, layer, ahead):
        cache, ids = self.cache, self.ids(data, layer)
        bets = [
            (to, self.ids(data, to, unique=True)) for to in data.draw(st.lists(LAYERS, max_size=2))
        ]
        forgets = data.draw(st.integers(0, 9)) == 0  # an interrupt before the `finally`
        got = []

        def run():
            with cache.lock:
                cache.look_after()
                cache.catch_up()
                claimed = cache.claim_few(layer, ids, ahead=ahead)
                if claimed is None:
                    return
                slots, coming = claimed
                early = [(e, s) for e, s in zip(ids, slots, strict=True) if e not in coming]
                for e, slot in early:  # there before the others
                    self.bytes_are(layer, e, slot)
                if forgets:
                    return
                try:
                    for to, experts in bets:
                        cache.prefetch(to, experts)
                finally:
                    cache.finish_few()
                for e, slot in zip(ids, slots, strict=True):
                    assert cache.table(layer)[e] == slot
                    self.bytes_are(layer, e, slot)
                y = lazy_sum(cache, layer, ids[0])
                cache.hold(y)
                got.append((y, true_sum(self.model, layer, ids[0])))

        self.act(data, run)
        self.held += got

    def bytes_are(self, layer, expert, slot):
        for key, a in self.model.truth[layer].items():
            found = np.array(self.cache.arrays(layer)[key][slot])
            assert found.tobytes() == a[expert].tobytes(), (layer, expert, key)

    @rule(data=st.data(), layer=LAYERS)
    def claim_as_prompts_do(self, data, layer):
        cache, ids, trouble = self.cache, self.ids(data, layer, most=6), self.trouble(data)
        for wave in cache.waves(layer, np.array(ids)):

            def run(wave=wave):
                with cache.lock:
                    cache.claim(layer, wave)

            if wave and self.act(data, run, trouble):
                self.model.assert_in_slots(cache, layer, wave)

    # ---- the optimistic way ----------------------------------------------------------------------

    @rule(data=st.data(), layer=LAYERS)
    def call(self, data, layer):
        """A layer that takes its slots from the table; the host looks later."""
        ids = self.ids(data, layer)
        found = []
        self.act(data, lambda: (self.cache.land(layer), found.append(self.by_lookup(layer, ids))))
        self.unverified += [(layer, ids, *f) for f in found]

    @rule(data=st.data())
    def verify(self, data):
        def run():
            layer, ids, lookup, y, expected = self.unverified.pop(0)
            if self.cache.saw(layer, ids, lookup):
                self.cache.hold(y)
                self.held.append((y, expected))

        trouble = self.trouble(data)  # what is drawn must not hang on what the threads did
        if self.unverified:
            self.act(data, run, trouble)

    @rule()
    def miss(self):
        self.unverified = []

    @rule(data=st.data(), layer=LAYERS)
    def call_of_a_complete_layer(self, data, layer):
        ids, trouble = self.ids(data, layer), self.trouble(data)
        if self.cache.is_complete(layer):
            _, y, expected = self.by_lookup(layer, ids)
            self.cache.hold(y)
            self.held.append((y, expected))
            self.act(data, lambda: self.cache.saw_later(layer, mx.array(ids)), trouble)

    # ---- idle time, pins, and what else comes in between -----------------------------------------

    @rule(data=st.data(), layer=LAYERS)
    def prewarm(self, data, layer):
        keys = [(layer, e) for e in self.ids(data, layer, unique=True)]
        self.act(data, lambda: self.cache.prewarm(keys))

    @rule(data=st.data(), layer=LAYERS)
    def pin(self, data, layer):
        def run():
            with contextlib.suppress(BudgetError):
                self.cache.pin(layer, experts)

        experts = self.ids(data, layer, most=2, unique=True)
        self.act(data, run)

    @rule(data=st.data(), layer=LAYERS)
    def unpin(self, data, layer):
        self.act(data, lambda: self.cache.unpin(layer, range(COUNTS[layer])))

    @rule(data=st.data(), layer=LAYERS)
    def keep_most_used(self, data, layer):
        ids = np.array(self.ids(data, layer))
        self.act(data, lambda: self.cache.keep_most_used(layer, ids))

    @rule(data=st.data(), layer=LAYERS)
    def leave_behind(self, data, layer):
        """Another thread builds an output and ends: its slots are given up with it."""
        often = data.draw(st.integers(0, 3))
        there = np.flatnonzero(self.cache.table(layer) >= 0).tolist()
        if there and often == 0:

            def build():
                self.cache.hold(lazy_sum(self.cache, layer, there[0]) + 1)

            thread = threading.Thread(target=build)
            thread.start()
            thread.join()

    @rule(data=st.data())
    def settle(self, data):
        self.act(data, self.cache.settle)


def run_machine(model, examples, steps):
    SlotMachine.model = model
    run_state_machine_as_test(
        SlotMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, database=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


def test_slots_hold_the_right_experts_in_any_order(model):
    run_machine(model, examples=30, steps=40)


def test_an_interrupt_at_any_line_of_a_hand_over_leaves_no_table_of_what_is_not_there(model):
    for n in range(1, 1000):
        cache = make(model, slots_a=4)
        cache._debug = False
        with cache.lock:
            cache.claim(0, [0, 1])
            cache.claim(2, [3])
        cache.pin(1, [2])

        held, settled = threading.Event(), threading.Event()

        def build(cache=cache, held=held, settled=settled):
            cache.hold(lazy_sum(cache, 0, 0) + 1)
            held.set()
            settled.wait(10)

        thread = threading.Thread(target=build)
        thread.start()
        held.wait(10)
        where = interrupt_at_line(n, cache.settle, CACHE)
        settled.set()
        thread.join()
        cache.check()
        for bank in cache._banks:
            for layer, e in bank.owners().values():
                model.assert_in_slots(cache, layer, [e])
        if where is None:
            break
    assert n > 20
    assert cache.stats.abandoned == 1


def test_an_interrupt_at_any_line_of_an_eviction_leaves_no_victim_that_is_not_there(model):
    """It would give up a slot that it does not have: -1."""
    for n in range(1, 1000):
        cache = make(model, slots_a=2)
        cache._debug = False
        with cache.lock:
            cache.claim(0, [0, 1])
            where = interrupt_at_line(n, lambda cache=cache: cache.claim(1, [0]), CACHE)
            for experts in ([2, 3], [0, 1]):
                cache.claim(1, experts)
                model.assert_in_slots(cache, 1, experts)
                assert min(cache.table(1)[experts]) >= 0
        if where is None:
            break
    assert n > 20
