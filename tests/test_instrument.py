"""The instrument panel: it adds up, counts what was counted, and changes nothing that comes out."""

import json
import time

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import random_tokens
from mlx_lm.generate import generate_step as mlx_generate_step
from test_cli import smoe
from test_mixed import RULES

import smoe_mlx
from smoe_mlx import ExpertReadError, instrument, replay, stats
from smoe_mlx.generate import generate_step
from smoe_mlx.layers.mixed import MixedSwitch
from smoe_mlx.layers.switch import StreamingSwitchGLU, StreamingSwitchMLP
from smoe_mlx.load import load_model
from smoe_mlx.panel import BUCKETS, Panel
from smoe_mlx.plot import plot_panel
from smoe_mlx.store.probe import probe_disk
from smoe_mlx.store.reader import ExpertReader
from smoe_mlx.trace import Recorder, force

ARCHS = ["qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h", "longcat_flash", "lfm2_moe"]
PROMPT = random_tokens(20)


def streamed(folder, slots=0.4, **config):
    config = smoe_mlx.StreamingConfig(slots=slots, debug=True, **config)
    return load_model(folder, config=config)[0]


def classes_and_bets(model):
    modules = [m for _, m in model.named_modules()]
    switches = (StreamingSwitchGLU, StreamingSwitchMLP)
    return [type(m) for m in modules], [m._bets for m in modules if isinstance(m, switches)]


def by_layer(model):
    switches = [m for _, m in model.named_modules() if isinstance(m, StreamingSwitchGLU)]
    return sorted(switches, key=lambda m: m._layer)


def run(model, step=generate_step, n=8):
    return [int(t) for t, _ in step(mx.array(PROMPT), model, max_tokens=n)]


def adds_up(panel: Panel):
    for t in panel.tokens:
        parts = [getattr(t, name) for name in BUCKETS]
        assert all(x >= 0 for x in parts)
        assert sum(parts) == pytest.approx(t.wall, rel=1e-9)
        at = 0.0
        for lap in t.laps:
            assert lap.start == pytest.approx(at, abs=1e-9), "a gap between two laps"
            at += lap.seconds
        assert at == pytest.approx(t.wall, rel=1e-9)
        layers = [lap.layer for lap in t.laps if lap.layer is not None]
        assert layers == sorted(layers)
        for name in BUCKETS:
            laps = [lap.seconds for lap in t.laps if lap.bucket == name]
            assert sum(laps) == pytest.approx(getattr(t, name), rel=1e-9)


@pytest.mark.parametrize("slots", [0.4, 1.0])
@pytest.mark.parametrize("arch", ARCHS)
def test_it_adds_up_and_the_tokens_are_the_same(arch, slots, tiny):
    folder = tiny(arch, "affine")
    expected = run(streamed(folder, slots))
    model = streamed(folder, slots)
    before = classes_and_bets(model)
    for step in (generate_step, mlx_generate_step):
        with instrument(model) as panel:
            assert classes_and_bets(model)[0] != before[0]
            assert run(model, step) == expected
        assert classes_and_bets(model) == before
        adds_up(panel)
        # The library's own loop takes the first token from the prompt's last layer-major pass;
        # mlx-lm's loop passes the prompt's last token alone, and looks one token ahead.
        ahead = slots == 1.0 or step is not generate_step
        assert len(panel.tokens) == (9 if ahead else 7)
        for name in set(BUCKETS) - {"reads"}:
            assert panel.total(name) > 0, name
        inside = [{lap.layer for lap in t.laps if lap.bucket == "experts"} for t in panel.tokens]
        assert inside == [set(range(len(panel.layers)))] * len(inside)
        assert all(t.laps[-1].layer is None for t in panel.tokens)  # LM head, sampling
        assert panel.hit_rate is None if slots == 1.0 else 0 < panel.hit_rate <= 1
        assert str(panel)


@pytest.mark.parametrize("slots", [0.4, 0.05, 1.0])
@pytest.mark.parametrize("arch", ["qwen3_moe", "longcat_flash"])
def test_counts_equal_those_of_stats(arch, slots, tiny, monkeypatch):
    monkeypatch.setattr(ExpertReader, "slow", True)  # so that it bets
    model = streamed(tiny(arch, "affine"), slots)
    for _ in force(model, PROMPT, 100):
        pass
    a = stats(model)
    with instrument(model) as panel:
        for _ in force(model, PROMPT, 100):
            pass
    b = stats(model)
    adds_up(panel)
    assert len(panel.tokens) == len(PROMPT)
    assert panel.total("hits") == b.hits - a.hits
    assert panel.total("misses") == b.misses - a.misses
    assert panel.total("nbytes") == b.bytes_read - a.bytes_read
    assert panel.total("reads") == pytest.approx(b.wait_seconds - a.wait_seconds)
    for mine, x, y in zip(panel.layers, a.layers, b.layers, strict=True):
        assert (mine.hits, mine.misses) == (y.hits - x.hits, y.misses - x.misses)
    for name, value in vars(panel.bets).items():
        assert value == getattr(b.bets, name) - getattr(a.bets, name)
    if slots == 0.05:
        assert panel.total("misses") > 0
    if slots == 0.4 and arch == "qwen3_moe":
        assert panel.bets.issued > 0


