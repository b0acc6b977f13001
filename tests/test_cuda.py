"""Uploads to a CUDA device, with a stand-in for the driver that does everything late."""

import ctypes
import threading

import mlx.core as mx
import numpy as np
import pytest

from smoe_mlx.store import cuda
from smoe_mlx.store.cuda import CudaError, Uploader, address, make_uploader
from smoe_mlx.store.cuda import Driver as Driver_

PAGE = 4096


class Driver:
    """What an uploader calls. Copies happen when their stream is waited for, not before."""

    def __init__(self, managed: int = 1):
        self.managed = managed
        self.fails: dict[str, int] = {}  # name -> error
        self.streams: dict[int, list] = {}
        self.registered: dict[int, int] = {}
        self.current = threading.local()
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
        self.streams[stream].append((to, start, nbytes))
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

    def do_cuStreamCreate(self, stream, flags):
        assert self.current.context == 77, "the thread has no context"
        assert flags == 1
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

    def do_cuStreamSynchronize(self, stream):
        for to, start, nbytes in self.streams[stream.value]:
            ctypes.memmove(to, start, nbytes)
        self.streams[stream.value].clear()

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


def test_each_thread_has_its_own_memory_and_stream_and_close_frees_them_all(driver):
    uploader, data, got = Uploader(), [bytes([i]) * 100 for i in range(3)], {}

    def run(i):
        got[i] = upload(uploader, data[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [got[i] for i in range(3)] == data
    assert len(driver.streams) == len(driver.registered) == 3
    uploader.close()
    assert not driver.streams
    assert not driver.registered
    uploader.close()  # nothing is freed twice


@pytest.mark.parametrize(
    "name", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent",
             "cuStreamCreate", "cuMemHostRegister_v2", "cuMemcpyHtoDAsync_v2",
             "cuStreamSynchronize"],
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
