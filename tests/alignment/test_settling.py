"""What ranks make of a round that samples were left out of."""

import numpy as np
import pytest

from odb_nodes import Sample
from odb_nodes.alignment.aligned_round import AlignedRound
from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.alignment.peers import Peers
from odb_nodes.nodes.excluded_keys import ExcludedKeys
from odb_nodes.planning.alignment import FILLER, CostReport, step_totals


def round_of(sizes):
    """A round whose groups have so many samples, with ascending keys; 0 for a step to fill."""
    keys = iter(range(sum(sizes)))
    groups = [[Sample(None, 5, 4, key=next(keys)) for _ in range(size)] for size in sizes]
    numbers = iter(range(len(sizes)))
    rows = [(next(numbers) if size else FILLER, size, 4 * size, 0, 5 * size) for size in sizes]
    steps = AlignedRound(np.array(rows, np.int64))
    steps.fill([group for group in groups if group], Sample(None, 1, 1))
    return steps


def report_of(steps):
    rows = [(len(group), 4 * len(group), 5 * len(group), 0, 0) for group in steps.groups()]
    return CostReport(np.array(rows, np.int64), len(rows), ended=True)


def test_a_group_that_becomes_empty_is_one_to_fill():
    steps = round_of([2, 1, 3])
    gone = steps.leave_out(1, ExcludedKeys({"": [0, 2, 4]}))
    assert [one.key for one in gone] == [2, 4]  # the first step is out: what it had stays counted
    assert [len(group) for group in steps.groups()[1:]] == [0, 2]
    assert np.frombuffer(steps.to_bytes(), "<i8").reshape(-1, 5)[:, 0].tolist() == [0, FILLER, 2]


@pytest.mark.parametrize(
    ("accumulate", "emitted", "left"), [(1, 0, [3, 1, 2]), (2, 2, [3, 0, 0, 1, 2]), (3, 3, None)]
)
def test_optimizer_steps_that_nobody_has_a_sample_for_are_dropped_as_a_whole(
    accumulate, emitted, left
):
    sizes = {1: [0, 3, 1, 0, 2], 2: [3, 0, 0, 0, 0, 1, 2], 3: [1, 1, 1, 0, 0, 0]}[accumulate]
    steps = round_of(sizes)
    totals = step_totals([report_of(steps)] * 2)[emitted:]
    steps.settle(emitted, totals, accumulate)
    table = np.frombuffer(steps.to_bytes(), "<i8").reshape(-1, 5)
    expected = [1, 1, 1] if left is None else left
    assert table[emitted:, 1].tolist() == [2 * size for size in expected[emitted:]]
    assert table[:, 0].tolist().count(FILLER) == expected.count(0)
    assert len(steps) == len(expected)


def test_where_no_rank_has_a_group_nobody_sends_one_to_fill_with():
    nothing = CostReport(np.zeros((2, 5), np.int64), 0, ended=True, has_filler=False)
    assert Peers(None, 1.0, 8).share_filler([nothing] * 2, AlignerState(), None, "a round") is None
