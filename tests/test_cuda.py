"""Uploads to a CUDA device, with a stand-in for the driver that does everything late."""

import ctypes
import os
import threading

import mlx.core as mx
import numpy as np
import pytest

from smoe_mlx.store import cuda
from smoe_mlx.store.cuda import CudaError, Uploader, address, make_uploader
from smoe_mlx.store.cuda import Driver as Driver_

PAGE = 4096


class Driver:
    """What an uploader calls. Copies happen when an event behind them is waited for, not before."""

    def __init__(self, managed: int = 1):
        self.managed = managed
        self.fails: dict[str, int] = {}  # name -> error
        self.streams: dict[int, list] = {}
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
        assert any(a <= start and start + nbytes <= a + n for a, n in self.registered.items()), (
            "copied from memory that is not pinned"
        )
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

    def do_cuPointerGetAttribute(self, out, attribute, where):
        assert attribute == 8
        assert where.value
        out._obj.value = self.managed

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
            for i in range(before):
                to, start, nbytes = self.streams[stream][i]
                ctypes.memmove(to, start, nbytes)
                self.streams[stream][i] = (to, start, 0)

    def do_cuStreamSynchronize(self, stream):
        for to, start, nbytes in self.streams[stream.value]:
            ctypes.memmove(to, start, nbytes)
        self.streams[stream.value].clear()

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


def test_an_uploader_is_made_where_arrays_are_in_managed_memory(driver, monkeypatch):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    assert make_uploader() is None  # the CPU computes
    monkeypatch.setattr(cuda.mx, "default_device", lambda: mx.gpu)
    assert make_uploader() is not None
    driver.managed = 0
    assert make_uploader() is None
    driver.managed, driver.fails = 1, {"cuPointerGetAttribute": 1}
    assert make_uploader() is None
    driver.fails = {"cuInit": 100}
    assert make_uploader() is None
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    driver.fails = {}
    assert make_uploader() is None


def test_without_a_driver_there_is_no_uploader(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda.ctypes, "CDLL", missing)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda.mx, "default_device", lambda: mx.gpu)
    assert make_uploader() is None
    with pytest.raises(OSError, match="libcuda"):
        Uploader()
