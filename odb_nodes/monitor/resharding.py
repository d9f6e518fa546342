"""Where a monitor stands, made into that of another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from odb_nodes.contract.state import seal_whole, unseal_whole
from odb_nodes.errors import StateError
from odb_nodes.loader.reshard_nodes import Ranks, check_same, node_of
from odb_nodes.loader.resharding import add_rule
from odb_nodes.monitor.state import MonitorState
from odb_nodes.monitor.window import Share, Totals

__all__ = ["HOLDER", "reshard_monitor"]

HOLDER = "Monitor"
_ALIKE = ("step", "written", "epoch", "epoch_written")


def reshard_monitor(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Return the states of a `Monitor` on all ranks of a job that goes on with another number.

    What was counted since the last record is of ranks that are no more: it counts in the record of
    the epoch, and the next record of steps begins after it. Losses of samples are dealt.
    """
    holder = node_of(states[0]) or HOLDER
    found = [unseal_whole(state, holder, MonitorState) for state in states]
    check_same(holder, found, *_ALIKE)
    first, shares = found[0], [Share(**one.share) for one in found]
    totals = Totals(**first.totals)
    if shares[0].rows:
        if len({len(share.rows) for share in shares}) > 1:
            raise StateError(
                f"the states of {holder} are of different places: the ranks have counted "
                "different numbers of steps. Reshard the states of one checkpoint."
            )
        totals.add(Totals.of(shares))
    at = MonitorState(
        step=first.step,
        written=first.step,
        epoch=first.epoch,
        epoch_written=first.epoch_written,
        seconds=first.seconds + shares[0].seconds,
        totals=asdict(totals),
    )
    return [
        seal_whole(holder, replace(at, samples=[one for state in own for one in state.samples]))
        for own in Ranks(len(states), world_size).redistribute(found)
    ]


add_rule(HOLDER, reshard_monitor)
