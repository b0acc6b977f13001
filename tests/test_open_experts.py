"""open_experts: streaming modules for models that are not mlx-lm's."""

import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import same_bits
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

import smoe_mlx

D, H, E, K = 64, 128, 8, 2
WITHOUT_MLX_LM = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mlx_lm", "transformers"):
            raise ModuleNotFoundError(name, name="mlx_lm")
sys.meta_path.insert(0, Without())
"""


def save(path, modules, **quantise):
    """Write mlx-lm's modules as one file; returns them, quantised if asked for."""
    weights = {}
    for i, module in enumerate(modules):
        if quantise:
            nn.quantize(module, **quantise)
        for name, child in module.children().items():
            if name != "activation":
                weights |= {f"layers.{i}.{name}.{k}": v for k, v in child.items()}
    mx.save_safetensors(str(path), weights)
    return modules


@pytest.fixture(params=[
    {}, {"bits": 4, "group_size": 64}, {"bits": 3, "group_size": 32},
    {"bits": 4, "group_size": 32, "mode": "mxfp4"}, {"bits": 4, "group_size": 16, "mode": "nvfp4"},
    {"bits": 8, "group_size": 32, "mode": "mxfp8"},
], ids=str)  # fmt: skip
def quantise(request):
    return request.param


@pytest.mark.parametrize("kind", [SwitchGLU, SwitchMLP])
def test_same_bits_as_mlx_lms_modules(kind, quantise, tmp_path):
    mx.random.seed(1)
    theirs = save(tmp_path / "m.safetensors", [kind(D, H, E, bias=True) for _ in "ab"], **quantise)
    for slots in (1, 5, 2 * E):
        ours = smoe_mlx.open_experts(tmp_path / "m.safetensors", ["layers.0", "layers.1"], slots)
        for tokens in (1, 40):
            x = mx.random.normal((1, tokens, D))
            ids = mx.array(np.random.default_rng(tokens).integers(0, E, (1, tokens, K)))
            for mine, other in zip(ours, theirs, strict=True):
                y = other(x, ids)
                assert same_bits(mine(x, ids), y)
                assert not same_bits(mine(x, (ids + 1) % E), y)
    assert ours[0].cache is ours[1].cache
    assert ours[0].cache.stats.misses == 0  # the last one holds all experts: nothing is looked up


def test_slots_bound_what_is_in_memory_and_parameters_are_none(tmp_path):
    save(tmp_path / "m.safetensors", [SwitchGLU(D, H, E) for _ in "ab"])
    a, b = smoe_mlx.open_experts(tmp_path / "m.safetensors", ["layers.0", "layers.1"], slots=3)
    assert not tree_flatten(a.parameters())
    assert a.cache.reader.stats.bytes == 0
    x = mx.random.normal((1, 1, D))
    for module, ids, misses in ((a, [0, 1], 2), (a, [0, 1], 2), (b, [0, 5], 4), (a, [1, 2], 5)):
        mx.eval(module(x, mx.array([[ids]])))
        assert a.cache.stats.misses == misses
    assert a.cache.reader.stats.bytes == 5 * 3 * D * H * 4


@pytest.mark.parametrize(("change", "words"), [
    ({"layers.0.gate_proj.weight": None}, ["layers.0.gate_proj.weight", "layers.0.fc1.weight"]),
    ({"layers.0.up_proj.weight": None}, ["layers.0.up_proj.weight", "missing"]),
    ({"layers.0.up_proj.weight": (E + 1, H, D)}, ["9", "8"]),
    ({"layers.0.up_proj.weight": (E, H, D + 1)}, ["up_proj", "65"]),
    ({"layers.0.up_proj.weight": (E, 2, H, D)}, ["up_proj"]),
    ({"layers.0.down_proj.weight": (E, 0, H)}, ["proj", "0"]),
    ({"layers.0.down_proj.weight": (E, 0, H), "layers.0.gate_proj.scales": (E, H, 2)}, ["proj"]),
    ({"layers.0.up_proj.scales": (E, H, 2)}, ["up_proj", "scales", "quantize"]),
    ({"layers.0.up_proj.scales": (E, H, 2 * D)}, ["up_proj", "scales", "quantize"]),
    ({"layers.0.up_proj.scales": (E,)}, ["up_proj", "scales", "quantize"]),
    ({"layers.0.up_proj.bias": (E, D)}, ["up_proj", "bias"]),
    ({"layers.1.up_proj.bias": (E, H)}, ["layers.1", "layers.0", "by themselves"]),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_named(change, words, tmp_path):
    path = tmp_path / "m.safetensors"
    save(path, [SwitchGLU(D, H, E, bias=False) for _ in "ab"])
    weights = mx.load(str(path)) | {k: mx.zeros(v) for k, v in change.items() if v}
    mx.eval(weights)
    path.unlink()
    mx.save_safetensors(str(path), {k: v for k, v in weights.items() if change.get(k, 1)})
    with pytest.raises(smoe_mlx.CheckpointError) as e:
        smoe_mlx.open_experts(path, ["layers.0", "layers.1"], 4)
    for word in (str(path), *words):
        assert word in str(e.value)


def test_no_slots_no_file_no_names(tmp_path):
    with pytest.raises(smoe_mlx.CheckpointError, match=r"none\.safetensors"):
        smoe_mlx.open_experts(tmp_path / "none.safetensors", ["a"], 1)
    save(tmp_path / "m.safetensors", [SwitchGLU(D, H, E)])
    with pytest.raises(smoe_mlx.BudgetError, match="at least 1"):
        smoe_mlx.open_experts(tmp_path / "m.safetensors", ["layers.0"], 0)
    for names in ([], "layers.0"):
        with pytest.raises(ValueError, match="give a list"):
            smoe_mlx.open_experts(tmp_path / "m.safetensors", names, 1)


def test_without_mlx_lm_the_rest_says_what_it_needs():
    code = WITHOUT_MLX_LM + (
        "import smoe_mlx; smoe_mlx.open_experts, smoe_mlx.StreamingSwitchGLU\n"
        "assert not hasattr(smoe_mlx, 'nonsense')\n"
        "try: smoe_mlx.load\n"
        "except AttributeError as e: print(e)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.stdout == "smoe_mlx.load needs mlx-lm: pip install mlx-lm\n", out.stderr
