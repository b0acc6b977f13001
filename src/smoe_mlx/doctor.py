"""smoe-mlx doctor: will this model run on that machine, in how much memory, how fast, and by which
command? From the model's headers; nothing of the weights is downloaded."""

import contextlib
import os
import platform
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import mlx.core as mx

from .config import StreamingConfig, parse_bytes
from .device import available_nbytes
from .errors import BudgetError, CheckpointError
from .hub import fetch_headers, find_local
from .load import open_weights, plan_for
from .machine import total_memory, used_swap
from .plan import INTERPRETER_NBYTES, SYSTEM_NBYTES, MemoryPlan, format_bytes, usable_nbytes
from .skeleton import Skeleton, build_skeleton
from .speed import Compute, Forecast, forecast, measure_compute
from .store.files import Known, OpenFile
from .store.probe import DiskProbe, probe_disk
from .trace import Trace
from .tuned import find_tuned

# Of all memory, what could be had without swapping on two Macs in use: 17.4 of 24 GB, 33.8 of 48.
AVAILABLE_SHARE = 0.7
SIZES = tuple(n * 10**9 for n in (8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512))
SIM_LATENCY = 100e-6  # of an SSD that one does not have
ASSUMED_DISK = 3e9  # bytes a second, where nothing could be measured
PROBE_DAYS = 30  # for which a measurement of a disk is believed
SWAP_NBYTES = 1 << 30  # more than this in use slows everything


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
        problem: why it does not fit, or "".
        plan: of the memory, if it fits.
        needs: the least `memory` that works, the least that is useful, and that for everything.
        download_nbytes: what has to be fetched first; 0 for a local folder.
        total, available: memory of the machine.
        disk: its speed; `disk_source` says where that is from.
        compute: this machine's, or None if it could not be measured.
        forecast: None without `plan` or `compute`.
        notes: what else the user should know.
        command: what to run.
    """

    model: str
    problem: str
    plan: MemoryPlan | None
    needs: tuple[int, int, int]
    download_nbytes: int
    total: int
    available: int
    simulated: bool
    disk: DiskProbe
    disk_source: str
    compute: Compute | None
    forecast: Forecast | None
    notes: tuple[str, ...]
    command: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plan = self.plan.as_dict() if self.plan else None
        return {**asdict(self), "plan": plan}

    def __str__(self) -> str:
        lines = [f"{self.model}: {'does not fit' if self.problem else 'fits'}"]
        if self.problem:
            lines += [self.problem]
        memory = f"{format_bytes(self.available)} of {format_bytes(self.total)} can be had"
        lines += ["", f"memory     {memory}{' (simulated)' if self.simulated else ''}"]
        least, useful, full = map(format_bytes, self.needs)
        lines += [f"           it needs {least}, is useful from {useful}; everything is {full}"]
        if self.plan is not None:
            share = 100 * self.plan.slots / self.plan.num_experts
            lines += [
                f"           planned: {format_bytes(self.plan.total)} with {self.plan.slots:,} of "
                f"{self.plan.num_experts:,} experts ({share:.0f} %) in memory, "
                f"{self.plan.context:,} tokens of context"
            ]
        lines += [f"disk       {_disk_text(self.disk)}; {self.disk_source}"]
        if self.download_nbytes:
            lines += [f"download   {format_bytes(self.download_nbytes)}"]
        if self.forecast is not None:
            lines += _speed_lines(self.forecast)
        elif self.plan is not None:
            lines += ["speed      not known: this machine has no room to try a forward"]
        lines += ["", *(f"* {note}" for note in self.notes)] if self.notes else []
        return "\n".join([*lines, "", "run it:", f"  {self.command}"])


def _disk_text(disk: DiskProbe) -> str:
    return (
        f"{disk.bytes_per_second / 1e9:.2f} GB/s, {disk.latency_seconds * 1e3:.2f} ms latency "
        f"(records of {format_bytes(disk.record_nbytes)})"
    )


def _speed_lines(f: Forecast) -> list[str]:
    low, mid, high = f.token.rates()
    p_low, p_mid, p_high = f.prompt.rates(f.prompt_tokens)
    source = "by the trace" if f.traced else "by a curve for models in general"
    ms = 1e3
    return [
        f"decoding   {_rate(mid)} tok/s likely, between {_rate(low)} and {_rate(high)}",
        f"           a token: {f.compute * ms:.1f} ms compute, {f.syncs * ms:.1f} ms looking at "
        f"the routing, {f.reading * ms:.1f} ms reading {format_bytes(f.nbytes)} "
        f"({f.hidden * ms:.1f} ms of it hidden)",
        f"           {100 * f.hit_rate:.0f} % of experts found in memory, {source}",
        f"prompts    {_rate(p_mid)} tok/s likely, between {_rate(p_low)} and {_rate(p_high)}: "
        f"{f.prompt.likely:.1f} s to the first token after {f.prompt_tokens:,}",
    ]


def _rate(x: float) -> str:
    return f"{x:.2g}" if x < 0.1 else f"{x:.2f}" if x < 10 else f"{x:.0f}"


def diagnose(
    name: str,
    config: StreamingConfig,
    revision: str | None = None,
    trust_remote_code: bool = False,
    sim_ram: str | None = None,
    sim_disk: str | None = None,
    trace: Trace | None = None,
) -> Diagnosis:
    """Examine a local folder or a Hub repository, of which only headers are fetched.

    Args:
        sim_ram, sim_disk: of a machine that one does not have: "16GB", "3GB/s". Compute is still
            this machine's.

    Raises:
        ModelNotFoundError, UnsupportedModelError, CheckpointError: as `load`.
    """
    with _headers(name, revision) as (folder, is_remote):
        checkpoint, vault = open_weights(folder)
        files: Sequence[OpenFile] = checkpoint.files if vault is None else [vault]
        try:
            skeleton = build_skeleton(folder, checkpoint, None, trust_remote_code, vault)
            total = total_memory() if sim_ram is None else parse_bytes(sim_ram)
            here = available_nbytes()
            available = here if sim_ram is None else int(AVAILABLE_SHARE * total)
            whole = plan_for(skeleton, replace(config, memory=None, slots=1.0), available=0)
            plan, problem = None, ""
            try:
                plan = plan_for(skeleton, config, available)
                if plan.total + INTERPRETER_NBYTES > available:
                    problem = (
                        f"{format_bytes(plan.total)} are asked for, but only "
                        f"{format_bytes(available)} can be had without swapping."
                    )
            except BudgetError as e:
                problem = str(e)
            disk, source = _disk(files, skeleton, config, is_remote, sim_disk)
            compute = None
            if whole.backbone + SYSTEM_NBYTES < here:
                compute = measure_compute(skeleton, config)
            told = None
            if plan is not None and compute is not None:
                told = forecast(plan, config, compute, disk, trace)
            fetched = [*checkpoint.files, *([vault] if vault else [])] if is_remote else []
            download = sum(f.fingerprint.size for f in fetched)
            notes = _advice(whole, plan, problem, total, available, told)
            notes += known_problems(download)
            if (tuned := None if is_remote else find_tuned(folder, config)) is not None:
                notes.append(f"load will do as tuned: {tuned}. The forecast is without.")
            if sim_ram is not None and compute is not None:
                notes.append("Compute was measured here: on another chip it will be another.")
            return Diagnosis(
                model=name,
                problem=problem,
                plan=plan,
                needs=(whole.minimum, whole.useful, whole.full),
                download_nbytes=download,
                total=total,
                available=available,
                simulated=sim_ram is not None,
                disk=disk,
                disk_source=source,
                compute=compute,
                forecast=told,
                notes=tuple(notes),
                command=_command(name, revision, trust_remote_code, config, problem, whole),
            )
        finally:
            for file in (*checkpoint.files, *([vault] if vault else [])):
                file.close()


@contextlib.contextmanager
def _headers(name: str, revision: str | None) -> Iterator[tuple[Path, bool]]:
    """A folder with the model's headers, and whether it is only that."""
    folder = find_local(name)
    if folder is not None:
        yield folder, False
        return
    with tempfile.TemporaryDirectory() as temporary:
        fetch_headers(name, revision, Path(temporary))
        try:
            yield Path(temporary), True
        except CheckpointError as e:
            raise type(e)(str(e).replace(temporary, name)) from e


