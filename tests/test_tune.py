"""The tuner: the search on surfaces whose best is known, what is remembered, and what load does."""

import json
import math
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from test_cli import smoe

import smoe_mlx
from smoe_mlx import tuned
from smoe_mlx.config import StreamingConfig
from smoe_mlx.errors import BudgetError
from smoe_mlx.search import DECODING, MARGIN, READING, NoTimeError, Search, Setting, all_choices
from smoe_mlx.tune import SHARES, Tuning
from smoe_mlx.tuned import TUNED, Tuned, find_tuned, remember

module = sys.modules["smoe_mlx.tune"]
DEMO = Path(smoe_mlx.__file__).parent / "demo"
TOTAL = 1000


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


# ---- the search ----------------------------------------------------------------------------------


class Bench:
    """Takes turns on a surface, by a clock of its own: a turn takes a second."""

    def __init__(self, seconds_of, turns=10_000, noise=0.0, seed=0):
        self.seconds_of, self.left, self.noise = seconds_of, turns, noise
        self.random = random.Random(seed)
        self.taken: list[Setting] = []

    def __call__(self, setting: Setting) -> float:
        if not self.left:
            raise NoTimeError
        self.left -= 1
        self.taken.append(setting)
        return self.seconds_of(setting) * (1 + self.noise * abs(self.random.gauss(0, 1)))


def search(seconds_of, slots=800, kernels=False, allow=False, **options) -> tuple[Search, Bench]:
    bench = Bench(seconds_of, **options)
    sizes = [slots, *(round(share * slots) for share in SHARES)]
    found = Search(
        bench, Setting(slots), TOTAL, all_choices(sizes, decoding=True, kernels=kernels), allow
    )
    found.run()
    return found, bench


def flat(_: Setting) -> float:
    return 1.0


def larger_is_faster(s: Setting) -> float:
    return 2 - s.slots / TOTAL


def cliff(s: Setting) -> float:
    """As if the page cache needed room: from 600 slots on, every token reads from a slow disk."""
    return 2 - s.slots / TOTAL + 5 * (s.slots > 600)


def valley(s: Setting) -> float:
    """Two dips, the deeper one far from where the search begins."""
    return 1 + min(abs(s.slots - 700) / 1000 + 0.2, abs(s.slots - 200) / 1000)


def options_matter(s: Setting) -> float:
    waits = {"direct": 0.7, "mmap": 1.5, "pread": 1.0}[s.io]
    return waits * (1 + 0.1 * abs(math.log2((s.threads + 1) / 17))) * (0.9 if s.spec == 2 else 1)


def not_separable(s: Setting) -> float:
    """With direct reads a large cache is best, through the page cache a small one."""
    return 1.4 - s.slots / TOTAL if s.io == "direct" else 0.9 + 0.3 * s.slots / TOTAL


def best_of(surface, slots=800) -> float:
    return min(
        surface(Setting(n, io, threads, lookahead, spec, decode))
        for n in range(100, slots + 1, 25)
        for io in ("pread", "direct", "mmap")
        for threads in (0, 4, 8, 16, 32)
        for lookahead, spec in ((True, 0), (False, 0), (True, 2), (True, 4))
        for decode in ("auto", "exact", "wait", "lag1", "token")
    )


@pytest.mark.parametrize(
    "surface", [larger_is_faster, cliff, valley, options_matter, not_separable]
)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_search_finds_what_is_best(surface, noise):
    for seed in range(5):
        found, bench = search(surface, noise=noise, seed=seed, turns=400)
        allowed = (1 + MARGIN) ** 2 if noise == 0 else 1.12
        assert surface(found.best) <= allowed * best_of(surface), found.best
        assert noise or not found.ended
        assert len(bench.taken) <= 400


def test_a_larger_cache_is_not_always_better():
    found, _ = search(cliff)
    assert 500 < found.best.slots <= 600
    assert set(found.curve) > {800, 700, 600, 500}
    assert found.curve[700] > 2 * found.curve[600]


