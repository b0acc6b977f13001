"""Streamer: threads that work off reads in two queues, demanded ones first.

A demand is a read that a layer waits for, a bet one that it will perhaps need. Bets are taken only
while no demand is open, each thread looks again after every single read, and a bet that turns out
to be needed is promoted. Knows nothing of files: what a read is, its caller knows.
"""

import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

# A thread that is done with a read has to wait for the one that builds the graph to let go of the
# interpreter: up to 5 ms by Python's default, longer than many a read takes.
SWITCH_SECONDS = 0.0002


class Reading:
    """Reads that were started together, and how far they are.

    Attributes:
        bet: nobody waits for them yet.
        queued: a streamer's threads know of them.
        error: the first error; it stops the rest.
    """

    __slots__ = ("bet", "changed", "error", "helpers", "pid", "queued", "reads", "todo")

    def __init__(self, reads: Sequence[Any], bet: bool = False):
        self.reads, self.bet = reads, bet
        self.todo = deque(reads)
        self.queued = False
        self.helpers = 0  # threads that are reading
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.pid = os.getpid()

    @property
    def done(self) -> bool:
        """Whether nothing is left to be read; `error` says how it went."""
        return not self.todo and not self.helpers

    @property
    def begun(self) -> bool:
        """Whether any of it has been read, or is being read."""
        return len(self.todo) < len(self.reads)

    def take(self) -> Any:
        """One read for a thread, or None; `taken_is_done` must follow."""
        with self.changed:
            if not self.todo:
                return None
            self.helpers += 1  # first: `done` must not be true in between
            try:
                return self.todo.popleft()
            except IndexError:  # the caller, who takes part without the lock, was quicker
                self.helpers -= 1
                self.changed.notify_all()
                return None

    def taken_is_done(self, error: BaseException | None) -> None:
        with self.changed:
            self.helpers -= 1
            if error is not None:
                self.stop(error)
            if not self.helpers:
                self.changed.notify_all()

    def stop(self, error: BaseException) -> None:
        """Let no further read start; those under way end by themselves."""
        self.error = self.error or error
        self.todo.clear()

    def work(self, read_one: Callable[[Any], None]) -> None:
        """Read on this thread until nothing is left."""
        while self.todo:
            try:
                read = self.todo.popleft()
            except IndexError:
                return
            read_one(read)

    def quiet(self) -> None:
        """Let nothing start any more, and return when no thread is reading, come what may."""
        if self.pid != os.getpid():  # a fork: the threads stayed with the parent
            self.helpers = 0
        while True:
            try:
                self.todo.clear()
                with self.changed:
                    while self.helpers:
                        self.changed.wait()
                return
            except KeyboardInterrupt as e:
                self.stop(e)


class Streamer:
    """Threads that help with readings.

    Args:
        read_one: does one read. The threads keep it, so it must not hold what owns the streamer.
        threads: how many; they are started when they are first needed.
    """

    def __init__(self, read_one: Callable[[Any], None], threads: int):
        self.read_one, self.size = read_one, threads
        self.most_bets = max(1, threads // 2)  # the rest is free at once when a demand comes
        self._forget()

    def _forget(self) -> None:
        self.threads: list[threading.Thread] = []
        self.pid, self.stopped = os.getpid(), False
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._demands: list[Reading] = []  # open: until `forget`
        self._bets: deque[Reading] = deque()
        self._betting = 0  # bets that are being read

    def add(self, reading: Reading) -> None:
        """Let the threads work on a reading. With no threads to be had, only its caller will."""
        if self.pid != os.getpid():  # after a fork the threads are gone
            self._forget()
        helpers = min(self.size, len(reading.todo))
        if reading.bet:
            helpers = min(helpers, self.most_bets)
        if len(self.threads) < helpers:
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        while len(self.threads) < helpers:
            t = threading.Thread(target=self._serve, name="smoe-reader", daemon=True)
            try:
                t.start()
            except RuntimeError:  # no more threads to be had: go on with those that are there
                break
            self.threads.append(t)
        reading.queued = True
        with self._lock:
            (self._bets if reading.bet else self._demands).append(reading)
        self._wake_some(helpers)

    def promote(self, reading: Reading) -> None:
        """A bet that somebody waits for now."""
        if self.pid != os.getpid():
            self._forget()
        with self._lock:
            if reading in self._bets:
                self._bets.remove(reading)
            reading.bet, reading.queued = False, True  # it may not have been queued yet
            self._demands.append(reading)
        self._wake_some(len(reading.todo))

    def forget(self, reading: Reading) -> None:
        """Nobody waits for this reading any more. Raises nothing if it was never added."""
        with self._lock:
            for readings in (self._demands, self._bets):
                if reading in readings:
                    readings.remove(reading)
            bets_wait = bool(self._bets) and not self._demands
        if bets_wait:
            self._wake_some(self.most_bets)

    def _wake_some(self, n: int) -> None:
        for _ in range(min(n, len(self.threads))):
            self._wake.put(True)

    def _next(self) -> tuple[Reading, Any, bool] | None:
        """(reading, one of its reads, whether it is a bet), or None if there is nothing to do."""
        with self._lock:
            if self.stopped:
                return None
            for reading in self._demands:
                read = reading.take()
                if read is not None:
                    return reading, read, False
            while self._bets and not self._demands and self._betting < self.most_bets:
                read = self._bets[0].take()
                if read is not None:
                    self._betting += 1
                    return self._bets[0], read, True
                self._bets.popleft()
            return None

    def _serve(self) -> None:
        while self._wake.get():
            while (job := self._next()) is not None:
                reading, read, bet = job
                error: BaseException | None = None
                try:
                    self.read_one(read)
                except BaseException as e:
                    error = e
                if bet:
                    with self._lock:
                        self._betting -= 1
                reading.taken_is_done(error)
                del job, reading, read, error  # errors hold tracebacks, and these memory

    def stop(self) -> None:
        """Join the threads; what they have not begun is not read."""
        if self.pid == os.getpid():
            with self._lock:
                self.stopped = True
            for _ in self.threads:
                self._wake.put(False)
            for t in self.threads:
                t.join()
            self.threads = []
