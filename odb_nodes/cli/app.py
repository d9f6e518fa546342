"""The commands, put together."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import typer

from odb_nodes.errors import PeerError, SampleError, StateError, WorkerError

__all__ = ["COMMANDS", "make_app"]

COMMANDS = ("audit", "inspect", "profile", "report", "simulate", "step", "tune")
"""Names of the commands. Each is a function of its name, in a module of its name in `commands`."""

_EXPECTED = (
    ImportError,
    OSError,
    PeerError,
    SampleError,
    StateError,
    TypeError,
    ValueError,
    WorkerError,
)


def make_app() -> typer.Typer:
    """Return the application with all commands."""
    app = typer.Typer(
        help="Dynamic batches: look at them before a run, and at what is left of one.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_group)
    for name in COMMANDS:
        module = importlib.import_module(f"odb_nodes.cli.commands.{name}")
        app.command(name)(_in_one_line(getattr(module, name)))
    return app


def _group() -> None:
    """Make a group, also of one command."""


def _in_one_line(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that says in one line what is wrong, and exits with code 2."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except _EXPECTED as error:
            lines = str(error).splitlines() or [type(error).__name__]
            typer.echo(f"odb-nodes {command.__name__}: {lines[0]}", err=True)
            raise typer.Exit(2) from error

    return run
