"""ExpertReader: the right bytes or an error, and nothing under way afterwards."""

import errno
import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import interrupt_at_line
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smoe_mlx.errors import CheckpointChangedError, ExpertReadError, SmoeError
from smoe_mlx.store import reader as reader_module
from smoe_mlx.store.layout import ExpertLayout, TensorSpec
from smoe_mlx.store.reader import (
    IO_MODES,
    IOV_MAX,
    MERGE_GAP_NBYTES,
    MERGE_MAX_NBYTES,
    PAGE,
    SLOW_SECONDS,
    TRY_ALONE_EVERY,
    ExpertReader,
    ReadRequest,
    merge,
)
from smoe_mlx.store.safetensors import SafetensorsMmap

real_preadv = os.preadv
GUARD = 0xAA


def make_file(path: Path, nbytes: int, seed: int = 0) -> SafetensorsMmap:
    """A safetensors file of random bytes, opened. Its time is old, so that any change shows."""
    header = b'{"x":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (nbytes, nbytes)
    data = np.random.default_rng(seed).bytes(nbytes)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    os.utime(path, (1, 1))
    return SafetensorsMmap(path)


def request(file: int, offset: int, nbytes: int) -> ReadRequest:
    return (file, offset, memoryview(bytearray(nbytes)), (f"expert at {offset}",))


def read_and_check(reader: ExpertReader, files: list[SafetensorsMmap], places) -> None:
    """Read (file, offset, nbytes) places into one guarded block of memory and compare."""
    block = bytearray([GUARD]) * (sum(n + 1 for _, _, n in places) + 1)
    requests, at = [], 1
    for i, (file, offset, nbytes) in enumerate(places):
        view = memoryview(block)[at : at + nbytes]
        requests.append((file, offset, view, (f"request {i}",)))
        at += nbytes + 1
    reader.read(requests)
    at = 1
    for file, offset, nbytes in places:
        assert block[at - 1] == GUARD, "a byte in front of the buffer was written"
        assert block[at : at + nbytes] == real_pread(files[file], nbytes, offset)
        at += nbytes + 1
    assert block[-1] == GUARD


def real_pread(file: SafetensorsMmap, nbytes: int, offset: int) -> bytes:
    return os.pread(file.fileno(), nbytes, offset)


@pytest.fixture
def one_file(tmp_path):
    with make_file(tmp_path / "one.safetensors", 100_000) as file:
        yield file


@pytest.fixture(scope="module")
def three_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    files = [make_file(folder / f"{i}", 30_000 + 77 * i, seed=i) for i in range(3)]
    yield files
    for f in files:
        f.close()


class PlainReader(ExpertReader):
    """Takes all requests as they come, as what lies apart while reads are quick."""

    def reading(self, requests, bet=False, apart=True):
        self._slow = False
        return super().reading(requests, bet, apart)


def open_reader(files, io: str, threads: int = 2) -> ExpertReader:
    if io == "plain":
        return PlainReader(files, threads)
    reader = ExpertReader(files, threads, io)
    if reader.io != io:
        reader.close()
        pytest.skip(f"this file system refuses {io} I/O")
    return reader


@pytest.fixture(scope="module", params=["alone", "plain", *IO_MODES])
def shared_reader(request, three_files):
    if request.param == "alone":
        reader = ExpertReader(three_files, threads=0)
    else:
        reader = open_reader(three_files, request.param, threads=3)
    yield reader
    reader.close()


class Preadv:
    """Stands in for os.preadv and counts. `before` is called first and may raise."""

    def __init__(self, monkeypatch, before=None):
        self.before = before or (lambda offset: None)
        self.calls, self.under_way, self.most = 0, 0, 0
        self.sizes: list[int] = []
        self.lock = threading.Lock()
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd, buffers, offset, *flags):
        with self.lock:
            self.calls += 1
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            self.sizes.append(sum(map(len, buffers)))
        try:
            self.before(offset)
            return real_preadv(fd, buffers, offset, *flags)
        finally:
            with self.lock:
                self.under_way -= 1

    def assert_quiet(self) -> None:
        """Nothing is under way and nothing starts any more."""
        assert self.under_way == 0
        calls = self.calls
        time.sleep(0.02)
        assert self.calls == calls


# ---- the right bytes -----------------------------------------------------------------------------

steps = st.tuples(  # from the end of the one before: overlapping, adjacent, gapped, far
    st.sampled_from([-7, 0, 0, 0, 1, 100, MERGE_GAP_NBYTES, MERGE_GAP_NBYTES + 1]),
    st.integers(0, 40) | st.sampled_from([0, 1, 4095, 4096, 5000]),
)