def test_the_search_looks_between_the_sizes_it_began_with():
    found, _ = search(lambda s: 2 - s.slots / TOTAL + 5 * (s.slots > 660))
    assert found.best.slots == 650


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_what_does_not_pay_is_not_taken_and_said(noise):
    found, _ = search(flat, noise=noise)
    assert found.best == Setting(800)
    assert not any(t.taken for t in found.tried.values())
    names = {t.name for t in found.tried.values()}
    assert names == {"slots", *READING, *DECODING}
    assert all(t.speedup == pytest.approx(1, abs=0.2) for t in found.tried.values())


def test_what_pays_is_said():
    found, _ = search(options_matter)
    assert found.best == Setting(800, "direct", 16, spec=2)
    taken = [t for t in found.tried.values() if t.taken]
    assert {"direct", 16, 2} <= {v for t in taken for v in t.change.values()}
    assert found.tried["io", str({"io": "direct"})].speedup == pytest.approx(1 / 0.7)
    verdicts = {t.verdict for t in found.tried.values()}
    assert verdicts == {"taken", "does not pay"}


def test_where_all_experts_are_in_memory_nothing_about_reading_is_tried():
    found, bench = search(lambda s: larger_is_faster(s), slots=TOTAL)
    assert found.best.slots == TOTAL
    assert {t.name for t in found.tried.values()} == {"slots", "decode"}
    assert {s.io for s in bench.taken} == {"pread"}


@pytest.mark.parametrize("turns", [0, 1, 5, 12, 25])
def test_out_of_time_the_best_so_far_is_kept(turns):
    found, bench = search(cliff, turns=turns)
    assert found.ended == "out of time"
    assert len(bench.taken) == turns
    assert cliff(found.best) <= cliff(Setting(800))
    assert (found.best.slots < 800) == (turns >= 25)  # not by a turn or two


def test_a_ctrl_c_ends_it_and_the_best_so_far_is_kept():
    turns = iter(range(10_000))

    def interrupted(setting: Setting) -> float:
        if next(turns) == 40:
            raise KeyboardInterrupt
        return cliff(setting)

    found, _ = search(interrupted)
    assert found.ended == "interrupted"
    assert 500 <= found.best.slots <= 600


@pytest.mark.parametrize("allow", [False, True])
def test_kernels_are_measured_and_taken_only_where_allowed(allow):
    def surface(s: Setting) -> float:
        return larger_is_faster(s) * (0.8 if s.kernels == "auto" else 1.0)

    found, _ = search(surface, kernels=True, allow=allow)
    assert found.best == Setting(800, kernels="auto" if allow else "stock")
    change = {"kernels": "stock" if allow else "auto"}  # of the last race
    tried = found.tried["kernels", str(change)]
    assert tried.speedup == pytest.approx(0.8 if allow else 1 / 0.8)
    assert tried.verdict == ("does not pay" if allow else "pays, with other bits")
    assert "kernels" not in {t.name for t in search(surface, kernels=False)[0].tried.values()}
    assert not search(flat, kernels=True)[0].tried["kernels", str({"kernels": "auto"})].pays


def test_one_lucky_turn_is_no_reason():
    calls: list[int] = []

    def lucky(s: Setting) -> float:
        calls.append(s.slots)
        return 0.5 if s.slots == 400 and calls.count(400) == 1 else 1.0

    found, _ = search(lucky)
    assert found.best.slots == 800
    assert found.tried["slots", str({"slots": 400})].verdict == "does not pay"


def test_what_turns_differ_by_may_be_chance():
    verdicts = []
    for seed in range(20):
        shaken = random.Random(seed)

        def shaky(s: Setting, shaken=shaken) -> float:  # a tenth is nothing where a half is usual
            return (0.9 if s.threads == 4 else 1.0) * shaken.choice((1.0, 1.2, 1.4, 1.6))

        found, _ = search(shaky, turns=300)
        verdicts += [t.verdict for t in found.tried.values()]
    assert verdicts.count("taken") < len(verdicts) / 100
    assert verdicts.count("may be chance") > len(verdicts) / 4


