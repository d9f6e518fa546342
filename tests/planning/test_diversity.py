"""Groups that mix tasks more evenly, where a weight asks for them."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import lognormal, run

from odb_nodes.planning import SimulationOptions, TokenBudget
from odb_nodes.planning.runs import diversities
from odb_nodes.tools.simulate import lognormal_lengths


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
        ([300, 800, 2000, 300, 800, 2000, 300, 800], 1024, 0.041),
    ],
)
def test_groups_mix_tasks_more_evenly(means, window, gain):
    """`gain` is what docs/tasks.md says."""
    lengths, tasks = mixed(means, 8_000)

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
