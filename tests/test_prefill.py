"""Layer-major prefill computes what mlx-lm's chunk by chunk computes, bit for bit, and reads each
expert once."""

import copy
import dataclasses
import itertools
import os
import shutil
import threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import (
    CONFIGS,
    STREAMED,
    corrupt_expert,
    random_model,
    random_tokens,
    resident,
    same_bits,
    save_checkpoint,
)
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step as mlx_generate_step
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.sample_utils import make_logits_processors

import smoe_mlx
from smoe_mlx.forward.prefill import prefill
from smoe_mlx.generate import generate_step
from smoe_mlx.load import load_model

# One of each kind of cache and of what else is peculiar.
KINDS = ["qwen3_moe", "gpt_oss", "qwen3_next", "llama4", "longcat_flash_ngram", "nemotron_h"]


def streamed(folder, slots=0.8, prefill_step=16, **options):
    options = {"prefill_step": prefill_step, "threads": 2, "debug": True} | options
    config = smoe_mlx.StreamingConfig(slots=slots, **options)
    return load_model(folder, config=config)[0]


def smallest(folder) -> int:
    return len(smoe_mlx.plan(folder, slots=1.0).banks)


def by_mlx_lm(model, prompt, cache, width):
    """As mlx-lm's generate_step: chunks, then the last token by itself."""
    last = len(prompt) - 1
    for i in range(0, last, width):
        model(mx.array([prompt[i : min(i + width, last)]]), cache=cache)
        mx.eval([c.state for c in cache])
    return model(mx.array([prompt[last:]]), cache=cache)[:, -1]


def layer_major(model, prompt, cache, width, progress=lambda done, total: None):
    return prefill(
        model, model._streaming, mx.array(prompt), cache, width, lambda cache: None, progress
    )


def turns(model, run, lengths, width, decode):
    """Some turns of a conversation on one cache: all logits, and the states of the cache."""
    cache, out = make_prompt_cache(model), []
    for n in lengths:
        logits = run(model, random_tokens(n, seed=n), cache, width)
        out.append(logits)
        mx.eval(logits)
        out += [a for _, a in tree_flatten([c.state for c in cache]) if isinstance(a, mx.array)]
        out = [mx.array(a) for a in out]
        for _ in range(decode):
            logits = model(mx.argmax(logits, axis=-1)[None], cache=cache)[:, -1]
            mx.eval(logits)
            out.append(logits)
    return out


def all_same(a, b):
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype and mx.array_equal(x, y, equal_nan=True).item()
        for x, y in zip(a, b, strict=True)
    )


def assert_layer_major(model):
    s = smoe_mlx.stats(model)
    assert s.prefill_fallback == ""
    assert s.prefill_passes > 0


# ---- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", STREAMED)
def test_every_architecture(arch, tiny):
    """Windows are 16 wide in the tiny configs; 16 tokens are decoded after the first turn."""
    folder = tiny(arch, "affine")
    reference = resident(folder)
    for slots, lengths, width, decode in (
        (0.8, (150, 33), 64, 16),
        (smallest(folder), (49,), 16, 3),
    ):
        expected = turns(reference, by_mlx_lm, lengths, width, decode)
        model = streamed(folder, slots)
        assert all_same(expected, turns(model, layer_major, lengths, width, decode)), slots
        assert_layer_major(model)


@pytest.mark.parametrize("arch", KINDS)
def test_lengths_that_do_and_do_not_fill_chunks_and_windows(arch, tiny):
    folder = tiny(arch, "affine")
    reference, model = resident(folder), streamed(folder, 0.5)
    for length in (1, 2, 16, 17, 18, 33, 66):
        expected = turns(reference, by_mlx_lm, (length,), 16, 1)
        assert all_same(expected, turns(model, layer_major, (length,), 16, 1)), length


@pytest.mark.parametrize("arch", ["qwen3_moe", "nemotron_h", "gpt_oss"])
def test_float_experts(arch, tiny):
    folder = tiny(arch, None)
    expected = turns(resident(folder), by_mlx_lm, (70,), 32, 2)
    for slots in (smallest(folder), 0.8):
        assert all_same(expected, turns(streamed(folder, slots), layer_major, (70,), 32, 2))


