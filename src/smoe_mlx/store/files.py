"""An open file that notices when it is no longer the one that was opened."""

import contextlib
import errno
import glob
import io
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeGuard, TypeVar

from ..errors import CheckpointChangedError, CheckpointError, SmoeError

T = TypeVar("T")
MOST_KNOWN_NBYTES, MOST_KNOWN = 1 << 20, 512


@dataclass(frozen=True)
class Fingerprint:
    """What tells one state of a file from another."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, now: os.stat_result) -> "Fingerprint":
        return cls(now.st_size, now.st_mtime_ns)


class OpenFile:
    """A file opened for reading. Close it with `close()` or use it as a context manager."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        if not stat.S_ISREG(os.stat(self.path).st_mode):  # opening a pipe would wait for ever
            raise CheckpointError(f"{self.path} is not a file.")
        self._file = io.FileIO(self.path)  # an interrupt loses no descriptor that has an owner
        self._fd = self._file.fileno()
        self.fingerprint = Fingerprint.of(os.fstat(self._fd))

    def fileno(self) -> int:
        """The descriptor of the open file."""
        return self._fd

    def pread(self, nbytes: int, offset: int) -> bytes:
        """`nbytes` bytes at `offset`, fewer only where the file ends. An OSError names the file."""
        data = b""
        with naming(self.path):
            while len(data) < nbytes:
                more = os.pread(self._fd, nbytes - len(data), offset + len(data))
                if not more:
                    break
                data = data + more if data else more
        return data

    def check_unchanged(self) -> None:
        """Raise `CheckpointChangedError` if the file is not the one that was opened.

        An OSError names the file: its disk is gone.
        """
        if self._fd < 0:
            raise CheckpointChangedError(f"{self.path} was closed. Load the model again.")
        try:
            now = os.fstat(self._fd)
        except OSError:
            with naming(self.path):
                raise
        if now.st_nlink == 0:
            raise CheckpointChangedError(
                f"{self.path} was removed or replaced after it was loaded. Load the model again."
            )
        then = self.fingerprint
        if now.st_size != then.size or now.st_mtime_ns != then.mtime_ns:
            raise CheckpointChangedError(
                f"{self.path} was changed after it was loaded. Load the model again."
            )

    def close(self) -> None:
        """Close the file."""
        self._fd = -1
        with contextlib.suppress(OSError):  # of a disk that is gone; nothing was written
            self._file.close()  # once, whatever the system says: the number is reused

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def check_links(folder: str | os.PathLike[str]) -> None:
    """Refuse a model's folder with a link out of it: a stranger's could name any file of yours.

    The folder itself may be a link. A Hub download consists of links into the `blobs` of its own
    repository, and these are allowed.

    Raises:
        CheckpointError: naming the link and its target.
    """
    root = os.path.realpath(folder)
    snapshots = os.path.dirname(root)  # <cache>/models--<owner>--<name>/snapshots/<revision>
    repository = os.path.dirname(snapshots)
    is_hub = os.path.basename(snapshots) == "snapshots"
    is_hub = is_hub and os.path.basename(repository).startswith("models--")
    blobs = os.path.join(repository, "blobs")
    # The second is the one folder below that is read, by transformers.
    for path in (*Path(folder).iterdir(), *Path(folder).glob("additional_chat_templates/*")):
        if not path.is_symlink():
            continue
        target = os.path.realpath(path)
        if is_hub and os.path.dirname(target) == blobs:
            continue
        if os.path.commonpath([root, target]) != root:
            raise CheckpointError(
                f"{path} is a link to {target}, which is outside of its folder. Copy that file "
                "into the folder, or link the whole folder."
            )


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let an OSError that names no file, and MLX's errors of writing, say which one it was."""
    try:
        yield
    except OSError as e:
        if e.filename is not None or isinstance(e, SmoeError):
            raise
        raise OSError(e.errno, e.strerror, os.fspath(path)) from e
    except RuntimeError as e:
        if not str(e).startswith(("[write]", "[save")):
            raise
        raise OSError(errno.EIO, str(e), os.fspath(path)) from e


@contextlib.contextmanager
def mlx_reads(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let MLX's errors of reading be OSErrors that say where the files are."""
    try:
        yield
    except RuntimeError as e:
        if not str(e).startswith(("[read]", "[load")):
            raise
        raise OSError(errno.EIO, str(e), os.fspath(path)) from e


def read_json(path: str | os.PathLike[str], most: int) -> Any:
    """What a JSON file from a stranger holds.

    Raises:
        ValueError: it is no JSON, or larger than `most` bytes.
        OSError, CheckpointError: it cannot be read, or is no file.
    """
    with OpenFile(path) as f:
        data = f.pread(min(most, f.fingerprint.size) + 1, 0)  # so much is allocated
    if len(data) > most:
        raise ValueError(f"larger than {most} bytes")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write; it takes the place of the one of this name when it is whole, and on disk."""
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    for other in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        if not _is_running(other.name.split(".")[-2]):  # it was killed
            with contextlib.suppress(OSError):
                other.unlink()
    try:
        part.unlink(missing_ok=True)  # left over, or a link that a stranger put there
        with part.open("xb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _is_running(pid: str) -> bool:
    """Whether there is such a process; True for what is no process number."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except (ValueError, OSError):
        pass
    return True


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file; one of this name is replaced when the new one is whole. Raises OSError."""
    with replacing(path) as f:
        f.write(json.dumps(document).encode())


def cache_folder() -> Path:
    """Where small things are kept from run to run; made if it can be."""
    root = os.environ.get("XDG_CACHE_HOME") or (
        "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    )
    folder = Path(root).expanduser() / "smoe-mlx"
    with contextlib.suppress(OSError):  # whoever writes there will say so
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True)
class Known(Generic[T]):
    """What earlier runs found out: dataclasses by key, in a JSON file in the user's cache folder.

    A file that is missing, or not to be trusted, holds nothing, and is replaced. The latest
    `MOST_KNOWN` are kept.

    Args:
        what: the name of the file, without its suffix.
        version: of what it holds; that of another one is not read.
        check: makes an entry from its JSON. Raises whatever it likes if `add` did not write it.
    """

    what: str
    version: int
    check: Callable[[Any], T]

    @property
    def path(self) -> Path:
        return cache_folder() / f"{self.what}.json"

    @property
    def format(self) -> str:
        return f"smoe-mlx {self.what} {self.version}"

    def entries(self) -> dict[str, T]:
        try:
            document = read_json(self.path, MOST_KNOWN_NBYTES)
            if document["format"] != self.format:
                return {}
            return {key: self.check(entry) for key, entry in document["entries"].items()}
        except Exception:  # json raises several kinds on damage
            return {}

    def add(self, key: str, entry: T | None) -> None:
        """Keep an entry in the place of the one of this key, or (None) nothing. Raises OSError."""
        entries = self.entries()
        entries.pop(key, None)
        if entry is not None:
            entries[key] = entry
        kept: list[tuple[str, Any]] = list(entries.items())[-MOST_KNOWN:]
        write_json(self.path, {"format": self.format, "entries": {k: asdict(v) for k, v in kept}})


def no_duplicate_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for JSON from strangers: a name that comes twice is a ValueError."""
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out:
            raise ValueError(f"{name!r:.80} is named twice")
        out[name] = value
    return out


def is_size(value: Any) -> TypeGuard[int]:
    """Whether a JSON value is a whole number from 0 on that a file could be as long as."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
