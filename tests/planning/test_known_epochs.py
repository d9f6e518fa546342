"""Batches of all ranks, planned from lengths that are known: `plan_epoch`."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import ATTENTION, PACKED, ROW_SIZES
from refusals import refuses

from odb_nodes import SampleError, TokenBudget
from odb_nodes.planning import plan_epoch
from odb_nodes.planning.known_epochs import WINDOW_IN_ORDER, known_window

few = settings(max_examples=max(20, settings.default.max_examples // 5))

LENGTHS = np.random.default_rng(0).integers(1, 41, 500).tolist()
LIMITS = {
    "max_samples": st.none() | st.integers(1, 9),
    "pad_to_multiple_of": st.sampled_from([1, 4, 16]),
    "shapes": st.none() | st.integers(1, 12),
    "oversize": st.sampled_from(["alone", "drop"]),
}
budgets = st.one_of(
    st.builds(TokenBudget, st.integers(16, 200), **LIMITS, **ROW_SIZES),
    st.builds(TokenBudget, st.integers(300, 900), **LIMITS, **ATTENTION),
    st.builds(TokenBudget, st.integers(16, 200), **LIMITS, **PACKED),
    st.builds(
        TokenBudget,
        st.integers(60, 200),
        shapes=st.integers(1, 9),
        row_sizes=st.just(2),
        oversize=st.just("drop"),
    ),
)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=80),
    budgets,
    st.integers(1, 4),
    st.sampled_from([1, 7, "auto"]),
    st.sampled_from([0, 3]),
)
@few
def test_each_sample_is_in_one_group_within_every_limit(
    lengths, budget, world_size, window, dearest_first
):
    steps = plan_epoch(
        lengths, budget, world_size=world_size, window=window, dearest_first=dearest_first
    )
    kept = [at for at, one in enumerate(lengths) if one <= budget.capacity]
    if budget.oversize == "alone":
        kept = [*range(len(lengths))]
    assert sorted(chain(*chain(*steps))) == kept
    for step in steps:
        assert len(step) == world_size
    for group in filter(None, chain(*steps)):
        tokens = [lengths[index] for index in group]
        assert len(group) <= (budget.max_samples or len(group))
        assert budget.cost(tokens) <= budget.tokens or len(group) == 1
    if window == "auto":
        for step in steps[:-1]:
            assert all(step)


def test_each_window_of_all_ranks_is_planned_by_itself():
    steps = plan_epoch(LENGTHS, 128, world_size=2, window=100)
    windows = [{index // 200 for group in step for index in group} for step in steps]
    assert [len(window) for window in windows] == [1] * len(steps)
    assert [min(window) for window in windows] == sorted(min(window) for window in windows)
    assert {*windows[-1]} == {2}


def test_all_samples_are_planned_together_unless_a_window_is_given():
    assert plan_epoch(LENGTHS, 128, window="auto") == plan_epoch(LENGTHS, 128, window=500)
    assert known_window("auto") is None and known_window(7) == 7
    assert known_window("auto", in_order=True) == WINDOW_IN_ORDER == 2048
    assert known_window(7, in_order=True) == 7


def test_the_seed_decides_the_order_of_steps_alone_and_the_longest_may_come_first():
    plans = [plan_epoch(LENGTHS, 128, seed=seed) for seed in range(3)]
    assert plans[0] == plan_epoch(np.array(LENGTHS, np.uint16), TokenBudget(128))
    assert plans[0] != plans[1] != plans[2]
    assert Counter(map(str, plans[0])) == Counter(map(str, plans[1]))
    first = plan_epoch(LENGTHS, 128, seed=1, dearest_first=2)
    longest = [max(LENGTHS[index] for index in step[0]) for step in first]
    assert longest[:2] == sorted(longest, reverse=True)[:2] != longest[2:4]
    assert [step for step in plans[1] if step not in first[:2]] == first[2:]


def test_an_oversize_sample_is_alone_or_dropped_or_an_error_that_names_it():
    lengths = [10, 90, 20]
    assert plan_epoch(lengths, TokenBudget(50)) in ([[[1]], [[0, 2]]], [[[0, 2]], [[1]]])
    assert plan_epoch(lengths, TokenBudget(50, oversize="drop")) == [[[0, 2]]]
    with pytest.raises(
        SampleError, match=r"90 tokens and 0 patches exceeds TokenBudget\(tokens=50"
    ):
        plan_epoch(lengths, TokenBudget(50, oversize="error"))
    assert plan_epoch([10, 20], TokenBudget(50, oversize="error")) == [[[0, 1]]]
    assert plan_epoch([90], TokenBudget(50, oversize="drop"), costs=[1]) == []


def test_fewer_samples_than_ranks_leave_ranks_without_any():
    assert plan_epoch([5], 64, world_size=3) == [[[0], [], []]]


def spread(steps, costs):
    """How much the largest of a step costs, relative to the mean: 1 where ranks are even."""
    sums = np.array([[costs[group].sum() for group in step] for step in steps])
    return (sums.max(axis=1) / sums.mean(axis=1)).mean()


@pytest.mark.parametrize("window", ["auto", 64])
def test_the_groups_of_a_step_are_matched_by_costs(window):
    costs = np.random.default_rng(1).integers(0, 10**6, len(LENGTHS))
    job = {"world_size": 4, "window": window}
    by_costs = plan_epoch(LENGTHS, 128, costs=costs, **job)
    by_budget = plan_epoch(LENGTHS, 128, **job)
    assert spread(by_costs, costs) < spread(by_budget, costs) - 0.1

    def groups(steps):
        return sorted(chain(*steps))

    assert groups(by_costs) == groups(by_budget)


test_refusals = refuses(
    [
        ({"lengths": []}, ValueError, "lengths.*\\[\\]"),
        ({"lengths": [3, 0]}, ValueError, "lengths.*at least 1"),
        ({"lengths": [[3]]}, ValueError, "lengths.*one row"),
        ({"costs": [1]}, ValueError, "costs.*2 integers.*\\[1\\]"),
        ({"costs": [1, -1]}, ValueError, "costs.*at least 0"),
        ({"costs": [1, 1.5]}, ValueError, "costs.*integers"),
        ({"lengths": [4, 4], "costs": [2**31 - 1, 1]}, ValueError, "`costs` must be in 0.*648"),
        ({"costs": [2**62, 2**62]}, ValueError, "`costs` must be in 0"),
        ({"world_size": 0}, ValueError, "world_size.*0"),
        ({"window": 0}, ValueError, "window.*0"),
        ({"window": "all"}, ValueError, "`window` must be \"auto\" or a number.*'all'"),
        ({"dearest_first": -1}, ValueError, "dearest_first.*-1"),
        ({"seed": 0.5}, TypeError, "`seed`.*0.5"),
        ({"budget": 0}, ValueError, "`budget`.*0"),
        ({"budget": TokenBudget(4, oversize="error")}, SampleError, "5 tokens"),
    ],
    lambda given: plan_epoch(**{"lengths": [3, 5], "budget": 8, **given}),
)
