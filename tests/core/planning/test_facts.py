"""Facts of samples: one table of named columns, and tables that are found by ordinal."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import facts_of

from odb_nodes.core.planning.facts import NO_FACTS, ColumnsByOrdinal, Facts, FactsByOrdinal

few = settings(max_examples=max(20, settings.default.max_examples // 5))

COLUMNS = ("ordinal", "tokens", "targets", "patches", "task", "sharers")


def columns_of(facts):
    return [getattr(facts, name).tolist() for name in COLUMNS]


def three_samples():
    columns = dict(zip(COLUMNS, np.arange(18).reshape(6, 3), strict=True))
    return columns, Facts(**columns)


def test_each_column_has_its_name():
    columns, facts = three_samples()
    assert columns_of(facts) == [column.tolist() for column in columns.values()]
    assert (len(facts), facts.lengths) == (3, [3, 4, 5])


def test_facts_default_to_no_task_and_one_sharer():
    facts = Facts(ordinal=[4, 5], tokens=[1, 2], targets=[0, 1], patches=0)
    assert columns_of(facts) == [[4, 5], [1, 2], [0, 1], [0, 0], [0, 0], [1, 1]]


def test_facts_do_not_change_with_what_they_were_made_of():
    columns, facts = three_samples()
    for column in columns.values():
        column += 1
    assert facts.ordinal.tolist() == [0, 1, 2]


@pytest.mark.parametrize("rows", [[2, 0], [], [1], [0, 0]])
@pytest.mark.parametrize("kind", [list, np.array, lambda rows: np.array(rows, np.int64)])
def test_rows_are_taken_in_their_order(rows, kind):
    _, facts = three_samples()
    expected = [[column[row] for row in rows] for column in columns_of(facts)]
    assert columns_of(facts.take(kind(rows))) == expected


def test_other_rows_remain():
    _, facts = three_samples()
    assert facts.without([1]).ordinal.tolist() == [0, 2]
    assert columns_of(facts.without([])) == columns_of(facts)
    assert len(facts.without(np.array([2, 0, 1]))) == 0


def test_parts_are_joined_in_their_order():
    _, facts = three_samples()
    joined = Facts.joined([facts.take([1, 2]), NO_FACTS, facts.take([0])])
    assert columns_of(joined) == columns_of(facts.take([1, 2, 0]))
    assert len(Facts.joined([])) == len(NO_FACTS) == 0


# --- found by ordinal ----------------------------------------------------------------------------


@st.composite
def puts(draw):
    """Ordinals that are put in one after the other, and the oldest one needed from then on."""
    steps, stop, oldest = [], draw(st.integers(0, 50)), 0
    for _ in range(draw(st.integers(1, 12))):
        if draw(st.booleans()):  # further ones, after a gap
            first = stop + draw(st.sampled_from([0, 0, 1, 40, 200]))
        else:  # some that were put in before, or older than all that wait
            first = max(0, stop - draw(st.integers(0, 90)))
        span = np.arange(first, first + draw(st.sampled_from([0, 1, 3, 30, 100])))
        if draw(st.booleans()):
            span = span[span % 3 > 0]
        steps.append((span, oldest))
        stop = max([stop, *(span + 1)])
        oldest = draw(st.integers(min([oldest, *span]), stop))
    return steps


@given(puts())
@few
def test_columns_are_found_by_ordinal_as_in_a_dict(steps):
    columns, expected, ever = ColumnsByOrdinal(2), {}, set()
    for number, (ordinals, oldest) in enumerate(steps):
        put = np.stack((ordinals * 7, np.full(len(ordinals), number)))
        columns.put(ordinals, put, oldest)
        expected = {key: column for key, column in expected.items() if key >= oldest}
        expected |= zip(ordinals.tolist(), put.T.tolist(), strict=True)
        ever |= {*ordinals.tolist()}
        taken = columns.take(np.array([*expected], np.int64))
        assert taken.T.tolist() == [*expected.values()]
        assert columns.stop == max([0, *(ordinal + 1 for ordinal in ever)])
        unused = {*range(columns.first, columns.stop)} - ever
        assert not columns.take(np.array([*unused], np.int64)).any()


def test_a_table_holds_about_twice_the_waiting_samples():
    columns, moves, before = ColumnsByOrdinal(1), 0, None
    for first in range(0, 20_000, 5):
        ordinals = np.arange(first, first + 5)
        columns.put(ordinals, ordinals[None], first - 95)
        moves += columns.table is not before
        before = columns.table
        assert columns.capacity <= 2 * 100 + 32
    assert moves < 200  # a copy is made now and then
    assert columns.take(np.arange(19_900, 20_000)).tolist() == [[*range(19_900, 20_000)]]


def test_facts_are_found_by_ordinal():
    facts = facts_of([5, 6, 7], 3, patches=[1, 0, 2], task=[0, 1, 0], sharers=4)
    waiting = FactsByOrdinal()
    waiting.add(facts.take([0, 1]), 3)
    waiting.add(facts.take([2]), 4)
    assert columns_of(waiting.take(np.array([5, 4]))) == columns_of(facts.take([2, 1]))
