"""The command line of `odb-nodes`: options, help, and errors in one line.

This module does not import torch, so help and usage errors are immediate.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from odb_nodes.cli import commands
from odb_nodes.core.planning.auto_window import parse_window
from odb_nodes.errors import PeerError, SampleError, StateError, WorkerError

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
_PIPE_IS_BROKEN = 141  # 128 + SIGPIPE, as a shell has it
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)
_NOT_OF_USER = (f"{Path(__file__).parents[1]}{os.sep}", f"{sysconfig.get_path('stdlib')}{os.sep}")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with exit code 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print the error in one line, and exit."""
        text = " ".join(message.split()).rstrip(".")
        self.exit(2, f"{self.prog}: {text}. See `{self.prog} --help`.\n")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command, and exit: with 0; with 1 if a check finds problems; with 2 after an error.

    Args:
        arguments: the arguments of the command line; default: `sys.argv`.

    Raises:
        SystemExit: always.
    """
    parser = _parser()
    args, unknown = parser.parse_known_args(arguments)
    if "run" not in args:
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        parser.print_help()
        parser.exit()
    command = args.parser
    if unknown:
        is_pattern = "data" in args and any(map(os.path.exists, unknown))  # the shell's expansion
        hint = " (quote a pattern of files)" * is_pattern
        command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    warnings.formatwarning = lambda message, *_, **__: f"{command.prog}: {message}\n"
    try:
        code = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        parser.exit(_PIPE_IS_BROKEN)
    except commands.UsageError as error:
        command.error(str(error))
    except Exception as error:
        place = _line_of_user(error)
        name = type(error).__name__
        if not place and not isinstance(error, _EXPECTED):
            raise
        text = (str(error).splitlines() or [""])[0]
        if place and not isinstance(error, SampleError):  # a `SampleError` names the type
            text = f"{name}: {text}"
        command.exit(2, f"{command.prog}: {text or name}{place}\n")
    parser.exit(code or 0)


def _line_of_user(error: Exception) -> str:
    """Return the last line of the user's own code that an error came through, or ""."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SampleError):  # its text has the traceback of a worker
        frames += [(file, int(line)) for file, line in _FRAME.findall(str(error))]
    places = [
        f" ({file}, line {line})"
        for file, line in frames
        if not file.startswith(("<", *_NOT_OF_USER))
        and "site-packages" not in file
        and Path(file).is_file()  # not of compiled modules, whose frames name a source
    ]
    return (places or [""])[-1]


# --- options --------------------------------------------------------------------------------------


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {least}, but is {text!r} (the data come first)"
            )
        return int(text)

    return parse


_COUNT = _at_least(1)
_COUNT_OR_ZERO = _at_least(0)


