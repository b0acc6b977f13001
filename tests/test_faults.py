"""Disks fail and files change under a running model. Nothing wrong is ever computed, the error says
where it happened, and the model goes on once the cause is gone."""

import errno
import gc
import itertools
import os
import shutil
import threading
import time
import warnings
from pathlib import Path

import mlx.core as mx
import pytest
from conftest import interrupt_at_line, random_tokens, resident, same_bits
from mlx_lm.generate import generate_step as mlx_generate_step

import smoe_mlx
from smoe_mlx.cache.bank import SlotBank
from smoe_mlx.cache.usage import Usage
from smoe_mlx.forward.decode import MODES
from smoe_mlx.generate import generate_step
from smoe_mlx.load import load_model
from smoe_mlx.store.vault import VAULT_FILE

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


def test_nan_is_an_error_and_no_text(folder):
    """Weights that are damaged, or overflow their type: no endless token 0."""
    for slots in (0.3, 1.0):
        model, _ = load_model(folder, config=smoe_mlx.StreamingConfig(slots=slots))
        steps = generate_step(mx.array(TOKENS[:5]), model, max_tokens=9)
        next(steps)
        model.model.norm.weight = model.model.norm.weight * mx.nan
        with pytest.raises(smoe_mlx.NotFiniteError, match="NaN"):
            list(steps)


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


def test_a_thread_may_take_over_from_one_that_ended_though_layers_were_complete(folder):
    """What the first one left to be counted cannot be looked at any more, and that is all."""
    model, _ = load_model(folder, config=smoe_mlx.StreamingConfig(slots=15, debug=True))
    cache = model._streaming.cache
    for token in TOKENS:
        for layer, experts in ((0, range(7)), (1, range(8))):
            with cache.lock:
                cache.claim(layer, experts)
        thread = threading.Thread(target=model, args=(mx.array([[token]]),))
        thread.start()
        thread.join()
        if cache._unread:  # the token missed nothing in the first layer
            break
    assert cache._unread
    for tokens in (TOKENS[:1], TOKENS):
        assert same_bits(forward(model, tokens), forward(resident(folder), tokens))


@pytest.mark.parametrize("mode", ["exact", "wait", "lag1", "token"])
def test_ctrl_c_anywhere_in_a_generation_beside_another_model(mode, folder, expected, slow_disk):
    """The next one is right, and so is that of a second model in the same process."""
    config = smoe_mlx.StreamingConfig(slots=0.4, threads=2, decode=mode)
    model, other = (load_model(folder, config=config)[0] for _ in range(2))
    came, n = True, 7
    while came:
        came = interrupt_at_line(n, lambda: answer(model), str(Path(smoe_mlx.__file__).parent))
        steps = generate_step(mx.array(TOKENS[:9]), other, max_tokens=8)
        got = [next(steps)[0]]
        assert answer(model) == expected, n
        assert got + [t for t, _ in steps] == expected
        for m in (model, other):
            m._streaming.cache.check()
        n = 1 + n * 5 // 4  # the set-up of a model is long, and comes first
    assert n > 1000


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[malloc] no room")], ids=repr)
def test_no_memory_for_slots(folder, expected, monkeypatch, error):
    """Wherever it is missing: the same error, and the right answer when there is some again."""
    calls, allocate = itertools.count(), SlotBank._allocate

    def failing(*args):
        if next(calls) == n:
            raise error
        return allocate(*args)

    monkeypatch.setattr(SlotBank, "_allocate", failing)
    n, config = -1, smoe_mlx.StreamingConfig(slots=0.3, debug=True)
    for act in (answer, lambda model: smoe_mlx.resize(model, slots=0.6)):
        for n in itertools.count():
            model = load_model(folder, config=config)[0]
            if act is not answer:
                calls = itertools.count(n + 1)
                answer(model)
            calls = itertools.count()
            if outcome(lambda: act(model)) is not error:  # noqa: B023
                break
            assert answer(model) == answer(model) == expected
            model._streaming.cache.check()
        assert n > 1
        assert answer(model) == expected


# ---- every fault in every phase ------------------------------------------------------------------

PHASES = ["load", "prefill", *MODES[1:], "prewarm", "shatter", "verify", "usage"]
FAULTS = ["EIO", "EAGAIN", "MemoryError", "interrupt", "short", "slow", "truncated", "replaced",
          "unlinked", "no descriptors", "no threads"]  # fmt: skip
GOES_ON = {"short", "slow"}  # whatever was asked for is done all the same
CHANGES = {"truncated", "replaced", "unlinked"}
# What is not read or opened cannot fail; a replaced file is a good one to whoever opens it then.
UNTOUCHED = {
    *((phase, "replaced") for phase in ("load", "shatter", "verify")),
    *((phase, "no descriptors") for phase in ("prefill", *MODES[1:], "prewarm")),
    *((phase, "no threads") for phase in PHASES if phase != "shatter"),
}


