"""Speculative decoding: the same text as without drafts, and drafts only where they pay."""

import contextlib
import random
import sys
import threading
from array import array

import mlx.core as mx
import mlx_lm
import pytest
from conftest import STREAMED, random_tokens, resident
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step as mlx_generate_step
from mlx_lm.models.cache import CacheList, can_trim_prompt_cache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import smoe_mlx
from smoe_mlx.generate import speculative_generate_step
from smoe_mlx.load import load_model
from smoe_mlx.speculative import TRY_EVERY, DraftModel, Payoff, look_up


@pytest.fixture
def always(monkeypatch):
    """Drafts are used whether they pay or not."""
    monkeypatch.setattr(Payoff, "allows", lambda self: True)


@pytest.fixture
def draft(monkeypatch, always):
    """draft(text): drafts are the right ones, but each fifth token of the text is drafted wrong."""

    def say(text):
        def propose(tokens, n, match):
            at = range(len(tokens), min(len(tokens) + n, len(text)))
            return [text[i] ^ (i % 5 == 0) for i in at]

        monkeypatch.setattr(sys.modules["smoe_mlx.generate"], "look_up", propose)

    return say


def streamed(folder, slots=0.5):
    return load_model(folder, config=smoe_mlx.StreamingConfig(slots=slots, debug=True))[0]


def noisy(folder, scale=0.02):
    """The resident model with some noise on its weights: it drafts well, but not perfectly."""
    model = resident(folder)
    mx.random.seed(1)
    model.update(
        tree_unflatten(
            [
                (k, v + scale * mx.abs(v).max() * mx.random.normal(v.shape))
                for k, v in tree_flatten(model.parameters())
                if mx.issubdtype(v.dtype, mx.floating)
            ]
        )
    )
    return model


def run(model, prompt, n=24, draft_model=None, **options):
    """Tokens, log-probabilities, and which tokens were drafted."""
    mx.random.seed(5)
    options = {"max_tokens": n, "prompt_lookup": draft_model is None, **options}
    steps = speculative_generate_step(mx.array(prompt), model, draft_model, **options)
    tokens, logprobs, drafted = zip(*steps, strict=True)
    return list(tokens), mx.stack(logprobs), list(drafted)


def without(model, prompt, n=24, **options):
    """The same through mlx-lm's own loop."""
    mx.random.seed(5)
    tokens, logprobs = zip(
        *mlx_generate_step(mx.array(prompt), model, max_tokens=n, **options), strict=True
    )
    return list(tokens), mx.stack(logprobs)


def lengths(cache):
    """The numbers of tokens that the entries of a prompt cache hold."""
    return set().union(
        *(lengths(c.caches) if isinstance(c, CacheList) else {c.offset} for c in cache)
    )


@pytest.mark.parametrize("arch", STREAMED)
def test_same_tokens_in_every_architecture(arch, tiny, draft):
    folder, prompt = tiny(arch), random_tokens(5)
    expected, logprobs = without(resident(folder), prompt)
    draft(prompt + expected)
    model, cache = streamed(folder), make_prompt_cache(resident(folder))
    got = run(model, prompt, prompt_cache=cache)
    assert got[0] == expected
    # Kernels may add up in another order for another number of tokens.
    assert mx.allclose(got[1], logprobs, rtol=1e-5, atol=1e-5).item()
    drafts = smoe_mlx.stats(model).drafts
    assert drafts.accepted == sum(got[2]) < max(drafts.drafted, 1)
    if can_trim_prompt_cache(make_prompt_cache(model)):
        # Windows of 16 tokens forget, and then there are no more drafts.
        assert drafts.accepted >= (5 if drafts.note else 13)
        assert bool(drafts.note) == (not can_trim_prompt_cache(cache))
        if not drafts.note:
            assert not any(d for i, d in enumerate(got[2], len(prompt)) if i % 5 == 0)
            assert lengths(cache) == {len(prompt) + len(expected) - 1}
    else:
        assert drafts.note
        assert drafts.drafted == 0


