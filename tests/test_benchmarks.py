"""Every benchmark runs, in miniature. What it measures then means nothing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import random_model, save_checkpoint

import smoe_mlx

ROOT = Path(__file__).parents[1]
DEMO = Path(smoe_mlx.__file__).parent / "demo"
ARGUMENTS = {
    "decode.py": "--tokens 8 --warmup 4 --rounds 1 --turn 4 --shares 0.5 --ways both lag1 token",
    "forecast.py": "--models demo --tokens 4 --prompt-tokens 4",
    "host_overhead.py": "--tokens 12 --warmup 2",
    "hot.py": "--learn {text} --text {text} --learn-tokens 16 --tokens 8 --shares 0.5 --pins 2 "
    "--prompts 8",
    "kernels.py": "--help",  # needs a GPU
    "load.py": "{demo} --rounds 1",
    "long_run.py": "--tokens 4",
    "make_checkpoint.py": "--preset tiny --out {new}",
    "prefill.py": "--tokens 70 --rounds 1 --disk 1",
    "projection.py": "",
    "quality.py": "{raw} --tokens 64 --window 32 --bits 4 --text {text}",
    "read.py": "{demo} {vault} --rounds 1 --seconds 0.02",
    "serve.py": "--turns 2 --max-tokens 4",
    "shatter.py": "{demo} --rounds 1",
    "soak.py": "--rounds 1 --requests 4",
    "speculative.py": "--tokens 5 --turn 4 --rounds 1 --texts code --ways plain lookup",
    "sync.py": "--tokens 4 --rounds 1",
    "turns.py": "--tokens 8 --warmup 4 --turn 4 --shares 1.0 0.5",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    smoe_mlx.shatter("demo", folder / "vault")
    config = json.loads((DEMO / "config.json").read_text())
    for name in ("quantization", "quantization_config"):
        config.pop(name, None)
    config |= {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    save_checkpoint(folder / "raw", random_model(config), config)
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, folder / "raw")
    text = ROOT / "docs" / "decode.md"
    return {"demo": DEMO, "vault": folder / "vault", "raw": folder / "raw", "text": text}


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "benchmarks").glob("*.py")))
def test_benchmark(name, places, tmp_path):
    arguments = [x.format(**places, new=tmp_path / "new") for x in ARGUMENTS[name].split()]
    out = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / name, *arguments],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr + out.stdout
    assert out.stdout.strip()
