"""Generation through the library's own loop and through mlx-lm's: the same tokens as resident."""

import itertools
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from conftest import random_tokens, resident, same_bits
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.utils import load_tokenizer

import smoe_mlx
from smoe_mlx.generate import generate_step as smoe_generate_step
from smoe_mlx.load import load_model

DEMO = Path(smoe_mlx.__file__).parent / "demo"
ARCHS = ["qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v3", "nemotron_h", "gemma4_text"]
OPTIONS = {
    "greedy": {},
    "sampled": {"sampler": lambda: make_sampler(temp=0.9, top_p=0.9)},
    "processors": {
        "logits_processors": lambda: make_logits_processors(repetition_penalty=1.4),
    },
    "small steps": {"prefill_step_size": lambda: 7},
    "rotating": {"max_kv_size": lambda: 16},
    "one token": {"max_tokens": lambda: 1},
}


def streamed(folder, slots=0.4):
    return load_model(folder, config=smoe_mlx.StreamingConfig(slots=slots, debug=True))[0]


def tokens_of(step, model, prompt, n=12, **options):
    mx.random.seed(5)
    options = {k: make() for k, make in options.items()}
    options.setdefault("max_tokens", n)
    out = [(t, lp) for t, lp in step(mx.array(prompt), model, **options)]
    return [t for t, _ in out], [lp for _, lp in out]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("arch", ARCHS)
def test_same_tokens_and_logprobs_as_mlx_lm(arch, option, tiny):
    folder, prompt = tiny(arch, "affine"), random_tokens(40)
    expected = tokens_of(generate_step, resident(folder), prompt, **OPTIONS[option])
    for step in (smoe_generate_step, generate_step):  # ours, and mlx-lm's own loop
        for slots in (0.4, 1.0):
            got = tokens_of(step, streamed(folder, slots), prompt, **OPTIONS[option])
            assert got[0] == expected[0]
            assert all(map(same_bits, got[1], expected[1]))


