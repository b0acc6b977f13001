"""What the documents show is run: code blocks, commands, printed plans, options, links."""

import argparse
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import anthropic
import openai
import pytest

import smoe_mlx
from smoe_mlx import cli

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
HUB = "mlx-community/Qwen3-30B-A3B-4bit"  # tests load nothing from the net
PARSED_ONLY = {  # commands of smoe-mlx
    "server": "does not end by itself; tests/test_server.py runs it",
    "chat": "does not end by itself; tests/test_chat.py runs it",
    "tune": "takes two minutes; tests/test_tune.py runs it",
    "selftest": "wants a GPU; tests/test_kernels.py runs it in an emulator",
}
NOT_RUN = {  # other lines, by how they begin
    "python3 -m venv": "installs from the net; .ci/run does it",
    ".venv/bin/python benchmarks/": "wants a GPU; its options are checked below",
    "export ": "test_clients_find_the_server_by_these_variables",
    "mkdocs serve": "does not end by itself; tests/test_site.py builds the site",
    "python tests/check_kernels.py": "takes minutes; tests/test_sanitizers.py does a little of it",
    "python tools/architectures.py": "tests/test_site.py compares what it makes",
    "python -m pip install build": "installs from the net",
    "python -m build": "tests/test_package.py builds both by the same backend",
}


def blocks(kind):
    """(document, text) of the code blocks of one language."""
    for path in DOCUMENTS:
        for text in re.findall(rf"^```{kind}\n(.*?)^```$", path.read_text("utf-8"), re.M | re.S):
            yield pytest.param(text, id=f"{path.name}: {text.splitlines()[0][:40]}")


def commands():
    for param in blocks("sh"):
        lines = [x for x in param.values[0].splitlines() if x.startswith("smoe-mlx ")]
        if lines:
            yield pytest.param(lines, id=param.id)


def test_there_is_something_to_run():
    assert len(list(blocks("python"))) >= 7
    assert len(list(commands())) >= 10


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_every_block_is_of_a_kind_that_is_run_or_only_shows(path):
    fences = re.findall(r"^ *```(.*)$", path.read_text("utf-8"), re.M)
    assert set(fences[::2]) <= {"python", "sh", "json", "text"}
    assert set(fences[1::2]) <= {""}


def test_every_command_is_run_or_on_the_list():
    seen = set()
    for param in blocks("sh"):
        for line in param.values[0].splitlines():
            beginning = [x for x in NOT_RUN if line.startswith(x)]
            assert line.startswith("smoe-mlx ") != bool(beginning), line
            seen.update(beginning)
    assert seen == set(NOT_RUN)
    for param in blocks("text"):
        assert not re.search(r"^(smoe-mlx|python|pip|git) ", param.values[0], re.M), param.id


@pytest.mark.parametrize("text", list(blocks("python")))
def test_python(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
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
    """As they are shown, but for a model that is named: the demo; and for 8 tokens only."""
    monkeypatch.chdir(tmp_path)
    for name in ("text.txt", "core.py", "pages.md"):
        (tmp_path / name).write_text("def f(x):\n    return x\n" * 4)
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        words = ["demo" if w in ("MODEL", "SMALL", "Qwen3-30B-A3B-4bit") else w for w in words]
        if words[0] in PARSED_ONLY:
            cli.build_parser().parse_args(words)
            continue
        if words[0] in ("demo", "generate", "stats", "trace", "bench"):
            words += ["-m", "8"]
        if words[0] == "bench":
            words += ["--budgets", "0.5"]
        assert cli.main(words) in (0, None), line


@pytest.mark.parametrize("text", list(blocks("json")))
def test_recipes(text, tmp_path):
    (tmp_path / "recipe.json").write_text(text)
    folder = smoe_mlx.shatter("demo", tmp_path / "vault", recipe=tmp_path / "recipe.json")
    assert smoe_mlx.verify(folder) == 512


def test_clients_find_the_server_by_these_variables(monkeypatch):
    lines = [x for p in blocks("sh") for x in p.values[0].splitlines() if x.startswith("export ")]
    for name, value in (w.split("=", 1) for line in lines for w in line.split()[1:]):
        monkeypatch.setenv(name, value)
    assert str(openai.OpenAI().base_url) == "http://127.0.0.1:8080/v1/"
    assert str(anthropic.Anthropic().base_url).rstrip("/") == "http://127.0.0.1:8080"


def checkpoint_of_the_shape(folder):
    """A checkpoint of Qwen3-30B-A3B's shape: headers, and files that are one hole."""
    script = ROOT / "benchmarks/make_checkpoint.py"
    command = [sys.executable, script, "--preset", "qwen3-30b-sparse", "--out", folder]
    subprocess.run(command, check=True, capture_output=True)


def test_printed_plans_are_what_plan_prints(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint_of_the_shape(tmp_path / "Qwen3-30B-A3B-4bit")
    shown = [re.match(r"\$ (smoe-mlx plan .*)\n", p.values[0]) for p in blocks("text")]
    shown = [(m[1], m.string[m.end() :]) for m in shown if m]
    assert len(shown) == 2
    for command, printed in shown:
        assert cli.main(shlex.split(command)[1:]) == 0
        assert capsys.readouterr().out == printed


def test_the_figures_of_the_readme_stand_in_the_tables():
    readme = (ROOT / "README.md").read_text("utf-8")
    measured = re.search(r"## Measured\n(.*?)\n## ", readme, re.S)[1]
    figures = re.findall(r"\d[\d.,]*\d", re.sub(r"Qwen\S+|H200", "", measured))
    assert len(figures) > 12
    tables = "".join((ROOT / "docs" / f).read_text() for f in ("performance.md", "prefill.md"))
    for figure in figures:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", tables), figure


def test_symptoms_are_messages_of_the_library():
    source = "".join(p.read_text("utf-8") for p in (ROOT / "src/smoe_mlx").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # strings that go on in the next line
    text = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    symptoms = [
        quoted
        for row in re.findall(r"^\| (.*?) \|", text, re.M)
        for quoted in re.findall(r"`([^`]+)`", row)
    ]
    assert len(symptoms) > 20
    for symptom in symptoms:
        assert symptom in source, symptom


def test_the_layout_names_every_module():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for path in (ROOT / "src/smoe_mlx").rglob("*.py"):
        assert path.name == "__init__.py" or re.search(rf"\b{path.name}\b", text), path


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_benchmarks_that_documents_show_have_these_options(path):
    text = path.read_text("utf-8")
    for name, options in re.findall(r"benchmarks/(\w+\.py)((?:\s+[^`|;,()\s]+)*)", text):
        script = (ROOT / "benchmarks" / name).read_text("utf-8")
        for option in re.findall(r"(?<=\s)--[a-z][a-z-]*", options):
            # `group.add_argument(f"--{name}")` makes some of make_checkpoint.py's
            assert f'"{option}"' in script or f'"{option[2:]}"' in script, (name, option)


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
    for script in (*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/check_*.py")):
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


@pytest.mark.parametrize(
    "name", ["tools/reliability.py", "tests/check_kills.py", "tests/check_interrupts.py"]
)
def test_every_script_starts(name):
    """What it imports is there. (Benchmarks are run, in test_benchmarks.py.)"""
    out = subprocess.run([sys.executable, ROOT / name, "--help"], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