def test_a_corrupted_expert_is_noticed(tiny, tmp_path):
    """The negative control."""
    for slots in (0.8, 1):
        folder = shutil.copytree(tiny("qwen3_moe", "affine"), tmp_path / str(slots))
        expected = turns(streamed(folder, slots), layer_major, (70,), 32, 0)
        corrupt_expert(folder, 3)
        assert not all_same(expected, turns(streamed(folder, slots), layer_major, (70,), 32, 0))


OPTIONS = {
    "quantised cache": {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 20},
    "rotating cache": {"max_kv_size": 24},
    "logits processors": {"logits_processors": make_logits_processors(repetition_penalty=1.5)},
}


@pytest.mark.parametrize("slots", [0.8, 1])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_generate_step(option, slots, tiny):
    folder, prompt = tiny("qwen3_moe", "affine"), mx.array(random_tokens(61))
    options = {"max_tokens": 16, "prefill_step_size": 15, **OPTIONS[option]}
    expected = list(mlx_generate_step(prompt, resident(folder), **options))
    model = streamed(folder, slots)
    got = list(generate_step(prompt, model, **options))
    assert [t for t, _ in got] == [t for t, _ in expected]
    assert all(same_bits(a, b) for (_, a), (_, b) in zip(expected, got, strict=True))
    assert_layer_major(model)


def in_passes(model, tokens):
    """Let so many tokens go at once, in chunks of 16."""
    streaming = model._streaming
    states = {"prompt_states": max(0, tokens - 16) * 100, "token_state": 100, "chunk_graph": 0}
    plan = dataclasses.replace(streaming.plan, **states)
    model._streaming = dataclasses.replace(streaming, plan=plan)
    return model


def test_a_prompt_beyond_the_plan_goes_in_passes(tiny):
    folder = tiny("gpt_oss", "affine")
    expected = turns(resident(folder), by_mlx_lm, (150, 40), 16, 2)
    for tokens, passes in ((8, 10 + 3), (32, 5 + 2), (40, 5 + 1), (150, 1 + 1)):
        model = in_passes(streamed(folder, 0.8), tokens)
        assert all_same(expected, turns(model, layer_major, (150, 40), 16, 2))
        assert smoe_mlx.stats(model).prefill_passes == passes


# ---- what is read --------------------------------------------------------------------------------


def with_layers(folder, layers):
    """Layers of 16 experts and little attention, for long prompts."""
    config = copy.deepcopy(CONFIGS["qwen3_moe"])
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": layers,
               "num_experts": 16, "hidden_size": 64, "moe_intermediate_size": 32}  # fmt: skip
    return save_checkpoint(folder / "model", random_model(config), config)


@pytest.fixture(scope="module")
def slim(tmp_path_factory):
    return with_layers(tmp_path_factory.mktemp("slim"), 3)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return with_layers(tmp_path_factory.mktemp("deep"), 5)


def routed(model, prompt, width, monkeypatch):
    """What mlx-lm's own forward routes to: for each layer, how often each expert."""
    seen = {}
    call = SwitchGLU.__call__

    def watch(self, x, indices):
        seen.setdefault(id(self), []).append(indices)
        return call(self, x, indices)

    with monkeypatch.context() as m:
        m.setattr(SwitchGLU, "__call__", watch)
        cache = make_prompt_cache(model, max_kv_size=64)
        mx.eval(by_mlx_lm(model, prompt, cache, width))
    *layers, last = seen.values()
    layers.append(last[-1:])  # of the last layer, only the last token is needed
    return [np.bincount(np.concatenate([np.array(i).ravel() for i in x])) for x in layers]


