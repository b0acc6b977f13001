"""Disks that really fail: a file system that does so when told to, and block devices.

`test_faults.py` lets the calls of Python fail. Here the system's do, also those of MLX.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from conftest import layouts_of, resident
from failing_fs import FailingFS, cannot_mount, mount
from mlx_lm.generate import generate_step as mlx_generate_step
from mlx_lm.models.cache import KVCache
from test_faults import TOKENS, answer, descriptors, outcome
from test_server import serving, text_of

import smoe_mlx
from smoe_mlx.cache.usage import Usage
from smoe_mlx.forward.decode import MODES
from smoe_mlx.generate import generate_step
from smoe_mlx.hub import find_model
from smoe_mlx.load import load_model
from smoe_mlx.server.session_files import SessionFiles

pytestmark = [pytest.mark.skipif(bool(cannot_mount()), reason=cannot_mount() or "can mount"),
              pytest.mark.timeout(120)]  # fmt: skip


@pytest.fixture
def disk(tiny, tmp_path):
    """A failing disk with a model on it."""
    source = tmp_path / "source"
    shutil.copytree(tiny("qwen3_moe", "affine"), source / "model")
    with FailingFS(source, tmp_path / "disk") as fs:
        yield fs


@pytest.fixture(scope="module")
def expected(tiny):
    reference = resident(tiny("qwen3_moe", "affine"))
    steps = mlx_generate_step(mx.array(TOKENS[:9]), reference, max_tokens=8)
    return [int(t) for t, _ in steps]


def open_model(folder, **options):
    options = {"slots": 0.3, "threads": 2, "debug": True, **options}
    return load_model(folder, config=smoe_mlx.StreamingConfig(**options))[0]


def session():
    """Two caches of 300 tokens, as an entry to be saved."""
    cache = [KVCache(), KVCache()]
    for c in cache:
        rows = mx.random.normal((1, 2, 300, 64), key=mx.random.key(0))
        c.update_and_fetch(rows, rows)
    tokens = np.arange(300)
    return SimpleNamespace(kind="answer", asked=7, grows=True, tokens=tokens, cache=cache)


def same_cache(a, b):
    return all(
        mx.array_equal(x, y).item()
        for c, d in zip(a, b, strict=True)
        for x, y in zip(c.state, d.state, strict=True)
    )


def load_session(files, path):
    try:
        files.load(path)
    except ValueError as e:  # that is: damaged
        raise smoe_mlx.CheckpointError(f"{path}: {e}") from None


def tree(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---- every fault in every phase ------------------------------------------------------------------

READING = ["load", "prefill", *MODES[1:-1], "prewarm", "shatter", "verify", "session load"]
WRITING = ["shatter to", "session", "usage"]
CELLS = [
    *((p, f) for p in READING for f in ("EIO", "end", "short", "slow", "vanish")),
    *((p, f) for p in ("load", "exact", "verify", "shatter") for f in ("EINTR", "EAGAIN")),
    *((p, f) for p in WRITING for f in ("EIO", "ENOSPC", "fsync", "slow", "vanish")),
]
TELLS_NOTHING = {("session", "fsync")}  # a session is not synced: its checksum tells if it is whole


def begin(fault, fs, writes, after):
    """Let the disk fail from the call after `after` on; returns what stops it."""
    operation = "write" if writes else "read"
    if fault == "fsync":
        fs.fail("fsync", "EIO")
    elif fault == "slow":  # for seconds, all in all
        fs.fail(operation, "slow0.7", after=after, times=3)
    elif fault == "vanish":  # while somebody waits for it
        fs.fail(operation, "hang", after=after)

        def unplug():
            end = time.monotonic() + 30
            while fs.count(operation) <= after and time.monotonic() < end:
                time.sleep(0.005)
            fs.vanish()

        thread = threading.Thread(target=unplug)
        thread.start()

        def plug_in_again():
            thread.join()
            fs.start()

        return plug_in_again
    else:  # an interrupted call is made again, for ever if need be
        fs.fail(operation, fault, after=after, times=3 if fault == "EINTR" else -1)
    return fs.heal


@pytest.mark.parametrize(("phase", "fault"), CELLS, ids=["-".join(c) for c in CELLS])
def test_a_failing_disk_is_told_and_forgiven(phase, fault, disk, tmp_path, expected, caplog):
    """A clear error, no deadlock, nothing lost; afterwards all is right, on a disk as it was."""
    here = disk.mountpoint / "model"
    source, vault, writes = here, tmp_path / "vault", phase in WRITING
    if writes or phase == "verify":
        source = shutil.copytree(disk.folder / "model", tmp_path / "plain")
        vault = disk.mountpoint / "vault"
    if phase == "verify":
        smoe_mlx.shatter(source, vault)
    decode = phase if phase in MODES else "exact"
    model = open_model(source, slots=0.9 if phase == "prewarm" else 0.3, decode=decode)
    streaming = model._streaming
    if decode in ("wait", "lag1", "token"):
        streaming.decoding.optimistic.ready(model)
    steps, got = generate_step(mx.array(TOKENS[:9]), model, max_tokens=8), []
    if phase in MODES:
        got.append(next(steps)[0])
    usage = Usage(streaming.cache.layouts, disk.mountpoint / "usage")
    usage.saw([(0, 0)])
    usage.save()
    usage.saw([(1, 1)])
    files = SessionFiles(disk.mountpoint / "sessions", 1 << 30)
    kept = session()
    path = files.save("model", kept)
    before, fds, threads = tree(disk.folder), descriptors(), threading.active_count()
    act = {
        "load": lambda: open_model(here),
        "prefill": lambda: list(generate_step(mx.array(TOKENS), model, max_tokens=1)),
        "prewarm": lambda: smoe_mlx.prewarm(model),
        "shatter": lambda: smoe_mlx.shatter(here, vault),
        "shatter to": lambda: smoe_mlx.shatter(source, vault),
        "verify": lambda: smoe_mlx.verify(vault),
        "session": lambda: files.save("model", session()),
        "session load": lambda: load_session(files, path),
        "usage": usage.save,
    }.get(phase, lambda: got.extend(t for t, _ in steps))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        heal = begin(fault, disk, writes, after=0 if phase in ("session load", "usage") else 2)
        try:
            error = outcome(act)
            if fault != "vanish" and phase in MODES and error is not None:
                again = outcome(lambda: answer(model))  # refused alike
                assert (type(again), again.errno) == (type(error), error.errno)
        finally:
            heal()
    steps.close()

    said = "".join([str(error), caplog.text, *(str(w.message) for w in told)])
    if fault in ("short", "slow", "EINTR") or (phase, fault) in TELLS_NOTHING:
        assert error is None
        assert not told
        assert got in ([], expected)
    else:
        assert str(disk.mountpoint) in said, error
        if phase in ("session", "usage"):
            assert error is None
        else:
            assert isinstance(error, (smoe_mlx.SmoeError, OSError))
    kept_on_disk = tree(disk.folder)
    for name, data in before.items():
        assert name.name == "usage" or kept_on_disk[name] == data
    if phase not in ("shatter to", "session", "usage"):
        assert kept_on_disk.keys() == before.keys()

    if fault == "vanish" and not writes and phase not in ("load", "shatter", "verify"):
        for _ in range(2):  # the files of a disk that is gone
            again = outcome(lambda: answer(model))
            assert isinstance(again, smoe_mlx.ExpertReadError)
            assert str(here) in str(again)
    if fault == "vanish":
        model = open_model(source)
    elif phase == "load":
        assert answer(open_model(source)) == expected
    if phase in ("shatter", "shatter to", "verify"):
        if not vault.exists():
            smoe_mlx.shatter(source, vault)
        assert smoe_mlx.verify(vault, source) > 0
    usage.saw([(1, 1)])
    usage.save()
    again = Usage(streaming.cache.layouts, disk.mountpoint / "usage")
    again.load()
    assert again.weight((1, 1)) > 0
    for path, _ in files.index("model"):
        assert same_cache(files.load(path), kept.cache)
    assert len(list(files.index("model"))) >= 1
    assert answer(model) == answer(model) == expected
    if fault != "vanish":
        del error  # its causes hold frames
        assert descriptors() <= fds
        assert threading.active_count() <= threads + 2  # the reader of this model


# ---- other ways to read, on such a disk ----------------------------------------------------------


@pytest.mark.parametrize("io", ["direct", "mmap"])
def test_other_ways_to_read_fail_alike(io, disk, expected):
    here = disk.mountpoint / "model"
    if io == "mmap":  # without a page cache there is nothing to be mapped
        error = outcome(lambda: open_model(here, io=io))
        assert isinstance(error, OSError)
        assert str(here) in str(error)
        return
    model = open_model(here, io=io)
    for fault in ("EIO", "end"):
        disk.fail("read", fault, after=2)
        error = outcome(lambda: answer(model))
        assert isinstance(error, smoe_mlx.ExpertReadError)
        assert str(here) in str(error)
        disk.heal()
        assert answer(model) == expected


def test_the_command_says_so_in_a_line(disk):
    disk.fail("read", "EIO", after=30)
    command = [sys.executable, "-m", "smoe_mlx", "shatter", disk.mountpoint / "model"]
    out = subprocess.run([*command, disk.folder / "v"], capture_output=True, text=True)
    assert out.returncode
    assert "Traceback" not in out.stderr
    assert str(disk.mountpoint) in out.stderr


def test_a_server_says_so_and_goes_on(disk):
    """A second model on the failing disk: loaded when asked for, then in mid-answer."""
    shutil.copytree(find_model("demo"), disk.folder / "demo")
    body = {"messages": [{"role": "user", "content": "The sea"}], "max_tokens": 8}
    argv = ("one=demo", f"two={disk.mountpoint / 'demo'}", "--slots", "16")
    with serving(*argv) as server:
        want = text_of(server.chat("The sea", model="one"))
        for after in (12, 3):  # of the reads of a load; of those of an answer
            disk.fail("read", "EIO", after=after)
            status, answer = server.post("/v1/chat/completions", {**body, "model": "two"})
            assert status == 500
            assert str(disk.mountpoint) in answer["error"]["message"]
            assert text_of(server.chat("The sea", model="one")) == want
            disk.heal()
            assert text_of(server.chat("The sea", model="two")) == want


# ---- block devices -------------------------------------------------------------------------------


def call(*command):
    out = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    if out.returncode:
        raise OSError(f"{command[0]}: {out.stderr.strip()}")


@contextlib.contextmanager
def mounted(image, folder):
    """A new ext4 in a file, as a block device. `cannot_mount` asked for root, not for all this."""
    with image.open("wb") as f:
        f.truncate(128 << 20)
    folder.mkdir()
    try:
        call("mkfs.ext4", "-q", "-b", 4096, "-O", "^has_journal", image)
        call("mount", "-o", "loop", image, folder)
    except OSError as e:
        pytest.skip(f"no block device can be made here: {e}")
    try:
        yield folder
    finally:
        call("umount", "-l", folder)


def forget_pages(folder):
    """Let what was read come from the device again."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


