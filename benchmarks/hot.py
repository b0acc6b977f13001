"""Hot experts: do a warm start and pins save reads?

    python benchmarks/hot.py
    python benchmarks/hot.py --model MODEL --learn a.txt --text b.txt --shares 0.25 0.5

The usage of experts is learnt from texts (`--learn`), which the model is fed token by token, and
tried on others (`--text`): a prompt, then decoding, fed as well, so that all arms route alike. The
default texts are modules of Python's standard library and pages of this project's documentation.

Arms: `cold`; `any`, where `prewarm` has filled the slots before the prompt comes, knowing nothing;
`warm`, where it knew the usage file; and `pins N`, where the N most used experts of each layer are
pinned as well. All must compute the same bits. The figures are experts that were read
for the prompt and while decoding, what was prewarmed aside, and how much less than `cold` that is.
Nothing is read ahead here (`threads=0`), so that counts depend on the routing alone, not on the
machine.
"""

import argparse
import hashlib
import json
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import smoe_mlx
from smoe_mlx.cache.usage import Usage
from smoe_mlx.generate import generate_step
from smoe_mlx.stats import streaming_of
from smoe_mlx.trace import force

STDLIB = Path(sysconfig.get_path("stdlib"))
ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="folder, or demo (the bundled model)")
    parser.add_argument(
        "--learn", type=Path, nargs="+", default=[STDLIB / "argparse.py", ROOT / "docs/prefill.md"]
    )
    parser.add_argument("--learn-tokens", type=int, default=1500, help="of each text")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[STDLIB / "tarfile.py", ROOT / "docs/vaults.md"]
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=[8, 256], help="their tokens")
    parser.add_argument("--tokens", type=int, default=200, help="to decode")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.125, 0.25, 0.5, 0.75])
    parser.add_argument("--pins", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        usage = Path(folder) / "usage.json"
        learn(args, usage)
        for text in args.text:
            for prompt in args.prompts:
                results += compare(args, usage, text, prompt)
    count_cost(args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


def tokens_of(tokenizer: Any, path: Path, count: int) -> list[int]:
    text = path.read_text(encoding="utf-8")[: 8 * count]
    tokens: list[int] = tokenizer.encode(text)[:count]
    return tokens


def learn(args: argparse.Namespace, usage: Path) -> None:
    config = smoe_mlx.StreamingConfig(slots=0.5, usage=usage)
    model, tokenizer = smoe_mlx.load(args.model, config=config)[:2]
    streaming = streaming_of(model)
    for text in args.learn:
        tokens = tokens_of(tokenizer, text, args.learn_tokens)
        for _ in force(model, tokens, streaming.plan.context):
            pass
    assert streaming.cache.usage is not None
    streaming.cache.usage.save()


def compare(args: argparse.Namespace, usage: Path, text: Path, prompt: int) -> list[dict[str, Any]]:
    print(f"\n{text.name}, a prompt of {prompt} tokens, {args.tokens} decoded")
    print(f"{'share':>6} {'arm':<9} {'prompt':>7} {'decode':>7} {'less':>7} {'prewarmed':>10}")
    results = []
    for share in args.shares:
        arms: dict[str, dict[str, Any]] = {"cold": {}, "any": {}, "warm": {"usage": usage}}
        arms |= {f"pins {n}": {"usage": usage, "hot_per_layer": n} for n in args.pins}
        cold: dict[str, Any] = {}
        for arm, options in arms.items():
            try:
                r = run(args, text, prompt, arm != "cold", {"slots": share, **options})
            except smoe_mlx.BudgetError:
                print(f"{share:>6} {arm:<9} no room")
                continue
            cold = cold or r
            if r["digest"] != cold["digest"]:
                raise SystemExit(f"{arm} at {share} computed other bits than cold")
            r |= {"text": text.name, "prompt_tokens": prompt, "share": share, "arm": arm}
            less = 1 - (r["prompt"] + r["decode"]) / (cold["prompt"] + cold["decode"])
            print(
                f"{share:>6} {arm:<9} {r['prompt']:>7,} {r['decode']:>7,} {100 * less:6.1f}% "
                f"{r['prewarmed']:>10,}"
            )
            results.append(r)
    return results


def run(
    args: argparse.Namespace, text: Path, prompt: int, prewarm: bool, options: dict[str, Any]
) -> dict[str, Any]:
    config = smoe_mlx.StreamingConfig(threads=0, **options)
    model, tokenizer = smoe_mlx.load(args.model, config=config)[:2]
    cache = streaming_of(model).cache
    if cache.usage is not None:
        cache.usage.path = None  # every arm starts from the same
    if prewarm:
        smoe_mlx.prewarm(model)
    tokens = tokens_of(tokenizer, text, prompt + args.tokens)
    kv = make_prompt_cache(model)
    digest = hashlib.sha256()
    *_, (_, logprobs) = generate_step(
        mx.array(tokens[:prompt]), model, max_tokens=1, prompt_cache=kv
    )
    digest.update(np.array(logprobs, np.float32).tobytes())
    misses = cache.stats.misses
    for token in tokens[prompt:]:
        logits = model(mx.array([[token]]), cache=kv)
        digest.update(np.array(logits, np.float32).tobytes())
    cache.settle()
    return {
        "prompt": misses,
        "decode": cache.stats.misses - misses,
        "prewarmed": cache.stats.prewarmed,
        "digest": digest.hexdigest(),
    }


def count_cost(args: argparse.Namespace) -> None:
    """What counting costs decoding, and writing the file after it."""
    model, _ = smoe_mlx.load(args.model, config=smoe_mlx.StreamingConfig(slots=0.5))[:2]
    cache = streaming_of(model).cache
    ids = list(range(streaming_of(model).plan.expert_reads // len(cache.layouts)))
    best = {}
    with tempfile.TemporaryDirectory() as folder:
        usage = Usage(cache.layouts, Path(folder) / "usage.json")
        for _ in range(20):
            for counting in (None, usage):
                cache.usage = counting
                start = time.perf_counter()
                with cache.lock:
                    for _ in range(2000):
                        cache.claim_few(0, ids)
                took = (time.perf_counter() - start) / 2000
                best[counting] = min(took, best.get(counting, took))
        start = time.perf_counter()
        usage.save()
        saving = time.perf_counter() - start
    print(
        f"\na layer's claim, {len(ids)} hits: {1e6 * best[None]:.2f} us, with counting "
        f"{1e6 * best[usage]:.2f} us; writing the file {1e3 * saving:.1f} ms"
    )


if __name__ == "__main__":
    main()
