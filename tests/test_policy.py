"""Eviction policies against models that are too plain to be wrong."""

import itertools
import math
import sys

import pytest
from conftest import interrupt_at_line
from hypothesis import example, given
from hypothesis import strategies as st

from smoe_mlx.cache.policy import LFU, LRU, POLICIES
from smoe_mlx.config import StreamingConfig

SOURCE = sys.modules[LFU.__module__].__file__
every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
keys = st.tuples(st.integers(0, 2), st.integers(0, 4))
operations = st.lists(
    st.tuples(st.just("touch"), keys)
    | st.tuples(st.just("discard"), keys)
    | st.tuples(st.just("demote"), keys)
    | st.tuples(st.just("victim"), st.sets(keys, max_size=6)),
    max_size=60,
)


class ListLRU:
    """Keys in the order of use."""

    def __init__(self):
        self.order = []

    def touch(self, key):
        self.discard(key)
        self.order.append(key)

    def demote(self, key):
        self.discard(key)
        self.order.insert(0, key)

    def discard(self, key):
        self.order = [k for k in self.order if k != key]

    def best(self, keep):
        return next((k for k in self.order if k not in keep), None)

    @property
    def candidates(self):
        return set(self.order)


class ListLFU:
    """Every use of every key with its time, summed up whenever it is asked for."""

    def __init__(self):
        self.uses, self.candidates = {}, set()
        self.clock, self.layer, self.count, self.step = 0.0, -1, 0, 1.0

    def touch(self, key):
        single = key[0] == self.layer and len({layer for layer, _ in self.uses}) == 1
        if key[0] < self.layer or (single and self.count > 2 * len(self.candidates)):
            self.step = min(1.0, self.count / (2 * max(1, len(self.candidates))))
            self.clock += self.step
            self.count = 0
        self.layer = key[0]
        self.count += 1
        self.uses.setdefault(key, []).append(self.clock)
        self.candidates.add(key)

    def demote(self, key):
        self.uses[key] = []

    def discard(self, key):
        self.candidates.discard(key)

    def value(self, key):
        """At the key's next chance: what its layer has behind it this pass comes a pass later."""
        passed = key[0] <= self.layer
        at = self.clock + self.step * passed
        weight = sum(2 ** (use - at) for use in self.uses[key])
        return math.log2(weight) if weight else -math.inf

    def best(self, keep):
        return min((k for k in self.candidates if k not in keep), key=self.value, default=None)


@pytest.mark.parametrize(("policy", "model"), [(LRU, ListLRU), (LFU, ListLFU)])
@given(steps=operations)
@example([("touch", (0, 0)), ("touch", (0, 1)), ("touch", (0, 0)), ("victim", set())])
@example([("touch", (0, 3)), *[("touch", (1, 4))] * 2, ("victim", set()), ("victim", {(0, 3)})])
def test_a_policy_is_its_model(policy, model, steps):
    mine, plain = policy(), model()
    for name, argument in steps:
        if name == "demote" and argument not in plain.candidates:
            continue
        if name != "victim":
            getattr(mine, name)(argument)
            getattr(plain, name)(argument)
        elif (best := plain.best(argument)) is not None:
            key = mine.victim(argument)
            assert key not in argument, "what is to be kept must never go"
            assert same(plain, key, best)
            assert same(plain, mine.victim(argument), best), "it stays until it is discarded"
        else:
            with pytest.raises(LookupError):
                mine.victim(argument)
        for key in ((i, e) for i in range(3) for e in range(5)):
            assert (key in mine) == (key in plain.candidates)
    while plain.candidates:  # and what is left goes in that order
        key = mine.victim(())
        assert same(plain, key, plain.best(()))
        mine.discard(key)
        plain.discard(key)


def same(plain, key, best) -> bool:
    """Equal weights may differ in their last digits, in which order they were summed up."""
    if isinstance(plain, ListLRU):
        return key == best
    return plain.value(key) <= plain.value(best) + 1e-9


@every_policy
def test_an_empty_one_has_no_victim(make):
    with pytest.raises(LookupError):
        make().victim(set())


@every_policy
def test_discarding_what_is_not_there_is_no_error(make):
    policy = make()
    policy.touch((0, 1))
    policy.discard((0, 2))
    assert policy.victim(()) == (0, 1)


