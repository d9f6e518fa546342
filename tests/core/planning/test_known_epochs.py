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
from odb_nodes.core.planning import StepTime, plan_epoch
from odb_nodes.core.planning.known_epochs import WINDOW_IN_ORDER, known_window

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
    st.sampled_from([1, 3]),
    st.sampled_from([None, StepTime(), StepTime(squares=0.1, base=9), len]),
)
@few
def test_each_sample_is_in_one_group_within_every_limit(
    lengths, budget, world_size, window, largest_first, accumulate, step_time
):
    steps = plan_epoch(
        lengths,
        budget,
        world_size=world_size,
        window=window,
        largest_first=largest_first,
        accumulate=accumulate,
        step_time=step_time,
    )
    kept = [index for index, length in enumerate(lengths) if length <= budget.capacity]
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
    first = plan_epoch(LENGTHS, 128, seed=1, largest_first=2)
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
    for layout in ("padded", "packed"):
        nothing = TokenBudget(50, oversize="drop", layout=layout)
        assert plan_epoch([90], nothing) == plan_epoch([90], nothing, world_size=2) == []


def unevenness(steps, times):
    """How long the longest of a step takes, relative to the mean: 1 where ranks are level."""
    of_each = np.array([[times(group) for group in step] for step in steps if all(step)])
    return of_each.max(axis=1).sum() / of_each.mean(axis=1).sum()


@pytest.mark.parametrize("window", ["auto", 64])
def test_padded_groups_of_a_step_are_matched_by_the_time_that_is_asked_for(window):
    values = np.random.default_rng(1).integers(0, 10**6, len(LENGTHS))

    def time(samples):
        assert [LENGTHS[sample.data] for sample in samples] == [sample.tokens for sample in samples]
        return int(values[[sample.data for sample in samples]].sum())

    def time_of_indices(group):
        return int(values[group].sum())

    job = {"world_size": 4, "window": window}
    by_time = plan_epoch(LENGTHS, 128, step_time=time, **job)
    by_budget = plan_epoch(LENGTHS, 128, **job)
    assert unevenness(by_time, time_of_indices) < unevenness(by_budget, time_of_indices) - 0.1

    def groups(steps):
        return sorted(chain(*steps))

    assert groups(by_time) == groups(by_budget)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_ranks_are_level_in_the_given_step_time(layout):
    budget, step_time = TokenBudget(160, layout=layout), StepTime(squares=1 / 20)

    def time(group):
        lengths = [LENGTHS[index] for index in group]
        return step_time.of_group(lengths, [0] * len(lengths), budget)

    level, of_tokens = (
        unevenness(plan_epoch(LENGTHS, budget, world_size=4, step_time=candidate), time)
        for candidate in (step_time, StepTime())
    )
    assert level < 1.03 and level < of_tokens - (0.02 if layout == "padded" else 0.05)


@pytest.mark.parametrize("world_size", [1, 2])
def test_micro_steps_of_an_optimizer_step_have_unlike_lengths(world_size):
    def spread(accumulate):
        """The variance of lengths within optimizer steps, as a share of all."""
        job = {"world_size": world_size, "step_time": StepTime(squares=0.1)}
        steps = plan_epoch(LENGTHS, 128, accumulate=accumulate, **job)
        within = 0.0
        for start in range(0, len(steps), 4):
            lengths = np.array(LENGTHS)[[*chain(*chain(*steps[start : start + 4]))]]
            within += ((lengths - lengths.mean()) ** 2).sum()
        return within / (np.var(LENGTHS) * len(LENGTHS))

    assert spread(4) > spread(1) + 0.05
    assert spread(4) > 0.7

    def groups(steps):
        return sorted(map(sorted, steps))

    job = {"world_size": world_size}
    assert groups(plan_epoch(LENGTHS, 128, accumulate=4, **job)) == groups(
        plan_epoch(LENGTHS, 128, **job)
    )


test_refusals = refuses(
    [
        ({"lengths": []}, ValueError, "lengths.*\\[\\]"),
        ({"lengths": [3, 0]}, ValueError, "lengths.*at least 1"),
        ({"lengths": [[3]]}, ValueError, "lengths.*one row"),
        ({"step_time": 3}, TypeError, "`step_time`.*3"),
        (
            {"step_time": lambda group: -1, "world_size": 2, "budget": 5},
            ValueError,
            "step_time.*-1",
        ),
        ({"accumulate": 0}, ValueError, "accumulate.*0"),
        ({"world_size": 0}, ValueError, "world_size.*0"),
        ({"window": 0}, ValueError, "window.*0"),
        ({"window": "all"}, ValueError, "`window` must be \"auto\" or a number.*'all'"),
        ({"largest_first": -1}, ValueError, "largest_first.*-1"),
        ({"seed": 0.5}, TypeError, "`seed`.*0.5"),
        ({"budget": 0}, ValueError, "`budget`.*0"),
        ({"budget": TokenBudget(4, oversize="error")}, SampleError, "5 tokens"),
    ],
    lambda changed: plan_epoch(**{"lengths": [3, 5], "budget": 8, **changed}),
)
