"""Optimistic decode: the bits of the exact way, whatever is missed; nothing is kept of failures."""

import errno
import threading
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import (
    CONFIGS,
    STREAMED,
    random_model,
    random_tokens,
    resident,
    same_bits,
    save_checkpoint,
)
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step as mlx_generate_step
from mlx_lm.models import cache as caches
from mlx_lm.models.cache import make_prompt_cache

import smoe_mlx
from smoe_mlx import StreamingConfig, stats
from smoe_mlx.forward import decode, optimistic, rollback
from smoe_mlx.forward.decode import Chooser
from smoe_mlx.generate import generate_step
from smoe_mlx.layers.switch import StreamingSwitchGLU
from smoe_mlx.load import load_model

DEMO = Path(smoe_mlx.__file__).parent / "demo"
TOKENS = random_tokens(40)
ZERO_EXPERTS = [a for a in STREAMED if a.startswith("longcat")]
OPTIMISTIC = ["lag1", "token"]


def open_model(folder, mode, slots=0.5, **options):
    return load_model(folder, config=StreamingConfig(slots=slots, decode=mode, **options))[0]


def decode_logits(model, n=10, start=5, batch=1):
    """Logits of a few tokens, one by one, behind a short prompt, by the model's own decoding."""
    cache = make_prompt_cache(model)
    yield model(mx.array([TOKENS[:start]] * batch), cache=cache)
    for t in TOKENS[start : start + n]:
        yield step(model, t, cache, batch)


def step(model, token, cache, batch=1):
    tokens = mx.array([[token]] * batch)
    if hasattr(model, "_streaming"):
        y = model._streaming.decoding.step(model, tokens, cache)
    else:
        y = model(tokens, cache=cache)
    mx.eval(y)
    return y


def equal(a, b) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("arch", STREAMED)
def test_every_architecture_gives_mlx_lms_bits(arch, tiny):
    folder = tiny(arch)
    expected = list(decode_logits(resident(folder)))
    for mode in OPTIMISTIC:
        model = open_model(folder, mode, 0.3, debug=True)
        assert equal(decode_logits(model), expected), mode
        s = stats(model)
        if arch in ZERO_EXPERTS:
            assert s.decode_fallback
            assert s.decoded == {**dict.fromkeys(s.decoded, 0), "exact": 10}
        else:
            assert not s.decode_fallback, s.decode_fallback
            assert s.decoded[mode] == 10
            assert s.failed_passes, "nothing was missed: nothing was tried"


@pytest.mark.parametrize("mode", OPTIMISTIC)
@pytest.mark.parametrize("slots", [9, 0.25, 0.75, 511])
def test_the_demo_at_any_number_of_slots(mode, slots):
    model = open_model(DEMO, mode, slots, debug=True)
    assert equal(decode_logits(model, 20), decode_logits(resident(DEMO), 20))
    assert stats(model).decoded[mode] == 20


@pytest.mark.parametrize("mode", OPTIMISTIC)
def test_what_a_failed_pass_saw_is_read_ahead_and_used(mode, slow_disk):
    model = open_model(DEMO, mode, 0.5, lookahead=False, debug=True)
    assert equal(decode_logits(model, 20), decode_logits(resident(DEMO), 20))
    bets = stats(model).bets
    assert bets.used > bets.issued / 2 > 0
    assert bets.used + bets.late + bets.wasted + bets.cancelled <= bets.issued
    failed = stats(model).failed_passes
    model = open_model(DEMO, mode, 0.5, lookahead=False, debug=True)
    model._streaming.decoding.optimistic._take_guesses = lambda: None
    list(decode_logits(model, 20))
    assert stats(model).failed_passes > failed  # without what was seen, more is missing


@pytest.mark.parametrize("mode", OPTIMISTIC)
def test_each_expert_of_a_token_is_counted_once(mode, slow_disk):
    model = open_model(DEMO, mode, 0.5, debug=True)
    assert model._streaming.decoding.optimistic.ready(model)
    cache, before = make_prompt_cache(model), stats(model)
    for t in TOKENS[:20]:
        step(model, t, cache)
    after = stats(model)
    assert after.failed_passes > 20
    assert after.hits + after.misses - before.hits - before.misses == 20 * 8 * 8


@pytest.mark.parametrize("mode", OPTIMISTIC)
def test_the_first_token_may_find_empty_caches(mode, tiny):
    for folder in (DEMO, *map(tiny, ("qwen3_moe", "qwen3_next", "gpt_oss", "llama4"))):
        model, reference = open_model(folder, mode, debug=True), resident(folder)
        a, b = make_prompt_cache(model), make_prompt_cache(reference)
        assert equal([step(model, t, a) for t in TOKENS], [step(reference, t, b) for t in TOKENS])


