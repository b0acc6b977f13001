"""SafetensorsMmap and Checkpoint: good files open right, everything else is refused by name."""

import json
import math
import os
import re
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from smoe_mlx.errors import CheckpointChangedError, CheckpointError
from smoe_mlx.store.safetensors import DTYPE_BITS, MAX_HEADER_NBYTES, Checkpoint, SafetensorsMmap

NUMPY_DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16,
    "U32": np.uint32, "I32": np.int32, "U64": np.uint64, "I64": np.int64,
    "F16": np.float16, "F32": np.float32, "F64": np.float64, "C64": np.complex64,
}  # fmt: skip


def write_raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file with this header: an object to be written as JSON, or the header's very bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_small(path: Path) -> Path:
    a = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(5, dtype=np.uint8)}
    save_file(a, path, metadata={"format": "mlx"})
    os.utime(path, (1, 1))  # so that any later write changes the time, however coarse the clock
    return path


def next_descriptor() -> int:
    fd = os.open(os.devnull, os.O_RDONLY)
    os.close(fd)
    return fd


def assert_consistent(file: SafetensorsMmap) -> None:
    """All tensors inside the file, behind the header, of the size they say, none overlapping."""
    size = os.fstat(file.fileno()).st_size
    end = 8 + int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    for name, t in sorted(file.tensors.items(), key=lambda kv: (kv[1].offset, kv[1].nbytes)):
        assert t.nbytes * 8 == math.prod(t.shape) * DTYPE_BITS[t.dtype]
        assert all(type(n) is int and n >= 0 for n in t.shape)
        if t.nbytes:
            assert t.offset >= end
            end = t.offset + t.nbytes
        assert t.offset + t.nbytes <= size
        assert len(file.tensor_bytes(name)) == t.nbytes


# ---- files as they should be ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_dtype_of_the_safetensors_library_opens_right(tmp_path, dtype):
    rng = np.random.default_rng(0)
    kind = NUMPY_DTYPES[dtype]
    arrays = {
        "matrix": rng.integers(0, 100, (3, 4)).astype(kind),
        "scalar": np.array(1, kind),
        "empty": np.zeros((0, 7), kind),
    }
    save_file(arrays, tmp_path / "f.safetensors", metadata={"who": "test"})
    with SafetensorsMmap(tmp_path / "f.safetensors") as file:
        assert file.metadata == {"who": "test"}
        assert set(file.tensors) == set(arrays)
        for name, a in arrays.items():
            info = file.tensors[name]
            assert (info.dtype, info.shape, info.nbytes) == (dtype, a.shape, a.nbytes)
            assert file.tensor_bytes(name) == a.tobytes()
            assert os.pread(file.fileno(), info.nbytes, info.offset) == a.tobytes()


def test_bf16_opens_right(tmp_path):
    data = bytes(range(12))
    path = write_raw(tmp_path / "f", {"w": entry("BF16", [2, 3], [0, 12])}, data)
    with SafetensorsMmap(path) as file:
        info = file.tensors["w"]
        assert (info.dtype, info.shape, info.nbytes) == ("BF16", (2, 3), 12)
        assert file.tensor_bytes("w") == data


def test_four_bit_floats_are_counted_in_bits(tmp_path):
    path = write_raw(tmp_path / "f", {"w": entry("F4", [2, 3], [0, 3])}, b"abc")
    with SafetensorsMmap(path) as file:
        assert file.tensors["w"].nbytes == 3


def test_a_file_without_tensors_opens(tmp_path):
    with SafetensorsMmap(write_raw(tmp_path / "f", {})) as file:
        assert file.tensors == {}
        assert file.metadata == {}


def test_tensors_in_any_order_and_with_padding_open_right(tmp_path):
    header = {"late": entry(offsets=[8, 12]), "early": entry(offsets=[0, 4])}
    with SafetensorsMmap(write_raw(tmp_path / "f", header, b"aaaa....bbbb")) as file:
        assert file.tensor_bytes("early") == b"aaaa"
        assert file.tensor_bytes("late") == b"bbbb"


def test_the_path_may_be_text(tmp_path):
    path = write_small(tmp_path / "f")
    with SafetensorsMmap(str(path)) as file:
        assert file.path == path


def test_views_are_read_only(tmp_path):
    with SafetensorsMmap(write_small(tmp_path / "f")) as file:
        assert file.tensor_bytes("a").readonly


# ---- hostile files -------------------------------------------------------------------------------

DATA = bytes(8)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"

