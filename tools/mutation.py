"""How strong the tests of `store`, `cache` and `layers` are: branch coverage, and mutants killed.

    python tools/mutation.py coverage            # writes coverage.json; about 10 minutes
    python tools/mutation.py mutants             # writes mutation.json; about an hour
    python tools/mutation.py mutants --again     # the survivors of the last run once more
    python tools/mutation.py mutants --most 200  # some of the sample, which is shuffled

Needs `pip install coverage` beside the test requirements. A mutant is the library with one small
change: a comparison, a number, a condition, a call left out. A random sample of them, spread over
the files by their size, is tried, each by the tests that run its line, those of its own file first,
until one fails. Results are in docs/reliability; mutation.md there says what is to be said of the
survivors. A run that is broken off goes on where it was; build/mutation holds what is known.
"""

import argparse
import ast
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import coverage
import hypothesis
import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutation"
RESULTS = ROOT / "docs" / "reliability"
NAMES = ("store", "cache", "layers")
PACKAGES = [f"src/smoe_mlx/{name}" for name in NAMES]
TESTS = [  # of small parts first
    "policy", "cuda", "probe", "files", "lookahead", "cache", "switch", "slots", "bets", "hot",
    "resize", "reader", "safetensors", "vault", "hostile", "mixed", "quantisation", "load",
    "open_experts", "blocks", "prefill", "optimistic", "kernels", "doctor", "exact", "faults",
]  # fmt: skip
SEED, SAMPLE, CONTROLS = 9, 320, 1


# ---- coverage ------------------------------------------------------------------------------------


class Contexts:
    """A pytest plugin: coverage knows which test runs a line, and how long each test takes."""

    def __init__(self, cov):
        self.cov, self.seconds = cov, {}

    def pytest_runtest_logstart(self, nodeid):
        self.cov.switch_context(nodeid)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration

    def pytest_runtest_logfinish(self, nodeid):
        self.cov.switch_context("")


def measure(tests: list[str], add: bool) -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    cov = coverage.Coverage(
        data_file=str(WORK / "coverage.db"), branch=True, source=[str(ROOT / p) for p in PACKAGES]
    )
    if add:
        cov.load()
    cov.start()
    plugin = Contexts(cov)
    status = pytest.main(["-q", "-p", "no:cacheprovider", *tests], plugins=[plugin])
    cov.stop()
    cov.save()
    if status:
        sys.exit("the tests fail: no coverage")
    seconds = WORK / "seconds.json"
    before = json.loads(seconds.read_text()) if add else {}
    seconds.write_text(json.dumps(before | plugin.seconds))
    cov.json_report(outfile=str(WORK / "coverage.json"))
    report = json.loads((WORK / "coverage.json").read_text())

    names = ("covered_lines", "num_statements", "covered_branches", "num_branches")

    def figures(files):
        *lines, covered, branches = (sum(f["summary"][k] for f in files) for k in names)
        percent = round(100 * covered / branches, 1) if branches else 100.0
        return {"lines": lines, "branches": [covered, branches], "branch_percent": percent}

    files = {k.removeprefix("src/smoe_mlx/"): v for k, v in sorted(report["files"].items())}
    out = {"total": figures(files.values())}
    for package in NAMES:
        out[package] = figures([f for k, f in files.items() if k.startswith(package)])
    for path, file in files.items():
        if file["summary"]["num_statements"] > 1:
            out[path] = {**figures([file]), "missing": file["missing_branches"]}
    write("coverage.json", out)


def write(name: str, document: dict) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / name).write_text(json.dumps(document, indent=1) + "\n")


# ---- mutants -------------------------------------------------------------------------------------

SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
COMPOUND = (ast.If, ast.While, ast.For, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef)
NOT_CODE = ("annotation", "returns", "decorator_list")


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    was: str  # the lines that change
    now: str
    nth: int  # of those alike
    source: str = field(repr=False, compare=False)
    lines: tuple[int, ...] = field(repr=False, compare=False)  # whose tests try it
    function: str = field(compare=False)  # the outermost one that it is in; "" if none

    @property
    def key(self) -> str:
        return f"{self.file}: {self.was} -> {self.now} #{self.nth}"


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What a node can be replaced by."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            ops = [*node.ops[:i], SWAPS[type(op)](), *node.ops[i + 1 :]]
            yield ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(SWAPS[type(node.op)](), node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Return) and ast.unparse(node) not in ("return", "return None"):
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.AugAssign):
        yield ast.AugAssign(node.target, SWAPS[type(node.op)](), node.value)
        yield ast.Pass()
    elif isinstance(node, ast.Break):
        yield ast.Continue()
    elif isinstance(node, ast.Continue):
        yield ast.Break()
    elif (
        isinstance(node, ast.Raise | ast.Delete)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Yield))
        or (isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name))
    ):
        yield ast.Pass()


def mutants(path: Path) -> list[Mutant]:
    text = path.read_bytes()
    starts = [0, *(i + 1 for i, c in enumerate(text) if c == ord("\n"))]
    name, seen = str(path.relative_to(ROOT)), Counter[tuple[str, str]]()
    out = []

    def visit(node: ast.AST, lines: tuple[int, ...], where: str, function: str) -> None:
        if isinstance(node, ast.JoinedStr):  # messages
            return
        if isinstance(node, ast.stmt):
            end = node.end_lineno
            if isinstance(node, COMPOUND) and not isinstance(node, ast.FunctionDef):
                end = max(node.lineno, node.body[0].lineno - 1)
            lines = tuple(range(node.lineno, end + 1))
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            where = f"{where}.{node.name}".lstrip(".")
        for new in changes(node):
            at = node.test if isinstance(node, ast.If | ast.While | ast.IfExp) else node
            begin = starts[at.lineno - 1] + at.col_offset
            end = starts[at.end_lineno - 1] + at.end_col_offset
            code = ast.unparse(ast.fix_missing_locations(new))
            code = code if isinstance(new, ast.stmt) else f"({code})"
            first, after = starts[at.lineno - 1], text.index(b"\n", end)
            change = [
                (text[first:begin] + part + text[end:after]).decode().strip()
                for part in (text[begin:end], code.encode())
            ]
            seen[tuple(change)] += 1
            source = (text[:begin] + code.encode() + text[end:]).decode()
            nth = seen[tuple(change)]
            out.append(Mutant(name, at.lineno, *change, nth, source, lines, function))
        for key, child in ast.iter_fields(node):
            if key not in NOT_CODE:
                body = isinstance(node, ast.FunctionDef) and key == "body"
                inside = function or (where if body else "")
                for c in child if isinstance(child, list) else [child]:
                    if isinstance(c, ast.AST):
                        visit(c, lines, where, inside)

    visit(ast.parse(text), (), "", "")
    return out


