"""The vault: its bytes, what it refuses, and that a model streams from it as from its source."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import CONFIGS, STREAMED, random_model, random_tokens, resident, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

import smoe_mlx
from smoe_mlx.load import load_model
from smoe_mlx.store.layout import TensorSpec
from smoe_mlx.store.vault import (
    ENTRY,
    PREAMBLE,
    VAULT_FILE,
    Vault,
    VaultWriter,
    front_matter,
    plan_vault,
)

TOKENS = random_tokens(70)
DEMO = Path(smoe_mlx.__file__).parent / "demo"


def streams_like(vault_folder, source, slots=0.4, **config):
    """Logits from the vault equal mlx-lm's from the source, at prompt and decode length."""
    config = smoe_mlx.StreamingConfig(slots=slots, debug=True, **config)
    model, _ = load_model(Path(vault_folder), config=config)
    reference = resident(source)
    for tokens in (TOKENS, TOKENS[:2]):
        assert same_bits(reference(mx.array([tokens])), model(mx.array([tokens])))
    return model


# ---- the format ----------------------------------------------------------------------------------

SPECS = (
    TensorSpec("up_proj", "weight", "U32", (2, 3), 24),
    TensorSpec("up_proj", "scales", "F16", (5,), 10),
)


def small_vault(path: Path) -> Path:
    plan = plan_vault([("a.b", 2, SPECS), ("a.c", 1, SPECS[:1])], {"id": "0123"})
    writer = VaultWriter(path, plan)
    for layer, x in enumerate(plan.layers):
        for i, t in enumerate(plan.geometries[x.geometry].tensors):
            for e in range(x.num_experts):
                byte = 1 + layer * 100 + e * 10 + i
                writer.write_piece(layer, e, i, memoryview(bytes([byte]) * t.nbytes))
        writer.layer_done(layer)
    writer.finish()
    return path


def test_every_byte_of_a_small_vault(tmp_path):
    """The golden file: whoever changes the format changes this test, the version and the docs."""
    data = small_vault(tmp_path / "v.smoe").read_bytes()
    header = (
        b'{"geometries":[{"record_nbytes":8192,"tensors":['
        b'{"dtype":"U32","kind":"weight","nbytes":24,"offset":0,"projection":"up_proj","shape":[2,3]},'
        b'{"dtype":"F16","kind":"scales","nbytes":10,"offset":4096,"projection":"up_proj","shape":[5]}'
        b']},{"record_nbytes":4096,"tensors":['
        b'{"dtype":"U32","kind":"weight","nbytes":24,"offset":0,"projection":"up_proj","shape":[2,3]}'
        b']}],"id":"0123","layers":[{"geometry":0,"num_experts":2,"path":"a.b"},'
        b'{"geometry":1,"num_experts":1,"path":"a.c"}]}'
    )
    header += b" " * (-len(header) % 8)
    K = 1024
    records = [  # layer, expert, offset, length, pieces
        (0, 0, 16 * K, 8192, [(0, b"\x01" * 24), (4096, b"\x02" * 10)]),
        (0, 1, 32 * K, 8192, [(0, b"\x0b" * 24), (4096, b"\x0c" * 10)]),
        (1, 0, 48 * K, 4096, [(0, b"\x65" * 24)]),
    ]
    table = b""
    for layer, expert, offset, length, pieces in records:
        crc = zlib.crc32(b"".join(p for _, p in pieces))
        for value, size in ((layer, 4), (expert, 4), (offset, 8), (length, 8), (crc, 4), (0, 4)):
            table += value.to_bytes(size, "little")
    first = b"SMOE-MLX"
    for value, size in (
        (1, 4), (16384, 4), (len(header), 8), (3, 8), (16 * K, 8), (64 * K, 8), (0, 8),
        (zlib.crc32(header + table), 4),
    ):  # fmt: skip
        first += value.to_bytes(size, "little")
    first += zlib.crc32(first).to_bytes(4, "little")
    expected = bytearray(64 * K)
    front = first + header + table
    expected[: len(front)] = front
    for _, _, offset, _, pieces in records:
        for at, piece in pieces:
            expected[offset + at : offset + at + len(piece)] = piece
    assert data == bytes(expected)


def test_the_table_begins_at_a_multiple_of_8():
    for n in range(8):
        plan = plan_vault([("a", 1, SPECS)], {"id": "0" * n})
        assert len(plan.header) % 8 == 0
        assert json.loads(plan.header)["id"] == "0" * n


def test_a_vault_opens_with_its_layouts(tmp_path):
    with Vault(small_vault(tmp_path / "v.smoe")) as vault:
        assert [(x.path, x.num_experts) for x in vault.layouts] == [("a.b", 2), ("a.c", 1)]
        assert vault.layouts[0].tensors == SPECS
        assert vault.layouts[0].offsets.tolist() == [[16384, 32768], [20480, 36864]]
        assert vault.layouts[1].offsets.tolist() == [[49152]]
        assert vault.layouts[1].checksums.tolist() == [zlib.crc32(b"\x65" * 24)]
        for i in range(3):
            vault.verify_record(i)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = small_vault(tmp_path_factory.mktemp("vault") / "v.smoe")
    return path, path.read_bytes()


