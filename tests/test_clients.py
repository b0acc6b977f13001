"""The server with the SDKs that people use: openai and anthropic."""

import contextlib
import copy
import json
import shutil

import anthropic
import mlx.core as mx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import GenerationResponse
from test_server import serving, wait_for

from smoe_mlx.hub import find_model
from smoe_mlx.server import anthropic as messages_api
from smoe_mlx.server.errors import RequestError
from smoe_mlx.server.handler import _check

# Roles as plain words, thoughts and tool calls as Qwen writes them.
TEMPLATE = """\
{%- if tools %}tools: {{ tools | tojson }}
{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{%- for tool_call in m.tool_calls or [] %}
{%- set tool_call = tool_call.function %}
<tool_call>{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}\
</tool_call>
{%- endfor %}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
ASK = [{"role": "user", "content": "Tell me of the sea."}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The demo model with a chat template, and tokens for thoughts."""
    demo, folder = find_model("demo"), tmp_path_factory.mktemp("models") / "thinker"
    shutil.copytree(demo, folder)
    document = json.loads((demo / "tokenizer.json").read_text())
    model = document["model"]
    last = sorted(model["vocab"], key=model["vocab"].get)[-2:]
    for word, name in zip(last, ("<think>", "</think>"), strict=True):
        token = dict(document["added_tokens"][0], content=name, special=False)
        document["added_tokens"].append(token | {"id": model["vocab"].pop(word)})
    model["merges"] = [
        m for m in model["merges"] if "".join(m if isinstance(m, list) else m.split()) not in last
    ]
    for name, text in (
        ("tokenizer.json", json.dumps(document)),
        ("chat_template.jinja", TEMPLATE),
    ):
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with serving(str(folder), "--slots", "0.25") as client:
        yield client


