"""Streaming switches by themselves: mlx-lm's own layers with the same weights are the measure."""

import mlx.core as mx
import numpy as np
import pytest
from conftest import SlowReader, same_bits
from mlx_lm.models import switch_layers
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from smoe_mlx.cache.experts import SharedExpertCache
from smoe_mlx.cache.slots import SETTLE_EVERY
from smoe_mlx.layers.switch import (
    HITS_FIRST_TRIALS,
    Projection,
    StreamingSwitchGLU,
    StreamingSwitchMLP,
    without_zero_experts,
)
from smoe_mlx.store.layout import layout_from_checkpoint
from smoe_mlx.store.safetensors import Checkpoint

D, H, E, K, LAYERS = 8, 12, 6, 2, 2


class Pair:
    """A resident layer and a streamed one, of the same weights."""

    def __init__(self, folder, kind, bias):
        mx.random.seed(1)
        self.resident = [kind(D, H, E, bias=bias) for _ in range(LAYERS)]
        names = ["gate_proj", "up_proj", "down_proj"] if kind is SwitchGLU else ["fc1", "fc2"]
        kinds = ["weight", "bias"] if bias else ["weight"]
        tensors = {}
        for i, layer in enumerate(self.resident):
            for name in names:
                if bias:
                    layer[name].bias = mx.random.normal(layer[name].bias.shape)
                tensors |= {f"{i}.{name}.{k}": layer[name][k] for k in kinds}
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)
        self.checkpoint = Checkpoint(folder)
        self.layouts = [
            layout_from_checkpoint(
                self.checkpoint,
                f"layers.{i}",
                E,
                {(name, k): f"{i}.{name}.{k}" for name in names for k in kinds},
            )
            for i in range(LAYERS)
        ]
        self.reader = SlowReader(self.checkpoint.files)
        self.streaming = StreamingSwitchGLU if kind is SwitchGLU else StreamingSwitchMLP
        self.projections = [Projection(name) for name in names]

    def streamed(self, slots, layer=0):
        banks = [(range(LAYERS), slots)]
        cache = SharedExpertCache(self.layouts, banks, self.reader, debug=True)
        return cache, self.streaming(cache, layer, *self.projections)


@pytest.fixture(scope="module", params=[(SwitchGLU, False), (SwitchGLU, True), (SwitchMLP, True)],
                ids=["GLU", "GLU with bias", "MLP"])  # fmt: skip
def pair(request, tmp_path_factory):
    pair = Pair(tmp_path_factory.mktemp("switch"), *request.param)
    yield pair
    pair.reader.close()
    pair.checkpoint.close()


