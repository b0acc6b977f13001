"""Parallel positional reads of file bytes straight into the caller's memory.

Knows descriptors, offsets and buffers; knows neither experts nor MLX. Worker threads only ever
touch bytes. The thread that asks for a read takes part in it, so that a few small reads from the
page cache cost no hand-over, while many or slow ones run side by side.
"""

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

from ..errors import ExpertReadError
from .safetensors import SafetensorsMmap

PAGE = 4096
IOV_MAX = 512  # Linux and macOS allow 1024; one read never needs as many
MERGE_GAP_NBYTES = 4096  # ranges closer than this are read as one, the gap into waste memory
MERGE_MAX_NBYTES = 4 << 20  # a merged read stays small enough to run beside others


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


class _File:
    """One open file and how to read from it."""

    def __init__(self, source: SafetensorsMmap, direct: bool):
        self.source, self.path, self.fd = source, source.path, source.fileno()
        self.size = source.fingerprint.size
        self.direct_fd = -1
        if direct and hasattr(fcntl, "F_NOCACHE"):  # macOS: any alignment will do
            self.fd = os.open(self.path, os.O_RDONLY)
            self.direct_fd = self.fd
            fcntl.fcntl(self.fd, fcntl.F_NOCACHE, 1)
        elif direct and hasattr(os, "O_DIRECT"):
            try:
                self.direct_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
        self.bounced = self.direct_fd >= 0 and self.direct_fd != self.fd

    def read(self, read: _Read) -> None:
        try:
            if self.bounced:
                self._read_direct(read)
            else:
                self._scatter(read)
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
                rest = []
                for b in buffers:
                    if n >= len(b):
                        n -= len(b)
                    else:
                        rest.append(b[n:])
                        n = 0
                buffers = rest

    def _read_direct(self, read: _Read) -> None:
        """O_DIRECT wants page-aligned memory and offsets: read the pages around, then copy."""
        start = read.offset - read.offset % PAGE
        end = read.offset + read.nbytes
        with mmap.mmap(-1, -(-(end - start) // PAGE) * PAGE) as pages, memoryview(pages) as view:
            filled = 0
            while start + filled < end:
                n = os.preadv(self.direct_fd, [view[filled:]], start + filled)
                if n == 0 or (n % PAGE and start + filled + n < min(end, self.size)):
                    raise self._short(read, end - start - filled - n)
                filled += n
            at = read.offset - start
            for b in read.buffers:
                b[:] = view[at : at + len(b)]
                at += len(b)

    def close(self) -> None:
        if self.direct_fd >= 0:
            os.close(self.direct_fd)
            self.direct_fd = -1


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
        direct: bypass the page cache (F_NOCACHE on macOS, O_DIRECT with aligned bounce memory on
            Linux; where the file system refuses O_DIRECT, `direct` is False afterwards).
    """

    def __init__(self, files: Sequence[SafetensorsMmap], threads: int = 8, direct: bool = False):
        self._files = [_File(f, direct) for f in files]
        self._pool = _Pool(threads)
        self.direct = direct and all(f.direct_fd >= 0 for f in self._files)
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
