"""Several virtual ranks in one process: their graphs run in turns, their messages travel as one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from odb_nodes._core.signals import deferred_interrupt
from odb_nodes.alignment.exchange.base import Exchange, IntArray, Interrupted, LocalExchange
from odb_nodes.alignment.exchange.resolve import group_rank, resolve_exchange
from odb_nodes.errors import PeerError

T = TypeVar("T")

_POLL_S = 0.05  # an interruption is noticed so late: `interrupt` must not wait for a lock


class HostedRanks:
    """The virtual ranks of a job that this process hosts: `hosted` of them, next to each other.

    Each has a graph and an `Exchange` of its own. While a step is taken, each graph runs on a
    thread, but only one at a time: what they call, such as datasets and collate functions, need not
    be made for several threads. When one waits for messages, the next runs.

    Args:
        virtual_ranks: number of virtual ranks of the job; a multiple of the number of its ranks.
        process_group: the ranks of the job; see `resolve_exchange`.
        timeout_s: seconds until a call of an exchange gives up.

    Raises:
        ValueError: `virtual_ranks` is not a multiple of the number of ranks.
    """

    def __init__(self, virtual_ranks: int, process_group: Any, timeout_s: float) -> None:
        self.rank, self.processes = group_rank(process_group)
        if virtual_ranks % self.processes:
            raise ValueError(
                f"`virtual_ranks` must be a multiple of the number of ranks ({self.processes}), "
                f"so that each hosts as many, but is {virtual_ranks}."
            )
        self.virtual_ranks, self.hosted = virtual_ranks, virtual_ranks // self.processes
        self.timeout_s = timeout_s
        self.wait_s = 0.0
        """Seconds spent waiting for other processes so far."""
        self.batches_out = 0
        """Batches that each process has had of the step that is taken, before it was resumed."""
        self._process_group = process_group
        self._outer: Exchange = LocalExchange()
        self._connecting = threading.Lock()
        self._changed = threading.Condition()
        self._running: int | None = None  # the number whose graph has its turn
        self._in_step: set[int] = set()  # numbers whose calls have not ended
        self._message = _Message()
        self._interrupted = False

    def exchange(self, number: int) -> Exchange:
        """Return the exchange of a virtual rank, `number` in `range(hosted)` of this process."""
        return _HostedExchange(self, number)

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Return what the call of each virtual rank returns.

        Raises:
            StopIteration: a call raised it, and none another error.
            Exception: what a call raised; not a `PeerError` where another raised its cause.
        """
        outcomes: list[Any] = [None] * len(calls)

        def work(number: int) -> None:
            try:
                self._take_turn(number)
                outcomes[number] = calls[number]()
            except BaseException as error:
                outcomes[number] = _Raised(error)
                if not isinstance(error, Exception):
                    self.interrupt()
            finally:
                self._leave(number)

        self._in_step.add(0)
        try:
            with deferred_interrupt():  # Who knows whether a thread runs whose start it interrupts?
                for number in range(1, len(calls)):
                    self._start(work, number)
            work(0)
            self._wait_for_end()
        except BaseException:  # Ctrl-C: no graph may go on with what the trainer has left.
            self._leave(0)
            self.leave_step()
            raise
        raised = [one.error for one in outcomes if isinstance(one, _Raised)]
        if raised:
            raise min(raised, key=_distance_to_cause)
        return outcomes

    def leave_step(self) -> None:
        """End what is left of a step that was interrupted, as by a second Ctrl-C."""
        if self._in_step:
            self.interrupt()
            self._wait_for_end()

    def connect(self, size: int) -> None:
        """Connect this process to the others; see `Exchange.connect`."""
        with self._connecting:
            self._outer.connect(size * self.hosted)

    def gather(self, number: int, row: IntArray) -> IntArray:
        """Return the rows of all virtual ranks; see `Exchange.all_gather`."""
        had_turn = self._give_turn(number)
        try:
            return self._gather(number, row)
        finally:
            if had_turn:
                self._take_turn(number)

    def interrupt(self) -> None:
        """Make all calls raise until `resume`. Messages that are not complete are not sent."""
        self._interrupted = True
        self._outer.interrupt()

    def resume(self) -> None:
        """Take `interrupt` back.

        Raises:
            RuntimeError: see `resolve_exchange`; or the job has another number of ranks now.
        """
        if isinstance(self._outer, LocalExchange):  # The job may have been set up since.
            outer = resolve_exchange(self._process_group, self.timeout_s)
            if outer.world_size != self.processes:
                raise RuntimeError(
                    f"the job has {outer.world_size} ranks, but had {self.processes} when the "
                    "loader was made. Make it after `torch.distributed.init_process_group`."
                )
            self._outer = outer
        self._outer.resume()
        self._message, self._interrupted = _Message(), False

    def _start(self, work: Callable[[int], None], number: int) -> None:
        self._in_step.add(number)
        try:
            threading.Thread(
                target=work, args=(number,), name="odb_nodes-virtual", daemon=True
            ).start()
        except RuntimeError:  # There are too many threads.
            self._leave(number)
            raise

    def _wait_for_end(self) -> None:
        # Not `join`: before Python 3.13, one that is interrupted takes the thread to have ended.
        with self._changed:
            while self._in_step:  # Each wait of a graph ends within `timeout_s`.
                self._changed.wait(_POLL_S)

    def _gather(self, number: int, row: IntArray) -> IntArray:
        with self._changed:
            self._check()
            message = self._message
            # Outside of a step only a graph that fails speaks: for all of them.
            numbers = [number] if self._in_step else [*range(self.hosted)]
            message.rows |= dict.fromkeys(numbers, row)
            if is_whole := len(message.rows) == self.hosted:
                self._message = _Message()
            else:
                self._wait_for(message)
        if is_whole:
            message.answer = self._send(message)
            with self._changed:
                self._changed.notify_all()
        if isinstance(message.answer, Exception):
            raise message.answer
        assert message.answer is not None
        return message.answer

    def _send(self, message: _Message) -> IntArray | Exception:
        rows = np.concatenate([message.rows[number] for number in range(self.hosted)])
        start = time.perf_counter()
        try:
            return self._outer.all_gather(rows).reshape(self.virtual_ranks, -1)
        except Exception as error:  # for each of the virtual ranks
            return error
        finally:
            self.wait_s += time.perf_counter() - start

    def _wait_for(self, message: _Message) -> None:
        deadline = time.monotonic() + self.timeout_s
        while message.answer is None:
            self._check()
            self._changed.wait(_POLL_S)
            missing = sorted({*range(self.hosted)} - {*message.rows})
            if missing and time.monotonic() > deadline:
                first = self.rank * self.hosted
                raise PeerError(
                    f"no message from virtual rank {[first + one for one in missing]} of this "
                    f"process within {self.timeout_s} s."
                )

    def _check(self) -> None:
        if self._interrupted:
            raise Interrupted("the exchange was interrupted.")

    def _take_turn(self, number: int) -> None:
        with self._changed:
            while number in self._in_step and self._running is not None:
                self._check()
                self._changed.wait(_POLL_S)
            if number in self._in_step:  # and not a thread that outlives its graph's
                self._running = number

    def _give_turn(self, number: int) -> bool:
        """Let another graph run, and return whether this one did.

        The turn is that of a virtual rank: one that fails speaks from a thread of its own, while
        the graph's thread waits for that one.
        """
        with self._changed:
            had_turn = self._running == number
            if had_turn:
                self._running = None
                self._changed.notify_all()
        return had_turn

    def _leave(self, number: int) -> None:
        with self._changed:
            self._in_step.discard(number)
            self._changed.notify_all()
        self._give_turn(number)


