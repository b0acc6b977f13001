"""Disks fail and files change under a running model. Nothing wrong is ever computed, the error says
where it happened, and the model goes on once the cause is gone."""

import os
import shutil
import threading

import mlx.core as mx
import pytest
from conftest import random_tokens, resident, same_bits

import smoe_mlx
from smoe_mlx.load import load_model

TOKENS = random_tokens(70)


@pytest.fixture
def folder(tiny, tmp_path):
    return shutil.copytree(tiny("qwen3_moe", "affine"), tmp_path / "model")


@pytest.fixture(params=[0.3, 1.0], ids=["evicting", "all in slots"])
def model(folder, request):
    config = smoe_mlx.StreamingConfig(slots=request.param, threads=2, debug=True)
    return load_model(folder, config=config)[0]


def forward(model, tokens=TOKENS):
    y = model(mx.array([tokens]))
    mx.eval(y)
    return y


class Preadv:
    """os.preadv that fails when told to."""

    def __init__(self, monkeypatch):
        self.real, self.fail = os.preadv, None
        self.calls = 0
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd, buffers, offset, *flags):
        self.calls += 1
        if self.fail is not None and (out := self.fail(self.calls)) is not None:
            if isinstance(out, BaseException):
                raise out
            return out
        return self.real(fd, buffers, offset, *flags)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_read_error_names_the_expert_and_leaves_the_model_usable(model, folder, monkeypatch, at):
    expected = forward(resident(folder))
    disk = Preadv(monkeypatch)
    disk.fail = lambda n: OSError(5, "Input/output error") if n >= at else None
    for _ in range(2):  # it says the same again
        with pytest.raises(smoe_mlx.ExpertReadError) as e:
            forward(model)
        assert "model.safetensors" in str(e.value)
        assert "expert" in str(e.value)
        assert "model.layers." in str(e.value)
        assert e.value.errno == 5
        at = 0
    disk.fail = None
    assert same_bits(expected, forward(model))
    assert same_bits(expected, forward(model))


def test_one_failed_read_among_many(model, folder, monkeypatch):
    """Every single read of a forward fails once, each time in a fresh forward."""
    expected = forward(resident(folder))
    disk, failures = Preadv(monkeypatch), 0
    for at in range(1, 200):
        start = disk.calls
        disk.fail = lambda n, at=at, start=start: OSError(5, "EIO") if n == start + at else None
        try:
            y = forward(model)
        except smoe_mlx.ExpertReadError:
            failures += 1
        else:
            assert same_bits(expected, y)
            if disk.calls - start < at:
                break
    assert failures > 5


def test_a_file_that_ends_early(model, folder):
    path = folder / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size // 8)
    for _ in range(2):
        with pytest.raises((smoe_mlx.ExpertReadError, smoe_mlx.CheckpointChangedError)) as e:
            forward(model)
        assert str(path) in str(e.value)


@pytest.mark.parametrize("how", ["overwritten", "replaced", "removed"])
def test_a_file_that_changes_under_the_model(model, folder, how):
    path = folder / "model.safetensors"
    if how == "overwritten":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        with path.open("r+b") as f:
            f.write(data)
        os.utime(path, ns=(1, 1))
    elif how == "replaced":
        new = folder / "new"
        shutil.copy(path, new)
        os.replace(new, path)
    else:
        path.unlink()
    for _ in range(2):
        with pytest.raises(smoe_mlx.CheckpointChangedError) as e:
            forward(model)
        assert str(path) in str(e.value)


def test_short_reads_and_interrupted_calls_are_gone_on_with(model, folder, monkeypatch):
    expected = forward(resident(folder))
    disk = Preadv(monkeypatch)
    real = disk.real

    def some_bytes(fd, buffers, offset, *flags):
        return real(fd, [memoryview(buffers[0])[:100]], offset)

    monkeypatch.setattr(os, "preadv", some_bytes)
    assert same_bits(expected, forward(model))


def test_ctrl_c_during_a_read(model, folder, monkeypatch):
    expected = forward(resident(folder))
    disk = Preadv(monkeypatch)
    main = threading.main_thread()
    disk.fail = lambda n: (
        KeyboardInterrupt() if threading.current_thread() is main and n > 3 else None
    )
    with pytest.raises(KeyboardInterrupt):
        forward(model)
    disk.fail = None
    assert same_bits(expected, forward(model))


def test_an_error_in_mid_generation(folder, monkeypatch):
    config = smoe_mlx.StreamingConfig(slots=0.2, threads=2, debug=True)
    model, _ = load_model(folder, config=config)
    from smoe_mlx.generate import generate_step

    prompt = mx.array(TOKENS[:10])
    expected = [t for t, _ in generate_step(prompt, model, max_tokens=12)]
    disk = Preadv(monkeypatch)
    steps = generate_step(prompt, model, max_tokens=12)
    got = [next(steps)[0] for _ in range(4)]
    disk.fail = lambda n: OSError(5, "EIO")
    with pytest.raises(smoe_mlx.ExpertReadError):
        got.extend(t for t, _ in steps)
    disk.fail = None
    assert got == expected[: len(got)]
    assert [t for t, _ in generate_step(prompt, model, max_tokens=12)] == expected


def test_an_interleaved_forward_never_sees_rewritten_slots(folder):
    """Two lazy forwards, the second evaluated first: the first must still see its own experts."""
    config = smoe_mlx.StreamingConfig(slots=0.2, threads=2, debug=True)
    model, _ = load_model(folder, config=config)
    reference = resident(folder)
    a, b = mx.array([TOKENS[:2]]), mx.array([TOKENS[40:42]])
    lazy_a = model(a)
    lazy_b = model(b)
    mx.eval(lazy_b)
    mx.eval(lazy_a)
    assert same_bits(lazy_a, reference(a))
    assert same_bits(lazy_b, reference(b))


def test_another_thread_may_take_over(folder):
    """Also when the first one left outputs unevaluated, and evaluates them afterwards."""
    config = smoe_mlx.StreamingConfig(slots=0.2, threads=2, debug=True)
    model, _ = load_model(folder, config=config)
    reference = resident(folder)
    a, b = mx.array([TOKENS[:2]]), TOKENS[40:43]
    lazy_a = model(a)
    out = {}
    thread = threading.Thread(target=lambda: out.update(y=forward(model, b)))
    thread.start()
    thread.join()
    assert same_bits(out["y"], forward(reference, b))
    mx.eval(lazy_a)
    assert same_bits(lazy_a, reference(a))
    assert same_bits(forward(model), forward(reference))