@pytest.mark.parametrize("slots", [20, 8])
@pytest.mark.parametrize("length", [16, 512, 4096, 16384])
def test_no_more_bytes_than_those_of_the_distinct_experts(length, slots, slim, monkeypatch):
    prompt, width = random_tokens(length), 1024
    model = streamed(slim, slots, context=20_000, prefill_step=width)
    before = smoe_mlx.stats(model).bytes_read
    cache = make_prompt_cache(model, max_kv_size=64)  # little attention, to be quick
    mx.eval(layer_major(model, prompt, cache, width))
    got = smoe_mlx.stats(model)
    if length <= 4096:
        counts = routed(resident(slim), prompt, width, monkeypatch)
        experts = [np.count_nonzero(x) for x in counts]
    else:  # all of them, as with 4096 tokens
        experts = [16, 16, 2]
    size = model._streaming.cache.layouts[0].expert_nbytes
    assert got.bytes_read - before == sum(experts) * size
    assert got.misses + got.bets.used == sum(experts)
    assert got.layers[2].misses == 2
    assert (got.waves > got.calls) == (slots < 16)
    assert got.prefill_passes == 1


class WatchedHead(nn.Module):
    """An LM head that knows for how many rows it was evaluated, not just built into a graph."""

    def __init__(self, head):
        super().__init__()
        self.head, self.built = head, []

    def __call__(self, x):
        flag = mx.zeros((1,), mx.uint8)
        mx.eval(flag)
        zero = flag == 0  # still to be evaluated, together with the logits
        self.built.append((x.shape[-2], flag, zero))
        return mx.depends(self.head(x), [zero])

    def rows(self):
        for _, flag, _ in self.built:
            np.frombuffer(memoryview(flag), np.uint8)[:] = 1
        return [n for n, _, zero in self.built if zero.item()]


@pytest.mark.parametrize("slots", [20, 8])
def test_positions_that_emit_nothing_take_no_head_no_sampler_and_no_last_experts(slots, slim):
    model, prompt = streamed(slim, slots, prefill_step=64), mx.array(random_tokens(300))
    model.lm_head = head = WatchedHead(model.lm_head)
    samples = []

    def sampler(logprobs):
        samples.append(logprobs.shape)
        return mx.argmax(logprobs, axis=-1)

    list(generate_step(prompt, model, max_tokens=1, sampler=sampler))
    assert len(head.built) == 6  # chunks
    assert head.rows() == [1]
    assert samples == [(1, 512)]
    got = smoe_mlx.stats(model)
    assert got.layers[0].hits + got.layers[0].misses == 16  # hits: read ahead
    assert got.layers[2].hits + got.layers[2].misses == 2  # one token's
    reference, head = resident(slim), WatchedHead(None)  # the negative control
    head.head, reference.lm_head = reference.lm_head, head
    mx.eval(reference(prompt[None]))
    assert head.rows() == [300]


@pytest.mark.parametrize("slots", [20, 8])
def test_a_plain_call_reads_each_expert_once(slots, slim):
    model, tokens = streamed(slim, slots), mx.array([random_tokens(300)])
    for _ in range(2):
        before = smoe_mlx.stats(model)
        mx.eval(model(tokens))
        got = smoe_mlx.stats(model)
        for layer, (a, b) in enumerate(zip(before.layers, got.layers, strict=True)):
            assert b.hits - a.hits + b.misses - a.misses == 16, layer
            assert b.calls - a.calls == 1
        size = model._streaming.cache.layouts[0].expert_nbytes
        assert got.bytes_read - before.bytes_read == (got.misses - before.misses) * size