def opens(path: Path, data: bytes) -> Vault | None:
    path.write_bytes(data)
    try:
        return Vault(path)
    except smoe_mlx.VaultError as e:
        if str(path) not in str(e):
            raise
        return None


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, 1 << 20), flip=st.integers(1, 255))
def test_any_changed_byte_of_the_front_is_refused(small, tmp_path, at, flip):
    data = bytearray(small[1])
    front = 64 + int.from_bytes(data[16:24], "little") + 3 * ENTRY.itemsize
    data[at % front] ^= flip
    assert opens(tmp_path / "v.smoe", bytes(data)) is None


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(size=st.integers(0, 65536))
def test_any_truncation_is_refused(small, tmp_path, size):
    data = small[1]
    if size == len(data):
        assert opens(tmp_path / "v.smoe", data) is not None
    else:
        assert opens(tmp_path / "v.smoe", data[:size]) is None
    assert opens(tmp_path / "v.smoe", data + b"\0" * (1 + size % 5000)) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
    max_leaves=5,
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_forged_header_is_refused_or_consistent(small, tmp_path, data):
    """With right checksums: whoever writes a hostile file can compute those."""
    plan = plan_vault([("a.b", 2, SPECS), ("a.c", 1, SPECS[:1])], {"id": "0123"})
    document = json.loads(plan.header)
    paths = [
        ("id",), ("layers",), ("geometries",), ("layers", 0), ("layers", 0, "num_experts"),
        ("layers", 1, "geometry"), ("layers", 1, "path"), ("layers", 0, "experts"),
        ("geometries", 0, "record_nbytes"), ("geometries", 0, "tensors"),
        ("geometries", 0, "tensors", 0),
        *(("geometries", 0, "tensors", 1, k)
          for k in ("dtype", "shape", "offset", "nbytes", "projection", "kind")),
    ]  # fmt: skip
    *parents, last = data.draw(st.sampled_from(paths))
    where = document
    for key in parents:
        where = where[key]
    where[last] = data.draw(json_values | st.integers(0, 1 << 20))
    try:
        plan.header = json.dumps(document, allow_nan=True).encode()
    except (ValueError, UnicodeError):
        return
    plan.header += b" " * (-len(plan.header) % 8)
    front = bytearray(small[1])
    new = front_matter(plan)
    front[: len(new)] = new
    vault = opens(tmp_path / "v.smoe", bytes(front))
    if vault is not None:
        check_consistent(vault, len(front))
        vault.close()


T = ("geometries", 0, "tensors", 1)
FORGED = [  # (where in the header, what stands there, why it is refused)
    (("id",), None, "not an object with an id"),
    (("layers",), [], "has no layers"),
    (("geometries",), {}, "has no geometries"),
    *((("layers", 0), x, "a layer is malformed") for x in ("x", {}, None)),
    *(
        (("layers", 0, "num_experts"), x, "a layer is malformed")
        for x in (0, -1, (1 << 20) + 1, "2", None)
    ),
    (("layers", 0, "num_experts"), 3, "table has 3 records, its layers another"),
    (("layers", 0, "path"), 3, "a layer is malformed"),
    *((("layers", 1, "geometry"), x, "a layer is malformed") for x in (2, -1, None)),
    (("layers", 1, "geometry"), 0, "wrong length"),
    *(
        (("layers", 0, "experts"), x, "experts of a layer are malformed")
        for x in ("01", [0], [0, 1, 2], [0, -1], [0, None])
    ),
    *((("layers", 0, "experts"), x, "a.b does not list") for x in ([0, 0], [1, 2])),
    (("layers", 1, "path"), "a.b", "a.b does not list"),
    (("geometries", 0), [], "a geometry is malformed"),
    (("geometries", 0, "record_nbytes"), "8192", "a geometry is malformed"),
    (("geometries", 0, "record_nbytes"), 4096 + 9, "too short for its tensors"),
    (("geometries", 0, "record_nbytes"), 4096 + 10, "wrong length"),
    (("geometries", 0, "tensors"), [], "has no tensors"),
    (T, "x", "a tensor of a geometry is malformed"),
    *(((*T, k), 3, "a tensor of a geometry is malformed") for k in ("projection", "kind", "dtype")),
    ((*T, "kind"), "weight", "up_proj.weight is named twice"),
    ((*T, "dtype"), "X9", "up_proj.scales has an impossible dtype or shape"),
    *(((*T, "shape"), x, "scales has an impossible dtype or shape") for x in (5, [-1], ["5"])),
    *(((*T, "nbytes"), x, "up_proj.scales has a wrong number of bytes") for x in (11, 9, None)),
    *(
        ((*T, "offset"), x, "up_proj.scales overlaps or is not aligned")
        for x in (4097, 0, -4096, None)
    ),
]  # fmt: skip


def forged(small, plan) -> bytes:
    """The small vault with the front of a plan, all checksums right."""
    front = front_matter(plan)
    return front + small[1][len(front) :]


@pytest.mark.parametrize(("where", "value", "why"), FORGED)
def test_each_fault_of_a_header_is_refused_for_what_it_is(small, tmp_path, where, value, why):
    plan = plan_vault([("a.b", 2, SPECS), ("a.c", 1, SPECS[:1])], {"id": "0123"})
    document = json.loads(plan.header)
    inner = document
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    plan.header = json.dumps(document).encode().ljust(1024)
    path = tmp_path / "v.smoe"
    path.write_bytes(forged(small, plan))
    with pytest.raises(smoe_mlx.VaultError, match=why) as e:
        Vault(path)
    assert str(path) in str(e.value)


