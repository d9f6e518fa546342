"""The planned groups of a restored state: checked, and planned anew for options that changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes._support.arrays import IntArray
from odb_nodes.core.alignment.aligned_round import AlignerState, damaged_state
from odb_nodes.core.alignment.filler import Filler
from odb_nodes.core.alignment.user_groups import GroupReader
from odb_nodes.core.contract.config import loading
from odb_nodes.core.contract.graph import walk
from odb_nodes.core.nodes import WindowBucketer
from odb_nodes.core.nodes.planned_groups import PlannedGroups
from odb_nodes.core.planning.budget import round_up
from odb_nodes.core.planning.facts import Facts
from odb_nodes.core.planning.rank_plan import RankPlan
from odb_nodes.errors import StateError

Reader = WindowBucketer | GroupReader


def group_nodes(source: BaseNode[Any]) -> list[WindowBucketer | PlannedGroups]:
    """Return the nodes of a graph that form groups."""
    return [node for node in walk(source) if isinstance(node, (WindowBucketer, PlannedGroups))]


def checked_groups(
    reader: Reader, state: AlignerState, groups: Sequence[IntArray], *, in_round: int
) -> list[Facts]:
    """Return the facts of the groups of a state, after checks that no sample is missing.

    groups: the ordinals of each group. The first `in_round` groups are those of the settled round.
    """
    pooled = reader.planner.pool.ordinals().tolist() if isinstance(reader, WindowBucketer) else []
    stored = reader.store.ordinals().tolist()
    planned = [ordinal for group in groups for ordinal in group.tolist()]
    expected = planned + pooled
    filler = state.filler
    if filler is not None and filler in reader.store and filler not in expected:
        expected.append(filler)  # A step has used the filler, and the store keeps it.
    if sorted(expected) != stored:
        raise damaged_state(
            f"the {len(expected)} planned and pooled samples are not the {len(stored)} samples "
            "that it has"
        )
    if not all(map(len, groups[in_round:])):
        raise damaged_state("a group of the next round has no samples")
    settled = {ordinal for group in groups[:in_round] for ordinal in group.tolist()}
    for ordinal, change in reader.restored.changed.items():
        if ordinal in settled:
            raise StateError(change)
    return [reader.facts_of(group) for group in groups]


def use_present_options(
    plan: RankPlan,
    reader: Reader,
    filler: Filler,
    nodes: Sequence[WindowBucketer | PlannedGroups],
    accumulate: int,
    epoch: int,
) -> None:
    """Plan the remaining steps anew if `exclude` or the limits have changed since the state.

    nodes: the nodes below the aligner that form groups.
    """
    keys_changed = any(node.restored.keys_changed for node in nodes)
    limits_changed = any(node.restored.limits_changed for node in nodes)
    if keys_changed and filler.block is not None:
        sample = filler.block.without_data()[0]
        if any(sample in node.excluded for node in nodes):
            filler.keep(None)
    is_planned = len(plan.settled) or plan.formed
    if not (keys_changed or limits_changed) or not is_planned or loading().leaves_epoch:
        return
    plans_anew = not isinstance(reader, GroupReader) or reader.plans_anew
    if keys_changed:
        _check_exclusions(plan, accumulate, epoch, plans_anew=plans_anew)
    if plans_anew:
        # The ranks finish the optimizer step that has begun.
        planned_steps = round_up(plan.settled.emitted, accumulate)
        reader.put_back(plan.replan(planned_steps))


def _check_exclusions(plan: RankPlan, accumulate: int, epoch: int, *, plans_anew: bool) -> None:
    """Raise a `StateError` if samples of planned groups cannot be excluded at this step."""
    micro_step = plan.settled.emitted % accumulate
    if not plans_anew:
        cause = (
            "its source must be a `WindowBucketer` or `PlannedGroups` itself, since a node in "
            "between may hold samples. Resume from a state that was saved after the last step of "
            "an epoch"
        )
    elif micro_step:
        cause = (
            f"it is within an optimizer step of {accumulate} steps, of which {micro_step} were "
            "weighted by a total that counts these samples. Resume from a state that was saved "
            "after an optimizer step, or without the new keys in `exclude`"
        )
    else:
        return
    raise StateError(
        f"RankAligner cannot exclude more samples at step {plan.step} of epoch {epoch}: {cause}."
    )