def tokens(n, seed=0):
    """Inputs [1, n, D] and routing [1, n, K], no expert twice for one token."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(n)])
    return mx.array(rng.normal(size=(1, n, D)).astype(np.float32)), mx.array(ids)[None]


@pytest.mark.parametrize("slots", [2 * E, E, 4, 2, 1])
def test_any_number_of_tokens_in_any_number_of_slots(pair, slots):
    cache, switch = pair.streamed(slots, layer=1)
    stats = cache.stats.layers[1]
    for n, count in enumerate([1, 3, 1, 31, 32, 33, 1, 1]):
        x, ids = tokens(count, seed=n)
        before = (stats.calls, stats.waves, stats.hits + stats.misses)
        y = switch(x, ids)
        assert same_bits(y, pair.resident[1](x, ids)), (slots, count)
        cache.catch_up()
        if slots < 2 * E:
            distinct = len(set(ids.flatten().tolist()))
            waves = max(1, -(-distinct // slots))
            assert (stats.calls - before[0], stats.waves - before[1]) == (1, waves)
            assert stats.hits + stats.misses - before[2] == distinct
    assert stats.resident_calls == (8 if slots == 2 * E else 0)


@pytest.mark.parametrize("count", [31, 32, 33])
def test_rows_are_sorted_where_mlx_lm_sorts_them(pair, monkeypatch, count):
    """GPUs have another kernel for sorted rows, so the bits may differ."""
    switch, seen, experts = pair.streamed(2 * E)[1], [], pair.streaming._experts
    gather_sort = switch_layers._gather_sort
    monkeypatch.setattr(
        switch_layers, "_gather_sort", lambda *a: (seen.append(1), gather_sort(*a))[1]
    )
    monkeypatch.setattr(pair.streaming, "_experts", lambda *a: (seen.append(a[-1]), experts(*a))[1])
    pair.resident[0](*tokens(count))
    sorts = bool(seen)
    seen.clear()
    switch(*tokens(count))
    assert seen == [sorts]


def test_hits_are_computed_while_misses_are_read(pair):
    switch = pair.streamed(4)[1]
    reference = pair.resident[0]
    x, _ = tokens(1)
    seen = []

    def in_one(arrays, x, indices, *rest, compute=switch.in_one):
        seen.append(indices.size)
        return compute(arrays, x, indices, *rest)

    object.__setattr__(switch, "in_one", in_one)
    for n, (first, ids) in enumerate([([0], [0, 1]), ([1], [2, 1]), ([2, 3], [3, 4])]):
        for e in first:
            switch(x, mx.array([[[e, e]]]))
        seen.clear()
        assert same_bits(switch(x, mx.array([[ids]])), reference(x, mx.array([[ids]])))
        # A graph of the whole is built before the routing is known, and not used then. The first
        # times the whole is computed as well, to see that no bit differs.
        assert seen == ([2, 1, 1, 2] if n < HITS_FIRST_TRIALS else [2, 1, 1])
    switch.bet((), hits_first=False)
    seen.clear()
    assert same_bits(switch(x, mx.array([[[4, 5]]])), reference(x, mx.array([[[4, 5]]])))
    assert seen == [2]
    # Several tokens are not dealt out.
    switch.bet((), hits_first=True)
    x, _ = tokens(2)
    ids = mx.array([[[5, 0], [0, 5]]])
    seen.clear()
    assert same_bits(switch(x, ids), reference(x, ids))
    assert seen == [4]


def test_a_graph_built_before_its_routing_is_known(pair, monkeypatch):
    """It gets the slots of its call, and is not used if the cache has other memory by then."""
    cache, switch = pair.streamed(4)
    switch.bet((), hits_first=False)
    build, built = type(switch)._build_early, []
    resizes = iter([None, None, 6, None, 5, None])

    def build_early(*args):
        built.append(build(*args))
        if (slots := next(resizes)) is not None:
            cache.resize([slots])
        return built[-1]

    monkeypatch.setattr(type(switch), "_build_early", build_early)
    outputs, used = [], []
    for n in range(6):
        x, ids = tokens(1 + n % 2, n)
        outputs.append((switch(x, ids), pair.resident[0](x, ids)))
        used.append(built[-1].y is outputs[-1][0])
    assert used == [True, True, False, True, False, True]
    for y, expected in outputs:
        assert same_bits(y, expected)


@pytest.mark.parametrize("count", [1, 3])
def test_experts_are_started_before_the_host_goes_on(pair, monkeypatch, count):
    switch = pair.streamed(6)[1]
    started, start = [], mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *a: (started.extend(a), start(*a))[1])
    y = switch(*tokens(count))
    assert started[-1] is y


def test_bets_are_placed_for_single_tokens_only_while_they_pay(pair, monkeypatch):
    cache, switch = pair.streamed(6)
    asked = []

    def predict(x, top_k):
        asked.append((x, top_k))
        return mx.array([[[4, 5]]])

    switch.bet([(1, predict)], hits_first=True)
    x, ids = tokens(1)
    switch(x, ids)
    assert [k for _, k in asked] == [K]
    assert asked[0][0] is x
    assert sorted(e for i, e in cache._bank_of[1].bets if i == 1) == [4, 5]
    switch(*tokens(2))
    assert len(asked) == 1
    monkeypatch.setattr(SlowReader, "slow", False)
    switch(x, ids)
    assert len(asked) == 1


def test_whoever_traces_or_defers_sees_the_routing(pair):
    cache, switch = pair.streamed(3)
    traced, deferred = [], []
    cache.trace = lambda layer, ids, *_: traced.append((layer, ids.tolist()))
    x, ids = tokens(3)
    switch(x, ids)
    assert traced == [(0, ids.tolist())]
    cache.defer = lambda *args: deferred.append(args) or (x if len(deferred) == 1 else None)
    assert switch(x, ids) is x
    assert deferred[0][:2] == (switch, 0)
    assert all(a is b for a, b in zip(deferred[0][2:], (x, ids, ids, None), strict=True))
    assert same_bits(switch(x, ids), pair.resident[0](x, ids))  # it left it to the switch


def test_what_is_no_expert_is_not_read(pair):
    cache, switch = pair.streamed(3)
    x, _ = tokens(2)
    given, true = mx.array([[[1, 0], [0, 2]]]), mx.array([[[1, E], [E + 3, 2]]])
    switch.expect(true)
    y = switch(x, given)
    expected = pair.resident[0](x, given)
    assert same_bits(y[0, 0, 0], expected[0, 0, 0])
    assert same_bits(y[0, 1, 1], expected[0, 1, 1])
    assert cache.table(0)[0] == -1
    assert cache.stats.misses == 2
    assert cache.stats.layers[0].calls == 1
    assert same_bits(switch(x, given), expected)  # the next call has routing of its own


def test_outputs_are_held_until_they_are_evaluated_and_not_for_ever(pair):
    cache, switch = pair.streamed(3)
    for zero_experts in (False, True):
        x, ids = tokens(1)  # what misses waits for all of them
        for _ in range(3 * SETTLE_EVERY):
            if zero_experts:
                switch.expect(ids)
            y = switch(x, ids)
            assert cache._pending[-1] is y
            assert len(cache._pending) <= SETTLE_EVERY
    cache.settle()
    switch(*tokens(40))  # as large as this, it is evaluated at once
    assert not cache._pending


def test_zero_experts_stand_for_one_that_is_there_anyway(pair):
    cache = pair.streamed(3)[0]
    ids = np.array([[3, 1], [2, 5]])
    assert without_zero_experts(cache, 0, ids) is ids
    assert without_zero_experts(cache, 0, np.array([[9, 3], [6, 2]])).tolist() == [[3, 3], [3, 2]]
    none = np.array([[7, 8]])
    assert without_zero_experts(cache, 0, none).tolist() == [[0, 0]]
    with cache.lock:
        cache.claim(0, [4, 2])
    assert without_zero_experts(cache, 0, none).tolist() == [[2, 2]]
