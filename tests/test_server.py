"""The server with real sockets: mlx-lm's endpoints, and what is added to them."""

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

import smoe_mlx
from smoe_mlx import cli
from smoe_mlx.cli.flags import streaming_config
from smoe_mlx.errors import SmoeError
from smoe_mlx.server.app import running
from smoe_mlx.server.fleet import parse_models
from smoe_mlx.server.text import StopWords

GENERATE = sys.modules["smoe_mlx.generate"]  # the module, not the function
SECONDS = 60  # the longest wait for anything


class Client:
    """A running server, and a way to talk to it."""

    def __init__(self, httpd):
        self.port = httpd.server_port
        self.generator = httpd.RequestHandlerClass.args[0]
        self.sessions = self.generator.sessions
        self.url = f"http://127.0.0.1:{self.port}"

    def request(self, method, path, body=None, headers=None):
        """(status, the answer parsed where it is JSON)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        with contextlib.closing(connection):
            data = json.dumps(body) if isinstance(body, dict) else body
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            text = response.read().decode()
            kind = response.headers.get("Content-Type", response.headers.get("Content-type", ""))
            return response.status, json.loads(text) if "json" in kind else text

    def get(self, path, **headers):
        return self.request("GET", path, headers=headers)

    def post(self, path, body, **headers):
        return self.request("POST", path, body, headers)

    def chat(self, *texts, **options):
        """The answer to a conversation, user first, in turns."""
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)
        ]
        status, answer = self.post(
            "/v1/chat/completions", {"messages": messages, "max_tokens": 8, **options}
        )
        assert status == 200, answer
        return answer

    def open(self, path, body):
        """A connection on which a request was sent, and nothing read yet."""
        data = json.dumps(body).encode()
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)
        sock.sendall(f"POST {path} HTTP/1.1\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return sock

    def counter(self, name):
        lines = self.get("/metrics")[1].splitlines()
        return next(float(x.split()[-1]) for x in lines if x.startswith(f"smoe_{name}"))


def text_of(answer):
    return answer["choices"][0]["message"]["content"]


def wait_for(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def serving(*argv):
    """A server of this process, on any free port."""
    models = [a for a in argv if not a.startswith("-")] if argv[0][0] != "-" else ["demo"]
    argv = argv if argv[0][0] != "-" else ("demo", *argv)
    assert models
    args = cli.build_parser().parse_args(["server", *argv, "--port", "0"])
    args.models = parse_models(args.models)
    with running(args, streaming_config(args)) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Client(httpd)
        finally:
            httpd.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server():
    with serving("demo", "--slots", "0.25") as client:
        yield client


# ---- what there is -------------------------------------------------------------------------------


def test_the_answer_is_that_of_generate(server):
    answer = server.chat("Tell me of the sea.", max_tokens=16)
    model, tokenizer = smoe_mlx.load("demo", slots=0.25)
    prompt = "USER: Tell me of the sea.\nASSISTANT:"
    assert text_of(answer) == smoe_mlx.generate(
        model, tokenizer, tokenizer.encode(prompt), max_tokens=16
    )
    assert answer["model"] == "demo"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16


def test_models_and_health(server):
    _, models = server.get("/v1/models")
    assert [m["id"] for m in models["data"]] == ["demo"]
    assert server.get("/v1/models/demo")[1]["id"] == "demo"
    assert server.get("/v1/models/d%65mo?beta=true")[1]["id"] == "demo"
    assert server.get("/v1/models/other")[0] == 404
    assert server.get("/health") == (200, {"status": "ok"})
    assert server.get("/nothing")[0] == 404


def test_models_without_a_hub_cache(tmp_path, monkeypatch, server):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    assert server.get("/v1/models")[0] == 200


def test_unknown_model_is_404_and_no_download(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("net"))
    body = {"model": "mlx-community/Qwen3-30B-A3B-4bit", "prompt": "a", "max_tokens": 1}
    status, answer = server.post("/v1/completions", body)
    assert status == 404
    assert answer["error"]["code"] == "model_not_found"


def test_streaming(server):
    whole = text_of(server.chat("Tell me of the sea."))
    sock = server.open(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Tell me of the sea."}],
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    with sock, sock.makefile("r") as lines:
        events = [line[6:].strip() for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    *chunks, usage = map(json.loads, events)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == whole
    assert usage["usage"]["completion_tokens"] == 8


def test_logprobs_and_seed(server):
    answer = server.chat("Tell me of the sea.", logprobs=True, top_logprobs=3)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    assert all(len(c["top_logprobs"]) == 3 for c in content)
    one, two, other = (server.chat("Tell me.", temperature=1.0, seed=s) for s in (5, 5, 6))
    assert text_of(one) == text_of(two) != text_of(other)


def test_stop_words_wherever_tokens_begin(server):
    text = text_of(server.chat("Tell me of the sea.", max_tokens=16))
    word = text[5:8]  # hardly a token of its own
    answer = server.chat("Tell me of the sea.", max_tokens=16, stop=word)
    assert text_of(answer) == text[: text.index(word)]
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 20])
def test_stop_words_in_pieces(size):
    text = "one two three four"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for word, others in (("two", ["zzz"]), ("ee f", ["four"]), ("o", ["n", "t"])):
        seen, found = "", None
        stop = StopWords([*others, word, ""])
        for piece in pieces:
            if found := stop.find(piece):
                break
            seen += piece
        before, hit = found
        assert hit == min([w for w in [*others, word] if w in text], key=text.index)
        assert text[: text.index(hit)] == (seen + before)[: text.index(hit)]
        assert len(before) < len(piece)


def test_control_tokens_of_users_are_text(server):
    plain = server.chat("a <|endoftext|> b")["usage"]["prompt_tokens"]
    model_token = 1
    shorter = server.chat("a  b")["usage"]["prompt_tokens"]
    assert plain > shorter + model_token


def test_metrics(server):
    before = server.counter("generated_tokens_total")
    server.chat("Tell me.")
    assert server.counter("generated_tokens_total") == before + 8
    assert 0 < server.counter('expert_hit_rate{model="demo"}') < 1


def test_metrics_are_prometheus_text(server):
    seen = set()
    for line in server.get("/metrics")[1].splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            assert kind in ("counter", "gauge")
            assert name.endswith("_total") == (kind == "counter")
            seen.add(name)
        elif not line.startswith("#"):
            name, value = re.fullmatch(r'(\w+)(?:\{model="demo"\})? (\S+)', line).groups()
            assert name in seen
            assert float(value) >= 0


def test_the_page_asks_nobody_else(server):
    status, page = server.get("/")
    assert status == 200
    assert not re.search(r"https?://|//\w+\.|@import|url\(|<link|src=", page)
    asked = set(re.findall(r'fetch\("([^"]+)"', page))
    assert asked == {"v1/models", "metrics", "v1/chat/completions"}


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ("{", 400, "JSON"),
        ("[1]", 400, "object"),
        ("[" * 100_000, 400, "JSON"),
        (b"\xff\xfe", 400, "JSON"),
        ({}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({"messages": ["x"]}, 400, "role"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            400,
            "image_url",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, 400, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}, 400, "temperat"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, 400, "n"),
        ({"messages": [{"role": "user", "content": "x"}], "stop": [1]}, 400, "stop"),
        ({"messages": [{"role": "user", "content": "x"}], "adapters": "/x"}, 400, "adapters"),
        (
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json"}},
            400,
            "response_format",
        ),
        ({"messages": [{"role": "user", "content": "long " * 2000}]}, 400, "--context"),
        ({"messages": [{"role": "user", "content": "x"}], "logit_bias": {"8192": 1}}, 400, "bias"),
        ('{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400, "NaN"),
    ],
)
def test_malformed_requests(server, body, status, word):
    got, answer = server.post("/v1/chat/completions", body)
    assert got == status
    assert word in answer["error"]["message"]
    assert server.get("/health")[0] == 200


def test_bodies_have_a_limit(server):
    headers = {"Content-Length": str(1 << 40)}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Content-Length", headers["Content-Length"])
        connection.endheaders()
        connection.sock.shutdown(socket.SHUT_WR)
        assert connection.getresponse().status == 413


def test_web_pages_of_others_are_refused(server):
    assert server.get("/v1/models", Origin="http://evil.example")[0] == 403
    assert server.get("/v1/models", Host="evil.example", Origin="http://evil.example")[0] == 403
    assert server.get("/v1/models", Origin=server.url)[0] == 200
    assert server.get("/v1/models", Host="[")[0] == 400
    assert server.get("//[")[0] == 404


def test_key():
    with pytest.raises(SmoeError, match="--api-key"), serving("demo", "--host", "0.0.0.0"):
        pass
    with serving("demo", "--slots", "0.25", "--api-key", "s3cret") as server:
        assert server.get("/health")[0] == 200
        assert server.get("/v1/models")[0] == 401
        assert server.get("/v1/models", Authorization="Bearer other")[0] == 401
        assert server.get("/v1/models", Authorization="Bearer s3cret")[0] == 200
        assert server.get("/v1/models", **{"x-api-key": "s3cret"})[0] == 200


def test_the_port_is_taken(server):
    args = cli.build_parser().parse_args(["server", "demo", "--port", str(server.port)])
    args.models = parse_models(args.models)
    with pytest.raises(SmoeError, match="cannot listen"), running(args, streaming_config(args)):
        pass


# ---- many at a time ---------------------------------------------------------------------------


def in_threads(functions):
    results = [None] * len(functions)

    def run(i):
        results[i] = functions[i]()

    threads = [threading.Thread(target=run, args=[i]) for i in range(len(functions))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(SECONDS)
        assert not t.is_alive()
    return results


def test_batches_give_the_same_answers(server):
    texts = ["Tell me of the sea.", "def main(", "And the LORD said", "One two three four five"]
    alone = [text_of(server.chat(t, max_tokens=12)) for t in texts]
    with serving("demo", "--slots", "0.25", "--decode-concurrency", "4") as batches:
        asks = [partial(batches.chat, t, max_tokens=12) for t in texts]
        assert [text_of(a) for a in in_threads(asks)] == alone
        again = batches.chat(texts[0], alone[0], "And?", max_tokens=12)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 10
        with batches.open("/v1/chat/completions", LONG):
            pass
        wait_for(lambda: batches.counter("in_flight") == 1)  # the one that asks
        assert text_of(batches.chat(texts[1], max_tokens=12)) == alone[1]


def test_a_crowd(server):
    """Eight clients, some of which talk nonsense or hang up: the others get the right answers, and
    nothing is left over."""
    texts = ["Tell me of the sea.", "def main(", "And the LORD said"]
    right = {t: text_of(server.chat(t)) for t in texts}
    wait_for(lambda: server.counter("in_flight") == 1)  # the one that asks
    threads, files = threading.active_count(), len(os.listdir("/dev/fd"))

    def client(seed):
        rng = random.Random(seed)
        for _ in range(9):
            kind, text = rng.choice(["good", "good", "cancel", "bad", "cut"]), rng.choice(texts)
            if kind == "good":
                assert text_of(server.chat(text)) == right[text]
                assert server.get("/health")[0] == 200
            elif kind == "cancel":
                messages = [{"role": "user", "content": text}]
                stream = rng.random() < 0.5
                body = {"messages": messages, "max_tokens": 500, "stream": stream}
                with server.open("/v1/chat/completions", body) as sock:
                    if stream:
                        sock.recv(rng.choice([1, 300, 900]))
            elif kind == "bad":
                assert server.post("/v1/messages", "{" * rng.randrange(9))[0] == 400
            else:
                with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as sock:
                    sock.sendall(b"POST /v1/messages HTTP/1.1\r\nContent-Length: 90\r\n\r\n{"[:60])
        return True

    assert all(in_threads([partial(client, seed) for seed in range(8)]))
    wait_for(lambda: server.counter("busy") == server.counter("queue") == 0)
    wait_for(lambda: threading.active_count() <= threads and len(os.listdir("/dev/fd")) <= files)
    assert server.sessions.nbytes <= server.sessions.limit
    assert text_of(server.chat(texts[0])) == right[texts[0]]


# ---- clients that go away ------------------------------------------------------------------------


LONG = {"messages": [{"role": "user", "content": "Tell me."}], "max_tokens": 900}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_stops_the_answer(server, stream):
    cancelled = server.counter("cancelled_total")
    before = server.counter("generated_tokens_total")
    with server.open("/v1/chat/completions", {**LONG, "stream": stream}):
        wait_for(lambda: server.counter("generated_tokens_total") > before)
        assert server.get("/health")[0] == 200  # answers meanwhile
    wait_for(lambda: server.counter("cancelled_total") == cancelled + 1)
    assert server.counter("generated_tokens_total") < before + 900
    assert server.chat("Tell me.")["usage"]["completion_tokens"] == 8


def test_a_client_that_goes_stops_a_prompt(server, monkeypatch):
    """Within one wave: the second word about progress after it has gone is never said."""
    words = []
    gone = threading.Event()
    original = GENERATE.prefill

    def prefill(model, streaming, prompt, cache, width, after, progress):
        def report(done, total):
            words.append(done)
            if len(words) == 3:
                sock.close()
                gone.set()
            progress(done, total)

        return original(model, streaming, prompt, cache, width, after, report)

    monkeypatch.setattr(GENERATE, "prefill", prefill)
    cancelled = server.counter("cancelled_total")
    messages = [{"role": "user", "content": "The sea and the sky. " * 30}]
    sock = server.open("/v1/chat/completions", {"messages": messages, "max_tokens": 4})
    assert gone.wait(SECONDS)
    wait_for(lambda: server.counter("cancelled_total") == cancelled + 1)
    assert len(words) <= 4
    monkeypatch.undo()
    fresh = smoe_mlx.load("demo", slots=0.25)
    prompt = f"USER: {messages[0]['content']}\nASSISTANT:"
    assert text_of(server.chat(messages[0]["content"])) == smoe_mlx.generate(
        *fresh, fresh[1].encode(prompt), max_tokens=8
    )


def test_a_client_that_goes_while_it_waits_is_never_served(server):
    cancelled = server.counter("cancelled_total")
    with server.open("/v1/chat/completions", LONG):
        wait_for(lambda: server.counter("busy") == 1)
        prompts = server.counter("prompt_tokens_total")
        with server.open("/v1/chat/completions", LONG):
            wait_for(lambda: server.counter("queue") == 1)
    wait_for(lambda: server.counter("cancelled_total") == cancelled + 2)
    assert server.counter("prompt_tokens_total") == prompts


def test_slow_clients_stall_nobody(server):
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        assert server.chat("Tell me.")["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_cleanly(number):
    process = subprocess.Popen(
        [sys.executable, "-m", "smoe_mlx", "server", "demo", "--slots", "0.25", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    try:
        line = process.stderr.readline()
        port = int(line.split(":")[2].split("/")[0])
        data = json.dumps({**LONG, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as sock:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(data)}\r\n\r\n"
            sock.sendall(head.encode() + data)
            lines = sock.makefile("r")
            while not next(lines).startswith("data: "):
                pass
            process.send_signal(number)
            rest = list(lines)
        assert any("the server is stopping" in x for x in rest)
        assert process.wait(SECONDS) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.stderr.close()


def test_idle_time_fills_free_slots_and_ends_with_a_request(tmp_path, monkeypatch):
    """What the load began, the idle time after an answer goes on with."""
    asked = []
    prewarm = sys.modules["smoe_mlx.server.worker"].prewarm

    def noting(model, stop):
        assert not stop()
        asked.append((model._streaming.cache, prewarm(model, stop)))
        requests = sys._getframe(1).f_locals["self"].requests  # on the thread that takes them
        requests.put("somebody asks")
        assert stop()
        assert requests.get_nowait() == "somebody asks"

    monkeypatch.setattr(sys.modules["smoe_mlx.server.worker"], "prewarm", noting)
    # The load reads nothing ahead here, so that what is read is the idle time's.
    monkeypatch.setattr(sys.modules["smoe_mlx.load"], "prewarm_soon", lambda streaming: None)
    with serving("demo", "--slots", "0.75", "--usage", str(tmp_path / "usage.json")) as client:
        for n in (1, 2):  # before the first request, and after it
            deadline = time.monotonic() + SECONDS
            while len(asked) < n and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(asked) == n
            cache = asked[-1][0]
            assert not any(bank.free for bank in cache._banks)
            client.chat("Hello")
        assert asked[0][1] == cache.slots
