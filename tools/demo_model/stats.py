"""Measure an exported checkpoint: quantised perplexities, samples and routing statistics.

    python stats.py perplexity --model hf --data DIR --out perplexity.json
    python stats.py sample     --model hf --out samples.json
    python stats.py routing    --model hf --data DIR [--samples samples.json] --out routing.json

Samples come from mlx-lm.  Quantisation is MLX's affine scheme, written out in PyTorch so that it
also runs where MLX is not installed (`--check` compares it with mx.quantize).  Everything is
evaluated in float32.
"""

import argparse
import collections
import json
import math
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

# isort: split
from model import Config, Model

LENGTH = 1024
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(path):
    path = pathlib.Path(path)
    given = json.loads((path / "config.json").read_text())
    config = Config(**{k: given[k] for k in Config().__dict__})
    model, flat = Model(config), {}
    for file in sorted(path.glob("*.safetensors")):
        flat.update({k.removeprefix("model."): v.float() for k, v in load_file(file).items()})
    for layer in range(config.num_hidden_layers):
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = f"layers.{layer}.mlp"
            flat[f"{name}.{part}"] = torch.stack(
                [flat.pop(f"{name}.experts.{e}.{part}.weight").T for e in range(config.num_experts)]
            )
    model.load_state_dict(flat)
    return model.requires_grad_(False).to(DEVICE)


def windows(data, count):
    """`count` windows of held-out text, evenly spread over its sources."""
    tokens = np.fromfile(pathlib.Path(data) / "heldout.bin", dtype=np.uint16).astype(np.int64)
    starts = np.linspace(0, len(tokens) - LENGTH - 1, count).astype(int)
    return torch.from_numpy(np.stack([tokens[s : s + LENGTH + 1] for s in starts])).to(DEVICE)


def losses(model, rows):
    """Cross-entropy of every token, [rows, LENGTH]."""
    step = 32 if DEVICE == "cuda" else 4
    return torch.cat(
        [
            F.cross_entropy(model.reference(r[:, :-1]).transpose(1, 2), r[:, 1:], reduction="none")
            for r in rows.split(step)
        ]
    )


# --------------------------------------------------------------------------------------


def round_trip(weight, bits, group):
    """MLX's affine quantisation of a matrix [..., out, in] (bfloat16 scales, biases) and back."""
    w = weight.unflatten(-1, (-1, group)).float()
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    steps = 2**bits - 1
    negative = low.abs() > high.abs()  # the larger end is met exactly
    scale = ((high - low) / steps).clamp(min=1e-7)
    scale = torch.where(negative, scale, -scale)
    edge = torch.where(negative, low, high)
    zero = (edge / scale).round()
    scale = torch.where(zero == 0, scale, edge / zero)
    bias = torch.where(zero == 0, torch.zeros_like(edge), edge)
    codes = ((w - bias) / scale).round().clamp(0, steps)
    return (codes * scale.bfloat16().float() + bias.bfloat16().float()).flatten(
        -2
    )  # exact, as in a quantised product


def check():
    import mlx.core as mx

    w = torch.randn(256, 512).bfloat16().float()
    for bits, group in ((8, 64), (4, 64), (3, 64), (2, 64), (2, 32)):
        m = mx.array(w.numpy()).astype(mx.bfloat16)
        back = mx.dequantize(
            *mx.quantize(m, group_size=group, bits=bits), group_size=group, bits=bits
        )
        theirs = torch.from_numpy(np.array(back.astype(mx.float32)))
        ours = round_trip(w, bits, group)
        print(
            bits,
            group,
            "equal:",
            f"{(ours == theirs).float().mean():.4%}",
            "largest difference:",
            (ours - theirs).abs().max().item(),
            "error:",
            ((theirs - w).norm() / w.norm()).item(),
            ((ours - w).norm() / w.norm()).item(),
        )


