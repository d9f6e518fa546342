"""Packed rows of all ranks that are level in time, of samples that are all known."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import lognormal

from odb_nodes import TokenBudget
from odb_nodes.core.planning import StepTime
from odb_nodes.core.planning.level_rows import fewest_rows, level_rows, rows_of_all
from odb_nodes.core.planning.packing import Packing

few = settings(max_examples=max(20, settings.default.max_examples // 5))

packed = st.one_of(
    st.builds(
        TokenBudget,
        st.integers(30, 200),
        layout=st.just("packed"),
        max_samples=st.none() | st.integers(1, 9),
        pad_to_multiple_of=st.sampled_from([1, 4, 16]),
    ),
    st.builds(
        TokenBudget,
        st.integers(100, 900),
        layout=st.just("packed"),
        max_samples=st.none() | st.integers(1, 9),
        pad_to_multiple_of=st.sampled_from([1, 16]),
        attention_tokens=st.integers(20, 400),
    ),
)
step_times = st.sampled_from(
    [StepTime(squares=1 / 20), StepTime(squares=1), StepTime(squares=0.001)]
)


def extra_of(lengths, step_time):
    tokens = np.array(lengths, np.int64)
    return tokens, step_time.extra(tokens, np.zeros_like(tokens))


def parts_of(lengths, budget, world_size, window, step_time):
    tokens, extra = extra_of(lengths, step_time)
    return [
        [row.tolist() for row in part]
        for part in level_rows(tokens, extra, Packing(budget), world_size, window)
    ]


def check_rows(rows, lengths, budget):
    """No row is over its room, but those of one oversize sample."""
    for row in rows:
        assert len(row)
        assert len(row) <= (budget.max_samples or len(row))
        cost = budget.cost([lengths[index] for index in row])
        assert cost <= budget.tokens or len(row) == 1


@given(
    st.lists(st.integers(1, 220), min_size=1, max_size=90),
    packed,
    st.integers(1, 8),
    st.none() | st.sampled_from([1, 3, 20]),
    step_times,
)
@few
def test_each_sample_is_in_one_row_within_its_room(lengths, budget, world_size, window, step_time):
    parts = parts_of(lengths, budget, world_size, window, step_time)
    rows = [*chain(*parts)]
    assert sorted(chain(*rows)) == [*range(len(lengths))]
    check_rows(rows, lengths, budget)
    for part in parts[:-1]:
        assert len(part) % world_size == 0
    # Only where there are fewer samples than rows does a rank have none.
    assert len(parts[-1]) % world_size == 0 or all(len(row) == 1 for row in parts[-1])


def test_parts_are_those_of_a_window_of_all_ranks_and_whole_steps():
    lengths = lognormal(2_000, cv=1.0)
    budget = TokenBudget(16_384, layout="packed")
    parts = parts_of(lengths, budget, 4, 100, StepTime(squares=1 / 800))
    assert len(parts) == 5
    assert all(len(part) % 4 == 0 for part in parts)
    # The youngest samples, which rows of whole steps have no room for, wait for the next part.
    own_parts = np.cumsum(lengths) * 5 // (sum(lengths) + 1)
    for number, part in enumerate(parts):
        waited = number - own_parts[[*chain(*part)]]
        assert {*waited.tolist()} <= {0, 1}
        assert (waited == 1).mean() < 0.25


def test_more_rows_than_are_dealt_out_together_make_parts():
    lengths = [100] * 20_000
    budget = TokenBudget(1_000, layout="packed")
    parts = parts_of(lengths, budget, 2, None, StepTime(squares=1 / 800))
    assert len(parts) == 4
    assert 2_000 <= sum(map(len, parts)) <= 2_002


def test_samples_that_take_nothing_beside_their_tokens_are_in_rows_of_all_ranks():
    tokens, packing = np.full(4, 10), Packing(TokenBudget(50, layout="packed"))
    rows = rows_of_all(tokens, np.zeros_like(tokens), packing, 3)
    assert rows is not None and sorted(map(len, rows)) == [1, 1, 2]
    budget, times = TokenBudget(50, layout="packed"), StepTime(squares=1e-6)
    parts = parts_of([10] * 10_240, budget, 32, None, times)  # 1,023 rows would hold the first part
    assert [len(part) for part in parts] == [1_024, 1_056]
    parts = parts_of([50] * 40, TokenBudget(50, layout="packed"), 2, 2, StepTime(squares=1e-6))
    assert [len(part) for part in parts] == [4] * 10


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_rows_are_level_in_time_and_nearly_full(world_size, share):
    lengths = np.array(lognormal(4_000, cv=1.5, seed=4))
    budget = TokenBudget(16_384, layout="packed")
    # Of which attention takes this share.
    squares = share / (1 - share) * lengths.sum() / (lengths**2.0).sum()
    step_time = StepTime(squares=squares)
    steps = [
        part[start : start + world_size]
        for part in parts_of(lengths, budget, world_size, None, step_time)
        for start in range(0, len(part), world_size)
    ]

    def time(row):
        return step_time.of_group(lengths[row], np.zeros(len(row)), budget)

    times = np.sort([time(row) for step in steps for row in step]).reshape(-1, world_size)
    assert times.sum() / (world_size * times.max(axis=1).sum()) > 0.97
    assert lengths.sum() / (budget.tokens * times.size) > 0.97


def test_rows_of_all_are_none_where_they_do_not_suffice():
    tokens, extra = extra_of([60, 60, 60], StepTime(squares=1))
    packing = Packing(TokenBudget(100, layout="packed"))
    assert rows_of_all(tokens, extra, packing, 2) is None
    assert sorted(chain(*rows_of_all(tokens, extra, packing, 3))) == [0, 1, 2]
    assert rows_of_all(tokens[:0], extra[:0], packing, 3) == []


def test_rows_are_level_in_extra_time_before_tokens():
    """Level in time, the four samples of 45 and 55 would have no room."""
    tokens = np.array([50, 50, 45, 55])
    extra = np.array([100, 0, 40, 30])
    packing = Packing(TokenBudget(100, layout="packed"))
    rows = rows_of_all(tokens, extra, packing, 2)
    assert rows is not None
    assert sorted(map(sorted, rows)) == [[0, 1], [2, 3]]


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(1, 8), step_times, st.integers(1, 9))
@few
def test_fewest_rows_are_a_multiple_and_hold_all(lengths, multiple, step_time, most):
    budget = TokenBudget(100, layout="packed", max_samples=most)
    tokens, extra = extra_of(lengths, step_time)
    rows = fewest_rows(tokens, extra, Packing(budget), multiple)
    assert sorted(chain(*rows)) == [*range(len(lengths))]
    check_rows(rows, lengths, budget)
    assert len(rows) % multiple == 0 or all(len(row) == 1 for row in rows)
    assert len(rows) >= -(-sum(lengths) // 100)
