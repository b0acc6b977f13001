"""Eviction policies against models that are too plain to be wrong."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smoe_mlx.cache.policy import LRU

keys = st.tuples(st.integers(0, 1), st.integers(0, 5))
operations = st.lists(
    st.tuples(st.just("touch"), keys)
    | st.tuples(st.just("discard"), keys)
    | st.tuples(st.just("demote"), keys)
    | st.tuples(st.just("victim"), st.sets(keys, max_size=6)),
    max_size=40,
)


@given(operations)
@example([("touch", (0, 0)), ("touch", (0, 1)), ("touch", (0, 0)), ("victim", set())])
def test_lru_is_a_list_in_the_order_of_use(steps):
    lru, order = LRU(), []
    for name, argument in steps:
        if name == "touch":
            order = [k for k in order if k != argument] + [argument]
            lru.touch(argument)
        elif name == "demote":
            if argument in order:
                order = [argument] + [k for k in order if k != argument]
                lru.demote(argument)
        elif name == "discard":
            order = [k for k in order if k != argument]
            lru.discard(argument)
        else:
            candidates = [k for k in order if k not in argument]
            if candidates:
                assert lru.victim(argument) == candidates[0]
                assert lru.victim(argument) == candidates[0], "it stays until it is discarded"
            else:
                with pytest.raises(LookupError):
                    lru.victim(argument)
        assert len(lru) == len(order)
    for key in order:  # and what is left goes in that order
        assert lru.victim(()) == key
        lru.discard(key)


def test_an_empty_lru_has_no_victim():
    with pytest.raises(LookupError):
        LRU().victim(set())


def test_discarding_what_is_not_there_is_no_error():
    lru = LRU()
    lru.touch((0, 1))
    lru.discard((0, 2))
    assert lru.victim(()) == (0, 1)