@pytest.mark.parametrize("io", ["pread", "direct"])
def test_a_block_device_with_bad_blocks(io, tiny, tmp_path, expected):
    """Nothing behind the first 64 KiB of the device can be read any more, then all of it again."""
    image = tmp_path / "image"
    with mounted(image, tmp_path / "disk") as folder:
        here = shutil.copytree(tiny("qwen3_moe", "affine"), folder / "model")
        model = open_model(here, io=io)
        smoe_mlx.shatter(here, folder / "vault")
        model = open_model(here, io=io)
        os.sync()
        forget_pages(folder)
        blocks = image.open("r+b")
        good = blocks.read()
        os.truncate(image, 1 << 16)
        errors = [outcome(lambda: answer(model)) for _ in range(2)]
        others = {
            "load": outcome(lambda: open_model(here)),
            "shatter": outcome(lambda: smoe_mlx.shatter(here, tmp_path / "v")),
            "verify": outcome(lambda: smoe_mlx.verify(folder / "vault")),
        }
        blocks.seek(0)
        blocks.write(good)
        blocks.close()
        for error in errors:
            assert isinstance(error, smoe_mlx.ExpertReadError), error
            assert error.errno == 5
            assert str(here) in str(error)
        for error in others.values():
            assert isinstance(error, OSError)
            assert str(folder) in str(error)
        assert answer(model) == expected
        assert answer(open_model(folder / "vault", io=io)) == expected
        assert smoe_mlx.verify(folder / "vault", here) > 0