@pytest.mark.parametrize("slots", [18, 28, 60])
@pytest.mark.parametrize("length", [16, 64, 600, 4096])
def test_the_next_layer_is_read_while_one_computes(length, slots, deep, slow_disk, monkeypatch):
    """As much as there is room for: still each expert is read once, and the bits are the same."""
    prompt, width = random_tokens(length), 512
    model, reference = streamed(deep, slots, context=5000, prefill_step=width), resident(deep)
    logits = layer_major(model, prompt, make_prompt_cache(model, max_kv_size=64), width)
    cache = make_prompt_cache(reference, max_kv_size=64)
    assert same_bits(logits, by_mlx_lm(reference, prompt, cache, width))
    used = [np.count_nonzero(x) for x in routed(reference, prompt, width, monkeypatch)]
    got = smoe_mlx.stats(model)
    assert model._streaming.cache.reader.stats.requests == 3 * sum(used)  # tensors
    assert got.misses + got.bets.used == sum(used)
    assert got.bets.used + got.bets.late == got.bets.issued
    if length >= 600:
        room = [slots - {18: 0, 28: 5, 60: 25}[slots] - n for n in used[:3]]  # less what is kept
        ahead = used[0] + sum(room)  # all of the first layer: nothing computes beside it
        assert got.bets.issued == ahead if slots < 60 else got.bets.issued > 40
    assert got.bets.issued > 0 or length == 16


def test_reads_of_the_next_layer_begin_before_this_one_is_computed(deep, slow_disk):
    model = streamed(deep, 28, context=1000, prefill_step=100)
    cache, chunks, steps = model._streaming.cache, 4, itertools.count(1)
    begun = [threading.Event() for _ in cache.layouts]
    real, place = cache.reader._read_one, {}
    for i, layout in enumerate(cache.layouts):
        for e in range(16):
            for file, offset in zip(layout.file_ids, layout.offsets, strict=True):
                place[file[e], offset[e]] = i

    def read_one(read):
        begun[place[read.file, read.offset]].set()
        real(read)

    cache.reader._read_one = cache.reader._streamer.read_one = read_one
    waited = []

    def progress(done, total):
        stop, chunk = divmod(next(steps) - 1, chunks)
        if 1 <= stop <= 3 and chunk == 0:  # the other chunks have still to pass layer stop - 1
            waited.append(begun[stop].wait(10))
            assert not begun[stop + 1].is_set()

    layer_major(model, random_tokens(300), make_prompt_cache(model), 100, progress)
    assert waited == [True] * 3


def test_what_a_chunk_needs_is_read_while_the_next_one_comes_up(deep, slow_disk, monkeypatch):
    """No gate is asked: reads begin when the first chunk's routing is known, and are all needed."""
    model, prompt = streamed(deep, 28, context=1000, prefill_step=100), random_tokens(300)
    for layer in model.layers:
        layer.mlp.switch_mlp.bet((), hits_first=True)
    cache, chunks, steps, early = model._streaming.cache, 4, itertools.count(1), []

    def progress(done, total):
        stop, chunk = divmod(next(steps) - 1, chunks)
        if stop < 5 and chunk == 2:  # the last token has still to come up to this layer
            early.append(len([key for key in cache._bank_of[stop].bets if key[0] == stop]))

    logits = layer_major(model, prompt, make_prompt_cache(model, max_kv_size=64), 100, progress)
    reference = resident(deep)
    expected = by_mlx_lm(reference, prompt, make_prompt_cache(reference, max_kv_size=64), 100)
    assert same_bits(logits, expected)
    used = [np.count_nonzero(x) for x in routed(reference, prompt, 100, monkeypatch)]
    assert early[0] == used[0]  # no layer computes beside it
    assert [0 < n <= 28 - u for n, u in zip(early[1:4], used[:3], strict=True)] == [True] * 3
    assert cache.reader.stats.requests == 3 * sum(used)  # tensors
    assert smoe_mlx.stats(model).bets.wasted == 0


def test_no_expert_of_the_next_layer_goes_for_another_of_it(deep, slow_disk, monkeypatch):
    model, prompt = streamed(deep, 28, context=1000, prefill_step=256), random_tokens(600)
    cache = model._streaming.cache
    with cache.lock:
        cache.claim(1, range(12))  # the only ones that could make room
    layer_major(model, prompt, make_prompt_cache(model, max_kv_size=64), 256)
    counts = routed(resident(deep), prompt, 256, monkeypatch)
    used = sum(np.count_nonzero(x) for x in counts)
    assert cache.reader.stats.requests == 3 * (used + np.count_nonzero(counts[1][:12] == 0))


