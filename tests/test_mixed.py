"""Layers whose experts are quantised in several ways: recipes that tell experts apart."""

import copy
import importlib.util
import json
import os
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import random_tokens, resident, same_bits
from mlx_lm.generate import generate_step as mlx_generate_step
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

import smoe_mlx
from smoe_mlx.generate import generate_step
from smoe_mlx.load import load_model
from smoe_mlx.sculptor.recipe import Quantisation, Recipe
from smoe_mlx.skeleton import replace_module
from smoe_mlx.store.safetensors import SafetensorsMmap
from smoe_mlx.store.vault import VAULT_FILE, Vault

TOKENS = random_tokens(70)
Q8, Q4 = Quantisation(8, 64), Quantisation(4, 32)
# Experts 0 to 2 in 8 bits, 5 with one projection as it was, the rest in 4.
RULES = {
    "*.experts.[0-2].*": {"bits": 8},
    "*.experts.5.down_proj": None,
    "*.experts.5.fc2": None,
    "*": {"bits": 4, "group_size": 32},
}


def write(path, rules):
    path.write_text(json.dumps(rules))
    return path


class Chosen(nn.Module):
    """Each routed pair by the one of several whole switches that has the right expert."""

    def __init__(self, switch):
        super().__init__()
        self.parts = []
        last = "fc2" if isinstance(switch, SwitchMLP) else "down_proj"
        for bits, group, kept in ((8, 64, ()), (4, 32, ()), (4, 32, (last,))):
            part = copy.deepcopy(switch)

            def wanted(path, m, kept=kept):
                return hasattr(m, "to_quantized") and path not in kept

            nn.quantize(part, group, bits, class_predicate=wanted)
            self.parts.append(part)

    def __call__(self, x, indices):
        eight, four, kept = (part(x, indices) for part in self.parts)
        y = mx.where((indices <= 2)[..., None], eight, four)
        return mx.where((indices == 5)[..., None], kept, y)


