"""Parallel positional reads of file bytes straight into the caller's memory.

Knows descriptors, offsets and buffers; knows neither experts nor MLX. Worker threads only ever
touch bytes. The thread that asks for reads takes part in them, and does them alone as long as they
are quick: a small read from the page cache takes a few microseconds, waking a thread for it many.
Slow ones, from the disk or large, run side by side.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import operator
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any

import numpy as np

from ..errors import CheckpointChangedError, ExpertReadError
from .cuda import Uploader
from .files import OpenFile, naming
from .streamer import Reading, Streamer

IO_MODES = ("pread", "direct", "mmap")
PAGE = 4096
IOV_MAX = 512  # Linux and macOS allow 1024; one read never needs as many
MERGE_GAP_NBYTES = 4096  # ranges closer than this are read as one, the gap into waste memory
SLOW_SECONDS = 50e-6  # reads that take longer are worth waking threads for
TRY_ALONE_EVERY = 16  # calls, while reads are slow
FADING = 0.97  # what an earlier wait counts after each new one
PAUSE_SECONDS = 0.25  # between two reads, nothing was computed
MERGE_MAX_NBYTES = 16 << 20  # one record of a vault, but no more than can run beside others


# (file, offset, buffer, label): read `len(buffer)` bytes at `offset` of file number `file` into
# `buffer`; `label`, joined by " of ", names them in errors. A plain tuple: a token takes many.
ReadRequest = tuple[int, int, memoryview, tuple[str, ...]]


@dataclass
class ReaderStats:
    """Counters since the reader was made. Times are seconds that the caller waited."""

    bytes: int = 0
    requests: int = 0
    reads: int = 0
    wait_seconds: float = 0.0


class _Read:
    """One positional read: neighbouring requests of one file, scattered by one `preadv`."""

    __slots__ = ("buffers", "file", "nbytes", "offset", "requests")

    def __init__(self, request: ReadRequest):
        self.file, self.offset, buffer, _ = request
        self.nbytes = len(buffer)
        self.buffers, self.requests = [buffer], [request]

    def into(self, buffer: memoryview) -> "_Read":
        """The same bytes of the file, into one buffer."""
        read = _Read((self.file, self.offset, buffer, ()))
        read.requests = self.requests
        return read

    def label_at(self, offset: int) -> str:
        """What lies at `offset` of the file."""
        at = [label for _, start, _, label in self.requests if start <= offset]
        return " of ".join(at[-1] if at else self.requests[0][3])


_NOTHING = _Read((-1, 0, memoryview(b""), ()))
_waste = memoryview(bytearray(MERGE_GAP_NBYTES))  # gaps are read into it, by whoever


def merge(requests: Sequence[ReadRequest]) -> list[_Read]:
    """Sort requests by place and join those that (almost) touch."""
    reads = []
    read, end = _NOTHING, 0
    requests = sorted(requests, key=operator.itemgetter(1))
    requests.sort(key=operator.itemgetter(0))  # twice: quicker than by pairs
    for request in requests:
        file, offset, buffer, _ = request
        gap, upto = offset - end, offset + len(buffer)
        if (
            not 0 <= gap <= MERGE_GAP_NBYTES
            or file != read.file
            or upto > read.offset + MERGE_MAX_NBYTES
            or len(read.buffers) + 2 > IOV_MAX
        ):
            read = _Read(request)
            reads.append(read)
        else:
            if gap:
                read.buffers.append(_waste[:gap])
            read.buffers.append(buffer)
            read.requests.append(request)
            read.nbytes = upto - read.offset
        end = upto
    return reads


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
        # Functions, not bound methods: a cycle would keep the file open until the next collection.
        self.read_into = _File._scatter
        if io == "direct" and hasattr(fcntl, "F_NOCACHE"):  # macOS: any alignment will do
            self.fd = self._open_again(0)
            fcntl.fcntl(self.fd, fcntl.F_NOCACHE, 1)
        elif io == "direct" and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):  # a file system without direct I/O
                self._open_again(os.O_DIRECT)
                self.read_into = _File._read_direct
        elif io == "mmap" and self.size:
            with naming(self.path):  # not every file system can
                self.map = mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ)
            self.read_into = _File._copy_mapped

    def _open_again(self, flags: int) -> int:
        """Open the path once more, and make sure that it is still the same file."""
        self.own_fd = os.open(self.path, os.O_RDONLY | flags)
        if not os.path.samestat(os.fstat(self.own_fd), os.fstat(self.source.fileno())):
            self.close()
            raise CheckpointChangedError(
                f"{self.path} was replaced after it was loaded. Load the model again."
            )
        return self.own_fd

    def read(self, read: _Read) -> None:
        """Fill the read's buffers, or raise ExpertReadError."""
        try:
            self.read_into(self, read)
        except OSError as e:
            if isinstance(e, ExpertReadError):
                raise
            raise self._failed(read, e) from e

    def read_plain(self, request: ReadRequest) -> None:
        """The same for one request in mode "pread", quicker."""
        _, offset, buffer, label = request
        try:
            n = os.preadv(self.fd, (buffer,), offset)
        except OSError as e:
            raise self._failed(_Read(request), e) from e
        if n < len(buffer):
            self.read(_Read((-1, offset + n, buffer[n:], label)))

    def _failed(self, read: _Read, e: OSError) -> ExpertReadError:
        what = read.label_at(getattr(e, "offset", read.offset))
        message = f"{self.path}: reading {what} failed: {os.strerror(e.errno or 0)}"
        return ExpertReadError(e.errno, message)

    def _short(self, read: _Read, end: int) -> ExpertReadError:
        return ExpertReadError(
            errno.EIO,
            f"{self.path}: the file ends at byte {end}, in {read.label_at(end)}. "
            "It was truncated after it was loaded.",
        )

    def _scatter(self, read: _Read) -> None:
        buffers, offset, left = read.buffers, read.offset, read.nbytes
        try:
            while left:
                n = os.preadv(self.fd, buffers, offset)  # it retries after EINTR itself
                if n == 0:
                    raise self._short(read, offset)
                offset, left = offset + n, left - n
                if left:  # a short read: go on behind what came
                    buffers = _without(buffers, n)
        except OSError as e:
            e.offset = offset  # type: ignore[attr-defined]
            raise

    def _read_direct(self, read: _Read) -> None:
        """O_DIRECT wants page-aligned memory, offsets and lengths. Buffers that have them are read
        into; for the rest, the pages around are read into scratch memory and copied from there."""
        start = read.offset - read.offset % PAGE
        end = read.offset + read.nbytes
        last = -(-end // PAGE) * PAGE
        scratch = _pages(last - start or PAGE)
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
        close_loose(last)
        position = start
        try:
            while position < end:
                n = os.preadv(self.own_fd, parts[:IOV_MAX], position)
                position += n
                if n == 0 or (n % PAGE and position < end):
                    raise self._short(read, position)
                parts = _without(parts, n)
        except OSError as e:
            e.offset = position  # type: ignore[attr-defined]
            raise
        for buffer, pages in copies:
            buffer[:] = pages

    def _copy_mapped(self, read: _Read) -> None:
        """Copy from a mapping. Touching pages behind the end of a file would kill the process."""
        size = os.fstat(self.fd).st_size
        if read.offset + read.nbytes > size:
            raise self._short(read, size)
        at = read.offset
        for buffer in read.buffers:  # numpy lets other threads run while it copies
            np.frombuffer(buffer, np.uint8)[:] = np.frombuffer(self.map, np.uint8, len(buffer), at)
            at += len(buffer)

    def close(self) -> None:
        fd, self.own_fd = self.own_fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # of a disk that is gone
                os.close(fd)


def _read_and_upload(uploader: Uploader, file: _File, read: _Read) -> None:
    file.read(read.into(uploader.pinned(read.nbytes)))
    pieces, at = [], 0
    for buffer in read.buffers:
        if buffer.obj is not _waste.obj:
            pieces.append((at, buffer))
        at += len(buffer)
    uploader.upload(pieces)


def _close_all(streamer: Streamer, files: list[_File], uploader: Uploader | None) -> None:
    """Join and close everything, and let an interrupt wait until that is done."""
    interrupted = False
    while True:
        try:
            streamer.stop()
            for f in files:
                f.close()
            if uploader is not None:
                uploader.close()
            break
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        with contextlib.suppress(RuntimeError):  # no thread to be had: the process ends
            threading.Thread(target=_interrupt_main, name="smoe-interrupt", daemon=True).start()


def _interrupt_main() -> None:
    """Interrupt the main thread when it frees no object any more: Python would drop it there."""
    main, frees = threading.main_thread().ident or 0, weakref.finalize.__call__.__code__
    while any(f.f_code is frees for f, _ in walk_stack(sys._current_frames().get(main))):
        time.sleep(0.001)
    signal.pthread_kill(main, signal.SIGINT)


class ExpertReader:
    """Reads byte ranges of files into the caller's buffers, several at a time.

    Args:
        files: the opened files; a request names one by its index.
        threads: how many reads may be under way beside the caller's own.
        io: "pread"; "direct" past the page cache (F_NOCACHE on macOS, O_DIRECT on Linux; where the
            file system has no direct I/O, `io` is "pread" afterwards); or "mmap".
        uploader: brings the bytes to buffers that are arrays of a CUDA device.
    """

    def __init__(
        self,
        files: Sequence[OpenFile],
        threads: int = 8,
        io: str = "pread",
        uploader: Uploader | None = None,
    ):
        if io not in IO_MODES:
            raise ValueError(f"io={io!r}: one of {', '.join(IO_MODES)}")
        files_ = self._files = [_File(f, io) for f in files]

        def read_one(read: _Read | ReadRequest) -> None:
            if isinstance(read, tuple):
                files_[read[0]].read_plain(read)
            elif uploader is None:
                files_[read.file].read(read)
            else:
                _read_and_upload(uploader, files_[read.file], read)

        self._read_one = read_one
        self._streamer = Streamer(read_one, threads)
        self._asked = 0
        self._slow, self._calls = True, 0  # how the last reads went
        self._waited = self._passed = self._last = 0.0
        refused = io == "direct" and any(f.own_fd < 0 for f in self._files)
        self.io = "pread" if refused else io
        self._plain = self.io == "pread" and uploader is None
        self.uploader = uploader
        self.stats = ReaderStats()
        # Joins the threads when the reader is freed, and at exit, before the interpreter goes.
        self.close = weakref.finalize(self, _close_all, self._streamer, self._files, uploader)

    @property
    def threads(self) -> int:
        return self._streamer.size

    @property
    def sources(self) -> list[OpenFile]:
        """The files, in the order in which requests number them."""
        return [f.source for f in self._files]

    @property
    def slow(self) -> bool:
        """Whether reads take long enough, lately, for other work to be done meanwhile."""
        return self._slow and self._streamer.size > 0

    @property
    def waiting(self) -> float:
        """The share of the time, lately, in which the caller waited for reads."""
        return self._waited / self._passed if self._passed else 0.0

    def worth_waking(self) -> bool:
        """Whether to `start` reads before other work. Not now and then, to see if they are slow."""
        self._asked += 1
        if self._asked % TRY_ALONE_EVERY == 0:
            self._calls = TRY_ALONE_EVERY - 1  # the coming read tries
            return False
        return self.slow

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Fill every request's buffer; return when all are full.

        Raises:
            ExpertReadError: a read failed or came short. The buffers' contents are then undefined.
            CheckpointChangedError: a file is no longer the one that was opened.
        No read is under way any more when this returns or raises, whatever the reason.
        """
        self.finish(self.reading(requests))

    def reading(
        self, requests: Sequence[ReadRequest], bet: bool = False, apart: bool = False
    ) -> Reading:
        """What is to be read, not begun yet. A bet yields to all that is not one.

        Args:
            apart: few of the requests, if any, touch: while reads are quick, looking costs more.
        """
        plain = apart and self._plain and not self._slow
        return Reading(requests if plain else merge(requests), bet)

    def start(self, reading: Reading) -> None:
        """Let threads begin; `finish` or `cancel` must follow."""
        if self.close.alive:
            self._streamer.add(reading)

    def finish(self, *readings: Reading) -> None:
        """Return when all of these readings are there; errors and promise of `read`."""
        start = time.perf_counter()
        try:
            try:
                self._work(readings)
            except BaseException as e:
                for reading in readings:
                    reading.stop(e)
            finally:
                self._wait(readings)
        finally:
            self._wait(readings)  # once more, if an interrupt hit the first
            end = time.perf_counter()
            self.stats.wait_seconds += end - start
            self._waited = FADING * self._waited + end - start
            pause = start - self._last > PAUSE_SECONDS
            self._passed = FADING * self._passed + end - (start if pause else self._last)
            self._last = end
        error = next((r.error for r in readings if r.error is not None), None)
        if error is None or isinstance(error, ExpertReadError):
            self._check_unchanged(readings)  # the better explanation of a short read
        if error is not None:
            raise error
        for reading in readings:
            self._count(reading.reads)

    def cancel(self, reading: Reading) -> None:
        """Read no more of it; return when no thread is at it."""
        done = reading.reads[: len(reading.reads) - len(reading.todo)]  # taken in this order
        before = reading.error
        self._wait([reading])
        self._count(done)
        if reading.error is not before and isinstance(reading.error, KeyboardInterrupt):
            raise reading.error  # it came while this was waiting

    def _work(self, readings: Sequence[Reading]) -> None:
        """Take part in readings until nothing is left to begin."""
        if not self.close.alive:
            raise ExpertReadError(errno.EBADF, "this model was closed; load it again")
        for reading in readings:
            if reading.pid != os.getpid():
                raise ExpertReadError(errno.EIO, "a read was under way when the process forked")
            if reading.bet:
                self._streamer.promote(reading)
        for reading in readings:
            if not reading.queued and self._read_alone(reading):
                self._streamer.add(reading)
            reading.work(self._read_one)

    def _wait(self, readings: Sequence[Reading]) -> None:
        for reading in readings:
            if not reading.done:
                reading.quiet()
            if reading.queued:
                self._streamer.forget(reading)
                reading.queued = False

    def _count(self, reads: Sequence[Any]) -> None:
        plain = bool(reads) and isinstance(reads[0], tuple)
        self.stats.reads += len(reads)
        self.stats.requests += len(reads) if plain else sum([len(r.requests) for r in reads])
        self.stats.bytes += sum([len(r[2]) if plain else r.nbytes for r in reads])

    def _check_unchanged(self, readings: Sequence[Reading]) -> None:
        every = [read for reading in readings for read in reading.reads]
        for i in {read[0] if isinstance(read, tuple) else read.file for read in every}:
            source = self._files[i].source
            try:
                source.check_unchanged()
            except OSError as e:  # the disk is gone
                raise ExpertReadError(e.errno, f"{source.path}: {os.strerror(e.errno or 0)}") from e

    def _read_alone(self, reading: Reading) -> bool:
        """Read on this thread until two reads turn out to be slow; True if some are left to read.

        While they have been slow, that is only tried now and then: waiting for reads one by one is
        what the threads are there to avoid.
        """
        self._calls += 1
        alone = not self._streamer.size or len(reading.todo) == 1
        if self._slow and self._calls % TRY_ALONE_EVERY and not alone:
            return True
        todo, read_one, clock = reading.todo, self._read_one, time.perf_counter
        slow, enough = 0, min(2, len(todo))
        before = clock()
        while todo:
            read_one(todo.popleft())
            now = clock()
            if now - before > SLOW_SECONDS:
                slow += 1
                if slow >= enough and not alone:
                    break
            before = now
        if enough:
            self._slow = slow >= enough
        return bool(todo)