# ---- the disk ------------------------------------------------------------------------------------


def _disk(
    files: Sequence[OpenFile],
    skeleton: Skeleton,
    config: StreamingConfig,
    is_remote: bool,
    sim_disk: str | None,
) -> tuple[DiskProbe, str]:
    """(speed of the disk, where it is from): simulated, measured now or lately, or assumed."""
    record = max(x.expert_nbytes for x in skeleton.layouts)
    if sim_disk is not None:
        rate = parse_bytes(sim_disk.lower().removesuffix("/s"))
        return DiskProbe(rate, record, "direct", SIM_LATENCY), "simulated"
    folder = huggingface_hub.constants.HF_HUB_CACHE if is_remote else files[0].path.parent
    pieces = 1 if skeleton.layouts[0].checksums is not None else len(skeleton.layouts[0].tensors)
    key = f"{platform.node()} {_device_of(folder)} {record} {pieces} {config.threads}"
    known = DISKS.entries().get(key)
    if known is not None and time.time() < known.time + PROBE_DAYS * 86400:
        return known.probe, "measured here lately"
    if is_remote:
        probe = DiskProbe(ASSUMED_DISK, record, "direct", SIM_LATENCY)
        return probe, "assumed, as the model is not on this machine (see --sim-disk)"
    probe = probe_disk(files, skeleton.layouts, config.threads)
    with contextlib.suppress(OSError):  # then it is measured again
        DISKS.add(key, _KnownDisk(time.time(), probe))
    how = "" if probe.io == "direct" else " (through the page cache: no direct reads there)"
    return probe, f"measured{how}"