def reference_model(source):
    model = resident(source)
    switches = [(p, m) for p, m in model.named_modules() if isinstance(m, (SwitchGLU, SwitchMLP))]
    for path, switch in switches:
        replace_module(model, path, Chosen(switch))
    return model


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "nemotron_h", "longcat_flash", "mixtral"])
def test_each_expert_is_computed_with_its_own_setting(arch, tiny, tmp_path):
    source = tiny(arch, None)
    smoe_mlx.shatter(source, tmp_path / "v", recipe=write(tmp_path / "r.json", RULES))
    reference = reference_model(source)
    expected = {n: reference(mx.array([TOKENS[:n]])) for n in (1, 2, 63, 70)}
    plain = resident(source)(mx.array([TOKENS[:2]]))
    assert not same_bits(expected[2], plain)
    total = smoe_mlx.plan(tmp_path / "v", slots=1.0).num_experts
    for slots in (1.0, 0.5, 3 * (total // 8), 3):
        config = smoe_mlx.StreamingConfig(slots=slots, debug=True, check=True)
        model, _ = load_model(tmp_path / "v", config=config)
        for n, logits in expected.items():
            assert same_bits(model(mx.array([TOKENS[:n]])), logits), (slots, n)
        cache = model._streaming.cache
        assert cache.holds_all == (slots == 1.0)


def test_what_is_kept_is_what_the_source_holds(tiny, tmp_path):
    source = tiny("qwen3_moe", None)
    smoe_mlx.shatter(source, tmp_path / "v", recipe=write(tmp_path / "r.json", RULES))
    assert smoe_mlx.verify(tmp_path / "v", source) == 16
    with Vault(tmp_path / "v" / VAULT_FILE) as vault:
        assert [x.experts for x in vault.layouts] == [(0, 1, 2), (3, 4, 6, 7), (5,)] * 2
        kept = vault.layouts[2]
        i = [t.name for t in kept.tensors].index("down_proj.weight")
        offset, nbytes = int(kept.offsets[i][0]), kept.tensors[i].nbytes
    weights = mx.load(str(source / "model.safetensors"))
    want = np.array(weights["model.layers.0.mlp.switch_mlp.down_proj.weight"])[5].tobytes()
    with open(tmp_path / "v" / VAULT_FILE, "r+b") as f:
        assert os.pread(f.fileno(), nbytes, offset) == want
        f.seek(offset)
        f.write(b"12345678")
    with pytest.raises(smoe_mlx.VaultError, match=r"expert 5 of model\.layers\.0"):
        smoe_mlx.verify(tmp_path / "v")
    config = smoe_mlx.StreamingConfig(slots=3, check=True)
    model, _ = load_model(tmp_path / "v", config=config)
    with pytest.raises(smoe_mlx.VaultError, match=r"expert 5 of model\.layers\.0"):
        mx.eval(model(mx.array([TOKENS])))


def test_experts_of_the_source_that_are_kept_are_compared(tiny, tmp_path):
    """One expert in 8 bits: all others are the source's, byte for byte, or verify says so."""
    source = tiny("qwen3_moe", None)
    smoe_mlx.shatter(source, tmp_path / "v", recipe=Recipe((("*.experts.3.*", Q8),)))
    assert smoe_mlx.verify(tmp_path / "v", source) == 16
    other = shutil.copytree(source, tmp_path / "other")
    with SafetensorsMmap(other / "model.safetensors") as file:
        info = file.tensors["model.layers.1.mlp.switch_mlp.up_proj.weight"]
    with open(other / "model.safetensors", "r+b") as f:
        f.seek(info.offset + 3 * info.nbytes // 8)
        f.write(b"12345678")
        f.flush()
        assert smoe_mlx.verify(tmp_path / "v", other) == 16
        f.seek(info.offset + 6 * info.nbytes // 8)
        f.write(b"12345678")
    with pytest.raises(smoe_mlx.VaultError, match=r"expert 6 of model\.layers\.1"):
        smoe_mlx.verify(tmp_path / "v", other)


def test_the_plan_counts_a_tokens_experts_once(tiny, tmp_path):
    source = tiny("qwen3_moe", None)
    smoe_mlx.shatter(source, tmp_path / "v", recipe=write(tmp_path / "r.json", RULES))
    mixed = smoe_mlx.plan(tmp_path / "v", slots=6)
    assert mixed.num_experts == 16
    assert mixed.expert_reads == smoe_mlx.plan(source, slots=6).expert_reads
    assert len(mixed.banks) == 3
    with pytest.raises(smoe_mlx.BudgetError, match="at least 3"):
        load_model(tmp_path / "v", config=smoe_mlx.StreamingConfig(slots=2))


def test_rules_by_expert():
    recipe = Recipe(
        (
            ("a.b.experts.2.up", Q8),
            ("a.c.experts.0.up", Q8),
            ("*.experts.[45].*", None),
            ("*.up", Q4),
        )
    )
    assert recipe.for_experts("a.b", "up", 6) == [Q4, Q4, Q8, Q4, None, None]
    assert recipe.for_experts("a.b", "down", 6) == [None] * 6
    assert recipe.for_experts("a.c", "up", 2) == [Q8, Q4]


@pytest.mark.parametrize(
    "experts",
    [[0, 1], [0, 0, 1, 2, 4, 6, 7], [0, 1, 2, "3"], [0, 1, -1], None, [0, 1, True], [8, 9, 10]],
)
def test_a_forged_list_of_experts_is_refused(experts, tiny, tmp_path):
    source = tiny("qwen3_moe", None)
    smoe_mlx.shatter(source, tmp_path / "v", recipe=write(tmp_path / "r.json", RULES))
    from smoe_mlx.store import vault as module

    with Vault(tmp_path / "v" / VAULT_FILE) as vault:
        header, table = vault.header, vault.table.copy()
        data_offset, size = int(table["offset"].min()), vault.fingerprint.size
    document = copy.deepcopy(header)
    document["layers"][0]["experts"] = experts
    text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    plan = module.VaultPlan([], [], text, table, data_offset, size)
    front = module.front_matter(plan)
    assert len(front) <= data_offset
    path = tmp_path / "v" / VAULT_FILE
    data = bytearray(path.read_bytes())
    data[: len(front)] = front
    path.write_bytes(data)
    with pytest.raises(smoe_mlx.VaultError, match="expert"):
        Vault(path)


def test_numpy_alone_reads_a_mixed_vault(tiny, tmp_path):
    path = Path(__file__).parents[1] / "examples" / "read_vault.py"
    spec = importlib.util.spec_from_file_location("read_vault", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = tiny("qwen3_moe", None)
    smoe_mlx.shatter(source, tmp_path / "v", recipe=Recipe((("*.experts.[35].*", Q8),)))
    weights = mx.load(str(source / "model.safetensors"))
    for e in range(8):
        name = "model.layers.1.mlp.switch_mlp"
        got = module.read_expert(tmp_path / "v" / VAULT_FILE, name, e)
        want = weights[f"{name}.up_proj.weight"][e]
        if e in (3, 5):
            want = Q8.apply(want)["weight"]
        assert np.array_equal(got["up_proj.weight"], np.array(want)), e
    with pytest.raises(ValueError, match="no such expert"):
        module.read_expert(tmp_path / "v" / VAULT_FILE, name, 8)


def test_prompts_of_a_mixed_vault_go_chunk_by_chunk_and_stats_say_so(tiny, tmp_path):
    source = tiny("qwen3_moe", None)
    smoe_mlx.shatter(source, tmp_path / "v", recipe=write(tmp_path / "r.json", RULES))
    config = smoe_mlx.StreamingConfig(slots=6, debug=True, prefill_step=16)
    model, _ = load_model(tmp_path / "v", config=config)
    got = [t for t, _ in generate_step(mx.array(TOKENS), model, max_tokens=8)]
    steps = mlx_generate_step(
        mx.array(TOKENS), reference_model(source), max_tokens=8, prefill_step_size=16
    )
    assert got == [int(t) for t, _ in steps]
    assert smoe_mlx.stats(model).prefill_fallback
    assert smoe_mlx.stats(model).prefill_passes == 0
