"""What the machine has: memory that can be reclaimed, limits of cgroups, pressure."""

import pytest

from smoe_mlx.errors import BudgetError
from smoe_mlx.machine import (
    available_memory,
    cgroup_room,
    memory_pressure,
    parse_meminfo,
    parse_pressure_level,
    parse_psi,
    parse_vm_stat,
    total_memory,
    used_swap,
)

MEMINFO = """\
MemTotal:       65842140 kB
MemFree:         1234567 kB
MemAvailable:   48211320 kB
Buffers:          712036 kB
Cached:         40000000 kB
"""

VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               12345.
Pages active:                            500000.
Pages inactive:                          490000.
Pages speculative:                         1000.
Pages throttled:                              0.
Pages wired down:                        200000.
Pages purgeable:                            200.
"Translation faults":                 123456789.
Pages copy-on-write:                    9999999.
Pages zero filled:                     88888888.
File-backed pages:                        30000.
Anonymous pages:                         700000.
Pages stored in compressor:              400000.
Pages occupied by compressor:            100000.
"""


def test_parse_meminfo_takes_what_is_available_not_what_is_free():
    assert parse_meminfo(MEMINFO) == 48_211_320 * 1024


def test_parse_meminfo_takes_what_is_free_on_an_old_kernel():
    assert parse_meminfo("MemTotal: 9 kB\nMemFree: 7 kB\n") == 7 * 1024
    with pytest.raises(BudgetError, match="give memory"):
        parse_meminfo("nothing of the kind")


def test_parse_vm_stat_counts_what_can_be_reclaimed():
    assert parse_vm_stat(VM_STAT) == 16384 * (12345 + 200 + 30000)


def test_parse_vm_stat_uses_the_page_size_it_is_told():
    assert parse_vm_stat(VM_STAT.replace("16384", "4096")) * 4 == parse_vm_stat(VM_STAT)


def test_parse_vm_stat_can_do_without_a_line():
    text = VM_STAT.replace("Pages purgeable", "Pages something")
    assert parse_vm_stat(text) == 16384 * (12345 + 30000)


# ---- cgroups -------------------------------------------------------------------------------------

V2, V1 = (
    {"limit": "memory.max", "used": "memory.current", "cached": "inactive_file"},
    {
        "limit": "memory.limit_in_bytes",
        "used": "memory.usage_in_bytes",
        "cached": "total_inactive_file",
    },
)


def write_cgroup(folder, names, limit: str, used: int = 3000, cached: int | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names["limit"]).write_text(f"{limit}\n")
    (folder / names["used"]).write_text(f"{used}\n")
    if cached is not None:
        (folder / "memory.stat").write_text(f"anon 1\n{names['cached']} {cached}\nactive_file 1\n")


def room(root, own: str = "") -> int | None:
    (root / "own").write_text(own)
    return cgroup_room(str(root), str(root / "own"))


@pytest.mark.parametrize("names", [V1, V2])
def test_a_cgroup_s_limit_counts_less_what_is_used(tmp_path, names):
    write_cgroup(tmp_path, names, "10000")
    assert room(tmp_path) == 7000


@pytest.mark.parametrize("names", [V1, V2])
def test_a_cgroup_s_cached_file_pages_are_room(tmp_path, names):
    write_cgroup(tmp_path, names, "10000", cached=500)
    assert room(tmp_path) == 7500


def test_a_cgroup_without_a_limit_has_no_say(tmp_path):
    assert room(tmp_path) is None
    write_cgroup(tmp_path, V2, "max")
    assert room(tmp_path) is None
    write_cgroup(tmp_path / "old", V1, "9223372036854771712")
    assert room(tmp_path / "old") is None


@pytest.mark.parametrize("tightest", ["a/b", "a", "."])
def test_the_tightest_limit_above_a_process_counts(tmp_path, tightest):
    for folder in ("a/b", "a", "."):
        write_cgroup(tmp_path / folder, V2, "5000" if folder == tightest else "90000")
    write_cgroup(tmp_path / "other", V2, "3001")
    assert room(tmp_path, "0::/a/b\n") == 2000


def test_the_memory_cgroup_of_the_first_version_is_found(tmp_path):
    write_cgroup(tmp_path / "memory" / "job", V1, "4000")
    assert room(tmp_path, "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n") == 1000
    assert room(tmp_path, "4:memory:/elsewhere\n") is None


# ---- pressure ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("avg10", "pressure"), [("0.00", 0), ("2.50", 0.25), ("63.10", 1)])
def test_parse_psi(avg10, pressure):
    text = f"some avg10={avg10} avg60=9.99 avg300=9.99 total=1\nfull avg10=8.88 avg60=0 total=0\n"
    assert parse_psi(text) == pressure


@pytest.mark.parametrize(("level", "pressure"), [("1\n", 0), ("2\n", 0.5), ("4\n", 1)])
def test_parse_pressure_level(level, pressure):
    assert parse_pressure_level(level) == pressure


def test_a_pressure_that_is_none_is_refused():
    with pytest.raises(ValueError, match="avg10"):
        parse_psi("full avg10=1.00\n")
    with pytest.raises(ValueError, match="'3'"):
        parse_pressure_level("3")


def test_this_machine_has_some_memory():
    assert 1 << 20 < available_memory() <= total_memory()
    assert 0 <= memory_pressure() <= 1
    assert used_swap() >= 0
