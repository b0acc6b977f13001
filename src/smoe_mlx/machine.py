"""What the machine has: memory that can be had without swapping, and how scarce it is.

Reads what the system says; knows no models and no MLX.
"""

import contextlib
import os
import platform
import re
import subprocess
from pathlib import Path

from .errors import BudgetError

CGROUP = "/sys/fs/cgroup"
# (limit, used, pages that give way) by version of the cgroups.
CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
NO_LIMIT = 1 << 60  # the first version writes a number of this kind where there is none


def available_memory() -> int:
    """Bytes that could be allocated now without swapping.

    macOS: free, purgeable and file-backed pages (`vm_stat`); `kern.memorystatus_level` counts what
    would have to be compressed. Linux: MemAvailable, within the limits of the process's cgroups.
    """
    if platform.system() == "Darwin":
        return parse_vm_stat(_output("vm_stat"))
    available = parse_meminfo(Path("/proc/meminfo").read_text())
    room = cgroup_room()
    return available if room is None else max(0, min(available, room))


def total_memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def used_swap() -> int:
    """Bytes that lie in swap space now; 0 if that cannot be told."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, TypeError):
        if platform.system() == "Darwin":
            text = _output("sysctl", "-n", "vm.swapusage")
            return int(float(re.search(r"used = ([\d.]+)M", text)[1]) * (1 << 20))  # type: ignore[index]
        text = Path("/proc/meminfo").read_text()
        return _kilobytes(text, "SwapTotal") - _kilobytes(text, "SwapFree")
    return 0


def memory_pressure() -> float:
    """How scarce memory is: from 0, plenty, to 1, where the system stalls or kills.

    Linux: the share of the last ten seconds in which something waited for memory (PSI), a tenth of
    the time being 1. macOS: the kernel's level, warning 0.5 and critical 1. Where the system tells
    neither: 1 with less than a twentieth of memory available.
    """
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        if platform.system() == "Darwin":
            return parse_pressure_level(
                _output("sysctl", "-n", "kern.memorystatus_vm_pressure_level")
            )
        return parse_psi(Path("/proc/pressure/memory").read_text())
    return float(available_memory() < total_memory() / 20)


# ---- parsing -------------------------------------------------------------------------------------


def parse_meminfo(text: str) -> int:
    """MemAvailable of /proc/meminfo (MemFree on a kernel without it), in bytes."""
    for name in ("MemAvailable", "MemFree"):
        with contextlib.suppress(TypeError):
            return _kilobytes(text, name)
    raise BudgetError("cannot tell how much memory is free: give memory or slots")


def _kilobytes(text: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024  # type: ignore[index]


def parse_vm_stat(text: str) -> int:
    """Reclaimable bytes from the output of macOS' `vm_stat`."""
    page = int(re.search(r"page size of (\d+) bytes", text)[1])  # type: ignore[index]

    def pages(name: str) -> int:
        match = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
        return int(match[1]) if match else 0

    # Speculative pages are file-backed ones that were read ahead.
    names = ("Pages free", "Pages purgeable", "File-backed pages")
    return page * sum(map(pages, names))


def parse_psi(text: str) -> float:
    """Pressure from Linux' /proc/pressure/memory: "some avg10" in percent, 10 being 1.

    Raises:
        ValueError: there is no such line.
    """
    match = re.search(r"^some avg10=([\d.]+)", text, re.MULTILINE)
    if match is None:
        raise ValueError("no 'some avg10' in the pressure file")
    return min(1.0, float(match[1]) / 10)


def parse_pressure_level(text: str) -> float:
    """Pressure from macOS' level: 1 normal, 2 warning, 4 critical.

    Raises:
        ValueError: it is another one.
    """
    levels = {"1": 0.0, "2": 0.5, "4": 1.0}
    if text.strip() not in levels:
        raise ValueError(f"unknown memory pressure level {text.strip()!r:.20}")
    return levels[text.strip()]


def cgroup_room(root: str = CGROUP, of_process: str = "/proc/self/cgroup") -> int | None:
    """Bytes left under the memory limits of the process's cgroup and those above it (v1 and v2), or
    None without any.

    Cached file pages count as used there, but give way: `inactive_file` is room.
    """
    folders = [Path(root)]
    with contextlib.suppress(OSError):
        for line in Path(of_process).read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                top = Path(root, "memory" if controllers else "")
                own = top / path.lstrip("/")
                folders += [own, *(p for p in own.parents if p.is_relative_to(top))]
    rooms = [r for folder in dict.fromkeys(folders) if (r := _room_in(folder)) is not None]
    return min(rooms, default=None)


def _room_in(folder: Path) -> int | None:
    for limit_file, used_file, cached_name in CGROUP_FILES:
        with contextlib.suppress(OSError):
            limit = (folder / limit_file).read_text().strip()
            if limit == "max" or int(limit) >= NO_LIMIT:
                return None
            room = int(limit) - int((folder / used_file).read_text())
            with contextlib.suppress(OSError):
                stat = (folder / "memory.stat").read_text()
                if cached := re.search(rf"^{cached_name} (\d+)", stat, re.MULTILINE):
                    room += int(cached[1])
            return room
    return None


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
