"""Sessions: a follow-up turn pays for its suffix, and nothing bleeds from one to another."""

import contextlib
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import random_tokens
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_tokenizer
from test_server import GENERATE, serving, text_of

import smoe_mlx
from smoe_mlx.hub import find_model
from smoe_mlx.load import load_model
from smoe_mlx.model_config import fingerprint
from smoe_mlx.server.session_files import SessionFiles
from smoe_mlx.server.sessions import Sessions, held_tokens, only_grows
from smoe_mlx.server.turn import Stopped, stream_answer


@pytest.fixture(scope="module")
def tokenizer():
    """The demo's, for models whose text does not matter; nothing ends an answer."""
    tokenizer = load_tokenizer(find_model("demo"))
    tokenizer.eos_token_ids = set()
    return tokenizer


def kv(tokens, size=4):
    """A KV cache that holds these tokens, and tells them."""
    cache = [KVCache()]
    rows = mx.array(tokens, mx.float32)[None, None, :, None] + mx.zeros((1, 1, 1, size))
    cache[0].update_and_fetch(rows, rows)
    return cache


def tokens_in(cache):
    keys, _ = cache[0].keys_and_values()
    return [int(x) for x in np.array(keys)[0, 0, :, 0]]


# ---- which cache, and how much of it -------------------------------------------------------------


def test_longest_common_prefix():
    sessions = Sessions(limit=1 << 20)
    assert sessions.take("m", [1, 2, 3]) == (None, 0)
    sessions.put("m", [1, 2, 3, 4, 5, 6], kv([1, 2, 3, 4, 5, 6]))
    sessions.put("m", [1, 2, 9], kv([1, 2, 9]))
    for prompt, expected in [
        ([1, 2, 3, 4, 7, 8], 4),  # the template wrote the end anew
        ([1, 2, 9, 10], 3),
        ([1, 2, 3, 4, 5, 6], 5),  # the same again: one token is left to ask
        ([1], 0),
        ([5, 6], 0),
    ]:
        cache, n = sessions.take("m", prompt)
        assert n == expected
        assert tokens_in(cache) == prompt[:n] if n else cache is None
        if prompt == [1, 2, 9, 10]:
            sessions.put("m", prompt, kv(prompt))
    assert sessions.take("other", [1, 2, 3]) == (None, 0)


def test_what_was_taken_leaves_others_as_they_are():
    sessions = Sessions(limit=1 << 20)
    first = [1, 2, 3, 4, 5, 6]
    sessions.put("m", first, kv(first))
    cache, n = sessions.take("m", [1, 2, 3, 70, 80])
    assert n == 3
    rows = mx.full((1, 1, 2, 4), 70.0)
    cache[0].update_and_fetch(rows, rows)
    sessions.put("m", [1, 2, 3, 70, 70], cache)
    assert tokens_in(sessions.take("m", [*first, 7])[0]) == first
    assert tokens_in(sessions.take("m", [1, 2, 3, 70, 70, 5])[0]) == [1, 2, 3, 70, 70]


def test_a_longer_cache_replaces_the_shorter():
    sessions = Sessions(limit=1 << 20)
    for n in (2, 4, 8):
        sessions.put("m", list(range(n)), kv(list(range(n))))
    assert [len(e.tokens) for e in sessions.entries] == [8]


def test_a_cache_that_a_longer_one_holds_is_not_kept_beside_it():
    """As of an answer that was stopped early, where another time it went on."""
    sessions = Sessions(limit=1 << 20)
    for tokens in ([1, 2, 3, 4, 5, 6], [7, 8], [1, 2, 3, 4], [1, 2, 9]):
        sessions.put("m", tokens, kv(tokens))
    sessions.put("other", [1, 2], kv([1, 2]))
    held = [(e.model, e.tokens.tolist()) for e in sessions.entries]
    assert held == [
        ("m", [7, 8]), ("m", [1, 2, 3, 4, 5, 6]), ("m", [1, 2, 9]), ("other", [1, 2]),
    ]  # fmt: skip
    cache, n = sessions.take("m", [1, 2, 3, 4, 9])
    assert (n, tokens_in(cache)) == (4, [1, 2, 3, 4])


