"""The documentation as a site: it builds with every link checked, and needs no network."""

import dataclasses
import html
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import smoe_mlx

ROOT = Path(__file__).parent.parent
FUNCTIONS = [n for n in smoe_mlx.__all__ if inspect.isfunction(getattr(smoe_mlx, n))]
CLASSES = [n for n in smoe_mlx.__all__ if inspect.isclass(getattr(smoe_mlx, n))]
ERRORS = [n for n in CLASSES if issubclass(getattr(smoe_mlx, n), Exception)]


def build(source: Path, out: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", out]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=source, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_pages_are_there_and_links_lead_somewhere(site):
    """`--strict` has checked links and anchors; here: what they were turned into, and images."""
    pages = {p.relative_to(site).as_posix(): p.read_text("utf-8") for p in site.rglob("*.html")}
    assert len(pages) > 25
    for name, text in pages.items():
        for target in re.findall(r'(?:href|src)="([^"#?]+)', text):
            if not re.match(r"[a-z]+:|/", target):
                assert (site / name).parent.joinpath(html.unescape(target)).exists(), (name, target)


def test_what_is_wrong_fails_the_build(tmp_path):
    for name in ("docs", "tools", "examples", "src"):
        ignore = shutil.ignore_patterns("*.safetensors", "__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    for path in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml"):
        shutil.copy(path, tmp_path)
    for page, wrong in {
        "docs/index.md": "[a](nowhere.md) [b](memory.md#no-such-place)",
        "CONTRIBUTING.md": "[c](docs/not-there.md)",
        "docs/memory.md": "![d](img/no-picture.svg)",
        "docs/lost.md": "in no menu",
    }.items():
        with (tmp_path / page).open("a") as f:
            f.write(f"\n\n{wrong}\n")
    done = build(tmp_path, tmp_path / "out")
    assert done.returncode != 0
    seen = re.sub(r"\s+", " ", done.stderr)
    for word in ("nowhere.md", "no-such-place", "not-there", "no-picture", "lost.md"):
        assert word in seen, word


# What a browser loads by itself, in pages, drawings and styles.
LOADS = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed|object|image|use)\b[^>]*?
        \b(?:src|data|href)=["']?([^"'\s>]+)
      | <link\b(?![^>]*rel=["']?(?:canonical|next|prev))[^>]*?\bhref=["']?([^"'\s>]+)
      | @import\s+(?:url\()?["']?([^"';)]+)
      | \burl\(["']?([^)"']+)""",
    re.VERBOSE,
)


def loaded(text: str) -> list[str]:
    return [next(filter(None, groups)) for groups in LOADS.findall(text)]


def test_nothing_is_fetched_from_the_net(site):
    files = [p for p in site.rglob("*") if p.suffix in (".html", ".svg", ".css")]
    found = [(p.name, x) for p in files for x in loaded(p.read_text("utf-8"))]
    assert len(found) > 100
    assert not [x for x in found if re.match(r"(https?:)?//", x[1])]
    pages = "".join(p.read_text("utf-8") for p in files if p.suffix == ".html")
    assert "mermaid" not in pages  # the theme would fetch a script to draw it


@pytest.mark.parametrize(
    "text",
    [
        '<script src="//x.org/a.js">', '<link rel="stylesheet" href="https://x.org/a.css">',
        "<link href=https://x.org rel=preconnect>", "@import 'https://x.org/a.css';",
        'src: url("https://x.org/a.woff2")', '<img alt="a" src="https://x.org/a.png">',
        '<image href="https://x.org/a.png"/>',
    ],
)  # fmt: skip
def test_what_would_be_fetched_is_seen(text):
    assert re.match(r"(https?:)?//x.org", loaded(text)[0])


# ---- the API page --------------------------------------------------------------------------------


def test_every_public_name_is_in_the_api(site):
    text = (site / "api.html").read_text("utf-8")
    ids = re.findall(r'<h3 id="smoe_mlx\.[\w.]*?(\w+)"', text)  # methods are <h4>
    assert set(smoe_mlx.__all__) - set(ids) == set()


def entries(doc: str, section: str) -> set[str]:
    """Names that a section of a docstring explains."""
    found = re.search(rf"^{section}:\n((?:    .*\n|\n)+)", doc + "\n", re.MULTILINE)
    names = re.findall(r"^    (\w+(?:, \w+)*):", found[1], re.MULTILINE) if found else []
    return {x for part in names for x in part.replace(" ", "").split(",")}


def has(doc: str, section: str) -> bool:
    return re.search(rf"^{section}:\n    \S", doc, re.MULTILINE) is not None


def parameters(function) -> set[str]:
    return {n for n in inspect.signature(function).parameters if n != "self"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_explain_arguments_results_and_errors(name):
    function = getattr(smoe_mlx, name)
    doc = inspect.getdoc(function)
    assert entries(doc, "Args") == parameters(function)
    assert has(doc, "Yields" if name in ("stream_generate", "instrument") else "Returns")
    assert entries(doc, "Raises") <= {*dir(smoe_mlx), "ValueError", "FileExistsError"}
    assert has(doc, "Raises")


@pytest.mark.parametrize("name", sorted(set(CLASSES) - set(ERRORS)))
def test_classes_explain_what_they_hold_and_take(name):
    cls = getattr(smoe_mlx, name)
    doc = inspect.getdoc(cls)
    if dataclasses.is_dataclass(cls):
        assert {f.name for f in dataclasses.fields(cls)} == entries(doc, "Attributes")
    else:
        assert entries(doc, "Args") == parameters(cls.__init__)
    for key, value in vars(cls).items():
        if not key.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            assert inspect.getdoc(value), f"{name}.{key}"


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_happened(name):
    assert getattr(smoe_mlx, name).__doc__ != getattr(smoe_mlx, name).__base__.__doc__


# ---- made, not typed -----------------------------------------------------------------------------


def load_tool(name: str):
    spec = importlib.util.spec_from_file_location(f"{name}_tool", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_architectures_is_what_the_tests_run():
    page = load_tool("architectures").page()
    text = (ROOT / "docs/architectures.md").read_text("utf-8")
    assert text == page, "python tools/architectures.py"
    count = len(re.findall("^\\| `", page, re.MULTILINE))
    assert f"{count} architectures are streamed" in page
    assert f"[{count} in all]" in (ROOT / "README.md").read_text("utf-8")


def test_examples_are_listed(site):
    text = (site / "examples.html").read_text("utf-8")
    for path in (ROOT / "examples").iterdir():
        if path.suffix in (".py", ".ipynb"):
            assert path.stem in text, path.name


def test_a_notebook_becomes_a_page(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": "1 + 1", "outputs": [
            {"output_type": "stream", "text": ["hello\n"]},
            {"output_type": "execute_result", "data": {"text/plain": ["2"]}},
            {"output_type": "display_data", "data": {"image/png": "QUJD\n", "text/plain": "<Fig>"}},
        ]},
    ]  # fmt: skip
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert load_tool("site").notebook_page(path) == (
        "# Title\ntext\n\n```python\n1 + 1\n```\n\n```text\nhello\n```\n\n```text\n2\n```\n\n"
        "![](data:image/png;base64,QUJD)\n"
    )
