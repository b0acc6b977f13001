"""Decoding while the device waits for slots: the bits of the exact way, whatever goes wrong.

On a CPU nothing waits: the graph is computed when the host asks for what comes out of it, and the
answer has been put into it by then. The stand-in for CUDA of test_handover.py does the rest.
"""

import functools
import gc
import itertools
import random
import threading
import time
from pathlib import Path

import mlx.core as mx
import pytest
from conftest import STREAMED, interrupt_at_line, random_tokens, resident, same_bits
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from test_handover import Device
from test_optimistic import DEMO, TOKENS, ZERO_EXPERTS, decode_logits, equal, step

import smoe_mlx
from smoe_mlx import StreamingConfig, handover, stats
from smoe_mlx.cache import slots as slots_module
from smoe_mlx.cache.experts import SharedExpertCache
from smoe_mlx.cache.policy import LRU
from smoe_mlx.errors import ExpertReadError
from smoe_mlx.forward import decode, waiting
from smoe_mlx.forward import decode as decode_ways
from smoe_mlx.forward.decode import Chooser
from smoe_mlx.forward.rollback import remember, restore
from smoe_mlx.handover import PLACES, CudaHandover
from smoe_mlx.layers.switch import StreamingSwitchGLU
from smoe_mlx.load import load_model


def open_model(folder, slots=0.3, **options):
    options = {"decode": "wait", "debug": True, **options}
    return load_model(folder, config=StreamingConfig(slots=slots, **options))[0]


def waiting_of(model):
    return model._streaming.decoding.waiting


@pytest.fixture
def device(monkeypatch):
    """A stand-in for CUDA that computes with nothing before it has been answered, and models of
    which use it."""
    device = Device(monkeypatch)
    device.handover = CudaHandover()
    return device


def on_device(model, device):
    model._streaming.cache.handover = device.handover
    return model


def slow_claims(monkeypatch, owner, seconds, share=1.0):
    """Let a share of all claims take so long."""
    dice, claim = random.Random(0), owner.claim_few

    def slow(*args, **kw):
        time.sleep(seconds * (dice.random() < share))
        return claim(*args, **kw)

    monkeypatch.setattr(owner, "claim_few", slow)


def failing(monkeypatch, owner, name, after, error):
    """Let `owner.name` fail after so many calls; returns what mends it."""
    call, left = getattr(owner, name), [after]

    def fails(*args, **kw):
        left[0] -= 1
        if left[0] < 0:
            raise error(5, "a test")
        return call(*args, **kw)

    monkeypatch.setattr(owner, name, fails)
    return lambda: monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("arch", STREAMED)
def test_every_architecture_gives_mlx_lms_bits(arch, tiny):
    folder = tiny(arch)
    model = open_model(folder)
    assert equal(decode_logits(model), decode_logits(resident(folder)))
    s = stats(model)
    way = "exact" if arch in ZERO_EXPERTS else "wait"
    assert s.decoded == {**dict.fromkeys(s.decoded, 0), way: 10}
    assert waiting_of(model).late == 0


@pytest.mark.parametrize("slots", [9, 0.25, 0.75, 511])
@pytest.mark.parametrize("start_every", [1, 3, 100])
def test_the_demo_on_a_device_that_waits(slots, start_every, device, slow_disk, monkeypatch):
    monkeypatch.setattr(waiting, "START_EVERY", start_every)
    model = on_device(open_model(DEMO, slots), device)
    assert equal(decode_logits(model, 12), decode_logits(resident(DEMO), 12))
    assert stats(model).decoded["wait"] == 12
    assert waiting_of(model).late == 0
    assert len(device.handover._free) == PLACES
    if slots in (0.75, 511):  # layers that lacked nothing waited for nobody
        assert device.alone > 12