@every_policy
@given(calls=st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 9), min_size=1))))
def test_a_cache_can_live_by_it(make, calls):
    """As the expert cache does it: hits are touched, then misses evict with the call kept."""
    policy, held, slots = make(), set(), 10
    for layer, experts in calls:
        call = {(layer, e) for e in experts}
        for key in call & held:
            policy.touch(key)
        for _ in call - held:
            if len(held) == slots:
                key = policy.victim(call)
                assert key in held
                assert key not in call
                policy.discard(key)
                held.discard(key)
            held.add((call - held).pop())
        for key in call:
            if key not in policy:
                policy.touch(key)
        assert all(key in policy for key in held)
        assert call <= held


def survivors_of_a_scan(make) -> int:
    """Of 40 keys used in each of 8 passes, how many a scan of 400 others leaves in 80 slots."""
    policy, held = make(), set()

    def use(key):
        if key not in held and len(held) == 80:
            gone = policy.victim(())
            policy.discard(gone)
            held.discard(gone)
        held.add(key)
        policy.touch(key)

    working_set = [(layer, e) for layer in range(4) for e in range(10)]
    for _ in range(8):
        for key in working_set:
            use(key)
    for key in ((layer, e) for layer in range(4) for e in range(100, 200)):
        use(key)
    return len(held & set(working_set))


def test_a_scan_flushes_lru_and_not_lfu():
    assert survivors_of_a_scan(LRU) == 0
    assert survivors_of_a_scan(LFU) == 40


def test_lfu_forgets():
    """What was used often, long ago, makes room for what is used now; for ever."""
    lfu = LFU()
    for i in range(20000):
        for key in ((0, i // 2000), (1, 0), (2, 0)):
            lfu.touch(key)
        if i == 2050:
            assert lfu.victim(()) == (0, 0)
    for gone in range(9):
        assert lfu.victim(()) == (0, gone)
        lfu.discard((0, gone))


def test_lfu_takes_of_equals_the_one_whose_next_chance_is_furthest_away():
    lfu = LFU()
    for layer in (0, 1, 2, 3, 0, 1):
        lfu.touch((layer, 0))
    # 0 and 1 were used twice. Layer 2 can be needed any moment, layer 3 a little later.
    assert lfu.victim(()) == (3, 0)
    lfu.touch((2, 1))  # of this pass, but layer 2 is not needed again in it
    lfu.touch((3, 1))
    assert lfu.victim({(2, 0), (3, 0)}) == (3, 1)

    lfu = LFU()
    for layer in (0, 0, 1, 1, 2, 2):  # twice as many uses as keys: a pass halves
        lfu.touch((layer, 0))
    lfu.touch((0, 1))
    lfu.touch((0, 1))
    # (0, 1) weighs twice as much as the others, and as much when layer 0 comes again.
    assert lfu.victim({(0, 0)}) == (0, 1)


def test_lfu_of_a_single_layer_forgets():
    lfu = LFU()
    for e in (0, 1):
        for _ in range(200):
            lfu.touch((5, e))
    for _ in range(100):
        lfu.touch((5, 0))
    assert lfu.victim(()) == (5, 1)
    for _ in range(60):
        lfu.touch((5, 1))
    assert lfu.victim(()) == (5, 0)


def test_the_option():
    assert StreamingConfig().policy == "lru"
    assert StreamingConfig(policy="lfu").policy == "lfu"
    with pytest.raises(ValueError, match=r"policy='fifo': one of lru, lfu"):
        StreamingConfig(policy="fifo")


@every_policy
def test_an_interrupt_at_any_line_leaves_no_key_that_cannot_go(make):
    keep = {(0, 1), (1, 0)}
    for n in itertools.count(1):
        policy = make()
        for key in itertools.product(range(3), range(3)):
            policy.touch(key)

        def use(policy=policy):
            policy.victim(keep)
            policy.touch((1, 4))
            policy.touch((0, 1))
            policy.demote((2, 2))
            policy.victim(keep)
            policy.discard((2, 1))
            policy.victim(keep)

        where = interrupt_at_line(n, use, SOURCE)
        there = {key for key in itertools.product(range(3), range(5)) if key in policy}
        while there:
            gone = policy.victim({(9, 9)})
            assert gone in there, (n, where)
            policy.discard(gone)
            there.remove(gone)
        with pytest.raises(LookupError):
            policy.victim(set())
        if where is None:
            break


@every_policy
def test_an_interrupt_at_any_line_hides_no_only_key(make):
    for n in itertools.count(1):
        policy = make()
        where = interrupt_at_line(n, lambda policy=policy: policy.touch((0, 1)), SOURCE)
        if (0, 1) in policy:
            assert policy.victim(set()) == (0, 1), (n, where)
        if where is None:
            break
    assert n > 1