def test_a_stale_answer_goes_first_and_to_no_file(tmp_path):
    one = sum(c.nbytes for c in kv([1]))
    sessions = Sessions(SessionFiles(tmp_path, 1 << 30), limit=3 * one)
    sessions.open("m", "f")
    sessions.put("m", [8, 8], kv([8, 8]))
    sessions.put("m", [1, 2, 3, 4, 5], kv([1, 2, 3, 4, 5]), asked=3)  # 4, 5: thoughts, an answer
    cache, n = sessions.take("m", [1, 2, 3, 5, 6, 7])  # the template left out the thoughts
    assert n == 3
    assert tokens_in(cache) == [1, 2, 3]
    assert [len(e.tokens) for e in sessions.entries] == [5, 2]  # there is room for it
    sessions.put("m", [1, 2, 3, 5, 6, 7, 8], kv([1, 2, 3, 5, 6, 7, 8]))
    sessions.put("m", [9, 9], kv([9, 9]))
    assert [len(e.tokens) for e in sessions.entries] == [2, 7, 2]
    assert not list(tmp_path.rglob("*.safetensors"))


def test_limit_drops_the_least_recently_used():
    one = sum(c.nbytes for c in kv([1]))
    sessions = Sessions(limit=3 * one)
    for t in (1, 2, 3):
        sessions.put("m", [t, t], kv([t, t]))
    sessions.put("m", [1, 1, 5], sessions.take("m", [1, 1, 5])[0])  # used again
    assert sessions.take("m", [2, 7, 7])[1] == 1  # a part of it
    sessions.put("m", [4, 4], kv([4, 4]))
    assert [e.tokens[0] for e in sessions.entries] == [1, 2, 4]
    assert sessions.nbytes <= sessions.limit
    sessions.take("m", [9, 9], reserve=2 * one)
    assert [e.tokens[0] for e in sessions.entries] == [4]


# ---- models --------------------------------------------------------------------------------------


ARCHS = ["qwen3_moe", "gpt_oss", "qwen3_next", "nemotron_h", "deepseek_v41", "longcat_flash"]


@pytest.mark.parametrize("slots", [0.4, 1.0])
@pytest.mark.parametrize("arch", ARCHS)
def test_turns_of_every_kind_of_cache(tiny, tokenizer, arch, slots, tmp_path):
    """Each turn gives the tokens that a fresh model gives for the whole prompt; also after a
    restart, for caches that mlx-lm can save."""
    model = load_model(tiny(arch), config=smoe_mlx.StreamingConfig(slots=slots))[0]

    files = SessionFiles(tmp_path / "sessions", 1 << 30)
    sessions = Sessions(files, limit=1 << 30)
    sessions.open("m", "f")
    prompt = random_tokens(40)
    expected = 0
    for turn in range(4):
        cache, reused = sessions.take("m", prompt)
        assert reused == expected
        marks = [(20, "system"), (len(prompt) - 1, "prompt")]
        stream = stream_answer(
            sessions, "m", model, tokenizer, prompt, cache, reused, marks, max_tokens=6
        )
        got = [r.token for r in stream]
        fresh = smoe_mlx.stream_generate(model, tokenizer, prompt, max_tokens=6)
        assert got == [r.token for r in fresh]
        if turn == 0:  # the next prompt goes on from the answer
            entry = max(sessions.entries, key=lambda e: len(e.tokens))
            held = len(entry.tokens)
            assert held >= len(prompt) + 5
            assert entry.asked == len(prompt) - 1
            expected, prompt = held, [*prompt, *got[: held - len(prompt)], *random_tokens(9)]
            if arch != "deepseek_v41":
                sessions.evict()
                sessions = Sessions(files, limit=1 << 30)
                sessions.open("m", "f")
        elif turn == 1:  # the next departs from the prompt, as where thoughts are left out
            expected, prompt = len(prompt) - 1, [*prompt[:-1], *random_tokens(9, seed=turn)]
        else:  # and one departs within it
            grows = only_grows(make_prompt_cache(model))
            expected, prompt = 30 if grows else 20, [*prompt[:30], *random_tokens(9, seed=turn)]


