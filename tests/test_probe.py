"""The disk probe: whole records of the largest kind, and what follows from how long they took."""

import ctypes
import itertools
import threading
from types import SimpleNamespace

import pytest
from test_cache import Model

from smoe_mlx.errors import CheckpointChangedError
from smoe_mlx.store import probe
from smoe_mlx.store.probe import DiskProbe, probe_disk
from smoe_mlx.store.reader import PAGE, ExpertReader

RECORD = 66  # bytes of an expert of layers 0 and 1; those of layer 2 are smaller


@pytest.fixture
def model(tmp_path):
    model = Model(tmp_path)
    yield model
    model.reader.close()
    model.checkpoint.close()


@pytest.fixture
def batches(monkeypatch):
    """The requests of each read of a probe."""
    batches = []

    class Reader(ExpertReader):
        def read(self, requests):
            super().read(requests)
            batches.append([(r, bytes(r[2])) for r in requests])

    monkeypatch.setattr(probe, "ExpertReader", Reader)
    return batches


def probed(model, times=None, seconds=0, **options) -> DiskProbe:
    clock = iter(times or itertools.count()).__next__
    return probe_disk(
        model.checkpoint.files, model.layouts, seconds=seconds, clock=clock, **options
    )


def test_records_are_read_whole_each_into_pages_of_its_own(model, batches):
    probed(model, threads=3, io="pread")
    assert [len(b) for b in batches] == [12, 12, 2, 2]  # two tensors a record
    wanted = {
        tuple(a[e].tobytes() for a in model.truth[layer].values())
        for layer in (0, 1)
        for e in range(len(model.truth[layer]["up_proj", "weight"]))
    }
    seen = set()
    for batch in batches:
        seen |= set(zip(*[iter(data for _, data in batch)] * 2, strict=True))
        pages = {ctypes.addressof(ctypes.c_char.from_buffer(r[2])) for r, _ in batch}
        assert len(pages) == len(batch)
        assert all(p % PAGE == 0 for p in pages)
    assert seen <= wanted
    assert len(seen) > 3
    assert batches[0][0][0][3][0] == "up_proj.weight"  # what an error would name


def test_rate_and_latency_follow_from_the_times(model, batches):
    # A batch of 6 records takes 2 s, single ones 0.5 and 1 s.
    found = probed(model, [0, 2, 10, 10.5, 20, 21], threads=3, io="pread")
    assert found.bytes_per_second == 6 * RECORD / 2
    assert (found.record_nbytes, found.io) == (RECORD, "pread")
    assert found.latency_seconds == pytest.approx(0.75 - 2 / 6)
    assert probed(model, [0, 2, 10, 10.1, 20, 20.1], threads=3).latency_seconds == 0


def test_it_goes_on_for_as_long_as_it_is_told(model, batches, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found = probed(model, threads=1, seconds=2.5)
    assert [len(b) // 2 for b in batches] == [2] + 3 * [2, 1, 1]
    assert found.bytes_per_second == 2 * RECORD


def test_batches_fit_into_the_memory_that_is_set_aside(model, batches, monkeypatch):
    monkeypatch.setattr(probe, "MEMORY_NBYTES", 5 * 2 * PAGE)
    probed(model, threads=3)
    monkeypatch.setattr(probe, "MEMORY_NBYTES", 1)
    probed(model, threads=3)
    monkeypatch.undo()
    assert [len(b) // 2 for b in batches] == [5, 5, 1, 1, 1, 1, 1, 1]


def test_without_threads_it_takes_as_many_as_are_usual(model, batches):
    probed(model, threads=0)
    assert len(batches[0]) // 2 == 16


def test_a_probe_that_fails_leaves_no_threads(model):
    before = threading.enumerate()
    model.checkpoint.files[0].close()
    with pytest.raises(CheckpointChangedError):
        probed(model, threads=2, io="pread")
    assert threading.enumerate() == before


def test_a_probe_says_how_it_read():
    assert str(DiskProbe(7.5e9, 2_500_000, "direct")) == (
        "7.50 GB/s (records of 2,500 kB, direct reads)"
    )
    assert str(DiskProbe(7.5e8, 70_000, "pread")) == (
        "0.75 GB/s (records of 70 kB, no direct reads here: the page cache)"
    )
