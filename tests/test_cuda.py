"""Uploads to a CUDA device, with a stand-in for the driver that does everything late."""

import ctypes
import os
import sys
import threading
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

import smoe_mlx
from smoe_mlx.cache.bank import SlotBank
from smoe_mlx.store import cuda
from smoe_mlx.store.cuda import CudaError, Uploader, address, make_uploader
from smoe_mlx.store.cuda import Driver as Driver_
from smoe_mlx.store.layout import TensorSpec

load = sys.modules["smoe_mlx.load"]
PAGE = 4096


class Driver:
    """What an uploader calls. Copies happen when an event behind them is waited for, not before."""

    def __init__(self):
        self.fails: dict[str, int] = {}  # name -> error
        self.streams: dict[int, list] = {}
        self.done: dict[int, int] = {}  # how many copies of a stream
        self.events: dict[int, tuple] = {}  # -> (stream, how many copies are before it)
        self.registered: dict[int, int] = {}
        self.current, self.lock = threading.local(), threading.Lock()
        self.cuMemcpyHtoDAsync_v2 = type(
            "Copy", (), {"__call__": self.queue_copy, "argtypes": ()}
        )()

    def __getattr__(self, name):
        """Each function, failing if it is told to."""
        function = getattr(type(self), f"do_{name}")
        return lambda *args: self.fails.get(name) or function(self, *args) or 0

    def queue_copy(self, to, start, nbytes, stream):
        assert any(
            a <= start and start + nbytes <= a + n for a, n in list(self.registered.items())
        ), "copied from memory that is not pinned"
        self.streams[stream.value].append((to, start, nbytes))
        return self.fails.get("cuMemcpyHtoDAsync_v2", 0)

    def do_cuInit(self, flags):
        assert flags == 0

    def do_cuDeviceGet(self, device, number):
        assert number == 0
        device._obj.value = 5

    def do_cuDevicePrimaryCtxRetain(self, context, device):
        assert device.value == 5
        context._obj.value = 77

    def do_cuCtxSetCurrent(self, context):
        self.current.context = context.value

    def do_cuCtxGetStreamPriorityRange(self, least, greatest):
        assert self.current.context == 77
        least._obj.value, greatest._obj.value = 0, -5

    def do_cuStreamCreateWithPriority(self, stream, flags, priority):
        assert self.current.context == 77, "the thread has no context"
        assert flags == 1
        assert priority.value == -5
        stream._obj.value = 100 + len(self.streams)
        self.streams[stream._obj.value] = []

    def do_cuMemHostRegister_v2(self, start, nbytes, flags):
        assert flags == 0
        assert self.current.context == 77
        assert start.value % PAGE == 0
        assert nbytes % PAGE == 0
        self.registered[start.value] = nbytes

    def do_cuMemHostAlloc(self, start, nbytes, flags):
        assert self.current.context == 77
        assert flags == 3
        self.kept = (ctypes.c_uint8 * nbytes.value)(*[1] * nbytes.value)
        start._obj.value = ctypes.addressof(self.kept)

    def do_cuMemcpyDtoHAsync_v2(self, to, start, nbytes, stream):
        assert any(a <= to.value < a + n for a, n in list(self.registered.items()))
        self.streams[stream.value].append((to.value, start.value, nbytes.value))

    def do_cuMemHostUnregister(self, start):
        del self.registered[start.value]

    def do_cuEventCreate(self, event, flags):
        assert self.current.context == 77, "the thread has no context"
        assert flags == 2
        event._obj.value = 200 + len(self.events)
        self.events[event._obj.value] = (0, 0)

    def do_cuEventRecord(self, event, stream):
        with self.lock:
            self.events[event.value] = (stream.value, len(self.streams[stream.value]))

    def do_cuEventSynchronize(self, event):
        with self.lock:
            stream, before = self.events[event.value]
            for i in range(self.done.get(stream, 0), before):
                ctypes.memmove(*self.streams[stream][i])
            self.done[stream] = max(before, self.done.get(stream, 0))

    def do_cuStreamSynchronize(self, stream):
        for copy in self.streams[stream.value][self.done.get(stream.value, 0) :]:
            ctypes.memmove(*copy)
        self.streams[stream.value].clear()
        self.done[stream.value] = 0

    def do_cuEventDestroy_v2(self, event):
        assert self.current.context == 77
        del self.events[event.value]

    def do_cuStreamDestroy_v2(self, stream):
        assert self.current.context == 77
        del self.streams[stream.value]


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(cuda.ctypes, "PyDLL", lambda name: driver)
    monkeypatch.setattr(cuda, "_where", where)
    return driver


def where(array: mx.array) -> mx.array:
    """In place of the kernel that says it."""
    return mx.array([np.frombuffer(memoryview(array), np.uint8).ctypes.data], mx.uint64)