# what is wrong -> (the file's bytes or its header, data, words that the message must hold)
HOSTILE_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes"),
    "seven bytes": (b"\x02\0\0\0\0\0\0", "7 bytes"),
    "header length of 2^64-1": (b"\xff" * 8 + b"{}", str(2**64 - 1)),
    "header over the format's bound": (
        (MAX_HEADER_NBYTES + 1).to_bytes(8, "little") + b"{}",
        str(MAX_HEADER_NBYTES + 1),
    ),
    "header beyond the end": ((3).to_bytes(8, "little") + b"{}", "truncated"),
    "a Git LFS pointer": (LFS, "git lfs pull"),
    "a web page": (b"<!DOCTYPE html><html>404</html>", "not a safetensors file"),
}
HOSTILE_HEADERS: dict[str, tuple[object, str]] = {
    "no header": (b"", "JSON"),
    "not UTF-8": (b'{"\xff": 1}', "JSON"),
    "not JSON": (b"{'a': 1}", "JSON"),
    "JSON with more behind": (b"{} {}", "JSON"),
    "nested deeply": (b"[" * 100_000, "JSON"),
    "nested deeply and closed": (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "JSON"),
    "a number of 5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "again"),
    "a list": ([1, 2], "not a JSON object"),
    "a number": (3, "not a JSON object"),
    "null": (None, "not a JSON object"),
    "metadata is a list": ({"__metadata__": [1]}, "__metadata__"),
    "metadata is text": ({"__metadata__": "mlx"}, "__metadata__"),
}
HOSTILE_ENTRIES: dict[str, tuple[object, str]] = {
    "a list": ([], "has no dtype"),
    "null": (None, "has no dtype"),
    "text": ("dtype shape data_offsets", "has no dtype"),
    "no dtype": ({"shape": [4], "data_offsets": [0, 4]}, "has no dtype"),
    "no shape": ({"dtype": "U8", "data_offsets": [0, 4]}, "shape"),
    "no offsets": ({"dtype": "U8", "shape": [4]}, "data_offsets"),
    "unknown dtype": (entry("U7"), "'U7'"),
    "dtype in small letters": (entry("u8"), "'u8'"),
    "dtype is a number": (entry(8), "dtype 8"),
    "dtype is a list": (entry(["U8"]), "dtype"),
    "negative shape": (entry(shape=[-4]), "[-4]"),
    "two negative sizes": (entry(shape=[-2, -2]), "[-2, -2]"),
    "bool shape": (entry(shape=[True, 4]), "[True, 4]"),
    "float shape": (entry(shape=[4.0]), "[4.0]"),
    "text shape": (entry(shape=["4"]), "['4']"),
    "shape is a number": (entry(shape=4), "shape 4"),
    "shape is an object": (entry(shape={"4": 4}), "shape"),
    "offsets reversed": (entry(offsets=[4, 0]), "data_offsets"),
    "offsets negative": (entry(offsets=[-4, 0]), "[-4, 0]"),
    "offsets bool": (entry(shape=[1], offsets=[False, True]), "data_offsets"),
    "offsets float": (entry(offsets=[0.0, 4.0]), "data_offsets"),
    "one offset": (entry(offsets=[4]), "data_offsets"),
    "three offsets": (entry(offsets=[0, 2, 4]), "data_offsets"),
    "offsets are text": (entry(offsets="04"), "data_offsets"),
    "too few bytes": (entry(offsets=[0, 3]), "4 bytes"),
    "too many bytes": (entry(offsets=[0, 5]), "4 bytes"),
    "bytes for no elements": (entry(shape=[0], offsets=[0, 4]), "0 bytes"),
    "half a byte": (entry("F4", [3], [0, 1]), "1.5 bytes"),
    "data truncated": (entry(shape=[9], offsets=[0, 9]), "truncated"),
    "wholly outside": (entry(offsets=[100, 104]), "truncated"),
    "outside, with no elements": (entry(shape=[0], offsets=[100, 100]), "truncated"),
    "2^62 elements": (entry(shape=[2**31, 2**31], offsets=[0, 2**62]), "truncated"),
    "a product that wraps to 4 at 64 bits": (entry(shape=[2**62 + 1, 4]), "data_offsets"),
}


def assert_refused(path: Path, *words: str) -> None:
    before = next_descriptor()
    with pytest.raises(CheckpointError) as caught:
        SafetensorsMmap(path)
    for word in (str(path), *words):
        assert word in str(caught.value)
    assert next_descriptor() <= before, "a refused file was left open"


@pytest.mark.parametrize("case", HOSTILE_FILES)
def test_hostile_file_is_refused_by_name(tmp_path, case):
    content, words = HOSTILE_FILES[case]
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(content)
    assert_refused(path, words)