def test_experts_may_stand_in_another_order(small, tmp_path):
    plan = plan_vault([("a.b", (1, 0), SPECS), ("a.c", 1, SPECS[:1])], {"id": "0123"})
    path = tmp_path / "v.smoe"
    path.write_bytes(forged(small, plan))
    with Vault(path) as vault:
        assert [x.experts for x in vault.layouts] == [(1, 0), None]
        assert vault.layouts[0].name(0) == "expert 1"


@pytest.mark.parametrize(
    ("field", "row", "value", "why"),
    [
        ("layer", 0, 1, "not in the order"),
        ("expert", 1, 0, "not in the order"),
        ("zero", 2, 1, "not in the order"),
        ("length", 0, 4096, "wrong length"),
        ("offset", 2, 65536 + 16384, "lies outside the file"),
        ("offset", 2, 1 << 63, "lies outside the file"),
        ("offset", 2, 65536, "overlaps another, is not aligned or lies outside"),
        ("offset", 2, 49152 + 1, "overlaps another, is not aligned"),
        ("offset", 0, 0, "overlaps another"),
        ("offset", 1, 16384, "overlaps another"),
        ("offset", 2, 32768, "overlaps another"),
    ],
)
def test_each_fault_of_a_table_is_refused_for_what_it_is(small, tmp_path, field, row, value, why):
    plan = plan_vault([("a.b", 2, SPECS), ("a.c", 1, SPECS[:1])], {"id": "0123"})
    plan.table[field][row] = value
    (tmp_path / "v.smoe").write_bytes(forged(small, plan))
    with pytest.raises(smoe_mlx.VaultError, match=why):
        Vault(tmp_path / "v.smoe")


def test_more_experts_than_a_vault_can_hold_are_refused_before_any_memory_is_taken():
    with pytest.raises(smoe_mlx.VaultError, match="1048577 experts are more"):
        plan_vault([("a", 1 << 20, SPECS), ("b", 1, SPECS)], {"id": "0"})
    with pytest.raises(smoe_mlx.VaultError, match="more than a vault can hold"):
        plan_vault([("a", 1, SPECS)], {"id": "0" * (16 << 20)})


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    row=st.integers(0, 2),
    field=st.sampled_from(ENTRY.names),
    value=st.integers(0, 1 << 17) | st.integers(0, (1 << 32) - 1),
)
def test_a_forged_table_is_refused_or_consistent(small, tmp_path, row, field, value):
    plan = plan_vault([("a.b", 2, SPECS), ("a.c", 1, SPECS[:1])], {"id": "0123"})
    plan.table[field][row] = value
    front = bytearray(small[1])
    new = front_matter(plan)
    front[: len(new)] = new
    vault = opens(tmp_path / "v.smoe", bytes(front))
    if vault is not None:
        check_consistent(vault, len(front))
        vault.close()


def check_consistent(vault: Vault, size: int) -> None:
    used = []
    for x in vault.layouts:
        for t, offsets in zip(x.tensors, x.offsets, strict=True):
            used += [(o, o + t.nbytes) for o in offsets.tolist() if t.nbytes]
    used.sort()
    assert all(a >= 0 and b <= size for a, b in used)
    assert all(b <= c for (_, b), (c, _) in itertools.pairwise(used))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"header_nbytes": 1 << 60}, "do not fit"), ({"count": 1 << 60}, "do not fit"),
        ({"data_offset": 1 << 62}, "do not fit"), ({"data_offset": 32768}, "do not fit"),
        ({"version": 2}, "format 2 is newer"), ({"version": 0}, "unknown format"),
        ({"alignment": 4096}, "unknown format"), ({"zero": 1}, "unknown format"),
        ({"file_nbytes": 1}, "truncated or extended: 65536 bytes, it should have 1"),
        ({"body_crc": 0}, "header or table is damaged"), ({"magic": b"SMOE-MLY"}, "not a vault"),
    ],
)  # fmt: skip
def test_forged_first_bytes_are_refused_before_anything_is_allocated(small, tmp_path, fields, why):
    names = ("magic", "version", "alignment", "header_nbytes", "count", "data_offset",
             "file_nbytes", "zero", "body_crc", "crc")  # fmt: skip
    values = dict(zip(names, PREAMBLE.unpack(small[1][:64]), strict=True)) | fields
    first = PREAMBLE.pack(*values.values())
    first = first[:-4] + zlib.crc32(first[:-4]).to_bytes(4, "little")
    path = tmp_path / "v.smoe"
    path.write_bytes(first + small[1][64:])
    with pytest.raises(smoe_mlx.VaultError, match=f"v.smoe: .*{why}"):
        Vault(path)
    path.write_bytes(first[:-1] + bytes([first[-1] ^ 1]) + small[1][64:])
    if "newer" not in why and "not a vault" not in why:
        with pytest.raises(smoe_mlx.VaultError, match="its first 64 bytes are damaged"):
            Vault(path)


