"""The short form of benchmarks/soak.py, and that it can tell."""

import importlib.util
import os
from pathlib import Path

import pytest

from smoe_mlx.cache.experts import SharedExpertCache


@pytest.fixture
def soak():
    path = Path(__file__).parents[1] / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_mixed_requests_leave_nothing_behind(soak):
    report = soak.soak(rounds=2, requests=4, seed=5)
    assert report.compared > 20
    assert report.requests["finished"]
    assert report.requests["failed"]
    assert report.evictions
    assert report.resizes


def test_a_leak_and_a_wrong_expert_are_noticed(soak, monkeypatch):
    kept, load = [], soak.smoe_mlx.load

    def leak(*args, **kwargs):
        kept.append(os.open(os.devnull, os.O_RDONLY))
        return load(*args, **kwargs)

    monkeypatch.setattr(soak.smoe_mlx, "load", leak)
    with pytest.raises(SystemExit, match="descriptors"):
        soak.soak(rounds=3, requests=1)
    for fd in kept:
        os.close(fd)
    monkeypatch.undo()
    enter = SharedExpertCache._enter

    def wrong(self, bank, layer, expert, slot):
        enter(self, bank, layer, expert, slot)
        for row in self._memory(bank).rows(slot):
            row[:] = bytes(len(row))

    monkeypatch.setattr(SharedExpertCache, "_enter", wrong)
    with pytest.raises(SystemExit, match="not mlx-lm's tokens"):
        soak.soak(rounds=9, requests=5, seed=5)