@pytest.mark.parametrize("lookahead", [False, True])
def test_whatever_goes_while_a_token_is_computed_is_gone_for_the_device(
    lookahead, device, slow_disk, monkeypatch
):
    """With a policy that evicts anything, what the next layers need as well."""
    dice, went, write = random.Random(0), [], handover._PinnedTable.write

    def watched(table, slots):
        gone = [a for a, b in zip(table._slots, slots, strict=True) if a >= 0 and a != b]
        if gone and device.started and not device.waiting:
            went.append(gone)
        write(table, slots)

    monkeypatch.setattr(handover._PinnedTable, "write", watched)

    class Whatever(LRU):
        def victim(self, keep):
            return dice.choice([key for key in self._order if key not in keep])

    model = on_device(open_model(DEMO, 0.6, lookahead=lookahead), device)
    for bank in model._streaming.cache._banks:
        bank.policy = Whatever()
    assert equal(decode_logits(model, 24), decode_logits(resident(DEMO), 24))
    assert waiting_of(model).late == 0
    assert stats(model).evictions > 100
    assert not went, "while the device was running"
    assert device.alone > 12


def test_a_table_that_is_out_of_date_takes_the_token_back(device, monkeypatch):
    """Which cannot be: an expert that went while the device was running."""
    model = on_device(open_model(DEMO, 0.75), device)
    logits, expected = decode_logits(model, 12), list(decode_logits(resident(DEMO), 12))
    assert equal([next(logits) for _ in range(6)], expected[:6])
    assert waiting_of(model).late == 0
    monkeypatch.setattr(waiting_of(model), "_write_tables", lambda: None)
    model._streaming.cache.resize([60])
    model._streaming.cache.resize([384])  # others are in other slots now
    assert equal(logits, expected[6:])
    assert waiting_of(model).late > 0


def test_a_table_is_made_while_others_are_written(device, monkeypatch):
    """One thread builds, another one answers."""
    model = on_device(open_model(DEMO), device)
    list(decode_logits(model, 1))
    decoder, experts, new = waiting_of(model), model._streaming.cache, iter(range(100, 104))

    def places(layer):
        decoder._tables.update({n: decoder._tables[0] for n in itertools.islice(new, 1)})
        return experts._bank_of[0].tables[0]

    monkeypatch.setattr(experts, "places", places)
    decoder._write_tables()
    assert len(decoder._tables) == 8 + 4


def test_batches(device):
    model = on_device(open_model(DEMO), device)
    assert equal(decode_logits(model, 8, batch=3), decode_logits(resident(DEMO), 8, batch=3))
    assert stats(model).decoded["wait"] == 8


def test_each_expert_of_a_token_is_counted_once(slow_disk):
    model = open_model(DEMO, 0.5)
    assert model._streaming.decoding.optimistic.ready(model)
    cache, before = make_prompt_cache(model), stats(model)
    for t in TOKENS[:20]:
        step(model, t, cache)
    after = stats(model)
    assert after.hits + after.misses - before.hits - before.misses == 20 * 8 * 8
    assert after.bets.issued > before.bets.issued


@pytest.mark.parametrize("slots", [0.3, 0.75, 511])
def test_what_a_device_finds_by_itself_is_counted(slots, device, slow_disk, monkeypatch):
    """And is used last for who evicts: as in the exact way. Even if the host is slow."""
    options = {"slots": slots, "lookahead": False}
    model, exact = on_device(open_model(DEMO, **options), device), open_model(DEMO, **options)
    exact._streaming.decoding.mode = "exact"
    slow_claims(monkeypatch, model._streaming.cache, 0.002)
    for m in (model, exact):
        assert m._streaming.decoding.optimistic.ready(m)
        cache = prompted(m)
        for start in range(5, 37, 8):
            run_all(m, cache, TOKENS[start : start + 8])
    assert waiting_of(model).late == 0
    layers = [
        [(x.calls, x.waves, x.hits, x.misses) for x in stats(m).layers] for m in (model, exact)
    ]
    assert layers[0] == layers[1]
    order = [list(m._streaming.cache._banks[0].policy._order) for m in (model, exact)]
    assert order[0] == order[1]


