"""A chat on the terminal in a few lines: one KV cache for the whole conversation.

    python examples/chat.py                          # the demo model, which continues texts
    python examples/chat.py MODEL --memory 12GB      # a model with a chat template

An empty line, Ctrl-D or Ctrl-C ends it. `smoe-mlx chat` does the same with more comfort.
"""

import argparse

from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

import smoe_mlx


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo", help="default: demo")
    parser.add_argument("--memory", help="for example 12GB (the demo: a quarter of its experts)")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer (default: 200)")
    args = parser.parse_args()
    slots = 0.25 if args.model == "demo" and args.memory is None else None
    model, tokenizer = smoe_mlx.load(args.model, memory=args.memory, slots=slots)
    cache = make_prompt_cache(model)  # keeps what was said: only new words are computed
    sampler = make_sampler(0.7, 0.95)

    while text := ask():
        if tokenizer.has_chat_template:
            message = {"role": "user", "content": text}
            text = tokenizer.apply_chat_template([message], add_generation_prompt=True)
        for response in smoe_mlx.stream_generate(
            model,
            tokenizer,
            text,
            max_tokens=args.max_tokens,
            sampler=sampler,
            prompt_cache=cache,
        ):
            print(response.text, end="", flush=True)
        stats = smoe_mlx.stats(model)
        print(f"\n[{response.generation_tps:.1f} tok/s, {stats.hit_rate:.0%} hits]\n")


def ask():
    try:
        return input(">>> ")
    except (EOFError, KeyboardInterrupt):
        return ""


if __name__ == "__main__":
    main()
