"""The commands as a user types them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import smoe_mlx

SMOE = [sys.executable, "-m", "smoe_mlx"]


def smoe(*args: str, status: int = 0, **kwargs) -> subprocess.CompletedProcess:
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    out = subprocess.run(
        [*SMOE, *args], capture_output=True, text=True, env=env, timeout=120, **kwargs
    )
    assert out.returncode == status, out.stderr
    assert "Traceback" not in out.stderr
    return out


def test_demo_prints_text_and_one_line_of_truth():
    out = smoe("demo", "--max-tokens", "40")
    assert out.stdout.startswith("And the LORD said unto Moses,")
    assert len(out.stdout) > 60
    line = out.stderr.strip().splitlines()[-1]
    for word in ("tok/s", "% hits", "read", "peak", "plan", "128 of 512 experts"):
        assert word in line
    assert smoe("demo", "--max-tokens", "40").stdout == out.stdout  # seeded


def test_generate():
    base = ["generate", "demo", "--max-tokens", "12", "--prompt", "def main(", "--slots", "0.25"]
    out = smoe(*base)
    assert out.stdout.startswith("def main(")
    quiet = smoe(*base, "--quiet")
    assert out.stdout == "def main(" + quiet.stdout
    assert quiet.stderr == ""
    everything = smoe(*base[:-2], "--slots", "1.0", "--quiet")
    assert everything.stdout == quiet.stdout
    piped = smoe(*base[:4], "--slots", "64", "-q", "--prompt", "-", input="def main(")
    assert piped.stdout == quiet.stdout
    direct = smoe(*base, "--quiet", "--io", "direct", "--threads", "0")
    assert direct.stdout == quiet.stdout
    flag = smoe("generate", "--model", *base[1:], "--quiet")
    assert flag.stdout == quiet.stdout


def test_drafts():
    base = ["generate", "demo", "-m", "60", "-p", "a b c d a b c d a b c d a b", "--slots", "0.25"]
    plain = smoe(*base).stdout
    for flags in (["--prompt-lookup", "2"], ["--draft-model", "demo", "--num-draft-tokens", "2"]):
        out = smoe(*base, *flags)
        assert out.stdout == plain
        assert "drafts accepted" in out.stderr
    assert "leave the drafts out" in smoe(*base, *flags, "--instrument", status=1).stderr


def test_plan():
    out = smoe("plan", "demo", "--memory", "30MB").stdout
    for word in ("backbone", "expert slots", "KV cache", "total", "smallest", "useful"):
        assert word in out
    plan = json.loads(smoe("plan", "demo", "--memory", "30MB", "--json").stdout)
    assert plan["total"] <= 30_000_000
    parts = (
        "backbone", "slots_nbytes", "kv_cache", "activations", "prompt_states", "buffer_cache",
        "overhead",
    )  # fmt: skip
    assert sum(plan[k] for k in parts) == plan["total"]


def test_stats():
    args = ["stats", "demo", "--slots", "64", "--max-tokens", "5"]
    out = smoe(*args).stdout
    assert "hit rate" in out
    assert len(out.splitlines()) > 15
    s = json.loads(smoe(*args, "--json").stdout)
    assert s["hits"] + s["misses"] == sum(x["hits"] + x["misses"] for x in s["layers"])
    assert s["misses"] > 0
    assert s["plan"]["slots"] == 64


def test_trace_and_replay(tmp_path):
    path = str(tmp_path / "t.npz")
    base = ["trace", "demo", "-p", "def main(", "-m", "9", "-o", path]
    args = ["replay", path, "--policy", "lru", "--slots", "64, 0.5", "--json"]
    # With all in memory, generation computes a token ahead; it is none of the prompt's.
    assert smoe(*base, "--slots", "1.0", "--quiet").stdout == ""
    ahead = json.loads(smoe(*args).stdout)
    out = smoe(*base, "--slots", "64", "--policy", "lfu").stdout
    assert out.startswith(f"{path}: 11 tokens")
    report = json.loads(smoe(*args).stdout)
    assert [(r["policy"], r["slots"]) for r in report["results"]] == [
        ("lru", 64), ("optimal", 64), ("lru", 256), ("optimal", 256),
    ]  # fmt: skip
    counted = report["results"][0]
    assert counted["prompt"] == ahead["results"][0]["prompt"]
    text = smoe("replay", path).stdout
    for word in ("demo: 11 tokens, 3 of them prompt", "lru", "lfu", "optimal", "12.5 %", "75.0 %"):
        assert word in text
    assert smoe("replay", path, "--slots", "9999", status=1).stderr.count("\n") == 1


def test_trace_of_a_text(tmp_path):
    text, path = tmp_path / "text.txt", str(tmp_path / "t.npz")
    text.write_text("def main(argv):\n    pass\n" * 20)
    smoe("trace", "demo", "--file", str(text), "-m", "12", "-o", path, "--context", "8", "-q")
    out = smoe("replay", path).stdout
    assert out.startswith("demo: 12 tokens, 0 of them prompt")
    assert "the prompt:" not in out


def test_version_and_help():
    assert smoe_mlx.__version__ in smoe("--version").stdout
    for command in ("demo", "generate", "plan", "stats", "trace"):
        assert command in smoe("--help").stdout
        assert "--memory" in smoe(command, "--help").stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "/no/such/folder"], "/no/such/folder"),
        (["generate", "owner/name"], "Hub"),
        (["generate"], "name a model"),
        (["plan", "demo", "--memory", "1MB"], "at least"),
        (["plan", "demo", "--memory", "lots"], "12GB"),
        (["plan", "demo", "--memory", "1GB", "--slots", "4"], "not both"),
        (["plan", "demo", "--slots", "1.5"], "share"),
        (["generate", "demo", "--threads", "-1"], "threads"),
        (["generate", "demo", "--policy", "fifo"], "lru, lfu"),
        (["trace", "demo", "--file", "/no/such/text"], "/no/such/text"),
        (["trace", "demo", "-o", "/no/such/t.npz"], "no such folder"),
        (["replay", "/no/such/trace"], "smoe-mlx trace"),
        (["replay", __file__], "no trace"),
    ],
)
def test_mistakes_get_one_line(args, words):
    out = smoe(*args, status=1)
    assert out.stdout == ""
    lines = [x for x in out.stderr.strip().splitlines() if x]
    assert len(lines) == 1
    assert words in lines[0]


def test_wrong_flags_are_usage_errors():
    assert "usage" in smoe("generate", "demo", "--nonsense", status=2).stderr
    assert "usage" in smoe(status=2).stderr
    assert "neither a number" in smoe("plan", "demo", "--slots", "many", status=2).stderr


def test_ctrl_c_ends_quietly():
    process = subprocess.Popen(
        [*SMOE, "demo", "--max-tokens", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # Ignored where the tests were started in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    text = b""
    while len(text) < 80:
        text += os.read(process.stdout.fileno(), 100)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT
    assert b"Traceback" not in err
    assert b"Exception" not in err


def test_a_closed_pipe_ends_quietly():
    command = " ".join([*SMOE, "plan", "demo", "|", "head", "-1"])
    out = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert out.stdout.startswith("backbone")
    assert out.stderr == ""


def test_usage_is_remembered_where_it_was_asked_for(tmp_path):
    path = tmp_path / "usage.json"
    base = ["generate", "demo", "-m", "9", "-p", "def main(", "--slots", "0.5", "-q"]
    cold = smoe(*base, "--usage", str(path))
    assert path.exists()
    warm = smoe(*base, "--usage", str(path), "--hot-per-layer", "2")
    assert warm.stdout == cold.stdout
    assert (cold.stderr, warm.stderr) == ("", "")
    path.write_text("{}")
    ignored = smoe(*base, "--usage", str(path))
    assert ignored.stdout == cold.stdout
    assert "no usage file of this model" in ignored.stderr
    error = smoe(*base[:-1], "--hot-per-layer", "40", status=1).stderr
    assert "hot_per_layer=40" in error
