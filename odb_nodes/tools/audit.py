"""Audit a ledger: which samples have no fate, or several. Exits with code 1 on a hole.

python -m odb_nodes.tools.audit run/ledger --size 10000
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from odb_nodes._core.checks import check_count
from odb_nodes.ledger import audit

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit a ledger, print a report, and return 1 where a sample has no fate or several, else 0.

    Args:
        arguments: of the command line; default: those of this process.
    """
    parser = argparse.ArgumentParser(prog="odb_nodes.tools.audit", description=main.__doc__)
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
        found = audit(args.folder, _size_of(parser, args.size))
    except (OSError, ValueError) as error:  # Exit code 2: it says nothing of the samples.
        parser.error(str(error))
    print(found)
    for epoch in found.epochs if args.steps is not None else ():
        digest = epoch.digest_of_first(args.steps)
        which = f"first {args.steps:,} steps"
        if args.steps > epoch.steps:
            which = f"all {epoch.steps:,} steps, of {args.steps:,} asked for"
        print(f"epoch {epoch.epoch}, {which}: digest {digest}")
    return 0 if found.ok else 1


def _steps(text: str) -> int:
    """Return the number of steps that the command line names."""
    try:
        return check_count("--steps", int(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number above 0, but is {text!r}.") from None


def _size_of(
    parser: argparse.ArgumentParser, given: list[str] | None
) -> int | dict[str, int] | None:
    """Return the sizes that the command line names."""
    sizes: dict[str, int] = {}
    for text in given or ():
        name, _, number = text.rpartition("=")
        if not number.isdecimal():
            parser.error(f"--size must be a number, or source=number, but is {text!r}.")
        sizes[name] = int(number)
    if [*sizes] == [""]:
        return sizes[""]
    return sizes or None


if __name__ == "__main__":
    sys.exit(main())