@pytest.mark.parametrize("case", HOSTILE_HEADERS)
def test_hostile_header_is_refused_by_name(tmp_path, case):
    header, words = HOSTILE_HEADERS[case]
    assert_refused(write_raw(tmp_path / "hostile.safetensors", header, DATA), words)


@pytest.mark.parametrize("case", HOSTILE_ENTRIES)
def test_hostile_tensor_is_refused_by_file_and_tensor(tmp_path, case):
    bad, words = HOSTILE_ENTRIES[case]
    header = {"fine": entry(), "layers.0.bad": bad}
    if case == "a list":  # a good file but for this entry, or the test shows nothing
        SafetensorsMmap(write_raw(tmp_path / "good", {"fine": entry()}, DATA)).close()
    assert_refused(write_raw(tmp_path / "hostile", header, DATA), "'layers.0.bad'", words)


def test_a_tensor_named_twice_is_refused_by_name(tmp_path):
    one = json.dumps(entry())
    path = write_raw(tmp_path / "f", f'{{"twice": {one}, "twice": {one}}}'.encode(), DATA)
    assert_refused(path, "'twice'")


def test_a_key_named_twice_inside_a_tensor_is_refused(tmp_path):
    text = b'{"w": {"dtype": "U8", "shape": [4], "shape": [4], "data_offsets": [0, 4]}}'
    assert_refused(write_raw(tmp_path / "f", text, DATA), "'shape'")


def test_every_dtype_has_the_bits_that_its_name_says():
    bits = {name: int(re.search(r"\d+", name)[0]) for name in DTYPE_BITS if name != "BOOL"}
    assert bits | {"BOOL": 8} == DTYPE_BITS
    assert len(bits) > 20


@pytest.mark.parametrize("second", [(0, 4), (3, 7), (1, 5)])
def test_overlapping_tensors_are_refused_by_name(tmp_path, second):
    header = {"one": entry(offsets=[0, 4]), "two": entry(offsets=second)}
    path = write_raw(tmp_path / "f", header, DATA)
    assert_refused(path, "overlaps", "'one'", "'two'")


def test_a_tensor_inside_another_is_refused(tmp_path):
    header = {"outer": entry(shape=[8], offsets=[0, 8]), "inner": entry(shape=[2], offsets=[3, 5])}
    assert_refused(write_raw(tmp_path / "f", header, DATA), "'inner'")


def test_the_claimed_header_length_is_not_allocated(tmp_path):
    path = write_raw(tmp_path / "f", b"{}", length=MAX_HEADER_NBYTES)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            SafetensorsMmap(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("size", "end"), [(10**400, 4), (10**4300 - 1, 10**4300 - 1)], ids=["float", "digits"]
)
def test_a_shape_of_absurd_size_is_refused(tmp_path, size, end):
    header = f'{{"w": {{"dtype": "U8", "shape": [{size}], "data_offsets": [0, {end}]}}}}'
    path = write_raw(tmp_path / "f", header.encode(), DATA)
    with pytest.raises(CheckpointError, match="'w'"):
        SafetensorsMmap(path)


def test_the_message_stays_short_however_long_the_shape(tmp_path):
    path = write_raw(tmp_path / "f", {"w": entry(shape=[1] * 10_000)}, DATA)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsMmap(path)
    assert len(str(caught.value)) < 1000 + len(str(path))


def test_a_folder_in_place_of_a_file_is_refused_by_name(tmp_path):
    assert_refused(tmp_path)


