"""Groups that mix tasks more evenly, where a weight asks for them."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import budgets, lognormal, long_budgets, run

from odb_nodes.planning import MAX_AGE_WINDOWS, SimulationOptions, TokenBudget
from odb_nodes.planning.diversity import diversities
from odb_nodes.tools.simulate import lognormal_lengths

padded = (budgets | long_budgets).map(lambda budget: replace(budget, layout="padded"))
streams = st.lists(st.tuples(st.integers(1, 120), st.integers(0, 4)), min_size=1, max_size=200)
windows = st.integers(1, 50)
weights = st.sampled_from([0.01, 0.25, 0.5, 1.0])


def evenness(tasks, among):
    """The entropy of some tasks, as a share of that of `among` equal ones."""
    counts = Counter(tasks).values()
    shares = [count / sum(counts) for count in counts]
    return -sum(share * math.log(share) for share in shares) / math.log(among)


@given(tasks=st.lists(st.integers(0, 6), min_size=1, max_size=40), data=st.data())
def test_the_diversity_of_a_run_is_its_entropy_among_the_tasks_of_the_pool(tasks, data):
    stop = np.arange(1, len(tasks) + 1)
    first = np.array([data.draw(st.integers(0, end - 1)) for end in stop.tolist()])
    among = len(set(tasks))
    expected = [
        evenness(tasks[begin:end], among) if among > 1 else 0.0
        for begin, end in zip(first, stop, strict=True)
    ]
    found = diversities(np.array(tasks), first, stop)
    assert found == pytest.approx(expected, abs=1e-6)
    assert found.min() >= 0 and found.max() <= 1 + 1e-6


@given(streams, padded, windows)
def test_a_weight_of_0_changes_no_group(stream, budget, window):
    lengths, tasks = map(list, zip(*stream, strict=True))
    plain = run(lengths, budget, window)
    assert run(lengths, budget, window, tasks=tasks, diversity=0.0) == plain


@pytest.mark.parametrize("weight", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("fields", [{}, {"shapes": 8}, {"attention_tokens": 500}], ids=str)
def test_one_task_changes_no_group_whatever_the_weight(fields, weight):
    lengths, budget = lognormal(1500), TokenBudget(4096, **fields)  # a few are oversize
    groups = run(lengths, budget, 64, tasks=[3] * len(lengths), diversity=weight)
    assert groups == run(lengths, budget, 64)


def test_which_task_has_which_number_decides_nothing():
    rng = np.random.default_rng(0)
    tasks, numbers = rng.integers(0, 12, 4000), rng.permutation(12) + 7
    first = rng.integers(0, 3800, 2000)
    stop = first + rng.integers(1, 200, 2000)
    found = diversities(tasks, first, stop)
    assert (diversities(numbers[tasks], first, stop) == found).all()  # to the last bit
    lengths = lognormal(4000)
    groups = run(lengths, 16_384, 256, tasks=tasks.tolist(), diversity=0.5)
    renamed = numbers[tasks].tolist()
    assert run(lengths, 16_384, 256, tasks=renamed, diversity=0.5) == groups


@given(streams, padded, windows, weights, st.integers(0, 5), st.data())
def test_nothing_is_lost_too_old_or_over_the_budget(
    stream, budget, window, weight, dearest_first, data
):
    lengths, tasks = map(list, zip(*stream, strict=True))
    patches = data.draw(st.lists(st.integers(0, 50), min_size=len(lengths), max_size=len(lengths)))
    groups, age = run(lengths, budget, window, patches, dearest_first, tasks, weight)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert age <= MAX_AGE_WINDOWS * window
    for group in groups:
        costs = budget.cost([lengths[i] for i in group])
        assert costs <= budget.tokens or len(group) == 1
        assert len(group) == 1 or sum(patches[i] for i in group) <= (budget.max_patches or 10**9)


def test_numbers_of_rows_stay_those_asked_for():
    lengths, tasks = mixed([800] * 3, 3000)
    budget = TokenBudget(16_384, row_sizes="even")
    groups, _ = run(lengths, budget, 256, tasks=tasks, diversity=0.5)
    assert all(len(group) == 1 or len(group) % 2 == 0 for group in groups)


def mixed(means, samples):
    """Lengths and tasks of samples that come equally often, in an order drawn at random."""
    tasks = np.random.default_rng(0).permutation(np.arange(samples) % len(means))
    lengths = np.empty(samples, np.int64)
    for task, mean in enumerate(means):
        places = np.flatnonzero(tasks == task)
        lengths[places] = lognormal_lengths(len(places), cv=0.8, mean_tokens=mean, seed=task)
    return lengths.tolist(), tasks.tolist()


@pytest.mark.parametrize(
    ("means", "window", "gain"),
    [
        ([800] * 3, 256, 0.056),
        ([800] * 8, 1024, 0.059),
        ([300, 800, 2000], 256, 0.049),
        ([300, 800, 2000, 300, 800, 2000, 300, 800], 1024, 0.041),
    ],
)
def test_groups_mix_tasks_more_evenly(means, window, gain):
    """`gain` is what docs/tasks.md says."""
    lengths, tasks = mixed(means, 24_000)

    def mean_of(weight):
        groups, _ = run(lengths, 16_384, window, tasks=tasks, diversity=weight)
        return np.mean([evenness([tasks[i] for i in one], len(means)) for one in groups])

    assert mean_of(0.5) - mean_of(0.0) >= gain / 2


def test_packed_groups_refuse_it():
    budget = TokenBudget(100, layout="packed")
    with pytest.raises(ValueError, match="`diversity` must be 0 where groups are packed"):
        SimulationOptions(world_size=1, budget=budget, diversity=0.5)
    SimulationOptions(world_size=1, budget=budget, diversity=0)


def test_the_rule_has_not_changed():
    """Golden: another grouping of the same data would break every saved state."""
    lengths, tasks = mixed([300, 800, 2000], 120)
    groups, _ = run(lengths, 8192, 32, tasks=tasks, diversity=0.5)
    assert (groups[:4], len(groups)) == (GOLDEN, GOLDEN_COUNT)


GOLDEN = [
    [1, 6, 9, 10, 17, 18, 19, 23, 25, 30],
    [4, 5, 8, 15, 24, 28],
    [14, 21, 33, 36, 42, 43],
    [32, 35, 40, 44, 46],
]
GOLDEN_COUNT = 24