def test_an_answer_that_comes_too_late_takes_the_token_back(device, monkeypatch):
    model = on_device(open_model(DEMO), device)
    expected = list(decode_logits(resident(DEMO), 30))
    slow_claims(monkeypatch, model._streaming.cache, 0.05, 0.2)
    device.patience = 20  # looks
    assert equal(decode_logits(model, 30), expected)
    decoded, late = stats(model).decoded, waiting_of(model).late
    assert late == waiting.FEW_LATE + 1  # then it is given up
    assert decoded["wait"] < 30
    assert decoded["wait"] + decoded["exact"] == 30


def test_a_device_that_does_not_ask_is_waited_for_but_not_for_ever(device, monkeypatch):
    monkeypatch.setattr("smoe_mlx.handover.MOST_HEAR_SECONDS", 0.01)
    model = on_device(open_model(DEMO), device)
    logits = decode_logits(model, 8)
    expected = list(decode_logits(resident(DEMO), 8))
    assert equal([next(logits) for _ in range(4)], expected[:4])
    assert waiting_of(model).late == 0
    device.deaf = True  # from here on
    assert equal(logits, expected[4:])
    assert waiting_of(model).late == 5


def test_a_device_that_cannot_wait_is_not_asked_again(device, monkeypatch):
    monkeypatch.setattr("smoe_mlx.handover.MOST_HEAR_SECONDS", 0.01)
    device.lost, device.patience = True, 200
    model = on_device(open_model(DEMO), device)
    assert equal(decode_logits(model, 6), decode_logits(resident(DEMO), 6))
    decoded = stats(model).decoded
    assert (decoded["wait"], decoded["exact"]) == (1, 5)


def test_fewer_slots_than_a_token_needs(tiny):
    folder = tiny("qwen3_moe")
    model = open_model(folder, 1)
    assert equal(decode_logits(model, 6), decode_logits(resident(folder), 6))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ExpertReadError])
@pytest.mark.parametrize("on_cuda", [False, True])
def test_what_stops_a_token_leaves_the_caches_as_before(error, on_cuda, device, monkeypatch):
    """At any layer: the same token again gives the same bits, and the device waits for nothing."""
    expected = list(decode_logits(resident(DEMO), 12))
    model = open_model(DEMO)
    if on_cuda:
        on_device(model, device)
    cache, experts = make_prompt_cache(model), model._streaming.cache
    model(mx.array([TOKENS[:5]]), cache=cache)
    assert model._streaming.decoding.optimistic.ready(model)
    for n, t in enumerate(TOKENS[5:17]):
        mend = failing(monkeypatch, experts, "claim_few", n % 8, error)
        with pytest.raises(error):
            step(model, t, cache)
        mend()
        assert same_bits(step(model, t, cache), expected[n + 1])
    assert experts.defer is None
    assert stats(model).decoded["wait"] == 24


def test_a_start_that_waits_for_the_device_is_no_reason_to_be_late(device, monkeypatch):
    """As MLX does for memory, the first time: the device must go on meanwhile."""
    model = on_device(open_model(DEMO), device)
    device.patience = 2_000
    logits, expected = decode_logits(model, 8), list(decode_logits(resident(DEMO), 8))
    assert equal([next(logits) for _ in range(3)], expected[:3])
    monkeypatch.setattr(mx, "async_eval", lambda *a: (device.start(), device.finish()))
    assert equal(logits, expected[3:])
    assert stats(model).decoded["wait"] == 8
    assert waiting_of(model).late == 0