# ---- what is remembered --------------------------------------------------------------------------

FOUND = Tuned(
    slots=100,
    options=Setting(100, threads=3, lookahead=False).options,
    memory=None,
    date="2026-11-30",
)


def test_what_was_found_is_remembered_until_it_is_forgotten():
    assert find_tuned(DEMO, StreamingConfig()) is None
    remember(DEMO, FOUND)
    assert find_tuned(DEMO, StreamingConfig()) == FOUND
    assert [p.name for p in TUNED.path.parent.iterdir()] == ["tuned.json"]
    remember(DEMO, None)
    assert find_tuned(DEMO, StreamingConfig()) is None


@pytest.mark.parametrize(
    "options",
    [
        {"tuned": False}, {"memory": "1GB"}, {"slots": 0.5}, {"threads": 4}, {"spec": 1},
        {"lookahead": False}, {"io": "mmap"}, {"decode": "exact"}, {"policy": "lfu"},
        {"kernels": "auto"}, {"hits_first": False}, {"hot_per_layer": 1}, {"prefill_step": 64},
    ],
    ids=str,
)  # fmt: skip
def test_it_is_used_where_nothing_else_is_asked_for(options):
    remember(DEMO, FOUND)
    assert find_tuned(DEMO, StreamingConfig(**options)) is None
    assert find_tuned(DEMO, StreamingConfig(context=100, govern=True, usage="auto")) == FOUND


@pytest.mark.parametrize("what", ["node", "total_memory", "model", "device"])
def test_it_is_not_used_for_another_machine_or_model(what, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    for p in DEMO.iterdir():
        (folder / p.name).write_bytes(p.read_bytes())
    remember(folder, FOUND)
    assert find_tuned(folder, StreamingConfig()) == FOUND
    if what == "model":
        os.utime(folder / "model.safetensors", (1, 1))
    elif what == "total_memory":
        monkeypatch.setattr(tuned, "total_memory", lambda: 1)
    elif what == "device":
        monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "another"})
    else:
        monkeypatch.setattr(tuned.platform, "node", lambda: "another")
    assert find_tuned(folder, StreamingConfig()) is None


def hostile() -> dict:
    entry = {**vars(FOUND)}

    def of(**changes):
        return {**entry, **changes}

    def options(**changes):
        return of(options={**FOUND.options, **changes})

    return {
        "lossy": options(decode="lossy"),
        "a mode that is none": options(decode="fast"),
        "threads": options(threads=10**9),
        "no number": options(threads="8"),
        "truth": options(lookahead="yes"),
        "kernels": options(kernels="fused"),
        "an option more": options(policy="lru"),
        "an option less": of(options={"io": "pread"}),
        "slots": of(slots=0),
        "a share": of(slots=0.5),
        "memory": of(memory="1GB"),
        "a long date": of(date="2026" * 1000),
        "no date": {k: v for k, v in entry.items() if k != "date"},
        "a list": [1, 2],
    }


@pytest.mark.parametrize("name", list(hostile()))
def test_a_hostile_file_is_ignored_and_replaced(name):
    remember(DEMO, FOUND)
    file = TUNED.path
    document = json.loads(file.read_text())
    (key,) = document["entries"]
    document["entries"][key] = hostile()[name]
    file.write_text(json.dumps(document))
    assert find_tuned(DEMO, StreamingConfig()) is None
    remember(DEMO, FOUND)
    assert find_tuned(DEMO, StreamingConfig()) == FOUND


@pytest.mark.parametrize(
    "text", ["", "[", "[]", "{}", "[" * 10_000, '{"format": "smoe-mlx tuned 3"}']
)
def test_a_damaged_file_is_ignored(text):
    TUNED.path.write_text(text)
    assert find_tuned(DEMO, StreamingConfig()) is None


# ---- what load does ------------------------------------------------------------------------------


