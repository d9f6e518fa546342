"""First fit, by which packed groups and the tail of an epoch are formed."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_nodes.core.planning.table import first_fit

few = settings(max_examples=max(20, settings.default.max_examples // 5))

columns = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 6)), min_size=1, max_size=20)
"""What each sample takes of two limits."""
LIMITS = (20, 7)


def cut(needs, rooms=LIMITS):
    """The groups of these samples, where each group has the same room."""
    table = np.array(needs, np.int64).T
    return first_fit(table, np.broadcast_to(np.array(rooms)[:, None], table.shape))


def test_a_sample_goes_to_the_first_group_that_has_room_for_it():
    # From the last: 9 | 6 | 5 into the second | 4 into the second | 1 into the first.
    assert cut([(1, 0), (4, 0), (5, 0), (6, 0), (9, 0)], (10, 0)) == [[4, 0], [3, 1], [2]]
    # The second limit has no room in the first group.
    assert cut([(1, 3), (4, 3)], (10, 5)) == [[1], [0]]


def test_a_group_has_the_room_of_the_sample_that_it_begins_with():
    needs = np.ones((1, 5), np.int64)
    assert first_fit(needs, np.array([[9, 9, 9, 1, 2]])) == [[4, 3], [2, 1, 0]]


def test_no_samples_are_no_groups():
    empty = np.empty((2, 0), np.int64)
    assert first_fit(empty, empty) == []


@given(columns)
@few
def test_each_sample_is_in_one_group_which_holds_no_more_than_it_may(needs):
    groups = cut(needs)
    assert sorted(column for group in groups for column in group) == [*range(len(needs))]
    for number, group in enumerate(groups):
        assert group == sorted(group, reverse=True)
        sums = np.array([needs[column] for column in group]).sum(axis=0)
        assert len(group) == 1 or (sums <= LIMITS).all()
        # It was begun since no group before it had room.
        begun_by = group[0]
        for before in groups[:number]:
            taken = np.array([needs[column] for column in before if column > begun_by]).sum(axis=0)
            assert (taken + needs[begun_by] > LIMITS).any()


@given(columns, st.data())
@few
def test_first_fit_without_some_groups_makes_the_other_groups(needs, data):
    groups = cut(needs)
    gone = data.draw(st.sets(st.integers(0, len(groups) - 1), max_size=len(groups) - 1))
    kept = [group for number, group in enumerate(groups) if number not in gone]
    rest = sorted(column for group in kept for column in group)
    again = cut([needs[column] for column in rest])
    assert [[rest[index] for index in group] for group in again] == kept