def _device_of(folder: str | os.PathLike[str]) -> int:
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    return path.stat().st_dev


@dataclass(frozen=True)
class _KnownDisk:
    time: float
    probe: DiskProbe


def _known_disk(entry: dict[str, Any]) -> _KnownDisk:
    probe = DiskProbe(**entry["probe"])
    if not (entry["time"] >= 0 and probe.bytes_per_second > 0 and probe.latency_seconds >= 0):
        raise ValueError("not what was measured")
    return _KnownDisk(entry["time"], probe)


DISKS = Known("disks", 1, _known_disk)


# ---- advice --------------------------------------------------------------------------------------


def _machine_for(nbytes: int) -> str:
    size = next((n for n in SIZES if usable_nbytes(int(AVAILABLE_SHARE * n)) >= nbytes), None)
    return (
        "more memory than machines have" if size is None else f"a machine with {size // 10**9} GB"
    )


def _advice(
    whole: MemoryPlan,
    plan: MemoryPlan | None,
    problem: str,
    total: int,
    available: int,
    told: Forecast | None,
) -> list[str]:
    notes = []
    if problem:
        lacking = whole.useful - usable_nbytes(available)
        if usable_nbytes(int(0.9 * total)) >= whole.useful and lacking > 0:
            notes.append(f"Close programs that hold {format_bytes(lacking, up=True)}.")
        else:
            notes.append(f"It works on {_machine_for(whole.minimum)}.")
    if plan is not None and plan.slots < plan.expert_reads:
        notes.append(
            f"{plan.slots:,} slots are fewer than the {plan.expert_reads:,} experts of one token: "
            f"hardly any is found in memory. Give {format_bytes(whole.useful, up=True)}, or use "
            f"{_machine_for(whole.useful)}."
        )
    if plan is not None and plan.slots < plan.num_experts:
        notes.append(f"All experts fit into {_machine_for(whole.full)}.")
    if told is not None and told.reading - told.hidden > told.token.likely / 2:
        notes.append("Most of the time goes into reading: a faster disk, or more memory, pays.")
    return notes


def known_problems(download_nbytes: int = 0) -> list[str]:
    """What is known of this MLX, this chip and the state of this machine."""
    info = mx.device_info()
    found = []
    if mx.default_device() == mx.cpu:
        found.append("MLX computes on the CPU here: no GPU build of it, or none chosen.")
    if "applegpu_g17" in str(info.get("architecture")):
        found.append(
            "M5: MLX's sorted expert kernel has been wrong beyond 32,768 rows (mlx-lm issue 1585); "
            "prompts are cut so that it never sees as many."
        )
    if "free_memory" in info:
        found.append("MLX's CUDA build compiles kernels at first use, which takes a minute or so.")
    if (swap := used_swap()) > SWAP_NBYTES:
        found.append(f"{format_bytes(swap)} lie in swap: close programs before judging the speed.")
    if download_nbytes:
        folder = Path(huggingface_hub.constants.HF_HUB_CACHE).absolute()
        while not folder.exists():
            folder = folder.parent
        stat = os.statvfs(folder)
        free = stat.f_bavail * stat.f_frsize
        if free < download_nbytes:
            found.append(
                f"The disk has {format_bytes(free)} free, the download takes "
                f"{format_bytes(download_nbytes)}: make room, or set HF_HOME to another disk."
            )
    return found


def _command(
    name: str,
    revision: str | None,
    trust_remote_code: bool,
    config: StreamingConfig,
    problem: str,
    whole: MemoryPlan,
) -> str:
    """The flags are those given; where they do not fit, the least useful memory."""
    words = ["smoe-mlx", "generate", name]
    if config.slots is not None and not problem:
        words += ["--slots", str(config.slots)]
    elif problem:
        words += ["--memory", format_bytes(whole.useful, up=True).replace(" ", "")]
    elif config.memory is not None:
        words += ["--memory", str(config.memory)]
    for flag, value in (
        ("--context", config.context),
        ("--kv-bits", config.kv_bits),
        ("--revision", revision),
    ):
        words += [flag, str(value)] if value is not None else []
    words += ["--io", config.io] if config.io != StreamingConfig.io else []
    words += ["--policy", config.policy] if config.policy != StreamingConfig.policy else []
    words += ["--trust-remote-code"] if trust_remote_code else []
    return shlex.join(words)