def tokens_of(model, n=12) -> list[int]:
    from smoe_mlx.generate import generate_step

    return [t for t, _ in generate_step(mx.array([40, 50, 60]), model, max_tokens=n)]


def test_load_uses_it_and_says_so():
    plain, _ = smoe_mlx.load(DEMO)
    assert smoe_mlx.stats(plain).tuned == ""
    remember(DEMO, FOUND)
    assert smoe_mlx.plan(DEMO).slots == 100
    model, _ = smoe_mlx.load(DEMO)
    s = smoe_mlx.stats(model)
    assert s.plan.slots == 100
    assert model._streaming.cache.reader.threads == 3
    assert s.tuned == "threads=3, lookahead=False, slots<=100 (smoe-mlx tune, 2026-11-30)"
    assert f"as tuned          {s.tuned}" in str(s)
    assert tokens_of(model) == tokens_of(plain)
    told = StreamingConfig(tuned=False)
    assert smoe_mlx.plan(DEMO, config=told).slots == smoe_mlx.stats(plain).plan.slots == 512
    assert smoe_mlx.plan(DEMO, slots=0.5).slots == 256
    assert smoe_mlx.plan(DEMO, memory="30MB").total <= 30_000_000


def test_it_takes_no_more_memory_than_it_was_tuned_for_or_than_there_is(monkeypatch):
    remember(DEMO, replace(FOUND, memory=30_000_000))
    plan = smoe_mlx.plan(DEMO)
    assert (plan.slots, plan.memory) == (100, 30_000_000)
    remember(DEMO, replace(FOUND, memory=30_000_000, slots=None))
    assert 100 < smoe_mlx.plan(DEMO).slots < 512
    remember(DEMO, FOUND)
    load = sys.modules["smoe_mlx.load"]
    little = 2**31 + 2**28 + 23_500_000  # what the system keeps, and a few experts
    monkeypatch.setattr(load, "available_nbytes", lambda: little)
    assert 64 <= smoe_mlx.plan(DEMO).slots < 100


# ---- all of it -----------------------------------------------------------------------------------

TURN = {"prompt_tokens": 8, "generation_tokens": 10}


def by_surface(monkeypatch, token, prompt=lambda setting: 1.0, really=False):
    """Let a prompt and a token take what a surface says; `really` read and decode them too."""
    read, decode = module._Model.read_prompt, module._Model.decode

    def read_prompt(self, most=None):
        assert not really or read(self, most) > 0
        return prompt(self.now)

    def decode_(self, tokens):
        assert not really or decode(self, tokens) > 0
        return token(self.now)

    monkeypatch.setattr(module._Model, "read_prompt", read_prompt)
    monkeypatch.setattr(module._Model, "decode", decode_)


def test_tune_measures_the_model_and_remembers(monkeypatch):
    def token(s: Setting) -> float:
        return 1.0 + (s.threads != 4) + abs(s.slots - 140) / 100

    by_surface(monkeypatch, token, really=True)
    monkeypatch.setattr(module, "SHARES", (0.5,))
    monkeypatch.setattr(module, "MOST_TOKENS", 2)
    monkeypatch.setitem(READING, "io", [{"io": "direct"}])
    monkeypatch.setitem(READING, "threads", [{"threads": 4}])
    monkeypatch.delitem(READING, "reading ahead")
    turns: list[str] = []
    found = smoe_mlx.tune(
        DEMO,
        StreamingConfig(memory="30MB"),
        1e6,
        progress=lambda _, what: turns.append(what),
        **TURN,
    )
    assert found.ended == ""
    assert found.best.threads == 4
    assert found.best.slots == 140
    assert isinstance(found, Tuning)
    assert found.turns == len(turns) > 10
    assert found.start == Setting(found.curve[-1].slots)
    assert all(p.memory <= 30_000_000 for p in found.curve)
    assert found.best_turn.seconds == pytest.approx(1 + 10 * token(found.best))
    assert found.start_turn.seconds == pytest.approx(1 + 10 * token(found.start))
    assert {p.slots: p.seconds for p in found.curve}[140] == pytest.approx(11, rel=0.1)
    said = str(found)
    assert "a prompt of 8 tokens and an answer of 10" in said
    assert f"kept, for load and the commands (not with --no-tuned): {found.kept}" in said
    written = json.loads(json.dumps(found.as_dict()))
    assert written["best_turn"]["seconds"] == found.best_turn.seconds
    assert written["best_turn"]["prompt_tokens"] == 8
    remembered = find_tuned(DEMO, StreamingConfig())
    assert str(remembered) == found.kept
    assert remembered.options == found.best.options
    assert remembered.memory == 30_000_000
    assert "memory<=30 MB" in found.kept
    model, _ = smoe_mlx.load(DEMO)
    assert smoe_mlx.stats(model).plan.slots <= found.best.slots
    plain, _ = smoe_mlx.load(DEMO, slots=1.0)
    assert tokens_of(model) == tokens_of(plain)