OPTIONS = {
    "sampled": {"sampler": lambda: make_sampler(temp=0.9, top_p=0.9)},
    "processors": {"logits_processors": lambda: make_logits_processors(repetition_penalty=1.4)},
    "rotating": {"max_kv_size": lambda: 32},
    "quantised": {
        "kv_bits": lambda: 8,
        "kv_group_size": lambda: 32,
        "quantized_kv_start": lambda: 17,
    },
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("slots", [0.5, 1.0])
def test_options_work_as_without_drafts(slots, option, tiny, draft):
    """A seed gives the same text: nothing is sampled for a draft, or for what a wrong one drags."""
    folder, prompt = tiny("qwen3_moe"), random_tokens(9)
    options = {k: make() for k, make in OPTIONS[option].items()}
    expected, logprobs = without(resident(folder), prompt, 30, **options)
    draft(prompt + expected)
    got = run(streamed(folder, slots), prompt, 30, **options)
    assert got[0] == expected
    assert mx.allclose(got[1], logprobs, rtol=1e-5, atol=1e-5).item()
    assert sum(got[2]) > 10


def test_processors_see_each_text_once(tiny, draft):
    folder, prompt = tiny("qwen3_moe"), random_tokens(9)
    expected, _ = without(resident(folder), prompt)
    draft(prompt + expected)
    seen = []
    got = run(
        streamed(folder),
        prompt,
        logits_processors=[lambda tokens, logits: seen.append(tokens.tolist()) or logits],
    )
    assert sum(got[2]) > 10
    assert seen == [prompt + expected[:i] for i in range(len(expected))]


def test_draft_model_as_in_mlx_lm(tiny, tokenizer, always):
    folder, prompt = tiny("qwen3_moe"), random_tokens(9)
    options = {"max_tokens": 30, "num_draft_tokens": 3, "draft_model": noisy(folder)}
    expected = list(mlx_lm.stream_generate(resident(folder), tokenizer, prompt, **options))
    model = streamed(folder)
    got = list(smoe_mlx.stream_generate(model, tokenizer, prompt, **options))
    fields = ("text", "token", "prompt_tokens", "generation_tokens", "finish_reason")
    assert [[getattr(r, f) for f in fields] for r in got] == [
        [getattr(r, f) for f in fields] for r in expected
    ]
    drafts = smoe_mlx.stats(model).drafts
    assert sum(r.from_draft for r in got) == drafts.accepted
    assert 5 < drafts.accepted < drafts.drafted
    assert abs(drafts.accepted - sum(r.from_draft for r in expected)) < 5


@pytest.mark.parametrize("arch", ["qwen3_next", "gpt_oss"])
def test_draft_models_that_cannot_take_back_do_not_draft(arch, tiny, always):
    folder, prompt = tiny("qwen3_moe"), random_tokens(20)
    model = streamed(folder)
    got = run(model, prompt, draft_model=resident(tiny(arch)))
    assert got[0] == without(resident(folder), prompt)[0]
    drafts = smoe_mlx.stats(model).drafts
    assert (drafts.drafted, drafts.plain_passes) == (0, 23)
    assert "draft model" in drafts.note


@pytest.mark.parametrize("pairs", ["two models", "one model"])
def test_models_that_draft_for_each_other(pairs, tiny, always):
    """On two threads at once: neither keeps its own model while it waits for the other's."""
    folder, prompt = tiny("qwen3_moe"), random_tokens(9)
    expected = without(resident(folder), prompt)[0]
    one = streamed(folder)
    two = one if pairs == "one model" else streamed(folder)
    models, got = {"a": (one, two), "b": (two, one)}, {}
    both_draft, begun = threading.Barrier(2, timeout=10), set()

    def draft(self, tokens, n):
        if self not in begun:  # each thread is about to call the other's model
            begun.add(self)
            with contextlib.suppress(threading.BrokenBarrierError):
                both_draft.wait()
        return drafts(self, tokens, n)

    def generate():
        name = threading.current_thread().name
        got[name] = run(models[name][0], prompt, draft_model=models[name][1])[0]

    drafts = DraftModel.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftModel, "__call__", draft)
        threads = [threading.Thread(target=generate, name=n, daemon=True) for n in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "they wait for each other"
    assert got == {"a": expected, "b": expected}
    for model in (one, two):
        model._streaming.cache.check()
        assert model._streaming.cache.stats.abandoned == 0  # what was drafted has been evaluated


@pytest.mark.parametrize("with_model", [False, True])
def test_stopping_anywhere_leaves_the_caches_as_without_drafts(with_model, tiny, draft):
    folder, prompt = tiny("qwen3_moe"), random_tokens(9)
    expected, _ = without(resident(folder), prompt, 30)
    draft(prompt + expected)
    model = streamed(folder)
    second = noisy(folder) if with_model else None
    quantised = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 12}
    options = {"draft_model": second, "prompt_lookup": not with_model, **quantised}
    text = without(resident(folder), prompt, 17, **quantised)[0]
    for n in range(1, 12):
        cache = make_prompt_cache(model) + (make_prompt_cache(second) if with_model else [])
        steps = speculative_generate_step(mx.array(prompt), model, prompt_cache=cache, **options)
        got = [next(steps)[0] for _ in range(n)]
        steps.close()
        assert {c.offset for c in cache} == {len(prompt) + n - 1}
        steps = speculative_generate_step(
            mx.array(got[-1:]), model, prompt_cache=cache, max_tokens=6, **options
        )
        got += [token for token, _, _ in steps]
        assert got == text[: n + 6]


