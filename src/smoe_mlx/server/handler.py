"""HTTP: mlx-lm's handler with more doors, and a guard at each of them."""

import hmac
import io
import json
import logging
import select
import socket
import sys
import time
import uuid
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mlx_lm.server import APIHandler, CompletionRequest

from ..stats import stats
from .anthropic import MessageEvents, error_json, to_chat, to_message
from .errors import RequestError
from .fleet import DEFAULT
from .turn import Stopped
from .worker import Request

MAX_BODY = 16 << 20  # bytes
PAGE = Path(__file__).with_name("page.html")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
CHAT = ("/v1/chat/completions", "/chat/completions")
COMPLETIONS = "/v1/completions"


class Server(ThreadingHTTPServer):
    """A thread a connection."""

    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # clients that go away are not news
            logging.exception("a connection failed")


class Handler(APIHandler):
    """One connection: one request, one answer (HTTP/1.0).

    mlx-lm's handler parses what is asked and writes what is answered. Added here: who may ask, how
    much, of which models; errors in the protocol's own JSON; /v1/messages, /metrics and the page.
    """

    server_version, sys_version = "smoe-mlx", ""
    timeout = 60  # seconds that a client may take for each piece that it sends or receives
    response_generator: Any
    body: Any
    path: str
    stream: bool
    wfile: Any

    def setup(self) -> None:
        super().setup()
        self.headers_sent = self.is_messages = self.counts = False

    def do_GET(self) -> None:
        self._guarded(self._get)

    def do_POST(self) -> None:
        self._guarded(self._post)

    def do_OPTIONS(self) -> None:
        self._guarded(super().do_OPTIONS)

    def log_message(self, format: str, *args: Any) -> None:
        logging.info(f"{self.address_string()} {format % args}")

    # ---- the guard -------------------------------------------------------------------------------

    def _guarded(self, answer: Callable[[], None]) -> None:
        metrics = self.response_generator.metrics
        metrics.count("in_flight")
        try:
            self.path = self.path.partition("?")[0]  # some clients add a query
            self.is_messages = self.path.startswith(MESSAGES)
            self._check_caller()
            answer()
        except (Stopped, OSError):  # the client has gone: nobody to tell
            self.close_connection = True
        except RequestError as e:
            self._fail(e)
        except Exception as e:
            logging.exception("a request failed")
            self._fail(RequestError(500, f"{type(e).__name__}: {e}"))
        finally:
            metrics.count("in_flight", -1)

    def _check_caller(self) -> None:
        """Web pages of others may not ask, and nobody without the key where one is set."""
        args = self.response_generator.cli_args
        try:
            host = urlsplit(f"//{self.headers.get('Host', 'localhost')}")
        except ValueError as e:
            raise RequestError(400, f"the Host header is malformed: {e}") from None
        origin = self.headers.get("Origin")
        if args.api_key is None and host.hostname not in (*LOOPBACK, args.host):
            # A page that had its own name point to this machine.
            raise RequestError(403, f"the server does not answer to the name {host.hostname!r}")
        allowed = (*args.allowed_origins, f"http://{host.netloc}")
        if origin is not None and "*" not in allowed and origin not in allowed:
            raise RequestError(403, f"{origin} is none of --allowed-origins")
        if args.api_key is None or self.path in ("/", "/health") or self.command == "OPTIONS":
            return
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        key = self.headers.get("x-api-key", bearer)
        if not hmac.compare_digest(key.encode(), args.api_key.encode()):
            raise RequestError(401, "this server wants an API key", "invalid_api_key")

    def _fail(self, e: RequestError) -> None:
        self.response_generator.metrics.count("errors")
        self.close_connection = True
        body = error_json(e) if self.is_messages else _openai_error(e)
        data = json.dumps(body).encode()
        try:
            if self.headers_sent:  # in the middle of a stream
                event = b"event: error\n" if self.is_messages else b""
                self.wfile.write(event + b"data: " + data + b"\n\n")
                return
            self._headers_buffer: list[bytes] = []  # mlx-lm may have begun with "200 OK"
            super()._set_completion_headers(e.status)
            if e.status == 503:
                self.send_header("Retry-After", "5")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass

    def _set_completion_headers(self, status_code: int = 200) -> None:
        # mlx-lm begins each of its errors with this call; what it would write next is not in the
        # protocol's form.
        if status_code >= 400:
            e = sys.exception()
            if isinstance(e, (RequestError, Stopped)):
                raise e
            raise RequestError(
                400 if e is None or isinstance(e, (ValueError, AssertionError, TypeError)) else 500,
                str(e) if e is not None else "mlx-lm cannot read this request",
            )
        super()._set_completion_headers(status_code)

    def end_headers(self) -> None:
        super().end_headers()
        self.headers_sent = True

    # ---- GET -------------------------------------------------------------------------------------

    def _get(self) -> None:
        if self.path == "/":
            csp = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
            self._send(
                PAGE.read_bytes(),
                "text/html; charset=utf-8",
                {"Content-Security-Policy": csp + "connect-src 'self'"},
            )
        elif self.path == "/metrics":
            self._send(self._metrics().encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif self.path == "/health":
            self.handle_health_check()
        elif self.path.startswith("/v1/models"):
            self.handle_models_request()
        else:
            raise RequestError(404, f"there is no {self.path} here", "not_found")

    def handle_health_check(self) -> None:
        if not self.response_generator.is_healthy:
            raise RequestError(503, "generation has stopped; see the server's log", "unavailable")
        self._send(b'{"status": "ok"}', "application/json")

    def handle_models_request(self) -> None:
        """The models of the fleet. (mlx-lm lists the Hub's cache, which need not exist.)"""
        models = [
            # OpenAI's fields, then Anthropic's.
            {"id": name, "object": "model", "created": self.created, "owned_by": "smoe_mlx"}
            | {"type": "model", "display_name": name, "created_at": _iso(self.created)}
            for name in self.response_generator.model_provider.folders
        ]
        wanted = unquote(self.path.removeprefix("/v1/models").strip("/"))
        if wanted:
            fleet = self.response_generator.model_provider
            answer: Any = next(m for m in models if m["id"] == fleet.name_of(wanted))
        else:
            answer = {"object": "list", "data": models, "has_more": False}
        self._send(json.dumps(answer).encode(), "application/json")

    def _metrics(self) -> str:
        generator = self.response_generator
        resident = list(generator.model_provider.resident.items())
        counters = {name: stats(loaded.model) for name, loaded in resident}
        return str(
            generator.metrics.text(generator.requests.qsize(), generator.sessions.nbytes, counters)
        )

    def _send(self, data: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self._set_cors_headers()
        self.end_headers()
        self.wfile.write(data)

    # ---- POST ------------------------------------------------------------------------------------

    def _post(self) -> None:
        self.response_generator.metrics.count("requests")
        body = self._read_body()
        if self.path in (MESSAGES, COUNT_TOKENS):
            self.counts = self.path == COUNT_TOKENS
            body = to_chat({"max_tokens": 1, **body, "stream": False} if self.counts else body)
            self.path = CHAT[0]
        elif self.path not in (*CHAT, COMPLETIONS):
            raise RequestError(404, f"there is no {self.path} here", "not_found")
        _check(body, chat=self.path in CHAT)
        fleet = self.response_generator.model_provider
        body["model"] = fleet.name_of(body.get("model", DEFAULT))
        # mlx-lm reads the body once more, as it was checked.
        data = json.dumps(body).encode()
        self.headers.replace_header("Content-Length", str(len(data)))
        self.rfile = io.BytesIO(data)
        super().do_POST()

    def _read_body(self) -> dict[str, Any]:
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            raise RequestError(411, "a Content-Length header is needed") from None
        if not 0 <= length <= MAX_BODY:
            self._skip(length)
            raise RequestError(413, f"the body has {length} bytes; {MAX_BODY} are allowed")
        try:
            body = json.loads(self.rfile.read(length), parse_constant=_no_number)
        except (ValueError, RecursionError) as e:
            raise RequestError(400, f"the body is not JSON: {e}") from None
        if not isinstance(body, dict):
            raise RequestError(400, "the body is not a JSON object")
        return body

    def _skip(self, length: int) -> None:
        """Read what is not wanted: a connection closed before that loses the answer."""
        while length > 0 and (piece := self.rfile.read(min(length, 1 << 20))):
            length -= len(piece)

    def handle_chat_completions(self) -> CompletionRequest:
        # mlx-lm's own would fetch images from the net.
        self.request_id = f"{'msg_' if self.is_messages else 'chatcmpl-'}{uuid.uuid4().hex}"
        self.object_type = "chat.completion.chunk" if self.stream else "chat.completion"
        return self._request(
            "chat", "", self.body["messages"], self.body.get("tools"), self.body.get("role_mapping")
        )

    def handle_text_completions(self) -> CompletionRequest:
        super().handle_text_completions()
        return self._request("text", self.body["prompt"], [], None, None)

    def _request(self, *fields: Any) -> Request:
        self.request_ = Request(*fields, gone=lambda: _gone(self.connection), counts=self.counts)
        return self.request_

    def handle_completion(self, request: CompletionRequest, stop_words: list[str]) -> None:
        out = self.wfile
        if self.is_messages and self.stream:
            self.wfile = MessageEvents(out, self.request_, self.requested_model)
        try:
            super().handle_completion(request, stop_words)
        finally:
            self.wfile = out

    def generate_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        response: dict[str, Any] = super().generate_response(*args, **kwargs)
        if self.counts:
            return {"input_tokens": response["usage"]["prompt_tokens"]}
        if self.is_messages and not self.stream:
            return to_message(response, self.request_.stop_word)
        return response


def _check(body: dict[str, Any], chat: bool) -> None:
    """What mlx-lm takes as it comes, or leaves out without a word."""
    for name in [name for name, value in body.items() if value is None]:
        del body[name]  # clients send null for what they leave out
    for name in ("adapters", "draft_model"):
        if body.pop(name, None) is not None:
            raise RequestError(400, f"{name!r} is chosen when the server is started")
    if not isinstance(body.get("model", DEFAULT), str):
        raise RequestError(400, "'model' must be a string")
    if body.get("n", 1) != 1:
        raise RequestError(400, "'n' must be 1: one answer at a time")
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise RequestError(400, "'response_format' is not supported")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not (isinstance(stop, list) and len(stop) <= 16 and all(isinstance(w, str) for w in stop)):
        raise RequestError(400, "'stop' must be a string or a list of at most 16 strings")
    options = body.get("stream_options")
    if options is not None:
        usage = isinstance(options, dict) and bool(options.get("include_usage"))
        body["stream_options"] = {"include_usage": usage}
    if not chat:
        if not isinstance(body.get("prompt"), str):
            raise RequestError(400, "'prompt' must be a string")
        return
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, "'messages' must be a list of at least one message")
    for m in messages:
        if not isinstance(m, dict) or not isinstance(m.get("role"), str):
            raise RequestError(400, "each message must be an object with a 'role'")
        if m["role"] == "developer":
            m["role"] = "system"
        content = m.get("content")
        if isinstance(content, list):
            m["content"] = "".join(map(_text_of, content))
        elif content is not None and not isinstance(content, str):
            raise RequestError(400, "'content' must be a string or a list of parts")
    tools = body.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise RequestError(400, "'tools' must be a list of objects")


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _text_of(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise RequestError(400, f"content of type {kind!r:.40} is not supported: text only")


def _openai_error(e: RequestError) -> dict[str, Any]:
    kind = "invalid_request_error" if e.status < 500 else "server_error"
    return {"error": {"message": e.message, "type": kind, "param": None, "code": e.code}}


def _gone(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection. Never waits."""
    try:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True


def _iso(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