@st.composite
def places(draw):
    """(file, offset, nbytes) in some order, in runs that touch, overlap or leave gaps."""
    out = []
    for _ in range(draw(st.integers(0, 5))):
        file, at = draw(st.integers(0, 2)), draw(st.integers(0, 30_000))
        for step, nbytes in draw(st.lists(steps, max_size=8)):
            start = max(0, at + step)
            if start + nbytes > 30_000:
                break
            out.append((file, start, nbytes))
            at = start + nbytes
    return draw(st.permutations(out))


@settings(max_examples=80, deadline=None)
@given(places().filter(len))  # nothing at all: see test_a_read_of_no_requests_returns
@example([(0, 0, 30_000), (0, 0, 30_000), (1, 29_999, 1)])
@example([(0, 5, 0)])
def test_random_requests_equal_a_plain_read(shared_reader, three_files, wanted):
    read_and_check(shared_reader, three_files, wanted)


def test_a_read_of_no_requests_returns(one_file):
    reader = ExpertReader([one_file], threads=0)
    thread = threading.Thread(target=reader.read, args=([],), daemon=True)
    thread.start()
    thread.join(timeout=1)
    assert not thread.is_alive()


def test_thousands_of_requests_equal_a_plain_read(shared_reader, three_files):
    rng = np.random.default_rng(1)
    wanted = [
        (int(f), int(o), int(n))
        for f, o, n in zip(
            rng.integers(0, 3, 4000), rng.integers(0, 29_900, 4000), rng.integers(1, 99, 4000),
            strict=True,
        )
    ]  # fmt: skip
    read_and_check(shared_reader, three_files, wanted)


def test_the_ends_of_files_read_right(shared_reader, three_files):
    sizes = [f.fingerprint.size for f in three_files]
    for tail in (1, 77, 4096, 4097, 20_001):
        read_and_check(
            shared_reader, three_files, [(i, n - tail, tail) for i, n in enumerate(sizes)]
        )


def test_whole_files_read_right(shared_reader, three_files):
    read_and_check(
        shared_reader, three_files, [(i, 0, f.fingerprint.size) for i, f in enumerate(three_files)]
    )


def test_buffers_of_numpy_memory_are_filled(one_file):
    bank = np.zeros((4, 100), np.uint8)
    reader = ExpertReader([one_file])
    rows = [(0, 500 + 100 * i, memoryview(bank[3 - i]), ("row",)) for i in range(4)]
    reader.read(rows)
    reader.close()
    for i in range(4):
        assert bank[3 - i].tobytes() == real_pread(one_file, 100, 500 + 100 * i)


# ---- merging -------------------------------------------------------------------------------------


def test_adjacent_requests_become_one_read(monkeypatch, one_file):
    preadv = Preadv(monkeypatch)
    reader = ExpertReader([one_file], threads=2)
    read_and_check(reader, [one_file], [(0, 1000 + 50 * i, 50) for i in range(20)])
    reader.close()
    assert (reader.stats.requests, reader.stats.reads, preadv.calls) == (20, 1, 1)
    assert reader.stats.bytes == 1000


def test_what_lies_apart_is_not_joined_while_reads_are_quick(one_file):
    reader = ExpertReader([one_file], threads=2)
    for slow, apart, reads in ((False, True, 3), (True, True, 2), (False, False, 2)):
        reader._slow = slow
        requests = [request(0, offset, 10) for offset in (9000, 0, 10)]
        reading = reader.reading(requests, apart=apart)
        assert len(reading.reads) == reads
        reader.finish(reading)
        for _, offset, buffer, _ in requests:
            assert bytes(buffer) == real_pread(one_file, 10, offset)
    assert reader.stats.bytes == 90
    reader.close()


@pytest.mark.parametrize(
    ("places", "apart"),
    [
        ([(0, 0), (0, 100 + MERGE_GAP_NBYTES)], False),
        ([(0, 0), (0, 101 + MERGE_GAP_NBYTES)], True),
        ([(0, 51 + MERGE_GAP_NBYTES), (0, 0)], True),
        ([(0, 50), (0, 0)], False),
        ([(1, 100), (0, 0)], True),
    ],
)
def test_a_layout_knows_whether_an_experts_tensors_are_apart(places, apart):
    tensors = tuple(TensorSpec("up_proj", f"t{n}", "U8", (n,), n) for n in (100, 50))
    files, offsets = (np.array([[x] for x in xs]) for xs in zip(*places, strict=True))
    assert ExpertLayout("layer", 1, tensors, files, offsets).apart == apart


def test_small_gaps_are_bridged_and_large_ones_are_not(one_file):
    reader = ExpertReader([one_file], threads=0)
    read_and_check(reader, [one_file], [(0, 0, 10), (0, 10 + MERGE_GAP_NBYTES, 10)])
    assert reader.stats.reads == 1
    read_and_check(reader, [one_file], [(0, 0, 10), (0, 11 + MERGE_GAP_NBYTES, 10)])
    assert reader.stats.reads == 3
    reader.close()


