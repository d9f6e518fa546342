"""Audit a ledger: which samples have no fate, or several.

python -m odb_nodes.tools.audit run/ledger --size 10000
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from odb_nodes._core.checks import check_count
from odb_nodes._core.text import counted
from odb_nodes.tools.command_line import OneLineParser

__all__ = ["main"]

_DESCRIPTION = (
    "Audit a ledger: which samples have no fate, or several. Exits with 1 where there is a "
    "problem, and with 3 where an epoch is partial and no end of the run is recorded."
)
_CODES = {"damaged": 1, "open": 3}


def main(arguments: Sequence[str] | None = None, prog: str = "odb_nodes.tools.audit") -> int:
    """Audit a ledger, print a report, and return an exit code.

    It is 1 where there is a problem; 3 where an epoch is partial and no end of the run is recorded;
    else 0.

    Args:
        arguments: of the command line; default: those of this process.
        prog: what the command is called.
    """
    parser = OneLineParser(prog=prog, description=_DESCRIPTION)
    parser.add_argument("folder", help="that the ranks have written to")
    parser.add_argument(
        "--size",
        action="append",
        metavar="[SOURCE=]N",
        help="samples of the data; once for each source where several are mixed",
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        help="also print the digest of the first so many steps of each epoch",
    )
    args = parser.parse_args(arguments)
    try:
        return _print_audit(args.folder, _sizes_of(args.size), args.steps)
    except (OSError, ValueError) as error:  # Exit code 2: it says nothing of the samples.
        parser.error(str(error))


def _print_audit(folder: str, sizes: int | dict[str, int] | None, steps: int | None) -> int:
    """Audit a ledger, print a report, and return the exit code."""
    from odb_nodes.ledger import audit  # which takes seconds: the help needs no torch

    found = audit(folder, sizes)
    print(found)
    code = 0 if found.ok else _CODES[found.state]
    if steps is None:
        return code
    for epoch in found.epochs:
        digest = epoch.digest_of_first(steps)
        which = f"first {counted(steps, 'step')}"
        if steps > epoch.steps:
            which = f"all {counted(epoch.steps, 'step')}, of {steps:,} asked for"
        print(f"epoch {epoch.epoch}, {which}: digest {digest}")
    return code


def _sizes_of(given: Sequence[str] | None) -> int | dict[str, int] | None:
    """Return the sizes that a command line names, each as `N` or `source=N`."""
    sizes: dict[str, int] = {}
    for text in given or ():
        name, _, number = text.rpartition("=")
        if not number.isdecimal():
            raise ValueError(f"--size must be a number, or source=number, but is {text!r}.")
        sizes[name] = int(number)
    if [*sizes] == [""]:
        return sizes[""]
    return sizes or None


def _steps(text: str) -> int:
    """Return the number of steps that the command line names."""
    try:
        return check_count("--steps", int(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number above 0, but is {text!r}.") from None


if __name__ == "__main__":
    sys.exit(main())
