"""Time to first token over a long conversation with the server, and how quickly /health answers.

    python benchmarks/serve.py
    python benchmarks/serve.py --model /models/qwen3-30b --slots 0.25 --turns 30

Two arms take turns: a conversation that goes on (a session holds its past), and the same messages
behind a first word that is new each time (nothing can be reused). While both run, another thread
asks /health every 20 ms. The server is a process of its own.
"""

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="folder, or demo (the bundled model)")
    parser.add_argument("--slots", default="0.25", help="share of experts in slots")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--context", help="tokens to plan for")
    args = parser.parse_args()
    command = [sys.executable, "-m", "smoe_mlx", "server", f"model={args.model}", "--port", "0"]
    command += ["--prompt-cache-bytes", "1GB", "--slots", args.slots]
    command += ["--context", args.context] if args.context else []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            port = int(server.stderr.readline().split(":")[2].split("/")[0])
            run(args, port)
        finally:
            server.terminate()


def run(args: argparse.Namespace, port: int) -> None:
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
    talk = ["Tell me of the sea."]
    turns = []
    for n in range(args.turns):
        kept, prompt, new, text = ask(port, talk, args.max_tokens)
        anew = ask(port, [f"{n} {talk[0]}", *talk[1:]], args.max_tokens)[0]
        turns.append((prompt, new, kept, anew))
        talk += [text, f"Go on, {n}."]
    done.set()
    thread.join()
    print("turn  prompt tokens  prefilled  first token, ms   all anew, ms")
    for n, (prompt, new, kept, anew) in enumerate(turns, 1):
        if n <= 3 or n % 5 == 0:
            print(f"{n:4} {prompt:14} {new:10} {1e3 * kept:16.0f} {1e3 * anew:14.0f}")
    for name, column in (("with a session", 2), ("all anew", 3)):
        early = statistics.median(t[column] for t in turns[1:6])
        late = statistics.median(t[column] for t in turns[-5:])
        print(f"last five turns against turns 2 to 6, {name}: {late / early:.2f}")
    answered.sort()
    print(
        f"/health, {len(answered)} times: median {1e3 * statistics.median(answered):.1f} ms, "
        f"99 % within {1e3 * answered[int(0.99 * len(answered))]:.1f}, "
        f"all within {1e3 * answered[-1]:.1f}"
    )


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