@contextlib.contextmanager
def throttled(folder, rate):
    """This process reads from the folder's device at so many bytes a second; what it has read."""
    group = Path("/sys/fs/cgroup/blkio") / f"smoe-{os.getpid()}"
    number = os.stat(folder).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        group.mkdir()
        (group / "blkio.throttle.read_bps_device").write_text(f"{device} {rate}")
    except OSError as e:
        pytest.skip(f"no device can be throttled here (cgroups of the first version): {e}")
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        count = group / "blkio.throttle.io_service_bytes"
        yield lambda: int(count.read_text().partition(f"{device} Read ")[2].split()[0])
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


@pytest.mark.parametrize("io", ["pread", "direct", "mmap"])
def test_a_slow_block_device(io, tiny, tmp_path, expected):
    """Reads wait for tenths of a second each, and are right when they come."""
    with mounted(tmp_path / "image", tmp_path / "disk") as folder:
        here = shutil.copytree(tiny("qwen3_moe", "affine"), folder / "model")
        os.sync()
        forget_pages(folder)
        with throttled(folder, 300_000) as read:
            model = open_model(here, io=io)
            assert answer(model) == expected
            assert read() > 100_000


def test_a_block_device_that_cannot_write(tiny, tmp_path):
    """Writes are taken, and fail at the next sync: what is not on the disk has no name."""
    source, store = tiny("qwen3_moe", "affine"), tmp_path / "store"
    store.mkdir()
    mount("none", str(store), "tmpfs", 0, "size=4m")
    try:
        with mounted(store / "image", tmp_path / "disk") as folder:
            os.sync()
            with contextlib.suppress(OSError), (store / "filler").open("wb") as f:
                while True:
                    f.write(bytes(4096))
            error = outcome(lambda: smoe_mlx.shatter(source, folder / "vault"))
            assert isinstance(error, OSError)
            assert str(folder) in str(error)
            assert not (folder / "vault").exists()
            del error
            (store / "filler").unlink()
            smoe_mlx.shatter(source, folder / "vault")
            forget_pages(folder)
            assert smoe_mlx.verify(folder / "vault", source) > 0
    finally:
        call("umount", "-l", store)


