"""The command `odb-nodes`. It needs the extra `tools`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from odb_nodes._core.checks import import_extra

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, and exit: with 0; 1 where what was looked at is wrong; 2 after an error.

    Args:
        arguments: of the command line; default: those of this process.

    Raises:
        SystemExit: always.
    """
    try:
        import_extra("typer", "tools")
    except ImportError as error:
        print(f"odb-nodes: {error}", file=sys.stderr)
        sys.exit(2)
    from odb_nodes.cli.app import run

    sys.exit(run(sys.argv[1:] if arguments is None else [*arguments]))
