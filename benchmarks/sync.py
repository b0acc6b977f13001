"""What does waiting for the routing cost on this machine, layer by layer?

    python benchmarks/sync.py
    python benchmarks/sync.py --model /tmp/bench/mid --tokens 64

All experts but one are in slots, and the same few tokens are decoded again and again, so that after
the first time nothing is read. What is left is the way of decoding: `exact` waits for the routing
at every layer, `wait` looks at it while the device goes on (CUDA; elsewhere it is `exact`), `lag1`
one layer later, `token` when the whole token is there; `plain` is the same model with everything in
slots, which never looks. They take turns token by token.

    sync  = (exact - token) / layers: what one wait costs, and with it the work that it delays
    check = (lag1 - token) / layers: what a look one layer later costs

docs/decode.md says what follows from them.
"""

import argparse
import statistics
import time

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

import smoe_mlx

MODES = ("exact", "wait", "lag1", "token")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="folder, or demo (the bundled model)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens that are decoded again")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()

    experts = smoe_mlx.plan(args.model, slots=1.0).num_experts
    models, layers = {}, 0
    for mode in ("plain", *MODES):
        config = smoe_mlx.StreamingConfig(
            slots=experts - (mode != "plain"), decode=mode if mode in MODES else "exact"
        )
        models[mode], _ = smoe_mlx.load(args.model, config=config)
        layers = len(smoe_mlx.stats(models[mode]).layers)
    seconds: dict[str, list[float]] = {mode: [] for mode in models}
    tokens = list(range(5, 5 + args.tokens))
    for i in range(args.rounds + 2):  # the first two fill the slots
        caches = {mode: make_prompt_cache(model) for mode, model in models.items()}
        for token in tokens:
            best = set()
            for mode, model in models.items():
                start = time.perf_counter()
                x = mx.array([[token]])
                logits = model._streaming.decoding.step(model, x, caches[mode])
                best.add(mx.argmax(logits[0, -1]).item())
                if i > 1:
                    seconds[mode].append(time.perf_counter() - start)
            if len(best) > 1:
                raise SystemExit("the ways did NOT compute the same")
    ms = {mode: 1e3 * statistics.median(s) for mode, s in seconds.items()}
    for mode, value in ms.items():
        print(f"{mode:<6}{value:9.3f} ms a token   fastest {1e3 * min(seconds[mode]):9.3f}")
    print(f"\n{layers} MoE layers")
    print(f"sync   {1e3 * (ms['exact'] - ms['token']) / layers:8.1f} us a layer")
    print(f"check  {1e3 * (ms['lag1'] - ms['token']) / layers:8.1f} us a layer")


if __name__ == "__main__":
    main()
