"""The records of each rank, where a process may have written those of several virtual ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from odb_nodes.ledger.reading import Attempt, RankFile
from odb_nodes.ledger.records import ENDS_EPOCH, STEP


@dataclass(frozen=True, kw_only=True)
class RankRecords:
    """What one rank has recorded.

    Attributes:
        rank: whose records they are; a virtual rank, where processes hosted several.
        attempts: in the order in which they were written.
        files: where they are.
    """

    rank: int
    attempts: list[Attempt]
    files: list[RankFile]

    def forget_pages(self) -> None:
        """Let the system take back the memory of what was read; it is read again if need be."""
        for file in self.files:
            file.forget_pages()


def records_by_rank(files: Sequence[RankFile]) -> list[RankRecords]:
    """Return the records of each rank, in their order.

    A virtual rank counts its own steps, so its records are the same whichever process hosted it.
    """
    found: dict[int, RankRecords] = {}
    for file in files:
        own = {file.rank: file.attempts}
        if any(attempt.header.batches > 1 for attempt in file.attempts):
            own = {}
            for part in (part for one in file.attempts for part in _of_virtual_ranks(one, file)):
                own.setdefault(part.header.rank, []).append(part)
        for rank, attempts in own.items():
            records = found.setdefault(rank, RankRecords(rank=rank, attempts=[], files=[]))
            records.attempts.extend(attempts)
            records.files.append(file)
    for records in found.values():
        if len(records.files) > 1:
            records.attempts.sort(key=lambda one: one.header.time_s)
            for number, attempt in enumerate(records.attempts, start=1):
                attempt.number = number
    return [found[rank] for rank in sorted(found)]


def _of_virtual_ranks(attempt: Attempt, file: RankFile) -> list[Attempt]:
    """Return the attempts of the virtual ranks that a process hosted, with steps of their own."""
    header, batches = attempt.header, attempt.header.batches
    steps, turns = np.divmod(attempt.heads["step"].astype(np.int64), batches)
    ends = ((attempt.heads["kind"] - STEP) & ENDS_EPOCH).astype(bool)
    last = {*zip(attempt.heads["epoch"][ends].tolist(), steps[ends].tolist(), strict=True)}
    found = []
    for turn in range(batches):
        indices = np.flatnonzero(turns == turn)
        heads = attempt.heads[indices].copy()
        heads["step"] = steps[indices]
        for epoch, step in last:
            heads["kind"][(heads["epoch"] == epoch) & (heads["step"] == step)] |= ENDS_EPOCH
        lost = range(header.lost_step, header.lost_step + header.lost)
        own = header._replace(
            rank=file.rank * batches + turn,
            world_size=header.world_size * batches,
            step=-(-(header.step - turn) // batches),
            lost=sum(one % batches == turn for one in lost),
            lost_step=-(-(header.lost_step - turn) // batches),
        )
        found.append(replace(attempt, header=own, offsets=attempt.offsets[indices], heads=heads))
    return found