def test_ctrl_c_anywhere_in_a_token(device, slow_disk):
    """The caches are as before, or the token is done; nothing answers any more."""
    model, source = on_device(open_model(DEMO, threads=2), device), Path(waiting.__file__)
    device.patience = 2_000
    expected = list(decode_logits(resident(DEMO), 1))
    cache = make_prompt_cache(model)
    assert same_bits(model(mx.array([TOKENS[:5]]), cache=cache), expected[0])
    assert model._streaming.decoding.optimistic.ready(model)
    before, places, n, came = [remember(c) for c in cache], set(), 1, "somewhere"
    while came is not None:
        came = interrupt_at_line(n, lambda: step(model, TOKENS[5], cache), str(source))
        places.add(came)
        if cache[0].offset == 5:  # else it came behind the last layer
            assert same_bits(step(model, TOKENS[5], cache), expected[1]), came
        assert cache[0].offset == 6
        for c, state in zip(cache, before, strict=True):
            restore(c, state)
        model._streaming.cache.check()
        n += 1 + n // 40
    assert len(places) > 30


def test_the_thread_that_answers_ends_with_its_model(device):
    def answering():
        return [t for t in threading.enumerate() if t.name.startswith("smoe-answer")]

    before = set(answering())
    model = on_device(open_model(DEMO), device)
    list(decode_logits(model, 2))
    (ours,) = set(answering()) - before
    del model
    gc.collect()
    ours.join(5)
    assert not ours.is_alive()


def test_a_failed_read_is_an_error_and_the_next_token_is_right(monkeypatch, slow_disk):
    expected = list(decode_logits(resident(DEMO), 10))
    model = open_model(DEMO, lookahead=False)
    cache, experts = make_prompt_cache(model), model._streaming.cache
    model(mx.array([TOKENS[:5]]), cache=cache)
    for n, t in enumerate(TOKENS[5:15]):
        mend = failing(monkeypatch, experts.reader, "finish", n % 4, ExpertReadError)
        with pytest.raises(ExpertReadError):
            step(model, t, cache)
        mend()
        experts.check()
        assert same_bits(step(model, t, cache), expected[n + 1])


def test_slots_come_and_go_between_tokens(device):
    model = on_device(open_model(DEMO), device)
    expected = list(decode_logits(resident(DEMO), 20))
    for n, y in enumerate(decode_logits(model, 20)):
        assert same_bits(y, expected[n])
        model._streaming.cache.resize([300 + 37 * (n % 5)])
    assert waiting_of(model).late == 0


def test_auto_tries_it_where_the_device_waits():
    chooser, modes = Chooser(48, device_waits=True), []
    ms = {"exact": 3.0, "wait": 1.0, "lag1": 2.0, "token": 2.5}
    for _ in range(120):
        modes.append(chooser.mode)
        chooser.took(ms[chooser.mode], 0)
    assert set(modes) == set(ms)
    assert set(modes[-40:]) == {"wait"}
    chooser, modes = Chooser(48, device_waits=True), []
    for _ in range(120):  # with many misses, too
        modes.append(chooser.mode)
        chooser.took(ms[chooser.mode], 40)
    assert set(modes) == {"exact", "wait"}
    assert "wait" not in Chooser(48).seconds


def test_auto_tries_to_do_without_bets(monkeypatch, slow_disk):
    monkeypatch.setattr(decode, "computes_beside_the_host", lambda: True)
    model = open_model(DEMO, 0.4, decode="auto", debug=False)
    cache, reference = make_prompt_cache(model), make_prompt_cache(whole := resident(DEMO))
    decoding, issued = model._streaming.decoding, {}
    for t in random_tokens(120):
        before, way = stats(model).bets.issued, decoding._chooser.way
        y = step(model, t, cache)
        decoding.done()
        issued[way] = issued.get(way, 0) + stats(model).bets.issued - before
        assert same_bits(y, step(whole, t, reference))
    assert issued["exact"] > 0
    assert issued["exact, no bets"] == 0
    assert model._streaming.cache.bets_allowed
    model = open_model(DEMO, 0.4, decode="auto", lookahead=False)
    assert model._streaming.decoding._chooser._always == ["exact"]


def test_ways_without_bets_are_taken_where_they_are_faster():
    chooser, ways = Chooser(48, device_waits=True, looks_ahead=True), []
    ms = {"exact": 3.0, "wait": 2.0, "exact, no bets": 2.5, "wait, no bets": 1.0}
    for _ in range(150):
        ways.append((chooser.way, chooser.mode))
        chooser.took(ms[chooser.way], 40)
    assert {way for way, _ in ways} == set(ms)
    assert set(ways[-40:]) == {("wait, no bets", "wait")}