def of_threads(otherwise, **seconds):
    return lambda s: seconds.get(f"n{s.threads}", otherwise)


@pytest.mark.parametrize(("generation_tokens", "best"), [(2, 32), (100, 4)])
def test_the_turn_decides_and_not_decoding_alone(generation_tokens, best, monkeypatch):
    """Decoding is fastest with 4 threads, prompts with 32: which is more of the turn?"""
    read: list[Setting] = []

    def prompt(s: Setting) -> float:
        read.append(s)
        return 5.0 if s.threads == 32 else 10.0

    by_surface(monkeypatch, of_threads(1.0, n4=0.5), prompt)
    config = StreamingConfig(memory="30MB")
    turn = {"prompt_tokens": 8, "generation_tokens": generation_tokens}
    found = smoe_mlx.tune(DEMO, config, 1e6, **turn)
    assert found.best.threads == best
    assert found.each_prompt
    assert found.turns > 2 * len(read)  # one for all turns that differ in nothing else
    assert find_tuned(DEMO, StreamingConfig()).options["threads"] == best


@pytest.mark.parametrize(("prompt_with_4", "best"), [(20.0, 8), (10.5, 4)])
def test_prompts_too_long_for_each_setting_are_compared_at_the_end(
    prompt_with_4, best, monkeypatch
):
    read: list[Setting] = []

    def prompt(s: Setting) -> float:
        read.append(s)
        return prompt_with_4 if s.threads == 4 else 10.0

    by_surface(monkeypatch, of_threads(1.0, n4=0.5), prompt)
    turn = {"prompt_tokens": 8, "generation_tokens": 4}
    found = smoe_mlx.tune(DEMO, StreamingConfig(memory="30MB"), 60, **turn)
    assert found.best.threads == best
    assert len(read) == 3
    said = str(found)
    assert "a prompt takes 10.0 s, too long to read one with each setting" in said
    assert "with --seconds 400." in said
    assert ("what was taken was not faster than the defaults in the end" in said) == (best == 8)


@pytest.mark.parametrize("after", [3, 60])
def test_a_ctrl_c_keeps_and_remembers_the_best_so_far(after, monkeypatch):
    turns: list[str] = []

    def progress(passed: float, what: str) -> None:
        turns.append(what)
        if len(turns) > after:
            raise KeyboardInterrupt

    by_surface(monkeypatch, lambda s: 1.0 + abs(s.slots - 140) / 100)
    remember(DEMO, FOUND)
    config = StreamingConfig(memory="30MB")
    found = smoe_mlx.tune(DEMO, config, 1e6, progress=progress, **TURN)
    assert found.ended == "interrupted"
    assert len(turns) == after + 1  # and no turns afterwards to see whether it is true
    assert (found.best == found.start) == (after == 3)
    if after == 3:
        assert find_tuned(DEMO, StreamingConfig()) == FOUND
    else:
        assert abs(found.best.slots - 140) < 10
        assert find_tuned(DEMO, StreamingConfig()).slots == found.best.slots
    assert "interrupted, so not all was tried" in str(found)


