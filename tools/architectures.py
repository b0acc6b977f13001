"""Write docs/architectures.md from the configs that the tests run (tests/data/tiny_configs.json).

python tools/architectures.py
"""

import copy
import json
from itertools import pairwise
from pathlib import Path

import mlx_lm.utils
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from smoe_mlx.layers.lookahead import look_up, make_predictor

ROOT = Path(__file__).parent.parent
CONFIGS = json.loads((ROOT / "tests/data/tiny_configs.json").read_text(encoding="utf-8"))
REFUSED = {"dbrx": "expert modules of its own, which are not mlx-lm's switch layers"}
CACHES = {
    "KVCache": "full",
    "RotatingKVCache": "window",
    "ChunkedKVCache": "chunks",
    "ArraysCache": "state",
    "LayerCache": "compressed",
}
PAGE = """# Architectures

Made by `python tools/architectures.py` from `tests/data/tiny_configs.json`, the configs that
`tests/test_exact.py::test_every_architecture_at_every_cache_size` runs; a test compares this page
with them. A small model of each is built by mlx-lm with random weights, as float32 and quantised,
and streamed with all, half, one token's and as few experts in memory as can be; its logits must be
mlx-lm's bit for bit. {count} architectures are streamed.

* **experts**: mlx-lm's module that is replaced, and its activation.
* **caches**: what its layers keep of the text: all keys and values, a window of them, chunks, a
  compressed form, or a state of fixed size (recurrent layers, n-grams).
* **lookahead**: the next layer's router can be asked one layer early
  ([how](how-it-works.md#reading-ahead)).
* **late look**: the host may look at the routing after it has been used ([how](decode.md)).

| config | experts | caches | lookahead | late look |
| --- | --- | --- | --- | --- |
{rows}

Refused when it is loaded, by an error that says so: {refused}.

`muse_spark` computes on Metal only. A test loads it and streams its experts, but does not run its
forward (`tests/test_load.py::test_muse_spark_up_to_where_its_metal_kernels_begin`). What is not in
this table, but routes through mlx-lm's switch layers, is loaded as well: nothing goes by names.
"""


def row(arch: str) -> str:
    config = CONFIGS[arch]
    model_class, args_class = mlx_lm.utils._get_classes(config)
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    switches = [(p, m) for p, m in model.named_modules() if isinstance(m, SwitchGLU | SwitchMLP)]
    kinds = {f"{type(m).__name__}, {type(m.activation).__name__}" for _, m in switches}
    cache = [c for entry in make_prompt_cache(model) for c in getattr(entry, "caches", [entry])]
    caches = {CACHES[type(c).__name__] for c in cache}
    predictors = [
        make_predictor(model, here, there, first.weight.shape[-1], first.weight.shape[0])
        for (here, _), (there, m) in pairwise(switches)
        for first in [m.up_proj if isinstance(m, SwitchGLU) else m.fc1]
    ]
    blocks = [look_up(model, p.rpartition(".")[0]) for p, _ in switches]
    late = not any(getattr(b, "zero_expert_num", 0) for b in blocks)
    cells = [f"`{arch}`", " / ".join(sorted(kinds)), ", ".join(sorted(caches))]
    cells += ["yes" if any(predictors) else "no", "yes" if late else "no"]
    return f"| {' | '.join(cells)} |"


def page() -> str:
    streamed = sorted(set(CONFIGS) - set(REFUSED), key=str.lower)
    refused = "; ".join(f"`{arch}` ({why})" for arch, why in REFUSED.items())
    rows = "\n".join(row(arch) for arch in streamed)
    return PAGE.format(count=len(streamed), rows=rows, refused=refused)


if __name__ == "__main__":
    (ROOT / "docs/architectures.md").write_text(page(), encoding="utf-8")