# ---- tokens begun early --------------------------------------------------------------------------


def run_all(model, cache, tokens, most=8):
    """The logits after each of these tokens, and how many came out of each run."""
    decoding, out, runs = model._streaming.decoding, [], []
    while len(out) < len(tokens):
        left = tokens[len(out) :]

        def forced(n, token, logits, left=left):
            following = left[n + 1] if n + 1 < len(left) else 0
            return mx.array([[following]]) + 0 * mx.argmax(logits[0, -1]), [logits]

        decoding._pace = 0.01
        done = decoding.run(model, mx.array([left[:1]]), cache, forced, min(most, len(left)))
        assert [d.token.item() for d in done] == left[: len(done)]
        out += [d.wanted[0] for d in done] or [step(model, left[0], cache)]
        runs.append(len(done))
    return out, runs


@functools.cache
def expected_logits(n):
    return list(decode_logits(resident(DEMO), n))[1:]


def prompted(model, start=5):
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([TOKENS[:start]]), cache=cache))
    return cache


@pytest.mark.parametrize(
    ("slots", "start_every"), [(9, 1), (9, 3), (0.25, 3), (0.25, 100), (0.75, 3), (511, 3)]
)
def test_a_token_is_begun_while_one_is_computed(slots, start_every, device, slow_disk, monkeypatch):
    monkeypatch.setattr(waiting, "START_EVERY", start_every)
    model = on_device(open_model(DEMO, slots), device)
    at_once, finish = [], device.finish

    def watched():
        at_once.append(len({tag[1] for _, tag, _, _ in device.asked}))
        finish()

    monkeypatch.setattr(device, "finish", watched)
    out, runs = run_all(model, prompted(model), TOKENS[5:27])
    assert equal(out, expected_logits(22))
    assert runs == [8, 8, 6]
    assert stats(model).decoded["wait"] == waiting_of(model)._tokens == 22
    assert waiting_of(model).late == 0
    assert len(device.handover._free) == PLACES
    assert max(at_once) == 2


def test_no_layer_asks_before_the_one_before_is_computed(device, monkeypatch):
    """Nor the first one of a token, even if what it is does not depend on the one before."""
    model, asked, out = on_device(open_model(DEMO), device), [], []
    assert model._streaming.decoding.optimistic.ready(model)
    cache, ask, in_one = prompted(model), device.handover.ask, StreamingSwitchGLU.in_one

    def watched(arrays, table, after, talk):
        asked.append(after)
        return ask(arrays, table, after, talk)

    def kept(*args):
        out.append(in_one(*args))
        return out[-1]

    def forced(n, token, logits):
        return mx.array([[TOKENS[6 + n]]]), [logits]

    monkeypatch.setattr(StreamingSwitchGLU, "in_one", kept)
    monkeypatch.setattr(device.handover, "ask", watched)
    assert len(waiting_of(model).run(model, mx.array([TOKENS[5:6]]), cache, forced, 4)) == 4
    asked = asked[-32:]  # the first call tries whether the device can wait
    assert len(out) == 32
    assert all(after is before for after, before in zip(asked[1:], out, strict=False))


def test_late_answers_take_back_what_was_begun_behind(device, monkeypatch):
    model = on_device(open_model(DEMO), device)
    monkeypatch.setattr(waiting, "FEW_LATE", 1000)
    slow_claims(monkeypatch, model._streaming.cache, 0.05, 0.05)
    device.patience = 20  # looks
    out, runs = run_all(model, prompted(model), TOKENS[5:37])
    assert equal(out, expected_logits(32))
    assert runs == [8] * 4
    assert waiting_of(model).late > 4
    gc.collect()  # errors hold what they went through
    assert len(device.handover._free) + len(device.handover.dropped) == PLACES


