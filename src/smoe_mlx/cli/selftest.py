"""`smoe-mlx selftest`: the expert kernels on this GPU."""

import argparse
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from .. import __version__
from ..errors import SmoeError
from ..kernels import prompt_selftest
from ..kernels.experts import FusedExperts, backend
from ..kernels.prompt import PromptExperts
from ..kernels.selftest import Verdict, operations, self_test, usual_geometries


def add_commands(commands: Any) -> None:
    """selftest."""
    selftest = commands.add_parser(
        "selftest", help="are the expert kernels right on this GPU, and faster?"
    )
    selftest.add_argument(
        "--kernels", action="store_true", help="the expert kernels (all that is tested so far)"
    )
    selftest.set_defaults(run=run_selftest)


def run_selftest(args: argparse.Namespace) -> None:
    where = backend()
    if where is None:
        raise SmoeError("MLX's default device is no GPU here: there are no kernels to test.")
    device = {k: v for k, v in mx.device_info().items() if "name" in k or "arch" in k}
    mlx = mx.__version__  # type: ignore[attr-defined]
    print(f"smoe-mlx {__version__}, MLX {mlx}, {platform.platform()}, {where}: {device}")
    bad = []
    for name, (geometry, activation) in usual_geometries().items():
        stock = operations(geometry, activation)
        experts, prompt = FusedExperts(geometry), PromptExperts(geometry)
        tests: dict[str, Callable[[], Verdict]] = {
            name: partial(self_test, experts, stock, activation, added=2),
            f"{name}, prompts": partial(prompt_selftest.self_test, prompt, stock, activation),
        }
        for what, test in tests.items():
            print(f"{what} ({geometry}): ", end="", flush=True)
            try:
                verdict = test()
            except Exception as e:  # whatever MLX, a driver or a compiler raises: report it, go on
                print(f"FAILED\n{e}")
                bad.append(what)
                continue
            if verdict.fault:
                bad.append(what)
            print(verdict)
    if bad:
        raise SmoeError(f"the kernels are not right here for {', '.join(bad)}; they are not used.")
