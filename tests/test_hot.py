"""Hot experts: usage files, prewarming and pins change what is read, never what is computed."""

import atexit
import errno
import json
import os
import subprocess
import sys
import threading
import warnings

import mlx.core as mx
import numpy as np
import pytest
from conftest import random_tokens, resident, same_bits
from mlx_lm.generate import generate_step
from test_cache import COUNTS, Model, claim, held_sum, in_memory

import smoe_mlx
from smoe_mlx.cache import experts as experts_module
from smoe_mlx.cache import usage as usage_module
from smoe_mlx.cache.policy import LFU, LRU
from smoe_mlx.cache.usage import Usage
from smoe_mlx.errors import BudgetError, ExpertReadError
from smoe_mlx.generate import generate_step as smoe_generate_step
from smoe_mlx.hot import find_usage_file
from smoe_mlx.hub import find_model
from smoe_mlx.load import load_model
from smoe_mlx.stats import streaming_of

KEYS = [(0, 4), (2, 5), (1, 0), (0, 1), (1, 3), (2, 0), (0, 2), (0, 0)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = Model(tmp_path_factory.mktemp("hot"))
    yield model
    model.reader.close()
    model.checkpoint.close()


@pytest.fixture
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ---- counts --------------------------------------------------------------------------------------


def test_a_use_counts_half_after_the_half_life(model, monkeypatch):
    monkeypatch.setattr(usage_module, "HALF_LIFE", 5)
    usage = Usage(model.layouts)
    for _ in range(2):
        usage.saw([(0, 1), (0, 2)])
    for token in range(400):  # far enough for all weights to be rescaled
        assert usage.weight((0, 1)) == pytest.approx(
            2 ** (-3 * token / 15) * (1 + 2 ** (-1 / 15)), rel=1e-9
        )
        for layer in range(3):
            usage.saw([(layer, 3)])
    assert usage.weight((1, 3)) == pytest.approx(2 ** (-1 / 15) / (1 - 2 ** (-1 / 5)), rel=1e-9)
    assert usage.weight((1, 1)) == 0


def test_a_long_run_does_not_overflow(model, monkeypatch):
    monkeypatch.setattr(usage_module, "HALF_LIFE", 0.001)
    usage = Usage(model.layouts)
    for e in (0, 1, 2) * 4:
        usage.saw([(0, e)])
    assert usage.ranked()[:2] == [(0, 2), (0, 1)]
    assert usage.weight((0, 2)) == pytest.approx(1)


def test_decoding_is_counted_and_nothing_else_is(model):
    cache = model.cache()
    usage = cache.usage = Usage(model.layouts)
    claim(cache, 0, [3])
    assert not used_in(usage)
    with cache.lock:
        for ids in ([1, 2, 1], [2, 4], [2, 4]):  # misses, then hits
            assert cache.claim_few(0, ids) is not None
            cache.finish_few()
    assert used_in(usage) == [(0, 2), (0, 4), (0, 1)]
    assert usage.weight((0, 2)) == pytest.approx(3, rel=1e-2)


# ---- the file ------------------------------------------------------------------------------------


def used_in(usage: Usage) -> list[tuple[int, int]]:
    ranked = usage.ranked()
    assert len(ranked) == len(set(ranked)) == sum(COUNTS)
    return [key for key in ranked if usage.weight(key) > 0]


def used(model, path) -> Usage:
    usage = Usage(model.layouts, path)
    for n, key in enumerate(KEYS[::-1]):
        for _ in range(n + 1):
            usage.saw([key])
    return usage


def test_what_is_saved_is_loaded(model, tmp_path, no_warnings):
    path = tmp_path / "usage.json"
    usage = used(model, path)
    usage.load()  # there is none yet
    usage.save()
    again = Usage(model.layouts, path)
    again.load()
    assert used_in(again) == used_in(usage) == KEYS
    for key in KEYS:
        assert again.weight(key) == pytest.approx(usage.weight(key), rel=1e-3)
    written = path.stat().st_mtime_ns, path.stat().st_ino
    again.save()  # nothing new
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == written
    again.saw([(1, 1)])
    again.save()
    assert b'"smoe-mlx usage"' in path.read_bytes()
    assert path.stat().st_ino != written[1]
    assert os.listdir(tmp_path) == ["usage.json"]
    document = json.loads(path.read_bytes())  # the format is not to change without its version
    assert (document["format"], document["version"]) == ("smoe-mlx usage", 1)
    assert [len(row) for row in document["weights"]] == list(COUNTS)
    assert set(document) == {"format", "version", "model", "weights"}


def test_uses_are_saved_though_all_weights_were_just_made_smaller(model, tmp_path, no_warnings):
    path = tmp_path / "usage.json"
    usage = Usage(model.layouts, path)
    usage._unit = 1e100
    usage.saw([(0, 3)])
    assert usage.weight((0, 3)) == pytest.approx(1)
    usage.save()
    assert json.loads(path.read_bytes())["weights"][0][3] == pytest.approx(1)


def test_a_link_that_waits_under_the_temporary_name_is_not_written_through(model, tmp_path):
    """A model's folder may come from a stranger."""
    path, victim = tmp_path / "usage.json", tmp_path / "victim"
    victim.write_text("precious")
    path.with_name(f"usage.json.{os.getpid()}.part").symlink_to(victim)
    used(model, path).save()
    assert victim.read_text() == "precious"
    assert b"smoe-mlx usage" in path.read_bytes()
    assert not path.is_symlink()


def test_what_a_killed_process_left_goes_with_the_next_save(model, tmp_path):
    path = tmp_path / "usage[1].json"
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    names = [f"usage[1].json.{n}.part" for n in (killed.pid, 10**30, os.getppid(), "x", "")]
    names.append(f"usage1.json.{killed.pid}.part")
    for name in names:
        (tmp_path / name).touch()
    used(model, path).save()
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, *names[2:]])


