"""Rules: how a round that is planned ends, and the ranks that go on begin the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.errors import StateError
from odb_nodes.loader.resharding.pools import all_keys, anew_pool, reshard_pool, without_keys
from odb_nodes.loader.resharding.sealed import LATER, Ranks, check_alike, opened, sealed_for_ranks
from odb_nodes.nodes.sample_records import NO_RECORDS

_SAME_PLACE = (
    "epoch",
    "cycle",
    "step",
    "emitted",
    "round",
    "next_limits",
    "next_caps",
    "next_window",
    "shares_rest",
    "weights",
)


def reshard_aligner(
    states: Sequence[Any], world_size: int, *, left: bool
) -> tuple[list[dict[str, Any]], bool]:
    """Return the states of a `RankAligner` of other ranks.

    Args:
        states: its state on each rank, in their order.
        world_size: number of ranks from now on.
        left: the epoch was left, so that the next one follows.

    Returns:
        The states, and whether they stand between two epochs.

    Raises:
        StateError: they cannot be resharded where they stand.
    """
    found, ranks = opened(states, AlignerState), Ranks(len(states), world_size)
    config = states[0]["config"]
    at_end = left or all(at.is_at_end(at.steps()) for at in found)
    if at_end or not any(at.step or at.round or at.plan for at in found):
        check_alike("RankAligner", found, ("epoch", "cycle"))
        sources = anew_pool([at.source for at in found], ranks)
        over = _between_rounds() | {"last": True} if at_end else {}
        return _sealed(states, found, ranks, sources, **over), True
    _check_can_be_dealt(found, config)
    sources = reshard_pool(found, ranks)
    check_alike("RankAligner", found, ("totals_digest",))  # last: other errors say what differs
    rest = _between_rounds() | {
        "round": found[0].round + any(at.plan is not None for at in found),
        "held": NO_RECORDS,
        "sizes": [0, 0],
        "weight_changes": _in_force(found),
        "shares_rest": found[0].shares_rest and world_size > 1,
    }
    return _sealed(states, found, ranks, sources, **rest), False


def _between_rounds() -> dict[str, Any]:
    """Return what a state has where no round has begun, and none is agreed on."""
    return {
        **dict.fromkeys(("plan", "filler", "caps", "next_caps", "limits")),
        **dict.fromkeys(("emitted", "splits"), 0),
        **dict.fromkeys(("last", "drained", "unsettled"), False),
    }


def _check_can_be_dealt(found: Sequence[AlignerState], config: Mapping[str, Any]) -> None:
    """Check that all ranks stand between the same two optimizer steps, and hold samples by keys.

    Raises:
        StateError: they do not, or `uneven="stop"` has begun to leave samples out.
    """
    check_alike("RankAligner", found, _SAME_PLACE)
    check_between_optimizer_steps(found[0], config)
    if found[0].last and config["uneven"] == "stop":
        raise StateError(
            'the last round of an epoch with `uneven="stop"` has begun, which leaves samples out '
            "that some ranks still have: go on with as many ranks as before up to its end."
        )
    if any(at.held is None for at in found):
        raise without_keys()


def check_between_optimizer_steps(
    at: AlignerState, config: Mapping[str, Any], *, out: int = 0, hosted: int = 1
) -> None:
    """Check that a rank stands between two optimizer steps.

    Args:
        at: where it stands.
        config: the configuration of its `RankAligner`.
        out: batches that are out of the step that is next.
        hosted: virtual ranks of a process, which make as many batches of a step.

    Raises:
        StateError: it does not.
    """
    accumulate = config["accumulate"]
    inside = at.emitted % accumulate
    if at.is_at_end(at.steps()) or not (inside or out):
        return
    done, what = inside * hosted + out, "batches" if hosted > 1 else "steps"
    raise StateError(
        f"the states stand at step {at.step} of epoch {at.epoch}, within an optimizer step of "
        f"{accumulate * hosted} {what}, of which {done} are done: their gradients are those of "
        "other ranks. Reshard a checkpoint that was saved where "
        "`StepInfo.ends_optimizer_step` is True."
    )


def _sealed(
    states: Sequence[Any],
    found: Sequence[AlignerState],
    ranks: Ranks,
    sources: Sequence[Any],
    **changes: Any,
) -> list[dict[str, Any]]:
    """Return states with what counts for all ranks in one place each, and their sources."""
    left_out = ranks.joined([[*at.left_out, *at.left_out_ahead] for at in found])
    unemitted = ranks.summed([at.unemitted_samples for at in found])
    excluded = ranks.summed([at.excluded_samples for at in found])
    wishes = [at.wish for at in found if at.wish]
    alike = {
        "started": any(at.started for at in found),
        "wish": min(wishes, default=0),
        "excluded": all_keys([at.excluded for at in found]),
        "left_out_ahead": [],
        "held": None,
        "sizes": [],
        **changes,
    }
    values = [
        replace(
            found[0],
            source=sources[rank],
            left_out=left_out[rank],
            unemitted_samples=unemitted[rank],
            excluded_samples=excluded[rank],
            **alike,
        )
        for rank in range(ranks.after)
    ]
    return sealed_for_ranks(states[0], values)


def _in_force(found: Sequence[AlignerState]) -> list[Any]:
    """Return the weights that were set, once all that is read from now on is drawn by them."""
    if (weights := found[0].weights) is None:
        return []
    if any(at.weight_changes[-1][0] > at.source["pulled"] for at in found):
        raise StateError(
            "the weights of the mixture were set a few steps ago, and are not yet in force on all "
            f"ranks. {LATER}"
        )
    return [(0, weights)]
