"""What the disk gives at best: whole expert records, as many at a time as threads; one alone."""

import mmap
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .files import OpenFile
from .layout import ExpertLayout
from .reader import PAGE, ExpertReader, ReadRequest

MEMORY_NBYTES = 64 << 20  # that reads go into


@dataclass(frozen=True)
class DiskProbe:
    """How fast random records of `record_nbytes` were read; `io` as in `Stats`.

    Records that are read together take `latency_seconds`, and then their bytes at the rate.
    """

    bytes_per_second: float
    record_nbytes: int
    io: str
    latency_seconds: float = 0.0

    def __str__(self) -> str:
        how = "direct reads" if self.io == "direct" else "no direct reads here: the page cache"
        rate, record = self.bytes_per_second / 1e9, self.record_nbytes / 1e3
        return f"{rate:.2f} GB/s (records of {record:,.0f} kB, {how})"


def probe_disk(
    files: Sequence[OpenFile],
    layouts: Sequence[ExpertLayout],
    threads: int,
    seconds: float = 1.0,
    io: str = "direct",
    clock: Callable[[], float] = time.perf_counter,
) -> DiskProbe:
    """Read random experts for about `seconds`: by default past the page cache, if that can be done.

    Raises:
        ExpertReadError, CheckpointChangedError: an expert could not be read.
    """
    threads = threads or 8
    largest = max(layouts, key=lambda x: x.expert_nbytes)
    room = sum(-(-t.nbytes // PAGE) * PAGE for t in largest.tensors)
    batch = max(1, min(2 * threads, MEMORY_NBYTES // room))
    memory = memoryview(mmap.mmap(-1, batch * room))
    same = [x for x in layouts if x.tensors == largest.tensors]
    choose = random.Random(0)
    reader = ExpertReader(files, threads, io)

    def read(records: int) -> None:
        requests: list[ReadRequest] = []
        for i in range(records):
            layout = choose.choice(same)
            buffers, at = [], i * room
            for t in layout.tensors:
                buffers.append(memory[at : at + t.nbytes])
                at += -(-t.nbytes // PAGE) * PAGE
            requests += layout.reads(choose.randrange(layout.num_experts), buffers)
        reader.read(requests)

    alone: list[float] = []
    try:
        read(batch)  # starts the threads
        start, batches, took = time.perf_counter(), 0, 0.0
        while not batches or time.perf_counter() - start < seconds:
            before = clock()
            read(batch)
            batches, took = batches + 1, took + clock() - before
            while len(alone) < 2 * batches:
                before = clock()
                read(1)
                alone.append(clock() - before)
    finally:
        reader.close()
    rate = batches * batch * largest.expert_nbytes / took
    latency = max(0.0, statistics.median(alone) - largest.expert_nbytes / rate)
    return DiskProbe(rate, largest.expert_nbytes, reader.io, latency)