FULL = OSError(errno.ENOSPC, "No space left")


@pytest.mark.parametrize(("error", "why"), [(FULL, "No space left"), (MemoryError(), "no memory")])
def test_a_failed_write_leaves_the_old_file_and_no_other(error, why, model, tmp_path, monkeypatch):
    path = tmp_path / "usage.json"
    used(model, path).save()
    before = path.read_bytes()
    usage = used(model, path)
    usage.saw([(0, 3)])

    def full(fd):
        raise error

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match=rf"usage\.json: cannot be written \({why}\)"):
        usage.save()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["usage.json"]
    with pytest.warns(UserWarning, match="cannot be written"):
        used(model, tmp_path / "nowhere" / "usage.json").save()


def edited(**changes):
    return lambda document: json.dumps(document | changes).encode()


def weights(value, layer=1, expert=2):
    def edit(document):
        document["weights"][layer][expert] = value
        return json.dumps(document).encode()

    return edit


HOSTILE = {  # (what the file holds, why it is ignored)
    "empty": (lambda d: b"", "Expecting value"),
    "truncated": (lambda d: json.dumps(d).encode()[:-9], "Expecting"),
    "binary": (lambda d: bytes(range(256)), "Expecting value"),
    "nested": (lambda d: b"[" * 4000, "nested too deeply"),
    "a list": (lambda d: b"[]", "not written by smoe-mlx"),
    "a config": (lambda d: b'{"model_type": "qwen3_moe"}', "not written by smoe-mlx"),
    "large": (lambda d: json.dumps(d).encode() + b" " * 9000, "larger than 4576 bytes"),
    "version": (edited(version=2), "version 2, not 1"),
    "other model": (edited(model="0" * 32), "other layers"),
    "no weights": (edited(weights=None), "another number of layers"),
    "layers": (edited(weights=[[0] * 5] * 2), "another number of layers"),
    "experts": (edited(weights=[[0] * 5] * 3), "bad weights for layer 1"),
    "no rows": (edited(weights=[5, 4, 6]), "bad weights for layer 0"),
    "negative": (weights(-1.0), "bad weights for layer 1"),
    "nan": (weights(float("nan")), "bad weights for layer 1"),
    "infinite": (weights(float("inf")), "bad weights for layer 1"),
    "vast": (weights(10**400), "too large"),
    "huge": (weights(1.1e12), "bad weights for layer 1"),
    "true": (weights(True), "bad weights for layer 1"),
    "text": (weights("1"), "bad weights for layer 1"),
}


@pytest.mark.parametrize("weight", [0, 1e12])
def test_the_bounds_of_a_weight_are_weights(model, tmp_path, weight):
    path = tmp_path / "usage.json"
    used(model, path).save()
    path.write_bytes(weights(weight)(json.loads(path.read_bytes())))
    usage = Usage(model.layouts, path)
    usage.load()
    assert usage.weight((1, 2)) == weight


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_damaged_or_foreign_file_is_ignored_and_left_alone(model, tmp_path, kind):
    path, (edit, why) = tmp_path / "usage.json", HOSTILE[kind]
    used(model, path).save()
    data = edit(json.loads(path.read_bytes()))
    path.write_bytes(data)
    usage = Usage(model.layouts, path)
    with pytest.warns(UserWarning, match=rf"usage\.json: no usage file of this model \(.*{why}"):
        usage.load()
    assert not used_in(usage)
    usage.saw([(0, 0)])
    usage.save()
    assert path.read_bytes() == data