@pytest.fixture
def gpu(driver, monkeypatch):
    """Models are loaded as on a CUDA device, and computed on the CPU."""
    monkeypatch.setattr(load, "make_uploader", Uploader)
    return driver


def upload(uploader, data: bytes) -> bytes:
    """Send `data` by way of pinned memory, in two pieces that change places."""
    pinned, out = uploader.pinned(len(data)), bytearray(len(data))
    assert len(pinned) == len(data)
    pinned[:] = data
    half = len(data) // 2
    uploader.upload([(half, memoryview(out)[: len(data) - half]), (0, memoryview(out)[-half:])])
    return bytes(out[len(data) - half :] + out[: len(data) - half])


def test_bytes_arrive_by_the_time_an_upload_returns(driver):
    uploader, rng = Uploader(), np.random.default_rng(0)
    for nbytes in (10, PAGE, 3 * PAGE + 1, 20):
        assert upload(uploader, data := rng.bytes(nbytes)) == data
    uploader.close()


def test_pinned_memory_is_kept_as_long_as_it_is_large_enough(driver):
    uploader = Uploader()
    first = address(uploader.pinned(PAGE + 1))
    assert driver.registered == {first: 2 * PAGE}
    assert address(uploader.pinned(2 * PAGE)) == first
    larger = address(uploader.pinned(2 * PAGE + 1))
    assert driver.registered == {larger: 3 * PAGE}  # and the first is let go
    assert len(driver.streams) == 1
    uploader.close()


def test_each_thread_has_its_own_memory_and_event_and_close_frees_them_all(driver):
    uploader, data, got = Uploader(), [bytes([i]) * 100 for i in range(3)], {}

    def run(i):
        got[i] = upload(uploader, data[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [got[i] for i in range(3)] == data
    assert len(driver.events) == len(driver.registered) == 3
    assert len(driver.streams) == 1
    uploader.close()
    assert not driver.streams
    assert not driver.events
    assert not driver.registered
    uploader.close()  # nothing is freed twice


@pytest.mark.parametrize(
    "name", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent",
             "cuCtxGetStreamPriorityRange", "cuStreamCreateWithPriority", "cuEventCreate",
             "cuMemHostRegister_v2", "cuMemcpyHtoDAsync_v2", "cuEventRecord",
             "cuEventSynchronize"],
)  # fmt: skip
def test_what_the_driver_refuses_is_an_error(driver, name):
    driver.fails[name] = 2
    with pytest.raises(CudaError, match="CUDA error 2"):
        upload(Uploader(), b"abcd")


def test_one_failed_copy_among_others_is_an_error_after_all_have_ended(driver):
    uploader, codes = Uploader(), [0, 4, 0]
    pinned, out = uploader.pinned(3), bytearray(3)
    pinned[:] = b"abc"
    queue = uploader._copy
    uploader._copy = lambda *args: queue(*args) or (codes.pop(0) if codes else 0)
    with pytest.raises(CudaError, match="copying to the GPU failed with CUDA error 4"):
        uploader.upload([(i, memoryview(out)[i : i + 1]) for i in range(3)])
    assert not any(driver.streams.values()), "copies are under way into memory that may be freed"
    pinned[:] = b"def"
    uploader.upload([(0, memoryview(out))])  # none the worse for it
    assert out == b"def"
    uploader.close()


def test_an_upload_does_not_wait_for_later_ones_of_other_threads(driver):
    uploader, out = Uploader(), bytearray(2)
    uploader.pinned(1)[:] = b"a"

    def record(event, stream):
        driver.do_cuEventRecord(event, stream)
        start = address(uploader.pinned(1))
        driver.queue_copy(address(memoryview(out)[1:]), start, 1, stream)
        return 0

    driver.cuEventRecord = record
    uploader.upload([(0, memoryview(out)[:1])])
    assert out == b"a\0"
    uploader.close()


def test_contexts_get_queues_enough():
    """Set when the module is imported, for a context that MLX makes later."""
    assert int(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]) >= 32


def test_pinned_memory_for_good_is_zero(driver):
    start = Driver_().pinned_for_good(100)
    assert ctypes.string_at(start, 100) == bytes(100)
    driver.fails["cuMemHostAlloc"] = 2
    with pytest.raises(CudaError, match="cuMemHostAlloc failed with CUDA error 2"):
        Driver_().pinned_for_good(100)


def test_closing_when_the_driver_is_gone_raises_nothing(driver):
    uploader = Uploader()
    uploader.pinned(1)
    driver.fails["cuCtxSetCurrent"] = 4
    uploader.close()


def test_an_uploader_is_made_where_bytes_arrive(driver, monkeypatch):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    assert make_uploader() is None  # the CPU computes
    monkeypatch.setattr(cuda.mx, "default_device", lambda: mx.gpu)
    assert make_uploader() is not None
    for name in ("cuInit", "cuMemHostRegister_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"):
        driver.fails, streams = {name: 100}, set(driver.streams)
        assert make_uploader() is None
        assert set(driver.streams) == streams, "one was left open"
    driver.fails = {}
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    assert make_uploader() is None