def inject(fault, path, monkeypatch):
    """Let the disk, or what else is needed, fail from here on."""
    main = threading.main_thread()

    def failing(call):
        def fail(fd, data, offset, *flags):
            if fault in ("EIO", "EAGAIN"):
                code = getattr(errno, fault)
                raise OSError(code, os.strerror(code))
            if fault == "MemoryError":
                raise MemoryError
            if fault == "interrupt" and threading.current_thread() is main:
                raise KeyboardInterrupt
            if fault == "slow":
                time.sleep(0.0005)
            if fault == "short":
                if isinstance(data, int):
                    data = min(data, 1000)
                elif isinstance(data, list):
                    data = [memoryview(data[0])[:1000]]
                else:
                    data = memoryview(data)[:1000]
            return call(fd, data, offset, *flags)

        return fail

    if fault == "truncated":
        os.truncate(path, path.stat().st_size // 8)
    elif fault == "replaced":
        shutil.copy(path, path.with_name("new"))
        os.replace(path.with_name("new"), path)
    elif fault == "unlinked":
        path.unlink()
    elif fault == "no descriptors":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    elif fault == "no threads":

        def start(thread):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)
    else:
        for name in ("preadv", "pread", "pwrite"):
            monkeypatch.setattr(os, name, failing(getattr(os, name)))
    return lambda: None


def answer(model):
    return [t for t, _ in generate_step(mx.array(TOKENS[:9]), model, max_tokens=8)]


@pytest.fixture(scope="module")
def expected(tiny):
    steps = mlx_generate_step(mx.array(TOKENS[:9]), resident(tiny("qwen3_moe", "affine")))
    return [int(t) for t, _ in itertools.islice(steps, 8)]


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/dev/fd"))


def outcome(act):
    """What `act` raised, or None."""
    try:
        act()
    except (smoe_mlx.SmoeError, OSError, MemoryError, RuntimeError, KeyboardInterrupt) as e:
        return e.with_traceback(None)
    return None


CELLS = [
    (phase, fault)
    for phase in PHASES
    for fault in FAULTS
    if (fault != "EAGAIN" or phase in ("load", "exact", "shatter"))  # elsewhere as EIO
    and (fault != "slow" or phase in ("prefill", "prewarm", *MODES))
    and (fault == "no descriptors" or phase != "usage")
    and (fault == "EIO" or phase != "lossy")
    and (fault not in ("truncated", "unlinked") or phase not in ("lag1", "token"))  # as replaced
]


@pytest.mark.parametrize(("phase", "fault"), CELLS, ids=map("-".join, CELLS))
def test_a_fault_in_any_phase_is_told_and_passes(
    phase, fault, folder, tmp_path, expected, monkeypatch
):
    """A clear error, no deadlock, nothing lost; the next request is right, or refused alike."""
    path, dst = folder / "model.safetensors", tmp_path / "vault"
    if phase == "verify":
        smoe_mlx.shatter(folder, dst)
        path = dst / VAULT_FILE
    good = path.read_bytes()
    config = smoe_mlx.StreamingConfig(
        slots=0.9 if phase == "prewarm" else 0.3, debug=True,
        threads=0 if fault == "interrupt" else 2,  # or they may leave nothing to the main thread
        decode=phase if phase in MODES else "exact",
    )  # fmt: skip
    model = load_model(folder, config=config)[0]
    streaming = model._streaming
    usage = streaming.cache.usage = Usage(streaming.cache.layouts)
    if phase in ("wait", "lag1", "token"):
        streaming.decoding.optimistic.ready(model)
    steps, got = generate_step(mx.array(TOKENS[:9]), model, max_tokens=8), []
    if phase in MODES or phase == "usage":
        got.append(next(steps)[0])
    if phase == "usage":
        usage.path = tmp_path / "usage"
        usage.saw([(0, 0)])
    files, fds = sorted(tmp_path.rglob("*")), descriptors()
    act = {
        "load": lambda: load_model(folder, config=config),
        "prefill": lambda: list(generate_step(mx.array(TOKENS), model, max_tokens=1)),
        "prewarm": lambda: smoe_mlx.prewarm(model),
        "shatter": lambda: smoe_mlx.shatter(folder, dst),
        "verify": lambda: smoe_mlx.verify(dst),
        "usage": usage.save,
    }.get(phase, lambda: got.extend(t for t, _ in steps))

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        heal = inject(fault, path, patch)
        try:
            error = outcome(act)
        finally:
            heal()
        if fault in CHANGES and phase not in ("load", "shatter", "verify", "usage"):
            for _ in range(2):
                again = outcome(lambda: answer(model))
                assert type(again) is smoe_mlx.CheckpointChangedError
                assert str(path) in str(again)
    steps.close()

    if fault in GOES_ON or (phase, fault) in UNTOUCHED:
        assert error is None
        if phase in MODES[1:-1]:
            assert got == expected
    elif phase == "usage":
        assert error is None
        assert "usage: cannot be written" in str(told[0].message)
    elif fault in ("MemoryError", "interrupt"):
        assert type(error).__name__ in ("MemoryError", "KeyboardInterrupt")
    elif fault == "no threads":
        assert "thread" in str(error)
    else:
        assert isinstance(error, (smoe_mlx.SmoeError, OSError))
        assert str(tmp_path) in str(error)
    if phase not in ("shatter", "usage") and fault not in CHANGES:
        assert sorted(tmp_path.rglob("*")) == files
    if fault in CHANGES:
        path.write_bytes(good)
    if fault not in CHANGES or phase in ("shatter", "verify", "usage", "load"):
        assert descriptors() <= fds
    if phase == "usage":
        usage.saw([(0, 0)])
        usage.save()
        assert (tmp_path / "usage").exists()
        assert not list(tmp_path.glob("*.part"))
    if phase in ("shatter", "verify"):
        if not dst.exists():
            smoe_mlx.shatter(folder, dst)
        assert smoe_mlx.verify(dst, folder) > 0
    if phase == "load" or fault in CHANGES:
        model = load_model(folder, config=config)[0]
    if phase != "lossy":
        assert answer(model) == answer(model) == expected