def quantise(model, bits, group, everything):
    """Experts alone, or all that mlx_lm.convert quantises (routers stay at 8 bits there)."""
    for name, p in model.named_parameters():
        if name.endswith((".gate_proj", ".up_proj", ".down_proj")):
            p.copy_(round_trip(p.mT, bits, group).mT)
        elif everything and p.dim() == 2:
            p.copy_(
                round_trip(
                    p, 8 if "mlp.gate" in name else bits, 64 if "mlp.gate" in name else group
                )
            )


def perplexity(args):
    if args.check:
        return check()
    rows = windows(args.data, args.windows)
    out = {"tokens": rows[:, 1:].numel(), "results": []}
    cases = [(None, None, False)]
    for everything in (False, True):
        cases += [
            (8, 64, everything),
            (4, 64, everything),
            (3, 64, everything),
            (2, 64, everything),
            (2, 32, everything),
        ]
    for bits, group, everything in cases:
        model = load(args.model)
        if bits:
            quantise(model, bits, group, everything)
        began = time.time()
        each = losses(model, rows)
        value = each.mean().item()
        what = (
            "none"
            if not bits
            else f"{bits} bit, group {group}, {'all matrices' if everything else 'experts'}"
        )
        row = dict(
            quantisation=what,
            bits=bits,
            group=group,
            everything=everything,
            loss=round(value, 4),
            perplexity=round(math.exp(value), 3),
        )
        labels = pathlib.Path(args.data) / "heldout.labels"
        if not bits and labels.exists():  # one byte per token, see labels.json
            kinds = np.fromfile(labels, dtype=np.uint8)
            starts = np.linspace(0, len(kinds) - LENGTH - 1, args.windows).astype(int)
            kind = torch.from_numpy(np.stack([kinds[s + 1 : s + LENGTH + 1] for s in starts])).to(
                DEVICE
            )
            names = json.loads((pathlib.Path(args.data) / "labels.json").read_text())
            row["perplexity by kind"] = {
                n: round(math.exp(each[kind == i].mean().item()), 3) for i, n in enumerate(names)
            }
        out["results"].append(row)
        print(row, f"{time.time() - began:.0f} s", flush=True)
        pathlib.Path(args.out).write_text(json.dumps(out, indent=1))


# --------------------------------------------------------------------------------------


def sample(args):
    import mlx.core as mx
    from mlx_lm import load as mlx_load
    from mlx_lm import stream_generate
    from mlx_lm.sample_utils import make_sampler

    model, tokenizer = mlx_load(args.model)
    model.apply(lambda x: x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)
    mx.random.seed(0)
    prompts = ["The ", "def main(", "It was ", "In order to "]
    out = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt)
        for step in stream_generate(
            model,
            tokenizer,
            ids,
            max_tokens=LENGTH - len(ids),
            sampler=make_sampler(temp=0.7, top_p=0.95),
        ):
            ids = ids + [int(step.token)]
        out.append(ids)
        print(len(ids), tokenizer.decode(ids)[:200], flush=True)
        pathlib.Path(args.out).write_text(json.dumps(out))


# --------------------------------------------------------------------------------------


class LRU:
    def __init__(self, slots):
        self.slots, self.items = slots, collections.OrderedDict()

    def use(self, key):
        hit = key in self.items
        if hit:
            self.items.move_to_end(key)
        else:
            if len(self.items) >= self.slots:
                self.items.popitem(last=False)
            self.items[key] = None
        return hit


def lru(chosen, experts):
    """Hit rates of `chosen` [tokens, layers, k]: one cache for all layers, and one per layer."""
    layers = chosen.shape[1]
    rows = []
    for share in (0.125, 0.25, 0.5):
        shared = LRU(int(share * experts * layers))
        split = [LRU(int(share * experts)) for _ in range(layers)]
        hits = [0, 0]
        for token in chosen.tolist():
            for layer, ids in enumerate(token):
                for e in ids:
                    hits[0] += shared.use((layer, e))
                    hits[1] += split[layer].use(e)
        n = chosen.size
        rows.append(
            dict(
                slots=f"{share:.1%}", shared=round(hits[0] / n, 4), per_layer=round(hits[1] / n, 4)
            )
        )
    return rows