@pytest.mark.parametrize("mode", OPTIMISTIC)
def test_batches(mode, tiny):
    folder = tiny("qwen3_moe")
    model = open_model(folder, mode, debug=True)
    assert equal(decode_logits(model, batch=3), decode_logits(resident(folder), batch=3))
    assert stats(model).failed_passes


@pytest.mark.parametrize("mode", ["auto", *OPTIMISTIC])
@pytest.mark.parametrize(
    "options", [{}, {"max_kv_size": 16}, {"kv_bits": 8, "kv_group_size": 32}], ids=str
)
def test_generation_gives_mlx_lms_tokens(mode, options, monkeypatch):
    monkeypatch.setattr(decode, "computes_beside_the_host", lambda: True)
    prompt, model = mx.array(TOKENS[:24]), open_model(DEMO, mode, 0.9, debug=True)
    got = [t for t, _ in generate_step(prompt, model, max_tokens=70, **options)]
    reference = mlx_generate_step(prompt, resident(DEMO), max_tokens=70, **options)
    assert got == [int(t) for t, _ in reference]
    decoded = stats(model).decoded
    assert sum(decoded.values()) == 69
    assert (decoded["exact"] > 0) == (mode == "auto")
    assert decoded["lag1"] + decoded["token"] > 0, "nothing else was tried"


def test_on_a_cpu_auto_is_exact(tiny):
    model = open_model(tiny("qwen3_moe"), "auto")
    list(decode_logits(model, 30))
    assert model._streaming.decoding.mode == "exact"


def test_without_taking_the_cache_back_results_would_differ(tiny, monkeypatch):
    """The negative control: it is the rollback that makes a second pass right."""
    folder = tiny("qwen3_moe")
    expected = list(decode_logits(resident(folder)))
    model = open_model(folder, "token")
    model._streaming.decoding.optimistic.ready(model)
    monkeypatch.setattr(optimistic, "restore", lambda cache, state: None)
    assert not equal(decode_logits(model), expected)


@pytest.mark.parametrize("mode", OPTIMISTIC)
def test_a_table_that_changes_under_a_pass_is_a_miss(mode, tiny):
    """Slots that were rewritten between the look-up and the check are never trusted."""
    folder = tiny("qwen3_moe")
    model = open_model(folder, mode, 0.8, debug=True)
    experts = model._streaming.cache
    look_up, moves = experts.lookup, 0

    def look_up_and_move(layer):
        """Right after the look-up, two experts of the layer change places, bytes and all."""
        nonlocal moves
        found = look_up(layer)
        bank = experts._bank_of[layer]
        there = [e for e, slot in enumerate(bank.tables[layer]) if slot >= 0]
        if experts.defer is not None and len(there) > 1:
            mx.eval(found)
            slots = [bank.tables[layer][e] for e in there[:2]]
            for a, b in zip(*(bank.memory.rows(slot) for slot in slots), strict=True):
                a[:], b[:] = bytes(b), bytes(a)
            for e, slot in zip(there[:2], slots[::-1], strict=True):
                bank.place(layer, e, slot)
            moves += 1
        return found

    experts.lookup = look_up_and_move
    assert equal(decode_logits(model), decode_logits(resident(folder)))
    assert moves


class Beside(nn.Module):
    """MoE layers side by side: none depends on what another one computed."""

    class Layer(nn.Module):
        def __init__(self, switch, routing):
            super().__init__()
            self.switch, self._routing = switch, routing

        def __call__(self, x, token):
            return self.switch(x, mx.take(self._routing, token, axis=0)).sum(axis=-2)

    def __init__(self, switches, routing, dims):
        super().__init__()
        self.layers = [self.Layer(s, mx.array(r)) for s, r in zip(switches, routing, strict=True)]
        self._inputs = mx.random.normal((len(routing[0]), dims))

    def __call__(self, tokens, cache):
        x = mx.take(self._inputs, tokens, axis=0)
        return sum(layer(x, tokens) for layer in self.layers)


