"""The sdist and the wheel: built as `python -m build` does, unpacked, looked at, and run."""

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import smoe_mlx

ROOT = Path(__file__).parent.parent


def build(source: Path, target: str, out: Path) -> Path:
    """By the backend alone: no network, no environment of its own."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", out]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next(out.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[target]))


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """(sdist, the wheel that was made from it)."""
    out = tmp_path_factory.mktemp("dist")
    sdist = build(ROOT, "sdist", out)
    with tarfile.open(sdist) as tar:
        # (Python 3.11 before 3.11.4 has no filters.)
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        tar.extractall(out)
    return sdist, build(out / sdist.name.removesuffix(".tar.gz"), "wheel", out)


@pytest.fixture(scope="module")
def installed(packages, tmp_path_factory):
    """The wheel as pip unpacks it; what it requires is taken from this environment."""
    folder = tmp_path_factory.mktemp("site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", folder]
    subprocess.run([*pip, packages[1]], check=True, capture_output=True)
    return folder


def test_the_wheel_holds_the_library_and_nothing_else(packages):
    src = ROOT / "src"
    tracked = {p for p in src.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    expected = {p.relative_to(src).as_posix() for p in tracked}
    with zipfile.ZipFile(packages[1]) as wheel:
        names = {n for n in wheel.namelist() if ".dist-info/" not in n}
    assert names == expected
    for name in ("py.typed", "demo/model.safetensors", "server/page.html", "kernels/expert.h"):
        assert f"smoe_mlx/{name}" in names


def test_the_sdist_holds_what_proves_it(packages):
    with tarfile.open(packages[0]) as tar:
        names = {n.partition("/")[2] for n in tar.getnames()}
    for name in ("tests/test_exact.py", "tests/data/tiny_configs.json", "tests/emulator/runtime.h",
                 "docs/index.md", "docs/img/decode.svg", "examples/read_vault.py", "mkdocs.yml",
                 "benchmarks/decode.py", "tools/site.py", "README.md", "CONTRIBUTING.md",
                 "SECURITY.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"):  # fmt: skip
        assert name in names, name
    assert not [n for n in names if "__pycache__" in n or n.startswith((".venv", "build/"))]


@pytest.fixture(scope="module")
def metadata(packages):
    with zipfile.ZipFile(packages[1]) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith("/METADATA"))
        assert "smoe-mlx = smoe_mlx.cli:main" in wheel.read(
            name.replace("METADATA", "entry_points.txt")
        ).decode().replace("\r", "")
        return email.message_from_bytes(wheel.read(name))


def test_metadata(metadata):
    assert metadata["Version"] == smoe_mlx.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# smoe_mlx")
    classifiers = metadata.get_all("Classifier")
    for system in ("MacOS", "POSIX :: Linux"):
        assert f"Operating System :: {system}" in classifiers
    assert "Typing :: Typed" in classifiers
    assert set(metadata.get_all("Provides-Extra")) == {"cuda", "docs", "plots", "test"}


@pytest.mark.parametrize(
    ("system", "extra", "mlx"),
    [("darwin", "", {""}), ("linux", "", {"cpu"}), ("linux", "cuda", {"cpu", "cuda13"}),
     ("darwin", "cuda", {""})],
)  # fmt: skip
def test_each_system_gets_its_mlx(metadata, system, extra, mlx):
    here = {"sys_platform": system, "extra": extra}
    required = [Requirement(r) for r in metadata.get_all("Requires-Dist")]
    wanted = [r for r in required if r.marker is None or r.marker.evaluate(here)]
    assert {",".join(r.extras) for r in wanted if r.name == "mlx"} == mlx
    heavy = {"pytest", "matplotlib", "mkdocs-material", "torch"}
    assert not heavy & {r.name for r in wanted}


def test_what_was_installed_runs(installed, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}

    def python(*args: object) -> str:
        command = [sys.executable, *args]
        return subprocess.check_output(command, cwd=tmp_path, env=env, text=True)

    where = python("-c", "import smoe_mlx; print(smoe_mlx.__file__)")
    assert where.strip() == str(installed / "smoe_mlx/__init__.py")
    assert python("-m", "smoe_mlx", "demo", "-m", "4").startswith("And the LORD said unto Moses,")


def test_the_size_that_is_stated(packages, installed):
    text = (ROOT / "docs/index.md").read_text("utf-8")
    stated = re.search(r"wheel has (\d+) MB \((\d+) MB installed\)", text)
    wheel, unpacked = map(int, stated.groups())
    assert wheel == round(packages[1].stat().st_size / 1e6)
    files = [p for p in (installed / "smoe_mlx").rglob("*") if p.suffix != ".pyc"]
    assert abs(unpacked - sum(p.stat().st_size for p in files if p.is_file()) / 1e6) < 1