def test_a_device_that_never_answers_in_time(device, monkeypatch):
    """Runs end when this way is given up."""
    model = on_device(open_model(DEMO), device)
    cache, expected = prompted(model), expected_logits(32)
    out, runs = run_all(model, cache, TOKENS[5:7])
    assert runs == [2]
    monkeypatch.setattr("smoe_mlx.handover.MOST_HEAR_SECONDS", 0.01)
    device.deaf = True
    some, runs = run_all(model, cache, TOKENS[7:37])
    assert equal(out + some, expected)
    assert runs[:3] == [8, 8, 8]
    assert not any(runs[3:])
    assert waiting_of(model).late == 24


@pytest.mark.parametrize("error", [KeyboardInterrupt, ExpertReadError])
@pytest.mark.parametrize("on_cuda", [False, True])
def test_what_stops_a_run(error, on_cuda, device, monkeypatch):
    """At any layer of any of its tokens: what came before an error is kept, an interrupt takes all
    back; and what follows is right."""
    expected, model = expected_logits(12), open_model(DEMO)
    if on_cuda:
        on_device(model, device)
    experts, decoder = model._streaming.cache, waiting_of(model)
    assert model._streaming.decoding.optimistic.ready(model)
    cache = prompted(model)
    before = [remember(c) for c in cache]

    def forced(n, token, logits):
        return mx.array([[TOKENS[6 + n]]]), [logits]

    for n in range(0, 32, 3):
        mend, done = failing(monkeypatch, experts, "claim_few", n, error), []
        if n < 8 or error is KeyboardInterrupt:
            with pytest.raises(error):
                decoder.run(model, mx.array([TOKENS[5:6]]), cache, forced, 4)
        else:
            done = decoder.run(model, mx.array([TOKENS[5:6]]), cache, forced, 4)
            assert len(done) == n // 8
        assert cache[0].offset == 5 + len(done)
        assert equal([d.wanted[0] for d in done], expected[: len(done)])
        mend()
        experts.check()
        out, _ = run_all(model, cache, TOKENS[5 + len(done) : 12])
        assert equal(out, expected[len(done) : 7])
        for c, state in zip(cache, before, strict=True):
            restore(c, state)
    assert experts.defer is None


def test_ctrl_c_anywhere_in_a_run(device, slow_disk):
    model, source = on_device(open_model(DEMO, threads=2), device), Path(waiting.__file__)
    device.patience = 2_000
    expected, cache = expected_logits(3), prompted(model)
    assert model._streaming.decoding.optimistic.ready(model)
    before, places, n, came = [remember(c) for c in cache], set(), 1, "somewhere"
    while came is not None:
        came = interrupt_at_line(n, lambda: run_all(model, cache, TOKENS[5:8]), str(source))
        places.add(came)
        done = cache[0].offset - 5
        assert done == 0 or came is None
        out, _ = run_all(model, cache, TOKENS[5 + done : 8])
        assert equal(out, expected[done:]), came
        for c, state in zip(cache, before, strict=True):
            restore(c, state)
        model._streaming.cache.check()
        n += 1 + n // 12
    assert len(places) > 30


def test_each_token_of_a_run_can_be_taken_back(device):
    model, expected = on_device(open_model(DEMO), device), expected_logits(8)
    decoder, cache = waiting_of(model), prompted(model)
    assert model._streaming.decoding.optimistic.ready(model)

    def drawn(n, token, logits):
        return mx.array([[TOKENS[6 + n]]]), [logits, mx.random.uniform(shape=(3,))]

    for back in range(4):
        mx.random.seed(back)
        done = decoder.run(model, mx.array([TOKENS[5:6]]), cache, drawn, 4)
        draws = [d.wanted[1].tolist() for d in done]
        done[back].take_back()
        assert cache[0].offset == 5 + back
        assert mx.random.uniform(shape=(3,)).tolist() == draws[back]
        out, _ = run_all(model, cache, TOKENS[5 + back : 13])
        assert equal(out, expected[back:])
        cache = prompted(model)


