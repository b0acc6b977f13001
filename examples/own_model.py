"""One streamed layer in a model of one's own. MLX is all that it needs: mlx-lm is not imported.

    python examples/own_model.py
    python examples/own_model.py --slots 8

The model below is not mlx-lm's, and its experts stay in a safetensors file. The weights are those
of one layer of the demo model, so that there is something to run and to compare with: every expert
in memory, computed one token and one expert after the other.
"""

import argparse
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

import smoe_mlx

FILE = Path(smoe_mlx.__file__).parent / "demo" / "model.safetensors"
LAYER = "model.layers.3.mlp"
DIMS, EXPERTS, TOP_K = 256, 64, 8


class MoE(nn.Module):
    """A block as one writes it: a router of one's own, and experts that are streamed."""

    def __init__(self, experts):
        super().__init__()
        self.gate = nn.QuantizedLinear(DIMS, EXPERTS, bias=False, group_size=64, bits=8)
        self.experts = experts

    def route(self, x):
        scores = mx.softmax(self.gate(x), axis=-1)
        chosen = mx.argpartition(-scores, TOP_K - 1, axis=-1)[..., :TOP_K]
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        return chosen, weights / weights.sum(axis=-1, keepdims=True)

    def __call__(self, x):
        """x [..., D] -> [..., D]"""
        chosen, weights = self.route(x)
        return (self.experts(x, chosen) * weights[..., None]).sum(axis=-2)


def one_by_one(block, weights, x):
    """The same with plain matrix products, for comparison. x [T, D] -> [T, D]"""

    def linear(x, name, e):
        w, scales, biases = (
            weights[f"{LAYER}.switch_mlp.{name}.{k}"][e] for k in ("weight", "scales", "biases")
        )
        return mx.quantized_matmul(x, w, scales, biases, group_size=64, bits=4)

    rows = []
    for row, chosen, share in zip(x, *block.route(x), strict=True):
        y = mx.zeros(DIMS)
        for e, s in zip(chosen.tolist(), share, strict=True):
            hidden = nn.silu(linear(row, "gate_proj", e)) * linear(row, "up_proj", e)
            y += s * linear(hidden, "down_proj", e)
        rows.append(y)
    return mx.stack(rows)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=16, help="experts in memory (default: 16)")
    parser.add_argument("--tokens", type=int, default=12, help="default: 12")
    args = parser.parse_args()

    # These lines are all there is to it.
    (experts,) = smoe_mlx.open_experts(FILE, [f"{LAYER}.switch_mlp"], slots=args.slots)
    block = MoE(experts)

    weights = mx.load(str(FILE))  # lazy: nothing is read that is not used
    names = ("weight", "scales", "biases")
    block.gate.update({k: weights[f"{LAYER}.gate.{k}"] for k in names})

    mx.random.seed(0)
    x = mx.random.normal((args.tokens, DIMS))
    y = mx.concatenate([block(row[None]) for row in x])  # token by token, as in decoding
    mx.eval(y)
    difference = mx.abs(y - one_by_one(block, weights, x)).max().item()

    cache = experts.cache
    print(f"{args.slots} of {EXPERTS} experts in memory, {args.tokens} tokens")
    print(f"{cache.stats.hits} hits, {cache.stats.misses} misses,", end=" ")
    print(f"{cache.reader.stats.bytes / 1e6:.2f} MB read")
    print(f"largest difference from the plain computation: {difference:.1e}")


if __name__ == "__main__":
    main()