def test_stopped_prompts_and_answers_are_kept_as_far_as_they_went(tiny, tokenizer):
    model = load_model(tiny("qwen3_moe"), config=smoe_mlx.StreamingConfig(slots=0.4))[0]

    sessions = Sessions(limit=1 << 30)
    prompt = random_tokens(40)

    def stop(done, total):
        if done:
            raise Stopped

    def answer(**options):
        cache, reused = sessions.take("m", prompt)
        return stream_answer(
            sessions, "m", model, tokenizer, prompt, cache, reused, max_tokens=9, **options
        )

    with pytest.raises(Stopped):
        list(answer(prompt_progress_callback=stop))
    whole = [r.token for r in smoe_mlx.stream_generate(model, tokenizer, prompt, max_tokens=9)]
    part = answer()
    assert [next(part).token for _ in range(4)] == whole[:4]
    part.close()
    (entry,) = sessions.entries
    assert entry.tokens.tolist() == [*prompt, *whole[:3]]
    assert held_tokens(entry.cache) == 43
    assert [r.token for r in answer()] == whole


def test_after_an_error_nothing_doubtful_is_kept(tiny, tokenizer):
    model = load_model(tiny("qwen3_next"), config=smoe_mlx.StreamingConfig(slots=0.4))[0]
    sessions = Sessions(limit=1 << 30)

    def fail(*args):
        raise OSError("unreadable")

    prompt = random_tokens(40)
    options = {"max_tokens": 9, "logits_processors": [fail]}
    with pytest.raises(OSError, match="unreadable"):
        list(stream_answer(sessions, "m", model, tokenizer, prompt, None, 0, **options))
    assert not sessions.entries
    assert held_tokens(make_prompt_cache(model)) is None


# ---- files ---------------------------------------------------------------------------------------


def saved(folder, *lengths, max_bytes=1 << 30):
    sessions = Sessions(SessionFiles(folder, max_bytes), limit=0)
    sessions.open("m", "f")
    for n in lengths:
        sessions.put("m", [n] * n, kv([n] * n))
    return sessions


def reopened(folder, print_="f"):
    sessions = Sessions(SessionFiles(folder, 1 << 30), limit=1 << 20)
    sessions.open("m", print_)
    return sessions


def test_files_are_found_again_by_the_same_model_only(tmp_path):
    saved(tmp_path, 5, 7)
    assert tokens_in(reopened(tmp_path).take("m", [5] * 9)[0]) == [5] * 5
    assert reopened(tmp_path, "another").take("m", [5] * 9) == (None, 0)
    assert all(p.stat().st_mode & 0o077 == 0 for p in tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("where", ["data", "tail", "header", "all"])
def test_damaged_files_are_dropped(tmp_path, where):
    saved(tmp_path, 5)
    (path,) = tmp_path.rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    if where == "data":
        data[-3] ^= 1
    elif where == "header":
        data[30] ^= 1
    path.write_bytes({"tail": data[:-9], "all": b""}.get(where, data))
    assert reopened(tmp_path).take("m", [5] * 9) == (None, 0)
    assert not path.exists()


def test_files_have_a_limit(tmp_path):
    saved(tmp_path, 5)
    (path,) = tmp_path.rglob("*.safetensors")
    size = path.stat().st_size
    saved(tmp_path, 6, 7, 8, max_bytes=3 * size + 100)
    assert sorted(len(e.tokens) for e in reopened(tmp_path).entries) == [6, 7, 8]
    sessions = reopened(tmp_path)
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()  # by another server
    assert sessions.take("m", [6] * 9) == (None, 0)


@contextlib.contextmanager
def no_descriptors():
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


FILES = "smoe_mlx.server.session_files."
NO_MEMORY = [MemoryError(), RuntimeError("[malloc] Unable to allocate 64 bytes.")]


@pytest.mark.parametrize("error", [OSError("No space left on device"), *NO_MEMORY], ids=repr)
@pytest.mark.parametrize("after", [0, 1], ids=["half", "whole"])
def test_a_file_that_cannot_be_written_costs_the_session_only(tmp_path, monkeypatch, error, after):
    def fail(path, *args):
        (tmp_path / "f" / Path(path).name).touch()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(FILES + ("save_prompt_cache", "_crc32")[after], fail)
        assert not saved(tmp_path, 5).entries
    assert not list(tmp_path.rglob("*.safetensors"))
    assert tokens_in(saved(tmp_path, 5).take("m", [5] * 9)[0]) == [5] * 5


def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(FILES + "_crc32", interrupt)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, 5)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("name", "error"),
    [(n, e) for n in ("SafetensorsMmap", "_crc32") for e in (OSError("bad block"), MemoryError())]
    + [("load_prompt_cache", e) for e in (OSError("bad block"), *NO_MEMORY)],
    ids=repr,
)
def test_a_file_that_cannot_be_read_now_is_kept(tmp_path, monkeypatch, name, error):
    """A file is removed for what is in it, not for want of memory."""

    def fail(path):
        raise error

    saved(tmp_path, 5)
    with monkeypatch.context() as patch:
        patch.setattr(FILES + name, fail)
        assert reopened(tmp_path).take("m", [5] * 9) == (None, 0)
    assert tokens_in(reopened(tmp_path).take("m", [5] * 9)[0]) == [5] * 5


