"""The examples: notebooks and scripts are run as a user would, and what is committed is whole."""

import base64
import contextlib
import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from test_open_experts import WITHOUT_MLX_LM

import smoe_mlx
from smoe_mlx import cli
from smoe_mlx.hub import find_model

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:home|root|Users|tmp|work|private|var|opt|usr)/|[A-Z]:\\\\"
)
MAX_IMAGE_NBYTES = 300_000
# Results are compared bit for bit, which only CPUs promise. Scripts run as from the command line.
ON_CPU = "import mlx.core as mx; mx.set_default_device(mx.cpu)\n"
RUN = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')\n"


def by_name(path):
    return path.name


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(notebook, kind):
    return [c for c in notebook["cells"] if c["cell_type"] == kind]


def kinds(cell):
    """What a cell has put out: the names of streams and the types of data."""
    return [o.get("name") or sorted(o["data"]) for o in cell["outputs"]]


def words(cell):
    """The lines in which an output says that things are the same."""
    text = "".join("".join(o["text"]) for o in cell["outputs"] if "text" in o)
    return [line for line in text.splitlines() if re.search(r"\bsame (bits|tokens)\b", line)]


# ---- notebooks -----------------------------------------------------------------------------------


def test_there_are_all_notebooks():
    assert [p.name[:2] for p in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_notebook_runs_and_puts_out_what_is_committed(path, monkeypatch, tmp_path):
    startup = tmp_path / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00.py").write_text(ON_CPU)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    new = module(ROOT / "tools" / "notebooks.py").execute(path)
    committed = json.loads(path.read_text(encoding="utf-8"))
    for cell, before in zip(cells(new, "code"), cells(committed, "code"), strict=True):
        assert kinds(cell) == kinds(before), cell["source"]
        assert words(cell) == words(before), cell["source"]
        assert all("True" in line for line in words(cell)), cell["source"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_committed_notebook_is_whole(path):
    text = path.read_text(encoding="utf-8")
    assert not MACHINE_PATH.search(text), "a path of somebody's machine"
    notebook = json.loads(text)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    code = cells(notebook, "code")
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1))
    outputs = [o for c in code for o in c["outputs"]]
    assert {o["output_type"] for o in outputs} <= {"stream", "execute_result", "display_data"}
    assert all(o["name"] == "stdout" for o in outputs if o["output_type"] == "stream")
    images = [o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    assert images
    assert all(len(base64.b64decode(x)) < MAX_IMAGE_NBYTES for x in images)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_what_a_notebook_says(path):
    texts = ["".join(c["source"]) for c in cells(json.loads(path.read_text()), "markdown")]
    assert texts[0].startswith("# ")
    assert "you will see" in texts[0]
    assert "## Try it on your own model" in texts[-1]
    for text in texts:
        for target in re.findall(r"\]\(([^)]+)\)", text):
            assert (path.parent / target).exists(), target
        for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
            compile(block, path.name, "exec")
        for line in re.findall(r"^smoe-mlx .*$", text, re.M):
            cli.build_parser().parse_args(shlex.split(line, comments=True)[1:])


# ---- scripts -------------------------------------------------------------------------------------


def command(name, *args, first=ON_CPU):
    return [sys.executable, "-c", first + RUN, str(EXAMPLES / name), *args]


def run(name, *args, first=ON_CPU, text=""):
    """Run a script with `text` as its standard input."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    options = {"capture_output": True, "text": True, "timeout": 120, "env": env}
    return subprocess.run(command(name, *args, first=first), input=text, **options)


@pytest.mark.parametrize("path", SCRIPTS, ids=by_name)
def test_help_says_what_a_script_does(path):
    out = run(path.name, "--help")
    assert out.returncode == 0, out.stderr
    first = path.read_text().removeprefix('"""').splitlines()[0]
    assert first in out.stdout


def test_chat():
    out = run("chat.py", "--max-tokens", "8", text="It was\nand\n")
    assert out.returncode == 0, out.stderr
    assert out.stdout.count(" tok/s, ") == 2
    assert run("chat.py").returncode == 0


def test_score_without_arguments_prefers_what_makes_sense():
    out = run("score.py")
    assert out.returncode == 0, out.stderr
    rows = [line.split("\t") for line in out.stdout.splitlines()]
    assert len(rows) == 3
    assert float(rows[0][0]) > float(rows[1][0])
    assert "MB of experts read" in out.stderr


def test_score_is_the_models_own(tmp_path):
    """Batches, padding and windows change nothing: the same as mlx-lm, text by text."""
    texts = ["It was a bright morning, and the sea was calm.", "x", "def f(x):\n    return x"] * 2
    (tmp_path / "t.txt").write_text("\n".join(t.replace("\n", " ") for t in texts))
    out = run("score.py", str(tmp_path / "t.txt"), "--window", "8")
    assert out.returncode == 0, out.stderr
    model, tokenizer = mlx_lm.load(str(find_model("demo")))
    rows = [line.split("\t") for line in out.stdout.splitlines()]
    for row, text in zip(rows, texts, strict=True):
        tokens = tokenizer.encode(text.replace("\n", " "))
        total = count = 0
        for start in range(0, len(tokens), 8):
            window = mx.array(tokens[start : start + 8])
            if window.size > 1:
                logits = model(window[None, :-1])[0]
                logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
                total += mx.take_along_axis(logprobs, window[1:, None], -1).sum().item()
                count += window.size - 1
        assert float(row[0]) == pytest.approx(total, abs=2e-3)
        assert int(row[1]) == count


def test_score_of_standard_input():
    out = run("score.py", "-", text="It was\n\nand so\n")
    assert len(out.stdout.splitlines()) == 2, out.stderr


@pytest.mark.parametrize("slots", ["64", "8", "1"])
def test_own_model_needs_no_mlx_lm_and_is_right(slots):
    out = run("own_model.py", "--slots", slots, first=WITHOUT_MLX_LM + ON_CPU)
    assert out.returncode == 0, out.stderr
    assert float(re.search(r"computation: (\S+)", out.stdout)[1]) < 1e-5
    assert run("own_model.py").returncode == 0


def test_under_mlx_lm_server():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = command("under_mlx_lm_server.py", "--port", str(port))
    process = subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        body = json.dumps({"prompt": "It was", "max_tokens": 6, "temperature": 0}).encode()
        url = f"http://127.0.0.1:{port}/v1/completions"
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, body, headers)
        answer, deadline = None, time.monotonic() + 90
        while answer is None and time.monotonic() < deadline:
            assert process.poll() is None, "the server has ended"
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                answer = json.load(urllib.request.urlopen(request, timeout=60))
            time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
    model, tokenizer = mlx_lm.load(str(find_model("demo")))
    expected = mlx_lm.generate(model, tokenizer, "It was", max_tokens=6)
    assert answer["choices"][0]["text"] == expected


def test_read_vault(tmp_path):
    out = run("read_vault.py")
    assert out.returncode == 2
    assert out.stderr.startswith("usage: read_vault.py")
    vault = smoe_mlx.shatter("demo", tmp_path / "v") / "experts.smoe"
    out = run("read_vault.py", str(vault), "model.layers.0.mlp.switch_mlp", "5")
    assert "up_proj.weight       uint32   (64, 32)" in out.stdout, out.stderr


def test_the_readme_names_every_example():
    text = (EXAMPLES / "README.md").read_text()
    assert set(re.findall(r"\]\(([\w.]+)\)", text)) == {p.name for p in (*NOTEBOOKS, *SCRIPTS)}