class _HostedExchange:
    """The exchange of one virtual rank, see `Exchange`.

    Attributes:
        batch_of_step: which of the batches that this process takes for a step is that of this
            virtual rank, and of how many.
    """

    def __init__(self, team: HostedRanks, number: int) -> None:
        self._team, self._number = team, number
        self.rank, self.world_size = team.rank * team.hosted + number, team.virtual_ranks
        self.ranks: Sequence[int] = range(team.virtual_ranks)
        self.timeout_s = team.timeout_s
        self.batch_of_step = (number, team.hosted)

    @property
    def place(self) -> dict[str, int]:
        """Where this process stands, which all must have in common."""
        return {"batches of the step that are out": self._team.batches_out}

    @property
    def wait_s(self) -> float:
        """Seconds that this process has waited for others so far."""
        return self._team.wait_s

    def connect(self, size: int) -> None:
        """Connect this process to the others."""
        self._team.connect(size)

    def all_gather(self, row: IntArray) -> IntArray:
        """Return the rows of all virtual ranks."""
        return self._team.gather(self._number, row)

    def interrupt(self) -> None:
        """Make every call of this process raise until `resume`."""
        self._team.interrupt()

    def resume(self) -> None:
        """Take `interrupt` back."""
        self._team.resume()


class _Message:
    """The rows of the virtual ranks of one process, and what comes back for them."""

    def __init__(self) -> None:
        self.rows: dict[int, IntArray] = {}
        self.answer: IntArray | Exception | None = None


class _Raised:
    """What a call raised, in place of what it would have returned."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _distance_to_cause(error: BaseException) -> int:
    """Return how far an error is from what another one of the same step may be about."""
    if not isinstance(error, Exception):
        return 0
    kinds = (PeerError, Interrupted, StopIteration)
    return next((far for far, kind in enumerate(kinds, start=2) if isinstance(error, kind)), 1)
