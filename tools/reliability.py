"""Everything that shows what this library stands, and one page of it: docs/reliability.md.

    python tools/reliability.py                     # all parts, about three hours, then the page
    python tools/reliability.py --only kills fuzz   # some of them
    python tools/reliability.py --only              # the page alone, from the figures there are

Each part writes `docs/reliability/<part>.json`. Devices and block devices want Linux and root, and
fuzzing wants `pip install atheris`; a part that cannot be run says so and stops. What a part finds
wrong stops it too, with no figures written. `tools/mutation.py` makes the figures of the tests'
own strength.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "reliability", ROOT / "docs" / "reliability.md"
TEST_FILES = {
    "test_faults.py": "calls of the system that fail, in every phase",
    "test_devices.py": "disks that fail: FUSE, block devices, a full tmpfs",
    "test_hostile.py": "hostile files, by hypothesis",
    "test_concurrency.py": "threads, tasks, forks",
    "test_slots.py": "a model of the slot protocol, any order of its steps",
}
FUZZ_SECONDS = 120

# ---- the parts -----------------------------------------------------------------------------------


def call(*command: Any, check: bool = True) -> subprocess.CompletedProcess:
    """Run a Python script or module of this checkout."""
    paths = [str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    out = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, cwd=ROOT, env=env
    )
    if check and out.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{out.stdout[-3000:]}\n{out.stderr[-3000:]}")
    return out


def run_tests() -> dict[str, Any]:
    figures = {}
    for name in TEST_FILES:
        with tempfile.NamedTemporaryFile(suffix=".xml") as report:
            call("-m", "pytest", "-q", f"--junitxml={report.name}", f"tests/{name}")
            suite = next(xml.etree.ElementTree.parse(report.name).iter("testsuite"))
        skipped = [e.get("message") for e in suite.iter("skipped")]
        figures[name] = {"passed": int(suite.get("tests", 0)) - len(skipped), "skipped": skipped}
    return figures


def run_fuzz() -> dict[str, Any]:
    figures = {}
    for corpus in sorted((ROOT / "tests/fuzz/corpus").iterdir()):
        with tempfile.TemporaryDirectory() as found:
            out = call(
                "tests/fuzz/fuzz.py", corpus.name, f"-max_total_time={FUZZ_SECONDS}",
                f"-artifact_prefix={found}/", found, corpus,
            )  # fmt: skip
        figures[corpus.name] = fuzz_figures(out.stderr)
    return figures


def fuzz_figures(log: str) -> dict[str, int]:
    """What libFuzzer said at its end."""
    runs, seconds = re.findall(r"Done (\d+) runs in (\d+) second", log)[-1]
    edges = ["0", *re.findall(r"cov: (\d+)", log)][-1]  # none where the code is another library's
    return {"runs": int(runs), "seconds": int(seconds), "edges": int(edges), "crashes": 0}


def run_kills() -> dict[str, Any]:
    return json.loads(call("tests/check_kills.py", "--times", 200).stdout)


def run_interrupts() -> dict[str, Any]:
    return json.loads(call("tests/check_interrupts.py", "--times", 500).stdout)


def run_soak() -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        call("benchmarks/soak.py", "--minutes", 60, "--seed", 2029, "--json", report.name)
        return json.loads(Path(report.name).read_text())


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "tests": run_tests,
    "fuzz": run_fuzz,
    "kills": run_kills,
    "interrupts": run_interrupts,
    "soak": run_soak,
}


def write(part: str, figures: dict[str, Any]) -> None:
    where = {
        "date": time.strftime("%Y-%m-%d"),
        "on": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, "
        f"MLX {importlib.metadata.version('mlx')}",
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{part}.json").write_text(json.dumps({"made": where, **figures}, indent=1) + "\n")


# ---- the page ------------------------------------------------------------------------------------


def render() -> str:
    """The page, of the figures that there are."""
    found = {p.stem: json.loads(p.read_text()) for p in sorted(RESULTS.glob("*.json"))}
    made = {name: figures.pop("made") for name, figures in found.items() if "made" in figures}
    lines = [
        "# Reliability",
        "",
        *prose("""
            Made by `python tools/reliability.py` from the figures in `docs/reliability/`. Each part
            stops at the first wrong token, lost slot, leak or damaged file and then writes no
            figures: what stands here was found with none. The threat model is in
            [SECURITY.md](../SECURITY.md), what others ran into in
            [known-failures.md](known-failures.md)."""),
    ]
    for name, section in SECTIONS.items():
        if name in found:
            lines += ["", *section(found[name])]
            if name in made:
                lines += ["", f"{made[name]['date']}, {made[name]['on']}."]
        else:
            lines += ["", f"## {name.capitalize()}", "", "No figures yet."]
    return "\n".join(lines) + "\n"


def prose(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 100, break_on_hyphens=False)


def table(*rows: tuple[Any, ...]) -> list[str]:
    """Numbers with thousands, the rest as it is."""
    cells = [[f"{x:,}" if isinstance(x, int) else str(x) for x in row] for row in rows]
    return [f"| {' | '.join(r)} |" for r in (cells[0], ["---"] * len(cells[0]), *cells[1:])]


def show_tests(figures: dict[str, Any]) -> list[str]:
    rows = [
        (f"`{name}`", what, figures[name]["passed"], len(figures[name]["skipped"]))
        for name, what in TEST_FILES.items()
    ]
    reasons = sorted({r for f in figures.values() for r in f["skipped"]})
    return [
        "## Faults, hostile files, threads",
        "",
        *table(("tests", "what", "passed", "skipped"), *rows),
        *([""] if reasons else []),
        *(f"Skipped: {reason}" for reason in reasons),
        "",
        *prose("""
            Faults: EIO, EINTR, EAGAIN, ENOSPC, short reads, an early end, seconds of waiting, a
            disk that goes away in the middle of a read, a throttled one, failing syncs; while
            loading, in prompts,
            in each way to decode, while prewarming, shattering, verifying, saving and reading
            sessions and usage. On real file systems and block devices (`test_devices.py`), and with
            every call of Python's (`test_faults.py`), which adds replaced and removed files, no
            memory, no threads, no descriptors and interrupts."""),
    ]


def show_fuzz(figures: dict[str, Any]) -> list[str]:
    rows = [(n, f["runs"], f["seconds"], f["edges"], f["crashes"]) for n, f in figures.items()]
    runs, seconds, crashes = (sum(r[i] for r in rows) for i in (1, 2, 4))
    return [
        "## Fuzzing",
        "",
        *prose("""
            Guided by coverage: `python tests/fuzz/fuzz.py TARGET` (atheris). A crash is an error
            that is not a documented one, a hang of 20 seconds, a file opened outside the folder, a
            process, a connection, or more memory than 64 bytes for each byte of the file beside
            8 MiB. The corpus is replayed in the ordinary test run (`test_fuzz.py`). Found so, and
            mended: a trace of 1 KB that had a gigabyte allocated. What a target's code in other
            libraries does is guarded, but guides nothing: `tokenizer` has no edges of its own."""),
        "",
        *table(
            ("target", "executions", "seconds", "edges of the library", "crashes"),
            *rows,
            ("all", runs, seconds, "", crashes),
        ),
    ]


def show_kills(figures: dict[str, Any]) -> list[str]:
    rows = [
        (kind, sum(states.values()), ", ".join(f"{n} {how}" for how, n in states.items()), 0)
        for kind, states in figures.items()
    ]
    return [
        "## Killed with -9 at a random moment",
        "",
        *table(("while", "kills", "what was there afterwards", "anything else"), *rows),
        "",
        *prose("""
            What is there is read back: every byte of a vault compared with that of an undisturbed
            run, every session loaded, every weight of a usage file.
            `python tests/check_kills.py`."""),
    ]


def show_interrupts(figures: dict[str, Any]) -> list[str]:
    phases: dict[str, dict[str, int]] = {}
    for what, n in figures["interrupts"].items():
        phase, how = what.split(" by ")
        phases.setdefault(phase, {})[how] = n
    rows = [(p, by.get("signal", 0), by.get("line", 0)) for p, by in phases.items()]
    return [
        "## Interrupted at a random point",
        "",
        *table(
            ("in", "by a signal", "at a line of the library"),
            *rows,
            ("all", sum(r[1] for r in rows), sum(r[2] for r in rows)),
        ),
        "",
        *prose("""
            With another model's generation under way in the same process. After each, the next
            answers of the model and of another are mlx-lm's, slots and tables agree, and no thread
            or descriptor is left. `python tests/check_interrupts.py`."""),
    ]


def show_soak(figures: dict[str, Any]) -> list[str]:
    warm, end = figures["footprints"]["warm"], figures["footprints"]["end"]

    def flat(name: str) -> str:
        if name in ("rss", "mlx"):
            return f"{warm[name] / 1e6:.1f} MB, {end[name] / 1e6:.1f} MB"
        return f"{warm[name]}, {end[name]}"

    return [
        "## Soak",
        "",
        *table(
            ("", ""),
            ("minutes", f"{figures['seconds'] / 60:.1f}"),
            ("loads", figures["rounds"]),
            *((f"requests {how}", n) for how, n in figures["requests"].items()),
            ("tokens", figures["tokens"]),
            ("tokens compared with mlx-lm's, all in memory", figures["compared"]),
            ("different", 0),
            ("evictions", figures["evictions"]),
            ("resizes", figures["resizes"]),
            ("bets", figures["bets"]),
            ("resident memory, after warming up and at the end", flat("rss")),
            ("MLX memory", flat("mlx")),
            ("descriptors", flat("descriptors")),
            ("threads", flat("threads")),
        ),
        "",
        "Failed are those whose reads were made to. `python benchmarks/soak.py`.",
    ]


def show_mutation(figures: dict[str, Any]) -> list[str]:
    rows = [
        (
            name,
            f["mutants"],
            f["killed"],
            f"{f['percent']} %",
            "{} to {} %".format(*f["interval_95"]),
        )
        for name, f in figures.items()
        if isinstance(f, dict)
    ]
    return [
        "## Mutants",
        "",
        *table(("of", "mutants", "killed", "share", "95 % interval"), *rows),
        "",
        *prose("""
            A random sample of all small changes of these packages. What survived was read, and
            tests were written: [mutation.md](reliability/mutation.md) says how many were killed
            before, and why the rest is left."""),
    ]


def show_coverage(figures: dict[str, Any]) -> list[str]:
    packages = {name: f["branches"] for name, f in figures.items() if "/" not in name}
    rows = [(name, n, of, f"{100 * n / of:.1f} %") for name, (n, of) in packages.items()]
    return ["## Coverage", "", *table(("of", "branches taken", "of", "share"), *rows)]


SECTIONS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "tests": show_tests,
    "fuzz": show_fuzz,
    "kills": show_kills,
    "interrupts": show_interrupts,
    "soak": show_soak,
    "mutation": show_mutation,
    "coverage": show_coverage,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    for part in parser.parse_args().only:
        print(f"{part} ...", file=sys.stderr, flush=True)
        write(part, PARTS[part]())
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
