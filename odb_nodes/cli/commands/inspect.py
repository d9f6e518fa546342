"""`odb-nodes inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["inspect"]


def inspect(
    state: Annotated[Path, typer.Argument(help="A state file, or the folder of a checkpoint.")],
    rank: Annotated[int, typer.Option(min=0, help="The rank of a folder to show.")] = 0,
    diff: Annotated[
        Path | None, typer.Option(help="Another state: show what differs, and nothing else.")
    ] = None,
) -> None:
    """Show what a saved state says. Exits with 1 where ranks do not fit, or states differ."""
    from odb_nodes.tools.inspection import differences, misfits, read_inspections

    name, ranks = read_inspections(_existing(state))
    if diff is not None:
        other, others = read_inspections(_existing(diff))
        if len(others) != len(ranks):
            raise ValueError(f"`{name}` has {len(ranks)} ranks, but `{other}` has {len(others)}.")
        found = [
            f"rank {number}: {line}" if len(ranks) > 1 else line
            for number, (one, two) in enumerate(zip(ranks, others, strict=True))
            for line in differences(one, two)
        ]
        print(*(found or [f"`{name}` and `{other}` are the same."]), sep="\n")
        raise typer.Exit(bool(found))
    if rank >= len(ranks):
        raise ValueError(f"--rank must be below {len(ranks)}, the ranks of `{name}`.")
    problems = misfits(ranks)
    many = "" if len(ranks) == 1 else f", rank {rank} of {len(ranks)}"
    print(f"{name}{many}\n{ranks[rank]}")
    if len(ranks) > 1:
        print(*(problems or [f"the states of all {len(ranks)} ranks fit together."]), sep="\n")
    raise typer.Exit(bool(problems))


def _existing(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"there is no `{path}`: pass a state file, or a folder of states.")
    return path