def test_an_uploader_that_writes_elsewhere_is_not_used(driver, monkeypatch):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda.mx, "default_device", lambda: mx.gpu)
    elsewhere = mx.zeros((1 << 20,), mx.uint8)
    monkeypatch.setattr(cuda, "_where", lambda array: where(elsewhere))
    assert make_uploader() is None

    def broken(array):
        raise RuntimeError("the kernel does not compile")

    monkeypatch.setattr(cuda, "_where", broken)
    assert make_uploader() is None


def test_what_was_uploaded_can_be_downloaded(driver):
    uploader, array = Uploader(), mx.zeros((100,), mx.uint8)
    mx.eval(array)
    view, data = uploader.view(array), bytes(range(50))
    assert view.nbytes == 100
    uploader.pinned(50)[:] = data
    uploader.upload([(0, view[50:])])
    uploader.pinned(50)[:] = bytes(50)
    assert uploader.download(view[50:]) == data
    assert array.tolist() == [0] * 50 + list(data)
    uploader.close()


# ---- banks in the device's own memory ------------------------------------------------------------


def test_a_bank_of_a_device_is_moved_without_a_look_at_it(driver):
    tensors = [TensorSpec("up_proj", str(i), "U8", (1 << 20,), 1 << 20) for i in range(4)]
    uploader = Uploader()
    bank = SlotBank(tensors, 3, uploader)
    for slot in range(3):
        for i, row in enumerate(bank.rows(slot)):
            uploader.pinned(len(row))[:] = bytes([10 * slot + i]) * len(row)
            uploader.upload([(0, row)])
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    bank._views = [None] * 4
    bank = bank.moved(4, [2, 0])
    assert mx.get_peak_memory() - before < 2 * 4 * (1 << 20), "more than one array twice"
    for to, slot in enumerate([2, 0]):
        for i, row in enumerate(bank.rows(to)):
            assert uploader.download(row) == bytes([10 * slot + i]) * (1 << 20)
            assert bank.arrays["up_proj", str(i)][to, 0].item() == 10 * slot + i
    assert bank.slots == 4
    assert bank.arrays["up_proj", "0"].shape == (4, 1 << 20)
    uploader.close()


def text_of(config: smoe_mlx.StreamingConfig, after: Callable = lambda model: None) -> list[int]:
    model, tokenizer = smoe_mlx.load("demo", config=config)
    out = []
    for n, response in enumerate(smoe_mlx.stream_generate(model, tokenizer, "The", max_tokens=24)):
        out.append(response.token)
        if n == 12:
            after(model)
    model._streaming.cache.check()
    return out


@pytest.mark.parametrize("slots", [0.1, 0.5, 1.0])
def test_text_is_the_same_when_experts_are_uploaded(gpu, slots):
    """With slots that come and go in the midst of it."""
    config = smoe_mlx.StreamingConfig(slots=slots)

    def other(model):
        smoe_mlx.resize(model, slots=0.4)

    def uploaded(model):
        assert model._streaming.cache.reader.uploader is not None
        other(model)

    got = text_of(config, uploaded)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(load, "make_uploader", lambda: None)
        assert text_of(config, other) == got


def test_checksums_are_of_what_the_device_has(gpu, tmp_path, monkeypatch):
    smoe_mlx.shatter(smoe_mlx.hub.find_model("demo"), tmp_path / "vault")
    config, wrong, seen = smoe_mlx.StreamingConfig(slots=0.3, check=True), [], []
    upload, download = Uploader.upload, Uploader.download

    def counted(self, source):
        seen.append(source)
        return download(self, source)

    monkeypatch.setattr(Uploader, "download", counted)
    model, tokenizer = smoe_mlx.load(tmp_path / "vault", config=config)
    assert smoe_mlx.generate(model, tokenizer, "The", max_tokens=10)
    cache = model._streaming.cache
    assert len(seen) == len(cache._checked) * len(cache.layouts[0].tensors)

    def damage(self, pieces):
        upload(self, pieces)
        pieces[-1][1][-1] ^= 1  # which no device would bear, but this one is the CPU
        wrong.append(pieces)

    monkeypatch.setattr(Uploader, "upload", damage)
    model, tokenizer = smoe_mlx.load(tmp_path / "vault", config=config)
    with pytest.raises(smoe_mlx.VaultError, match="is damaged"):
        smoe_mlx.generate(model, tokenizer, "The", max_tokens=10)
    assert wrong


def test_without_a_driver_there_is_no_uploader(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda.ctypes, "CDLL", missing)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda.mx, "default_device", lambda: mx.gpu)
    assert make_uploader() is None
    with pytest.raises(OSError, match="libcuda"):
        Uploader()
