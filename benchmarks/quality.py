"""What quantising the experts costs: perplexity and KL divergence against the unquantised model.

    python benchmarks/quality.py SRC [--tokens 4096] [--window 512] [--text FILE ...]

SRC is an unquantised checkpoint (for the docs' table: the raw bfloat16 checkpoint of the demo
model). It is shattered to each setting, experts only, and every variant reads the same held-out
text, in windows. Without `--text`, that is source code of the installed packages `hypothesis` and
`huggingface_hub`, which the demo model was not trained on.

Loss is the mean negative log-likelihood of the next token; KL is the mean of
sum p log(p / q) over all positions, p being the unquantised model.
"""

import argparse
import importlib.util
import itertools
import json
import math
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.utils import load_model, load_tokenizer

import smoe_mlx
from smoe_mlx.load import load_model as load_streamed

GROUP_SIZES = (64, 32)


def held_out_text(paths: list[Path] | None) -> str:
    if paths:
        return "\n\n".join(p.read_text() for p in paths)
    files = []
    for package in ("hypothesis", "huggingface_hub"):
        folder = Path(importlib.util.find_spec(package).submodule_search_locations[0])
        files += sorted(folder.glob("*.py"), key=lambda p: p.stat().st_size)[-6:]
    return "\n\n".join(p.read_text() for p in files)


def log_probs(model: nn.Module, windows: mx.array) -> list[mx.array]:
    """[T, V] of every window, one window at a time."""
    out = []
    for w in windows:
        logits = model(w[None, :-1])[0].astype(mx.float32)
        out.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("src", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--text", type=Path, nargs="+")
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 6, 4, 3, 2])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if {"quantization", "quantization_config"} & json.loads(
        (args.src / "config.json").read_text()
    ).keys():
        parser.error(f"{args.src} is quantised already; this measures against what is not")
    tokens = load_tokenizer(args.src).encode(held_out_text(args.text))
    count = args.tokens // args.window
    step = (len(tokens) - args.window - 1) // max(count - 1, 1)
    windows = mx.array([tokens[i * step : i * step + args.window + 1] for i in range(count)])

    model, _ = load_model(args.src)
    model.update(tree_map(lambda a: a.astype(mx.float32), model.parameters()))
    reference = log_probs(model, windows)
    del model

    rows = []

    def measure(name: str, expert_nbytes: int, got: list[mx.array]) -> None:
        nll = [
            -mx.take_along_axis(q, w[1:, None], -1).mean()
            for q, w in zip(got, windows, strict=True)
        ]
        kl = [(mx.exp(p) * (p - q)).sum(-1).mean() for p, q in zip(reference, got, strict=True)]
        same = [(p.argmax(-1) == q.argmax(-1)).mean() for p, q in zip(reference, got, strict=True)]
        loss, kl, same = (mx.stack(x).mean().item() for x in (nll, kl, same))
        row = {"experts": name, "kB": expert_nbytes / 1e3, "loss": loss, "kl": kl, "same": same}
        row["perplexity"] = math.exp(loss)
        rows.append(row)
        print(
            f"| {name} | {row['kB']:.1f} | {loss:.4f} | {row['perplexity']:.3f} | {kl:.5f} "
            f"| {100 * same:.1f} |",
            flush=True,
        )

    print(f"{windows.size - count:,} tokens\n")
    print("| experts | kB an expert | loss | perplexity | KL | same first choice, % |")
    print("| --- | --- | --- | --- | --- | --- |")
    plan = smoe_mlx.plan(args.src, slots=1.0)
    measure("unquantised", plan.experts_nbytes // plan.num_experts, reference)
    for bits, group_size in itertools.product(args.bits, GROUP_SIZES):
        with tempfile.TemporaryDirectory() as tmp:
            folder = smoe_mlx.shatter(args.src, Path(tmp) / "v", bits=bits, group_size=group_size)
            model, _ = load_streamed(folder, config=smoe_mlx.StreamingConfig(slots=1.0))
            model.update(tree_map(lambda a: a.astype(mx.float32), model.parameters()))
            nbytes = model._streaming.cache.layouts[0].expert_nbytes
            measure(f"{bits} bit, group {group_size}", nbytes, log_probs(model, windows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