def test_what_is_read_ahead_is_not_judged_as_bets_on_tokens_are(deep, slow_disk):
    model, prompt = streamed(deep, 28, context=1000, prefill_step=128), random_tokens(300)
    judges = model._streaming.cache._judges
    for score in (0.0, 0.9):  # not asked, and told nothing
        for judge in judges:
            judge.score = score
        before = smoe_mlx.stats(model).bets.issued
        layer_major(model, prompt, make_prompt_cache(model), 128)
        assert smoe_mlx.stats(model).bets.issued > before
        assert [(judge.score, judge._calls) for judge in judges] == [(score, 0)] * 5


@pytest.mark.parametrize("ranked", [True, False])
def test_a_gate_that_guesses_wrong_is_not_believed_for_long(ranked, deep, slow_disk, monkeypatch):
    prompt = [7] * 30
    counts = routed(resident(deep), prompt, 16, monkeypatch)
    model = streamed(deep, 28, context=1000, prefill_step=16)
    for layer in range(4):
        wrong = int(np.argmin(counts[layer + 1]))
        assert counts[layer + 1][wrong] == 0

        def predict(x, k, wrong=wrong):
            return mx.full((*x.shape[:-1], k if ranked else 2), wrong)

        model.layers[layer].mlp.switch_mlp.bet([(layer + 1, predict)], hits_first=True)
    logits = layer_major(model, prompt, make_prompt_cache(model), 16)
    reference = resident(deep)
    assert same_bits(logits, by_mlx_lm(reference, prompt, make_prompt_cache(reference), 16))
    bets = smoe_mlx.stats(model).bets
    assert bets.issued - bets.used - bets.late == 3  # late: needed, on a busy machine


def test_chunks_leave_nothing_behind(tiny):
    """No chunk keeps the cache as it was then: that would be quadratic in the prompt."""
    model = streamed(tiny("qwen3_moe", "affine"), 0.6, context=2056, prefill_step=32)
    plan = smoe_mlx.stats(model).plan
    prompt, cache = random_tokens(2048), make_prompt_cache(model)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(layer_major(model, prompt, cache, 32))
    assert mx.get_peak_memory() - before <= plan.total - plan.backbone


def test_slots_that_are_given_up_meanwhile_are_noticed(tiny):
    model = streamed(tiny("qwen3_moe", "affine"), 0.6)
    experts, prompt, cache = model._streaming.cache, random_tokens(40), make_prompt_cache(model)

    def progress(done, total):
        for bank in experts._banks:
            experts._abandon([bank])

    with pytest.raises(RuntimeError, match="taken away"):
        layer_major(model, prompt, cache, 16, progress)
    assert all(c.offset == 0 for c in cache)
    reference = resident(tiny("qwen3_moe", "affine"))
    expected = by_mlx_lm(reference, prompt, make_prompt_cache(reference), 16)
    assert same_bits(expected, layer_major(model, prompt, cache, 16))


@pytest.mark.parametrize(("threads", "kept"), [(0, 2), (2, 1)])
def test_the_most_used_experts_stay(threads, kept, deep, monkeypatch):
    """(28 - 16) // 5 of each layer; where experts are read ahead, half of that."""
    model, prompt = streamed(deep, 28, threads=threads), random_tokens(300)
    cache = make_prompt_cache(model, max_kv_size=64)
    mx.eval(layer_major(model, prompt, cache, 64))
    counts = routed(resident(deep), prompt, 64, monkeypatch)
    for layer in range(4):
        most = np.argsort(-counts[layer], kind="stable")[:kept]
        assert (model._streaming.cache.table(layer)[most] >= 0).all(), layer


