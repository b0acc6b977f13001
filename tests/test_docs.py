"""What the documents show is run: code blocks, commands, printed plans, options, links."""

import argparse
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import smoe_mlx
from smoe_mlx import cli

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks/README.md",
]
HUB = "mlx-community/Qwen3-30B-A3B-4bit"  # tests load nothing from the net


def blocks(kind):
    """(document, text) of the code blocks of one language."""
    for path in DOCUMENTS:
        for text in re.findall(rf"^```{kind}\n(.*?)^```$", path.read_text(), re.M | re.S):
            yield pytest.param(text, id=f"{path.name}: {text.splitlines()[0][:40]}")


def commands():
    for param in blocks("sh"):
        lines = [x for x in param.values[0].splitlines() if x.startswith("smoe-mlx ")]
        if lines:
            yield pytest.param(lines, id=param.id)


def test_there_is_something_to_run():
    assert len(list(blocks("python"))) >= 3
    assert len(list(commands())) >= 3


@pytest.mark.parametrize("text", list(blocks("python")))
def test_python(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    model, tokenizer = smoe_mlx.load("demo", slots=0.5)
    small, _ = smoe_mlx.load("demo", slots=1.0)
    names = {
        "smoe_mlx": smoe_mlx, "model": model, "tokenizer": tokenizer, "small": small,
        "prompt": "def f(x):", "path": "demo", "openai": openai, "anthropic": anthropic,
    }  # fmt: skip
    plain = smoe_mlx.stream_generate

    def short(*args, **kwargs):
        return list(plain(*args, **{**kwargs, "max_tokens": 4}))  # run, though nobody iterates

    monkeypatch.setattr(smoe_mlx, "stream_generate", short)
    exec(compile(text.replace(HUB, "demo"), "block", "exec"), names)


@pytest.mark.parametrize("lines", list(commands()))
def test_commands(lines, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        words = ["demo" if w in ("MODEL", "SMALL") else w for w in words]
        if words[0] in ("server", "chat", "selftest"):  # no end by themselves; wants a GPU
            cli.build_parser().parse_args(words)
        else:
            assert cli.main(words) in (0, None), line


def test_printed_plans_are_what_plan_prints(capsys):
    shown = re.findall(
        r"^\$ (smoe-mlx plan .*?)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert shown
    for command, printed in shown:
        cli.main(shlex.split(command)[1:])
        assert capsys.readouterr().out.split() == printed.split()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_options_that_documents_name_exist(path):
    known = set()

    def collect(parser):
        for action in parser._actions:
            known.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                for sub in action.choices.values():
                    collect(sub)

    collect(cli.build_parser())
    for script in (ROOT / "benchmarks").glob("*.py"):
        known.update(re.findall(r'"(--[a-z][a-z-]*)"', script.read_text()))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", path.read_text()))
    assert named - known <= {"--backbone"}, f"{path.name} names options that do not exist"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if not re.match(r"[a-z]+:", target):
            name, _, anchor = target.partition("#")
            file = path.parent / name if name else path
            assert file.exists(), target
            if anchor:
                titles = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
                slugs = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
                assert anchor in slugs, target


def test_every_test_that_a_document_names_exists():
    named = {
        found
        for path in [*DOCUMENTS, *ROOT.glob("*.md")]
        for found in re.findall(r"(test_\w+\.py)::(test_\w+)", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 60
    for file, name in sorted(named):
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{file}::{name}"


def test_the_page_of_reliability_is_what_its_figures_give():
    spec = importlib.util.spec_from_file_location("reliability", ROOT / "tools/reliability.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.render()


SCRIPTS = [
    *sorted((ROOT / "benchmarks").glob("*.py")),
    ROOT / "tools/reliability.py",
    ROOT / "tests/check_kills.py",
    ROOT / "tests/check_interrupts.py",
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_every_benchmark_starts(path):
    """What it imports is there. (Nothing else in the tests runs them.)"""
    out = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
