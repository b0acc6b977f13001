"""Several models in one server: who is in memory, and that all answers stay right."""

import sys

import mlx.core as mx
import pytest
from test_server import serving, text_of

import smoe_mlx
from smoe_mlx.errors import BudgetError, CheckpointError, ModelNotFoundError, SmoeError
from smoe_mlx.hub import find_model
from smoe_mlx.plan import INTERPRETER_NBYTES, SYSTEM_NBYTES
from smoe_mlx.search import Setting
from smoe_mlx.server.fleet import parse_models
from smoe_mlx.tuned import Tuned, remember

TALK = ("Tell me of the sea.",)


def expected(prompt=f"USER: {TALK[0]}\nASSISTANT:"):
    model, tokenizer = smoe_mlx.load("demo", slots=0.25)
    return smoe_mlx.generate(model, tokenizer, tokenizer.encode(prompt), max_tokens=8)


def resident(server):
    return list(server.generator.model_provider.resident)


def test_two_stay_where_both_fit():
    with serving("one=demo", "two=demo", "--memory", "80MB") as server:
        assert [m["id"] for m in server.get("/v1/models")[1]["data"]] == ["one", "two"]
        assert resident(server) == ["one"]
        texts = [text_of(server.chat(*TALK, model=m)) for m in ("one", "two", "one", "two")]
        assert set(texts) == {expected()}
        assert resident(server) == ["one", "two"]
        plans = [x.plan.total for x in server.generator.model_provider.resident.values()]
        assert sum(plans) <= 80_000_000
        assert server.chat(*TALK)["model"] == "one"  # the default


def test_they_trade_places_where_not(tmp_path):
    """Within the budget throughout, and a session is still there when its model comes back."""
    argv = ("one=demo", "two=demo", "--memory", "26MB", "--session-dir", str(tmp_path))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with serving(*argv) as server:
        first = server.chat(*TALK, model="one")
        assert text_of(server.chat(*TALK, model="two")) == text_of(first) == expected()
        assert resident(server) == ["two"]
        again = server.chat(*TALK, text_of(first), "And?", model="one")
        assert resident(server) == ["one"]
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["prompt_tokens"]
        assert mx.get_peak_memory() - before <= 26_000_000
        other = server.chat(*TALK, text_of(first), "And?", model="two")
        assert text_of(other) == text_of(again)
        assert server.sessions.nbytes <= server.sessions.limit


def test_sessions_stay_within_the_plan(tmp_path):
    """Long prompts that share a part: KV caches are copied, saved and read."""
    common = "The sea, the sky and the sand. " * 50
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with serving("demo", "--memory", "26MB", "--session-dir", str(tmp_path)) as server:
        for i in range(3):
            usage = server.chat(common + f"{i % 2} salt " * (60 + 5 * i))["usage"]
            assert usage["prompt_tokens"] > 700
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 400) == (i > 0)
    assert mx.get_peak_memory() - before <= 26_000_000
    assert list(tmp_path.rglob("*.safetensors"))


def test_memory_for_sessions_comes_out_of_the_budget():
    argv = ("demo", "--memory", "60MB", "--prompt-cache-bytes", "20MB")
    with serving(*argv) as server:
        assert server.sessions.limit == 20_000_000
        (loaded,) = server.generator.model_provider.resident.values()
        assert loaded.plan.total <= 40_000_000


def test_what_cannot_be_served_is_said_at_once():
    with pytest.raises(ModelNotFoundError, match="no folder"), serving("./nothing"):
        pass
    with pytest.raises(BudgetError, match="at least"), serving("demo", "--memory", "5MB"):
        pass
    with pytest.raises(SmoeError, match="NAME=PATH"):
        parse_models(["demo", "demo"])


def test_a_model_that_does_not_load(monkeypatch):
    def fail(*args, **kwargs):
        raise CheckpointError("half of it is missing")

    with monkeypatch.context() as patch:
        patch.setattr("smoe_mlx.server.fleet.load_model", fail)
        with pytest.raises(SmoeError, match="half of it"), serving("demo", "--slots", "0.25"):
            pass
    with serving("one=demo", "two=demo", "--memory", "26MB") as server:
        with monkeypatch.context() as patch:
            patch.setattr("smoe_mlx.server.fleet.load_model", fail)
            body = {"model": "two", "prompt": "a", "max_tokens": 1}
            status, answer = server.post("/v1/completions", body)
            assert status == 500
            assert "half of it" in answer["error"]["message"]
        assert text_of(server.chat(*TALK)) == expected()


def test_names(tmp_path):
    (tmp_path / "Qwen3-4bit").mkdir()
    folder = str(tmp_path / "Qwen3-4bit")
    assert parse_models([folder, "a=demo", "mlx-community/x", f"b={folder}"]) == {
        "Qwen3-4bit": folder,
        "a": "demo",
        "mlx-community/x": "mlx-community/x",
        "b": folder,
    }


@pytest.mark.parametrize("models", [("demo",), ("one=demo", "two=demo")], ids=len)
def test_what_was_tuned_is_used_as_by_load(models, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = Setting(100, threads=3, lookahead=False).options
    remember(find_model("demo"), Tuned(100, options, None, "2026-11-30"))
    told = smoe_mlx.stats(smoe_mlx.load("demo")[0]).tuned
    names = [m.partition("=")[0] for m in models]
    with serving(*models) as server:
        for name in names:
            assert text_of(server.chat(*TALK, model=name)) == expected()
            model = server.generator.model_provider.resident[name].model
            assert smoe_mlx.stats(model).tuned == told
            assert smoe_mlx.stats(model).plan.slots == 100
            assert model._streaming.cache.reader.threads == 3
            metrics = server.get("/metrics")[1]
            assert f'smoe_tuned_info{{model="{name}",settings="{told}"}} 1\n' in metrics
    for asked in (("--no-tuned",), ("--memory", "80MB"), ("--threads", "4")):
        with serving(*models, *asked) as server:
            (loaded,) = server.generator.model_provider.resident.values()
            assert smoe_mlx.stats(loaded.model).tuned == ""
            assert loaded.plan.slots > 100
            assert "smoe_tuned_info{" not in server.get("/metrics")[1]


def test_what_was_tuned_takes_no_more_than_the_share(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = Setting(100, threads=3).options
    remember(find_model("demo"), Tuned(None, options, 40_000_000, "2026-11-30"))
    with serving("demo") as server:
        (loaded,) = server.generator.model_provider.resident.values()
        assert 30_000_000 < loaded.plan.total <= 40_000_000
    monkeypatch.setattr("smoe_mlx.server.fleet.usable_nbytes", lambda _: 26_000_000)
    with serving("demo") as server:
        (loaded,) = server.generator.model_provider.resident.values()
        assert loaded.plan.total <= 26_000_000
        assert smoe_mlx.stats(loaded.model).tuned


@pytest.mark.parametrize("usable", [25_000_000, 400_000_000])
def test_without_a_budget_it_plans_as_load_does(usable, monkeypatch):
    """From what the device could give, and with room for the page cache where that helps."""
    available = usable + SYSTEM_NBYTES + INTERPRETER_NBYTES
    for module in ("smoe_mlx.load", "smoe_mlx.server.fleet"):
        monkeypatch.setattr(sys.modules[module], "available_nbytes", lambda: available)
    alone = smoe_mlx.plan("demo")
    assert (alone.page_cache > 0) == (usable < alone.full)
    with serving("demo", "--no-tuned") as server:
        (loaded,) = server.generator.model_provider.resident.values()
        assert loaded.plan.slots == alone.slots
        assert loaded.plan.total <= usable - alone.page_cache
