"""Sessions on disk: mlx-lm's prompt cache files, with the tokens they hold, under a size limit."""

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

from ..errors import CheckpointError
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
        for path in self._by_age(f"{fingerprint}/????????-*.safetensors"):
            try:
                with SafetensorsMmap(path) as file:
                    about = {
                        "tokens": np.array(json.loads(file.metadata["0.tokens"]), np.int64),
                        "kind": file.metadata["0.kind"],
                        "asked": int(file.metadata["0.asked"]),
                        "grows": file.metadata["0.grows"] == "True",
                        "nbytes": sum(t.nbytes for t in file.tensors.values()),
                    }
                yield path, about
            except (CheckpointError, OSError, KeyError, ValueError) as e:
                logging.warning(f"{path} is dropped: {e}")
                path.unlink(missing_ok=True)

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
            save_prompt_cache(str(new), entry.cache, metadata)
            os.chmod(new, 0o600)
            path = folder / f"{_crc32(new):08x}-{name}"
            new.rename(path)
        except (OSError, AttributeError, TypeError, ValueError, RuntimeError) as e:
            logging.warning(f"a session of {len(entry.tokens)} tokens could not be saved: {e}")
            new.unlink(missing_ok=True)
            return None
        self._keep_within_limit()
        return path if path.exists() else None

    def load(self, path: Path) -> list[Any]:
        """Read a cache.

        Raises:
            ValueError: the file is damaged.
            OSError, KeyError, RuntimeError: it cannot be read.
        """
        if f"{_crc32(path):08x}" != path.name.partition("-")[0]:
            raise ValueError("its bytes are not those that were written")
        cache: list[Any] = load_prompt_cache(str(path))
        mx.eval([c.state for c in cache])
        os.utime(path)
        return cache

    def _by_age(self, pattern: str) -> list[Path]:
        ages = []
        for path in self.folder.glob(pattern):
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


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc
