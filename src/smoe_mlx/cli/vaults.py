"""`smoe-mlx shatter` and `verify`: vaults made and checked."""

import argparse
import sys
import warnings
from typing import Any

from tqdm import tqdm

from ..plan import format_bytes
from ..sculptor.recipe import AFFINE_BITS, AFFINE_GROUPS, FIXED
from ..sculptor.shatter import shatter
from ..sculptor.verify import verify


def add_commands(commands: Any) -> None:
    """shatter, verify."""
    shatter_ = commands.add_parser("shatter", help="make a vault: one aligned record an expert")
    shatter_.add_argument("src", help="local folder or Hub repository")
    shatter_.add_argument("dst", help="the new folder")
    _add_quantisation(shatter_, "", "the experts (default: keep their bytes)")
    shatter_.add_argument(
        "--recipe", help="SMOE-Q4, SMOE-Q2, or a JSON file of settings by layer, projection, expert"
    )
    _add_quantisation(shatter_, "backbone-", "everything else (default: keep it)")
    shatter_.add_argument("--revision", help="branch, tag or commit of a Hub repository")
    shatter_.add_argument("--trust-remote-code", action="store_true")
    shatter_.set_defaults(run=run_shatter)

    verify_ = commands.add_parser("verify", help="check every record of a vault")
    verify_.add_argument("dst", help="the folder that shatter made")
    verify_.add_argument("--source", help="compare with the checkpoint it was made from")
    verify_.add_argument("--trust-remote-code", action="store_true")
    verify_.set_defaults(run=run_verify)


def _add_quantisation(parser: argparse.ArgumentParser, prefix: str, what: str) -> None:
    group = parser.add_argument_group(f"quantise {what}")
    group.add_argument(f"--{prefix}bits", type=int, choices=AFFINE_BITS)
    group.add_argument(f"--{prefix}group-size", type=int, choices=(16, *AFFINE_GROUPS))
    group.add_argument(f"--{prefix}mode", choices=("affine", *FIXED))


def run_shatter(args: argparse.Namespace) -> None:
    with tqdm(unit="B", unit_scale=True, unit_divisor=1000, desc="shatter") as bar:
        warnings.showwarning = lambda message, *_: bar.write(f"warning: {message}", sys.stderr)
        dst = shatter(
            args.src,
            args.dst,
            bits=args.bits,
            group_size=args.group_size,
            mode=args.mode,
            recipe=args.recipe,
            backbone_bits=args.backbone_bits,
            backbone_group_size=args.backbone_group_size,
            backbone_mode=args.backbone_mode,
            revision=args.revision,
            trust_remote_code=args.trust_remote_code,
            progress=lambda done, total: _show(bar, done, total),
        )
    size = sum(p.stat().st_size for p in dst.iterdir())
    print(f"{dst}: {format_bytes(size)}. Run it: smoe-mlx generate {dst}")


def run_verify(args: argparse.Namespace) -> None:
    with tqdm(unit=" records", desc="verify") as bar:
        records = verify(
            args.dst,
            args.source,
            args.trust_remote_code,
            progress=lambda done, total: _show(bar, done, total),
        )
    print(f"{args.dst}: {records:,} records, all as they were written.")


def _show(bar: Any, done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)