def test_damage_in_a_record_is_found_by_verify_and_named(small, tmp_path):
    for at, expert, layer in ((16384, 0, "a.b"), (32768 + 4100, 1, "a.b"), (32768 + 30, 1, "a.b"),
                              (49152 + 4000, 0, "a.c")):  # fmt: skip
        data = bytearray(small[1])
        data[at] ^= 1
        path = tmp_path / "v.smoe"
        path.write_bytes(data)
        with pytest.raises(smoe_mlx.VaultError, match=f"expert {expert} of {layer}"):
            smoe_mlx.verify(path)


def test_each_step_of_writing_is_on_the_disk_before_the_next(tmp_path, monkeypatch):
    """What a power cut leaves is what an earlier moment left."""
    real = {name: getattr(os, name) for name in ("fsync", "pwrite", "replace", "unlink")}
    names, steps = {}, []

    def named(fd):
        names.update((p.stat().st_ino, p.name) for p in [*tmp_path.iterdir(), tmp_path])
        return names[os.fstat(fd).st_ino]

    def fsync(fd):
        steps.append(f"sync {named(fd)}")
        if steps[-1].endswith("journal"):  # nothing of it is held back by Python
            lines = (tmp_path / "v.smoe.journal").read_text().split("\n")
            assert len(lines) == 1 + sum(step == steps[-1] for step in steps)
        real["fsync"](fd)

    def pwrite(fd, data, at):
        steps.append("write front" if at == 0 else "write")
        return real["pwrite"](fd, data[:20], at)  # short writes are continued

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "replace", lambda *a: (steps.append("name"), real["replace"](*a)))
    monkeypatch.setattr(os, "unlink", lambda *a: (steps.append("unlink"), real["unlink"](*a)))
    before = len(os.listdir("/dev/fd"))
    path = small_vault(tmp_path / "v.smoe")
    assert len(os.listdir("/dev/fd")) == before
    journal, layer = "sync v.smoe.journal", ["write", "sync v.smoe.partial", "sync v.smoe.journal"]
    assert [k for k, _ in itertools.groupby(steps)] == [
        journal, *layer, *layer, "write front", "write", "sync v.smoe.partial", "name",
        f"sync {tmp_path.name}", "unlink",
    ]  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["v.smoe"]
    with Vault(path) as vault:
        for i in range(3):
            vault.verify_record(i)


def test_a_vault_is_resumed_behind_the_last_layer_that_is_whole(tmp_path):
    whole = small_vault(tmp_path / "whole.smoe").read_bytes()
    path = tmp_path / "v.smoe"

    def plan():
        return plan_vault([("a.b", 2, SPECS), ("a.c", 1, SPECS[:1])], {"id": "0123"})

    def write(writer, layer):
        for e in range(writer.plan.layers[layer].num_experts):
            for i, t in enumerate(SPECS[: 2 - layer]):
                byte = 1 + layer * 100 + e * 10 + i
                writer.write_piece(layer, e, i, memoryview(bytes([byte]) * t.nbytes))
        writer.layer_done(layer)

    writer = VaultWriter(path, plan())
    write(writer, 0)
    with pytest.raises(ValueError, match="not all layers"):
        writer.finish()
    writer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "v.smoe.journal", "v.smoe.partial", "whole.smoe"
    ]  # fmt: skip
    writer = VaultWriter(path, plan())
    assert writer.done == {0}
    writer.close()
    with open(f"{path}.journal", "a") as f:
        f.write('{"layer": 1, "crc": [1')  # the power went in the middle of a line
    writer = VaultWriter(path, plan())
    assert writer.done == {0}
    write(writer, 1)
    writer.close()
    writer = VaultWriter(path, plan())
    assert writer.done == {0, 1}
    writer.finish()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("change", ["size", "plan", "line"])
def test_what_is_not_of_this_plan_is_not_taken_over(tmp_path, change):
    path = tmp_path / "v.smoe"
    writer = VaultWriter(path, plan_vault([("a", 2, SPECS)], {"id": "0"}))
    writer.write_piece(0, 1, 0, memoryview(bytes(range(1, 25))))
    writer.layer_done(0)
    writer.close()
    if change == "size":
        os.truncate(f"{path}.partial", 100)
    if change == "line":
        with open(f"{path}.journal", "a") as f:
            f.write('{"layer": 0}\n')
    plan = plan_vault([("a", 2, SPECS)], {"id": "1" if change == "plan" else "0"})
    writer = VaultWriter(path, plan)
    assert writer.done == set()
    assert not plan.table["crc"].any()
    data = (tmp_path / "v.smoe.partial").read_bytes()
    assert (len(data), any(data)) == (plan.file_nbytes, False), "old bytes are left"
    writer.close()


# ---- shatter -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", STREAMED)
def test_every_architecture_streams_from_a_vault(arch, tiny, tmp_path):
    source = tiny(arch, "affine")
    smoe_mlx.shatter(source, tmp_path / "v")
    streams_like(tmp_path / "v", source)
    assert smoe_mlx.verify(tmp_path / "v", source) > 0


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4", None])
def test_other_quantisations_keep_their_bytes(mode, tiny, tmp_path):
    source = tiny("gpt_oss", mode)
    smoe_mlx.shatter(source, tmp_path / "v")
    streams_like(tmp_path / "v", source)


