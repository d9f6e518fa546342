"""Where a rank stands in the rounds of an epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from odb_nodes.alignment.aligned_round import AlignedRound
from odb_nodes.contract import Count, EpochState, InRange, RowsOf, SourceState, Sparse
from odb_nodes.nodes.bucketer_state import LimitsState
from odb_nodes.nodes.excluded_keys import ExcludedState
from odb_nodes.nodes.sample_records import RecordsState, SampleRecords
from odb_nodes.planning.auto_window import MOST_WINDOW


@dataclass(kw_only=True)
class AlignerState(EpochState):
    """The state of a `RankAligner`.

    Attributes:
        source: the state of the source: after what is held, or before the round where nothing is.
        round: the number of the round in the epoch.
        step: the number of the next step in the epoch.
        emitted: the steps of the round that are out.
        plan: the plan of the round, as bytes; `None` between rounds.
        tasks: number of the tasks whose targets it has.
        splits: how many of this rank's groups were split in the round.
        last: there is no round after this one.
        drained: the source had no groups left for this round.
        shares_rest: the next round is the last, of all that is left, which ranks share out.
        filler: the sample that this rank fills with, encoded, where it came from another rank.
        unemitted_samples: the samples that `uneven="stop"` left over.
        held: the records of the samples that are held, where the source can make them again: those
            of the groups of the round's further steps, of the group after the round, and the one to
            fill with.
        sizes: samples of each of these, 0 where there is none.
        left_out: key, source and reason of what is left out, and in no step yet.
        left_out_ahead: likewise, of what comes with the next round.
        limits: the `Limits` of the groups after the first of the round, where they are tighter than
            where `source` stands.
        next_limits: likewise of the next round, and those after it.
        caps: what the groups of the round are cut to, ascending, as bytes; `None` where nothing.
        next_caps: likewise for the next round.
        window: the samples of an `"auto"` window after the first group of the round; 0 in the first
            round of an epoch, which goes on as it began.
        next_window: likewise for the next round; the next epoch begins with it.
        wish: the `tokens` that this rank asks all ranks for; 0 for none.
        excluded: the keys that are excluded and were not yet where `source` stands, by source.
        excluded_samples: samples that were left out of the groups of rounds by their keys.
        unsettled: samples were excluded since the ranks told each other what the further steps of
            the round hold.
        weight_changes: items of the epoch that this rank's mixture draws before it changes its
            weights, and the weights; those that a replay from `source` may come to, and the last.
        weight_calls: calls that have set weights, up to the last one that ranks have agreed on.
    """

    source: SourceState = field(default_factory=dict)
    round: Count = 0
    step: Count = 0
    emitted: Count = 0
    plan: Annotated[bytes | None, RowsOf(8)] = None
    tasks: Count = 0
    splits: Count = 0
    last: bool = False
    drained: bool = False
    shares_rest: Annotated[bool, Sparse()] = False
    filler: bytes | None = None
    unemitted_samples: Count = 0
    held: RecordsState | None = None
    sizes: list[Count] = field(default_factory=list)
    left_out: list[tuple[int | None, str, str]] = field(default_factory=list)
    left_out_ahead: list[tuple[int | None, str, str]] = field(default_factory=list)
    limits: LimitsState | None = None
    next_limits: LimitsState | None = None
    caps: Annotated[bytes | None, RowsOf(8), Sparse()] = None
    next_caps: Annotated[bytes | None, RowsOf(8), Sparse()] = None
    window: Annotated[int, InRange(0, MOST_WINDOW), Sparse()] = 0
    next_window: Annotated[int, InRange(0, MOST_WINDOW), Sparse()] = 0
    wish: Count = 0
    excluded: ExcludedState = field(default_factory=dict)
    excluded_samples: Count = 0
    unsettled: bool = False
    weight_changes: Annotated[list[tuple[Count, dict[str, float]]], Sparse()] = field(
        default_factory=list
    )
    weight_calls: Annotated[Count, Sparse()] = 0

    def validate(self) -> None:
        """Check that the state stands within its round."""
        steps = len(self.steps())
        if self.emitted > steps or self.emitted > self.step:
            raise ValueError(
                f"`emitted` must be at most the steps of the round, {steps}, and of the epoch, "
                f"{self.step}, but is {self.emitted}."
            )
        if self.held is not None and (
            sum(self.sizes) != len(SampleRecords.from_state(self.held))
            or len(self.sizes) != steps - self.emitted + 2
        ):
            raise ValueError("`held` and `sizes` do not go together.")

    def steps(self) -> AlignedRound:
        """Return the steps of the round, without their groups."""
        return AlignedRound.from_bytes(self.plan, self.tasks)

    def agreed(self) -> dict[str, Any]:
        """Return what ranks that go on from the same place have agreed on."""
        weights = {"weights of the mixture": self.weights} if self.weights else {}
        caps = [] if self.next_caps is None else np.frombuffer(self.next_caps, np.int64).tolist()
        terms = {
            "limits of the next round": self.next_limits,
            "caps of the next round": caps,
            "window of the next round": self.next_window,
            "whether ranks share out the rest": self.shares_rest,
        }
        return {"step": self.step, **terms, **weights}

    @property
    def totals_digest(self) -> int:
        """A number that is the same on all ranks of the same round."""
        return self.steps().digest()

    @property
    def weights(self) -> dict[str, float] | None:
        """The weights that were set last, and agreed on; `None` where none were."""
        return self.weight_changes[-1][1] if self.weight_changes else None

    def is_at_end(self, steps: AlignedRound) -> bool:
        """Tell whether this is after the last step of the epoch, where `steps` are the round's."""
        return self.last and self.emitted == len(steps)

    def fixed_fields(self) -> tuple[str, ...]:
        """Return the fields of the fingerprint that cannot be others where this state goes on."""
        steps = self.steps()
        if self.is_at_end(steps):
            return ()
        of_the_plan = ("cost_fn", "modalities", "tasks") if len(steps) else ()
        return ("world_size", "round_size", "accumulate", "uneven", *of_the_plan)
