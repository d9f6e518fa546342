"""Whole epochs of all ranks, planned in one process from the lengths of the samples alone."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pools import LIMITS, ROW_SIZES, lognormal
from refusals import refuses

from odb_nodes import SampleError, TokenBudget
from odb_nodes.core.planning import (
    SimulationOptions,
    StepTime,
    plan_epoch,
    simulate_steps,
)
from odb_nodes.core.planning.sample_costs import SampleCosts
from odb_nodes.core.planning.simulation import plan_steps

few = settings(max_examples=max(20, settings.default.max_examples // 5))

LENGTHS = np.random.default_rng(0).integers(1, 41, 500).tolist()
budgets = st.one_of(
    st.builds(TokenBudget, st.integers(30, 200), **LIMITS, **ROW_SIZES),
    st.builds(TokenBudget, st.integers(60, 300), attention_tokens=st.integers(20, 90), **LIMITS),
    st.builds(TokenBudget, st.integers(30, 200), layout=st.just("packed"), **LIMITS),
    st.builds(TokenBudget, st.integers(20, 60), oversize=st.sampled_from(["alone", "drop"])),
)


def shortest_first(group):
    """A time that has nothing to do with what a group costs."""
    return max(0, 90 - min(sample.tokens for sample in group))


jobs = st.builds(
    SimulationOptions,
    world_size=st.integers(1, 4),
    budget=budgets,
    window=st.sampled_from([1, 7, 60, "auto"]),
    window_start=st.sampled_from(["full", "early"]),
    round_size=st.integers(1, 12),
    accumulate=st.integers(1, 3),
    largest_first=st.sampled_from([0, 0, 3]),
    seed=st.integers(0, 9),
    step_time=st.sampled_from(
        [None, StepTime(), StepTime(squares=1 / 20), StepTime(squares=1, patches=3), shortest_first]
    ),
)


def random_samples(count, longest, seed):
    """Tokens and patches of each sample; processing skips those without tokens."""
    draws = np.random.default_rng(seed).integers(0, (longest + 1, 10), (count, 2))
    return [*map(tuple, draws.tolist())]


datasets = st.builds(
    random_samples, st.integers(1, 45), st.sampled_from([1, 20, 40, 90]), st.integers(0, 2**16)
)


def sample_costs_of(samples):
    tokens, patches = np.array(samples, np.int64).T
    return SampleCosts(tokens, np.maximum(tokens - 1, 0), patches, np.zeros_like(tokens))


def shards_of(samples, world_size):
    order = np.arange(len(samples))
    return [order[rank::world_size] for rank in range(world_size)]


def planned(samples, job, **options):
    """The indices of each rank's group of each step; `None` for one that fills."""
    shards = shards_of(samples, job.world_size)
    steps = plan_steps(sample_costs_of(samples), shards, job, **options)
    return [[group and group.data() for group in step] for step in steps]


def emitted_of(samples, job):
    """The samples that an epoch has: those that are neither skipped nor dropped."""
    budget = TokenBudget.of(job.budget)
    return [
        index
        for index, (tokens, patches) in enumerate(samples)
        if tokens and not (budget.oversize == "drop" and budget.is_oversize(tokens, patches))
    ]


PACKED = TokenBudget(100, layout="packed")
PATCHED = TokenBudget(100, max_patches=4)
LEVELLED = [(1 + index * 7919 % 60, index % 3) for index in range(200)]
LEVEL_JOB = SimulationOptions(world_size=2, budget=100, window=60, round_size=8)
"""Of which ranks agree on caps, and share out the rest."""


@given(datasets, jobs, st.booleans(), st.booleans())
@example(LEVELLED, LEVEL_JOB, True, True)
@example(LEVELLED, replace(LEVEL_JOB, step_time=StepTime(squares=1 / 20)), True, True)
@example(LEVELLED, replace(LEVEL_JOB, budget=PACKED, window="auto"), True, True)
@example(LEVELLED, replace(LEVEL_JOB, budget=PACKED, step_time=StepTime(patches=9)), False, False)
@example(LEVELLED, replace(LEVEL_JOB, budget=PATCHED, step_time=StepTime(squares=1)), True, True)
@few
def test_each_sample_is_in_one_group_within_every_limit(samples, job, shares_rest, knows_length):
    steps = planned(samples, job, shares_rest=shares_rest, knows_length=knows_length)
    assert {len(step) for step in steps} <= {job.world_size}
    groups = [group for step in steps for group in step if group is not None]
    assert sorted(chain(*groups)) == emitted_of(samples, job)
    budget = TokenBudget.of(job.budget)
    for group in groups:
        tokens, patches = zip(*(samples[index] for index in group), strict=True)
        assert len(group) <= (budget.max_samples or len(group))
        if len(group) > 1:  # an oversize sample is alone
            assert budget.cost(tokens) <= budget.tokens
            assert sum(patches) <= (budget.max_patches or sum(patches))
            assert not any(map(budget.is_oversize, tokens, patches))