def test_a_full_disk(tiny, tmp_path, caplog, monkeypatch):
    source, folder = tiny("qwen3_moe", "affine"), tmp_path / "disk"
    folder.mkdir()
    mount("none", str(folder), "tmpfs", 0, "size=200k")
    try:
        files = SessionFiles(folder / "sessions", 1 << 30)
        assert files.save("model", session()) is None
        assert str(folder) in caplog.text
        assert not tree(folder)
        with pytest.raises(smoe_mlx.BudgetError, match=str(folder)):
            smoe_mlx.shatter(source, folder / "vault")
        with monkeypatch.context() as patch:  # room that is lost while it is written
            patch.setattr("smoe_mlx.sculptor.shatter._check_room", lambda *args: None)
            error = outcome(lambda: smoe_mlx.shatter(source, folder / "vault"))
        assert isinstance(error, OSError)
        assert str(folder) in str(error)
        assert not (folder / "vault").exists()
        usage = Usage(layouts_of(source), folder / "usage")
        (folder / "filler").write_bytes(bytes(os.statvfs(folder).f_bavail * 4096))
        usage.saw([])
        with pytest.warns(UserWarning, match=str(folder)):
            usage.save()
        assert not (folder / "usage").exists()
        (folder / "filler").unlink()
        mount("none", str(folder), "tmpfs", 32, "size=200m")  # MS_REMOUNT
        smoe_mlx.shatter(source, folder / "vault")
        assert smoe_mlx.verify(folder / "vault", source) > 0
        assert files.save("model", session()) is not None
    finally:
        call("umount", "-l", folder)
