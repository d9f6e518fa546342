"""The command line of `odb_nodes.tools.steps`, which is read without torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from odb_nodes.tools.command_line import OneLineParser, check_is_writable

__all__ = ["parse_arguments"]

_DESCRIPTION = "Make a step of a run again, of all its ranks: its samples, and its batches."


def parse_arguments(arguments: Sequence[str] | None, prog: str) -> argparse.Namespace:
    """Return what a command line says, or exit with 2 where it is not valid."""
    parser = OneLineParser(prog=prog, description=_DESCRIPTION)
    parser.add_argument(
        "make_loader", metavar="MODULE:FUNCTION", help="makes the loader for a `process_group`"
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--ledger", help="folder of a ledger; with --epoch and --step")
    where.add_argument("--checkpoint", help="folder of a checkpoint; the step that follows it")
    parser.add_argument("--epoch", type=int, default=0, help="number of the epoch (0)")
    parser.add_argument("--step", type=int, help="number of the step in it")
    parser.add_argument("--further", type=int, default=0, help="steps after that of a checkpoint")
    parser.add_argument("--out", help="file to write the steps of all ranks to, by `torch.save`")
    parser.add_argument("--force", action="store_true", help="replace a file that exists")
    args = parser.parse_args(arguments)
    if args.ledger and args.step is None:
        parser.error("--ledger needs --step.")
    if args.out:
        try:
            check_is_writable(args.out, [args.ledger or args.checkpoint], force=args.force)
        except OSError as error:
            parser.error(f"--out: {error}")
    return args