def test_a_cache_that_rotates_is_run_token_by_token(device, monkeypatch):
    """Of two tokens, only the last could be taken back."""
    model, whole = on_device(open_model(DEMO), device), resident(DEMO)
    monkeypatch.setattr(waiting, "FEW_LATE", 1000)
    caches = [make_prompt_cache(m, max_kv_size=8) for m in (model, whole)]
    for m, c in zip((model, whole), caches, strict=True):
        mx.eval(m(mx.array([TOKENS[:5]]), cache=c))
    dice, in_time = random.Random(0), device.handover.in_time
    monkeypatch.setattr(device.handover, "in_time", lambda q: in_time(q) and dice.random() < 0.97)
    out, runs = run_all(model, caches[0], TOKENS[5:35])
    assert equal(out, [step(whole, t, caches[1]) for t in TOKENS[5:35]])
    assert runs == [1] * 29 + [0]
    assert waiting_of(model).late > 3


def test_nothing_runs_where_nothing_waits(slow_disk):
    model = open_model(DEMO)
    out, runs = run_all(model, prompted(model), TOKENS[5:13])
    assert equal(out, expected_logits(8))
    assert runs == [0] * 8
    assert stats(model).decoded["wait"] == 8


def test_a_sampler_may_look_at_what_it_gets(device):
    model, expected = on_device(open_model(DEMO), device), expected_logits(6)
    assert model._streaming.decoding.optimistic.ready(model)

    def looks(n, token, logits):
        mx.async_eval(logits)
        mx.eval(logits)
        assert same_bits(logits, expected[n])
        return mx.array([[TOKENS[6 + n]]]), [logits]

    done = waiting_of(model).run(model, mx.array([TOKENS[5:6]]), prompted(model), looks, 6)
    assert len(done) == 6
    assert waiting_of(model).late == 0


def by_all_of_it(tokens, logits):
    """A logits processor that no token is lost on."""
    return logits * (1 + mx.sin(mx.arange(logits.shape[-1]) + mx.sum(tokens)) / 2)


TEXTS = {
    "greedy": {},
    "sampled": {"sampler": make_sampler(0.8, top_p=0.9)},
    "processors": {"sampler": make_sampler(0.8),
                   "logits_processors": [*make_logits_processors({5: 2.0}, 1.3), by_all_of_it]},
    "rotating": {"max_kv_size": 16},
    "quantised": {"kv_bits": 2, "quantized_kv_start": 12},
}  # fmt: skip


@pytest.fixture
def device_for_all(device, monkeypatch):
    """Models that are loaded use it."""
    monkeypatch.setattr(waiting, "FEW_LATE", 1000)
    monkeypatch.setattr(handover, "make_handover", lambda: device.handover)
    monkeypatch.setattr(slots_module, "make_handover", lambda: device.handover)
    monkeypatch.setattr(decode_ways, "computes_beside_the_host", lambda: True)
    monkeypatch.setattr(decode_ways, "WINDOW", 8)
    return device


def text(options, decode):
    """(43 tokens, how many the cache then holds, the next random number, model)"""
    model, tokenizer = smoe_mlx.load("demo", config=StreamingConfig(slots=0.4, decode=decode))
    mx.random.seed(7)
    cache = make_prompt_cache(model, options.get("max_kv_size"))
    made = smoe_mlx.stream_generate(
        model, tokenizer, "Once", max_tokens=60, prompt_cache=cache, **options
    )
    tokens = [r.token for r in itertools.islice(made, 43)]
    made.close()  # in the midst of a run
    return tokens, cache[0].offset, mx.random.uniform().item(), model


@pytest.mark.parametrize(
    ("decode", "late", "name"),
    [("auto", False, "greedy"), ("wait", True, "processors"), ("wait", True, "rotating")]
    + [("wait", False, name) for name in TEXTS],
)
def test_text_is_the_same_with_tokens_begun_early(decode, late, name, device_for_all, monkeypatch):
    if late:
        slow_claims(monkeypatch, SharedExpertCache, 0.05, 0.03)
        device_for_all.patience = 20
    *expected, _ = text(TEXTS[name], "exact")
    *got, model = text(TEXTS[name], decode)
    assert got == expected
    assert stats(model).decoded["wait"] > 10
    assert waiting_of(model).late > 2 if late else waiting_of(model).late == 0