def test_slots_are_not_rewritten_before_verified_layers_were_computed(tmp_path):
    """Here nothing that follows would have made MLX compute them."""
    config = {**CONFIGS["qwen3_moe"], "num_hidden_layers": 4}
    folder = save_checkpoint(tmp_path / "model", random_model(config), config)
    draw = np.random.default_rng(0)
    routing = [[draw.permutation(8)[:2].tolist() for _ in range(30)] for _ in range(4)]
    outputs = {}
    for slots in (31, 5):
        streamed = open_model(folder, "lag1", slots, lookahead=False)
        switches = [m for _, m in streamed.named_modules() if isinstance(m, StreamingSwitchGLU)]
        switches.sort(key=lambda s: s._layer)
        mx.random.seed(1)
        model = Beside(switches, routing, config["hidden_size"])
        experts = streamed._streaming.cache
        decoder = optimistic.OptimisticDecoder(model, experts)
        decoder._tested = True  # it wants a whole model
        optimistic._swap_layer_classes(model, decoder)
        outputs[slots] = [decoder.step(model, mx.array([[t]]), [], 1) for t in range(30)]
        assert decoder.failed
    assert equal(outputs[31], outputs[5])


@pytest.mark.parametrize("mode", OPTIMISTIC)
def test_a_failed_read_leaves_the_prompt_cache_as_it_was(mode, tiny, monkeypatch):
    folder = tiny("qwen3_moe")
    reference, model = resident(folder), open_model(folder, mode, 0.4, debug=True)
    a, b = make_prompt_cache(reference), make_prompt_cache(model)
    reference(mx.array([TOKENS[:5]]), cache=a)
    model(mx.array([TOKENS[:5]]), cache=b)
    step(model, TOKENS[5], b)
    step(reference, TOKENS[5], a)
    reader, failures = model._streaming.cache.reader, 0
    read_one = reader._read_one

    def fail(read):
        raise OSError(errno.EIO, "broken")

    for t in TOKENS[6:20]:
        reader._read_one = reader._streamer.read_one = fail
        offset = b[0].offset
        try:
            got = step(model, t, b)
        except OSError:
            failures += 1
            assert b[0].offset == offset
            assert model._streaming.cache.defer is None
            reader._read_one = reader._streamer.read_one = read_one
            got = step(model, t, b)
        assert same_bits(got, step(reference, t, a))
    assert failures


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()], ids=repr)
def test_a_self_test_that_was_cut_short_is_made_again(error, tiny, monkeypatch):
    """A model that was not seen to resume right is not decoded as if it had been."""
    folder = tiny("qwen3_moe")
    model, reference = open_model(folder, "token", 0.4, debug=True), resident(folder)
    decoder = model._streaming.decoding.optimistic
    cut_short, real = [], optimistic.restore

    def restore(cache, state):
        if not cut_short:
            cut_short.append(True)
            raise error
        real(cache, state)

    monkeypatch.setattr(optimistic, "restore", restore)
    with pytest.raises(type(error)):
        decoder.ready(model)
    monkeypatch.setattr(optimistic, "alias", lambda value: value + 1)
    assert cut_short
    assert not decoder.ready(model)
    monkeypatch.undo()
    assert equal(decode_logits(model), decode_logits(reference))


def test_a_bet_that_fails_is_no_error_of_a_token_that_does_not_need_it(tiny, slow_disk):
    folder = tiny("qwen3_moe")
    model, reference = open_model(folder, "token", 0.6, debug=True), resident(folder)
    list(decode_logits(model))
    cache = model._streaming.cache
    cache.reader.fail = smoe_mlx.ExpertReadError(errno.EIO, "injected")
    missing = [e for e, slot in enumerate(cache.table(0)) if slot < 0][:1]
    with cache.lock:
        cache.prefetch(0, missing)
        cache.land(0)
        assert not cache._bank_of[0].bets
        with pytest.raises(smoe_mlx.ExpertReadError, match="injected"):
            cache.claim_few(0, missing)
    cache.reader.fail = None
    assert equal(decode_logits(model), decode_logits(reference))


def test_the_plain_call_goes_the_exact_way(tiny):
    folder = tiny("qwen3_moe")
    model, reference = open_model(folder, "token", debug=True), resident(folder)
    cache, other = make_prompt_cache(model), make_prompt_cache(reference)
    for x in (mx.array([TOKENS[:7]]), mx.array([[3]])):
        assert same_bits(model(x, cache=cache), reference(x, cache=other))
    assert stats(model).decoded["token"] == 0


