"""A streamed model computes what mlx-lm computes with everything in memory, bit for bit."""

import shutil

import mlx.core as mx
import numpy as np
import pytest
from conftest import STREAMED, corrupt_expert, random_tokens, resident, same_bits
from mlx_lm.models.cache import make_prompt_cache

import smoe_mlx
from smoe_mlx.load import load_model

PROMPTS = (1, 2, 63, 64, 65, 300)


def streamed(folder, slots):
    config = smoe_mlx.StreamingConfig(slots=slots, threads=2, debug=True)
    return load_model(folder, config=config)[0]


def logits_of(model, prompt: int, decode: int = 2) -> list[mx.array]:
    """Logits of a prompt in one go and of two tokens after it, one by one."""
    tokens = random_tokens(prompt + decode)
    cache = make_prompt_cache(model)
    out = [model(mx.array(tokens[:prompt])[None], cache=cache)]
    mx.eval(out)
    for t in tokens[prompt:]:
        out.append(model(mx.array([[t]]), cache=cache))
        mx.eval(out)
    return out


def slot_counts(folder) -> dict[str, int]:
    plan = smoe_mlx.plan(folder, slots=1.0)
    return {
        "all": plan.num_experts,
        "half": plan.num_experts // 2,
        "one token": plan.expert_reads,
        "smallest": len(plan.banks),
    }


@pytest.mark.parametrize("arch", STREAMED)
@pytest.mark.parametrize(("mode", "prompts"), [("affine", PROMPTS), (None, (2, 65))])
def test_every_architecture_at_every_cache_size(arch, mode, prompts, tiny):
    folder = tiny(arch, mode)
    reference = resident(folder)
    expected = {n: logits_of(reference, n) for n in prompts}
    for name, slots in slot_counts(folder).items():
        model = streamed(folder, slots)
        for n in prompts:
            for i, (a, b) in enumerate(zip(expected[n], logits_of(model, n), strict=True)):
                assert same_bits(a, b), f"{name} ({slots} slots), prompt {n}, step {i}"


@pytest.mark.parametrize("arch", STREAMED)
def test_corrupted_experts_are_noticed(arch, tiny, tmp_path):
    """The negative control of the test above."""
    folder = shutil.copytree(tiny(arch, "affine"), tmp_path / "copy")
    model = streamed(folder, 0.5)
    expected = logits_of(model, 65)
    cache = model._streaming.cache
    corrupt_expert(folder, int(np.flatnonzero(cache.table(len(cache.layouts) - 1) >= 0)[0]))
    got = logits_of(streamed(folder, 0.5), 65)
    assert not all(same_bits(a, b) for a, b in zip(expected, got, strict=True))
