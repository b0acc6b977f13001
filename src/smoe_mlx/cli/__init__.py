"""The command `smoe-mlx`. Flags are those of mlx_lm's own commands."""

import argparse
import signal
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import SmoeError
from ..server.commands import add_chat_flags, add_server_flags, run_chat, run_server
from . import generate, planning, selftest, traces, vaults
from .flags import add_budget, streaming_config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
    except BrokenPipeError:  # `| head`: whoever read has enough
        sys.stderr.close()
        return 128 + signal.SIGPIPE
    except (SmoeError, OSError) as e:
        print(f"smoe-mlx: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smoe-mlx",
        description="Run Mixture-of-Experts models larger than memory: experts stay on the SSD.",
    )
    parser.add_argument("--version", action="version", version=f"smoe-mlx {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate.add_commands(commands)

    chat = commands.add_parser("chat", help="a conversation on the console")
    add_chat_flags(chat)
    add_budget(chat)
    chat.set_defaults(run=lambda args: run_chat(args, streaming_config(args)))

    server = commands.add_parser("server", help="serve models to OpenAI and Anthropic clients")
    add_server_flags(server)
    add_budget(server)
    server.set_defaults(run=lambda args: run_server(args, streaming_config(args)))

    for group in (planning, traces, vaults, selftest):
        group.add_commands(commands)
    return parser
