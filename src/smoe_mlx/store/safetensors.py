"""Headers and byte ranges of safetensors files.

Knows the file format (8-byte little-endian header length, JSON header, data) and checks it as a
stranger's file deserves. It knows nothing of experts, models or MLX. The bulk of a file is never
mapped or read by opening it.
"""

import json
import math
import mmap
import os
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .files import OpenFile, is_size, no_duplicate_names, read_json

# The format's own bound on the header (safetensors' MAX_HEADER_SIZE).
MAX_HEADER_NBYTES = 100_000_000
MAX_DIMS = 32

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `offset` is from the start of the file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsMmap(OpenFile):
    """The header index of one safetensors file, and read-only views of its tensors' bytes.

    The file stays open, so that later reads see the file that was checked.

    Args:
        path: the file.

    Attributes:
        tensors: name -> `TensorInfo`: dtype, shape, offset from the file's start and bytes.
        metadata: the header's `__metadata__`.

    Raises:
        CheckpointError: not a safetensors file, or truncated, overlapping or inconsistent.
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._map: mmap.mmap | None = None
        super().__init__(path)
        try:
            self.tensors, self.metadata = self._read_header()
        except BaseException:
            self.close()
            raise

    def _bad(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {why}. Download or convert this file again.")

    def _read_header(self) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        size = self.fingerprint.size
        start = self.pread(8, 0)
        if len(start) < 8:
            raise self._bad(f"not a safetensors file ({size} bytes)")
        if start.startswith(b"version "):
            raise CheckpointError(
                f"{self.path}: this is a Git LFS pointer, not the weights. Run `git lfs pull`."
            )
        length = int.from_bytes(start, "little")
        if length > MAX_HEADER_NBYTES:
            raise self._bad(f"not a safetensors file (its header would be {length} bytes long)")
        if 8 + length > size:
            raise self._bad(f"truncated: {size} bytes, but the header alone ends at {8 + length}")
        try:
            header = json.loads(
                self.pread(length, 8).decode("utf-8"), object_pairs_hook=no_duplicate_names
            )
        except (ValueError, RecursionError) as e:
            raise self._bad(f"its header is not valid JSON ({e})") from None
        if not isinstance(header, dict):
            raise self._bad("its header is not a JSON object")
        metadata = header.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict):
            raise self._bad("its __metadata__ is not a JSON object")
        tensors = {name: self._tensor(name, e, 8 + length) for name, e in header.items()}
        end, last = 8 + length, "the header"
        for name, t in sorted(tensors.items(), key=lambda kv: (kv[1].offset, kv[1].nbytes)):
            if t.nbytes and t.offset < end:
                raise self._bad(f"tensor {name!r:.200} overlaps {last}")
            if t.nbytes:
                end, last = t.offset + t.nbytes, f"tensor {name!r}"
        return tensors, metadata

    def _tensor(self, name: str, entry: Any, data_start: int) -> TensorInfo:
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
            raise self._bad(f"tensor {name!r:.200} has no dtype, shape or data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            raise self._bad(f"tensor {name!r:.200} has the unknown dtype {dtype!r:.80}")
        if not (isinstance(shape, list) and len(shape) <= MAX_DIMS and all(map(is_size, shape))):
            raise self._bad(f"tensor {name!r:.200} has the impossible shape {shape!r:.80}")
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(is_size, offsets))):
            raise self._bad(f"tensor {name!r:.200} has impossible data_offsets {offsets!r:.80}")
        begin, end = offsets
        bits = math.prod(shape) * DTYPE_BITS[dtype]
        if end - begin != bits // 8 or bits % 8:
            raise self._bad(
                f"tensor {name!r:.200} is {dtype} {tuple(shape)!s:.80}, which is "
                f"{Decimal(bits) / 8} bytes, but its data_offsets span {end - begin}"
            )
        if data_start + end > self.fingerprint.size:
            raise self._bad(
                f"truncated: tensor {name!r:.200} ends at byte {data_start + end}, "
                f"the file has {self.fingerprint.size}"
            )
        return TensorInfo(dtype, tuple(shape), data_start + begin, end - begin)

    def byte_range(self, offset: int, nbytes: int) -> memoryview:
        """A read-only view of `nbytes` bytes at `offset` (from the start of the file), by mmap.

        Raises:
            ValueError: they lie outside the file.
            CheckpointChangedError: the file is not the one that was opened any more.
        """
        if not (offset >= 0 and nbytes >= 0 and offset + nbytes <= self.fingerprint.size):
            raise ValueError(f"{self.path}: bytes {offset}..{offset + nbytes} are outside the file")
        self.check_unchanged()
        if self._map is None:
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        return memoryview(self._map)[offset : offset + nbytes]

    def tensor_bytes(self, name: str) -> memoryview:
        """A read-only view of the bytes of tensor `name` (KeyError), else as `byte_range`."""
        t = self.tensors[name]
        return self.byte_range(t.offset, t.nbytes)

    def close(self) -> None:
        """Close the file. Views that were handed out stay valid: they keep the mapping alive."""
        super().close()
        self._map = None


class Checkpoint:
    """All `model*.safetensors` files of a folder (those that mlx-lm loads), or one file, as one
    index.

    Attributes:
        files: the opened files, by name.
        tensors: tensor name -> (index of its file in `files`, where it lies).
        repeated: tensor name -> the two files that both hold it.

    Raises:
        CheckpointError: no weights, a shard that the index file names is missing, a bad file.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.files: list[SafetensorsMmap] = []
        self.tensors: dict[str, tuple[int, TensorInfo]] = {}
        self.repeated: dict[str, tuple[Path, Path]] = {}
        if self.folder.is_file():
            paths = [self.folder]
        else:
            paths = sorted(self.folder.glob("model*.safetensors"))
            self._check_index(paths)
        if not paths:
            raise CheckpointError(f"{self.folder}: no model*.safetensors file in this folder.")
        try:
            for path in paths:
                file = SafetensorsMmap(path)
                self.files.append(file)
                for name, info in file.tensors.items():
                    if name in self.tensors:
                        first = self.files[self.tensors[name][0]].path
                        self.repeated[name] = (first, file.path)
                    self.tensors[name] = (len(self.files) - 1, info)
        except BaseException:
            self.close()
            raise

    def _check_index(self, paths: list[Path]) -> None:
        index = self.folder / "model.safetensors.index.json"
        if not index.exists():
            return
        try:
            weight_map = read_json(index, MAX_HEADER_NBYTES)["weight_map"]
            shards = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise CheckpointError(f"{index}: not a shard index ({e!r}).") from None
        here = {p.name for p in paths}
        if missing := [s for s in shards if s not in here]:
            raise CheckpointError(
                f"{self.folder}: shard {missing[0]!r} is missing "
                f"({len(missing)} of {len(shards)} that {index.name} names). Download it again."
            )

    def close(self) -> None:
        for file in self.files:
            file.close()