def test_text_is_the_same_after_an_error_in_a_later_token_of_a_run(device_for_all, monkeypatch):
    """It is met again, or not: what had been begun has left nothing behind."""
    decoder, talks, failed = waiting.WaitingDecoder, set(), []
    run, answer = decoder.run, decoder._answer

    def begun(*args):
        talks.clear()
        return run(*args)

    def fails(self, token, call):
        talks.add(token.talk)
        if len(talks) == 3 and len(failed) < 3:
            failed.append(token.talk)
            raise ExpertReadError(5, "a test")
        answer(self, token, call)

    *expected, _ = text(TEXTS["processors"], "exact")
    monkeypatch.setattr(decoder, "run", begun)
    monkeypatch.setattr(decoder, "_answer", fails)
    *got, model = text(TEXTS["processors"], "wait")
    assert got == expected
    assert len(failed) == 3
    assert waiting_of(model).late == 0


def test_runs_are_as_long_as_they_may_take(device, monkeypatch):
    decoding = on_device(open_model(DEMO), device)._streaming.decoding
    monkeypatch.setattr(decoding, "_way", lambda model, mode: mode)
    asked = []

    def run(model, token, cache, sample, count):
        asked.append(count)
        return [None] * count

    monkeypatch.setattr(decoding.waiting, "run", run)

    def runs(pace, count=100):
        decoding._pace = pace
        done = decoding.run(None, None, None, None, count)
        return len(done)

    assert [runs(x) for x in (1e-3, 0.013, 0.03, 0.05, 0.051, 1.0)] == [8, 7, 3, 2, 0, 0]
    assert runs(1e-3, 3) == 3
    assert runs(1e-3, 1) == 0
    decoding._pace = 0.2
    for _ in range(20):  # a run is tried again when tokens were slow
        decoding.run(None, None, None, None, 8)
    assert decoding._pace < 0.05
    for count in (1, 8):
        for _ in range(20_000):  # as many tokens as one likes
            decoding.run(None, None, None, None, count)
    decoding.mode = "exact"
    for _ in range(20_000):
        assert not decoding.run(None, None, None, None, 8)


def test_no_run_outlasts_a_choice():
    chooser = Chooser(48, device_waits=True)
    lengths = []
    for _ in range(30):
        lengths.append(chooser.left)
        before = chooser.way
        for _ in range(chooser.left - 1):
            chooser.took(1.0, 40.5)
            assert chooser.way == before
        chooser.took(1.0, 40.5)
    assert set(lengths) == {decode.WINDOW, decode.TRIAL, decode.WARM}


def test_a_run_keeps_to_the_choice(device, monkeypatch):
    decoding = on_device(open_model(DEMO), device)._streaming.decoding
    monkeypatch.setattr(decoding, "_way", lambda model, mode: mode)
    experts, asked = decoding._experts, []

    def run(model, token, cache, sample, count):
        asked.append((count, experts.bets_allowed))
        return [None] * count

    monkeypatch.setattr(decoding.waiting, "run", run)
    chooser = decoding._chooser = Chooser(8, device_waits=True, looks_ahead=True)
    decoding.mode, decoding._pace = "auto", 0.001
    for way in ("wait", "wait, no bets"):
        chooser.way, chooser._plan, chooser._taken = way, [(way, 5), ("exact", 8)], [1.0, 1.0]
        assert len(decoding.run(None, None, None, None, 100)) == 3
        assert chooser.way == "exact"
        assert not decoding.run(None, None, None, None, 100)
        decoding._pace = 0.001
    assert asked == [(3, True), (3, False)]
    assert experts.bets_allowed
    assert decoding.tokens["wait"] == 6