def test_without_descriptors_there_are_no_sessions(tmp_path):
    with no_descriptors():
        assert not saved(tmp_path, 5).entries
    saved(tmp_path, 5)
    sessions = reopened(tmp_path)
    with no_descriptors():
        assert reopened(tmp_path).take("m", [5] * 9) == (None, 0)
        assert sessions.take("m", [5] * 9) == (None, 0)
    assert tokens_in(reopened(tmp_path).take("m", [5] * 9)[0]) == [5] * 5


def test_fingerprint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 8)
    first = fingerprint(tmp_path, None)
    assert first == fingerprint(tmp_path, None)
    assert first != fingerprint(tmp_path, 8)
    (tmp_path / "model.safetensors").write_bytes(b"y" * 9)
    assert first != fingerprint(tmp_path, None)


# ---- the server ----------------------------------------------------------------------------------


@pytest.fixture
def prefilled(monkeypatch):
    """The number of tokens of each prompt that really went through the model."""
    lengths = []
    original = GENERATE.prefill

    def counting(model, streaming, prompt, *args):
        lengths.append(len(prompt))
        return original(model, streaming, prompt, *args)

    monkeypatch.setattr(GENERATE, "prefill", counting)
    return lengths


def test_a_follow_up_turn_prefills_its_suffix_only(prefilled, tmp_path):
    """Thirty turns of two conversations in turn, and a restart in the middle."""
    argv = ("demo", "--slots", "0.25", "--session-dir", str(tmp_path))
    talks = [["You are one."], ["You are two."]]
    used = {0: 0, 1: 0}

    def turn(server, i, n):
        talk = talks[i]
        answer = server.chat(*talk, max_tokens=4)
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert prefilled.pop() == usage["prompt_tokens"] - cached
        assert not prefilled
        # All that was there at the end of the turn before, but for the last token, which was not
        # yet in the cache, and where the text of the two joins in another way.
        if n:
            assert used[i] - 2 <= cached <= used[i]
        used[i] = usage["total_tokens"]
        talk += [text_of(answer), f"Go on, {n}."]

    with serving(*argv) as server:
        for n in range(8):
            turn(server, 0, n)
            turn(server, 1, n)
        assert server.sessions.nbytes <= server.sessions.limit
    with serving(*argv) as server:
        for n in range(8, 15):
            turn(server, 0, n)
            turn(server, 1, n)
        last = server.chat(*talks[0], max_tokens=12)
    with serving("demo", "--slots", "0.25") as fresh:
        assert text_of(fresh.chat(*talks[0], max_tokens=12)) == text_of(last)