def test_merging_never_crosses_files():
    reads = merge([request(0, 90, 10), request(1, 100, 10), request(2, 110, 10)])
    assert [(r.file, r.offset, r.nbytes) for r in reads] == [
        (0, 90, 10),
        (1, 100, 10),
        (2, 110, 10),
    ]


def test_a_merged_read_stays_below_the_bound():
    block = memoryview(bytearray(MERGE_MAX_NBYTES // 4))  # never read into: all may share it
    reads = merge([(0, i * len(block), block, ("",)) for i in range(10)])
    assert [r.nbytes // len(block) for r in reads] == [4, 4, 2]
    too_large = memoryview(bytearray(MERGE_MAX_NBYTES + 1))
    assert len(merge([(0, 0, too_large, ("",)), request(0, len(too_large), 1)])) == 2


@settings(max_examples=80, deadline=None)
@given(places(), st.integers(1, 9000))
def test_merged_reads_cover_every_request_in_its_place(wanted, bound):
    requests = [request(*p) for p in wanted]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_module, "MERGE_MAX_NBYTES", bound)
        reads = merge(requests)
    found = {}
    for r in reads:
        assert sum(map(len, r.buffers)) == r.nbytes
        assert len(r.buffers) <= IOV_MAX
        assert len(r.buffers) == 1 or r.nbytes <= bound
        at = r.offset
        for b in r.buffers:
            found[id(b)] = (r.file, at, len(b))
            at += len(b)
    assert [found[id(r[2])] for r in requests] == [tuple(p) for p in wanted]


def test_many_tiny_requests_pass_no_more_buffers_than_the_system_takes(one_file):
    reader = ExpertReader([one_file], threads=0)
    read_and_check(reader, [one_file], [(0, 2 * i, 1) for i in range(3000)])
    assert 3000 * 2 / IOV_MAX <= reader.stats.reads < 100
    reader.close()


def test_without_threads_no_thread_is_started(one_file):
    before = threading.active_count()
    reader = ExpertReader([one_file], threads=0)
    read_and_check(reader, [one_file], [(0, 10_000 * i, 100) for i in range(10)])
    assert reader.stats.reads == 10
    assert threading.active_count() == before
    reader.close()


def test_several_reads_are_under_way_at_once(monkeypatch, one_file):
    """Each of the three waits for the others, which one thread alone could never end."""
    barrier = threading.Barrier(3)
    preadv = Preadv(monkeypatch, lambda offset: barrier.wait(timeout=20))
    reader = ExpertReader([one_file], threads=2)
    read_and_check(reader, [one_file], [(0, 10_000 * i, 100) for i in range(3)])
    reader.close()
    assert preadv.most == 3


SLOW, QUICK = 2 * SLOW_SECONDS, SLOW_SECONDS / 2


class Alone:
    """How much of its readings a reader does on the caller's thread, by a clock of its own."""

    def __init__(self, monkeypatch, file, threads):
        self.now, self.reader = 0.0, ExpertReader([file], threads)
        monkeypatch.setattr(
            reader_module, "time", types.SimpleNamespace(perf_counter=lambda: self.now)
        )

    def __call__(self, *costs: float) -> int:
        """Reads of so many seconds: how many were done; whether it asked for help must fit."""
        reading = self.reader.reading([request(0, 10_000 * i, 10) for i in range(len(costs))])
        left = list(costs)

        def read_one(read):
            self.now += left.pop(0)

        self.reader._read_one = read_one
        assert self.reader._read_alone(reading) == bool(reading.todo)
        return len(costs) - len(left)


def test_quick_reads_are_done_alone_until_two_are_slow(monkeypatch, one_file):
    alone = Alone(monkeypatch, one_file, threads=1)
    assert alone.reader.slow  # until it is known better
    for _ in range(2):
        assert [alone(QUICK, QUICK) for _ in range(TRY_ALONE_EVERY)] == [0] * 15 + [2]
        assert not alone.reader.slow
        assert alone(QUICK, QUICK, SLOW, QUICK) == 4
        assert not alone.reader.slow  # one of them may be chance
        assert alone(SLOW, QUICK, SLOW, QUICK, QUICK) == 3
        assert alone.reader.slow
        alone.reader._calls = 0


def test_a_read_that_comes_alone_is_done_alone_and_counts(monkeypatch, one_file):
    alone = Alone(monkeypatch, one_file, threads=1)
    assert alone(QUICK) == 1
    assert not alone.reader.slow
    assert alone(SLOW) == 1
    assert alone.reader.slow
    assert alone(SLOW) == 1
    assert alone.reader.slow


def test_without_threads_all_is_done_alone_however_slow(monkeypatch, one_file):
    alone = Alone(monkeypatch, one_file, threads=0)
    for _ in range(2 * TRY_ALONE_EVERY):
        assert alone(SLOW, SLOW, SLOW) == 3
        assert not alone.reader.slow


def test_slow_reads_are_started_early_but_now_and_then_one_is_tried_alone(monkeypatch, one_file):
    alone = Alone(monkeypatch, one_file, threads=1)
    for _ in range(2):
        assert [alone.reader.worth_waking() for _ in range(TRY_ALONE_EVERY)] == [True] * 15 + [
            False
        ]
        assert alone(SLOW, SLOW, SLOW) == 2
    assert alone(SLOW, SLOW) == 0
    alone.reader._calls = TRY_ALONE_EVERY - 1
    assert alone(QUICK, QUICK) == 2
    assert not alone.reader.worth_waking()


def test_time_that_a_read_took_is_counted_as_waited(monkeypatch, one_file):
    alone = Alone(monkeypatch, one_file, threads=0)

    def read_one(read):
        alone.now += 3

    alone.reader._read_one = read_one
    for _ in range(2):
        alone.reader.read([request(0, 0, 10), request(0, 10_000, 10)])
    assert alone.reader.stats.wait_seconds == 12
    assert (alone.reader.stats.requests, alone.reader.stats.bytes) == (4, 40)


def test_the_share_of_the_time_that_goes_into_waiting_is_that_of_late(monkeypatch, one_file):
    alone = Alone(monkeypatch, one_file, threads=0)
    assert alone.reader.waiting == 0

    def read_one(read):
        alone.now += 0.003

    alone.reader._read_one = read_one
    for other, share in ((0.001, 3 / 4), (0.009, 1 / 4), (0, 1), (30, 1), (0.003, 1 / 2)):
        for _ in range(200):
            alone.now += other  # seconds of something else; half a minute is a pause
            alone.reader.read([request(0, 0, 10)])
        assert alone.reader.waiting == pytest.approx(share, abs=0.01)


# ---- errors --------------------------------------------------------------------------------------

far_apart = [(0, 10_000 * i, 100) for i in range(9)]


@pytest.mark.parametrize("io", ["pread", "plain", "direct"])
def test_short_reads_are_continued(monkeypatch, one_file, io):
    reader = open_reader([one_file], io)
    calls = []

    def short(fd, buffers, offset, *flags):
        calls.append(offset)
        left, some = PAGE if io == "direct" else 1 + len(calls) % 7, []
        for b in map(memoryview, buffers):
            some.append(b[:left])
            left -= len(some[-1])
        return real_preadv(fd, some, offset, *flags)

    monkeypatch.setattr(os, "preadv", short)
    size = one_file.fingerprint.size
    wanted = [(0, 0, 30), (0, 33, 1), (0, 34, 2), (0, 40, 100), (0, 50_000, 9000), (0, size - 9, 9)]
    read_and_check(reader, [one_file], wanted)
    reader.close()
    assert len(calls) > reader.stats.reads, "no read came short"


@pytest.mark.parametrize("kind", [ExpertReader, PlainReader])
@pytest.mark.parametrize("threads", [0, 3])
def test_a_failed_read_names_file_and_request_and_leaves_nothing_under_way(
    monkeypatch, one_file, threads, kind
):
    def fail(offset):
        time.sleep(0.002)
        if offset == 40_000:
            raise OSError(errno.EIO, "broken")

    preadv = Preadv(monkeypatch, fail)
    reader = kind([one_file], threads=threads)
    with pytest.raises(ExpertReadError) as caught:
        reader.read([request(*p) for p in far_apart])
    preadv.assert_quiet()
    assert caught.value.errno == errno.EIO
    assert str(one_file.path) in str(caught.value)
    assert "expert at 40000" in str(caught.value)
    assert reader.stats.bytes == 0, "what failed does not count as read"
    preadv.before = lambda offset: None
    read_and_check(reader, [one_file], far_apart)
    reader.close()


def test_no_read_starts_after_a_failure(monkeypatch, one_file):
    def fail(offset):
        raise OSError(errno.EIO, "broken")

    preadv = Preadv(monkeypatch, fail)
    reader = ExpertReader([one_file], threads=0)
    with pytest.raises(ExpertReadError):
        reader.read([request(*p) for p in far_apart])
    assert preadv.calls == 1
    reader.close()


def test_an_error_in_a_merged_read_names_the_request_that_was_hit(monkeypatch, one_file):
    def end_at_150(fd, buffers, offset, *flags):
        n = max(0, 150 - offset)
        return real_preadv(fd, [memoryview(buffers[0])[:n]], offset) if n else 0

    monkeypatch.setattr(os, "preadv", end_at_150)
    reader = ExpertReader([one_file], threads=0)
    with pytest.raises(ExpertReadError, match="expert at 100"):
        reader.read([request(0, 0, 100), request(0, 100, 100)])


def test_what_lies_before_a_direct_read_is_called_by_its_first_request():
    read = merge([request(0, 5000, 10), request(0, 5010, 10)])[0]
    labels = [read.label_at(at) for at in (PAGE, 5000, 5009, 5010, 9000)]
    assert labels == [f"expert at {at}" for at in (5000, 5000, 5000, 5010, 5010)]


@pytest.mark.parametrize("io", ["pread", "direct"])  # mmap: in a process of its own, below
def test_a_truncated_file_is_reported_as_changed(one_file, io):
    reader = open_reader([one_file], io)
    os.truncate(one_file.path, 45_050)
    with pytest.raises(CheckpointChangedError) as caught:
        reader.read([request(*p) for p in far_apart])
    assert str(one_file.path) in str(caught.value)
    reader.close()


@pytest.mark.parametrize("io", ["pread", "plain", "direct"])
def test_a_read_that_ends_early_is_an_error_even_if_the_file_looks_unchanged(
    monkeypatch, one_file, io
):
    reader = open_reader([one_file], io)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset, *flags: 0)
    with pytest.raises(ExpertReadError, match="expert at 7") as caught:
        reader.read([request(0, 7, 10)])
    assert str(one_file.path) in str(caught.value)
    reader.close()


def test_a_direct_read_that_stops_inside_a_page_is_never_taken_for_whole(monkeypatch, one_file):
    reader = open_reader([one_file], "direct")

    def stop(fd, buffers, offset, *flags):
        return real_preadv(fd, [memoryview(buffers[0])[:PAGE]], offset, *flags) - 100

    monkeypatch.setattr(os, "preadv", stop)
    wanted = request(0, PAGE, 3 * PAGE)
    try:
        reader.read([wanted])
    except ExpertReadError:
        return
    assert wanted[2] == real_pread(one_file, 3 * PAGE, PAGE)


@pytest.mark.parametrize("io", IO_MODES)
def test_an_overwritten_file_is_noticed_though_all_bytes_came(one_file, io):
    reader = open_reader([one_file], io)
    with open(one_file.path, "r+b") as f:
        f.seek(50_000)
        f.write(b"!")
    with pytest.raises(CheckpointChangedError) as caught:
        reader.read([request(0, 0, 10)])
    assert str(one_file.path) in str(caught.value)
    reader.close()


def test_a_change_of_another_file_does_not_matter(three_files, tmp_path):
    with make_file(tmp_path / "other", 100) as other:
        reader = ExpertReader([three_files[0], other], threads=0)
        os.truncate(other.path, 10)
        read_and_check(reader, three_files, [(0, 5, 5)])
        reader.close()


def test_read_after_close_is_an_error(one_file):
    reader = ExpertReader([one_file], threads=1)
    reader.close()
    with pytest.raises(ExpertReadError, match="closed"):
        reader.read([request(0, 0, 10)])
    reader.close()


def test_read_after_the_file_was_closed_is_an_error_that_names_it(one_file):
    reader = ExpertReader([one_file], threads=0)
    one_file.close()
    try:
        reader.read([request(0, 0, 10)])
    except SmoeError as e:
        assert str(one_file.path) in str(e)  # noqa: PT017
    else:
        pytest.fail("bytes came from a closed file")


# ---- interruptions -------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 3])
def test_keyboard_interrupt_inside_a_read_of_the_caller(monkeypatch, one_file, threads):
    caller = threading.current_thread()

    def interrupt(offset):
        if threading.current_thread() is caller:
            raise KeyboardInterrupt
        time.sleep(0.01)

    preadv = Preadv(monkeypatch, interrupt)
    reader = ExpertReader([one_file], threads=threads)
    with pytest.raises(KeyboardInterrupt):
        reader.read([request(*p) for p in far_apart])
    preadv.assert_quiet()
    preadv.before = lambda offset: None
    read_and_check(reader, [one_file], far_apart)
    reader.close()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no pthread_kill")
def test_keyboard_interrupt_while_waiting_for_the_threads(monkeypatch, one_file):
    caller = threading.main_thread()
    assert threading.current_thread() is caller, "signals come to the main thread only"
    theirs_began, mine_ended, stages = threading.Event(), threading.Event(), []

    def interrupt(offset):
        if threading.current_thread() is caller:
            theirs_began.wait(20)
            mine_ended.set()
            return
        theirs_began.set()
        mine_ended.wait(20)
        time.sleep(0.05)  # the caller has nothing left to do and waits
        signal.pthread_kill(caller.ident, signal.SIGINT)
        time.sleep(0.05)
        stages.append("the thread's read ended")

    preadv = Preadv(monkeypatch, interrupt)
    reader = ExpertReader([one_file], threads=1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            reader.read([request(0, 0, 10), request(0, 50_000, 10)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert stages == ["the thread's read ended"], "came back while memory was still written"
    preadv.assert_quiet()
    preadv.before = lambda offset: None
    read_and_check(reader, [one_file], far_apart)
    reader.close()


def test_an_interrupt_at_any_line_neither_hangs_nor_leaves_a_read_under_way(monkeypatch, one_file):
    preadv = Preadv(monkeypatch, lambda offset: time.sleep(0.001))
    reader = ExpertReader([one_file], threads=1)
    read_and_check(reader, [one_file], far_apart[:3])  # the thread is there
    for n in range(1, 1000):
        where = []

        def read(n=n, where=where):
            requests = [request(*p) for p in far_apart[:3]]
            where.append(
                interrupt_at_line(n, lambda: reader.read(requests), reader_module.__file__)
            )

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(timeout=2)
        assert where, f"hangs after an interrupt at line {n}"
        preadv.assert_quiet()
        read_and_check(reader, [one_file], far_apart[:3])
        if where == [None]:
            break
    assert n > 20
    reader.close()


def test_a_reading_of_another_process_is_never_finished(one_file):
    reader = ExpertReader([one_file], threads=1)
    reading = reader.reading([request(*p) for p in far_apart])
    reading.pid += 1  # begun by a parent, whose threads are not here
    with pytest.raises(ExpertReadError, match="when the process forked"):
        reader.finish(reading)
    assert reader.stats.reads == 0
    read_and_check(reader, [one_file], far_apart)
    reader.close()


def test_a_read_that_fails_while_it_is_given_up_is_no_error(monkeypatch, one_file):
    begun, end = threading.Event(), threading.Event()

    def fail(*args):
        begun.set()
        end.wait(10)
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "preadv", fail)
    reader = ExpertReader([one_file], threads=1)
    reading = reader.reading([request(*p) for p in far_apart], bet=True)
    reader.start(reading)
    assert begun.wait(10)
    threading.Timer(0.02, end.set).start()
    reader.cancel(reading)
    assert reading.done
    assert isinstance(reading.error, ExpertReadError)
    reader.close()


def test_nothing_is_started_once_a_reader_is_closed(one_file):
    reader = ExpertReader([one_file], threads=1)
    reading = reader.reading([request(*p) for p in far_apart], bet=True)
    reader.close()
    reader.start(reading)
    assert not reading.queued
    with pytest.raises(ExpertReadError, match="this model was closed; load it again"):
        reader.finish(reading)


# ---- past the page cache -------------------------------------------------------------------------


def test_the_page_cache_is_used_unless_something_else_is_asked_for(one_file):
    reader = ExpertReader([one_file])
    assert reader.io == "pread"
    reader.close()


def test_an_unknown_way_of_reading_is_refused_by_name(one_file):
    with pytest.raises(ValueError, match="'carrier pigeon'"):
        ExpertReader([one_file], io="carrier pigeon")


def test_where_direct_is_refused_the_reader_says_so_and_works(monkeypatch, one_file):
    if hasattr(reader_module.fcntl, "F_NOCACHE") or not hasattr(os, "O_DIRECT"):
        pytest.skip("only Linux file systems refuse O_DIRECT")
    real_open = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    reader = ExpertReader([one_file], threads=1, io="direct")
    assert reader.io == "pread"
    read_and_check(reader, [one_file], far_apart)
    reader.close()


def test_where_there_is_f_nocache_direct_reads_have_a_descriptor_of_their_own(
    monkeypatch, one_file
):
    """As on macOS."""
    asked, fds = [], set()

    def preadv(fd, buffers, offset):
        fds.add(fd)
        return real_preadv(fd, buffers, offset)

    monkeypatch.setattr(reader_module.fcntl, "F_NOCACHE", 48, raising=False)
    monkeypatch.setattr(reader_module.fcntl, "fcntl", lambda *args: asked.append(args))
    monkeypatch.setattr(os, "preadv", preadv)
    reader = ExpertReader([one_file], threads=1, io="direct")
    assert reader.io == "direct"
    [(fd, what, on)] = asked
    assert (what, on) == (48, 1)
    assert fd != one_file.fileno(), "other readers of the file would lose the page cache"
    read_and_check(reader, [one_file], far_apart)
    assert fds == {fd}
    reader.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)
    one_file.check_unchanged()  # its own is still open


pieces = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 96, PAGE]),  # gap in the file
        st.sampled_from([0, 0, 1, 512]),  # displacement in memory, from a page boundary
        st.sampled_from([PAGE, 2 * PAGE, 0, 100, PAGE - 1, PAGE + 1]),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([0, PAGE, 2 * PAGE, 5, PAGE - 96]), pieces)