@pytest.mark.parametrize("slots", [28, 40, 60])
def test_no_expert_that_was_kept_goes_for_one_that_is_read_ahead(
    slots, deep, slow_disk, monkeypatch
):
    model, prompt = streamed(deep, slots, context=1000), random_tokens(300)
    cache = make_prompt_cache(model, max_kv_size=64)
    mx.eval(layer_major(model, prompt, cache, 64))
    counts = routed(resident(deep), prompt, 64, monkeypatch)
    for layer in range(4):
        most = np.argsort(-counts[layer], kind="stable")[: {28: 1, 40: 1, 60: 5}[slots]]
        assert (model._streaming.cache.table(layer)[most] >= 0).all(), layer
    assert smoe_mlx.stats(model).bets.issued > 16


# ---- faults --------------------------------------------------------------------------------------


def leaves(cache):
    """All that counts of what a cache holds, arrays copied. (KVCache keeps spare rows.)"""
    out = []
    for c in cache:
        if isinstance(c, CacheList):
            out += leaves(c.caches)
        elif type(c) is KVCache and not c.empty():
            out += [np.array(a) for a in c.keys_and_values()]
        else:
            for _, a in tree_flatten(c.state):
                out.append(np.array(a) if isinstance(a, mx.array) else a)
    return out


def unchanged(before, cache):
    now = leaves(cache)
    return len(now) == len(before) and all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        for a, b in zip(before, now, strict=True)
    )


class Cut(BaseException):
    pass


def attempt_again_and_again(folder, slots, arm, length=40):
    """Run a second turn that fails at its 1st, 2nd, ... occasion, until it does not. Each time the
    cache must be as it was; at last the result must be right. Returns the number of failures."""
    reference, model = resident(folder), streamed(folder, slots)
    first, second = random_tokens(21, seed=1), random_tokens(length, seed=2)
    mine = make_prompt_cache(model)
    mx.eval(layer_major(model, first, mine, 16))
    for at in itertools.count(1):
        before, entries = leaves(mine), list(mine)
        progress = arm(at)
        try:
            logits = layer_major(model, second, mine, 16, progress)
            break
        except (Cut, smoe_mlx.ExpertReadError):
            assert unchanged(before, mine), at
            assert all(a is b for a, b in zip(entries, mine, strict=True))
            model._streaming.cache.check()
    arm(0)
    cache = make_prompt_cache(reference)
    by_mlx_lm(reference, first, cache, 16)
    assert same_bits(by_mlx_lm(reference, second, cache, 16), logits)
    assert unchanged(leaves(cache), mine)
    assert_layer_major(model)
    return at - 1


def failing_reads(monkeypatch, every):
    """The disk is gone from a certain call on. (A guess that fails once is made good later.)"""
    real, calls = os.preadv, [0, 0]

    def preadv(fd, buffers, offset, *flags):
        calls[0] += 1
        if 0 < calls[1] <= calls[0]:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset, *flags)

    def arm(at):
        calls[:] = 0, every * (at - 1) + 1  # not every read: there are hundreds
        return lambda done, total: None

    monkeypatch.setattr(os, "preadv", preadv)
    return arm


def cancelling(at):
    calls = itertools.count(1)

    def progress(done, total):
        if next(calls) == 3 * at - 2:
            raise Cut

    return progress


@pytest.mark.parametrize("slots", [0.5, 2])
@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v32", "llama4"])
def test_a_failed_read_leaves_the_cache_as_it_was(arch, slots, tiny, monkeypatch):
    arm = failing_reads(monkeypatch, every=7)
    assert attempt_again_and_again(tiny(arch, "affine"), slots, arm) >= 1


@pytest.mark.parametrize("slots", [0.5, 2])
@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v32", "llama4"])
def test_a_cancelled_prompt_leaves_the_cache_as_it_was(arch, slots, tiny):
    assert attempt_again_and_again(tiny(arch, "affine"), slots, cancelling) >= 3
    # in place
    assert attempt_again_and_again(tiny(arch, "affine"), slots, cancelling, length=1) >= 1


@pytest.mark.parametrize("slots", [20, 40])
def test_failures_while_the_next_layer_is_read(slots, deep, slow_disk, monkeypatch):
    assert attempt_again_and_again(deep, slots, cancelling, length=70) >= 3
    assert attempt_again_and_again(deep, slots, failing_reads(monkeypatch, every=9), 70) >= 3


