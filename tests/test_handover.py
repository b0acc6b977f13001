"""Routing to the host and slot numbers back, by MLX's own ways and by pinned memory, with a
stand-in for CUDA whose kernels write late and in any order."""

import ctypes
import random
import threading
import time

import mlx.core as mx
import pytest

import smoe_mlx
from smoe_mlx import handover
from smoe_mlx.handover import LONGEST, PLACES, WORDS, CudaHandover, Handover, make_handover


class Device:
    """mx.fast.cuda_kernel, mx.compile and the driver, as far as a handover uses them.

    Questions that have been started are worked off one after the other, a step at a time, whenever
    this thread looks for numbers or evaluates something.
    """

    def __init__(self, monkeypatch):
        self.memory = (ctypes.c_uint32 * (PLACES * WORDS + 2))()
        self.delay, self.lost, self.writers = 0.0, False, []
        self.asked, self.deaf, self.steps, self.patience = [], False, 0, 20_000
        self.thread, self.started = threading.get_ident(), 0
        self.tables, self.alone, self.waiting = [], 0, False
        self.dice = random.Random(0)
        monkeypatch.setattr(handover, "Driver", lambda: self)
        monkeypatch.setattr(handover.mx.fast, "cuda_kernel", self.cuda_kernel)
        monkeypatch.setattr(handover.mx, "compile", lambda function: function)
        evaluate = self.evaluate = mx.eval
        monkeypatch.setattr(handover.mx, "eval", lambda *a: (self.finish(), evaluate(*a))[1])
        monkeypatch.setattr(handover.mx, "async_eval", lambda *a: self.start())
        look = CudaHandover._look
        monkeypatch.setattr(CudaHandover, "_look", lambda *a: (self.step(), look(*a))[1])

    def pinned_for_good(self, nbytes):
        memory = self.memory
        if nbytes != ctypes.sizeof(memory):  # a table
            memory = (ctypes.c_int32 * (nbytes // 4))()
            self.tables.append(memory)
        return ctypes.addressof(memory)

    def cuda_kernel(self, name, input_names, output_names, source):
        def join(inputs, output_shapes, **_):
            assert all(part.nbytes <= 8 for part in inputs), "not where both sides reach it"
            assert len(inputs) == len(input_names)
            numbers = [n for part in inputs for n in part.tolist()]
            return [mx.array(numbers, mx.uint32).reshape(output_shapes[0])]

        def post(inputs, template, **_):
            numbers, place, tag = inputs
            flat = numbers.flatten().tolist()
            assert dict(template) == {"N": len(flat)}
            words = (ctypes.c_uint32 * len(flat)).from_address(place.item())
            thread = threading.Thread(target=self.write, args=(words, flat, tag.item()))
            thread.start()
            self.writers.append(thread)
            return [tag.reshape(1)]

        def ask(inputs, grid, threadgroup, output_shapes, **_):
            place, ended, table, tag, _after, numbers, guesses = inputs
            reply = mx.zeros(output_shapes[0], mx.uint32)
            self.evaluate(reply)
            assert grid == threadgroup == (LONGEST, 1, 1)
            arrays = numbers, guesses, table.item()
            self.asked.append((place.item(), tag.tolist(), arrays, reply))
            assert ended.item() == ctypes.addressof(self.memory) + 4 * PLACES * WORDS
            return [reply]

        return {"join": join, "post": post, "ask": ask}[name.split("_")[1]]

    def start(self):
        self.started = len(self.asked)

    def step(self):
        """Go on with the first question."""
        if not self.started or self.deaf or threading.get_ident() != self.thread:
            return
        place, (tag, talk), (numbers, guesses, table), reply = self.asked[0]
        mark = tag >> 16 << 16
        words = (ctypes.c_uint32 * WORDS).from_address(place)
        answer = words[LONGEST : LONGEST + reply.size]
        over, late = self.memory[PLACES * WORDS :]
        self.steps += 1
        if self.steps == 1:
            flat = numbers.flatten().tolist()[: tag & 255]
            experts = ctypes.c_int32.from_address(table).value
            slots = (ctypes.c_int32 * experts).from_address(table + 4)
            found = [slots[n] if n < experts else -1 for n in flat]
            asks = min(found) < 0
            for i, slot in enumerate(() if asks else found):
                words[LONGEST + i] = mark | slot
            self.alone += not asks
            self.waiting = asks
            flat += guesses.flatten().tolist()[: tag >> 8 & 255]
            self.write(words, [*flat, int(asks)], mark)
        if all(w >> 16 == tag >> 16 for w in answer):
            Handover().fill(reply, [w & 65535 for w in answer])
            words[WORDS - 1] = mark
        elif over >= talk or late == talk or self.steps == self.patience:
            self.memory[PLACES * WORDS + 1], words[WORDS - 1] = talk, mark | 1
        else:
            return
        self.asked.pop(0)
        self.waiting = False
        self.started -= 1
        self.steps = 0

    def write(self, words, numbers, tag):
        order = list(range(len(numbers)))
        self.dice.shuffle(order)
        for i in order[: len(order) // 2 if self.lost else None]:
            time.sleep(self.delay)
            if numbers[i] < 65536:  # as the kernel
                words[i] = tag | numbers[i]

    def finish(self):
        for thread in self.writers:
            thread.join()
        while self.started and not self.deaf:
            self.step()
            time.sleep(0.0001)


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


ARRAYS = [[3], [0, 65535, 7], [5, 4, 3, 2, 1, 0, 9, 8], list(range(LONGEST))]


@pytest.mark.parametrize("dtype", [mx.uint32, mx.int32, mx.int64])
def test_numbers_arrive_whatever_the_order_in_which_they_are_written(device, dtype):
    cuda = CudaHandover()
    for delay in (0.0, 0.0002, 0.002):  # the last: longer than the host looks without sleeping
        device.delay = delay
        assert cuda.read([mx.array([numbers], dtype) for numbers in ARRAYS]) == ARRAYS
    assert len(cuda._free) == PLACES


def test_what_a_place_held_before_is_never_taken_for_an_answer(device):
    cuda = CudaHandover()
    while len(cuda._free) > 1:  # one place for all
        cuda._free.pop()
    device.delay = 0.0005
    for i in range(20):
        numbers = [i] * 8
        assert cuda.read([mx.array(numbers)]) == [numbers]


def test_tags_that_come_again_find_nothing_of_their_earlier_uses(device):
    """After 65,535 uses of a place, most of them shorter, or without an answer."""
    cuda, one = CudaHandover(), mx.zeros((1,))
    table = cuda.table(5)
    for way in ("post", "ask"):
        for last in (0, 65534):
            place = cuda._free[-1]
            cuda._tags[place] = last
            long, short = mx.array([1, 2, 3, 4]), mx.array([9])
            if way == "post":
                assert cuda.read([long]) == [[1, 2, 3, 4]]
                assert cuda._free[-1] == place
                assert cuda.read([short]) == [[9]]
            else:
                question = cuda.ask([long], table, one, cuda.begin())
                mx.async_eval(question.reply)
                assert cuda.hear(question) == ([[1, 2, 3, 4]], None)
                cuda.answer(question, [5, 6, 7, 8])
                mx.eval(question.reply)
                assert question.reply.tolist() == [5, 6, 7, 8]
                assert cuda.in_time(question)
            cuda._tags[place] = last  # as many uses later
            words = device.memory[place * WORDS : (place + 1) * WORDS]
            assert any(words)
            device.delay, device.deaf = 0.2, True  # nothing new comes
            if way == "post":
                posted = cuda._begin(long)
                assert posted.place == place
                assert cuda._look(place, posted.tag, 4) is None
                device.finish()
                assert cuda.take(posted) == [1, 2, 3, 4]
            else:
                question = cuda.ask([long], table, one, cuda.begin())
                assert question.place == place
                assert not any(device.memory[place * WORDS : (place + 1) * WORDS])
                device.asked.clear()
                device.memory[(place + 1) * WORDS - 1] = question.tag << 16
                assert cuda.in_time(question)
            device.delay, device.deaf = 0.0, False


def test_posted_arrays_are_taken_in_any_order(device):
    cuda = CudaHandover()
    posted = cuda.post([mx.array([[i, i + 1]]) for i in range(5)])
    assert [cuda.take(posted[i]) for i in (4, 0, 2, 1, 3)] == [[i, i + 1] for i in (4, 0, 2, 1, 3)]


def test_more_arrays_than_places_and_longer_ones_go_mlx_s_own_way(device):
    cuda = CudaHandover()
    posted = cuda.post([mx.array([i]) for i in range(PLACES + 3)])
    assert [cuda.take(p) for p in posted] == [[i] for i in range(PLACES + 3)]
    long = list(range(LONGEST + 1))
    assert cuda.read([mx.array([long])]) == [long]
    assert cuda.array([65536, 1], (2,)).tolist() == [65536, 1]
    assert cuda.array(long, (5, 13)).tolist() == mx.array(long).reshape(5, 13).tolist()


def test_a_place_whose_numbers_were_not_seen_is_not_used_again(device):
    cuda = CudaHandover()
    device.lost = True
    assert cuda.read([mx.array([[1, 2, 3, 4]])]) == [[1, 2, 3, 4]]  # by MLX's own way
    device.lost = False
    assert len(cuda._free) == PLACES - 1
    for i in range(2 * PLACES):
        assert cuda.read([mx.array([[5, i]])]) == [[5, i]]
    assert len(cuda._free) == PLACES - 1


def test_places_that_nobody_took_from_are_used_again_when_they_have_been_written(device):
    cuda = CudaHandover()
    device.delay = 0.2
    cuda.post([mx.array([i, i]) for i in range(PLACES)])  # and an error came
    assert not cuda._free
    assert cuda.read([mx.array([1, 2])]) == [[1, 2]]  # by MLX's own way
    assert not cuda._free
    device.finish()
    device.delay = 0.0
    assert cuda.read([mx.array([3, 4])]) == [[3, 4]]
    assert len(cuda._free) == PLACES


def test_a_number_that_has_no_room_goes_mlx_s_own_way(device):
    cuda = CudaHandover()
    for number in (65536, 65536 * 3 + 5, 2**31):
        for _ in range(3):  # whatever bits the tag has
            assert cuda.read([mx.array([1, number], mx.uint32)]) == [[1, number]]


def test_a_device_whose_numbers_do_not_arrive_is_not_used(device, monkeypatch):
    device.lost = True
    monkeypatch.setattr(handover.mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(handover.mx.cuda, "is_available", lambda: True)
    handover._cuda_handover.cache_clear()
    assert type(make_handover()) is Handover
    device.lost = False
    handover._cuda_handover.cache_clear()
    assert type(make_handover()) is CudaHandover
    handover._cuda_handover.cache_clear()


def test_the_cpu_has_mlx_s_own_way():
    assert type(make_handover()) is Handover


@pytest.mark.parametrize("shape", [(1,), (8,), (1, 1, 8), (2, 4), (1, 13), (3, 1, 2)])
def test_slot_numbers_have_the_shape_of_the_routing(device, shape):
    numbers = [7 * i for i in range(mx.zeros(shape).size)]
    for way in (Handover(), CudaHandover()):
        array = way.array(numbers, shape)
        assert (array.shape, array.flatten().tolist()) == (shape, numbers)
        assert array.dtype in (mx.uint16, mx.uint32)


@pytest.mark.parametrize("decode", ["exact", "wait", "lag1"])
def test_a_model_decodes_the_same_tokens_by_either_way(device, decode):
    texts = []
    for way in (Handover(), CudaHandover()):
        config = smoe_mlx.StreamingConfig(slots=0.25, decode=decode)
        model, tokenizer = smoe_mlx.load("demo", config=config)
        model._streaming.cache.handover = way
        texts.append(smoe_mlx.generate(model, tokenizer, "def main():", max_tokens=12))
        if isinstance(way, CudaHandover):
            assert max(way._tags) > 1, "nothing went by pinned memory"
    device.finish()
    assert texts[0] == texts[1]
