"""Pull samples of a source again, to restore a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.contract.node import call_member
from odb_nodes.errors import StateError
from odb_nodes.nodes.bucketer_state import BucketerState
from odb_nodes.nodes.payload import decode_sample
from odb_nodes.nodes.sample_records import SampleRecords, with_progress
from odb_nodes.nodes.snapshots import Snapshots
from odb_nodes.sample import Sample, Skipped


def pooled_again(
    source: BaseNode[Any], snapshots: Snapshots, state: BucketerState, node: str
) -> tuple[dict[int, Sample], int]:
    """Bring a source, reset to that in a state, to where it stood, and return what was pooled.

    Args:
        source: the source.
        snapshots: keeps states of it on the way.
        state: the state of the bucketer.
        node: its name, for errors.

    Returns:
        The pooled samples by ordinal, and how many samples were processed again.

    Raises:
        StateError: the source does not yield the samples again that it yielded then.
    """
    start = state.pulled - state.pulled_since_source
    snapshots.put(start, state.source)
    records, waiting = SampleRecords.from_state(state.pool), state.ordinals()
    kept: dict[int, Sample] = {}
    replayed = 0
    if state.payload is not None:
        kept = {ordinal: decode_sample(one) for ordinal, one in state.payload}
    elif records.items() is not None:
        kept = dict(zip(waiting, records.recall(source, node), strict=True))
        replayed = len(kept)
    missing = [ordinal for ordinal in waiting if ordinal not in kept]
    again, pulled = _pull_again(source, snapshots, start, state.pulled, missing, records, node)
    return kept | again, replayed + pulled


def expect_end(source: BaseNode[Any], pulled: int, node: str) -> None:
    """Bring a source to where it had ended: one call after its last sample.

    Raises:
        StateError: it has more.
    """
    try:
        next(source)
    except StopIteration:
        return
    raise StateError(
        f"{node} cannot restore its pool: the source had ended after {pulled} samples when the "
        "state was saved, but has more now. Resume over the data that the state was saved on."
    )


def _pull_again(
    source: BaseNode[Any],
    snapshots: Snapshots,
    start: int,
    stop: int,
    wanted: Sequence[int],
    records: SampleRecords,
    node: str,
) -> tuple[dict[int, Sample], int]:
    """Bring a source from sample `start` of the epoch to `stop`.

    Args:
        source: the source.
        snapshots: keeps states of it on the way.
        start: the ordinal of the next sample that it yields.
        stop: the ordinal of the next one afterwards.
        wanted: ordinals of the samples that are asked for, ascending.
        records: what those were.
        node: name of the node that restores itself, for errors.

    Returns:
        The wanted samples by ordinal, and how many were pulled.

    Raises:
        StateError: one of them is not what it was, or the source has ended before.
    """
    is_wanted = [False] * (stop - start)
    for ordinal in wanted:
        is_wanted[ordinal - start] = True
    selects = call_member(source, "select", is_wanted)
    ordinals = wanted if selects else range(start, stop)
    kept: dict[int, Sample] = {}
    for ordinal in with_progress(ordinals, len(ordinals)):
        snapshots.take_if_due(ordinal)
        try:
            sample: Sample | Skipped = next(source)
        except StopIteration:
            raise StateError(
                f"{node} cannot restore its pool: the source ended before sample {ordinal} of the "
                "epoch, which it had yielded when the state was saved. Resume over the data that "
                "the state was saved on."
            ) from None
        if is_wanted[ordinal - start]:
            name = f"sample {ordinal} of the epoch"
            kept[ordinal] = records.checked(len(kept), sample, node, name)
    return kept, len(ordinals)