@example(0, [(0, 0, PAGE), (0, 0, 100), (PAGE - 100, 0, PAGE), (0, 1, PAGE)])
@example(5, [(0, 0, PAGE - 5), (0, 0, 2 * PAGE)])
@example(98_304, [(0, 0, 1000), (0, 1, 700)])
def test_direct_reads_fill_aligned_and_other_memory_alike(aligned_reader, at, wanted):
    reader, file = aligned_reader
    with mmap.mmap(-1, 4 * PAGE * len(wanted)) as memory:
        memory[:] = bytes([GUARD]) * len(memory)
        requests = []
        for i, (gap, displacement, nbytes) in enumerate(wanted):
            at += gap
            begin = 4 * PAGE * i + displacement
            view = memoryview(memory)[begin : begin + nbytes]
            requests.append((0, at, view, (f"piece {i}",)))
            at += nbytes
        expected = bytearray([GUARD]) * len(memory)
        for i, (r, (_, displacement, _)) in enumerate(zip(requests, wanted, strict=True)):
            begin = 4 * PAGE * i + displacement
            expected[begin : begin + len(r[2])] = real_pread(file, len(r[2]), r[1])
        reader.read(requests)
        filled = bytes(memory)
        for r in requests:
            r[2].release()
        requests.clear()
    assert filled == expected


