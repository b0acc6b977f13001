"""Sessions on disk: mlx-lm's prompt cache files, with the tokens they hold, under a size limit."""

import contextlib
import json
import logging
import os
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache
import numpy as np
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from ..store.files import is_size, mlx_reads, naming
from ..store.safetensors import SafetensorsMmap


class SessionFiles:
    """A folder of KV caches, `<fingerprint>/<crc32>-<id>.safetensors`; the oldest make room.

    A file is written under another name and renamed when it is whole, and compared with the
    checksum in its name before it is used. What other processes remove is simply gone.
    """

    def __init__(self, folder: Path, max_bytes: int):
        self.folder, self.max_bytes = folder, max_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # conversations are private

    def index(self, fingerprint: str) -> Iterator[tuple[Path, dict[str, Any]]]:
        """(path, what `Entry` says of it) of each file of a model, the oldest first."""
        try:
            paths = self._by_age(f"{fingerprint}/????????-*.safetensors")
        except OSError as e:
            logging.warning(f"{self.folder}: no sessions are used: {e}")
            return
        for path in paths:
            try:
                with SafetensorsMmap(path) as file:
                    about = _about(file)
                yield path, about
            except (OSError, MemoryError) as e:  # perhaps it can be read another time
                logging.warning(f"{path} is not used: {str(e) or 'no memory'}")
            except ValueError as e:
                logging.warning(f"{path} is dropped: {e}")
                remove(path)

    def save(self, fingerprint: str, entry: Any) -> Path | None:
        """Write an `Entry` and return its file; None, and a warning, if that cannot be done."""
        folder = self.folder / fingerprint
        name = f"{uuid.uuid4().hex}.safetensors"
        new = folder / f"new-{name}"
        metadata = {field: str(getattr(entry, field)) for field in ("kind", "asked", "grows")}
        metadata["tokens"] = json.dumps(entry.tokens.tolist())
        try:
            for c in entry.cache:
                getattr(mlx_lm.models.cache, type(c).__name__)  # those are the ones it can load
            folder.mkdir(exist_ok=True, mode=0o700)
            with naming(new):
                save_prompt_cache(str(new), entry.cache, metadata)
            os.chmod(new, 0o600)
            path = folder / f"{_crc32(new):08x}-{name}"
            new.rename(path)
            self._keep_within_limit()
            return path if path.exists() else None
        except (OSError, AttributeError, TypeError, ValueError, RuntimeError, MemoryError) as e:
            why = str(e) or type(e).__name__
            logging.warning(f"a session of {len(entry.tokens)} tokens could not be saved: {why}")
            return None
        finally:
            remove(new)

    def load(self, path: Path) -> list[Any]:
        """Read a cache.

        Raises:
            ValueError: the file is damaged.
            OSError, MemoryError: it cannot be read now.
        """
        with naming(path):
            crc = _crc32(path)
        if f"{crc:08x}" != path.name.partition("-")[0]:
            raise ValueError("its bytes are not those that were written")
        try:
            with mlx_reads(path):
                cache: list[Any] = load_prompt_cache(str(path))
                mx.eval([c.state for c in cache])
        except (OSError, MemoryError):
            raise
        except Exception as e:  # whatever mlx-lm stumbles over
            if isinstance(e, RuntimeError) and "alloc" in str(e).lower():  # MLX has no memory
                raise MemoryError(str(e)) from e
            raise ValueError(f"no prompt cache ({type(e).__name__}: {e!s:.200})") from e
        with contextlib.suppress(OSError):  # read, and that is what matters
            os.utime(path)
        return cache

    def _by_age(self, pattern: str) -> list[Path]:
        ages, root = [], os.path.realpath(self.folder)
        for path in self.folder.glob(pattern):
            if os.path.realpath(path) != os.path.join(root, path.relative_to(self.folder)):
                logging.warning(f"{path} is not used: it is a link, or its folder is one.")
                continue
            try:
                ages.append((path.stat().st_mtime_ns, path))
            except FileNotFoundError:
                continue
        return [path for _, path in sorted(ages)]

    def _keep_within_limit(self) -> None:
        paths = self._by_age("*/*.safetensors")
        sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
        total = sum(sizes)
        for path, size in zip(paths, sizes, strict=True):
            if total <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def remove(path: Path) -> None:
    """Remove a session's file, if the disk will."""
    with contextlib.suppress(OSError):
        path.unlink()


def _about(file: SafetensorsMmap) -> dict[str, Any]:
    """What `save` wrote of an entry. Raises ValueError where it did not."""
    said = file.metadata
    try:
        tokens, asked = json.loads(said["0.tokens"]), int(said["0.asked"])
        if not isinstance(tokens, list) or not all(map(is_size, tokens)):
            raise ValueError("its tokens are no tokens")
        return {
            "tokens": np.array(tokens, np.int64),
            "kind": said["0.kind"],
            "asked": asked,
            "grows": said["0.grows"] == "True",
            "nbytes": sum(t.nbytes for t in file.tensors.values()),
        }
    except (KeyError, TypeError, RecursionError) as e:
        raise ValueError(f"not a session of this server ({e!r:.80})") from None


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc
