"""Traces and replay: what is recorded is what the model did, and replay counts what it counted."""

import itertools
import json
import random
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import random_tokens, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

import smoe_mlx
from smoe_mlx.cache.policy import POLICIES
from smoe_mlx.errors import BudgetError, SmoeError, TraceError
from smoe_mlx.load import load_model
from smoe_mlx.plot import plot_report
from smoe_mlx.replay import belady, foreseen, optimal, overlap, replay, report, uses
from smoe_mlx.trace import Recorder, Trace, force, load_trace

TOKENS = random_tokens(60)


def streamed(folder, **config):
    config = {"lookahead": False, **config}  # what is read ahead counts as a hit
    model, _ = load_model(folder, config=smoe_mlx.StreamingConfig(**config))
    return model


def decode(model, prompt: int = 20) -> mx.array:
    """A prompt in two calls, then a token at a time; the last logits."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([TOKENS[: prompt - 1]]), cache=cache))
    for t in TOKENS[prompt - 1 :]:
        y = model(mx.array([[t]]), cache=cache)
        mx.eval(y)
    return y


def run(model, prompt: int = 20) -> Trace:
    with Recorder(model, "tiny") as recorder:
        decode(model, prompt)
    return recorder.trace(prompt)


@pytest.fixture(scope="module")
def qwen(tiny):
    return tiny("qwen3_moe")


@pytest.fixture(scope="module")
def trace(qwen):
    return run(streamed(qwen, slots=1.0))


@pytest.fixture(scope="module")
def looked_ahead(qwen):
    """The same, with what the lookahead predicted."""
    return run(streamed(qwen, slots=1.0, lookahead=True))


# ---- recording -----------------------------------------------------------------------------------


def test_a_trace_is_the_same_whatever_is_in_memory(qwen, trace):
    layers, experts = trace.num_layers, trace.num_experts[0]
    assert len(trace.calls) == layers * (2 + len(TOKENS) - 20)
    assert [n for layer, n in trace.calls.tolist() if layer == 0] == [19] + [1] * 41
    assert (trace.tokens, trace.prompt_tokens, trace.prompt_calls) == (60, 20, 2 * layers)
    assert 0 <= trace.ids.min() < trace.ids.max() < experts
    few = run(streamed(qwen, slots=0.3))
    assert np.array_equal(few.ids, trace.ids), "layers wholly in memory record as others do"
    assert np.array_equal(few.calls, trace.calls)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("slots", [0.3, 1.0])
def test_recording_changes_nothing_and_ends(qwen, slots, lookahead):
    config = {"slots": slots, "lookahead": lookahead, "threads": 0}  # nothing is read ahead
    recorded, plain = streamed(qwen, **config), streamed(qwen, **config)
    mx.random.seed(1)
    with Recorder(recorded):
        y = decode(recorded)
    drawn = mx.random.normal((2,))
    mx.random.seed(1)
    assert same_bits(y, decode(plain))
    assert same_bits(drawn, mx.random.normal((2,)))
    assert recorded._streaming.cache.trace is None
    assert smoe_mlx.stats(recorded).layers == smoe_mlx.stats(plain).layers


def test_what_was_predicted_is_recorded_of_single_tokens_after_the_first_layer(looked_ahead, trace):
    assert trace.predicted is None
    assert np.array_equal(looked_ahead.ids, trace.ids)
    calls = zip(looked_ahead, looked_ahead.by_call(looked_ahead.predicted), strict=True)
    for (layer, ids), (_, predicted) in calls:
        assert (predicted >= 0).all() == (layer > 0 and len(ids) == 1)
        assert (predicted == -1).all() == (layer == 0 or len(ids) > 1)


def test_what_was_predicted_is_what_the_next_router_says_of_this_input(qwen):
    model = streamed(qwen, slots=1.0, lookahead=True, spec=1)
    here, there = model.layers[:2]
    x, y = mx.random.normal((2, 1, 1, model.args.hidden_size))
    with Recorder(model) as recorder:
        mx.eval(here.mlp(x), there.mlp(y), there.mlp(x))
        mx.eval(here.mlp(x), there.mlp(mx.concatenate([x, y])), there.mlp(y))
    trace = recorder.trace()
    ratio = there.post_attention_layernorm.weight / here.post_attention_layernorm.weight
    k = trace.top_k[1]
    likeliest = np.argsort(np.array(there.mlp.gate(x * ratio)).ravel())[-k:]
    said = [p.ravel().tolist() for _, p in trace.by_call(trace.predicted)]
    assert sorted(said.pop(1)) == sorted(likeliest.tolist())
    assert all(e == -1 for p in said for e in p), "nobody was asked, or about another call"


def test_the_ids_are_the_routers(qwen):
    """Against the routers themselves, run apart on what reached them."""
    model = streamed(qwen, slots=1.0)
    block = model.layers[0].mlp
    x = mx.random.normal((1, 7, model.args.hidden_size))
    with Recorder(model) as recorder:
        mx.eval(block(x))
    ((layer, ids),) = recorder.trace()
    gates = np.array(mx.softmax(block.gate(x), axis=-1))[0]
    k = ids.shape[1]
    assert layer == 0
    for row, gate in zip(ids, gates, strict=True):
        assert set(row.tolist()) == set(np.argsort(gate)[-k:].tolist())


def test_nothing_recorded_is_an_error(qwen):
    with Recorder(streamed(qwen, slots=1.0)) as recorder:
        pass
    with pytest.raises(TraceError, match="not run"):
        recorder.trace()


def test_forced_tokens_route_as_a_decode_with_these_tokens(qwen, trace):
    model = streamed(qwen, slots=0.5)
    with Recorder(model) as recorder:
        assert list(force(model, TOKENS, window=100))[-1] == len(TOKENS)
    forced = recorder.trace()
    assert forced.tokens == len(TOKENS)
    assert forced.prompt_tokens == 0
    last = trace.ids[-trace.num_layers * trace.top_k[0] :]
    assert np.array_equal(forced.ids[-last.size :], last)
    with Recorder(model) as recorder:
        list(force(model, TOKENS[:8], window=4))
    windows = recorder.trace().ids
    with Recorder(model) as recorder:
        list(force(model, TOKENS[4:8], window=4))
    assert np.array_equal(windows[windows.size // 2 :], recorder.trace().ids), "a new KV cache"


# ---- replay against the streamed model -----------------------------------------------------------


def nbytes_of_misses(model) -> int:
    """Not `bytes_read`: a read may take a small gap between two experts along."""
    layouts = model._streaming.cache.layouts
    layers = smoe_mlx.stats(model).layers
    return sum(s.misses * x.expert_nbytes for s, x in zip(layers, layouts, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "longcat_flash", "phimoe"])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
def test_replay_counts_what_the_model_counted(tiny, arch, policy, share):
    model = streamed(tiny(arch), slots=share, policy=policy, debug=True)
    trace = run(model)
    stats, plan = smoe_mlx.stats(model), model._streaming.plan
    result = replay(trace, policy, plan.slots)
    both = (result.prompt, result.decode)
    assert sum(x.hits for x in both) == stats.hits
    assert sum(x.misses for x in both) == stats.misses
    assert sum(x.nbytes for x in both) == nbytes_of_misses(model)
    assert stats.misses > 0


def test_replay_of_experts_of_two_sizes(tiny):
    """Two banks: replay deals the slots as the plan does."""

    def mixed(path, module):
        if not hasattr(module, "to_quantized"):
            return False
        return {"group_size": 32, "bits": 8 if "layers.0" in path else 4}

    folder = tiny("qwen3_moe", "affine", group_size=32, bits=4, quant_predicate=mixed)
    model = streamed(folder, slots=0.5)
    trace = run(model)
    assert len(set(trace.banks)) == 2
    result = replay(trace, "lru", model._streaming.plan.slots)
    stats = smoe_mlx.stats(model)
    assert result.prompt.misses + result.decode.misses == stats.misses
    assert result.prompt.nbytes + result.decode.nbytes == nbytes_of_misses(model)


# ---- the optimum ---------------------------------------------------------------------------------


@st.composite
def small_calls(draw):
    calls = draw(st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=3), max_size=7))
    return [[(0, e) for e in sorted(c)] for c in calls], draw(st.integers(3, 4))


@given(small_calls())
def test_belady_is_the_best_of_all_choices(case):
    calls, slots = case

    def fewest(i: int, held: frozenset) -> int:
        if i == len(calls):
            return 0
        needed = frozenset(calls[i])
        others = held - needed
        room = min(slots - len(needed), len(others))
        return len(needed - held) + min(
            fewest(i + 1, needed | set(kept)) for kept in itertools.combinations(others, room)
        )

    hits, misses = belady(calls, slots)
    assert misses[0] == fewest(0, frozenset())
    assert hits[0] + misses[0] == sum(map(len, calls))


def random_trace(rng: random.Random, layers: int = 3, experts: int = 12, k: int = 3) -> Trace:
    calls, ids = [], []
    for _ in range(3):
        for n in (rng.choice([2, 9, 30]), *[1] * 15):
            for layer in range(layers):
                calls.append((layer, n))
                favourites = range(experts) if rng.random() < 0.4 else range(experts // 2)
                ids += [e for _ in range(n) for e in rng.sample(favourites, k)]
    return Trace(
        "random", (experts,) * layers, (k,) * layers, (100,) * layers, (0,) * layers, 999, 30,
        prompt_calls=2 * layers, calls=np.array(calls, np.int32), ids=np.array(ids, np.int32),
        predicted=np.array([rng.randrange(-1, experts) for _ in ids], np.int32),
    )  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), slots=st.integers(1, 36))
def test_no_policy_beats_the_optimum(policy, seed, slots):
    trace = random_trace(random.Random(seed))
    best, result = optimal(trace, slots), replay(trace, policy, slots)
    for part in ("prompt", "decode"):
        b, r = getattr(best, part), getattr(result, part)
        assert b.misses <= r.misses
        if slots < 36:
            assert b.hits + b.misses == r.hits + r.misses > 0
        else:
            assert (b.hit_rate, r.hit_rate) == (1.0, 1.0)


def test_overlap_and_uses():
    ids = [[0, 1], [1, 0], [1, 2], [3, 4]]  # two, one and none of two
    trace = Trace(
        "x", (5, 5), (2, 0), (1, 1), (0, 0), 4, 0, 0,
        calls=np.array([(0, 3), (0, 1)], np.int32), ids=np.array(ids, np.int32).ravel(),
    )  # fmt: skip
    assert overlap(trace) == [0.5, 0.0]
    assert overlap(trace, 2) == [0.25, 0.0]
    assert overlap(trace, 4) == [0.0, 0.0]
    assert [x.tolist() for x in uses(trace)] == [[2, 3, 1, 1, 1], [0] * 5]


def test_foreseen(trace, looked_ahead):
    ids = [[0, 1], [2, 3], [1, 2], [4, 0], [3, 4], [1, 0]]
    predicted = [[-1, -1], [3, 1], [-1, -1], [0, 4], [-1, -1], [-1, -1]]
    calls = np.array([(0, 1), (1, 1)] * 3, np.int32)
    flat = (np.array(x, np.int32).ravel() for x in (ids, predicted))
    known = Trace("x", (5, 5), (2, 2), (1, 1), (0, 0), 3, 0, 0, calls, *flat)
    assert foreseen(known) == [None, 0.75]
    r = report(known, ["lru"], [0.5])
    assert "foreseen by the layer before: 75.0 % of a token's experts (by layer: - 75)" in str(r)
    assert json.loads(json.dumps(r.as_dict()))["foreseen"] == [None, 0.75]
    assert foreseen(trace) == [None] * trace.num_layers
    assert "foreseen" not in str(report(trace, ["lru"], [0.5]))
    shares = foreseen(looked_ahead)
    assert shares[0] is None
    assert all(0 < x <= 1 for x in shares[1:])


def test_report(trace):
    r = report(trace, ["lru", "lfu", "lru"], [0.25, 0.5, 1.0])
    assert r.policies == ["lru", "lfu", "optimal"]
    assert [x.slots for x in r.of("lru")] == [x.slots for x in r.of("optimal")]
    text = str(r)
    for word in ("tiny", "60 tokens", "20 of them prompt", "25.0 %", "100.0 %", "optimal"):
        assert word in text
    plain = json.loads(json.dumps(r.as_dict()))
    assert plain["results"][0]["decode"]["hit_rate"] == r.results[0].decode.hit_rate
    lru = r.of("lru")[0].decode
    assert lru.nbytes == lru.misses * trace.expert_nbytes[0]
    for bad, word in ((0, "at least 1"), (10**6, "experts"), (1.5, "share"), (-1, "at least")):
        with pytest.raises(BudgetError, match=word):
            report(trace, ["lru"], [bad])
    with pytest.raises(ValueError, match="lru"):
        replay(trace, "fifo", 4)


# ---- the file ------------------------------------------------------------------------------------


def test_a_file_gives_back_the_trace(trace, looked_ahead, tmp_path):
    path = tmp_path / "t.npz"
    for whole in (looked_ahead, trace):
        whole.save(path)
        back = load_trace(path)
        for name, value in vars(whole).items():
            assert np.array_equal(getattr(back, name), value), name
    assert back.predicted is None
    with zipfile.ZipFile(path) as z:
        assert "predicted.npy" not in z.namelist(), "as files were before there were predictions"
    assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]
    with pytest.raises(TraceError, match="cannot be written"):
        trace.save(tmp_path / "no" / "t.npz")


def members(trace: Trace, folder) -> dict[str, np.ndarray]:
    trace.save(folder / "whole.npz")
    with np.load(folder / "whole.npz", allow_pickle=False) as z:
        return dict(z)


def change(header: np.ndarray, **changes) -> np.ndarray:
    document = json.loads(header.tobytes()) | changes
    return np.frombuffer(json.dumps(document).encode(), np.uint8)


HEADERS = {
    "format": "other", "version": 2, "model": 3, "tokens": 1.5, "prompt_tokens": 61,
    "prompt_calls": 10**6, "num_experts": [0, 8], "top_k": [2], "expert_nbytes": [True, 1],
    "banks": "ab",
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_bad_headers_are_refused(trace, tmp_path, name):
    parts = members(trace, tmp_path)
    parts["header"] = change(parts["header"], **{name: HEADERS[name]})
    np.savez(tmp_path / "bad.npz", **parts)
    with pytest.raises(TraceError, match=r"bad.npz.*smoe-mlx trace"):
        load_trace(tmp_path / "bad.npz")


def test_bad_arrays_are_refused(looked_ahead, tmp_path):
    whole = members(looked_ahead, tmp_path)
    calls, ids, predicted = whole["calls"], whole["ids"], whole["predicted"]
    bad_layer, bad_size = calls.copy(), calls.copy()
    bad_layer[3, 0] = 99
    bad_size[3, 1] = 2**31 - 1
    cases = [
        {"calls": bad_layer}, {"calls": bad_size}, {"calls": -calls}, {"calls": calls[:0]},
        {"calls": calls.astype(np.int64)}, {"calls": calls.ravel()}, {"calls": calls[:, :1]},
        {"ids": ids[:-1]}, {"ids": -ids - 1}, {"ids": ids.astype(np.float32)},
        {"header": np.zeros(9, np.uint8)}, {"header": np.frombuffer(b"[" * 5000, np.uint8)},
        {"ids": np.array([print], object)}, {"other": ids},
        {"predicted": predicted[:-1]}, {"predicted": predicted[:1]},
        {"predicted": predicted - 1}, {"predicted": predicted + looked_ahead.num_experts[0]},
        {"predicted": predicted.astype(np.int64)}, {"predicted": predicted.reshape(1, -1)},
        {"predicted": np.array([print], object)},
    ]  # fmt: skip
    for case in cases:
        np.savez(tmp_path / "bad.npz", **(whole | case))
        with pytest.raises(TraceError, match=r"bad\.npz"):
            load_trace(tmp_path / "bad.npz")
    for name in ("header", "calls", "ids"):
        np.savez(tmp_path / "bad.npz", **{k: v for k, v in whole.items() if k != name})
        with pytest.raises(TraceError, match=r"bad\.npz"):
            load_trace(tmp_path / "bad.npz")


@pytest.mark.parametrize("name", ["ids", "predicted"])
def test_sizes_are_believed_only_as_far_as_they_are_there(looked_ahead, tmp_path, name):
    """A header that promises much, and a member that unpacks to more than is allowed."""
    whole, path = members(looked_ahead, tmp_path), tmp_path / "bad.npz"
    f = BytesIO()
    np.lib.format.write_array_header_1_0(
        f, {"descr": "<i4", "fortran_order": False, "shape": (1 << 40,)}
    )
    np.savez(path, **{k: v for k, v in whole.items() if k != name})
    with zipfile.ZipFile(path, "a") as z:
        z.writestr(f"{name}.npy", f.getvalue())
    with pytest.raises(TraceError, match=r"bad\.npz"):
        load_trace(path)
    blanks = np.full((1 << 20) + 9999, ord(" "), np.uint8)  # JSON all the same
    np.savez_compressed(path, **(whole | {"header": np.concatenate([whole["header"], blanks])}))
    with pytest.raises(TraceError, match=r"bad\.npz.*larger"):
        load_trace(path)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_file_is_an_error_or_the_same_trace(data):
    trace = random_trace(random.Random(1), layers=2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.npz"
        trace.save(path)
        blob = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(blob) - 1))
        if data.draw(st.booleans()):
            blob[at] ^= data.draw(st.integers(1, 255))
        else:
            del blob[at:]
        path.write_bytes(blob)
        try:
            back = load_trace(path)
        except TraceError:
            return
        assert np.array_equal(back.ids, trace.ids)
        assert np.array_equal(back.calls, trace.calls)
        assert np.array_equal(back.predicted, trace.predicted)


def test_no_such_file(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        load_trace(tmp_path / "none.npz")
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path)


# ---- the plot ------------------------------------------------------------------------------------


def test_plot(trace, tmp_path):
    pytest.importorskip("matplotlib")
    r = report(trace, ["lru", "lfu"], [0.25, 0.5])
    plot_report(r, tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert "<svg" in text
    for bad in (tmp_path / "no" / "x.png", tmp_path / "x.nothing"):
        with pytest.raises(SmoeError, match="cannot be written"):
            plot_report(r, bad)