@pytest.fixture(scope="module")
def aligned_reader(tmp_path_factory):
    with make_file(tmp_path_factory.mktemp("aligned") / "file", 100_000) as file:
        reader = open_reader([file], "direct", threads=0)
        yield reader, file
        reader.close()


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="O_DIRECT is Linux's")
def test_the_first_direct_read_of_a_thread_may_be_empty(one_file):
    reader = ExpertReader([one_file], threads=0, io="direct")
    thread = threading.Thread(target=lambda: reader.read([request(0, PAGE, 0)]))
    thread.start()
    thread.join()
    assert reader.stats.reads == 1
    reader.close()


def test_direct_reads_of_aligned_memory_are_not_copied(monkeypatch, aligned_reader):
    given_memory = []

    def watch(fd, buffers, offset, *flags):
        given_memory.extend(np.frombuffer(b, np.uint8).ctypes.data for b in buffers)
        return real_preadv(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", watch)
    memory = mmap.mmap(-1, 2 * PAGE)
    aligned_reader[0].read([(0, PAGE, memoryview(memory), ("",))])
    assert given_memory == [np.frombuffer(memory, np.uint8).ctypes.data]


def test_a_direct_reader_reads_the_file_that_was_checked(tmp_path):
    """As in the Hub's cache, the path is a link, which an update points elsewhere."""
    with make_file(tmp_path / "old", 10_000, seed=1), make_file(tmp_path / "new", 10_000, seed=2):
        link = tmp_path / "model.safetensors"
        link.symlink_to(tmp_path / "old")
        with SafetensorsMmap(link) as file:
            link.unlink()
            link.symlink_to(tmp_path / "new")
            try:
                reader = ExpertReader([file], threads=0, io="direct")
            except CheckpointChangedError:
                return
            read_and_check(reader, [file], [(0, 5000, 100)])


# ---- threads and processes -----------------------------------------------------------------------


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t not in before]


