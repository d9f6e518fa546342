"""`odb-nodes audit`: `python -m odb_nodes.tools.audit`, which needs no extra."""

from __future__ import annotations

import typer

from odb_nodes.tools.audit import main

__all__ = ["audit"]


def audit(context: typer.Context) -> None:
    """Audit a ledger: which samples have no fate, or several.

    Exits with 1 where there is a problem, and with 3 where an epoch is partial and no end of the
    run is recorded.
    """
    raise typer.Exit(main(context.args, prog=context.command_path))
