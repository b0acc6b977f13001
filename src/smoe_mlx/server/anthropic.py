"""Anthropic's messages: requests to OpenAI's chat form, answers back from it."""

import json
from typing import Any

from .errors import RequestError

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def error_json(e: RequestError) -> dict[str, Any]:
    kind = _ERRORS.get(e.status, "invalid_request_error" if e.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": e.message}}


def to_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The chat request that says what a messages request says.

    Raises:
        RequestError: it is malformed, or asks for what there is not.
    """
    for name, type_ in (("max_tokens", int), ("messages", list)):
        if not isinstance(body.get(name), type_):
            raise RequestError(400, f"{name}: field required")
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"])})
    for m in body["messages"]:
        if not isinstance(m, dict) or m.get("role") not in ("user", "assistant", "system"):
            raise RequestError(400, "messages: each needs a 'role', user or assistant")
        messages += _messages(m["role"], m.get("content"))
    chat: dict[str, Any] = {
        "messages": messages,
        "stream": body.get("stream", False),
        "stream_options": {"include_usage": True},
        "stop": body.get("stop_sequences"),
    }
    for name in ("model", "max_tokens", "temperature", "top_p", "top_k"):
        chat[name] = body.get(name)
    choice = body.get("tool_choice") or {"type": "auto"}
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in ("auto", "none"):
        raise RequestError(400, f"tool_choice: {kind!r:.40} is not supported, only auto and none")
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise RequestError(400, "tools: must be a list")
    if kind == "auto":
        chat["tools"] = [_tool(t) for t in tools]
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") in ("enabled", "disabled"):
        chat["chat_template_kwargs"] = {"enable_thinking": thinking["type"] == "enabled"}
    return chat


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or "name" not in tool or "input_schema" not in tool:
        raise RequestError(400, "tools: each needs a 'name' and an 'input_schema'")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _messages(role: str, content: Any) -> list[dict[str, Any]]:
    """One message of blocks: the results of tools are messages of their own, before the rest."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = content if isinstance(content, list) else [content]
    results, texts, calls, thoughts = [], [], [], []
    for b in blocks:
        kind = b.get("type") if isinstance(b, dict) else None
        try:
            if kind == "text":
                texts.append(str(b["text"]))
            elif kind == "thinking":
                thoughts.append(str(b["thinking"]))
            elif kind == "tool_use":
                function = {"name": b["name"], "arguments": json.dumps(b["input"])}
                calls.append({"id": b["id"], "type": "function", "function": function})
            elif kind == "tool_result":
                text = _text(b.get("content") or "")
                results.append({"role": "tool", "tool_call_id": b["tool_use_id"], "content": text})
            elif kind != "redacted_thinking":
                raise RequestError(400, f"content of type {kind!r:.40} is not supported")
        except KeyError as e:
            raise RequestError(400, f"a block of type {kind!r:.40} needs {e}") from None
    message: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return results + [message] * bool(texts or calls or not results)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [content]
    for b in blocks:
        if not isinstance(b, dict) or not isinstance(b.get("text"), str):
            kind = b.get("type") if isinstance(b, dict) else b
            raise RequestError(400, f"content of type {kind!r:.40} is not supported: text only")
    return "\n".join(b["text"] for b in blocks)


def to_message(response: dict[str, Any], stop_word: str | None) -> dict[str, Any]:
    """The message that says what a chat completion says."""
    choice = response["choices"][0]
    answer = choice["message"]
    content: list[dict[str, Any]] = []
    if answer.get("reasoning"):
        content.append({"type": "thinking", "thinking": answer["reasoning"], "signature": ""})
    if answer.get("content"):
        content.append({"type": "text", "text": answer["content"]})
    for call in answer.get("tool_calls") or []:
        content.append(_tool_use(call) | {"input": json.loads(call["function"]["arguments"])})
    return _message(
        response["id"],
        response["model"],
        content,
        _usage(response["usage"]),
        *_stop(choice["finish_reason"], stop_word),
    )


def _message(
    id_: str,
    model: str,
    content: list[dict[str, Any]],
    usage: dict[str, int],
    reason: str | None = None,
    stop_word: str | None = None,
) -> dict[str, Any]:
    return {
        "id": id_,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop_word,
        "usage": usage,
    }


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": f"toolu_{call['id']}",
        "name": call["function"]["name"],
        "input": {},
    }


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _stop(finish: str, stop_word: str | None) -> tuple[str, str | None]:
    if finish == "stop" and stop_word is not None:
        return "stop_sequence", stop_word
    return _STOP_REASONS[finish], None


class MessageEvents:
    """A file that takes the chunks of a chat stream, as mlx-lm writes them, and writes the events
    of a messages stream instead. Headers and comments pass as they are."""

    def __init__(self, out: Any, request: Any, model: str):
        self.out, self.request, self.model = out, request, model
        self.index, self.block = 0, ""  # of the content block, and its type while it is open
        self.started, self.finish = False, "stop"

    def write(self, data: bytes) -> None:
        if not data.startswith(b"data: "):
            self.out.write(data)
        elif data.startswith(b"data: {"):
            self.take(json.loads(data[6:]))

    def flush(self) -> None:
        self.out.flush()

    def take(self, chunk: dict[str, Any]) -> None:
        if not self.started:
            self.start(chunk["id"])
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("reasoning"):
                self.open("thinking", thinking="", signature="")
                self.delta("thinking_delta", thinking=delta["reasoning"])
            if delta.get("content"):
                self.open("text", text="")
                self.delta("text_delta", text=delta["content"])
            for call in delta.get("tool_calls") or []:
                self.close()
                self.open(**_tool_use(call))
                self.delta("input_json_delta", partial_json=call["function"]["arguments"])
            self.finish = choice["finish_reason"] or self.finish
        if "usage" in chunk:  # the last
            self.close()
            reason, word = _stop(self.finish, self.request.stop_word)
            usage = _usage(chunk["usage"])
            self.send(
                "message_delta", delta={"stop_reason": reason, "stop_sequence": word}, usage=usage
            )
            self.send("message_stop")

    def start(self, id_: str) -> None:
        ctx = self.request.ctx
        counts = {
            "prompt_tokens": len(ctx.prompt),
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": ctx.prompt_cache_count},
        }
        self.send("message_start", message=_message(id_, self.model, [], _usage(counts)))
        self.started = True

    def open(self, type: str, **fields: Any) -> None:
        if self.block != type or type == "tool_use":
            self.close()
            self.block = type
            self.send(
                "content_block_start", index=self.index, content_block={"type": type, **fields}
            )

    def delta(self, type: str, **fields: Any) -> None:
        self.send("content_block_delta", index=self.index, delta={"type": type, **fields})

    def close(self) -> None:
        if self.block:
            self.send("content_block_stop", index=self.index)
            self.index, self.block = self.index + 1, ""

    def send(self, type: str, **fields: Any) -> None:
        data = json.dumps({"type": type, **fields})
        self.out.write(f"event: {type}\ndata: {data}\n\n".encode())