def test_a_missing_file_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        SafetensorsMmap(tmp_path / "absent.safetensors")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder, and the bytes of a small valid file."""
    folder = tmp_path_factory.mktemp("mutations")
    return folder, write_small(folder / "valid").read_bytes()


def open_or_refuse(path: Path) -> None:
    message = str(path)
    tracemalloc.start()
    try:
        with SafetensorsMmap(path) as file:
            assert_consistent(file)
    except CheckpointError as e:
        message = str(e)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert str(path) in message
    assert peak < 1_000_000, "a small file took much memory"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=4),
    st.none() | st.integers(0, 1 << 20),
)
@example([], None)
def test_mutated_or_truncated_file_is_refused_or_consistent(small, changes, cut):
    folder, valid = small
    content = bytearray(valid)
    header_end = 8 + int.from_bytes(valid[:8], "little")
    for place, byte in changes:
        content[place % header_end] = byte
    if cut is not None:
        content = content[: cut % (len(valid) + 1)]
    path = folder / "mutant"
    path.write_bytes(content)
    open_or_refuse(path)
    if not changes and cut is None:
        SafetensorsMmap(path).close()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_file_that_the_safetensors_library_takes_opens_the_same(small, data):
    """Change characters of the JSON to characters of JSON: what stays valid must open."""
    folder, valid = small
    header_end = 8 + int.from_bytes(valid[:8], "little")
    content = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(8, header_end - 1))
        content[place] = data.draw(st.sampled_from(b'0123456789 "[]{},:abUIF_-.'))
    path = folder / "other"
    path.write_bytes(content)
    try:
        theirs = {
            n: (t["shape"], bytes(t["data"])) for n, t in safetensors.deserialize(bytes(content))
        }
    except safetensors.SafetensorError:
        return
    try:
        with SafetensorsMmap(path) as file:
            ours = {
                n: (list(t.shape), bytes(file.tensor_bytes(n))) for n, t in file.tensors.items()
            }
    except CheckpointError as e:
        if "named twice" in str(e):  # the one thing that they take and we do not
            return
        raise
    assert ours == theirs


sizes = st.integers(-1, 9) | st.booleans() | st.just(2.0) | st.just(2**64)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F16", "F4", "BF16", "X"]),
        "shape": st.lists(sizes, max_size=3),
        "data_offsets": st.lists(sizes, min_size=2, max_size=2),
    }
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(max_size=3), entries | st.none(), max_size=4))
@example({"a": entry("U8", [2], [0, 2]), "b": entry("F16", [1, 2], [2, 6])})
@example({"\ud800": entry("U8", [2], [0, 3])})
def test_any_header_of_the_right_form_is_refused_or_consistent(small, header):
    open_or_refuse(write_raw(small[0] / "made", header, DATA))


# ---- byte ranges, changes, closing ---------------------------------------------------------------


def test_byte_range_returns_the_file_s_bytes(tmp_path):
    path = write_small(tmp_path / "f")
    content = path.read_bytes()
    with SafetensorsMmap(path) as file:
        for offset, nbytes in [(0, 8), (3, 11), (0, len(content)), (len(content), 0)]:
            assert file.byte_range(offset, nbytes) == content[offset : offset + nbytes]


def test_byte_range_outside_the_file_is_an_error_that_names_it(tmp_path):
    path = write_small(tmp_path / "f")
    size = path.stat().st_size
    with SafetensorsMmap(path) as file:
        for offset, nbytes in [(-1, 2), (0, -1), (0, size + 1), (size, 1), (size + 1, 0), (-3, 3)]:
            with pytest.raises(ValueError, match="outside the file") as caught:
                file.byte_range(offset, nbytes)
            assert str(path) in str(caught.value)


def test_byte_range_of_a_truncated_file_is_never_short(tmp_path):
    path = write_small(tmp_path / "f")
    with SafetensorsMmap(path) as file:
        os.truncate(path, 20)
        with pytest.raises(CheckpointChangedError):
            file.byte_range(10, 20)


def test_an_unchanged_file_passes_the_check(tmp_path):
    with SafetensorsMmap(write_small(tmp_path / "f")) as file:
        file.tensor_bytes("a")
        file.check_unchanged()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def overwrite(path: Path) -> None:
    with open(path, "r+b") as f:
        f.seek(-1, os.SEEK_END)
        f.write(b"!")


def append(path: Path) -> None:
    with open(path, "ab") as f:
        f.write(b"!")


def replace(path: Path) -> None:
    path.with_suffix(".new").write_bytes(path.read_bytes())
    os.replace(path.with_suffix(".new"), path)


@pytest.mark.parametrize("change", [truncate, overwrite, append, replace, os.unlink])
def test_a_changed_file_is_noticed_by_name(tmp_path, change):
    path = write_small(tmp_path / "f")
    with SafetensorsMmap(path) as file:
        change(path)
        with pytest.raises(CheckpointChangedError) as caught:
            file.check_unchanged()
        assert str(path) in str(caught.value)


def test_close_closes_the_descriptor_and_may_be_repeated(tmp_path):
    file = SafetensorsMmap(write_small(tmp_path / "f"))
    fd = file.fileno()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    file.close()


def test_the_context_manager_closes_even_on_an_error(tmp_path):
    before = next_descriptor()
    with pytest.raises(KeyError), SafetensorsMmap(write_small(tmp_path / "f")) as file:
        file.tensor_bytes("absent")
    assert file.fileno() == -1
    assert next_descriptor() <= before


def test_a_file_that_is_dropped_is_closed(tmp_path):
    before = next_descriptor()
    file = SafetensorsMmap(write_small(tmp_path / "f"))
    assert next_descriptor() > before
    del file
    assert next_descriptor() <= before


def test_views_outlive_close(tmp_path):
    with SafetensorsMmap(write_small(tmp_path / "f")) as file:
        view = file.tensor_bytes("b")
    assert view == bytes(range(5))


def test_the_mapping_is_gone_with_the_file_and_its_last_view(tmp_path):
    file = SafetensorsMmap(write_small(tmp_path / "f"))
    view = file.tensor_bytes("b")
    mapping = weakref.ref(view.obj)
    assert file.tensor_bytes("a").obj is view.obj
    file.close()
    assert mapping() is not None
    del view
    assert mapping() is None


def test_a_closed_file_gives_no_new_views(tmp_path):
    file = SafetensorsMmap(write_small(tmp_path / "f"))
    file.close()
    with pytest.raises((OSError, ValueError)):
        file.byte_range(0, 1)


# ---- folders -------------------------------------------------------------------------------------


def write_folder(folder: Path, **shards: dict[str, np.ndarray]) -> Path:
    """Shards and their index, as mlx-lm and transformers write them."""
    weight_map = {}
    for name, tensors in shards.items():
        save_file(tensors, folder / f"{name}.safetensors")
        weight_map.update(dict.fromkeys(tensors, f"{name}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def ones(n: int) -> np.ndarray:
    return np.full(n, n, np.uint8)


def test_checkpoint_finds_every_tensor_in_its_shard(tmp_path):
    write_folder(tmp_path, model_1={"a": ones(3), "b": ones(4)}, model_2={"c": ones(5)})
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint.tensors) == {"a", "b", "c"}
    for name, n in [("a", 3), ("b", 4), ("c", 5)]:
        shard, info = checkpoint.tensors[name]
        assert os.pread(checkpoint.files[shard].fileno(), info.nbytes, info.offset) == bytes(
            [n] * n
        )
    assert checkpoint.files[checkpoint.tensors["c"][0]].path.name == "model_2.safetensors"
    assert checkpoint.repeated == {}
    checkpoint.close()


def test_checkpoint_leaves_other_files_alone(tmp_path):
    write_folder(tmp_path, model={"a": ones(3)})
    (tmp_path / "adapters.safetensors").write_bytes(b"junk")
    (tmp_path / "model.bin").write_bytes(b"junk")
    checkpoint = Checkpoint(tmp_path)
    assert [f.path.name for f in checkpoint.files] == ["model.safetensors"]
    checkpoint.close()


def test_a_folder_without_weights_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_shard_is_named(tmp_path):
    write_folder(tmp_path, model_1={"a": ones(3)}, model_2={"b": ones(4)}, model_3={"c": ones(4)})
    (tmp_path / "model_2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model_2\.safetensors.*1 of 3") as caught:
        Checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "no JSON", "[]", "null", "{}", '{"weight_map": 1}', '{"weight_map": ["a"]}',
     '{"weight_map": {"a": {}}}', '{"weight_map": {"a": "x", "b": 1}}', '{"weight_map": {"a": 1}}',
     b"\xff\xfe"],
)  # fmt: skip
def test_an_index_of_another_form_is_refused_by_name(tmp_path, text):
    write_folder(tmp_path, model={"a": ones(3)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert index.name in str(caught.value)


def test_a_deeply_nested_index_is_refused(tmp_path):
    write_folder(tmp_path, model={"a": ones(3)})
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError):
        Checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_reported_with_both(tmp_path):
    write_folder(tmp_path, model_1={"a": ones(3), "b": ones(1)}, model_2={"a": ones(3)})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.repeated == {
        "a": (tmp_path / "model_1.safetensors", tmp_path / "model_2.safetensors")
    }
    checkpoint.close()


def test_a_bad_shard_is_named_and_nothing_stays_open(tmp_path):
    write_folder(tmp_path, model_1={"a": ones(3)}, model_2={"b": ones(4)})
    bad = tmp_path / "model_2.safetensors"
    os.truncate(bad, bad.stat().st_size - 1)
    before = next_descriptor()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert str(bad) in str(caught.value)
    assert "'b'" in str(caught.value)
    assert next_descriptor() <= before


def test_closing_a_checkpoint_closes_all_its_files(tmp_path):
    before = next_descriptor()
    checkpoint = Checkpoint(write_folder(tmp_path, model_1={"a": ones(3)}, model_2={"b": ones(4)}))
    assert next_descriptor() > before
    checkpoint.close()
    assert next_descriptor() <= before
    assert [f.fileno() for f in checkpoint.files] == [-1, -1]
