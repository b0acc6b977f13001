"""The vault: a file of expert records, `.smoe`. Each expert is one record that one read fetches.

Knows the format (docs/vault-format.md) and refuses what does not follow it to the letter; knows no
model and no MLX. `plan_vault` lays a file out, `VaultWriter` fills it, `Vault` opens it.
"""

import json
import math
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import VaultError
from .files import OpenFile, is_size, naming, no_duplicate_names
from .layout import ExpertLayout, TensorSpec
from .safetensors import DTYPE_BITS, MAX_DIMS

VAULT_FILE = "experts.smoe"  # in the folder of its backbone
MAGIC = b"SMOE-MLX"
VERSION = 1
RECORD_ALIGNMENT = 16384  # a page of Apple silicon
PIECE_ALIGNMENT = 4096  # what direct I/O can scatter
MAX_HEADER_NBYTES = 16 << 20
MAX_RECORDS = 1 << 20
MAX_TENSORS = 64  # of an expert; three projections of four kinds are usual

# magic, version, record alignment, header bytes, records, data offset, file bytes, 0, CRC of
# header and table, CRC of the 60 bytes before.
PREAMBLE = struct.Struct("<8sIIQQQQQII")
# layer, expert, offset, length, CRC of the pieces' bytes, 0
ENTRY = np.dtype(
    [("layer", "<u4"), ("expert", "<u4"), ("offset", "<u8"), ("length", "<u8"), ("crc", "<u4"),
     ("zero", "<u4")]
)  # fmt: skip


def _align(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass(frozen=True)
class Geometry:
    """The inside of a record: tensors, and where each one's bytes begin."""

    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    record_nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[TensorSpec]) -> "Geometry":
        offsets, end = [], 0
        for t in tensors:
            offsets.append(_align(end, PIECE_ALIGNMENT))
            end = offsets[-1] + t.nbytes
        return cls(tuple(tensors), tuple(offsets), _align(end, PIECE_ALIGNMENT))

    def as_json(self) -> dict[str, Any]:
        return {
            "record_nbytes": self.record_nbytes,
            "tensors": [
                {
                    "projection": t.projection, "kind": t.kind, "dtype": t.dtype,
                    "shape": list(t.shape), "offset": offset, "nbytes": t.nbytes,
                }
                for t, offset in zip(self.tensors, self.offsets, strict=True)
            ],
        }  # fmt: skip