def test_passes_that_were_completed_stay(tiny):
    folder, prompt = tiny("gpt_oss", "affine"), random_tokens(100)
    model = in_passes(streamed(folder, 0.8), 32)
    cache = make_prompt_cache(model)

    def progress(done, total):
        if done >= 70:
            raise Cut

    with pytest.raises(Cut):
        layer_major(model, prompt, cache, 16, progress)
    assert [c.offset for c in cache] == [64] * len(cache)
    reference = resident(folder)
    other = make_prompt_cache(reference)
    expected = by_mlx_lm(reference, prompt, other, 16)
    assert same_bits(expected, layer_major(model, prompt[64:], cache, 16))


def test_a_quantised_cache_is_given_back_whole(tiny):
    folder, prompt = tiny("qwen3_moe", "affine"), mx.array(random_tokens(61))
    options = {"max_tokens": 4, "prefill_step_size": 15, **OPTIONS["quantised cache"]}
    model = streamed(folder, 0.8)
    expected = list(generate_step(prompt, model, **options))
    for at in (2, 5, 9):
        cache, calls = make_prompt_cache(model), itertools.count()

        def progress(done, total, calls=calls, at=at):
            if next(calls) == at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            list(
                generate_step(
                    prompt, model, prompt_cache=cache, prompt_progress_callback=progress, **options
                )
            )
        assert all(c.empty() or c.offset == 0 for c in cache)
    got = list(generate_step(prompt, model, prompt_cache=make_prompt_cache(model), **options))
    assert all(same_bits(a, b) for (_, a), (_, b) in zip(expected, got, strict=True))


def test_a_model_that_evaluates_in_its_forward_goes_chunk_by_chunk(tiny, monkeypatch):
    folder = tiny("qwen3_moe", "affine")
    expected = turns(resident(folder), by_mlx_lm, (70, 20), 32, 2)
    model = streamed(folder, 0.8)
    layer = type(model.layers[0])
    call = layer.__call__

    def impatient(self, *args, **kwargs):
        y = call(self, *args, **kwargs)
        mx.eval(y)
        return y

    monkeypatch.setattr(layer, "__call__", impatient)
    assert all_same(expected, turns(model, layer_major, (70, 20), 32, 2))
    got = smoe_mlx.stats(model)
    assert "evaluates" in got.prefill_fallback
    assert "evaluates" in str(got)
    assert got.prefill_passes == 0


def test_another_thread_waits_and_both_are_right(tiny):
    folder, prompt = tiny("qwen3_moe", "affine"), random_tokens(70)
    expected = turns(resident(folder), by_mlx_lm, (70,), 16, 0)[0]
    model = streamed(folder, 0.6)
    out = []

    def other():
        logits = layer_major(model, prompt, make_prompt_cache(model), 16)
        mx.eval(logits)
        out.append(logits)

    thread = threading.Thread(target=other)

    def progress(done, total):
        if done > 10 and not thread.ident:
            thread.start()

    got = layer_major(model, random_tokens(70, seed=70), make_prompt_cache(model), 16, progress)
    thread.join()
    assert same_bits(got, expected)
    reference = resident(folder)
    assert same_bits(out[0], by_mlx_lm(reference, prompt, make_prompt_cache(reference), 16))


def test_progress(tiny):
    folder, prompt = tiny("qwen3_moe", "affine"), mx.array(random_tokens(60))
    for tokens in (16, 60):
        model, seen = in_passes(streamed(folder, 2), tokens), []
        list(
            generate_step(
                prompt,
                model,
                max_tokens=1,
                prefill_step_size=16,
                prompt_progress_callback=lambda *a, seen=seen: seen.append(a),
            )
        )
        assert seen[0] == (0, 60)
        assert seen[-1] == (60, 60)
        assert seen == sorted(seen)
        assert all(done < 60 for done, _ in seen[:-1])
        assert len(seen) > 2 + 5 * 3  # after each chunk of each layer, and before waves