@pytest.mark.parametrize("io", ["pread", "direct", "mmap"])
@pytest.mark.parametrize("slots", [0.3, 1.0])
def test_reading_modes(io, slots, tmp_path):
    """The demo's weights fill whole pages, its scales do not: direct reads do both kinds."""
    smoe_mlx.shatter(DEMO, tmp_path / "v")
    model = streams_like(tmp_path / "v", DEMO, slots=slots, io=io, check=True)
    stats = smoe_mlx.stats(model)
    assert stats.io in (io, "pread")
    assert stats.reads <= stats.misses + 512 * (slots == 1.0)


def test_one_read_a_miss(tiny, tmp_path, monkeypatch):
    smoe_mlx.shatter(tiny("qwen3_moe", "affine"), tmp_path / "v")
    config = smoe_mlx.StreamingConfig(slots=0.5, threads=0)
    model, _ = load_model(tmp_path / "v", config=config)
    cache, calls = model._streaming.cache, []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *a: calls.append(a) or preadv(*a))
    cache.claim(0, [3])
    cache.claim(1, [1, 6])
    assert len(calls) == 3


def test_the_folder_may_be_moved_and_read_only(tiny, tmp_path):
    source = tiny("qwen3_moe", "affine")
    smoe_mlx.shatter(source, tmp_path / "v")
    shutil.move(tmp_path / "v", tmp_path / "elsewhere")
    for p in (tmp_path / "elsewhere").iterdir():
        p.chmod(0o444)
    (tmp_path / "elsewhere").chmod(0o555)
    try:
        streams_like(tmp_path / "elsewhere", source)
    finally:
        (tmp_path / "elsewhere").chmod(0o755)


RAW = {
    "qwen3_5_moe": ("experts.gate_up_proj", "experts.down_proj", 1, False),
    "granitemoe": ("input_linear.weight", "output_linear.weight", 1, False),
    "qwen3_vl_moe": ("experts.gate_up_proj", "experts.down_proj", 1, True),
}


@pytest.mark.parametrize("arch", RAW)
def test_raw_fused_and_transposed_layouts(arch, tmp_path):
    """What cannot be streamed as it is can be shattered: mlx-lm's sanitize does the work."""
    gate_up, down, axis, transposed = RAW[arch]

    def raw_name(k):
        k = k.replace("language_model.model.", "model.language_model.")
        return k.replace("language_model.lm_head", "lm_head")

    weights = dict(tree_flatten(random_model(CONFIGS[arch]).parameters()))
    raw = {}
    for k, v in weights.items():
        stem = k.split("switch_mlp")[0]
        if "switch_mlp.gate_proj" in k:
            v = mx.concatenate([v, weights[k.replace("gate_proj", "up_proj")]], axis=axis)
            k = stem + gate_up
        elif "switch_mlp.up_proj" in k:
            continue
        elif "switch_mlp.down_proj" in k:
            k = stem + down
        else:
            raw[raw_name(k)] = v
            continue
        raw[raw_name(k)] = mx.contiguous(v.swapaxes(-1, -2)) if transposed else v
    source = tmp_path / "raw"
    source.mkdir()
    mx.save_safetensors(str(source / "model.safetensors"), raw)
    (source / "config.json").write_text(json.dumps(CONFIGS[arch]))
    with pytest.raises(smoe_mlx.UnsupportedModelError):
        smoe_mlx.plan(source, slots=0.5)
    smoe_mlx.shatter(source, tmp_path / "v")
    streams_like(tmp_path / "v", source)
    smoe_mlx.verify(tmp_path / "v", source)


def test_gpt_oss_interleaved_mxfp4(tmp_path):
    """OpenAI's own layout: gate and up interleaved, blocks of mxfp4, biases beside them."""
    config = {**CONFIGS["gpt_oss"], "quantization_config": {"quant_method": "mxfp4"}}
    config.pop("quantization", None)
    weights = dict(tree_flatten(random_model(CONFIGS["gpt_oss"]).parameters()))
    raw = {}
    for k, v in weights.items():
        stem, _, rest = k.partition(".experts.")
        if not rest or rest.startswith("up_proj"):
            if not rest:
                raw[k] = v
            continue
        name, kind = rest.split(".")
        if name == "gate_proj":
            up = weights[k.replace("gate_proj", "up_proj")]
            v = mx.stack([v, up], axis=2).reshape(v.shape[0], -1, *v.shape[2:])
            name = "gate_up_proj"
        if kind == "bias":
            raw[f"{stem}.experts.{name}_bias"] = v
        else:
            blocks, scales = mx.quantize(v, 32, 4, mode="mxfp4")
            blocks = blocks.view(mx.uint8)
            raw[f"{stem}.experts.{name}_blocks"] = blocks.reshape(*scales.shape, -1)
            raw[f"{stem}.experts.{name}_scales"] = scales
    source = tmp_path / "raw"
    source.mkdir()
    mx.save_safetensors(str(source / "model.safetensors"), raw)
    (source / "config.json").write_text(json.dumps(config))
    smoe_mlx.shatter(source, tmp_path / "v")
    streams_like(tmp_path / "v", source)


