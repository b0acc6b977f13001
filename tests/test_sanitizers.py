"""The commands of tests/check_kernels.py that are too slow for here: a little of each."""

import struct

import emulator
import oracle
import pytest
import sanitizers
from emulator import Change, KernelFault, running_in
from sanitizers import BARRIER, FOUR, SIMD_BARRIER, Sanitized

from smoe_mlx.kernels.experts import FusedExperts
from smoe_mlx.kernels.selftest import random_call, random_experts


def test_sanitizers(tmp_path):
    compiler = sanitizers.find_compiler()
    if compiler is None:
        assert emulator.compiler() is not None, "no C++ compiler: install g++ or clang++"
        pytest.skip(sanitizers.NO_COMPILER)

    def run(sanitizer: str, old: str, new: str) -> None:
        change = Change(old, new)
        arrays, (x, slots) = random_experts(FOUR, 1), random_call(FOUR, 1, 1, 1)
        with running_in(Sanitized(tmp_path, compiler, sanitizer, change)):
            try:
                FusedExperts(FOUR)(arrays, x, slots)
            finally:
                assert all(change.found)

    run("thread", BARRIER, BARRIER)
    with pytest.raises(KernelFault, match="data race"):
        run("thread", BARRIER, SIMD_BARRIER)
    with pytest.raises(KernelFault, match="heap-buffer-overflow"):
        run("address", "row < uint32_t(N) ? row : 0u", "row + 16u")


def metal_library(name: bytes, bitcode: bytes) -> bytes:
    """A Metal library with two functions, of which this is the second."""

    def entry(name: bytes, offset: int) -> bytes:
        fields = {
            b"NAME": name + b"\0", b"TYPE": b"\2", b"OFFT": struct.pack("<3Q", 0, 0, offset),
            b"MDSZ": struct.pack("<Q", len(bitcode)),
        }  # fmt: skip
        body = b"".join(tag + struct.pack("<H", len(x)) + x for tag, x in fields.items()) + b"ENDT"
        return struct.pack("<I", 4 + len(body)) + body

    entries = entry(b"other", 0) + entry(name, len(bitcode))
    code = 88 + 4 + len(entries)
    header = b"MTLB" + bytes(20) + struct.pack("<8Q", 88, len(entries), 0, 0, 0, 0, code, 0)
    return header + struct.pack("<I", 2) + entries + b"x" * len(bitcode) + bitcode


def test_bitcode_in_a_metal_library():
    bitcode = b"\xde\xc0\x17\x0b" + b"bitcode"
    library = metal_library(b"gather", bitcode)
    assert oracle.find_bitcode(library, "gather") == bitcode
    with pytest.raises(ValueError, match="has no gat"):
        oracle.find_bitcode(library, "gat")
    with pytest.raises(ValueError, match="damaged"):
        oracle.find_bitcode(library, "other")
    for n in range(len(library)):
        with pytest.raises(ValueError, match="Metal library"):
            oracle.find_bitcode(library[:n], "gather")
        for byte in (0, 127, 255):
            damaged = library[:n] + bytes([byte]) + library[n + 1 :]
            try:
                found = oracle.find_bitcode(damaged, "gather")
            except ValueError:
                continue
            assert len(found) <= len(library)
