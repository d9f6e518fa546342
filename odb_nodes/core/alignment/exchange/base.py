"""`Exchange`: an all-gather between ranks; and the types that name the ranks of a loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from odb_nodes._support.arrays import IntArray

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Interrupted(RuntimeError):
    """A wait was given up because the graph is reset or closed."""


class KnownRank(ABC):
    """A rank that knows its number and the number of ranks without torch.distributed."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of the rank."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""


ProcessGroupLike: TypeAlias = "ProcessGroup | DeviceMesh | KnownRank | None"
"""The type of a `process_group` argument; `None` is all ranks of the job."""


class Exchange(KnownRank):
    """All-gather between ranks. The base class is the single-rank case.

    The n-th call of a rank meets the n-th call of every other rank. An interrupted call counts: the
    other ranks receive its row, and the next call of the rank meets their next call.
    """

    rank: int = 0
    world_size: int = 1
    ranks: Sequence[int] = (0,)  # numbers of the ranks in the whole job, for errors
    timeout_s = 0.0  # seconds until a call gives up

    def connect(self, size: int) -> None:
        """Connect to the other ranks, whose rows have `size` integers; later calls do nothing.

        Raises:
            PeerError: a rank did not connect within `timeout_s`.
            StateError: a rank has another size.
        """

    def all_gather(self, row: IntArray) -> IntArray:
        """Return the rows of all ranks: (n,) int64 -> (world_size, n) int64.

        Raises:
            PeerError: a rank was lost, or did not answer within `timeout_s`.
            Interrupted: `interrupt` was called.
        """
        return row[None]

    def publish(self, key: str, text: str) -> None:
        """Store a text under a key, for ranks that wait elsewhere, without raising."""

    def published(self, key: str) -> str | None:  # noqa: ARG002
        """Return the text that a rank has stored under a key, or `None`."""
        return None

    def interrupt(self) -> None:
        """Make every call raise until `resume`, including a call that waits on another thread."""

    def resume(self) -> None:
        """Undo `interrupt`."""