def test_experts_of_several_kinds(tiny, tmp_path, monkeypatch):
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(RULES))
    vault = smoe_mlx.shatter(tiny("qwen3_moe"), tmp_path / "v", recipe=str(recipe))
    expected, model = run(streamed(vault)), streamed(vault)
    before = classes_and_bets(model)
    assert MixedSwitch in before[0]
    with instrument(model) as panel:
        assert run(model) == expected
    adds_up(panel)
    assert panel.total("misses") > 0
    assert panel.total("experts") > 0
    assert classes_and_bets(model) == before
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    clock.add_to(monkeypatch, mx, "eval", 1.0)
    with instrument(model) as panel:
        run(model)
    mixed = sum(isinstance(m, MixedSwitch) for _, m in model.named_modules())
    assert all(t.routing == mixed for t in panel.tokens)


# ---- which bucket --------------------------------------------------------------------------------


class Clock:
    """A clock that only moves when it is told to."""

    now = 0.0

    def __call__(self):
        return self.now

    def add_to(self, monkeypatch, kind, name, seconds):
        old = getattr(kind, name)

        def slow(*args, **kwargs):
            self.now += seconds
            return old(*args, **kwargs)

        monkeypatch.setattr(kind, name, slow)


@pytest.mark.parametrize("slots", [0.05, 0.4])
def test_what_takes_long_is_found(tiny, monkeypatch, slots):
    clock, n = Clock(), 8
    model = streamed(tiny("qwen3_moe", "affine"), slots, threads=0, lookahead=False)
    reader = model._streaming.cache.reader
    monkeypatch.setattr(time, "perf_counter", clock)
    clock.add_to(monkeypatch, mx, "eval", 1.0)
    clock.add_to(monkeypatch, type(reader._files[0]), "read", 1000.0)
    clock.add_to(monkeypatch, type(model._streaming.cache), "look_after", 1e5)

    def sampler(logprobs):
        clock.now += 1e7
        return mx.argmax(logprobs, axis=-1)

    with instrument(model) as panel:
        for _ in generate_step(mx.array(PROMPT), model, max_tokens=n, sampler=sampler):
            clock.now += 1e9  # what the caller does
    layers = len(panel.layers)
    adds_up(panel)
    for t in panel.tokens:
        assert t.reads % 1000 == 0
        assert t.reads // 1000 >= t.misses
        assert t.head == 1
        assert t.dense == layers + 2  # before each switch and the head, and after the model
        assert t.panel == 0
        if slots == 0.4:
            assert t.experts == layers
        else:
            assert t.experts > layers, "wave by wave"
    assert panel.total("misses") > 0
    # A token is evaluated once more when it comes back as input; the last one never does.
    assert [t.sampling for t in panel.tokens] == [1e7 + 2] * (n - 2) + [1e7 + 1]
    caller = [1e9] * (n - 2) + [0]
    for t, seconds in zip(panel.tokens, caller, strict=True):
        assert seconds + layers * 1e5 <= t.host < seconds + layers * 1e5 + 1000


def test_predictions_count_as_routing(tiny, monkeypatch):
    model = streamed(tiny("qwen3_moe", "affine"))
    clock = Clock()
    cache = model._streaming.cache
    monkeypatch.setattr(type(cache), "may_bet", lambda cache, layer: True)
    asked = []
    switches = by_layer(model)
    for m in switches:
        bets = []
        for layer, predict in m._bets:

            def slow(x, k, predict=predict):
                asked.append(k)
                return predict(x, k)

            bets.append((layer, slow))
        m.bet(bets, True)
    for _ in force(model, PROMPT[:4], 100):  # memory for bets must be there
        pass
    monkeypatch.setattr(time, "perf_counter", clock)
    clock.add_to(monkeypatch, mx, "eval", 1.0)
    with instrument(model) as panel:
        for _ in force(model, PROMPT[:4], 100):
            pass
    assert asked
    for t in panel.tokens:
        assert t.routing == len(switches) - 1


# ---- routing -------------------------------------------------------------------------------------


def test_overlap_and_coverage_equal_those_of_the_trace(tiny):
    model = streamed(tiny("qwen3_moe", "affine"))
    switches = by_layer(model)
    for m in switches[:-1]:  # a gate that always predicts the experts 0, 1, 2...
        m.bet([(m._layer + 1, lambda x, r: mx.arange(r)[None, None])], True)
    with Recorder(model) as recorder, instrument(model) as panel:
        for _ in force(model, PROMPT, 100):
            pass
    trace = recorder.trace()
    assert [x.overlap for x in panel.layers] == pytest.approx(replay.overlap(trace))
    experts, top_k = trace.num_experts[0], trace.top_k[0]
    counts = [[0] * experts for _ in range(trace.num_layers)]
    for layer, ids in trace:
        for e in ids.ravel().tolist():
            counts[layer][e] += 1
    most = [sorted(c, reverse=True) for c in counts]
    total = sum(map(sum, counts))
    for r in (1, top_k, experts):
        assert panel.most_used[r - 1] == pytest.approx(sum(sum(c[:r]) for c in most) / total)
    assert [r for r, _ in panel.predicted] == [
        r for r in (top_k, 2 * top_k, 4 * top_k) if r <= experts
    ]
    after_first = sum(map(sum, counts[1:]))
    for r, share in panel.predicted:
        assert share == pytest.approx(sum(sum(c[:r]) for c in counts[1:]) / after_first)


def test_the_gate_itself_covers_more_the_more_it_is_asked(tiny):
    model = streamed(tiny("qwen3_moe", "affine"))
    with instrument(model) as panel:
        run(model)
    shares = [share for _, share in panel.predicted]
    assert len(shares) > 1
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1]


# ---- errors --------------------------------------------------------------------------------------


def test_an_error_leaves_nothing_behind_and_its_token_out(tiny, monkeypatch):
    folder = tiny("qwen3_moe", "affine")
    expected, model = run(streamed(folder)), streamed(folder)
    before = classes_and_bets(model)
    with pytest.raises(KeyError), instrument(model):
        raise KeyError
    assert classes_and_bets(model) == before

    file = type(model._streaming.cache.reader._files[0])

    def fail(*_):
        raise ExpertReadError(5, "out of order")

    with instrument(model) as panel:
        steps = generate_step(mx.array(PROMPT), model, max_tokens=40)
        done = [next(steps) for _ in range(5)]
        monkeypatch.setattr(file, "read", fail)
        with pytest.raises(ExpertReadError):
            done.extend(steps)  # those that come before the error stay
    assert len(panel.tokens) == len(done) - 1
    adds_up(panel)
    assert classes_and_bets(model) == before
    monkeypatch.undo()
    assert run(model) == expected


def test_twice_at_once_is_refused(tiny):
    model = streamed(tiny("qwen3_moe", "affine"))
    before = classes_and_bets(model)
    with instrument(model), pytest.raises(ValueError, match="already"), instrument(model):
        pass
    assert classes_and_bets(model) == before
    with (
        pytest.raises(smoe_mlx.UnsupportedModelError),
        instrument(nn.Linear(2, 2)),
    ):
        pass


# ---- disk, reports, command ----------------------------------------------------------------------


def test_the_probe_reads_whole_records(tiny, tmp_path):
    vault = smoe_mlx.shatter(tiny("qwen3_moe"), tmp_path / "v", bits=4, group_size=32)
    model = streamed(vault)
    before = stats(model).bytes_read
    with instrument(model, probe=True) as panel:
        pass
    assert stats(model).bytes_read == before
    cache = model._streaming.cache
    assert panel.disk.record_nbytes == cache.layouts[0].expert_nbytes
    assert panel.disk.bytes_per_second > 0
    assert panel.disk.io in ("direct", "pread")
    with (vault / "experts.smoe").open("r+b") as f:
        f.truncate(20000)
    with pytest.raises((ExpertReadError, smoe_mlx.CheckpointChangedError)):
        probe_disk(cache.reader.sources, cache.layouts, threads=2, seconds=0)


def test_json_table_and_plot(tiny, tmp_path):
    model = streamed(tiny("qwen3_moe", "affine"))
    with instrument(model) as panel:
        run(model)
    d = panel.as_dict()
    assert json.loads(json.dumps(d)) == d
    assert sum(d["seconds"][name] for name in BUCKETS) == pytest.approx(d["seconds"]["wall"])
    panel.plain_tps = 123.4
    text = str(panel)
    for label in (*BUCKETS.values(), "123.4 tok/s without it", "which takes time", "lookahead"):
        assert label in text
    assert max(map(len, text.splitlines())) <= 100
    assert "no token" in str(Panel())
    pytest.importorskip("matplotlib")
    plot_panel(panel, tmp_path / "p.svg")
    assert (tmp_path / "p.svg").read_text().count("<path") > len(panel.tokens) * len(BUCKETS) // 2


def test_the_command(tmp_path):
    plain = smoe("demo", "-m", "12", "-q").stdout
    out = smoe("demo", "-m", "12", "-q", "--instrument", str(tmp_path / "p.json"), "--probe-disk")
    assert out.stdout.startswith(plain)
    assert "11 tokens" in out.stdout
    assert "the disk's best" in out.stdout
    panel = json.loads((tmp_path / "p.json").read_text())
    assert len(panel["tokens"]) == 11
    assert panel["plain_tps"] > 0
    base = ["generate", "demo", "-q", "-m", "3", "--temp", "1", "--slots", "0.5"]
    assert "2 tokens" in smoe(*base, "-p", "-", "--instrument", input="It was").stdout
    for wrong, word in (
        (["--instrument", "p.txt"], "p.txt"),
        (["--instrument", "no/p.json"], "no such folder"),
        (["--probe-disk"], "--instrument"),
    ):
        assert word in smoe(*base, *wrong, status=1).stderr