def test_threads_are_gone_after_close(one_file):
    before = set(threading.enumerate())
    reader = ExpertReader([one_file], threads=3)
    assert not new_threads(before), "no thread before the first read"
    read_and_check(reader, [one_file], far_apart)
    assert 1 <= len(new_threads(before)) <= 3
    reader.close()
    assert not new_threads(before)


def test_threads_and_descriptors_are_gone_with_the_reader(one_file):
    before = set(threading.enumerate())
    reader = ExpertReader([one_file], threads=3, io="direct")
    descriptors = [f.own_fd for f in reader._files if f.own_fd >= 0]
    read_and_check(reader, [one_file], far_apart)
    assert new_threads(before)
    del reader
    gc.collect()
    assert not new_threads(before)
    for fd in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_threads_are_gone_after_a_failed_read(monkeypatch, one_file):
    def fail(offset):
        raise OSError(errno.EIO, "broken")

    before = set(threading.enumerate())
    Preadv(monkeypatch, fail)
    reader = ExpertReader([one_file], threads=3)
    with pytest.raises(ExpertReadError):
        reader.read([request(*p) for p in far_apart])
    reader.close()
    assert not new_threads(before)


def test_two_readers_of_the_same_files_work_side_by_side(three_files):
    readers = [ExpertReader(three_files, threads=2) for _ in range(2)]
    errors = []

    def work(reader, seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(20):
                wanted = [(int(rng.integers(3)), int(o), 60) for o in rng.integers(0, 29_000, 20)]
                read_and_check(reader, three_files, wanted)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(r, i)) for i, r in enumerate(readers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    readers[0].close()
    read_and_check(readers[1], three_files, [(0, 0, 10), (1, 20_000, 10)])
    readers[1].close()


SCRIPT = """
import os, sys, threading
from smoe_mlx.errors import SmoeError
from smoe_mlx.store.reader import ExpertReader
from smoe_mlx.store.safetensors import SafetensorsMmap

file = SafetensorsMmap(sys.argv[1])
reader = ExpertReader([file], threads=3)

def read_right():
    requests = [(0, 10_000 * i, memoryview(bytearray(100)), ("",)) for i in range(9)]
    reader.read(requests)
    return all(r[2] == os.pread(file.fileno(), 100, r[1]) for r in requests)

def in_child(action):
    child = os.fork()
    if not child:
        os._exit(0 if action() else 1)
    return os.waitpid(child, 0)[1] == 0

assert read_right()
assert in_child(lambda: read_right() and read_right()), "the child read wrong"
assert in_child(lambda: read_right() and threading.active_count() > 1), "the child reads alone"
assert read_right()
assert in_child(lambda: reader.close() is None), "the child could not close"
assert in_child(lambda: read_right() and reader.close() is None), "nor after reading"
assert read_right()

mapped = ExpertReader([file], threads=0, io="mmap")
os.truncate(sys.argv[1], 5000)
def refuses():
    try:
        mapped.read([(0, 90_000, memoryview(bytearray(100)), ("",))])
    except SmoeError:
        return True
assert in_child(refuses), "a mapping of a truncated file was touched: that kills a process"
print("last line")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_children_read_and_an_open_reader_does_not_keep_a_program(one_file):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(one_file.path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "last line\n"), done.stderr


class FakeUploader:
    """Copies in place of a CUDA driver, and takes down who asked."""

    def __init__(self, fail: bool = False):
        self.local, self.fail = threading.local(), fail
        self.uploads, self.nbytes, self.closed = 0, 0, 0

    def pinned(self, nbytes: int) -> memoryview:
        self.local.view = memoryview(bytearray([GUARD]) * nbytes)
        return self.local.view

    def upload(self, pieces) -> None:
        if self.fail:
            raise OSError(errno.EIO, "the GPU is gone")
        self.uploads += 1
        for offset, to in pieces:
            to[:] = self.local.view[offset : offset + len(to)]
            self.nbytes += len(to)

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("how", ["close", "free"])
def test_an_interrupt_while_a_reader_is_closed_comes_when_it_is(monkeypatch, one_file, how):
    """Python would drop it where an object is freed, and leave threads and descriptors behind."""
    assert threading.current_thread() is threading.main_thread(), "signals come to no other"
    before, uploader = set(threading.enumerate()), FakeUploader()
    readers = [ExpertReader([one_file], threads=2, io="direct", uploader=uploader)]
    read_and_check(readers[0], [one_file], far_apart)
    descriptors = [f.own_fd for f in readers[0]._files if f.own_fd >= 0]
    theirs = new_threads(before)
    join, came = threading.Thread.join, []

    def interrupted_once(thread, timeout=None):
        if thread in theirs and not came:
            came.append(thread)
            signal.raise_signal(signal.SIGINT)
        join(thread, timeout)

    def end():
        if how == "close":
            readers[0].close()
        readers.clear()
        time.sleep(20)

    monkeypatch.setattr(threading.Thread, "join", interrupted_once)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            end()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert came
    assert not any(thread.is_alive() for thread in theirs)
    assert uploader.closed == 1
    for fd in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.parametrize("io", IO_MODES)
def test_bytes_reach_buffers_of_a_gpu_by_upload_and_gaps_do_not(three_files, io):
    uploader = FakeUploader()
    reader = ExpertReader(three_files, 2, io, uploader)
    apart = MERGE_GAP_NBYTES // 2
    read_and_check(reader, three_files, [(0, 100, 50), (0, 150 + apart, 60), (1, 0, 7000)])
    assert uploader.uploads == 2  # the first two are one read
    assert uploader.nbytes == 50 + 60 + 7000
    reader.close()
    assert uploader.closed == 1


def test_a_failed_upload_is_a_failed_read(one_file):
    reader = ExpertReader([one_file], 2, uploader=FakeUploader(fail=True))
    with pytest.raises(OSError, match="the GPU is gone"):
        reader.read([request(0, i * 10_000, 100) for i in range(6)])
    reader.close()
