"""What the disk gives at best: whole expert records, direct reads, as many at a time as threads."""

import mmap
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .files import OpenFile
from .layout import ExpertLayout
from .reader import PAGE, ExpertReader, ReadRequest

MEMORY_NBYTES = 64 << 20  # that reads go into


@dataclass(frozen=True)
class DiskProbe:
    """Bytes a second that random records of `record_nbytes` were read at; `io` as in `Stats`."""

    bytes_per_second: float
    record_nbytes: int
    io: str

    def __str__(self) -> str:
        how = "direct reads" if self.io == "direct" else "no direct reads here: the page cache"
        rate, record = self.bytes_per_second / 1e9, self.record_nbytes / 1e3
        return f"{rate:.2f} GB/s (records of {record:,.0f} kB, {how})"


def probe_disk(
    files: Sequence[OpenFile],
    layouts: Sequence[ExpertLayout],
    threads: int = 8,
    seconds: float = 1.0,
) -> DiskProbe:
    """Read random experts for about `seconds`, past the page cache where that can be done.

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
    reader = ExpertReader(files, threads, "direct")

    def read_batch() -> None:
        requests: list[ReadRequest] = []
        for i in range(batch):
            layout = choose.choice(same)
            expert, at = choose.randrange(layout.num_experts), i * room
            for n, t in enumerate(layout.tensors):
                file, offset = int(layout.file_ids[n, expert]), int(layout.offsets[n, expert])
                requests.append((file, offset, memory[at : at + t.nbytes], (t.name,)))
                at += -(-t.nbytes // PAGE) * PAGE
        reader.read(requests)

    try:
        read_batch()  # starts the threads
        start, batches, took = time.perf_counter(), 0, 0.0
        while not batches or took < seconds:
            read_batch()
            batches, took = batches + 1, time.perf_counter() - start
    finally:
        reader.close()
    rate = batches * batch * largest.expert_nbytes / took
    return DiskProbe(rate, largest.expert_nbytes, reader.io)