def _not_negative(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, but is {text!r}")
    return number


def _window(text: str) -> int | str:
    try:
        return parse_window(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    try:
        return name, float(weight if "=" in text else "")
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be source=number, but is {text!r}") from None


def _existing(text: str) -> Path:
    if not (path := Path(text)).exists():
        raise argparse.ArgumentTypeError(f"there is no {text!r}: pass a path that exists")
    return path


def _option(help: str, type: Callable[[str], Any] = str, **how: Any) -> dict[str, Any]:
    return {"help": help, "type": type, **how}


_SEVERAL: Any = {"nargs": "+", "action": "extend"}

_OPTIONS: dict[str, dict[str, Any]] = {
    "data": _option(
        "JSON Lines or Parquet (a file, folder or pattern), a saved folder of `datasets`, or "
        "module:function that returns a dataset, or a loader, whose options are then the defaults",
        nargs="?",
    ),
    "--accumulate": _option("batches per optimizer step (1)", _COUNT),
    "--batch-size": _option("samples per fixed batch (as many as the budget holds)", _COUNT),
    "--budget": _option(f"padded tokens per batch ({commands.BUDGET_TOKENS:,})", _COUNT),
    "--csv": _option("CSV file to write, with a row for each record"),
    "--cv": _option(
        "in place of data: lognormal lengths with this coefficient of variation", _not_negative
    ),
    "--diff": _option("another state: show only the differences", _existing),
    "--field": _option("field to tokenize (messages or text)"),
    "--force": {"action": "store_true", "help": "replace files that exist"},
    "--html": _option("HTML file to write", Path),
    "--json": _option("JSON file to write the result to", Path),
    "--layout": _option("padded or packed (padded)"),
    "--lengths": _option("a file of lengths, in place of data", _existing),
    "--lengths-known": {
        "action": "store_true",
        "help": "also simulate a loader with known lengths, which plans the whole epoch at once",
    },
    "--limit": _option("largest batch in tokens (4 x the longest sample, or the loader's)", _COUNT),
    "--log": _option("folder of a monitor, or JSON Lines: fit the times of steps to it", _existing),
    "--max-samples": _option("largest batch in samples", _COUNT),
    "--oversize": _option("how too long samples are handled: alone, drop or error (alone)"),
    "--pad-to-multiple-of": _option(
        "round the width of batches up to a multiple of so many tokens (1)", _COUNT
    ),
    "--rank": _option("rank of a folder to show (0)", _COUNT_OR_ZERO, default=0),
    "--ranks": _option("number of ranks, or several (1)", _COUNT, **_SEVERAL),
    "--samples": _option("samples to draw (all)", _COUNT),
    "--save-lengths": _option("file to write the lengths to"),
    "--seed": _option("seed of the order and of drawn samples (0)", int),
    "--shapes": _option("largest number of batch shapes (any)", _COUNT),
    "--shuffle": {"action": argparse.BooleanOptionalAction, "help": "whether data are shuffled"},
    "--size": _option(
        "number of samples in the data; repeat as SOURCE=N for a mixture",
        action="append",
        metavar="[SOURCE=]N",
    ),
    "--steps": _option("also print the digest of the first STEPS steps of each epoch", _COUNT),
    "--tokenizer": _option(
        "name or folder of a tokenizer, or a tokenizer.json, which has no chat template"
    ),
    "--tokens-per-step": _option("padded tokens per optimizer step, all ranks together", _COUNT),
    "--uneven": _option("fill or stop (fill)"),
    "--weight": _option(
        "weight of a source; repeat for each source", _weight, action="append", metavar="SOURCE=W"
    ),
    "--window": _option(
        "samples that wait for a group, or auto; or several values (auto)", _window, **_SEVERAL
    ),
    "--workers": _option("worker processes (0)", _COUNT_OR_ZERO, default=0),
}
"""Options that several commands share."""

_DATA = "data --lengths --tokenizer --field --samples --workers --save-lengths --seed --force"
_BUDGET = "--budget --layout --max-samples --pad-to-multiple-of"
_NEEDED: Any = {"required": True}

COMMANDS: dict[Callable[[Any], int | None], tuple[str, dict[str, dict[str, Any]]]] = {
    commands.audit: ("--size --steps", {"folder": _option("folder of the ledger")}),
    commands.inspect: (
        "--rank --diff --force",
        {
            "state": _option("a state file, the folder of a checkpoint, or a ledger", _existing),
            "--step": _option("step of an epoch to remake", _COUNT_OR_ZERO),
            "--epoch": _option("epoch of the step (ledger: 0; state: its epoch)", _COUNT_OR_ZERO),
            "--loader": _option("module:function that returns the loader for a `process_group`"),
            "--out": _option("file to write the steps of all ranks to, by `torch.save`"),
        },
    ),
    commands.profile: (
        f"{_DATA} --ranks --window {_BUDGET} --accumulate --batch-size --weight --json --html",
        {},
    ),
    commands.report: (
        "--html --csv --json --force",
        {"folders": _option("folders of monitors", nargs="+")},
    ),
    commands.reshard: (
        "",
        {
            "folder": _option("folder of a checkpoint, with a file per rank", Path),
            "--ranks": _option("new number of ranks", _COUNT, **_NEEDED),
            "--out": _option("folder to write into", Path, **_NEEDED),
        },
    ),
    commands.simulate: (
        f"{_DATA} --cv --ranks --window {_BUDGET} --shapes --oversize --accumulate --uneven "
        "--weight --shuffle --lengths-known",
        {},
    ),
    commands.tune: (
        f"{_DATA} --tokens-per-step --limit --log --weight",
        {"--ranks": _option("number of ranks (1)", _COUNT)},
    ),
}
"""Function of a command, whose docstring is its help -> (shared options, further options)."""


def _parser() -> _Parser:
    parser = _Parser(
        prog="odb-nodes",
        description="Plan dynamic batches before a run; check its records and states after it.",
    )
    several = parser.add_subparsers(metavar="COMMAND")
    for run, (shared, further) in COMMANDS.items():
        about = " ".join((run.__doc__ or "").split())
        name = run.__name__
        command = several.add_parser(name, description=about, help=about.partition(". ")[0])
        for option, settings in (
            {option: _OPTIONS[option] for option in shared.split()} | further
        ).items():
            command.add_argument(option, **settings)
        command.set_defaults(run=run, parser=command)
    return parser
