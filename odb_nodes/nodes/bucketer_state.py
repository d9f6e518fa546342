"""Where a bucketer stands: where to pull from again, and which samples are waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import numpy as np

from odb_nodes.contract import Count, NodeState, RowsOf, SourceState, Sparse
from odb_nodes.nodes.excluded_keys import ExcludedState
from odb_nodes.nodes.pool_window import WindowState
from odb_nodes.nodes.sample_records import RecordsState, SampleRecords

PoolState = Literal["replay", "payload"]
"""What a state may hold of the pool: how to make its samples again, or the samples."""

LimitsState = tuple[Count, Count | None, Count | None, Count, Count | None]
"""The fields of `Limits`."""


@dataclass(kw_only=True)
class BucketerState(NodeState):
    """The state of a `WindowBucketer`.

    Attributes:
        source: the state of the source; where samples are not made again by their keys, at or
            before the oldest pooled one.
        mode: what the state holds of the pool, `"replay"` or `"payload"`.
        pulled: samples pulled in the epoch.
        pulled_since_source: samples of these that were pulled after `source`.
        ended: the source has ended.
        limits: what groups are formed under, and samples admitted; see `Limits`.
        has_own_limits: these are others than those of the budget.
        pool: `"replay"`: the records of the pooled samples, oldest first.
        waiting: `"replay"`: a bit for each of the samples last pulled, the last one first: whether
            it is pooled.
        payload: `"payload"`: ordinal and encoding of each pooled sample.
        excluded: the keys that are excluded, by source.
        excluded_samples: samples that were left out by their keys in the epoch.
        dropped_samples: samples that `oversize="drop"` left out in the epoch.
        oversize_samples: samples that exceeded the budget on their own.
        skipped_samples: samples that processing skipped, by reason.
        left_out: key, source and reason of those left out since the last group that is out.
        caps: what further groups are cut to, ascending, as bytes; `None` for nothing.
        dearest_groups: of the groups that `dearest_first` puts first in the epoch, those that are
            out.
        window: the window, and what it is chosen by; `None` where it is a number of samples.
    """

    source: SourceState
    mode: str
    pulled: Count
    pulled_since_source: Count
    ended: bool
    limits: LimitsState
    has_own_limits: bool
    pool: RecordsState
    waiting: Annotated[bytes | None, RowsOf(1)]
    payload: list[tuple[int, bytes]] | None
    excluded: ExcludedState
    excluded_samples: Count
    dropped_samples: Count
    oversize_samples: Count
    skipped_samples: dict[str, Count]
    left_out: list[tuple[int | None, str, str]]
    dearest_groups: Count
    caps: Annotated[bytes | None, RowsOf(8), Sparse()] = None
    window: Annotated[WindowState | None, Sparse()] = None

    def validate(self) -> None:
        """Check that what is pooled was pulled."""
        known = self.mode in get_args(PoolState)
        if not known or (self.payload is None) == (self.mode == "payload"):
            raise ValueError(f"`mode` is {self.mode!r}, which does not go with `payload`.")
        if self.pulled_since_source > self.pulled:
            raise ValueError(
                f"`pulled_since_source` must be at most `pulled`, {self.pulled}, but is "
                f"{self.pulled_since_source}."
            )
        carried = [ordinal for ordinal, _ in self.payload or ()]
        if carried != sorted({*carried}) or not all(0 <= one < self.pulled for one in carried):
            raise ValueError("`payload` holds samples that cannot have been pulled.")
        records, ordinals = SampleRecords.from_state(self.pool), self.ordinals()
        first = 0 if self.pool[2] else self.pulled - self.pulled_since_source
        if len(ordinals) != len(records) or any(ordinal < first for ordinal in ordinals):
            raise ValueError("`pool` holds samples that cannot have been pulled.")

    def ordinals(self) -> list[int]:
        """Return the ordinals of the pooled samples, ascending."""
        bits = np.unpackbits(np.frombuffer(self.waiting or b"", np.uint8))
        ordinals: list[int] = (self.pulled - 1 - np.flatnonzero(bits)[::-1]).tolist()
        return ordinals