def test_another_thread_waits_for_the_step_and_is_no_part_of_it(tiny):
    folder = tiny("qwen3_moe")
    model, reference = open_model(folder, "token", 0.5, debug=True), resident(folder)
    cache, other = make_prompt_cache(model), make_prompt_cache(reference)
    step(model, TOKENS[0], cache)
    step(reference, TOKENS[0], other)
    switch = next(m for _, m in model.named_modules() if isinstance(m, StreamingSwitchGLU))
    plain = next(m for n, m in reference.named_modules() if n.endswith("switch_mlp"))
    x, ids = mx.random.normal((1, 1, CONFIGS["qwen3_moe"]["hidden_size"])), mx.array([[[5, 1]]])
    mx.eval(x, ids)
    experts, results, threads = model._streaming.cache, [], []
    look_up = experts.lookup

    def work():
        with mx.stream(mx.new_stream(mx.cpu)):
            results.append(switch(x, ids))
            mx.eval(results)

    def look_up_beside(layer):
        if not threads:
            threads.append(threading.Thread(target=work))
            threads[0].start()
            threads[0].join(0.3)  # it waits for the lock by then
        return look_up(layer)

    experts.lookup = look_up_beside
    for t in TOKENS[1:6]:
        assert same_bits(step(model, t, cache), step(reference, t, other))
    threads[0].join()
    assert same_bits(results[0], plain(x, ids))


def test_a_trace_and_the_panel_see_true_routing(tiny):
    folder = tiny("qwen3_moe")
    seen = {}
    for mode in ("exact", "token"):
        model = open_model(folder, mode)
        seen[mode] = []
        model._streaming.cache.trace = lambda layer, ids, *_, to=seen[mode]: to.append(
            (layer, ids.tolist())
        )
        list(decode_logits(model))
    assert seen["exact"] == seen["token"]
    assert stats(model).decoded["token"] == 0
    model = open_model(folder, "token")
    with smoe_mlx.instrument(model) as panel:
        list(generate_step(mx.array(TOKENS[:5]), model, max_tokens=6))
    assert len(panel.tokens) == 5


def test_a_model_that_resists_is_decoded_the_exact_way(tiny, monkeypatch):
    folder = tiny("qwen3_moe")
    model = open_model(folder, "token", debug=True)
    real = optimistic.alias

    # A layer's remembered result that a later write can change, as `h += x` would.
    def wrong(value):
        return value + 1 if isinstance(value, mx.array) else real(value)

    monkeypatch.setattr(optimistic, "alias", wrong)
    assert equal(decode_logits(model), decode_logits(resident(folder)))
    s = stats(model)
    assert s.decode_fallback == "a resumed pass differs from a whole one"
    assert s.decoded["exact"] == 10
    assert "only exact" in str(s)


def test_lossy_decode_is_never_silent_and_is_exact_with_all_in_memory(tiny, capsys):
    tokenizer = smoe_mlx.load("demo", slots=0.5)[1]
    folder = tiny("qwen3_moe")
    expected = list(decode_logits(resident(folder)))
    model = open_model(folder, "lossy", 0.4, debug=True)
    assert not equal(decode_logits(model), expected)
    s = stats(model)
    assert s.dropped > 0
    assert f"LOSSY             {s.dropped:,} experts left out" in str(s)
    from smoe_mlx.cli.generate import one_line

    last = list(smoe_mlx.stream_generate(model, tokenizer, "a", max_tokens=3))[-1]
    assert f"LOSSY ({stats(model).dropped:,} experts left out)" in one_line(last, stats(model))
    smoe_mlx.generate(model, tokenizer, "a", max_tokens=3, verbose=True)
    assert "LOSSY: " in capsys.readouterr().out
    # What a first time through left out is there the second time, where room is.
    layers = model._streaming.cache.layouts
    model = open_model(folder, "lossy", sum(x.num_experts for x in layers) - 1, debug=True)
    for _ in range(4):
        first = list(decode_logits(model))
    before = stats(model).dropped
    assert equal(decode_logits(model), expected)
    assert equal(first, expected)
    assert stats(model).dropped == before


def test_decode_must_be_a_mode():
    with pytest.raises(
        ValueError, match="decode='fast': one of auto, exact, wait, lag1, token, lossy"
    ):
        StreamingConfig(decode="fast")


# ---- rollback ------------------------------------------------------------------------------------


def rows(n, seed):
    draw = np.random.default_rng(seed)
    return tuple(mx.array(draw.normal(size=(2, 2, n, 64)).astype(np.float32)) for _ in range(2))


def kv(make):
    return make, lambda c, n, seed: c.update_and_fetch(*rows(n, seed))