def test_what_is_no_file_is_ignored(model, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.warns(UserWarning, match="no usage file"):
            Usage(model.layouts, path).load()


def test_usage_of_other_layers_is_another_model_s(model, tmp_path):
    path = tmp_path / "usage.json"
    used(model, path).save()
    with pytest.warns(UserWarning, match="other layers"):
        Usage(model.layouts[:2], path).load()


def test_auto_is_beside_the_model_or_else_in_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        assert find_usage_file("auto", folder) == folder / "smoe-usage.json"
    assert find_usage_file("auto", find_model("demo")).parent == tmp_path / "cache" / "smoe-mlx"
    monkeypatch.setattr(os, "access", lambda *_: False)
    files = {find_usage_file("auto", folder) for folder in folders}
    assert len(files) == 2
    for file in files:
        assert file.parent == tmp_path / "cache" / "smoe-mlx"
        assert file.parent.is_dir()
    assert find_usage_file(tmp_path / "mine", folders[0]) == tmp_path / "mine"


# ---- prewarming ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [LRU, LFU])
def test_prewarming_fills_free_slots_and_evicts_nothing(model, policy):
    cache = model.cache(5, 2, policy=policy)
    claim(cache, 0, [3])
    y, expected = held_sum(model, cache, 0, 3)
    waited = cache.reader.stats.wait_seconds
    assert cache.prewarm(KEYS) == cache.stats.prewarmed == 6
    assert cache.reader.stats.wait_seconds == waited  # no model did
    assert [in_memory(cache, i) for i in range(3)] == [{1, 3, 4}, {0, 3}, {0, 5}]
    for layer in range(3):
        model.assert_in_slots(cache, layer, in_memory(cache, layer))
    assert y.item() == expected
    assert (cache.stats.misses, cache.stats.hits, cache.stats.evictions) == (1, 0, 0)
    # They go first; with LRU, the least used before the others.
    for e, gone in ((0, (1, 3)), (2, (0, 1)), (1, (1, 0))):
        claim(cache, 0, [e])
        assert policy is LFU or gone[1] not in in_memory(cache, gone[0])
    assert 3 in in_memory(cache, 0)


def test_a_failed_prewarm_gives_its_slot_back(model):
    cache = model.cache(2, 2)
    model.reader.fail = ExpertReadError(errno.EIO, "injected")
    with pytest.raises(ExpertReadError):
        cache.prewarm(KEYS)
    model.reader.fail = None
    cache.check()
    assert cache.stats.prewarmed == 0
    claim(cache, 0, [0, 1])
    model.assert_in_slots(cache, 0, [0, 1])


def test_layers_with_room_for_all_are_left_to_themselves(model):
    cache = model.cache(9, 2)  # layers 0 and 1 have a slot for each expert
    assert cache.prewarm(KEYS) == 2
    assert cache.resident(0) is not None
    for layer in range(2):
        cache.resident(layer)
        model.assert_in_slots(cache, layer, range(COUNTS[layer]))


def test_prewarming_stops_when_a_layer_is_called(model, monkeypatch):
    """It is reading its second expert when a call comes, and reads no third."""
    cache = model.cache(8, 2)
    reads, reading, go, called = 0, threading.Event(), threading.Event(), threading.Event()
    read = model.reader.read

    def gated(requests):
        nonlocal reads
        reads += 1
        if reads == 2:
            reading.set()
            assert go.wait(10)
        read(requests)

    monkeypatch.setattr(model.reader, "read", gated)
    # Giving way takes as long as the call, once that waits: no test of the machine's speed.
    monkeypatch.setattr(
        experts_module.time, "sleep", lambda _: called.wait(10) if go.is_set() else None
    )
    counts = []
    thread = threading.Thread(target=lambda: counts.append(cache.prewarm(KEYS)))
    thread.start()
    assert reading.wait(10)

    def call():
        claim(cache, 0, [0])
        called.set()

    caller = threading.Thread(target=call)
    caller.start()
    assert not called.wait(0.05)  # it waits for the read that is under way, and for no other
    go.set()
    thread.join(10)
    caller.join(10)
    assert counts == [2]
    assert reads == 2
    assert in_memory(cache, 0) == {0, 4}
    model.assert_in_slots(cache, 0, [0, 4])
    assert cache.prewarm(KEYS) > 0  # the next idle time


def test_prewarming_beside_generation_changes_no_token(tiny, tmp_path):
    folder, prompt = tiny("qwen3_moe", "affine"), random_tokens(12)
    expected = generated(generate_step, resident(folder), prompt)
    config = smoe_mlx.StreamingConfig(slots=0.6, usage=tmp_path / "u", debug=True)
    model = load_model(folder, config=config)[0]
    cache = streaming_of(model).cache
    generated(smoe_generate_step, model, prompt)
    stop, errors = threading.Event(), []

    def idle():
        """At the worst of times, over and over, and with slots to fill each time."""
        while not stop.is_set():
            try:
                smoe_mlx.prewarm(model)
                with cache.lock:
                    for bank in cache._banks:
                        if not bank.free and not cache._pending and not bank.bets:
                            cache._evict(bank, cache._claimed)
            except Exception as e:
                errors.append(e)
                return

    thread = threading.Thread(target=idle)
    before = cache.stats.prewarmed
    thread.start()
    try:
        for _ in range(4):
            got = generated(smoe_generate_step, model, prompt)
            assert got[0] == expected[0]
            assert all(map(same_bits, got[1], expected[1]))
    finally:
        stop.set()
        thread.join(10)
    assert not errors
    assert cache.stats.prewarmed > before


# ---- models --------------------------------------------------------------------------------------


def generated(step, model, prompt, n=16):
    out = list(step(mx.array(prompt), model, max_tokens=n))
    return [t for t, _ in out], [lp for _, lp in out]


@pytest.mark.parametrize("hot", [0, 2])
@pytest.mark.parametrize("arch", ["qwen3_moe", "deepseek", "gpt_oss"])
def test_warm_and_pinned_models_compute_the_same_bits(arch, hot, tiny, tmp_path):
    folder = tiny(arch, "affine")
    prompts = [random_tokens(n, seed=n) for n in (20, 3)]
    expected = [generated(generate_step, resident(folder), p) for p in prompts]
    path = tmp_path / "usage.json"
    for start in ("cold", "warm"):
        config = smoe_mlx.StreamingConfig(slots=0.5, usage=path, hot_per_layer=hot, debug=True)
        model = load_model(folder, config=config)[0]
        cache = streaming_of(model).cache
        for thread in threading.enumerate():
            if thread.name == "smoe-prewarm":
                thread.join(10)
        assert any(cache.usage._weights.values()) == (start == "warm")
        there = {(i, e) for i in range(len(cache.layouts)) for e in in_memory(cache, i)}
        assert there == set(cache.usage.ranked()[: cache.slots])
        for prompt, (tokens, logprobs) in zip(prompts, expected, strict=True):
            got = generated(smoe_generate_step, model, prompt)
            assert got[0] == tokens
            assert all(map(same_bits, got[1], logprobs))
        assert cache.stats.evictions > 0
        pinned = [key for bank in cache._banks for key in bank.pinned]
        assert len(pinned) == hot * len(cache.layouts)
        assert smoe_mlx.stats(model).prewarmed == cache.stats.prewarmed
        assert path.exists()


def test_pins_follow_what_is_used(model):
    cache = model.cache(5, 3)
    cache.pin_only([(0, 1), (1, 2), (2, 0)])
    cache.pin_only([(0, 1), (1, 3), (2, 5), (2, 4)])
    assert [bank.pinned for bank in cache._banks] == [{(0, 1), (1, 3)}, {(2, 5), (2, 4)}]
    with pytest.raises(BudgetError):
        cache.pin_only([(2, e) for e in range(4)])
    cache.pin_only([])
    assert not any(bank.pinned for bank in cache._banks)
    cache.check()


def test_pins_follow_what_is_used_after_an_interrupt(model):
    cache = model.cache(5, 3)
    cache.pin_only([(0, 1), (1, 3), (2, 0)])
    cache.unpin(0, [1])  # and an interrupt came
    with cache.lock:
        cache._recover()
    cache.pin_only([(0, 1), (2, 0)])
    assert [bank.pinned for bank in cache._banks] == [{(0, 1)}, {(2, 0)}]


def test_pins_leave_room_for_a_token(tiny, tmp_path):
    folder = tiny("qwen3_moe", "affine")
    least = smoe_mlx.plan(folder, slots=1.0)
    layers, top_k = len(least.banks[0].layers), least.expert_reads // len(least.banks[0].layers)
    slots = 2 * layers + top_k
    options = {"slots": slots, "debug": True}
    config = smoe_mlx.StreamingConfig(hot_per_layer=2, **options)
    model = load_model(folder, config=config)[0]
    prompt = random_tokens(9)
    expected = generated(generate_step, resident(folder), prompt)
    for pins in (0, 2 * layers):  # the first time, nothing is known
        assert generated(smoe_generate_step, model, prompt)[0] == expected[0]
        assert sum(len(b.pinned) for b in streaming_of(model).cache._banks) == pins
    with pytest.raises(BudgetError, match=r"hot_per_layer=3 .* at most 2"):
        load_model(folder, config=smoe_mlx.StreamingConfig(hot_per_layer=3, **options))
    for value in (-1, 0.5):
        with pytest.raises(ValueError, match="hot_per_layer"):
            smoe_mlx.StreamingConfig(hot_per_layer=value)
    with pytest.raises(ValueError, match="usage"):
        smoe_mlx.StreamingConfig(usage=True)


def test_a_model_loads_with_a_damaged_usage_file_and_remembers_nothing_unasked(tiny, tmp_path):
    folder, path = tiny("qwen3_moe", "affine"), tmp_path / "usage.json"
    path.write_bytes(b"\0" * 100)
    with pytest.warns(UserWarning, match="no usage file"):
        model = load_model(folder, config=smoe_mlx.StreamingConfig(slots=0.5, usage=path))[0]
    generated(smoe_generate_step, model, random_tokens(3))
    assert path.read_bytes() == b"\0" * 100
    before = sorted(os.listdir(folder))
    model = load_model(folder, config=smoe_mlx.StreamingConfig(slots=0.5))[0]
    generated(smoe_generate_step, model, random_tokens(3))
    assert sorted(os.listdir(folder)) == before
    assert streaming_of(model).cache.usage is None


@pytest.mark.parametrize(("slots", "some"), [(0.9, True), (0.2, False), (1.0, False)])
def test_idle_time_is_used_where_it_pays_also_without_a_usage_file(tiny, slots, some):
    folder, prompt = tiny("qwen3_moe", "affine"), random_tokens(5)
    model = load_model(folder, config=smoe_mlx.StreamingConfig(slots=slots, debug=True))[0]
    plan = smoe_mlx.stats(model).plan
    assert some == (2 * plan.expert_reads <= plan.slots < plan.num_experts)
    assert smoe_mlx.prewarm(model) == (plan.slots if some else 0)
    cache = streaming_of(model).cache
    if some:  # some of each layer
        loaded = [int((cache.table(i) >= 0).sum()) for i in range(len(cache.layouts))]
        assert max(loaded) - min(loaded) <= 1
    expected = generated(generate_step, resident(folder), prompt)
    got = generated(smoe_generate_step, model, prompt)
    assert got[0] == expected[0]
    assert all(map(same_bits, got[1], expected[1]))


def test_a_model_loads_without_a_thread_for_idle_time(tiny, tmp_path, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    ends = []
    monkeypatch.setattr(atexit, "register", ends.append)
    monkeypatch.setattr(atexit, "unregister", ends.remove)
    monkeypatch.setattr(threading.Thread, "start", start)
    config = smoe_mlx.StreamingConfig(slots=0.9, usage=tmp_path / "u")
    model = load_model(tiny("qwen3_moe", "affine"), config=config)[0]
    assert not ends
    assert generated(smoe_generate_step, model, random_tokens(5))[0]


def test_usage_counts_what_the_router_chose(tiny, tmp_path):
    """Against a trace of the same tokens."""
    folder = tiny("qwen3_moe", "affine")
    config = smoe_mlx.StreamingConfig(slots=0.5, usage=tmp_path / "u", debug=True)
    model = load_model(folder, config=config)[0]
    cache = streaming_of(model).cache
    counts = np.zeros((len(cache.layouts), cache.layouts[0].num_experts), int)
    cache.trace = lambda layer, ids, *_: np.add.at(counts[layer], ids.ravel(), 1)
    for token in random_tokens(30):
        mx.eval(model(mx.array([[token]])))
    cache.settle()
    for layer, row in enumerate(counts):
        for e, n in enumerate(row):
            assert cache.usage.weight((layer, e)) == pytest.approx(n, rel=0.02)
