"""The console chat as a user types it."""

import json
import os
import signal
import subprocess
import sys

import pytest

import smoe_mlx
from smoe_mlx.server.chat import _printable

CHAT = [sys.executable, "-m", "smoe_mlx", "chat", "demo", "--slots", "0.25"]
ENV = {**os.environ, "HF_HUB_OFFLINE": "1"}


def chat(lines, *flags):
    out = subprocess.run(
        [*CHAT, *flags], input=lines, capture_output=True, text=True, env=ENV, timeout=120
    )
    assert out.returncode == 0, out.stderr
    return out.stdout


def test_a_conversation(tmp_path):
    file = tmp_path / "talk.json"
    out = chat(
        f'Tell me.\n"""two\nlines"""\none \\\nmore\n/save {file}\n/reset\nTell me.\n/stats\n',
        "-m",
        "8",
    )
    talk = json.loads(file.read_text())
    assert [m["content"] for m in talk[::2]] == ["Tell me.", "two\nlines", "one \nmore"]
    assert out.startswith("".join(m["content"] + "\n" for m in (*talk[1::2], talk[1])))
    assert "hits / misses" in out
    model, tokenizer = smoe_mlx.load("demo", slots=0.25)
    prompt = f"USER: Tell me.\nASSISTANT: {talk[1]['content']}\nUSER: two\nlines\nASSISTANT:"
    assert talk[3]["content"] == smoe_mlx.generate(
        model, tokenizer, tokenizer.encode(prompt), max_tokens=8
    )
    again = chat(f"/load {file}\nAnd?\n/save {file}\n", "-m", "8")
    longer = json.loads(file.read_text())
    assert longer[:-2] == talk
    assert again.strip() == longer[-1]["content"].strip()


def test_what_goes_wrong_is_said(tmp_path):
    (tmp_path / "bad.json").write_text('[{"role": 3}]')
    out = chat(
        f"/load {tmp_path}/none.json\n/load {tmp_path}/bad.json\n/what\n" + "long " * 2000 + "\n"
    )
    for words in ("No such file", "not a conversation", "/save FILE", "--context"):
        assert words in out


def test_ctrl_c_stops_the_answer_and_keeps_the_session(tmp_path):
    file = tmp_path / "talk.json"
    with subprocess.Popen(
        [*CHAT, "-m", "900"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV
    ) as process:
        try:
            process.stdin.write(b"Tell me.\n")
            process.stdin.flush()
            begin = process.stdout.read(20)
            process.send_signal(signal.SIGINT)
            process.stdin.write(f"/save {file}\n".encode())
            process.stdin.close()
            out = begin + process.stdout.read()
            assert process.wait(60) == 0
        finally:
            process.kill()
    user, answer = json.loads(file.read_text())
    assert user["content"] == "Tell me."
    assert out.decode() == answer["content"] + " (stopped)\n"


@pytest.mark.parametrize(
    ("text", "shown"), [("a\x1b[2Jb\x07\x9b", "a[2Jb"), ("é 👩‍🚀\n\tx", "é 👩‍🚀\n\tx")]
)
def test_text_does_not_steer_the_terminal(text, shown):
    assert _printable(text) == shown
