"""Parallel positional reads of file bytes straight into the caller's memory.

Knows descriptors, offsets and buffers; knows neither experts nor MLX. Worker threads only ever
touch bytes. The thread that asks for a read takes part in it, so that a few small reads from the
page cache cost no hand-over, while many or slow ones run side by side.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import ExpertReadError
from .files import OpenFile

IO_MODES = ("pread", "direct", "mmap")
PAGE = 4096
IOV_MAX = 512  # Linux and macOS allow 1024; one read never needs as many
MERGE_GAP_NBYTES = 4096  # ranges closer than this are read as one, the gap into waste memory
MERGE_MAX_NBYTES = 16 << 20  # one record of a vault, but no more than can run beside others


class ReadRequest(NamedTuple):
    """Read `len(buffer)` bytes at `offset` of file number `file` into `buffer`."""

    file: int
    offset: int
    buffer: memoryview
    label: str


@dataclass
class ReaderStats:
    """Counters since the reader was made. Times are seconds that the caller waited."""

    bytes: int = 0
    requests: int = 0
    reads: int = 0
    wait_seconds: float = 0.0


class _Read:
    """One positional read: neighbouring requests of one file, scattered by one `preadv`."""

    __slots__ = ("buffers", "file", "label", "nbytes", "offset")

    def __init__(self, request: ReadRequest):
        self.file, self.offset, self.label = request.file, request.offset, request.label
        self.buffers = [request.buffer]
        self.nbytes = len(request.buffer)


def merge(requests: Sequence[ReadRequest]) -> list[_Read]:
    """Sort requests by place and join those that (almost) touch."""
    reads: list[_Read] = []
    last: _Read | None = None
    for r in sorted(requests, key=lambda r: (r.file, r.offset)):
        if last is not None and last.file == r.file:
            gap = r.offset - (last.offset + last.nbytes)
            if (
                0 <= gap <= MERGE_GAP_NBYTES
                and last.nbytes + gap + len(r.buffer) <= MERGE_MAX_NBYTES
                and len(last.buffers) + 2 <= IOV_MAX
            ):
                if gap:
                    last.buffers.append(memoryview(bytearray(gap)))
                last.buffers.append(r.buffer)
                last.nbytes += gap + len(r.buffer)
                continue
        last = _Read(r)
        reads.append(last)
    return reads


class _Batch:
    """The reads of one call, worked off by the caller and by worker threads together."""

    def __init__(self, reads: list[_Read]):
        self.todo: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        for read in reads:
            self.todo.put(read)
        self.left = len(reads)
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.error: BaseException | None = None

    def work(self, files: Sequence["_File"]) -> None:
        while True:
            try:
                read = self.todo.get_nowait()
            except queue.Empty:
                return
            error = None
            if self.error is None:  # after a failure the rest is only counted off
                try:
                    files[read.file].read(read)
                except BaseException as e:
                    error = e
            with self.lock:
                self.error = self.error or error
                self.left -= 1
                if self.left == 0:
                    self.done.set()

    def cancel(self, error: BaseException) -> None:
        """Let no further read start; those under way end by themselves."""
        with self.lock:
            self.error = self.error or error


def _without(buffers: list[memoryview], n: int) -> list[memoryview]:
    """The buffers less their first `n` bytes."""
    for i, b in enumerate(buffers):
        if n < len(b):
            return [b[n:], *buffers[i + 1 :]]
        n -= len(b)
    return []


_scratch = threading.local()  # page-aligned memory of a thread, for direct reads


def _pages(nbytes: int) -> memoryview:
    """At least `nbytes` page-aligned bytes, the same ones for each read of a thread."""
    pages = getattr(_scratch, "pages", None)
    if pages is None or len(pages) < nbytes:
        _scratch.pages = pages = mmap.mmap(-1, -(-nbytes // PAGE) * PAGE)
    return memoryview(pages)


def _is_aligned(offset: int, buffer: memoryview) -> bool:
    """Whether direct I/O can read these bytes of a file straight into this memory."""
    if offset % PAGE or len(buffer) % PAGE or not len(buffer):
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % PAGE == 0


class _File:
    """One open file and how to read from it."""

    def __init__(self, source: OpenFile, io: str):
        self.source, self.path, self.fd = source, source.path, source.fileno()
        self.size = source.fingerprint.size
        self.own_fd = -1
        self.read_into = self._scatter
        if io == "direct" and hasattr(fcntl, "F_NOCACHE"):  # macOS: any alignment will do
            self.own_fd = self.fd = os.open(self.path, os.O_RDONLY)
            fcntl.fcntl(self.fd, fcntl.F_NOCACHE, 1)
        elif io == "direct" and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):  # a file system without direct I/O
                self.own_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
                self.read_into = self._read_direct
        elif io == "mmap" and self.size:
            self.map = mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ)
            self.read_into = self._copy_mapped

    def read(self, read: _Read) -> None:
        try:
            self.read_into(read)
        except OSError as e:
            if isinstance(e, ExpertReadError):
                raise
            raise ExpertReadError(
                e.errno, f"{self.path}: reading {read.label} failed: {os.strerror(e.errno or 0)}"
            ) from e

    def _short(self, read: _Read, missing: int) -> ExpertReadError:
        return ExpertReadError(
            errno.EIO,
            f"{self.path}: the file ended {missing} bytes before the end of {read.label}. "
            "It was truncated after it was loaded.",
        )

    def _scatter(self, read: _Read) -> None:
        buffers, offset, left = read.buffers, read.offset, read.nbytes
        while left:
            n = os.preadv(self.fd, buffers, offset)  # Python itself retries after EINTR
            if n == 0:
                raise self._short(read, left)
            offset, left = offset + n, left - n
            if left:  # a short read: go on behind what came
                buffers = _without(buffers, n)

    def _read_direct(self, read: _Read) -> None:
        """O_DIRECT wants page-aligned memory, offsets and lengths. Buffers that have them are read
        into; for the rest, the pages around are read into scratch memory and copied from there."""
        start = read.offset - read.offset % PAGE
        end = read.offset + read.nbytes
        scratch = _pages(end - start + 2 * PAGE * len(read.buffers))
        parts: list[memoryview] = []  # what is read, page by page, from `start` on
        copies: list[tuple[memoryview, memoryview]] = []
        used = 0  # bytes of scratch
        covered = start  # up to here the file is covered by `parts`
        at = read.offset
        loose: list[tuple[int, memoryview]] = []

        def close_loose(upto: int) -> None:
            nonlocal used, covered
            if upto > covered:
                pages = scratch[used : used + upto - covered]
                copies.extend((b, pages[p - covered : p - covered + len(b)]) for p, b in loose)
                parts.append(pages)
                used, covered = used + upto - covered, upto
            loose.clear()

        for buffer in read.buffers:
            if _is_aligned(at, buffer):
                close_loose(at)
                parts.append(buffer)
                covered = at + len(buffer)
            else:
                loose.append((at, buffer))
            at += len(buffer)
        close_loose(-(-end // PAGE) * PAGE)
        position = start
        while position < end:
            n = os.preadv(self.own_fd, parts[:IOV_MAX], position)
            position += n
            if n == 0 or (n % PAGE and position < end):
                raise self._short(read, end - position)
            parts = _without(parts, n)
        for buffer, pages in copies:
            buffer[:] = pages

    def _copy_mapped(self, read: _Read) -> None:
        """Copy from a mapping. Touching pages behind the end of a file would kill the process."""
        size = os.fstat(self.fd).st_size
        if read.offset + read.nbytes > size:
            raise self._short(read, read.offset + read.nbytes - size)
        at = read.offset
        for buffer in read.buffers:  # numpy lets other threads run while it copies
            np.frombuffer(buffer, np.uint8)[:] = np.frombuffer(self.map, np.uint8, len(buffer), at)
            at += len(buffer)

    def close(self) -> None:
        if self.own_fd >= 0:
            os.close(self.own_fd)
            self.own_fd = -1


def _serve(batches: "queue.SimpleQueue[_Batch | None]", files: list[_File]) -> None:
    while (batch := batches.get()) is not None:
        batch.work(files)


class _Pool:
    """Threads that help with batches. Holds no reference to the reader, which can be freed."""

    def __init__(self, threads: int):
        self.size = threads
        self.batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.pid = os.getpid()

    def help_with(self, batch: _Batch, files: list[_File], helpers: int) -> None:
        if self.pid != os.getpid():  # after a fork the threads are gone
            self.__init__(self.size)  # type: ignore[misc]
        while len(self.threads) < min(self.size, helpers):
            t = threading.Thread(
                target=_serve, args=(self.batches, files), name="smoe-reader", daemon=True
            )
            t.start()
            self.threads.append(t)
        for _ in range(min(self.size, helpers)):
            self.batches.put(batch)

    def stop(self, files: list[_File]) -> None:
        if self.pid == os.getpid():
            for _ in self.threads:
                self.batches.put(None)
            for t in self.threads:
                t.join()
            self.threads = []
        for f in files:
            f.close()


class ExpertReader:
    """Reads byte ranges of files into the caller's buffers, several at a time.

    Args:
        files: the opened files; a request names one by its index.
        threads: how many reads may be under way beside the caller's own.
        io: "pread"; "direct" past the page cache (F_NOCACHE on macOS, O_DIRECT on Linux; where the
            file system has no direct I/O, `io` is "pread" afterwards); or "mmap".
    """

    def __init__(self, files: Sequence[OpenFile], threads: int = 8, io: str = "pread"):
        if io not in IO_MODES:
            raise ValueError(f"io={io!r}: one of {', '.join(IO_MODES)}")
        self._files = [_File(f, io) for f in files]
        self._pool = _Pool(threads)
        refused = io == "direct" and any(f.own_fd < 0 for f in self._files)
        self.io = "pread" if refused else io
        self.stats = ReaderStats()
        # Joins the threads when the reader is freed, and at exit, before the interpreter goes.
        self.close = weakref.finalize(self, self._pool.stop, self._files)

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Fill every request's buffer; return when all are full.

        Raises:
            ExpertReadError: a read failed or came short. The buffers' contents are then undefined.
            CheckpointChangedError: a file is no longer the one that was opened.
        No read is under way any more when this returns or raises, whatever the reason.
        """
        if not self.close.alive:
            raise ExpertReadError(errno.EBADF, "this model was closed; load it again")
        start = time.perf_counter()
        reads = merge(requests)
        batch = _Batch(reads)
        try:
            if len(reads) > 1:
                self._pool.help_with(batch, self._files, len(reads) - 1)
            batch.work(self._files)
            batch.done.wait()
        except BaseException as e:  # KeyboardInterrupt, or a thread could not be started
            batch.cancel(e)
            batch.work(self._files)
            while not batch.done.is_set():
                try:
                    batch.done.wait()
                except KeyboardInterrupt:
                    continue
            raise
        self.stats.wait_seconds += time.perf_counter() - start
        # A changed file is the better explanation of a short read: look at that first.
        for i in {r.file for r in reads}:
            self._files[i].source.check_unchanged()
        if batch.error is not None:
            raise batch.error
        self.stats.requests += len(requests)
        self.stats.reads += len(reads)
        self.stats.bytes += sum(r.nbytes for r in reads)