def test_tokens_of_a_pass_share_their_reads(tiny, draft):
    folder, prompt = tiny("qwen3_moe"), random_tokens(9)
    expected, _ = without(resident(folder), prompt)
    draft(prompt + expected)
    model = streamed(folder)
    cache, pairs, wanted, missing = model._streaming.cache, 0, 0, 0
    steps = speculative_generate_step(mx.array(prompt), model, prompt_lookup=True)
    next(steps)

    def look(layer, ids, *_):
        nonlocal pairs, wanted, missing
        distinct = {*ids.ravel().tolist()}
        pairs += ids.size
        wanted += len(distinct)
        missing += sum(cache.table(layer)[e] < 0 for e in distinct)

    before = smoe_mlx.stats(model)
    cache.trace = look
    while next(steps)[2] or wanted < 30:
        pass
    after = smoe_mlx.stats(model)
    assert after.drafts.passes > 1
    assert 0 < missing < wanted < pairs
    assert after.misses - before.misses == missing
    assert after.bytes_read - before.bytes_read == missing * cache.layouts[0].expert_nbytes


def test_no_limit_of_tokens(tiny, draft):
    folder, prompt = tiny("qwen3_moe"), random_tokens(9)
    expected, _ = without(resident(folder), prompt)
    draft(prompt + expected)
    steps = speculative_generate_step(
        mx.array(prompt), streamed(folder), max_tokens=-1, prompt_lookup=True
    )
    assert [next(steps)[0] for _ in expected] == expected


def test_no_more_is_drafted_than_is_wanted(tiny, draft):
    folder, prompt = tiny("qwen3_moe"), random_tokens(5)
    expected, _ = without(resident(folder), prompt)
    draft(prompt + expected)
    model = streamed(folder)
    assert run(model, prompt, 4)[2] == [False, True, True, False]
    drafts = smoe_mlx.stats(model).drafts
    assert (drafts.passes, drafts.drafted, drafts.plain_passes) == (1, 2, 0)


