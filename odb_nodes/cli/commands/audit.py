"""`odb-nodes audit`."""

from __future__ import annotations

from typing import Annotated

import typer

from odb_nodes.tools.audit import print_audit, sizes_of

__all__ = ["audit"]


def audit(
    folder: Annotated[str, typer.Argument(help="The folder of a ledger.")],
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="[SOURCE=]N", help="Samples of the data; once for each source."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Also print the digest of the first so many steps.")
    ] = None,
) -> None:
    """Audit a ledger: which samples have no fate, or several. Exits with 1 on a hole."""
    if not print_audit(folder, sizes_of(size), steps):
        raise typer.Exit(1)
