"""The other ranks, as a `RankAligner` deals with them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_seconds
from odb_nodes._core.forks import Owner
from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.alignment.exchange import (
    Channel,
    Exchange,
    LocalExchange,
    resolve_exchange,
)
from odb_nodes.contract.graph import walk
from odb_nodes.contract.node import call_member
from odb_nodes.nodes.payload import decode_sample, encode_sample
from odb_nodes.planning.alignment import CostReport
from odb_nodes.sample import Sample

PEER_TIMEOUT_S = 1800.0
"""Default of `timeout_s`: seconds until a rank that does not come is an error on the others."""

_GRACE_S = 5.0  # for the others to hear of a failure at once


class Peers:
    """Exchanges reports with the other ranks of a group.

    Args:
        process_group: see `resolve_exchange`.
        timeout_s: seconds until a rank that does not come is an error.
        round_size: the largest number of steps in a round.
        tasks: number of tasks in reports.
    """

    def __init__(
        self, process_group: Any, timeout_s: float, round_size: int, tasks: int = 0
    ) -> None:
        check_seconds("timeout_s", timeout_s)
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._tasks, self._round_size = tasks, round_size
        self._capacity = CostReport.message_size(round_size, tasks)
        self._use(LocalExchange())
        self._thread: threading.Thread | None = None  # that speaks for this rank

    @property
    def rank(self) -> int:
        """This rank in the group, as `begin` found."""
        return self._channel.rank

    @property
    def world_size(self) -> int:
        """Ranks of the group, as `begin` found."""
        return self._channel.world_size

    @property
    def batch_of_step(self) -> tuple[int, int]:
        """Which of the batches of a step that this process takes is that of this rank, of how many.

        More than one where the process hosts several virtual ranks.
        """
        place: tuple[int, int] = getattr(self._exchange, "batch_of_step", (0, 1))
        return place

    @property
    def wait_s(self) -> float:
        """Seconds spent in exchanges so far; those of the process, where it hosts several ranks."""
        return getattr(self._exchange, "wait_s", self._channel.wait_s)

    @property
    def are_connected(self) -> bool:
        """Whether this process speaks to others, by connections and threads that are its own."""
        return not isinstance(self._exchange, LocalExchange)

    @property
    def agreed(self) -> bool:
        """Whether `agree` has been called since `begin`."""
        return self._channel.agreed

    def new_exchange(self) -> Exchange:
        """Return another exchange among the same ranks. All of them make one, in the same order."""
        return resolve_exchange(self._process_group, self._timeout_s)

    def check_process(self) -> None:
        """Check that the connections are of this process.

        Raises:
            WorkerError: they are of the one that this one was forked from.
        """
        if self.are_connected:
            self._owner.check("`RankAligner`")

    def begin(self) -> None:
        """Find out who the other ranks are; they need not be there yet. Ends an interruption.

        Raises:
            RuntimeError: the job has several ranks, but torch.distributed is not initialised.
            WorkerError: see `check_process`.
        """
        self.check_process()
        self._end_thread()
        if not self.are_connected:  # The job may have been set up since.
            self._use(resolve_exchange(self._process_group, self._timeout_s))
        self._exchange.resume()
        self._channel.begin()

    def check_source(self, source: BaseNode[Any]) -> None:
        """Make sure that the nodes below share their data as the ranks share their steps.

        Raises:
            RuntimeError: one is another rank, or one of another number of ranks.
        """
        here = {"rank": self.rank, "world_size": self.world_size}
        for name, config in _sharing_nodes(source).items():
            there = {key: config[key] for key in here}
            if there != here:
                raise RuntimeError(
                    f"`{name}` is rank {there['rank']} of {there['world_size']} ranks, but the "
                    f"`RankAligner` over it is rank {self.rank} of {self.world_size}. Give both "
                    "the same: `process_group=` here, `rank=` and `world_size=` there."
                )

    def agree(self, config: Mapping[str, Any], source: BaseNode[Any]) -> None:
        """Make sure, after `begin`, that all ranks go on from the same place.

        Args:
            config: what the ranks must have in common.
            source: the node below; its nodes that share data must be configured alike, too.

        Raises:
            StateError: they do not, or are not. The same error on all ranks.
            PeerError: a rank failed, or did not come.
        """
        sharing = _sharing_nodes(source)
        shared = {name: {**one, "rank": None} for name, one in sharing.items()}
        # Where nothing is shared out, each rank has data of its own, mixed as it likes.
        alike = _nodes_alike(source) if sharing else {}
        place = getattr(self._exchange, "place", {})  # of a process with several virtual ranks
        self._channel.agree({**config, **shared, **alike, **place})

    def reports(self, own: CostReport, where: str, steps: int = 0) -> list[CostReport]:
        """Return the reports of all ranks for a round, this one's included.

        Args:
            own: that of this rank.
            where: the place that errors name.
            steps: the most groups that a rank may report, the same on all of them, where that may
                be more than `round_size`.

        Raises:
            PeerError: a rank failed, left, or did not come.
        """
        if not self.are_connected:
            return [own]
        message = own.to_message()
        if steps <= self._round_size:
            messages = [*self._channel.gather(message, where)]
        else:
            parts = self._channel.gather_bytes(message.astype("<i8").tobytes(), where)
            messages = [np.frombuffer(one, "<i8").astype(np.int64) for one in parts]
        return [CostReport.from_message(one, self._tasks) for one in messages]

    def gather(self, numbers: Sequence[int], where: str) -> list[list[int]]:
        """Return a few numbers of each rank.

        Raises:
            PeerError: a rank failed, left, or did not come.
        """
        rows = self._channel.gather(np.array(numbers, dtype=np.int64), where)
        found: list[list[int]] = rows[:, : len(numbers)].tolist()
        return found

    def gather_bytes(self, data: bytes, where: str) -> list[bytes]:
        """Return the bytes of each rank, however many.

        Raises:
            PeerError: a rank failed, left, or did not come.
        """
        return self._channel.gather_bytes(data, where)

    def fail(self, error: BaseException, where: str) -> None:
        """Tell the others, in place of this rank's part of an exchange, why it fails.

        After a while on a thread: they may need a long time until they listen.
        """
        self._thread = threading.Thread(
            target=self._channel.fail, args=(error, where), name="odb_nodes-peers", daemon=True
        )
        self._thread.start()
        self._thread.join(_GRACE_S)

    @contextmanager
    def reporting_failure(self, where: str) -> Iterator[None]:
        """Tell the others why this rank fails, where what is done within this context raises."""
        try:
            yield
        except StopIteration:  # of `cost_fn`, say; it would end the epoch here
            # Not `from` it: `contextmanager` would then let the StopIteration pass.
            raised = RuntimeError(f"{where}: the source or `cost_fn` raised StopIteration.")
            self.fail(raised, where)
            raise raised  # noqa: B904
        except Exception as error:
            self.fail(error, where)
            raise

    def share_filler(
        self, reports: list[CostReport], at: AlignerState, own: Sample | None, where: str
    ) -> Sample | None:
        """Give ranks that never had a sample one of another rank's, and return this rank's.

        Args:
            reports: the reports of all ranks for the round.
            at: where this rank stands; it notes a sample that is another rank's.
            own: this rank's filler, if it has one.
            where: the place that errors name.

        Raises:
            SampleError: on the rank that should give one: it cannot be sent.
        """
        if all(report.has_filler for report in reports) or not any(one.groups for one in reports):
            return own
        donor = next(rank for rank, report in enumerate(reports) if report.groups)
        data = b""
        if self.rank == donor and own is not None:
            with self.reporting_failure(f"{where}, sending a sample to a rank that has none"):
                data = encode_sample(own)
        received = self.gather_bytes(data, where)[donor]
        if reports[self.rank].has_filler:
            return own
        at.filler = received
        return decode_sample(received)

    def interrupt(self) -> None:
        """Make a wait on another thread raise, until `begin`."""
        self._exchange.interrupt()

    def _use(self, exchange: Exchange) -> None:
        self._exchange, self._owner = exchange, Owner()
        self._channel = Channel(exchange, self._capacity)

    def _end_thread(self) -> None:
        """Wait until nobody else speaks for this rank."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._exchange.interrupt()
            thread.join()


def _sharing_nodes(source: BaseNode[Any]) -> dict[str, dict[str, Any]]:
    """Return, by name, the configurations of the nodes that yield a share of something."""
    return _by_name(
        (type(node).__name__, config)
        for node, config in _configured_nodes(source)
        if config.keys() >= {"rank", "world_size"} and config["world_size"] > 1
    )


def _nodes_alike(source: BaseNode[Any]) -> dict[str, dict[str, Any]]:
    """Return, by name, the configurations of the nodes that say that all ranks must have them."""
    return _by_name(
        (type(node).__name__, config)
        for node, config in _configured_nodes(source)
        if getattr(node, "same_on_all_ranks", False)
    )


def _configured_nodes(source: BaseNode[Any]) -> Iterator[tuple[BaseNode[Any], dict[str, Any]]]:
    for node in walk(source):
        if isinstance(config := call_member(node, "fingerprint"), dict):
            yield node, config


def _by_name(configs: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, config in configs:
        same = sum(one.partition("[")[0] == name for one in found)
        found[f"{name}[{same}]" if same else name] = config
    return found
