"""Messages of a `RankAligner` to the other ranks, for one rank or several virtual ranks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes._support.arrays import IntArray, int64_array, int64_bytes
from odb_nodes._support.checks import check_seconds
from odb_nodes._support.processes import Owner
from odb_nodes.core.alignment.aligned_round import LossRule
from odb_nodes.core.alignment.exchange import (
    Channel,
    Exchange,
    KnownRank,
    ProcessGroupLike,
    check_process_group,
    group_rank,
    resolve_exchange,
)
from odb_nodes.core.contract.graph import walk
from odb_nodes.core.contract.node import call_member
from odb_nodes.core.planning.rounds import CostReport
from odb_nodes.errors import StateError

PEER_TIMEOUT_S = 1800.0
"""Default of `timeout_s`: seconds until a missing rank is an error on the other ranks."""

_GRACE_S = 5.0  # for the other ranks to receive a failure at once

_STOPPED = "generator raised StopIteration"  # the message of Python's RuntimeError

T = TypeVar("T")


@dataclass(frozen=True)
class Message:
    """A message of a rank. All ranks send the same kind of message at the same place."""

    # To a report, integers or bytes, the reply is the contents of all ranks. A mapping of names to
    # JSON data must be equal on all ranks.
    content: CostReport | list[int] | bytes | Mapping[str, Any]
    where: str  # the round or step, for errors
    steps: int = 0  # the most groups in a report, the same on all ranks


Exchanges = Generator[Message, Any, T]
"""A coroutine of a rank: it yields a message and receives the contents of all ranks."""


class Peers:
    """Exchanges the messages of the ranks of this process with all ranks of a group.

    ranks_per_process: number of virtual ranks in this process.
    """

    def __init__(
        self,
        process_group: ProcessGroupLike,
        timeout_s: float,
        message_size: int,
        tasks: int = 0,
        ranks_per_process: int = 1,
    ) -> None:
        if not isinstance(process_group, KnownRank):
            check_process_group(process_group)
        check_seconds("timeout_s", timeout_s)
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._size = message_size
        self._tasks = tasks
        self.ranks_per_process = ranks_per_process
        self._use(Exchange())
        self._failing: threading.Thread | None = None  # sends a failure

    @property
    def rank(self) -> int:
        """Number of the first rank of this process in the group; known after `begin`."""
        return self.channel.rank * self.ranks_per_process

    @property
    def world_size(self) -> int:
        """Number of ranks of the group; known after `begin`."""
        return self.channel.world_size * self.ranks_per_process

    @property
    def are_connected(self) -> bool:
        """Whether this process has connections to other processes."""
        return type(self._exchange) is not Exchange

    def with_new_connections(self, message_size: int) -> Peers:
        """Return new connections of the same ranks; all ranks call this in the same order."""
        return Peers(self._process_group, self._timeout_s, message_size)

    def check_process(self) -> None:
        """Raise a `WorkerError` if the connections belong to a parent process."""
        if self.are_connected:
            self._owner.check("`RankAligner`")

    def begin(self) -> None:
        """Find out the ranks of the group, and end an interruption. Waits for no rank."""
        self.check_process()
        failing = self._failing
        self._failing = None
        if failing is not None:
            self._exchange.interrupt()
            failing.join()  # The thread ends, because its exchange is interrupted.
        if not self.are_connected:  # torch.distributed may have been initialised since.
            self._use(resolve_exchange(self._process_group, self._timeout_s))
        self._exchange.resume()
        self.channel.begin()

    def drive(
        self,
        ranks: Sequence[Exchanges[T]],
        where: Callable[[], str],
        common: Mapping[str, Any] | None = None,
    ) -> list[T]:
        """Run the ranks of this process from exchange to exchange; return their results.

        common: further names and values that must be equal in all processes.
        """
        results: dict[int, T] = {}
        answer: Any = None
        try:
            while True:
                messages: list[Message] = []
                with self.reporting_failure(where):
                    for number, rank in enumerate(ranks):
                        if number in results:
                            continue
                        try:
                            messages.append(rank.send(answer))
                        except StopIteration as end:
                            results[number] = end.value
                if not messages:
                    return [results[number] for number in range(len(ranks))]
                if len(messages) < self.ranks_per_process:
                    raise RuntimeError("the virtual ranks of a process do not exchange alike.")
                answer = self._exchanged(messages, common or {})
        finally:
            for rank in ranks:
                rank.close()

    def fail(self, error: BaseException, where: str) -> None:
        """Send the error of this rank to the other ranks, in place of its next message.

        After some seconds, a thread continues to send: the other ranks may be late.
        """
        self._failing = threading.Thread(
            target=self.channel.fail, args=(error, where), name="odb_nodes-peers", daemon=True
        )
        self._failing.start()
        self._failing.join(_GRACE_S)

    @contextmanager
    def reporting_failure(self, where: str | Callable[[], str]) -> Iterator[None]:
        """Send an error that is raised within this context to the other ranks."""
        try:
            yield
        except Exception as error:
            place = where if isinstance(where, str) else where()
            # A StopIteration, for example raised by `step_time`, would end the epoch on this rank.
            # Python turns a StopIteration within a generator into a RuntimeError.
            if not isinstance(error, StopIteration) and str(error) != _STOPPED:
                self.fail(error, place)
                raise
            # Not raised `from error`: `contextmanager` would then let the StopIteration pass.
            raised = RuntimeError(f"{place}: the source or `step_time` raised StopIteration.")
            self.fail(raised, place)
            raise raised  # noqa: B904

    def interrupt(self) -> None:
        """Make a wait on another thread raise, until `begin`."""
        self._exchange.interrupt()

    def _use(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._owner = Owner()
        self.channel = Channel(exchange, self._size * self.ranks_per_process)

    def _exchanged(self, messages: Sequence[Message], common: Mapping[str, Any]) -> Any:
        """Return the contents of all ranks, in their order; `None` for mappings that agree."""
        first, where = messages[0].content, messages[0].where
        contents: list[Any] = [message.content for message in messages]
        if isinstance(first, Mapping):
            return self._agree(contents, common)
        if not self.are_connected:
            return contents
        if isinstance(first, bytes):
            return self._gather_bytes(contents, where)
        if isinstance(first, list):
            rows = [np.array(content, np.int64) for content in contents]
            return self._gather(rows, where, len(first)).tolist()
        reports = [report.to_message() for report in contents]
        if CostReport.message_size(messages[0].steps, self._tasks) <= self._size:
            gathered = [*self._gather(reports, where, self._size)]
        else:
            parts = self._gather_bytes([*map(int64_bytes, reports)], where)
            gathered = [*map(int64_array, parts)]
        return [CostReport.from_message(row, self._tasks) for row in gathered]

    def _agree(self, configs: Sequence[Mapping[str, Any]], common: Mapping[str, Any]) -> None:
        first = configs[0]
        if any(config != first for config in configs):
            all_names = dict.fromkeys(name for config in configs for name in config)
            values = {
                name: [config.get(name, "absent") for config in configs] for name in all_names
            }
            names = [name for name in values if values[name].count(values[name][0]) < len(configs)]
            raise StateError(
                f"the virtual ranks of a process do not continue from the same place: they differ "
                f"in {names}. Load states that were saved at the same step."
            )
        self.channel.agree({**first, **common})

    def _gather(self, rows: Sequence[IntArray], where: str, width: int) -> IntArray:
        """Return rows of integers of all ranks, (ranks, width)."""
        table = np.zeros((self.ranks_per_process, width), dtype=np.int64)
        for number, row in enumerate(rows):
            table[number, : len(row)] = row
        return self.channel.gather(table.ravel(), where).reshape(self.world_size, width)

    def _gather_bytes(self, contents: Sequence[bytes], where: str) -> list[bytes]:
        if self.ranks_per_process == 1:
            return self.channel.gather_bytes(contents[0], where)
        lengths = [np.array([len(content)]) for content in contents]
        sizes = self._gather(lengths, where, 1)[:, 0].tolist()
        joined = b"".join(self.channel.gather_bytes(b"".join(contents), where))
        ends = np.cumsum(sizes).tolist()
        return [joined[end - size : end] for end, size in zip(ends, sizes, strict=True)]


class VirtualTeam:
    """The virtual ranks of a job in this process: `ranks_per_process` consecutive ranks.

    averaging_processes: number of processes that average their gradients. Default: the processes of
        `process_group`. A process that makes a step of another job again passes the job's number.
    """

    def __init__(
        self,
        virtual_ranks: int,
        process_group: ProcessGroupLike,
        timeout_s: float,
        averaging_processes: int | None = None,
    ) -> None:
        self.rank, self.processes = group_rank(process_group)
        self.averaging_processes = averaging_processes or self.processes
        if virtual_ranks % self.processes:
            raise ValueError(
                f"`virtual_ranks` must be a multiple of the number of ranks ({self.processes}), "
                f"so that each rank hosts the same number, but is {virtual_ranks}."
            )
        self.virtual_ranks = virtual_ranks
        self.ranks_per_process = virtual_ranks // self.processes
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._peers: Peers | None = None

    def ranks(self) -> list[VirtualRank]:
        """Return the virtual ranks of this process."""
        if isinstance(self._process_group, VirtualRank):  # Another team drives all virtual ranks.
            return [self._process_group]
        return [VirtualRank(self, number) for number in range(self.ranks_per_process)]

    def peers_of(self, message_size: int, tasks: int) -> Peers:
        """Return the `Peers` that all virtual ranks of this process share."""
        if self._peers is None:
            self._peers = Peers(
                self._process_group, self._timeout_s, message_size, tasks, self.ranks_per_process
            )
        return self._peers


@dataclass(frozen=True)
class VirtualRank(KnownRank):
    """A virtual rank of this process: the `process_group` of its graph."""

    team: VirtualTeam
    number: int

    @property
    def rank(self) -> int:
        """Number of this rank among all virtual ranks."""
        return self.team.rank * self.team.ranks_per_process + self.number

    @property
    def world_size(self) -> int:
        """Number of virtual ranks."""
        return self.team.virtual_ranks

    def loss_rule(self, rule: LossRule) -> LossRule:
        """Return the loss rule for all virtual ranks."""
        processes = self.team.averaging_processes
        batches = self.world_size // processes
        return replace(rule, world_size=processes, batch=self.rank % batches, batches=batches)


def check_sharing(source: BaseNode[Any], rank: int, world_size: int) -> None:
    """Raise a `RuntimeError` unless the nodes of a graph have this rank and number of ranks."""
    for name, config in _sharing_nodes(source).items():
        if (config["rank"], config["world_size"]) != (rank, world_size):
            raise RuntimeError(
                f"`{name}` is rank {config['rank']} of {config['world_size']} ranks, but the "
                f"`RankAligner` over it is rank {rank} of {world_size}. Give both the same ranks, "
                f"by `process_group=` of `RankAligner`, and `rank=`, `world_size=` of `{name}`."
            )


def sharing_configs(source: BaseNode[Any]) -> dict[str, dict[str, Any]]:
    """Return, by node, the configurations that must be equal on ranks that share data."""
    sharing = _sharing_nodes(source)
    if not sharing:  # Each rank has separate data, and may mix it differently.
        return {}
    shared = {name: {**config, "rank": None} for name, config in sharing.items()}
    same_on_all_ranks = [
        (type(node).__name__, config | (call_member(node, "agreed") or {}))
        for node, config in _configured_nodes(source)
        if getattr(node, "same_on_all_ranks", False)
    ]
    return {**shared, **_by_name(same_on_all_ranks)}


def _sharing_nodes(source: BaseNode[Any]) -> dict[str, dict[str, Any]]:
    """Return, by name, the configurations of the nodes that yield a rank's share of data."""
    return _by_name(
        (type(node).__name__, config)
        for node, config in _configured_nodes(source)
        if config.keys() >= {"rank", "world_size"} and config["world_size"] > 1
    )


def _configured_nodes(source: BaseNode[Any]) -> Iterator[tuple[BaseNode[Any], dict[str, Any]]]:
    for node in walk(source):
        config = call_member(node, "fingerprint")
        if isinstance(config, dict):
            yield node, config


def _by_name(configs: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return configurations by name; further nodes of a name get "[1]", "[2]" and so on."""
    by_name: dict[str, dict[str, Any]] = {}
    counts: Counter[str] = Counter()
    for name, config in configs:
        count = counts[name]
        by_name[f"{name}[{count}]" if count else name] = config
        counts[name] += 1
    return by_name