@pytest.mark.parametrize("arch", ["qwen3_moe", "deepseek"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_kv_cache(arch, bits, tiny):
    folder, prompt = tiny(arch, "affine"), random_tokens(40)
    options = {
        "kv_bits": lambda: bits,
        "kv_group_size": lambda: 32,
        "quantized_kv_start": lambda: 10,
    }
    expected = tokens_of(generate_step, resident(folder), prompt, **options)
    got = tokens_of(smoe_generate_step, streamed(folder), prompt, **options)
    assert got[0] == expected[0]
    assert all(map(same_bits, got[1], expected[1]))


def test_prompt_cache_saved_loaded_and_trimmed(tiny, tmp_path):
    folder, prompt = tiny("qwen3_moe", "affine"), random_tokens(30)

    def run(step, model):
        cache = make_prompt_cache(model)
        first = tokens_of(step, model, prompt, prompt_cache=lambda: cache)
        save_prompt_cache(str(tmp_path / "c.safetensors"), cache)
        cache = load_prompt_cache(str(tmp_path / "c.safetensors"))
        # mlx-lm's loop looks one token ahead, so its cache is longer: cut both to one length.
        trim_prompt_cache(cache, cache[0].offset - len(prompt) - 5)
        return first, tokens_of(step, model, [5, 6, 7], prompt_cache=lambda: cache)

    expected = run(generate_step, resident(folder))
    got = run(smoe_generate_step, streamed(folder))
    for (a, la), (b, lb) in zip(expected, got, strict=True):
        assert a == b
        assert all(map(same_bits, la, lb))


def test_a_prompt_cache_made_by_mlx_lm_goes_on_here(tiny):
    folder, prompt = tiny("qwen3_moe", "affine"), random_tokens(30)
    reference, model = resident(folder), streamed(folder)
    caches = [make_prompt_cache(m) for m in (reference, model)]
    for m, cache in zip((reference, model), caches, strict=True):
        mx.eval(m(mx.array([prompt]), cache=cache))
        trim_prompt_cache(cache, 4)
    a = tokens_of(generate_step, reference, [9, 8], prompt_cache=lambda: caches[0])
    b = tokens_of(smoe_generate_step, model, [9, 8], prompt_cache=lambda: caches[1])
    assert a[0] == b[0]
    assert all(map(same_bits, a[1], b[1]))


def test_batch_generate(tiny, tokenizer):
    folder = tiny("qwen3_moe", "affine")
    prompts = [random_tokens(n, seed=n) for n in (5, 17, 3)]
    expected = batch_generate(resident(folder), tokenizer, prompts, max_tokens=10)
    got = batch_generate(streamed(folder), tokenizer, prompts, max_tokens=10)
    assert got.texts == expected.texts
    assert any(expected.texts)


FIELDS = ("text", "token", "from_draft", "prompt_tokens", "generation_tokens", "finish_reason")


def responses(module, model, tokenizer, prompt, **options):
    mx.random.seed(5)
    steps = module.stream_generate(model, tokenizer, prompt, **options)
    return [[getattr(r, f) for f in FIELDS] for r in steps]


@pytest.mark.parametrize("slots", [0.4, 1.0])
@pytest.mark.parametrize("kind", [list, mx.array, str])
def test_stream_generate_responses_are_mlx_lms(kind, slots, tiny, tokenizer):
    folder, text = tiny("qwen3_moe", "affine"), "a b c"
    assert max(tokenizer.encode(text)) < 512  # the tiny vocabulary
    prompt = text if kind is str else kind(random_tokens(9))
    for t in (tokenizer, tokenizer._tokenizer):  # mlx-lm's, and as transformers makes it
        a = responses(mlx_lm, resident(folder), t, prompt, max_tokens=8)
        assert [r[-1] for r in a] == [None] * 7 + ["length"]
        assert responses(smoe_mlx, streamed(folder, slots), t, prompt, max_tokens=8) == a


@pytest.mark.parametrize("lookup", [False, True])
def test_stop_tokens_end_the_text(lookup, tiny):
    folder, prompt = tiny("qwen3_moe", "affine"), random_tokens(9)
    sampler = make_sampler(temp=1.0)
    tokens = tokens_of(generate_step, resident(folder), prompt, sampler=lambda: sampler)[0]
    end = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    tokenizer = load_tokenizer(DEMO, eos_token_ids=[tokens[end], 511])
    for max_tokens in (end + 1, 30, -1):
        options = {"max_tokens": max_tokens, "sampler": sampler}
        a = responses(mlx_lm, resident(folder), tokenizer, prompt, **options)
        assert a[-1][-1] == "stop"
        assert len(a) == end + 1
        options["prompt_lookup"] = lookup
        assert responses(smoe_mlx, streamed(folder), tokenizer, prompt, **options) == a


@pytest.mark.parametrize("slots", [0.4, 1.0])
def test_input_embeddings(slots, tiny, tokenizer):
    folder, prompt = tiny("qwen3_moe", "affine"), random_tokens(9)
    reference, model = resident(folder), streamed(folder, slots)
    embeddings = reference.model.embed_tokens(mx.array(random_tokens(9, seed=8)))
    without = responses(mlx_lm, reference, tokenizer, prompt, max_tokens=8)
    for text in (prompt, []):
        options = {"input_embeddings": embeddings, "max_tokens": 8}
        a = responses(mlx_lm, reference, tokenizer, text, **options)
        assert a != without
        assert responses(smoe_mlx, model, tokenizer, text, **options) == a
    with pytest.raises(ValueError, match="sequence length"):
        responses(smoe_mlx, model, tokenizer, [1], input_embeddings=embeddings)


def test_no_forward_is_wasted(tiny, monkeypatch):
    folder = tiny("qwen3_moe", "affine")
    model, forwards = streamed(folder), []
    call = type(model).__call__
    monkeypatch.setattr(
        type(model),
        "__call__",
        lambda self, x, *a, **k: forwards.append(x.shape[1]) or call(self, x, *a, **k),
    )
    list(smoe_generate_step(mx.array(random_tokens(10)), model, max_tokens=4))
    assert forwards == [9, 1, 1, 1, 1]


def test_stopping_early_leaves_the_model_usable(tiny):
    folder, prompt = tiny("qwen3_moe", "affine"), random_tokens(20)
    model = streamed(folder)
    list(itertools.islice(smoe_generate_step(mx.array(prompt), model, max_tokens=50), 3))
    list(itertools.islice(generate_step(mx.array(prompt), model, max_tokens=50), 3))
    expected = tokens_of(generate_step, resident(folder), prompt)
    assert tokens_of(smoe_generate_step, model, prompt)[0] == expected[0]


def test_bad_calls_are_told_so(tiny, tokenizer):
    folder = tiny("qwen3_moe", "affine")
    model = streamed(folder)
    with pytest.raises(ValueError, match="empty"):
        list(smoe_generate_step(mx.array([], mx.int32), model))
    with pytest.raises(ValueError, match="max_tokens"):
        list(smoe_mlx.stream_generate(model, tokenizer, [1], max_tokens=0))
    with pytest.raises(smoe_mlx.UnsupportedModelError, match=r"smoe_mlx\.load"):
        list(smoe_mlx.stream_generate(resident(folder), tokenizer, [1]))
