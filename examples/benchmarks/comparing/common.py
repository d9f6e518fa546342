"""What the tables share: options, rivals that may be missing, and how contenders take turns."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed

from odb_nodes.tools.simulate import markdown_table

PINS = {
    "datasets": "datasets==5.2.0",
    "dynabatch": "dynabatch==0.2.23",
    "grain": "grain==0.2.18",
    "lhotse": "lhotse==2.0.0a7",
    "litdata": "litdata==0.2.76",
    "megatron": "megatron-energon==7.4.1",
    "moto": "moto[server]",
    "odb": "online-dynamic-batching==0.1.2",
    "peft": "peft==0.21.2",
    "s3fs": "'odb-nodes[s3]'",
    "spdl": "spdl==0.8.0",
    "streaming": "mosaicml-streaming==0.13.0",
    "transformers": "transformers==5.23.0",
    "trl": "trl==1.16.0",
    "webdataset": "webdataset==1.0.2",
}
Row = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line.

    Attributes:
        quick: make all of it so short that it shows nothing but that it runs.
        device: "cpu" or "cuda", for what trains or generates.
        rounds: how often the contenders of a timed table take turns.
        epochs: a file for the epochs of the training tables; those that it has are kept.
    """

    quick: bool = False
    device: str = "cpu"
    rounds: int = 3
    epochs: Path | None = None


class Table(NamedTuple):
    """A table, with its title and the conditions under which it was made."""

    title: str
    conditions: str
    rows: list[Row]

    def __str__(self) -> str:
        return f"### {self.title}\n\n{self.conditions}\n\n{markdown_table(self.rows)}\n"


Tables = Iterator[Table]


class RivalMissingError(Exception):
    """A contender's package is not installed."""


def rival(module: str) -> Any:
    """Return a module of a rival.

    Raises:
        RivalMissingError: it cannot be imported here.
    """
    try:
        return import_module(module)
    except Exception as error:  # some packages fail in their own imports
        pin = PINS[module.split(".")[0]]
        raise RivalMissingError(f"pip install {pin} ({described(error)})") from error


def described(error: Exception) -> str:
    """Return the type of an error, and the first line of its message if it has one."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


class RivalFailedError(Exception):
    """A contender's package is installed, but does not run here."""


@cache
def skip(name: str, reason: str) -> None:
    """Say once that a contender is left out."""
    print(f"skipped: {name}: {reason}", flush=True)


def isolated(run: Callable[..., Any], *args: Any, limit_s: float) -> Any:
    """Return what a function returns in a process of its own, which may leave anything behind.

    Raises:
        RivalMissingError: as the function.
        RivalFailedError: the function raises another error, or takes longer than `limit_s`.
    """
    context = multiprocessing.get_context("fork")
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(run, args, sender))
    process.start()
    sender.close()
    try:
        if not results.poll(limit_s):
            raise RivalFailedError(f"no result after {limit_s:.0f} s")
        result = results.recv()
    except EOFError:
        raise RivalFailedError("its process ended without a result") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # its workers, too
        process.join()
    if isinstance(result, Exception):
        raise result
    return result


def in_ranks(run: Callable[..., Any], args: tuple[Any, ...], ranks: int) -> Any:
    """Return what `run(*args, rank, ranks)` returns on rank 0 of as many processes, with gloo.

    To be called within `isolated`, which ends them all.
    """
    if ranks == 1:
        return run(*args, 0, 1)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results, sender = context.Pipe(duplex=False)
        for rank in range(ranks):
            given = (run, args, rank, ranks, f"{folder}/store", sender)
            context.Process(target=_run_rank, args=given).start()
        result = results.recv()
    if isinstance(result, Exception):
        raise result
    return result


def _run_rank(
    run: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    ranks: int,
    store: str,
    sender: Connection,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
        )
        result = run(*args, rank, ranks)
    except Exception as error:
        traceback.print_exc()
        sender.send(error)
        raise
    if rank == 0:
        sender.send(result)
    _wait_for_the_end()  # the other rank may still need this one


def _send(run: Callable[..., Any], args: tuple[Any, ...], sender: Connection) -> None:
    os.setsid()  # its workers belong to it, and end with it
    try:
        with quiet():
            result = run(*args)
    except RivalMissingError as error:
        result = error
    except Exception as error:
        traceback.print_exc()
        result = RivalFailedError(described(error))
    sender.send(result)
    _wait_for_the_end()


def _wait_for_the_end() -> None:
    """Wait until this process is killed, or the one that started it has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()


def attempts(contenders: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return what each contender returns, in turn; one that cannot run is printed and left out."""
    results = {}
    for name, run in contenders.items():
        try:
            results[name] = run()
        except (RivalMissingError, RivalFailedError) as error:
            skip(name, str(error))
            continue
        print(f"{name}: done", file=sys.stderr, flush=True)
    return results


def in_turns(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Return the results of each contender, which take turns `rounds` times."""
    found = {name: [result] for name, result in attempts(contenders).items()}
    for _ in range(rounds - 1):
        for name in found:
            found[name].append(contenders[name]())
    return found


def spread(values: list[float], digits: int = 0) -> str:
    """Return the median and, of several values, the least and the greatest."""
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what a rival prints, also from its processes."""
    sys.stdout.flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    hole = os.open(os.devnull, os.O_WRONLY)
    try:
        for number, _ in kept:
            os.dup2(hole, number)
        yield
    finally:
        sys.stdout.flush()
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)
        os.close(hole)
