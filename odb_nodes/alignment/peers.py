"""The other ranks, as a `RankAligner` deals with them: all that ranks tell each other goes here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_seconds
from odb_nodes._core.processes import Owner
from odb_nodes.alignment.aligned_round import LossRule
from odb_nodes.alignment.exchange import (
    Channel,
    Exchange,
    group_rank,
    resolve_exchange,
)
from odb_nodes.contract.graph import walk
from odb_nodes.contract.node import call_member
from odb_nodes.errors import StateError
from odb_nodes.planning.rounds import CostReport

PEER_TIMEOUT_S = 1800.0
"""Default of `timeout_s`: seconds until a rank that does not come is an error on the others."""

_GRACE_S = 5.0  # for the others to hear of a failure at once

_STOPPED = "generator raised StopIteration"  # the message of Python's RuntimeError

T = TypeVar("T")


@dataclass(frozen=True)
class Ask:
    """What a rank tells the others, at a place where all ranks tell the like."""

    # a report, a few integers, or bytes, of which each rank gets those of all ranks; or what the
    # ranks must have in common, as JSON data by name
    told: CostReport | list[int] | bytes | Mapping[str, Any]
    where: str  # the place that errors name
    steps: int = 0  # the most groups in a report, the same on all ranks


Exchanges = Generator[Ask, Any, T]
"""What a rank does between exchanges with others, in which it gets what all of them told."""


class Peers:
    """Exchanges what the ranks of a process tell with the other ranks of a group."""

    def __init__(
        self,
        process_group: Any,
        timeout_s: float,
        message_size: int,
        tasks: int = 0,
        hosted: int = 1,
    ) -> None:
        check_seconds("timeout_s", timeout_s)
        self._process_group, self._timeout_s = process_group, timeout_s
        self._size, self._tasks, self.hosted = message_size, tasks, hosted
        self._use(Exchange())
        self._failing: threading.Thread | None = None  # tells others of a failure

    @property
    def rank(self) -> int:
        """The first rank of this process in the group, as `begin` found."""
        return self.channel.rank * self.hosted

    @property
    def world_size(self) -> int:
        """Ranks of the group, as `begin` found."""
        return self.channel.world_size * self.hosted

    @property
    def are_connected(self) -> bool:
        """Whether this process speaks to others, by connections and threads that are its own."""
        return type(self._exchange) is not Exchange

    def another(self, message_size: int) -> Peers:
        """Return further connections of the same ranks, which all make in the same order."""
        return Peers(self._process_group, self._timeout_s, message_size)

    def check_process(self) -> None:
        """Check that the connections are of this process."""
        if self.are_connected:
            self._owner.check("`RankAligner`")

    def begin(self) -> None:
        """Find out who the other ranks are; they need not be there yet. Ends an interruption."""
        self.check_process()
        failing, self._failing = self._failing, None
        if failing is not None:
            self._exchange.interrupt()
            failing.join()  # Ends: it is interrupted, and has a limit.
        if not self.are_connected:  # The job may have been set up since.
            self._use(resolve_exchange(self._process_group, self._timeout_s))
        self._exchange.resume()
        self.channel.begin()

    def drive(
        self,
        ranks: Sequence[Exchanges[T]],
        where: Callable[[], str],
        place: Mapping[str, Any] | None = None,
    ) -> list[T]:
        """Let the ranks of this process run from exchange to exchange; return what they return.

        place: what all processes must have in common, beside what their ranks must.
        """
        results: dict[int, T] = {}
        answer: Any = None
        try:
            while True:
                asked: list[Ask] = []
                with self.reporting_failure(where):
                    for number, rank in enumerate(ranks):
                        if number in results:
                            continue
                        try:
                            asked.append(rank.send(answer))
                        except StopIteration as end:
                            results[number] = end.value
                if not asked:
                    return [results[number] for number in range(len(ranks))]
                if len(asked) < self.hosted:
                    raise RuntimeError("the virtual ranks of a process do not exchange alike.")
                answer = self._exchanged(asked, place or {})
        finally:
            for rank in ranks:
                rank.close()

    def fail(self, error: BaseException, where: str) -> None:
        """Tell the others, in place of this rank's part of an exchange, why it fails.

        After a while on a thread: they may need a long time until they listen.
        """
        self._failing = threading.Thread(
            target=self.channel.fail, args=(error, where), name="odb_nodes-peers", daemon=True
        )
        self._failing.start()
        self._failing.join(_GRACE_S)

    @contextmanager
    def reporting_failure(self, where: str | Callable[[], str]) -> Iterator[None]:
        """Tell the others why this rank fails, where what is done within this context raises."""
        try:
            yield
        except Exception as error:
            place = where if isinstance(where, str) else where()
            # Of `step_time`, say. It would end the epoch here; generators raise a RuntimeError.
            if not isinstance(error, StopIteration) and str(error) != _STOPPED:
                self.fail(error, place)
                raise
            # Not `from` it: `contextmanager` would then let the StopIteration pass.
            raised = RuntimeError(f"{place}: the source or `step_time` raised StopIteration.")
            self.fail(raised, place)
            raise raised  # noqa: B904

    def interrupt(self) -> None:
        """Make a wait on another thread raise, until `begin`."""
        self._exchange.interrupt()

    def _use(self, exchange: Exchange) -> None:
        self._exchange, self._owner = exchange, Owner()
        self.channel = Channel(exchange, self._size * self.hosted)

    def _exchanged(self, asked: Sequence[Ask], place: Mapping[str, Any]) -> Any:
        """Return what all ranks tell, in their order; `None` where they only had to agree."""
        first, where = asked[0].told, asked[0].where
        if isinstance(first, Mapping):
            return self._agree([one.told for one in asked], place)
        told: list[Any] = [one.told for one in asked]
        if not self.are_connected:
            return told
        if isinstance(first, bytes):
            return self._gather_bytes(told, where)
        if isinstance(first, list):
            return self._gather([np.array(one, np.int64) for one in told], where, len(first))
        messages = [one.to_message() for one in told]
        if CostReport.message_size(asked[0].steps, self._tasks) <= self._size:
            rows = self._gather(messages, where, self._size)
        else:
            parts = self._gather_bytes([one.astype("<i8").tobytes() for one in messages], where)
            rows = [np.frombuffer(one, "<i8").astype(np.int64) for one in parts]
        return [CostReport.from_message(np.asarray(row), self._tasks) for row in rows]

    def _agree(self, configs: Sequence[Any], place: Mapping[str, Any]) -> None:
        if any(one != configs[0] for one in configs):
            names = [
                name for name in configs[0] if any(one[name] != configs[0][name] for one in configs)
            ]
            raise StateError(
                f"the virtual ranks of a process do not go on from the same place: they differ in "
                f"{names}. Load states that were saved at the same step."
            )
        self.channel.agree({**configs[0], **place})

    def _gather(self, own: Sequence[Any], where: str, width: int) -> Sequence[Any]:
        """Return rows of integers of all ranks, (ranks, width)."""
        row = np.zeros((self.hosted, width), dtype=np.int64)
        for number, one in enumerate(own):
            row[number, : len(one)] = one
        found = self.channel.gather(row.ravel(), where).reshape(self.world_size, width)
        listed: Sequence[Any] = found.tolist() if width < self._size else [*found]
        return listed

    def _gather_bytes(self, own: Sequence[bytes], where: str) -> list[bytes]:
        """Return the bytes of all ranks."""
        if self.hosted == 1:
            return self.channel.gather_bytes(own[0], where)
        sizes = self._gather([np.array([len(one)]) for one in own], where, 1)
        whole = b"".join(self.channel.gather_bytes(b"".join(own), where))
        ends = np.cumsum([size for (size,) in sizes]).tolist()
        return [whole[end - size : end] for end, (size,) in zip(ends, sizes, strict=True)]


class VirtualTeam:
    """The virtual ranks of a job that this process hosts: `hosted` of them, next to each other."""

    def __init__(
        self,
        virtual_ranks: int,
        process_group: Any,
        timeout_s: float,
        weighed_processes: int | None = None,
    ) -> None:
        self.rank, self.processes = group_rank(process_group)
        self.weighed_processes = weighed_processes or self.processes
        """How many processes average their gradients: those of a job that is made again, say."""
        if virtual_ranks % self.processes:
            raise ValueError(
                f"`virtual_ranks` must be a multiple of the number of ranks ({self.processes}), "
                f"so that each hosts as many, but is {virtual_ranks}."
            )
        self.virtual_ranks, self.hosted = virtual_ranks, virtual_ranks // self.processes
        self._process_group, self._timeout_s = process_group, timeout_s
        self.peers: Peers | None = None
        """The other processes, as soon as a `RankAligner` has asked for them."""

    def ranks(self) -> list[VirtualRank]:
        """Return the virtual ranks of this process."""
        if isinstance(self._process_group, VirtualRank):  # of a team that drives all of them
            return [self._process_group]
        return [VirtualRank(self, number) for number in range(self.hosted)]

    def peers_of(self, message_size: int, tasks: int) -> Peers:
        """Return what all virtual ranks of this process speak to the others by."""
        if self.peers is None:
            where = self._process_group, self._timeout_s
            self.peers = Peers(*where, message_size, tasks, self.hosted)
        return self.peers


@dataclass(frozen=True)
class VirtualRank:
    """A virtual rank of this process: the `process_group` of its graph."""

    team: VirtualTeam
    number: int

    @property
    def rank(self) -> int:
        """Its number among all virtual ranks."""
        return self.team.rank * self.team.hosted + self.number

    @property
    def world_size(self) -> int:
        """Number of virtual ranks."""
        return self.team.virtual_ranks

    def weighed(self, rule: LossRule) -> LossRule:
        """Return how the losses of all virtual ranks become one."""
        processes = self.team.weighed_processes
        batches = self.world_size // processes
        return replace(rule, world_size=processes, batch=self.rank % batches, batches=batches)


def check_sharing(source: BaseNode[Any], rank: int, world_size: int) -> None:
    """Make sure that the nodes below share their data as the ranks share their steps."""
    for name, config in _sharing_nodes(source).items():
        if (config["rank"], config["world_size"]) != (rank, world_size):
            raise RuntimeError(
                f"`{name}` is rank {config['rank']} of {config['world_size']} ranks, but the "
                f"`RankAligner` over it is rank {rank} of {world_size}. Give both "
                "the same: `process_group=` here, `rank=` and `world_size=` there."
            )


def sharing_configs(source: BaseNode[Any]) -> dict[str, dict[str, Any]]:
    """Return the configurations that ranks that share data must have in common, by node."""
    sharing = _sharing_nodes(source)
    shared = {name: {**one, "rank": None} for name, one in sharing.items()}
    if not sharing:  # Each rank has data of its own, mixed as it likes.
        return {}
    alike = [
        (type(node).__name__, config | (call_member(node, "agreed") or {}))
        for node, config in _configured_nodes(source)
        if getattr(node, "same_on_all_ranks", False)
    ]
    return {**shared, **_by_name(alike)}


def _sharing_nodes(source: BaseNode[Any]) -> dict[str, dict[str, Any]]:
    """Return, by name, the configurations of the nodes that yield a share of something."""
    return _by_name(
        (type(node).__name__, config)
        for node, config in _configured_nodes(source)
        if config.keys() >= {"rank", "world_size"} and config["world_size"] > 1
    )


def _configured_nodes(source: BaseNode[Any]) -> Iterator[tuple[BaseNode[Any], dict[str, Any]]]:
    for node in walk(source):
        if isinstance(config := call_member(node, "fingerprint"), dict):
            yield node, config


def _by_name(configs: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, config in configs:
        same = sum(one.partition("[")[0] == name for one in found)
        found[f"{name}[{same}]" if same else name] = config
    return found
