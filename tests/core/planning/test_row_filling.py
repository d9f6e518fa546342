"""The one or two samples that end a packed row."""

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import table_of

from odb_nodes.core.planning.row_filling import (
    NO_LIMIT,
    Room,
    exchanged,
    fullest_filling,
    nearest_filling,
)
from odb_nodes.core.planning.table import PATCHES, TOKENS

few = settings(max_examples=max(20, settings.default.max_examples // 5))

pools = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 3), st.just(0)), min_size=1, max_size=12
)
rooms = st.builds(
    Room,
    cost=st.integers(-5, 90),
    samples=st.integers(0, 3),
    patches=st.integers(0, 4) | st.just(NO_LIMIT),
)


def fits(table, columns, room):
    columns = [*columns]
    cost, patches = table[TOKENS, columns].sum(), table[PATCHES, columns].sum()
    return len(columns) <= room.samples and cost <= room.cost and patches <= room.patches


def choices(table, room):
    """No sample, and all single samples and pairs that fit."""
    columns = range(table.shape[1])
    pairs = [*combinations(columns, 1), *combinations(columns, 2)]
    return [(), *(pair for pair in pairs if fits(table, pair, room))]


@given(pools.map(table_of), rooms)
@few
def test_without_patches_no_sample_or_pair_fills_more_than_the_fullest(table, room):
    table[PATCHES] = 0
    filling = fullest_filling(table, np.arange(table.shape[1]), room)
    assert filling.missed == room.cost - table[TOKENS, [*filling.columns]].sum()
    missed = [room.cost - table[TOKENS, [*columns]].sum() for columns in choices(table, room)]
    assert filling.missed == min(missed)


@given(pools.map(table_of), rooms, st.integers(0, 200), st.randoms(use_true_random=False))
@few
def test_a_filling_fits_and_is_no_worse_than_any_single_sample(table, room, target, random):
    extra = np.array([random.randrange(100) for _ in range(table.shape[1])], np.int64)
    free = np.flatnonzero([random.random() < 0.8 for _ in range(table.shape[1])])

    def missed(columns):
        above = int(extra[[*columns]].sum()) - target
        cost = max(room.cost - int(table[TOKENS, [*columns]].sum()), 0)
        return 2 * cost + abs(above) + max(above, 0)

    singles = [columns for columns in choices(table, room) if len(columns) == 1]
    singles = [(column,) for (column,) in singles if column in free]
    for filling in (
        fullest_filling(table, free, room),
        nearest_filling(table, extra, free, room, target),
    ):
        assert not filling.columns or fits(table, filling.columns, room)
        assert {*filling.columns} <= {*free.tolist()}
    assert filling.missed == missed(filling.columns)
    assert all(filling.missed <= missed(columns) for columns in singles)


def test_the_oldest_give_way_only_where_the_row_gets_better_and_the_first_stays():
    table = table_of([(40, 0, 0), (30, 0, 0), (20, 0, 0), (59, 0, 0)])
    oldest = np.argsort(table[1])[:3]

    def fill(free, room, _row):
        return fullest_filling(table, free, room)

    room = Room(100, NO_LIMIT, NO_LIMIT)
    columns, missed = exchanged(table, oldest, room, 0, fill)
    assert (table[TOKENS, columns].tolist(), missed) == ([40, 30, 20], 10)
    columns, missed = exchanged(table, oldest, room, 9, fill)
    assert (table[TOKENS, columns].tolist(), missed) == ([40, 59], 1)