# --- level in time --------------------------------------------------------------------------------

TIMES = StepTime(squares=1 / 30)


def test_groups_that_mix_tasks_are_level_in_time_too():
    costs = sample_costs_of(LEVELLED * 3)._replace(tasks=np.arange(600) % 3)
    job = SimulationOptions(
        world_size=2, budget=100, window=60, round_size=8, step_time=TIMES, diversity=0.5
    )
    steps = [*plan_steps(costs, shards_of(LEVELLED * 3, 2), job)]
    items = [item for step in steps for group in step if group for item in group.data()]
    assert sorted(items) == [*range(600)]


def time_efficiency(lengths, model, **options):
    """All times, divided by those of the ranks' longest group of each step."""
    budget = options["budget"]
    times = np.array(
        [
            [
                0 if group is None else model.of_group(group.tokens, group.patches, budget)
                for group in step
            ]
            for step in simulate_steps(lengths, **options)
        ]
    )
    return times.sum() / (times.max(axis=1).sum() * times.shape[1])


@pytest.mark.parametrize(
    ("layout", "world_size", "least", "gain"),
    [("packed", 4, 0.97, 0.2), ("padded", 4, 0.85, 0.18)],
)
def test_ranks_with_a_step_time_wait_less(layout, world_size, least, gain):
    lengths = lognormal(world_size * 800, cv=1.5, seed=11)
    step_time = StepTime(squares=1 / 1_600)
    job = {"budget": TokenBudget(16_384, layout=layout), "world_size": world_size, "window": 256}
    level = time_efficiency(lengths, step_time, step_time=step_time, **job)
    by_tokens = time_efficiency(lengths, step_time, step_time=StepTime(), **job)
    assert level > max(least, by_tokens + gain)


# --- oversize samples, seeds ----------------------------------------------------------------------


def test_an_oversize_sample_is_alone_or_dropped_or_an_error_that_names_it():
    samples, job = [(10, 0), (90, 0), (20, 0)], SimulationOptions(world_size=1, budget=50)

    def groups(oversize):
        budget = TokenBudget(50, oversize=oversize)
        return sorted(
            group for step in planned(samples, replace(job, budget=budget)) for group in step
        )

    assert groups("alone") == [[0, 2], [1]]
    assert groups("drop") == [[0, 2]]
    with pytest.raises(
        SampleError, match=r"90 tokens and 0 patches exceeds TokenBudget\(tokens=50"
    ):
        groups("error")


@given(datasets, jobs, st.integers(1, 99))
@few
def test_seed_and_epoch_decide_the_order_of_steps_and_nothing_else(samples, job, seed):
    def sorted_steps(job, **options):
        return sorted(map(str, planned(samples, job, **options)))

    assert sorted_steps(replace(job, seed=seed), epoch=seed % 3) == sorted_steps(job)


# --- lengths alone --------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
def test_where_lengths_are_known_the_steps_are_those_of_plan_epoch(world_size):
    job = {"world_size": world_size, "seed": 3, "largest_first": 2, "accumulate": 2}
    job["step_time"] = StepTime(squares=0.1)
    for window in ("auto", 16):
        steps = simulate_steps(LENGTHS, budget=64, window=window, lengths_known=True, **job)
        groups = [[[] if group is None else group.data() for group in step] for step in steps]
        assert groups == plan_epoch(LENGTHS, 64, window=window, **job)
    lacking = {"world_size": 3, "budget": 64, "lengths_known": True}
    assert [
        [group and group.data() for group in step] for step in simulate_steps([5], **lacking)
    ] == [[[0], None, None]]
    assert [*simulate_steps([5], uneven="stop", **lacking)] == []


def test_the_end_of_the_data_is_known_when_a_pull_finds_nothing():
    """Before that the best group is taken, and then that of the oldest sample."""
    samples = [(60, 0), *[(10, 0)] * 7]
    job = SimulationOptions(world_size=1, budget=100, window=8)
    assert planned(samples, job) == [[[*range(1, 8)]], [[0]]]
    assert planned(samples, replace(job, window=9)) == [[[0]], [[*range(1, 8)]]]


test_what_lengths_alone_do_not_decide_is_refused = refuses(
    [
        ({"diversity": 0.5}, "`lengths_known` must be False with `diversity`"),
        ({"budget": TokenBudget(9, max_patches=1)}, "`lengths_known` .* `max_patches`"),
        (
            {"budget": TokenBudget(9, shapes=2, row_sizes=2, oversize="drop")},
            "`lengths_known` .* a number as `row_sizes`",
        ),
    ],
    lambda changed: SimulationOptions(
        **{"world_size": 1, "budget": 9, "lengths_known": True, **changed}
    ),
    ValueError,
)