@dataclass(frozen=True)
class VaultLayer:
    """One layer of a vault, or those experts of it that share a geometry.

    `experts` are their numbers in the model, in the order of the records; None: all, in order.
    """

    path: str
    num_experts: int
    geometry: int
    experts: tuple[int, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        out = {"path": self.path, "num_experts": self.num_experts, "geometry": self.geometry}
        return out if self.experts is None else {**out, "experts": list(self.experts)}


@dataclass
class VaultPlan:
    """Where everything in a vault goes, before a byte is written.

    Attributes:
        header: the JSON header as bytes.
        table: one ENTRY a record, by layer and expert; checksums still 0.
    """

    geometries: list[Geometry]
    layers: list[VaultLayer]
    header: bytes
    table: np.ndarray
    data_offset: int
    file_nbytes: int


def plan_vault(
    layers: Sequence[tuple[str, int | tuple[int, ...], Sequence[TensorSpec]]],
    extra: dict[str, Any],
) -> VaultPlan:
    """Lay out a vault.

    Args:
        layers: (path, number of experts, tensors of one expert) of each layer, in their order.
            A layer with experts of several kinds comes once for each kind, with the experts'
            numbers in the place of how many they are.
        extra: what else the header says: `id`, `source`, `quantization`.
    """
    geometries: list[Geometry] = []
    out_layers = []
    for path, experts, tensors in layers:
        geometry = Geometry.of(tensors)
        if geometry not in geometries:
            geometries.append(geometry)
        some = None if isinstance(experts, int) else experts
        count = experts if isinstance(experts, int) else len(experts)
        out_layers.append(VaultLayer(path, count, geometries.index(geometry), some))
    document = {
        **extra,
        "geometries": [g.as_json() for g in geometries],
        "layers": [x.as_json() for x in out_layers],
    }
    header = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (_align(len(header), 8) - len(header))
    count = sum(x.num_experts for x in out_layers)
    if len(header) > MAX_HEADER_NBYTES or count > MAX_RECORDS:
        raise VaultError(f"{count} experts are more than a vault can hold")
    table = np.zeros(count, ENTRY)
    data_offset = _align(PREAMBLE.size + len(header) + table.nbytes, RECORD_ALIGNMENT)
    at, i = data_offset, 0
    for layer, x in enumerate(out_layers):
        length = geometries[x.geometry].record_nbytes
        for expert in range(x.num_experts):
            table[i] = (layer, expert, at, length, 0, 0)
            at = _align(at + length, RECORD_ALIGNMENT)
            i += 1
    return VaultPlan(geometries, out_layers, header, table, data_offset, at)


def front_matter(plan: VaultPlan) -> bytes:
    """Preamble, header and table, as they stand at the start of the file."""
    body = plan.header + plan.table.tobytes()
    first = PREAMBLE.pack(
        MAGIC, VERSION, RECORD_ALIGNMENT, len(plan.header), len(plan.table), plan.data_offset,
        plan.file_nbytes, 0, zlib.crc32(body), 0,
    )  # fmt: skip
    return first[:-4] + struct.pack("<I", zlib.crc32(first[:-4])) + body


def front_nbytes(first: bytes) -> int:
    """Bytes of preamble, header and table as the preamble says; of a damaged one, only its own."""
    if len(first) != PREAMBLE.size or zlib.crc32(first[:-4]) != PREAMBLE.unpack(first)[-1]:
        return PREAMBLE.size
    header_nbytes, count = PREAMBLE.unpack(first)[3:5]
    table_nbytes = min(count, MAX_RECORDS) * ENTRY.itemsize
    return int(PREAMBLE.size + min(header_nbytes, MAX_HEADER_NBYTES) + table_nbytes)


class Vault(OpenFile):
    """An opened vault: its layers, and where each expert's record lies (docs/vault-format.md).

    Args:
        path: the file, `experts.smoe` in its folder.

    Attributes:
        layouts: an `ExpertLayout` for each layer, in the order of the file.
        table: the records (ENTRY), by layer and expert.
        header: the JSON header: `id`, `source`, `quantization`, ...

    Raises:
        VaultError: not a vault, of a newer version, truncated, or inconsistent in any way.
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _bad(self, why: str) -> VaultError:
        return VaultError(f"{self.path}: {why}. Make the vault again (smoe-mlx shatter).")

    def _read(self) -> None:
        size = self.fingerprint.size
        first = self.pread(PREAMBLE.size, 0)
        if len(first) < PREAMBLE.size or not first.startswith(MAGIC):
            raise self._bad(f"not a vault ({size} bytes)")
        (_, version, alignment, header_nbytes, count, data_offset, file_nbytes, zero, body_crc,
         crc) = PREAMBLE.unpack(first)  # fmt: skip
        if version > VERSION:
            raise VaultError(
                f"{self.path}: vault format {version} is newer than this smoe_mlx, which reads "
                f"format {VERSION}. Update smoe_mlx."
            )
        if crc != zlib.crc32(first[:-4]):
            raise self._bad("its first 64 bytes are damaged")
        if version != VERSION or alignment != RECORD_ALIGNMENT or zero:
            raise self._bad(f"unknown format (version {version}, alignment {alignment})")
        if file_nbytes != size:
            raise self._bad(f"truncated or extended: {size} bytes, it should have {file_nbytes}")
        table_nbytes = count * ENTRY.itemsize
        end = PREAMBLE.size + header_nbytes + table_nbytes
        if (
            header_nbytes > MAX_HEADER_NBYTES
            or count > MAX_RECORDS
            or data_offset > size
            or data_offset != _align(end, RECORD_ALIGNMENT)
        ):
            raise self._bad("its header and table do not fit into the file")
        body = self.pread(header_nbytes + table_nbytes, PREAMBLE.size)
        if len(body) != header_nbytes + table_nbytes or zlib.crc32(body) != body_crc:
            raise self._bad("its header or table is damaged")
        self.header = self._parse(body[:header_nbytes])
        self.table = np.frombuffer(body, ENTRY, offset=header_nbytes)
        self.geometries = [self._geometry(g) for g in self._list(self.header, "geometries")]
        self.layers = [self._layer(x) for x in self._list(self.header, "layers")]
        self._check_parts()
        self._check_table(data_offset, size)
        self.layouts = self._make_layouts()

    def _parse(self, data: bytes) -> dict[str, Any]:
        try:
            header = json.loads(data.decode("utf-8"), object_pairs_hook=no_duplicate_names)
        except (ValueError, RecursionError) as e:
            raise self._bad(f"its header is not valid JSON ({e})") from None
        if not isinstance(header, dict) or not isinstance(header.get("id"), str):
            raise self._bad("its header is not an object with an id")
        return header

    def _list(self, header: dict[str, Any], key: str) -> list[Any]:
        value = header.get(key)
        if not isinstance(value, list) or not value:
            raise self._bad(f"its header has no {key}")
        return value

    def _geometry(self, entry: Any) -> Geometry:
        if not isinstance(entry, dict) or not is_size(entry.get("record_nbytes")):
            raise self._bad("a geometry is malformed")
        tensors: list[TensorSpec] = []
        offsets: list[int] = []
        end = 0
        listed = self._list(entry, "tensors")
        if len(listed) > MAX_TENSORS:
            raise self._bad(f"an expert of {len(listed)} tensors")
        for t in listed:
            if not isinstance(t, dict) or not all(
                isinstance(t.get(k), str) for k in ("projection", "kind", "dtype")
            ):
                raise self._bad("a tensor of a geometry is malformed")
            name, shape = f"{t['projection']}.{t['kind']}", t.get("shape")
            if t["dtype"] not in DTYPE_BITS or not (
                isinstance(shape, list) and len(shape) <= MAX_DIMS and all(map(is_size, shape))
            ):
                raise self._bad(f"{name:.200} has an impossible dtype or shape")
            nbytes, offset = t.get("nbytes"), t.get("offset")
            if not is_size(nbytes) or nbytes != math.prod(shape) * DTYPE_BITS[t["dtype"]] // 8:
                raise self._bad(f"{name:.200} has a wrong number of bytes")
            if not is_size(offset) or offset % PIECE_ALIGNMENT or offset < end:
                raise self._bad(f"{name:.200} overlaps or is not aligned")
            end = offset + nbytes
            spec = TensorSpec(t["projection"], t["kind"], t["dtype"], tuple(shape), nbytes)
            if any(spec.name == other.name for other in tensors):
                raise self._bad(f"{name:.200} is named twice")
            tensors.append(spec)
            offsets.append(offset)
        if end > entry["record_nbytes"]:
            raise self._bad("a record is too short for its tensors")
        return Geometry(tuple(tensors), tuple(offsets), entry["record_nbytes"])

    def _layer(self, entry: Any) -> VaultLayer:
        ok = (
            isinstance(entry, dict)
            and isinstance(entry.get("path"), str)
            and is_size(entry.get("num_experts"))
            and is_size(entry.get("geometry"))
            and entry["geometry"] < len(self.geometries)
            and 0 < entry["num_experts"] <= MAX_RECORDS
        )
        if not ok:
            raise self._bad("a layer is malformed")
        experts = entry.get("experts")
        if experts is not None:
            if not (
                isinstance(experts, list)
                and len(experts) == entry["num_experts"]
                and all(is_size(e) for e in experts)
            ):
                raise self._bad("the experts of a layer are malformed")
            experts = tuple(experts)
        return VaultLayer(entry["path"], entry["num_experts"], entry["geometry"], experts)

    def _check_parts(self) -> None:
        """Each layer is whole: listed once, or in parts that hold each of its experts once."""
        parts: dict[str, list[VaultLayer]] = {}
        for x in self.layers:
            parts.setdefault(x.path, []).append(x)
        for path, layers in parts.items():
            if len(layers) == 1 and layers[0].experts is None:
                continue
            numbers = sorted(e for x in layers for e in x.experts or (-1,))
            if numbers != list(range(len(numbers))):
                raise self._bad(f"{path:.200} does not list each of its experts once")

    def _check_table(self, data_offset: int, size: int) -> None:
        t = self.table
        if len(t) != sum(x.num_experts for x in self.layers):
            raise self._bad(f"its table has {len(t)} records, its layers another number")
        counts = [x.num_experts for x in self.layers]
        layers = np.repeat(np.arange(len(counts)), counts)
        experts = np.concatenate([np.arange(n) for n in counts])
        if (t["layer"] != layers).any() or (t["expert"] != experts).any() or t["zero"].any():
            raise self._bad("its table is not in the order of layers and experts")
        lengths = np.array([self.geometries[x.geometry].record_nbytes for x in self.layers])
        begin, length = t["offset"], t["length"]
        if (length != lengths[layers]).any():
            raise self._bad("a record has the wrong length")
        if (begin > size).any() or (length > size).any():
            raise self._bad("a record lies outside the file")
        order = np.argsort(begin, kind="stable")
        ends = (begin + length)[order]
        if (
            (begin % RECORD_ALIGNMENT).any()
            or begin[order[0]] < data_offset
            or (begin[order[1:]] < ends[:-1]).any()
            or ends[-1] > size
        ):
            raise self._bad("a record overlaps another, is not aligned or lies outside the file")

    def _make_layouts(self) -> list[ExpertLayout]:
        layouts, at = [], 0
        for x in self.layers:
            g = self.geometries[x.geometry]
            begin = self.table["offset"][at : at + x.num_experts].astype(np.int64)
            offsets = begin[None, :] + np.array(g.offsets, np.int64)[:, None]
            ids = np.zeros(offsets.shape, np.int32)
            crcs = self.table["crc"][at : at + x.num_experts].copy()
            layouts.append(
                ExpertLayout(x.path, x.num_experts, g.tensors, ids, offsets, crcs, x.experts)
            )
            at += x.num_experts
        return layouts

    def verify_record(self, index: int) -> None:
        """Read record `index` of the table and check its bytes and its padding.

        Raises:
            VaultError: they are not what was written.
        """
        entry = self.table[index]
        layer = self.layers[entry["layer"]]
        geometry = self.geometries[layer.geometry]
        data = self.pread(int(entry["length"]), int(entry["offset"]))
        crc, end, clean = 0, 0, len(data) == entry["length"]
        for t, offset in zip(geometry.tensors, geometry.offsets, strict=True):
            clean = clean and not any(data[end:offset])
            end = offset + t.nbytes
            crc = zlib.crc32(data[offset:end], crc)
        if crc != entry["crc"] or not clean or any(data[end:]):
            name = self.layouts[entry["layer"]].name(int(entry["expert"]))
            raise VaultError(
                f"{self.path}: the record of {name} of {layer.path} is damaged."
                " Make the vault again (smoe-mlx shatter)."
            )


class VaultWriter:
    """Fills a planned vault under a temporary name, layer by layer, so that it can be resumed.

    A layer counts as written once its line is in the journal, and its line is written after its
    bytes are on the disk. `finish` writes preamble, header and table, and gives the file its name.
    """

    def __init__(self, path: str | os.PathLike[str], plan: VaultPlan):
        self.path = os.fspath(path)
        self.plan = plan
        self.partial, self.journal = self.path + ".partial", self.path + ".journal"
        self.done = self._resume()
        flags = os.O_RDWR | os.O_CREAT | (0 if self.done else os.O_TRUNC)
        self._fd = os.open(self.partial, flags, 0o644)
        try:
            with naming(self.partial):
                os.ftruncate(self._fd, plan.file_nbytes)
            if not self.done:
                with open(self.journal, "w") as f:
                    f.write(json.dumps({"plan": self._plan_id()}) + "\n")
                    f.flush()
                    _sync(f.fileno())
        except BaseException:
            self.close()
            raise
        self._first = {
            layer: int(i) for i, layer in reversed(list(enumerate(plan.table["layer"].tolist())))
        }

    def _plan_id(self) -> list[int]:
        return [zlib.crc32(self.plan.header), self.plan.file_nbytes]

    def _resume(self) -> set[int]:
        """Layers that an earlier, interrupted run of the same plan has written."""
        done: set[int] = set()
        try:
            with open(self.journal, "r+b") as f:
                *lines, torn = f.read().split(b"\n")
                f.seek(-len(torn), os.SEEK_END)
                f.truncate()  # or the next line would become one with it
            if os.stat(self.partial).st_size != self.plan.file_nbytes:
                return set()
            if json.loads(lines[0])["plan"] != self._plan_id():
                return set()
            for line in lines[1:]:
                entry = json.loads(line)
                rows = self.plan.table["layer"] == entry["layer"]
                self.plan.table["crc"][rows] = entry["crc"]
                done.add(entry["layer"])
        except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError):
            self.plan.table["crc"] = 0
            return set()
        return done

    def write_piece(self, layer: int, expert: int, tensor: int, data: memoryview) -> None:
        """Write one tensor of one expert. Tensors of one expert come in their order."""
        row = self.plan.table[self._first[layer] + expert]
        geometry = self.plan.geometries[self.plan.layers[layer].geometry]
        at = int(row["offset"]) + geometry.offsets[tensor]
        row["crc"] = zlib.crc32(data, 0 if tensor == 0 else int(row["crc"]))
        self._write(data, at)

    def _write(self, data: memoryview, at: int) -> None:
        with naming(self.partial):
            while data:
                n = os.pwrite(self._fd, data, at)
                data, at = data[n:], at + n

    def layer_done(self, layer: int) -> None:
        """All pieces of `layer` are written: make that last."""
        _sync(self._fd)
        rows = self.plan.table["layer"] == layer
        line = json.dumps({"layer": layer, "crc": self.plan.table["crc"][rows].tolist()})
        with open(self.journal, "a") as f:
            f.write(line + "\n")
            f.flush()
            _sync(f.fileno())
        self.done.add(layer)

    def finish(self) -> None:
        """Write the front of the file, and rename it to its name."""
        if len(self.done) != len(self.plan.layers):
            raise ValueError("not all layers are written")
        self._write(memoryview(front_matter(self.plan)), 0)
        _sync(self._fd)
        self.close()
        os.replace(self.partial, self.path)
        sync_folder(os.path.dirname(self.path) or ".")
        os.unlink(self.journal)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _sync(fd: int) -> None:
    os.fsync(fd)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make renames in a folder last."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(fd)
    finally:
        os.close(fd)
