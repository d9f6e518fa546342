"""The commands, put together."""

from __future__ import annotations

import functools
import importlib
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from odb_nodes.errors import PeerError, SampleError, StateError, WorkerError
from odb_nodes.planning.auto_window import AUTO

__all__ = ["COMMANDS", "run"]

COMMANDS = ("audit", "inspect", "profile", "report", "reshard", "simulate", "step", "tune")
"""Names of the commands. Each is a function of its name, in a module of its name in `commands`."""

_OF_MODULES = ("audit", "step")
"""Those whose options a module of `tools` reads, so that it is a command without the extra, too."""
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

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)
_NOT_OF_USER = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"))

_UsageError: Any = typer.BadParameter.__bases__[0]  # typer has no name of its own for it


def run(arguments: list[str]) -> int:
    """Run a command, and return its exit code; without one, show the help."""
    try:
        app = _make_app()
        code = app(args=arguments or ["--help"], prog_name="odb-nodes", standalone_mode=False)
    except _UsageError as error:
        path = error.ctx.command_path if error.ctx else "odb-nodes"
        message = " ".join(error.format_message().split())
        dot = "" if message.endswith((".", "?")) else "."
        typer.echo(f"{path}: {message}{dot} See `{path} --help`.", err=True)
        return 2
    return code or 0


class _Command(TyperCommand):
    """A command in which one `--ranks` or `--window` may have several values: `--ranks 1 8`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read a command line."""
        several = {one.opts[0] for one in self.params if getattr(one, "multiple", False)}
        return super().parse_args(ctx, [*_spread(args, several & {"--ranks", "--window"})])


def _spread(arguments: list[str], several: set[str]) -> Iterator[str]:
    """Yield a command line in which each value of these options has its option before it."""
    option = None
    for place, one in enumerate(arguments):
        is_value = place > 0 and arguments[place - 1] == option  # the first one
        is_one_of_several = one.isdecimal() or one == AUTO
        if is_one_of_several and option is not None and not is_value:
            yield option
        elif not is_one_of_several:
            name = one.partition("=")[0]
            option = name if name in several else None
        yield one


def _make_app() -> typer.Typer:
    """Return the application with all commands."""
    app = typer.Typer(
        help="Dynamic batches: look at them before a run, and at what is left of one.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_group)
    for name in COMMANDS:
        module = importlib.import_module(f"odb_nodes.cli.commands.{name}")
        of_module = name in _OF_MODULES
        app.command(
            name,
            cls=_Command,
            add_help_option=not of_module,
            context_settings={"allow_extra_args": of_module, "ignore_unknown_options": of_module},
        )(_in_one_line(getattr(module, name)))
    return app


def _group() -> None:
    """Make a group, also of one command."""


def _in_one_line(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that says in one line what is wrong, and exits with code 2.

    What a function of the user raised is said with its type and its place, whatever it is.
    """

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except Exception as error:
            place, name = _place_of(error), type(error).__name__
            if not place and not isinstance(error, _EXPECTED):
                raise
            text = (str(error).splitlines() or [""])[0]
            if place and not isinstance(error, SampleError):  # which has the type that was raised
                text = f"{name}: {text}"
            typer.echo(f"odb-nodes {command.__name__}: {text or name}{place}", err=True)
            raise typer.Exit(2) from error

    return run


def _place_of(error: Exception) -> str:
    """Return the last line of the user's own code that an error came through, or ""."""
    frames = [(one.filename, one.lineno) for one in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SampleError):  # whose text has the traceback of a worker
        frames += [(file, int(line)) for file, line in _FRAME.findall(str(error))]
    own = [
        f" ({file}, line {line})"
        for file, line in frames
        if not file.startswith(("<", *_NOT_OF_USER)) and "site-packages" not in file
    ]
    return (own or [""])[-1]