def test_bad_calls_are_told_so(tiny):
    folder = tiny("qwen3_moe")
    model, prompt = streamed(folder), mx.array([1, 2])
    for message, options in {
        "either": {"draft_model": model, "prompt_lookup": True},
        "input_embeddings": {"prompt_lookup": True, "input_embeddings": mx.zeros((2, 64))},
        "num_draft_tokens": {"prompt_lookup": True, "num_draft_tokens": 0},
        "prompt_lookup=-1": {"prompt_lookup": -1},
        "entries": {"draft_model": model, "prompt_cache": make_prompt_cache(model)},
    }.items():
        with pytest.raises(ValueError, match=message):
            next(speculative_generate_step(prompt, model, **options))


# ---- prompt lookup -------------------------------------------------------------------------------


def test_look_up():
    text = array("q", [1, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3])
    assert look_up(text, 3, 2) == [5, 8, 2]  # the latest place
    assert look_up(text, 3, 3) == []
    assert look_up(array("q", [7, 1, 2, 1, 2]), 5, 2) == [1, 2, 1, 2, 1]  # goes on in itself
    assert look_up(array("q", [4, 4, 4]), 2, 1) == [4, 4]
    for few in ([], [1], [1, 1], [1, 2, 3]):
        assert look_up(array("q", few), 3, 2) == []


def test_look_up_finds_what_a_plain_search_finds():
    draw = random.Random(0)
    for _ in range(300):
        text = [draw.randrange(4) for _ in range(draw.randrange(1, 40))]
        match, n = draw.randrange(1, 5), draw.randrange(1, 6)
        places = [i for i in range(match, len(text)) if text[i - match : i] == text[-match:]]
        expected = []
        if places:
            expected = text[places[-1] :]
            expected = (expected * n)[:n]
        assert look_up(array("q", text), n, match) == expected


# ---- whether it pays -----------------------------------------------------------------------------


def simulate(payoff, accepted, cost=2.0, passes=1200):
    """Passes with 3 drafts take `cost` as long as others. Returns which passes had drafts, and the
    speed in the last half against no drafts."""
    kinds, seconds, tokens = [], 0.0, 0
    for i in range(passes):
        kinds.append(payoff.allows())
        got, took = (1 + accepted(i), cost) if kinds[-1] else (1, 1.0)
        payoff.saw(kinds[-1], got, took)
        if i >= passes // 2:
            tokens, seconds = tokens + got, seconds + took
    return kinds, tokens / seconds


def test_drafts_that_pay_are_used():
    kinds, speed = simulate(Payoff(), lambda i: 3)
    assert speed > 1.9
    assert not all(kinds[-2 * TRY_EVERY :])  # what a pass without takes is still looked at
    kinds, _ = simulate(Payoff(), lambda i: i % 4, cost=2.2)  # 2.5 tokens
    assert sum(kinds) > 1000


def test_first_passes_only_warm_up():
    payoff = Payoff()
    payoff.saw(False, 1, 1000.0)  # kernels are compiled, experts are read
    payoff.saw(True, 1, 1000.0)
    assert sum(simulate(payoff, lambda i: 0)[0]) < 50


@pytest.mark.parametrize("cost", [1.1, 2.0, 30.0])
def test_drafts_that_do_not_pay_cost_little(cost):
    kinds, speed = simulate(Payoff(), lambda i: 0, cost, 6000)
    assert speed > 0.965
    assert 5 <= sum(kinds) < 2500
    assert simulate(Payoff(), lambda i: i % 2, 1.6 * cost, 6000)[1] > 0.965


def test_drafts_that_begin_to_pay_are_noticed():
    kinds, _ = simulate(Payoff(), lambda i: 3 * (i >= 600))
    assert sum(kinds[300:600]) < 12
    assert sum(kinds[660:]) > 480


def test_when_passes_without_become_fast_drafts_stop():
    payoff = Payoff()
    kinds, _ = simulate(payoff, lambda i: 3, passes=100)
    assert sum(kinds) > 70
    kinds, speed = simulate(payoff, lambda i: 3, cost=5.0)
    assert sum(kinds[600:]) < 120
    assert speed > 0.965