def test_of_a_vault(tmp_path, monkeypatch):
    vault = smoe_mlx.shatter("demo", tmp_path / "demo")
    by_surface(monkeypatch, lambda s: 1.0 + (s.slots != 128))
    found = smoe_mlx.tune(vault, StreamingConfig(memory="30MB"), 1e6, **TURN)
    assert found.ended == ""
    assert smoe_mlx.stats(smoe_mlx.load(vault)[0]).tuned


def test_a_setting_is_what_the_model_then_does():
    model = module._Model(DEMO, StreamingConfig(memory="30MB"), False, 60, 8, 8, lambda *_: None)
    model.begin()
    for setting in (
        Setting(128, "direct", 2, lookahead=False),
        Setting(256, "mmap", 0, spec=2),
        Setting(64, decode="lag1"),
        Setting(64),
    ):
        model.apply(setting)
        assert model.decode(3) > 0
        cache = model.streaming.cache
        assert sum(len(b.free) + len(b.owners()) for b in cache._banks) == setting.slots
        assert (cache.reader.io, cache.reader.threads) == (setting.io, setting.threads)
        decoding = model.streaming.decoding
        assert setting.decode == "auto" or decoding.mode == setting.decode
        assert setting.decode == "auto" or decoding.tokens[setting.decode]
        switches = [m for _, m in model.model.named_modules() if hasattr(m, "_bets")]
        switches.sort(key=lambda m: m._layer)
        bets = setting.lookahead + bool(setting.spec)
        assert [len(m._bets) for m in switches] == [bets] * 7 + [bool(setting.spec)]
    model.close()


@pytest.mark.parametrize("can_trim", [True, False])
def test_turns_stay_within_the_context(can_trim, monkeypatch):
    monkeypatch.setattr(module, "can_trim_prompt_cache", lambda cache: can_trim)
    config = StreamingConfig(memory="30MB", context=64)
    model = module._Model(DEMO, config, False, 60, 30, 30, lambda *_: None)
    model.begin()
    read, prompts = model.read_prompt, []
    monkeypatch.setattr(model, "read_prompt", lambda: prompts.append(1) or read())
    for _ in range(6):
        assert model.decode(20) > 0
        assert 30 < model.cache[0].offset <= 64
    assert len(prompts) == (0 if can_trim else 5)
    model.close()


def test_too_little_memory_to_tune_is_said():
    least = smoe_mlx.plan(DEMO, slots=1.0).minimum
    with pytest.raises(BudgetError, match="the 64 experts of one token"):
        smoe_mlx.tune(DEMO, StreamingConfig(memory=least))
    with pytest.raises(ValueError, match="lossy"):
        smoe_mlx.tune(DEMO, StreamingConfig(decode="lossy"))
    with pytest.raises(ValueError, match="allow_kernels"):
        smoe_mlx.tune(DEMO, StreamingConfig(kernels="auto"))
    with pytest.raises(ValueError, match="from 1 on"):
        smoe_mlx.tune(DEMO, prompt_tokens=0)
    with pytest.raises(BudgetError, match="longer than the context of 1,024"):
        smoe_mlx.tune(DEMO, prompt_tokens=1000)


def test_commands(tmp_path):
    plot = tmp_path / "curve.png"
    few = ("--prompt-tokens", "16", "--generation-tokens", "8")
    out = smoe("tune", "demo", "--seconds", "3", *few, "--memory", "30MB", "--plot", str(plot))
    for word in ("a prompt of 16 tokens", "slots", "tok/s", "turns in", "without tuning: "):
        assert word in out.stdout
    assert "of 3 s" in out.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    remember(DEMO, FOUND)
    base = ["generate", "demo", "-m", "4"]
    used = smoe(*base)
    assert "as tuned: threads=3" in used.stderr
    assert "100 of 512" in used.stderr
    told = smoe(*base, "--no-tuned")
    assert "as tuned" not in told.stderr
    assert used.stdout == told.stdout
    assert "more than 0" in smoe("tune", "demo", "--seconds", "0", status=1).stderr
