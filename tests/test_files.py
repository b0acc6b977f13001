"""Small files: read whole within a bound, replaced only when whole, kept where they belong."""

import errno
import json
import os
import sys
from pathlib import Path

import pytest

from smoe_mlx.store import files
from smoe_mlx.store.files import (
    OpenFile,
    cache_folder,
    is_size,
    no_duplicate_names,
    read_json,
    write_json,
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    with OpenFile(path) as f:
        yield f


def test_short_reads_are_continued(file, monkeypatch):
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: real(fd, min(n, 7), offset))
    assert file.pread(30, 5) == bytes(range(5, 35))
    assert file.pread(0, 5) == b""
    assert file.pread(30, 90) == bytes(range(90, 100))  # fewer only where the file ends
    assert file.pread(30, 100) == b""


def test_nothing_more_is_read_than_was_asked_for(file, monkeypatch):
    asked, real = [], os.pread

    def pread(fd, n, offset):
        asked.append((n, offset))
        return real(fd, n, offset)

    monkeypatch.setattr(os, "pread", pread)
    file.pread(30, 5)
    assert asked == [(30, 5)]


def test_an_error_of_a_read_names_the_file(file, monkeypatch):
    def fail(*args):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(OSError, match="broken") as e:
        file.pread(30, 5)
    assert (e.value.errno, e.value.filename) == (errno.EIO, str(file.path))


def test_json_is_read_up_to_its_bound(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"a": 1}')
    assert read_json(path, 8) == {"a": 1}
    with pytest.raises(ValueError, match="larger than 7 bytes"):
        read_json(path, 7)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(path, 1 << 20)


def test_json_is_on_the_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    path, seen = tmp_path / "x.json", []
    path.write_text("old")
    real_sync, real_replace = os.fsync, Path.replace

    def fsync(fd):
        seen.append(("fsync", os.fstat(fd).st_size, path.read_text()))
        real_sync(fd)

    def replace(self, to):
        seen.append(("replace", to))
        return real_replace(self, to)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_json(path, [1, 2])
    assert seen == [("fsync", len("[1, 2]"), "old"), ("replace", path)]
    assert json.loads(path.read_text()) == [1, 2]


@pytest.mark.parametrize("left", ["file", "link"])
def test_what_lies_where_json_is_written_first_is_removed_not_written_to(tmp_path, left):
    path, other = tmp_path / "x.json", tmp_path / "other"
    other.write_text("untouched")
    part = path.with_name(f"x.json.{os.getpid()}.part")
    if left == "link":
        part.symlink_to(other)
    else:
        part.write_text("left over, and longer than what is written now")
    write_json(path, [])
    assert path.read_text() == "[]"
    assert not path.is_symlink()
    assert other.read_text() == "untouched"
    assert sorted(tmp_path.iterdir()) == [other, path]


def test_json_that_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_json(path, [object()])
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_small_things_are_kept_where_the_system_keeps_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for platform, place in (("linux", ".cache"), ("darwin", "Library/Caches")):
        monkeypatch.setattr(sys, "platform", platform)
        assert cache_folder() == tmp_path / place / "smoe-mlx"
        assert cache_folder().is_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "smoe-mlx"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_folder() == tmp_path / "file" / "smoe-mlx"  # whoever writes there will say so


def test_a_name_that_comes_twice_is_refused():
    assert no_duplicate_names([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="'a' is named twice"):
        no_duplicate_names([("a", 1), ("b", 2), ("a", 1)])


def test_sizes_are_whole_numbers_that_a_file_may_have():
    assert all(map(is_size, [0, 1, 2**63 - 1]))
    assert not any(map(is_size, [-1, 2**63, True, False, 1.0, "1", None, [1]]))


def lowest_descriptor() -> int:
    fd = os.open(os.devnull, os.O_RDONLY)
    os.close(fd)
    return fd


def test_an_interrupt_after_any_call_of_the_system_loses_no_descriptor(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    lowest = lowest_descriptor()
    for n in range(1, 100):
        calls = 0

        def interrupt(frame, event, arg, n=n):
            nonlocal calls
            if event == "c_return" and frame.f_code.co_filename == files.__file__:
                calls += 1
                if calls == n:
                    raise KeyboardInterrupt  # ends the profiling as well

        sys.setprofile(interrupt)
        try:
            with OpenFile(path) as file:
                file.pread(1, 0)
                file.check_unchanged()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        file = None
        assert lowest_descriptor() == lowest
        if calls < n:
            break
    assert n > 5
