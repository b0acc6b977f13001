"""mlx-lm's own server with streamed models: one function is replaced, all the rest is mlx-lm's.

    python examples/under_mlx_lm_server.py                              # the demo model
    python examples/under_mlx_lm_server.py --memory 12GB --model MODEL --port 8081
    curl http://127.0.0.1:8080/v1/completions -d '{"prompt": "It was", "max_tokens": 20}'

For programs that are built around mlx-lm. `smoe-mlx server` is the better server for streamed
models: prompts pass layer by layer, sessions outlive a restart, and it speaks Anthropic's API too.
"""

import argparse
import functools
import sys

import mlx_lm.generate
import mlx_lm.server

import smoe_mlx


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other options go to mlx_lm.server (mlx_lm.server --help lists them).",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="demo", help="default: demo")
    parser.add_argument("--memory", help="for example 12GB (the demo: a quarter of its experts)")
    args, others = parser.parse_known_args()
    slots = 0.25 if args.model == "demo" and args.memory is None else None

    mlx_lm.server.load = functools.partial(smoe_mlx.load, memory=args.memory, slots=slots)
    # mlx-lm wires memory down while it generates: not for a model that is larger than memory.
    mlx_lm.server.maybe_set_recommended_wired_limit = lambda: None
    mlx_lm.generate.maybe_set_recommended_wired_limit = lambda: None
    sys.argv[1:] = ["--model", args.model, *others]
    mlx_lm.server.main()


if __name__ == "__main__":
    main()
