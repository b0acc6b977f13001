"""Time to first token over a long conversation with the server, and how quickly /health answers.

    python benchmarks/serve.py
    python benchmarks/serve.py --model /models/qwen3-30b --slots 0.25 --turns 30
    python benchmarks/serve.py --clients 8 --requests 200

Two arms take turns: a conversation that goes on (a session holds its past), and the same messages
behind a first word that is new each time (nothing can be reused). While both run, another thread
asks /health every 20 ms. The server is a process of its own.

`--clients` instead lets so many clients ask at once. Some of them go away in the middle of an
answer or before it, some send what is no request. Every answer that is read must be the one that
the question gets when nobody else asks, and the server's memory, descriptors and threads (Linux)
are told before and after.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="folder, or demo (the bundled model)")
    parser.add_argument("--slots", default="0.25", help="share of experts in slots")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--clients", type=int, help="so many at once, instead of a conversation")
    parser.add_argument("--requests", type=int, default=200, help="of all clients together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context", help="tokens to plan for")
    args = parser.parse_args()
    command = [sys.executable, "-m", "smoe_mlx", "server", f"model={args.model}", "--port", "0"]
    command += ["--prompt-cache-bytes", "1GB", "--slots", args.slots]
    command += ["--context", args.context] if args.context else []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            port = int(server.stderr.readline().split(":")[2].split("/")[0])
            if args.clients:
                storm(args, port, server.pid)
            else:
                run(args, port)
        finally:
            server.terminate()


@contextlib.contextmanager
def health(port: int) -> Iterator[None]:
    """Ask /health all the while, and say how quickly it answered."""
    answered: list[float] = []
    done = threading.Event()

    def ask_health() -> None:
        while not done.wait(0.02):
            start = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
            connection.close()
            answered.append(time.perf_counter() - start)

    thread = threading.Thread(target=ask_health)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    answered.sort()
    print(
        f"/health, {len(answered)} times: median {1e3 * statistics.median(answered):.1f} ms, "
        f"99 % within {1e3 * answered[int(0.99 * len(answered))]:.1f}, "
        f"all within {1e3 * answered[-1]:.1f}"
    )


def storm(args: argparse.Namespace, port: int, pid: int) -> None:
    questions = [f"Tell me of the {word}." for word in ["sea", "sky", "sun", "ice", "fog", "ash"]]
    expected = {q: ask(port, [q], 16)[3] for q in questions}
    draw = random.Random(args.seed)
    todo = [(draw.choice(questions), draw.random()) for _ in range(args.requests)]
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                if not todo:
                    return
                question, dice = todo.pop()
            what = "answered" if dice < 0.5 else "left" if dice < 0.8 else "malformed"
            if what == "answered":
                if ask(port, [question], 16)[3] != expected[question]:
                    what = "WRONG"
            elif what == "left":
                leave(port, question, dice)
            else:
                status = send_nonsense(port, dice)
                what = "malformed" if 400 <= status < 500 else "WRONG"
            with lock:
                counts[what] += 1

    print(usage_of(pid))
    with health(port):
        threads = [threading.Thread(target=client) for _ in range(args.clients)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    wrong = [q for q in questions if ask(port, [q], 16)[3] != expected[q]]
    print(usage_of(pid))
    print(", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    if wrong or counts["WRONG"]:
        sys.exit("answers were wrong")


def leave(port: int, question: str, dice: float) -> None:
    """Ask, and close the connection: at once, or after a few events."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 64, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    if dice > 0.6:
        response = connection.getresponse()
        for _ in range(int(100 * (dice - 0.6))):
            response.readline()
    connection.close()


def send_nonsense(port: int, dice: float) -> int:
    """The status of a request that is none."""
    bodies = ['{"messages": [', "[]", '{"messages": 5}', '{"messages": [{"role": 1}]}', "\0" * 100]
    connection = http.client.HTTPConnection("127.0.0.1", port)
    path = "/v1/messages" if dice > 0.9 else "/v1/chat/completions"
    connection.request("POST", path, bodies[int(dice * 1000) % len(bodies)])
    status = connection.getresponse().status
    connection.close()
    return status


def usage_of(pid: int) -> str:
    """What a process holds (Linux)."""
    time.sleep(1)  # what was left is cleared away
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        nfd = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return "server: memory, descriptors and threads are not told here"
    found = dict(line.split(":", 1) for line in status.splitlines())
    rss = int(found["VmRSS"].split()[0]) / 1000
    return f"server: {rss:.1f} MB, {nfd} descriptors, {int(found['Threads'])} threads"


def run(args: argparse.Namespace, port: int) -> None:
    with health(port):
        turns = converse(args, port)
    print("turn  prompt tokens  prefilled  first token, ms   all anew, ms")
    for n, (prompt, new, kept, anew) in enumerate(turns, 1):
        if n <= 3 or n % 5 == 0:
            print(f"{n:4} {prompt:14} {new:10} {1e3 * kept:16.0f} {1e3 * anew:14.0f}")
    for name, column in (("with a session", 2), ("all anew", 3)):
        early = statistics.median(t[column] for t in turns[1:6])
        late = statistics.median(t[column] for t in turns[-5:])
        print(f"last five turns against turns 2 to 6, {name}: {late / early:.2f}")


def converse(args: argparse.Namespace, port: int) -> list[tuple[int, int, float, float]]:
    """(tokens of the prompt, those prefilled, seconds to the first token, and all anew) a turn."""
    talk = ["Tell me of the sea."]
    turns = []
    for n in range(args.turns):
        kept, prompt, new, text = ask(port, talk, args.max_tokens)
        anew = ask(port, [f"{n} {talk[0]}", *talk[1:]], args.max_tokens)[0]
        turns.append((prompt, new, kept, anew))
        talk += [text, f"Go on, {n}."]
    return turns


def ask(port: int, talk: list[str], max_tokens: int) -> tuple[float, int, int, str]:
    """(seconds to the first token, tokens of the prompt, those not reused, the answer)."""
    roles = ("user", "assistant")
    body = {
        "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(talk)],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port)
    start = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    first, text, usage = 0.0, "", {}
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        first = first or time.perf_counter() - start
        event = json.loads(line[6:])
        usage = event.get("usage") or usage
        text += "".join(c["delta"].get("content", "") for c in event["choices"])
    connection.close()
    prompt = usage["prompt_tokens"]
    return first, prompt, prompt - usage["prompt_tokens_details"]["cached_tokens"], text


if __name__ == "__main__":
    main()
