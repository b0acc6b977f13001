"""Waiting decode against a device that is a thread of its own, in real time.

It computes nothing: at each layer it finds slots, or asks and waits, and then reads what lies in
these slots, as a kernel would. Tokens are begun, answered and taken back by the true code.
"""

import ctypes
import queue
import random
import sys
import threading
import time
import types
import zlib

import mlx.core as mx
import numpy as np
import pytest
from test_optimistic import DEMO

from smoe_mlx import StreamingConfig, handover
from smoe_mlx.forward import waiting
from smoe_mlx.handover import LONGEST, PLACES, WORDS, CudaHandover
from smoe_mlx.load import load_model

K = 8


class Device(threading.Thread):
    """Works off what was started, in order. Also the driver."""

    def __init__(self):
        super().__init__(daemon=True)
        self.kept = []
        self.queue = queue.SimpleQueue()
        self.compute = lambda talk, layer, experts, slots: None
        self.asked = self.alone = self.late = 0
        self.patience = 0.5

    def pinned_for_good(self, nbytes):
        self.kept.append((ctypes.c_uint32 * (nbytes // 4))())
        if nbytes == 4 * (PLACES * WORDS + 2):
            self.base = ctypes.addressof(self.kept[-1])
        return ctypes.addressof(self.kept[-1])

    def run(self):
        while (item := self.queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self.layer(*item)

    def layer(self, layer, question, talk, table, experts, guesses):
        """As the kernel `ask`, and those behind it."""
        time.sleep(50e-6)
        words = (ctypes.c_uint32 * WORDS).from_address(self.base + 4 * WORDS * question.place)
        over = (ctypes.c_uint32 * 2).from_address(self.base + 4 * PLACES * WORDS)
        mark = question.tag << 16
        slots = [table._words[1 + e] for e in experts]
        asks, late = min(slots) < 0, False
        for i, slot in enumerate(() if asks else slots):
            words[LONGEST + i] = mark | slot
        for i, number in enumerate([*experts, *guesses, int(asks)]):
            words[i] = mark | number
        start = time.perf_counter()
        while any(words[LONGEST + i] >> 16 != question.tag for i in range(K)) and not late:
            late = over[0] >= talk or over[1] == talk or time.perf_counter() - start > self.patience
            time.sleep(5e-6)
        if late:
            self.late, over[1] = self.late + 1, talk
        else:
            self.asked, self.alone = self.asked + asks, self.alone + (not asks)
            self.compute(talk, layer, experts, [words[LONGEST + i] & 65535 for i in range(K)])
        words[WORDS - 1] = mark | late


@pytest.fixture(scope="module")
def truth():
    """(layer, expert) -> checksum of its bytes."""
    experts, out = load_model(DEMO, config=StreamingConfig(slots=1.0))[0]._streaming.cache, {}
    for layer, layout in enumerate(experts.layouts):
        rows = [np.array(experts.resident(layer)[t.projection, t.kind].view(mx.uint8))
                for t in layout.tensors]  # fmt: skip
        for e in range(layout.num_experts):
            out[layer, e] = crc(row[e].tobytes() for row in rows)
    return out


def crc(parts):
    number = 0
    for part in parts:
        number = zlib.crc32(part, number)
    return number


class Switch:
    """Predicts truly, and computes nothing."""

    def __init__(self, routing, looks_ahead):
        self.routing, self.looks_ahead = routing, looks_ahead

    def predictions(self, x, indices, pays):
        coming = x.item() + 1
        if not self.looks_ahead or coming == len(self.routing):
            return []
        return [(coming, mx.array([self.routing[coming]]))]

    def in_one(self, arrays, x, reply, weights):
        return reply


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("slots", [0.15, 0.5, 0.8])
def test_no_slot_is_rewritten_under_the_device(
    slots, looks_ahead, late, truth, slow_disk, monkeypatch
):
    device, dice = Device(), random.Random(0)
    monkeypatch.setattr(handover, "Driver", lambda: device)
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **_: None)
    monkeypatch.setattr(CudaHandover, "read", lambda self, sent: [flat(x) for x in sent])
    monkeypatch.setattr(CudaHandover, "array", lambda self, values, shape: mx.array([values]))
    hand, built, events = CudaHandover(), [], {}

    def ask(arrays, table, after, talk):
        question = handover._Asked(hand, hand._free.pop(), 0, tuple(a.size for a in arrays))
        question.tag, question.reply = hand._empty(question.place), arrays[0]
        guesses = [e for a in arrays[1:] for e in flat(a)]
        built.append([after.item(), question, talk, table, flat(arrays[0]), guesses])
        return question

    def async_eval(*arrays):
        for item in built:
            device.queue.put(item)
        built.clear()
        device.queue.put(event := threading.Event())
        events.update({id(x): (event, x) for x in arrays})

    def evaluate(arrays):
        for x in arrays:
            if id(x) in events:
                events[id(x)][0].wait()

    hand.ask, hand.can_wait = ask, lambda numbers, after: True
    stand_in = types.SimpleNamespace(
        async_eval=async_eval, eval=evaluate, random=mx.random, array=mx.array
    )
    model = load_model(DEMO, config=StreamingConfig(slots=slots, debug=True, threads=2))[0]
    experts, decoder = model._streaming.cache, model._streaming.decoding.waiting
    for name, value in (("mx", stand_in), ("remember", list), ("FEW_LATE", 10**6),
                        ("restore", lambda c, s: None), ("takes_back_several", bool)):  # fmt: skip
        monkeypatch.setattr(waiting, name, value)
    monkeypatch.setattr(experts, "handover", hand)
    routing = [dice.sample(range(64), K) for _ in experts.layouts]
    switch, kept, wrong = Switch(routing, looks_ahead), set(), set()

    def compute(talk, layer, ids, places):
        for expert, slot in zip(ids, places, strict=True):
            bank = experts._bank_of[layer].memory
            if crc(bank.rows(slot)) != truth[layer, expert]:
                wrong.add(talk)

    def net(token, cache):
        for layer in range(len(routing)):
            if dice.random() < 0.4:
                routing[layer] = dice.sample(range(64), K)
            x, indices = mx.array(layer), mx.array([routing[layer]])
            if experts.defer is None:  # a token that was taken back
                experts.claim_few(layer, routing[layer])
                y = mx.array(layer)
            else:
                decoder._token.after = x
                y = experts.defer(switch, layer, x, indices, indices, None)
        return y

    def redo(model, cache, sample, token, n):
        again.add(token.talk)
        decode_again(model, cache, sample, token, n)

    again, decode_again = set(), decoder._redo
    monkeypatch.setattr(decoder, "_redo", redo)
    device.compute = compute
    finish = experts.finish_few

    def slow():
        if dice.random() < 0.05:
            time.sleep(0.03)
        finish()

    if late:
        device.patience = 0.02
        monkeypatch.setattr(experts, "finish_few", slow)
    device.start()
    before = sys.getswitchinterval()
    try:
        for _ in range(12):
            token = mx.array(0)
            done = decoder.run(net, token, [], lambda n, token, y: (mx.array(n), [y]), 8)
            assert len(done) == 8
            kept.update(d.talk for d in done)
    finally:
        sys.setswitchinterval(before)
        device.queue.put(None)
    device.join(10)
    assert not wrong & (kept - again)  # of what was taken back, nothing was used
    assert device.asked > 50
    assert device.alone > 50 or slots < 0.5
    assert 3 < decoder.late < 90 if late else decoder.late < 3  # of a busy machine
    experts.check()


def flat(array):
    return array.flatten().tolist()