def overlap(a, b):
    """Mean share of the sets in `a` [..., k] that also occur in `b` [..., m]."""
    return (a[..., :, None] == b[..., None, :]).any(-1).float().mean()


def routing_of(model, rows):
    c = model.c
    k, layers = c.num_experts_per_tok, c.num_hidden_layers
    chosen, prev, cover = [], [], []
    ahead = {
        "router on this layer's MoE input": [],
        "next norm and router on this layer's residual": [],
        "next norm and router on this block's output": [],
    }
    for r in rows.split(32 if DEVICE == "cuda" else 4):
        ranks, guess = {}, {}

        def watch(n, x, h, y):
            ranks[n] = model.layers[n].mlp.gate(h).topk(2 * k, dim=-1).indices
            if n + 1 < layers:
                after = model.layers[n + 1]
                guess[n + 1] = [
                    after.mlp.gate(z).topk(k, dim=-1).indices
                    for z in (
                        h,
                        after.post_attention_layernorm(x),
                        after.post_attention_layernorm(x + y),
                    )
                ]

        model.reference(r, watch)
        # [layers, rows, tokens, 2k], best first
        top = torch.stack([ranks[n] for n in range(layers)])
        first = top[..., :k]
        prev.append(
            torch.stack([overlap(first[n, :, 1:], first[n, :, :-1]) for n in range(layers)])
        )
        cover.append(torch.stack([overlap(first[n, :, 1:], top[n, :, :-1]) for n in range(layers)]))
        for i, name in enumerate(ahead):
            ahead[name].append(
                torch.stack([overlap(first[n], guess[n][i]) for n in range(1, layers)])
            )
        chosen.append(first.permute(1, 2, 0, 3).cpu())
    chosen = torch.cat(chosen)  # [rows, tokens, layers, k]
    counts = torch.stack(
        [chosen[:, :, n].flatten().bincount(minlength=c.num_experts).float() for n in range(layers)]
    )
    share = counts / counts.sum(1, keepdim=True)

    def mean(parts):
        return torch.stack(parts).mean(0)

    def percent(t):
        return [round(100 * float(v), 1) for v in t]

    return {
        "tokens": chosen.shape[0] * chosen.shape[1],
        "same experts as the previous token, %": dict(
            mean=percent([mean(prev).mean()])[0], per_layer=percent(mean(prev))
        ),
        "the same for unrelated tokens with these loads, %": percent(
            [(share.square().sum(1) * k).mean()]
        )[0],
        "next token's experts within this token's first 16, %": dict(
            mean=percent([mean(cover).mean()])[0], per_layer=percent(mean(cover))
        ),
        "next layer's experts predicted, %": {
            n: dict(mean=percent([mean(v).mean()])[0], per_layer=percent(mean(v)))
            for n, v in ahead.items()
        },
        "load, most used / mean": [
            round(float(v), 2) for v in counts.max(1).values / counts.mean(1)
        ],
        "load, least used / mean": [
            round(float(v), 2) for v in counts.min(1).values / counts.mean(1)
        ],
        "load, coefficient of variation": [
            round(float(v), 3) for v in counts.std(1, unbiased=False) / counts.mean(1)
        ],
        "LRU hit rate over 4096 tokens": lru(chosen.flatten(0, 1)[:4096].numpy(), c.num_experts),
    }


def routing(args):
    model = load(args.model)
    rows = windows(args.data, args.windows)[:, :-1]
    shuffled = rows[
        torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ]
    out = {"held-out text": routing_of(model, shuffled)}
    if args.samples:
        texts = [ids[:LENGTH] for ids in json.loads(pathlib.Path(args.samples).read_text())]
        size = min(map(len, texts))
        out["its own samples"] = routing_of(
            model, torch.tensor([ids[:size] for ids in texts], device=DEVICE)
        )
    pathlib.Path(args.out).write_text(json.dumps(out, indent=1))
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["perplexity", "sample", "routing"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data")
    parser.add_argument("--samples")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    globals()[args.step](args)