def arrays_write(c, n, seed):
    k, v = rows(n, seed)
    state = c[0] if c[0] is not None else mx.zeros((2, 2, 64))
    c[0] = state * 0.5 + k.sum(axis=2)
    if c[1] is None:
        c[1] = v[:, :, :1]
    c[1] += 1.0
    return c[0], c[1]


def list_write(c, n, seed):
    return c[0].update_and_fetch(*rows(n, seed)), c[1].update_and_fetch(*rows(n, seed + 1))


class Unknown:
    """No class of mlx-lm's: what it has comes with the first write."""

    def write(self, n, seed):
        if not hasattr(self, "total"):
            self.total, self.parts = mx.zeros((1,)), []
        self.total += n + seed
        self.parts.append(self.total * 2)
        return self.total[...], mx.concatenate(self.parts)


CACHES = {
    "unknown": (Unknown, Unknown.write),
    "kv": kv(caches.KVCache),
    "quantised": kv(lambda: caches.QuantizedKVCache(group_size=64, bits=8)),
    "rotating": kv(lambda: caches.RotatingKVCache(max_size=12)),
    "rotating, keep 4": kv(lambda: caches.RotatingKVCache(max_size=12, keep=4)),
    "chunked": kv(lambda: caches.ChunkedKVCache(16)),
    "batch": kv(lambda: caches.BatchKVCache([0, 1])),
    "batch rotating": kv(lambda: caches.BatchRotatingKVCache(12, [0, 1])),
    "arrays": (lambda: caches.ArraysCache(size=2), arrays_write),
    "list": (
        lambda: caches.CacheList(caches.KVCache(), caches.RotatingKVCache(max_size=12)),
        list_write,
    ),
    "concatenate": kv(caches.ConcatenateKVCache),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("prompt", [0, 1, 5, 11, 12, 30, 255, 256])
def test_a_step_taken_back_leaves_no_trace(kind, prompt):
    make, write = CACHES[kind]
    c, straight = make(), make()
    for cache in (c, straight) if prompt else ():
        mx.eval(write(cache, prompt, 0))
    for i in range(1, 20):
        state = rollback.remember(c)
        for wrong in range(2):
            mx.eval(write(c, 1, 1000 * i + wrong))
            rollback.restore(c, state)
        got, expected = write(c, 1, i), write(straight, 1, i)
        mx.eval(got)
        after = rollback.remember(c)  # as a layer does that is not run again
        rollback.restore(c, state)
        rollback.restore(c, after)
        flat_got, flat_expected = tree_flatten(got), tree_flatten(expected)
        assert all(same_bits(a, b) for (_, a), (_, b) in zip(flat_got, flat_expected, strict=True))


def test_taking_back_copies_no_buffer():
    c = caches.KVCache()
    mx.eval(c.update_and_fetch(*rows(200, 0)))
    address = np.frombuffer(memoryview(c.keys), np.uint8).ctypes.data
    for i in range(8):
        state = rollback.remember(c)
        mx.eval(c.update_and_fetch(*rows(1, i)))
        rollback.restore(c, state)
        mx.eval(c.update_and_fetch(*rows(1, i)))
        assert np.frombuffer(memoryview(c.keys), np.uint8).ctypes.data == address


# ---- the choice ----------------------------------------------------------------------------------


def run(chooser, tokens, ms, missed):
    """Feed a chooser; returns the mode of each token."""
    modes = []
    for _ in range(tokens):
        modes.append(chooser.mode)
        chooser.took(ms[chooser.mode], missed)
    return modes


def test_the_fastest_mode_is_taken_after_all_were_tried():
    chooser = Chooser(layers=48)
    modes = run(chooser, 100, {"exact": 3.0, "lag1": 2.0, "token": 2.5}, missed=0)
    assert modes[:32] == ["exact"] * 32
    each = decode.WARM + decode.TRIAL
    assert modes[32 : 32 + 3 * each] == ["exact"] * each + ["lag1"] * each + ["token"] * each
    assert set(modes[32 + 3 * each :]) == {"lag1"}


def test_the_first_tokens_of_a_way_do_not_count():
    chooser, seen = Chooser(layers=48), {"exact": 0, "lag1": 0}
    for _ in range(100):
        mode = chooser.mode
        seen[mode] += 1
        slow = mode == "lag1" and seen[mode] <= decode.WARM
        chooser.took(50.0 if slow else {"exact": 3.0, "lag1": 2.0}[mode], missed_calls=4)
    assert chooser.mode == "lag1"
    assert chooser.seconds == {"exact": 3.0, "lag1": 2.0}


def test_modes_that_the_miss_rate_rules_out_are_not_tried():
    ms = {"exact": 3.0, "lag1": 2.0, "token": 1.0}
    assert set(run(Chooser(48), 200, ms, missed=30)) == {"exact"}
    assert set(run(Chooser(48), 200, ms, missed=4)) == {"exact", "lag1"}


def test_more_misses_lead_back_to_the_exact_way():
    chooser = Chooser(48)
    ms = {"exact": 3.0, "lag1": 2.0, "token": 1.0}
    assert run(chooser, 100, ms, missed=0)[-1] == "token"
    assert run(chooser, 100, ms, missed=40)[-1] == "exact"


def test_modes_are_tried_again_after_a_while():
    chooser = Chooser(48)
    assert run(chooser, 100, {"exact": 1.0, "lag1": 2.0, "token": 2.0}, missed=0)[-1] == "exact"
    assert (
        run(chooser, decode.RETRY + 100, {"exact": 3.0, "lag1": 2.0, "token": 2.5}, 0)[-1] == "lag1"
    )


def test_a_mode_that_becomes_possible_is_tried_at_once():
    chooser = Chooser(48)
    ms = {"exact": 3.0, "lag1": 2.0, "token": 1.0}
    assert set(run(chooser, 120, ms, missed=4)) == {"exact", "lag1"}
    assert "token" in run(chooser, 60, ms, missed=0)


# ---- layers whose experts are all there ----------------------------------------------------------


@pytest.fixture
def nearly_all(tmp_path):
    """Four MoE layers of 8 experts, 31 of them in slots: one is missing, in the last layer."""
    config = {**CONFIGS["qwen3_moe"], "num_hidden_layers": 4}
    folder = save_checkpoint(tmp_path / "model", random_model(config), config)
    model = open_model(folder, "exact", 31, lookahead=False, debug=True)
    cache = model._streaming.cache
    with cache.lock:
        for layer in range(4):
            cache.claim(layer, range(8 - (layer == 3)))
    assert [cache.is_complete(i) for i in range(4)] == [True, True, True, False]
    return model, resident(folder)


def test_the_host_reads_no_routing_of_a_complete_layer_but_counts_it(nearly_all, monkeypatch):
    model, reference = nearly_all
    handover, reads = model._streaming.cache.handover, []
    take = handover.take
    monkeypatch.setattr(handover, "take", lambda posted: (reads.append(0), take(posted))[1])
    cache, other = make_prompt_cache(model), make_prompt_cache(reference)
    before = stats(model)
    assert same_bits(step(model, 3, cache), step(reference, 3, other))
    assert len(reads) == 1  # of the layer that lacks one
    after, experts = stats(model), model._streaming.cache
    assert not experts._unread
    assert [
        x.hits + x.misses - y.hits - y.misses
        for x, y in zip(after.layers, before.layers, strict=True)
    ] == [2] * 4
    assert [x.calls - y.calls for x, y in zip(after.layers, before.layers, strict=True)] == [1] * 4


def test_what_complete_layers_used_counts_as_used(nearly_all):
    """Their experts are read by nobody when they are called, yet eviction must know of them."""
    model, _ = nearly_all
    experts = model._streaming.cache
    switch = next(
        m for _, m in model.named_modules() if isinstance(m, StreamingSwitchGLU) and m._layer == 0
    )
    x = mx.random.normal((1, 1, CONFIGS["qwen3_moe"]["hidden_size"]))
    mx.eval(switch(x, mx.array([[[0, 1]]])))  # the two that would go first
    with experts.lock:
        experts.catch_up()
        experts.claim(3, [7])
    assert experts.table(0)[0] >= 0
    assert experts.table(0)[1] >= 0
    assert experts.table(0)[2] < 0


def test_slots_of_a_complete_layer_are_not_rewritten_before_it_was_computed(nearly_all):
    model, reference = nearly_all
    experts = model._streaming.cache
    switch = next(
        m for _, m in model.named_modules() if isinstance(m, StreamingSwitchGLU) and m._layer == 0
    )
    plain = reference.layers[0].mlp.switch_mlp
    x = mx.random.normal((1, 1, CONFIGS["qwen3_moe"]["hidden_size"]))
    ids = mx.array([[[0, 1]]])
    mx.eval(x, ids)
    y = switch(x, ids)  # not evaluated
    with experts.lock:
        experts.claim(3, [7])  # into the slot of expert 0, the least recently used
    assert experts.table(0)[0] < 0
    assert same_bits(y, plain(x, ids))