@pytest.fixture(scope="module")
def oai(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def ant(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def script(monkeypatch):
    """script(*pieces): what the model is going to say."""

    def say(*pieces):
        def stream_generate(model, tokenizer, prompt, **options):
            for i, text in enumerate([*pieces, ""], 1):
                finish = "stop" if i == len(pieces) + 1 else None
                zeros = mx.zeros(8192)
                yield GenerationResponse(text, i, zeros, False, 1, 1.0, i, 1.0, 0.0, finish)

        monkeypatch.setattr("smoe_mlx.server.turn.stream_generate", stream_generate)

    return say


# ---- openai --------------------------------------------------------------------------------------


def test_openai_chat(oai):
    answer = oai.chat.completions.create(model="thinker", messages=ASK, max_tokens=8, seed=1)
    text = answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    stream = oai.chat.completions.create(
        model="thinker",
        messages=ASK,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    assert last.usage.completion_tokens == 8
    assert last.usage.prompt_tokens == answer.usage.prompt_tokens
    word = text.split()[-1]
    answer = oai.chat.completions.create(model="thinker", messages=ASK, max_tokens=8, stop=[word])
    assert (answer.choices[0].message.content or "") == text[: text.index(word)]
    assert answer.choices[0].finish_reason == "stop"


def test_openai_logprobs_and_models(oai):
    answer = oai.chat.completions.create(
        model="thinker", messages=ASK, max_tokens=3, logprobs=True, top_logprobs=2
    )
    tokens = answer.choices[0].logprobs.content
    assert all(t.logprob <= 0 and len(t.top_logprobs) == 2 for t in tokens)
    assert [m.id for m in oai.models.list()] == ["thinker"]
    assert oai.models.retrieve("thinker").id == "thinker"
    text = oai.completions.create(model="thinker", prompt="And the LORD", max_tokens=3)
    assert text.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_openai_tools_and_thoughts(oai, script, stream):
    script("<think>", "Rain", "?", "</think>", "Let me see.", "<tool", "_call>", CALL[11:])
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    answer = oai.chat.completions.create(
        model="thinker", messages=ASK, tools=tools, max_tokens=50, stream=stream
    )
    if stream:
        chunks = list(answer)
        deltas = [c.choices[0].delta for c in chunks]
        text = "".join(d.content or "" for d in deltas)
        calls = [call for d in deltas for call in d.tool_calls or []]
        finish = chunks[-1].choices[0].finish_reason
        thoughts = "".join(getattr(d, "reasoning", None) or "" for d in deltas)
    else:
        message = answer.choices[0].message
        text, calls, thoughts = message.content, message.tool_calls, message.reasoning
        finish = answer.choices[0].finish_reason
    (call,) = calls
    assert json.loads(call.function.arguments) == {"city": "Köln"}
    assert (text, thoughts, finish) == ("Let me see.", "Rain?", "tool_calls")


def test_openai_errors(oai):
    with pytest.raises(openai.NotFoundError, match="thinker"):
        oai.chat.completions.create(model="gpt-x", messages=ASK)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        oai.chat.completions.create(model="thinker", messages=ASK, temperature=-1)


def test_openai_cancel(oai, server):
    cancelled = server.counter("cancelled_total")
    with oai.chat.completions.create(
        model="thinker", messages=ASK, max_tokens=900, stream=True
    ) as stream:
        next(iter(stream))
    wait_for(lambda: server.counter("cancelled_total") == cancelled + 1)


# ---- anthropic -----------------------------------------------------------------------------------


def test_anthropic_message(ant):
    message = ant.messages.create(model="thinker", max_tokens=8, system="Be brief.", messages=ASK)
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 8
    (block,) = message.content
    with ant.messages.stream(
        model="thinker", max_tokens=8, system=[{"type": "text", "text": "Be brief."}], messages=ASK
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text == final.content[0].text
    usage = final.usage
    assert usage.input_tokens == 1  # a session held the rest
    assert usage.input_tokens + usage.cache_read_input_tokens == message.usage.input_tokens
    assert final.stop_reason == "max_tokens"


def test_anthropic_count_tokens(ant, server):
    generated = server.counter("generated_tokens_total")
    message = ant.messages.create(model="thinker", max_tokens=1, messages=ASK)
    usage = message.usage
    count = ant.messages.count_tokens(model="thinker", messages=ASK)
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    long = [{"role": "user", "content": "sea " * 2000}]  # longer than the context
    assert ant.messages.count_tokens(model="thinker", messages=long).input_tokens > 2000
    assert server.counter("generated_tokens_total") == generated + 1


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_stop_sequences(ant, stream):
    plain = ant.messages.create(model="thinker", max_tokens=16, messages=ASK)
    text = plain.content[0].text
    word = text[6:9]
    options = {"model": "thinker", "max_tokens": 16, "messages": ASK, "stop_sequences": [word]}
    if stream:
        with ant.messages.stream(**options) as events:
            message = events.get_final_message()
    else:
        message = ant.messages.create(**options)
    assert message.content[0].text == text[: text.index(word)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_tools_and_thoughts(ant, script, stream):
    script("<think>", "Rain", "?", "</think>", "Let me see.", CALL, CALL)
    options = {
        "model": "thinker",
        "max_tokens": 50,
        "messages": ASK,
        "tools": [{"name": "weather", "description": "Now", "input_schema": SCHEMA}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    if stream:
        with ant.messages.stream(**options) as events:
            kinds = [e.type for e in events]
            message = events.get_final_message()
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    else:
        message = ant.messages.create(**options)
    thought, text, call, second = message.content
    assert thought.thinking == "Rain?"
    assert text.text == "Let me see."
    assert (call.name, call.input) == (second.name, second.input) == ("weather", {"city": "Köln"})
    assert message.stop_reason == "tool_use"

    script("It rains.")
    results = [
        {"type": "tool_result", "tool_use_id": c.id, "content": "rain"} for c in (call, second)
    ]
    options["messages"] = [
        *ASK,
        {"role": "assistant", "content": [b.model_dump() for b in message.content]},
        {"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]},
    ]
    message = ant.messages.create(**options)
    assert (message.content[0].text, message.stop_reason) == ("It rains.", "end_turn")


def test_anthropic_errors(ant):
    with pytest.raises(anthropic.NotFoundError, match="thinker"):
        ant.messages.create(model="claude", max_tokens=1, messages=ASK)
    image = {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        ant.messages.create(
            model="thinker", max_tokens=1, messages=[{"role": "user", "content": [image]}]
        )
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        ant.messages.create(
            model="thinker", max_tokens=1, messages=ASK, tool_choice={"type": "any"}
        )
    assert [m.id for m in ant.models.list()] == ["thinker"]


def test_an_error_in_mid_stream_is_an_event(ant, oai, script, monkeypatch):
    def broken(*args, **kwargs):
        yield GenerationResponse("a", 1, mx.zeros(8192), False, 1, 1.0, 1, 1.0, 0.0, None)
        raise OSError("layer 3: the disk is gone")

    monkeypatch.setattr("smoe_mlx.server.turn.stream_generate", broken)
    options = {"model": "thinker", "max_tokens": 5, "messages": ASK}
    with pytest.raises(anthropic.APIStatusError, match="the disk is gone"):
        list(ant.messages.create(**options, stream=True))
    with pytest.raises(openai.APIError, match="the disk is gone"):
        list(oai.chat.completions.create(**options, stream=True))
    with pytest.raises(openai.InternalServerError, match="the disk is gone"):
        oai.chat.completions.create(**options)
    monkeypatch.undo()
    assert oai.chat.completions.create(**options).usage.completion_tokens == 5


def test_messages_to_chat():
    chat = messages_api.to_chat(
        {
            "model": "m",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": ""},
                        {"type": "text", "text": "one"},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "1",
                            "content": [{"type": "text", "text": "r"}],
                        },
                    ],
                },
            ],
            "tool_choice": {"type": "none"},
            "tools": [{"name": "f", "input_schema": {}}],
        }
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert chat["messages"] == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "one",
            "tool_calls": [call],
            "reasoning_content": "t",
        },
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]
    assert "tools" not in chat
    for bad in (
        {"messages": []},
        {"max_tokens": 1, "messages": [{"role": "robot", "content": ""}]},
        {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        {"max_tokens": 1, "messages": [{"role": "user", "content": 4}]},
    ):
        with pytest.raises(RequestError):
            messages_api.to_chat(bad)


def test_control_tokens_of_users_are_text(server):
    """<think> is one token of this tokenizer, but not when a user says it."""
    with contextlib.closing(openai.OpenAI(base_url=server.url + "/v1", api_key="x")) as client:

        def count(text):
            messages = [{"role": "user", "content": text}]
            answer = client.chat.completions.create(
                model="thinker", messages=messages, max_tokens=1
            )
            return answer.usage.prompt_tokens

        spelled = count("a <think> b <|endoftext|>")
    tokenizer = server.generator.model_provider.tokenizer
    prompt = tokenizer.encode("user: a <think> b <|endoftext|>\nassistant: ")
    assert tokenizer.think_start_id in prompt
    assert spelled > len(prompt) + 4


NAMES = ["type", "text", "name", "input", "input_schema", "id", "tool_use_id", "thinking", "role"]
WORDS = ["text", "tool_use", "tool_result", "thinking", "auto", "enabled"]
JSON = st.recursive(
    st.none() | st.integers(-2, 2) | st.sampled_from(WORDS),
    lambda x: st.lists(x, max_size=2) | st.dictionaries(st.sampled_from(NAMES), x, max_size=4),
    max_leaves=6,
)
FIELDS = ["system", "tools", "tool_choice", "thinking", "stop", "stop_sequences", "model", "n"]
FIELDS += ["messages", "content", "role", "max_tokens", "stream_options", "response_format"]


@given(st.sampled_from(FIELDS), JSON)
@settings(max_examples=200, deadline=None)
def test_whatever_is_asked_is_understood_or_refused(field, value):
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    (body["messages"][0] if field in ("content", "role") else body)[field] = value
    for convert in (lambda b: b, messages_api.to_chat):
        with contextlib.suppress(RequestError):
            checked = convert(copy.deepcopy(body))
            _check(checked, chat=True)
            json.dumps(checked)
            assert all(isinstance(m.get("content") or "", str) for m in checked["messages"])