def sample() -> list[Mutant]:
    """Some mutants of each file, as many as its share of all lines."""
    files = sorted(f for p in PACKAGES for f in (ROOT / p).glob("*.py") if f.stat().st_size > 100)
    sizes = {f: len(f.read_text().splitlines()) for f in files}
    chance, out = random.Random(SEED), []
    for f in files:
        all_of_it = mutants(f)
        count = -(-SAMPLE * sizes[f] // sum(sizes.values()))
        out += chance.sample(all_of_it, min(count, len(all_of_it)))
    chance.shuffle(out)
    return out


class Tests:
    """Which tests run a line, and how long they take."""

    def __init__(self, budget: float):
        self.budget = budget  # seconds
        self.data = coverage.CoverageData(str(WORK / "coverage.db"))
        self.data.read()
        self.seconds = json.loads((WORK / "seconds.json").read_text())

    def of(self, mutant: Mutant) -> tuple[list[str], float]:
        """Its own first, then those of small parts; the quickest of each file first; their time."""
        by_line = self.data.contexts_by_lineno(str(ROOT / mutant.file))
        found = {t for n in mutant.lines for t in by_line.get(n, ())} - {""}
        if not found:  # it runs when the module is imported
            found = {t for tests in by_line.values() for t in tests} - {""}
        order = {f"tests/test_{name}.py": i for i, name in enumerate(TESTS)}
        chosen, spent = [], 0.0
        own = f"tests/test_{Path(mutant.file).stem}.py"
        order[own] = -1
        for t in sorted(
            found & self.seconds.keys(), key=lambda t: (order[t.split("::")[0]], self.seconds[t])
        ):
            if not chosen or spent + self.seconds[t] <= self.budget:
                chosen.append(t)
                spent += self.seconds[t]
        # Tests that trace lines themselves, unseen by coverage.
        if "/cache/" in mutant.file or mutant.file.endswith("reader.py"):
            chosen += [t for t in self.seconds if "interrupt" in t or "any_order" in t]
        return list(dict.fromkeys(chosen)), spent

    def at_import(self, mutant: Mutant) -> bool:
        """Whether the function runs when its module is imported: in a fork it would come too late,
        as what is defined inside it is there already."""
        by_line = self.data.contexts_by_lineno(str(ROOT / mutant.file))
        body: list[ast.stmt] = ast.parse((ROOT / mutant.file).read_text()).body
        for name in mutant.function.split("."):
            body = next(x.body for x in body if getattr(x, "name", None) == name)
        return any("" in by_line.get(n, ()) for n in range(body[0].lineno, body[-1].end_lineno + 1))


class Trial:
    """A pytest plugin that tries mutants in place of running what was collected.

    A mutant inside a function is tried in a fork: the function gets the mutant's code, and the
    tests, imported long ago, start at once. Others are tried in a copy of the tree.
    """

    def __init__(self, again: list[str] | None, budget: float, most: int | None):
        self.again, self.tests, self.most = again, Tests(budget), most
        self.tree = WORK / "tree"
        shutil.rmtree(self.tree, ignore_errors=True)
        ignore = shutil.ignore_patterns("build", ".*", "__pycache__")
        shutil.copytree(ROOT, self.tree, ignore=ignore)

    def pytest_runtestloop(self, session):
        self.items = {item.nodeid: item for item in session.items}
        self.temporary = session.config._tmp_path_factory.getbasetemp()
        path, chosen = WORK / "results.json", sample()[: self.most]
        results = json.loads(path.read_text()) if path.exists() else {}
        for m in chosen[:CONTROLS]:
            if not self.survives(replace(m, source=(ROOT / m.file).read_text())):
                sys.exit(f"the tests of {m.key} fail without it")
        for n, m in enumerate(chosen):
            again = self.again is not None and any(text in m.key for text in self.again or [""])
            if m.key not in results or (again and results[m.key]):
                start = time.time()
                results[m.key] = self.survives(m)
                path.write_text(json.dumps(results, indent=1))
                seconds = f"{time.time() - start:.0f} s"
                print(f"{n + 1} {m.key}: {results[m.key] or 'killed'}, {seconds}", file=sys.stderr)
        report([m for m in chosen if m.key in results], results)
        return True

    def survives(self, mutant: Mutant) -> str:
        """Nothing if a test fails, else why nobody noticed."""
        known, seconds = self.tests.of(mutant)
        chosen = [t for t in self.items if t not in self.tests.seconds]  # newer than the coverage
        chosen += [t for t in known if t in self.items]
        if not chosen:
            return "no test runs it"
        in_a_fork = mutant.function and not self.tests.at_import(mutant)
        try_it = self.in_a_fork if in_a_fork else self.in_the_tree
        killed = try_it(mutant, chosen, timeout=40 + 2 * seconds)
        return "" if killed else f"{len(chosen)} tests pass"

    def in_a_fork(self, mutant: Mutant, tests: list[str], timeout: float) -> bool:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            failed = True
            try:
                log = os.open(WORK / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(log, 1)
                os.dup2(log, 2)
                resource.setrlimit(resource.RLIMIT_CPU, (int(timeout / 3), int(timeout / 3)))
                put_in(mutant)
                failed = self.fails(tests)
            finally:
                os._exit(failed)
        end = time.time() + timeout
        while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.time() > end:
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.01)
        for folder in self.temporary.iterdir():
            shutil.rmtree(folder, ignore_errors=True)
        return found[1] != 0

    def fails(self, tests: list[str]) -> bool:
        items = [self.items[t] for t in tests]
        return any(
            report.failed
            for item, after in zip(items, [*items[1:], None], strict=True)
            for report in runtestprotocol(item, log=False, nextitem=after)
        )

    def in_the_tree(self, mutant: Mutant, tests: list[str], timeout: float) -> bool:
        path = self.tree / mutant.file
        original = path.read_text()
        path.write_text(mutant.source)
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        env = os.environ | {"PYTHONPATH": str(self.tree / "src")}
        with open(WORK / "pytest.log", "w") as log:
            process = subprocess.Popen(
                command, cwd=self.tree, env=env, stdout=log, stderr=log, start_new_session=True
            )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        path.write_text(original)
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
        if status in (4, 5):
            sys.exit("no tests ran: see pytest.log")
        return status != 0


def put_in(mutant: Mutant) -> None:
    """Give the function, and what is defined inside it, the mutant's code."""
    path = ROOT / mutant.file
    code = compile(mutant.source, str(path), "exec")
    found = importlib.import_module(".".join(path.with_suffix("").parts[-3:]))
    for name in mutant.function.split("."):
        code = next(c for c in code.co_consts if getattr(c, "co_name", None) == name)
        found = vars(found)[name]
    found = getattr(found, "fget", None) or getattr(found, "func", None) or found
    found = getattr(found, "__func__", found)
    getattr(found, "__wrapped__", found).__code__ = code


def report(chosen: list[Mutant], results: dict[str, str]) -> None:
    def figures(some: list[Mutant]) -> dict:
        n, killed = len(some), sum(not results[m.key] for m in some)
        p, z = killed / n, 1.96  # Wilson's interval
        middle, half = p + z * z / 2 / n, z * (p * (1 - p) / n + z * z / 4 / n / n) ** 0.5
        bounds = [round(100 * (middle + s * half) / (1 + z * z / n), 1) for s in (-1, 1)]
        return {"mutants": n, "killed": killed, "percent": round(100 * p, 1), "interval_95": bounds}

    out = {"seed": SEED, "total": figures(chosen)}
    for package in PACKAGES:
        some = [m for m in chosen if m.file.startswith(package)]
        out[package.rpartition("/")[2]] = figures(some)
    out["survivors"] = [
        {"file": m.file, "was": m.was, "now": m.now} for m in chosen if results[m.key]
    ]
    write("mutation.json", out)
    print(json.dumps(out["total"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("coverage", "mutants"))
    parser.add_argument(
        "--again", nargs="*", metavar="TEXT", help="the survivors of the last run, or some of them"
    )
    parser.add_argument("--seconds", type=float, default=60, help="of tests a mutant")
    parser.add_argument("--most", type=int, help="only so many mutants of the sample")
    parser.add_argument("--add", nargs="+", help="tests whose coverage to add to the last run's")
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.what == "coverage":
        measure(args.add or [f"tests/test_{t}.py" for t in TESTS], bool(args.add))
    else:
        tests = [f"tests/test_{t}.py" for t in TESTS]
        options = ["-q", "-s", "-p", "no:cacheprovider"]
        hypothesis.settings.register_profile("quick", phases=[hypothesis.Phase.generate])
        hypothesis.settings.load_profile("quick")  # what fails need not be made smaller
        pytest.main([*options, *tests], plugins=[Trial(args.again, args.seconds, args.most)])


if __name__ == "__main__":
    main()
