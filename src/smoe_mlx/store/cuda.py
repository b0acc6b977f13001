"""On CUDA: file bytes come into slots by copies from pinned memory.

What MLX computes there lies in the device's own memory until the host looks at it: then MLX moves
it to managed memory, and what the CPU writes into that comes to the GPU a page at a time, when a
kernel stumbles over it. On an H200: 1 to 3 GB/s, copies from pinned memory into managed memory 22,
into the device's own 44. And a copy into managed memory may stand still until all kernels have
ended that were started before it. So what is uploaded to stays where it is (`Uploader.view`).
Apple GPUs read the memory that the CPU writes, and need none of this.

Knows addresses and bytes, no experts. Speaks to the driver by ctypes: it is there wherever MLX's
CUDA build runs.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

# Queues of the device, for contexts made from here on. With the 8 by default, copies may share one
# with kernels of MLX, and wait for kernels that wait for them (forward/waiting.py).
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered after MLX's own work


class CudaError(RuntimeError):
    """The driver refused."""


class Driver:
    """The CUDA driver, and the context that MLX uses.

    Raises:
        CudaError, OSError: there is none.
    """

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        # For calls that take a few microseconds: to let go of the interpreter takes longer, as
        # other threads then have it.
        self.quick = ctypes.PyDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._context = context

    def call(self, name: str, *args: object) -> None:
        code = getattr(self.library, name)(*args)
        if code:
            raise CudaError(f"{name} failed with CUDA error {code}")

    def enter(self) -> None:
        """Let this thread speak to MLX's device."""
        self.call("cuCtxSetCurrent", self._context)

    def pinned_for_good(self, nbytes: int) -> int:
        """The address of zeros that host and device both see there, until the process ends."""
        self.enter()
        start = ctypes.c_void_p()
        flags = 1 | 2  # CU_MEMHOSTALLOC_PORTABLE, _DEVICEMAP
        self.call("cuMemHostAlloc", ctypes.byref(start), ctypes.c_size_t(nbytes), flags)
        assert start.value
        ctypes.memset(start.value, 0, nbytes)
        return start.value


def address(buffer: memoryview) -> int:
    """Where a writable buffer lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class _Lane:
    """A thread's own pinned memory, and the event that its copies are done."""

    def __init__(self, event: int):
        self.event = ctypes.c_void_p(event)
        self.memory: mmap.mmap | None = None
        self.view = memoryview(b"")
        self.start = 0


class Uploader:
    """Copies from host memory to where MLX's arrays lie, on any thread.

    Raises:
        CudaError, OSError: there is no CUDA driver.
    """

    def __init__(self) -> None:
        self._driver = Driver()
        self._call = self._driver.call
        self._copy = self._driver.quick.cuMemcpyHtoDAsync_v2
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        # One stream for all threads, so that it need not share a queue with MLX's.
        least, greatest = ctypes.c_int(), ctypes.c_int()
        self._driver.enter()
        self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        self._stream = ctypes.c_void_p()
        self._call("cuStreamCreateWithPriority", ctypes.byref(self._stream), NON_BLOCKING, greatest)
        self._local = threading.local()
        self._lanes: list[_Lane] = []

    def view(self, array: mx.array) -> memoryview:
        """The bytes of an evaluated array, for `upload` and `download` alone to touch, as long as
        the array lives. The host must not look at it from here on: MLX would move it."""
        start = int(_where(array).item())  # type: ignore[arg-type]
        return memoryview((ctypes.c_uint8 * array.nbytes).from_address(start)).cast("B")

    def pinned(self, nbytes: int) -> memoryview:
        """Page-aligned memory of this thread, the same for each call, to `upload` from."""
        lane = getattr(self._local, "lane", None)
        if lane is None:
            self._driver.enter()
            event = ctypes.c_void_p()
            self._call("cuEventCreate", ctypes.byref(event), NO_TIMING)
            self._local.lane = lane = _Lane(event.value or 0)
            self._lanes.append(lane)
        if len(lane.view) < nbytes:
            self._release(lane)
            memory = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
            start = address(memoryview(memory))
            self._call("cuMemHostRegister_v2", ctypes.c_void_p(start), len(memory), 0)
            lane.memory, lane.view, lane.start = memory, memoryview(memory), start
        return lane.view[:nbytes]

    def upload(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Copy pinned bytes to arrays; they are there when this returns.

        pieces: (offset into `pinned`, destination).
        """
        lane, code = self._local.lane, 0
        for offset, to in pieces:
            code |= self._copy(address(to), lane.start + offset, len(to), self._stream)
        code |= self._driver.quick.cuEventRecord(lane.event, self._stream)
        if code:
            self._driver.library.cuStreamSynchronize(self._stream)
            raise CudaError(f"copying to the GPU failed with CUDA error {code}")
        self._call("cuEventSynchronize", lane.event)

    def download(self, source: memoryview) -> memoryview:
        """The bytes of a part of a `view`, in this thread's pinned memory."""
        pinned, lane = self.pinned(len(source)), self._local.lane
        nbytes, where = ctypes.c_size_t(len(source)), ctypes.c_uint64(address(source))
        self._call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(lane.start), where, nbytes, self._stream)
        self._call("cuEventRecord", lane.event, self._stream)
        self._call("cuEventSynchronize", lane.event)
        return pinned

    def _release(self, lane: _Lane) -> None:
        if lane.memory is not None:
            self._call("cuMemHostUnregister", ctypes.c_void_p(lane.start))
            lane.memory, lane.view = None, memoryview(b"")

    def close(self) -> None:
        """Free what was pinned. No copy may be under way."""
        with contextlib.suppress(CudaError):  # at exit the driver may be gone already
            self._driver.enter()
            for lane in self._lanes:
                self._release(lane)
                self._call("cuEventDestroy_v2", lane.event)
            if self._stream:
                self._call("cuStreamDestroy_v2", self._stream)
                self._stream = ctypes.c_void_p()
        self._lanes.clear()


def make_uploader() -> Uploader | None:
    """One that has been tried, if MLX computes on a CUDA device."""
    if mx.default_device() == mx.cpu or not mx.cuda.is_available():
        return None
    with contextlib.suppress(CudaError, OSError):
        uploader = Uploader()
        if _arrives(uploader):
            return uploader
        uploader.close()
    return None


def _arrives(uploader: Uploader) -> bool:
    """Whether MLX finds in an array what was uploaded to it."""
    nbytes = 1 << 20  # large: MLX treats small arrays differently
    array = mx.zeros((nbytes,), mx.uint8)
    mx.eval(array)
    try:
        view = uploader.view(array)
        uploader.pinned(nbytes)[:] = data = os.urandom(nbytes)
        uploader.upload([(0, view)])
        uploader.pinned(nbytes)[:] = bytes(nbytes)
        there = uploader.download(view) == data
        copy: Any = array + 0  # the array itself must not be looked at
        return there and bytes(memoryview(copy)) == data
    except RuntimeError:  # of the driver, or the kernel does not compile
        return False


@functools.cache
def _make_where() -> Any:
    return mx.fast.cuda_kernel(
        name="smoe_where", input_names=["array"], output_names=["start"],
        source="start[0] = (unsigned long long)array;",
    )  # fmt: skip


def _where(array: mx.array) -> mx.array:
    """[1] uint64: where the device has an array's bytes."""
    one = (1, 1, 1)
    out: mx.array = _make_where()(
        inputs=[array], grid=one, threadgroup=one, output_shapes=[(1,)], output_dtypes=[mx.uint64]
    )[0]
    return out