def test_fp8_in_blocks(tmp_path):
    """DeepSeek's own layout: a tensor an expert, fp8, a scale for every 128 by 128 block."""
    import mlx_lm.utils
    from mlx_lm.models.switch_layers import SwitchLinear

    config = dict(CONFIGS["deepseek_v3"])
    raw = {}
    for k, v in tree_flatten(random_model(config).parameters()):
        stem, _, rest = k.partition(".mlp.switch_mlp.")
        if not rest:
            raw[k] = v.astype(mx.bfloat16)
            continue
        name, kind = rest.split(".")
        for e in range(v.shape[0]):
            tensor = f"{stem}.mlp.experts.{e}.{name}.{kind}"
            blocks = tuple(-(-n // 128) for n in v.shape[1:])
            raw[tensor] = mx.to_fp8(v[e])
            raw[tensor + "_scale_inv"] = mx.full(blocks, 0.5 + e / 8)
    source = tmp_path / "raw"
    source.mkdir()
    mx.save_safetensors(str(source / "model.safetensors"), raw)
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(smoe_mlx.UnsupportedModelError, match="shatter"):
        smoe_mlx.plan(source, slots=0.5)
    smoe_mlx.shatter(source, tmp_path / "v", bits=4, group_size=32)
    model, config = mlx_lm.utils.load_model(source)
    model, _ = mlx_lm.utils.quantize_model(
        model, config, 32, 4, quant_predicate=lambda path, m: isinstance(m, SwitchLinear)
    )
    config = smoe_mlx.StreamingConfig(slots=0.4, debug=True)
    streamed, _ = load_model(tmp_path / "v", config=config)
    assert same_bits(model(mx.array([TOKENS])), streamed(mx.array([TOKENS])))


@pytest.mark.parametrize(
    "setting",
    [{"bits": b, "group_size": g} for b in (2, 3, 4, 5, 6, 8) for g in (32, 64)]
    + [{"mode": m} for m in ("mxfp4", "mxfp8", "nvfp4")]
    + [{"recipe": "SMOE-Q4"}, {"recipe": "smoe-q2"}],
)
def test_quantising_experts_is_mlx_lms_quantisation(setting, tiny, tmp_path):
    import mlx_lm.utils
    from mlx_lm.models.switch_layers import SwitchLinear

    source = tiny("qwen3_moe", None)
    smoe_mlx.shatter(source, tmp_path / "v", **setting)
    layout = load_model(tmp_path / "v")[0]._streaming.cache.layouts[0]
    config = json.loads((tmp_path / "v" / "config.json").read_text())
    listed = config["quantization"]["model.layers.0.mlp.switch_mlp.up_proj"]
    model, config = mlx_lm.utils.load_model(source)
    model, _ = mlx_lm.utils.quantize_model(
        model, config, **{k: listed[k] for k in ("group_size", "bits", "mode")},
        quant_predicate=lambda path, m: isinstance(m, SwitchLinear),
    )  # fmt: skip
    streamed, _ = load_model(tmp_path / "v", config=smoe_mlx.StreamingConfig(slots=0.4))
    assert same_bits(model(mx.array([TOKENS])), streamed(mx.array([TOKENS])))
    assert layout.nbytes < tiny_nbytes(source)


def tiny_nbytes(folder) -> int:
    return smoe_mlx.plan(folder, slots=1.0).experts_nbytes


def test_backbone_and_a_recipe(tiny, tmp_path):
    source = tiny("qwen3_moe", None)
    recipe = tmp_path / "recipe.json"
    recipe.write_text(
        json.dumps(
            {"*.layers.0.*": None, "*.down_proj": {"bits": 8, "group_size": 32}, "*": "SMOE-Q4"}
        )
    )
    smoe_mlx.shatter(source, tmp_path / "v", recipe=recipe, backbone_bits=8)
    model, config = load_model(tmp_path / "v", config=smoe_mlx.StreamingConfig(slots=0.5))
    mx.eval(model(mx.array([TOKENS])))
    layers = model._streaming.cache.layouts
    kinds = [{t.name: t.shape for t in x.tensors} for x in layers]
    assert "up_proj.scales" not in kinds[0]
    assert kinds[1]["up_proj.weight"] == (64, 16)
    assert kinds[1]["down_proj.weight"] == (128, 16)
    assert config["quantization"]["bits"] == 8
    assert "scales" in model.model.embed_tokens
    plain = resident(source)(mx.array([TOKENS]))
    error = mx.abs(model(mx.array([TOKENS])) - plain).mean() / mx.abs(plain).mean()
    assert 0 < error.item() < 0.5


def test_quantising_twice_is_said(tiny, tmp_path):
    with pytest.warns(UserWarning, match="twice"):
        smoe_mlx.shatter(tiny("qwen3_moe", "affine"), tmp_path / "v", bits=2)
    model, _ = load_model(tmp_path / "v", config=smoe_mlx.StreamingConfig(slots=0.5))
    mx.eval(model(mx.array([TOKENS])))


def test_what_shatter_refuses(tiny, tmp_path):
    source = tiny("qwen3_moe", None)
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="there"):
        smoe_mlx.shatter(source, tmp_path / "there")
    for bad in ({"bits": 7}, {"bits": 4, "group_size": 48}, {"mode": "mxfp4", "bits": 8},
                {"mode": "int4"}, {"recipe": "SMOE-Q4", "bits": 4}):  # fmt: skip
        with pytest.raises(smoe_mlx.RecipeError):
            smoe_mlx.shatter(source, tmp_path / "v", **bad)
    for text in ("{", "[]", '{"*": 4}', '{"*": {"bits": 4, "grp": 3}}', '{"*": "Q9"}'):
        recipe = tmp_path / "recipe.json"
        recipe.write_text(text)
        with pytest.raises(smoe_mlx.RecipeError, match=r"recipe\.json"):
            smoe_mlx.shatter(source, tmp_path / "v", recipe=recipe)
    with pytest.raises(smoe_mlx.UnsupportedModelError, match="128"):
        smoe_mlx.shatter(source, tmp_path / "v", bits=4, group_size=128)
    smoe_mlx.shatter(source, tmp_path / "v")
    with pytest.raises(smoe_mlx.UnsupportedModelError, match="vault already"):
        smoe_mlx.shatter(tmp_path / "v", tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_a_full_disk_is_noticed_first(tiny, tmp_path, monkeypatch):
    import shutil as module

    usage = module.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(module, "disk_usage", lambda path: usage)
    with pytest.raises(smoe_mlx.BudgetError, match="free"):
        smoe_mlx.shatter(tiny("qwen3_moe", None), tmp_path / "v")
    assert not (tmp_path / "v").exists()


def test_the_source_is_not_touched(tiny, tmp_path):
    source = shutil.copytree(tiny("qwen3_moe", None), tmp_path / "s")
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in source.iterdir()}
    smoe_mlx.shatter(source, tmp_path / "v", bits=4)
    assert before == {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in source.iterdir()}


# ---- interruption --------------------------------------------------------------------------------

SHATTER = """
import os, sys, smoe_mlx
from smoe_mlx.store import vault
real, left = os.pwrite, [int(sys.argv[3])]
def pwrite(*args):
    if left[0] == 0:
        os.kill(os.getpid(), 9)
    left[0] -= 1
    return real(*args)
os.pwrite = pwrite
smoe_mlx.shatter(sys.argv[1], sys.argv[2])
"""


def test_killed_at_any_point_it_is_resumed(tmp_path):
    """kill -9 after so many writes; the next run goes on and makes the very same vault."""
    smoe_mlx.shatter(DEMO, tmp_path / "whole")
    expected = (tmp_path / "whole" / VAULT_FILE).read_bytes()
    for writes in (0, 700, 2900):
        command = [sys.executable, "-c", SHATTER, str(DEMO), str(tmp_path / "v"), str(writes)]
        assert subprocess.run(command).returncode == -signal.SIGKILL
        assert not (tmp_path / "v").exists()
    journal = (tmp_path / "v.partial" / (VAULT_FILE + ".journal")).read_text()
    written = len(journal.splitlines()) - 1
    assert 3 <= written < 8
    calls = []
    smoe_mlx.shatter(DEMO, tmp_path / "v", progress=lambda *a: calls.append(a))
    assert (tmp_path / "v" / VAULT_FILE).read_bytes() == expected
    assert not (tmp_path / "v.partial").exists()
    names = {p.name for p in (tmp_path / "v").iterdir()}
    assert names == {p.name for p in (tmp_path / "whole").iterdir()}


def test_a_partial_vault_of_another_setting_is_not_taken_over(tiny, tmp_path):
    source = tiny("qwen3_moe", None)
    smoe_mlx.shatter(source, tmp_path / "whole", bits=4)
    for other in ({"bits": 8}, {}):
        smoe_mlx.shatter(source, tmp_path / "v", **other)
        shutil.move(tmp_path / "v", tmp_path / "w.partial")
        smoe_mlx.shatter(source, tmp_path / "w", bits=4)
        a, b = ((tmp_path / n / VAULT_FILE).read_bytes() for n in ("w", "whole"))
        assert a == b
        shutil.rmtree(tmp_path / "w")


@pytest.mark.parametrize(
    "journal",
    ["", "{", "null\n", '{"plan": 3}\n', "\x00\xff\n", '{"plan": [1, 2]}\n{"layer": 1}\n'],
)
def test_a_damaged_journal_starts_anew(journal, tiny, tmp_path):
    source = tiny("qwen3_moe", None)
    smoe_mlx.shatter(source, tmp_path / "whole")
    partial = tmp_path / "v.partial"
    partial.mkdir()
    (partial / (VAULT_FILE + ".journal")).write_text(journal)
    size = (tmp_path / "whole" / VAULT_FILE).stat().st_size
    (partial / (VAULT_FILE + ".partial")).write_bytes(b"\x55" * size)
    smoe_mlx.shatter(source, tmp_path / "v")
    assert smoe_mlx.verify(tmp_path / "v", source) == 16


# ---- what does not belong together ---------------------------------------------------------------


@pytest.fixture
def vaulted(tiny, tmp_path):
    return smoe_mlx.shatter(tiny("qwen3_moe", "affine"), tmp_path / "v")


def load_checked(folder):
    config = smoe_mlx.StreamingConfig(slots=0.5, check=True, debug=True)
    return load_model(folder, config=config)[0]


def test_a_vault_of_another_run(vaulted, tiny, tmp_path):
    other = smoe_mlx.shatter(tiny("qwen3_moe", None), tmp_path / "w")
    shutil.copy(other / VAULT_FILE, vaulted / VAULT_FILE)
    with pytest.raises(smoe_mlx.VaultError, match="another"):
        load_checked(vaulted)


def test_a_missing_vault(vaulted):
    (vaulted / VAULT_FILE).unlink()
    with pytest.raises(smoe_mlx.VaultError, match="missing"):
        load_checked(vaulted)


def test_a_source_that_has_changed(vaulted, tiny, tmp_path):
    source = shutil.copytree(tiny("qwen3_moe", "affine"), tmp_path / "s")
    assert smoe_mlx.verify(vaulted, source) == 16
    from conftest import corrupt_expert

    corrupt_expert(source, 2)
    with pytest.raises(smoe_mlx.VaultError, match="expert 2"):
        smoe_mlx.verify(vaulted, source)
    weights = mx.load(str(source / "model.safetensors"))
    mx.save_safetensors(str(source / "model.safetensors"), {**weights, "more": mx.zeros(3)})
    with pytest.raises(smoe_mlx.VaultError, match="another version"):
        smoe_mlx.verify(vaulted, source)


def test_check_finds_damage_when_the_record_is_first_read(vaulted):
    with Vault(vaulted / VAULT_FILE) as vault:
        at = int(vault.table["offset"][5])
    data = bytearray((vaulted / VAULT_FILE).read_bytes())
    data[at + 100] ^= 4
    (vaulted / VAULT_FILE).write_bytes(data)
    model = load_checked(vaulted)
    cache = model._streaming.cache
    cache.claim(0, [4])
    for _ in range(2):
        with pytest.raises(smoe_mlx.VaultError, match=r"expert 5 of model\.layers\.0"):
            cache.claim(0, [5])
    assert cache.table(0)[5] == -1
    cache.claim(0, [4, 6])


SHATTER_AND_MEASURE = """
import json, sys
import mlx.core as mx
import smoe_mlx

def resident_set():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

linux = sys.platform == "linux"  # elsewhere MLX's own count must do
before = resident_set() if linux else 0
smoe_mlx.shatter(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))
print(mx.get_peak_memory(), resident_set() - before if linux else 0)
"""


@pytest.mark.parametrize("options", [{}, {"bits": 4}, {"recipe": "mixed"}], ids=str)
def test_memory_is_bounded_while_shattering(options, tmp_path):
    """A layer at a time: the peak is a fraction of the experts."""
    from conftest import save_checkpoint

    config = {
        **CONFIGS["qwen3_moe"], "num_hidden_layers": 12, "num_experts": 32,
        "moe_intermediate_size": 512, "hidden_size": 256,
    }  # fmt: skip
    source = save_checkpoint(tmp_path / "s", random_model(config), config)
    experts = tiny_nbytes(source)
    if "recipe" in options:
        (tmp_path / "r.json").write_text('{"*.experts.?.*": {"bits": 8}}')
        options = {"recipe": str(tmp_path / "r.json")}
    out = subprocess.run(
        [sys.executable, "-c", SHATTER_AND_MEASURE, source, tmp_path / "v", json.dumps(options)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    peak, rss = map(int, out.stdout.split())
    assert peak < experts / 10
    assert rss < experts / 10 + (32 << 20)  # threads, and what malloc keeps


# ---- commands ------------------------------------------------------------------------------------


def run(*args: str, status: int = 0) -> subprocess.CompletedProcess:
    out = subprocess.run(
        [sys.executable, "-m", "smoe_mlx", *args], capture_output=True, text=True, timeout=120
    )
    assert out.returncode == status, out.stderr
    assert "Traceback" not in out.stderr
    return out


def test_commands(tmp_path):
    out = run("shatter", "demo", str(tmp_path / "v"), "--bits", "3", "--group-size", "32")
    assert str(tmp_path / "v") in out.stdout
    assert "twice" in out.stderr
    assert "512 records" in run("verify", str(tmp_path / "v"), "--source", "demo").stdout
    text = run("generate", str(tmp_path / "v"), "--slots", "0.25", "--max-tokens", "8", "-q").stdout
    assert len(text) > 5
    assert "exists" in run("shatter", "demo", str(tmp_path / "v"), status=1).stderr
    path = tmp_path / "v" / VAULT_FILE
    with path.open("r+b") as f:
        f.seek(-10000, 2)
        f.write(b"oh")
    assert "damaged" in run("verify", str(tmp_path / "v"), status=1).stderr


def test_ctrl_c_while_shattering_leaves_what_can_be_resumed(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "smoe_mlx", "shatter", "demo", str(tmp_path / "v")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.time() + 60
    while not (tmp_path / "v.partial").exists() and time.time() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert b"Traceback" not in err
    if process.returncode:  # it may have been quicker than we
        assert process.returncode == 128 + signal.SIGINT
        assert not (tmp_path / "v").exists()
        smoe_mlx.shatter(DEMO, tmp_path / "v")
    assert smoe_mlx.verify(tmp_path / "v", DEMO) == 512


def test_numpy_alone_reads_a_vault(tiny, tmp_path):
    """The reader in examples/ follows docs/vault-format.md and knows nothing of this library."""
    import importlib.util

    source = tiny("qwen3_moe", "affine")
    smoe_mlx.shatter(source, tmp_path / "v")
    path = Path(__file__).parents[1] / "examples" / "read_vault.py"
    spec = importlib.util.spec_from_file_location("read_vault", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    expert = module.read_expert(tmp_path / "v" / VAULT_FILE, "model.layers.1.mlp.switch_mlp", 5)
    weights = mx.load(str(source / "model.safetensors"))
    for name, got in expert.items():
        want = np.array(weights[f"model.layers.1.mlp.switch_mlp.{name}"])[5]
        assert np.array_equal(got, want)
    assert len(expert) == 9
