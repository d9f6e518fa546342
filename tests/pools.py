"""Streams of lengths through a pool, facts, and budgets of all kinds, for several tests."""

import numpy as np
from hypothesis import strategies as st

from odb_nodes.core.planning import RollingPool, TokenBudget
from odb_nodes.core.planning.caps import NO_CAPS
from odb_nodes.core.planning.facts import Facts
from odb_nodes.core.planning.table import TOKENS

LIMITS = {
    "max_samples": st.none() | st.integers(1, 9),
    "max_patches": st.none() | st.integers(1, 40),
    "pad_to_multiple_of": st.sampled_from([1, 4, 16]),
    "shapes": st.none() | st.integers(1, 12),
}
ROW_SIZES = {"row_sizes": st.sampled_from(["any", "even", "friendly"])}
PACKED = {"layout": st.just("packed")}
ATTENTION = {"attention_tokens": st.integers(1, 200)}


def budgets_of(*parts):
    """Budgets with every limit, and with what else is given."""
    return st.one_of(
        st.builds(TokenBudget, st.integers(16, 200), **LIMITS, **part)
        | st.builds(TokenBudget, st.integers(300, 900), **LIMITS, **ATTENTION, **part)
        for part in parts
    )


padded_budgets = budgets_of(ROW_SIZES)
budgets = budgets_of(ROW_SIZES, PACKED)
streams = st.lists(st.tuples(st.integers(1, 120), st.integers(0, 50), st.integers(0, 4)))
"""Tokens, patches and task of each sample."""


def run(
    lengths,
    budget,
    window,
    patches=None,
    largest_first=0,
    tasks=(),
    diversity=0.0,
    early=False,
    step_time=None,
    caps_of=lambda pool: NO_CAPS,
):
    """Stream lengths through a pool; return groups of ordinals and the greatest age seen.

    Groups are formed for `step_time`, by the caps that `caps_of` returns where there are none left.
    """
    pool, groups, age = RollingPool(TokenBudget.of(budget), window, diversity), [], 0
    pool.start_early(early)
    pool.aim_by(step_time)
    patches, tasks = patches or [0] * len(lengths), tasks or [0] * len(lengths)
    while True:
        while (room := min(pool.room(), len(lengths) - pool.pulled)) > 0:
            new = range(pool.pulled, pool.pulled + room)
            costs = [lengths[i] for i in new], [patches[i] for i in new]
            pool.add(new, *costs, [tasks[i] for i in new])
            pool.count(room)
        if not len(pool):
            return groups, age
        age = max(age, pool.pulled - pool.oldest)
        if not len(pool.caps):
            pool.use_caps(caps_of(pool))
        largest = len(groups) < largest_first
        taken = pool.take(draining=pool.pulled == len(lengths), largest=largest)
        groups.append(taken.tolist())


def pool_of(lengths, budget, patches=None):
    """A pool that holds samples of these lengths, by their numbers."""
    pool = RollingPool(TokenBudget.of(budget), len(lengths))
    pool.add(range(len(lengths)), lengths, patches or [0] * len(lengths))
    pool.count(len(lengths))
    return pool


def table_of(samples):
    """The table of a pool that holds these samples, by their numbers."""
    tokens, patches, *_ = columns = np.array(samples, np.int64).T
    table = np.stack((tokens, np.arange(len(samples)), patches, *columns[2:]))
    return table[:, table[TOKENS].argsort(kind="stable")]


def facts_of(lengths, first=0, patches=0, **columns):
    """Facts of samples of these lengths, which are numbered from `first` on."""
    tokens = np.array(lengths, np.int64)
    columns = {"ordinal": first + np.arange(len(tokens)), "targets": tokens // 2} | columns
    return Facts(tokens=tokens, patches=patches, **columns)


def lognormal(count, cv=1.0, seed=0):
    sigma = np.sqrt(np.log(1 + cv**2))
    draws = np.random.default_rng(seed).lognormal(np.log(800) - sigma**2 / 2, sigma, count)
    return np.clip(draws, 16, 8192).astype(int).tolist()
