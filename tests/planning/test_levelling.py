"""The last round of an epoch: when it begins, who gives what to whom, and into what it is cut."""

import itertools

import numpy as np
import pytest
from aligned_ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from pools import budgets, pool_of
from refusals import refuses

from odb_nodes import ODBDataLoader, Sample, SampleError, TokenBudget, pop_step_info
from odb_nodes.planning import plan_epoch, round_steps
from odb_nodes.planning.caps import (
    NO_CAPS,
    agreed_caps,
    caps_of_round,
    offered_costs,
)
from odb_nodes.planning.levelling import UNKNOWN_LEFT, Rest, gifts, receivers, work_of
from odb_nodes.planning.rounds import CostReport, begins_last_round
from odb_nodes.sample_block import SampleBlock
from odb_nodes.tools.simulate import lognormal_lengths, simulate

lengths = st.lists(st.integers(1, 200), max_size=80)


def report(left, groups=4, samples=10):
    table = np.zeros((groups, 5), dtype=np.int64)
    table[:, 0] = samples
    return CostReport(table, groups, ended=not left, left=left)


@pytest.mark.parametrize(
    ("left", "begins"),
    [
        ([400, 639], True),  # 10 samples a step: less than 2 rounds of 32 steps on one rank,
        ([640, 640], False),
        ([0, 1_280], True),  # and no more than 4 rounds on any.
        ([0, 1_281], False),
        ([100, UNKNOWN_LEFT], False),
        ([100, -1], False),  # one cannot give
        ([0, 0], False),  # nothing is left
        ([100], False),  # nobody to share with
    ],
)
def test_the_last_round_begins_when_a_rank_has_little_left_and_none_has_much(left, begins):
    assert begins_last_round([report(one) for one in left], steps=32) is begins


def test_a_round_without_groups_is_followed_by_no_last_one():
    assert not begins_last_round([report(5, groups=0)] * 2, 4)


@given(lengths, st.floats(-100, 5_000))
def test_gifts_are_different_samples_that_the_surplus_has_room_for(tokens, surplus):
    work = work_of(tokens, TokenBudget(200))
    given_away = gifts(work, surplus)
    assert len({*given_away}) == len(given_away)
    assert work[given_away].sum() <= max(0, surplus)
    kept = [cost for index, cost in enumerate(work) if index not in given_away]
    assert not kept or min(kept) > surplus - work[given_away].sum()  # no other one fits


def test_gifts_are_long_samples_between_which_others_stay():
    work = np.sort(np.random.default_rng(0).lognormal(6, 1, 1_000).astype(np.int64))
    given_away = gifts(work, work.sum() / 20)
    assert len(given_away) < 25  # each is made a second time
    assert sum(index >= 1_000 - 80 for index in given_away) == 10  # every eighth


@given(st.lists(lengths, min_size=2, max_size=6))
def test_ranks_that_receive_come_as_near_to_each_other_as_samples_allow(ranks):
    budget = TokenBudget(200)
    works = [work_of(tokens, budget) for tokens in ranks]
    totals = [int(work.sum()) for work in works]
    mean = sum(totals) / len(totals)
    given_away = [work[gifts(work, work.sum() - mean)] for work in works]
    chosen = receivers(totals, given_away)
    after = [total - work.sum() for total, work in zip(totals, given_away, strict=True)]
    for costs, to in zip(given_away, chosen, strict=True):
        assert len(costs) == len(to)
        for cost, rank in zip(costs, to, strict=True):
            after[rank] += cost
    assert sum(after) == sum(totals)
    assert max(after) <= max(totals)
    assert min(after) >= min(totals)
    # Whatever a rank keeps above the mean is less than each sample that it has.
    assert max(after) - mean <= 200


@given(lengths, budgets, st.integers(0, 5))
def test_the_rest_is_cut_into_as_few_groups_as_asked_for_at_the_least_cost(tokens, budget, more):
    samples = SampleBlock.of(
        [Sample(None, length, 1, index % 4) for index, length in enumerate(tokens)]
    )
    rest = Rest(samples, budget)
    groups = rest.groups(rest.fewest + more)
    assert sorted(index for group in groups for index in group) == [*range(len(samples))]
    assert len(groups) <= rest.fewest + more

    def dearest(cut):
        return max((budget.cost([tokens[index] for index in group]) for group in cut), default=0)

    assert dearest(groups) <= dearest(rest.groups(rest.fewest))  # also if a sample is oversize
    for group in groups:
        patches = sum(samples[index].patches for index in group)
        alone = len(group) == 1
        assert alone or budget.cost([tokens[index] for index in group]) <= budget.tokens
        assert alone or patches <= (budget.max_patches or patches)
        assert len(group) <= (budget.max_samples or len(group))


def test_more_groups_make_the_dearest_one_cheaper_also_beside_an_oversize_sample():
    lengths, costs = [*range(10, 60)], []
    for beside, more in (([], 0), ([], 4), ([], 8), ([500], 8)):
        samples = SampleBlock.of([Sample(None, length, 1) for length in [*lengths, *beside]])
        rest = Rest(samples, TokenBudget(400))
        cut = [[samples[at].tokens for at in group] for group in rest.groups(rest.fewest + more)]
        costs.append(max(max(group) * len(group) for group in cut if group != beside))
    assert costs[0] > costs[1] > costs[2]
    assert max(costs[2:]) < 0.83 * costs[0]


def test_fewer_groups_than_the_budget_needs_are_refused():
    samples = SampleBlock.of([Sample(None, 30, 1)] * 9)
    with pytest.raises(ValueError, match="`most` must be at least 3, but is 2"):
        Rest(samples, TokenBudget(90)).groups(2)


# --- caps: what ranks offer, what they agree on, and the groups that are cut to it ----------------


def test_a_pool_offers_the_costs_of_its_full_groups():
    # From the longest down: 1 x 70, 2 x 40, 3 x 30, 10 x 10; what is left is not full.
    pool = pool_of([70, 40, 40, *[30] * 3, *[10] * 65], 100)
    assert pool.offer(9).tolist() == [100, 100, 100, 100, 100, 100, 100, 90, 80, 70]


@pytest.mark.parametrize(
    "budget", [TokenBudget(100, layout="packed"), TokenBudget(100, shapes=3), TokenBudget(120)]
)
def test_packed_rows_and_fixed_shapes_and_small_pools_offer_nothing(budget):
    assert not len(pool_of([70, 40, 40, *[30] * 3, *[10] * 65], budget).offer(9))


def test_what_is_nearly_full_counts_as_full():
    offer = offered_costs(np.array([99, 98, 50]), pool_cost=800, budget_tokens=100, count=3)
    assert offer.tolist() == [100, 100, 98, 50]
    assert not len(offered_costs(np.array([99, 98, 50]), 799, 100, 3))
    assert not len(offered_costs(NO_CAPS, 900, 100, 3))


def test_the_median_of_the_ranks_is_agreed_on_where_most_offer_something():
    costs = [[100, 90, 40], [90, 80, 50], [95, 70, 10]]
    offers = [np.array([100, *of_rank]) for of_rank in costs]
    assert agreed_caps(offers).tolist() == [95, 80, 40]
    assert agreed_caps([*offers, NO_CAPS, NO_CAPS]).tolist() == [95, 80, 40]
    assert agreed_caps([*offers, NO_CAPS, NO_CAPS, NO_CAPS]).tolist() == []
    assert agreed_caps([NO_CAPS]).tolist() == []
    assert agreed_caps([np.array([100, 100, 97])]).tolist() == []  # there is nothing to gain
    assert agreed_caps([*offers, np.array([90, 80, 40, 10])]).tolist() == []  # another budget
    assert caps_of_round(np.array([100, 90, 40]), 3).tolist() == [40, 90, 100]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=40, max_size=120),
    caps=st.lists(st.integers(20, 100), min_size=1, max_size=6),
    sizes=st.sampled_from(["any", "even", "friendly"]),
    most=st.none() | st.integers(1, 9),
)
def test_each_group_fits_a_cap_of_its_own(lengths, caps, sizes, most):
    budget = TokenBudget(100, row_sizes=sizes, max_samples=most)
    pool = pool_of(lengths, budget)
    pool.caps = np.sort(caps)
    left = sorted(caps)
    while left and len(pool):
        group = [lengths[number] for number in pool.take()]
        cost = budget.cost(group)
        fitting = [cap for cap in left if cap >= cost]
        assert fitting or len(group) == 1
        left.remove(fitting[0] if fitting else left[-1])
        assert pool.caps.tolist() == left


@pytest.mark.slow
def test_ranks_are_level_where_the_longest_samples_leave_room():
    lengths = lognormal_lengths(16 * 6_000, cv=1.0, seed=3)
    level = simulate(lengths, world_size=16, budget=16_384, window=256)
    # A cost of its own, though the same: no caps.
    plain = simulate(lengths, world_size=16, budget=16_384, window=256, cost_fn=padded)
    assert level.balance > plain.balance + 0.008
    assert level.efficiency > plain.efficiency + 0.006
    assert level.length_spread > plain.length_spread


def padded(group):
    return max(sample.tokens for sample in group) * len(group)


# --- rounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "round_size", "accumulate", "steps"),
    [
        (2, 32, 1, [4, 5, 6, 7, 8, 10, 12, 15, 18, 22, 27, 32]),
        (64, 20, 1, [4, 5, 6, 7, 8, 10, 12, 15, 18, 20, 20, 20]),
        (2, 2, 1, [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]),
        (2, 32, 3, [6, 6, 6, 9, 9, 12, 12, 15, 18, 24, 27, 33]),
        (2, 4, 8, [8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8]),
        (1, 32, 1, [1, 2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]),
        (1, 32, 3, [3, 3, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6]),
        (1, 2, 1, [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]),
    ],
)
def test_rounds_grow_in_whole_optimizer_steps(world_size, round_size, accumulate, steps):
    options = {"world_size": world_size, "round_size": round_size, "accumulate": accumulate}
    assert [round_steps(number, **options) for number in range(12)] == steps
    assert round_steps(10**6, **options) == steps[-1]


# --- plans of samples whose lengths are known, against loaders of real and of in-process ranks ---


BUDGETS = [
    64,
    TokenBudget(96, max_samples=4),
    TokenBudget(80, layout="packed"),
    TokenBudget(80, attention_tokens=30),
]
LENGTHS = np.random.default_rng(0).integers(1, 41, 900).tolist()


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=80),
    budget=st.sampled_from(BUDGETS),
    world_size=st.integers(1, 5),
    window=st.integers(1, 90),
)
def test_each_sample_is_planned_once_within_the_budget(lengths, budget, **job):
    steps = plan_epoch(lengths, budget, **job)
    groups = [group for step in steps for group in step]
    assert sorted(itertools.chain(*groups)) == [*range(len(lengths))]
    assert {len(step) for step in steps} == {job["world_size"]}
    budget = TokenBudget.of(budget)
    for group in filter(None, groups):
        tokens = [lengths[index] for index in group]
        assert len(group) == 1 or budget.cost(tokens) <= budget.tokens
        assert len(group) <= (budget.max_samples or len(group))


def steps_of_rank(loader):
    """The indices of each step of a rank; none where it fills."""
    infos = [pop_step_info(batch) for batch in loader]
    return [[] if info.is_filler else [*info.keys] for info in infos]


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {"window": 64}),
        (4, {"window": 64, "accumulate": 3, "round_size": 8, "seed": 3}),
        (4, {"window": "auto", "round_size": 8}),
    ],
)
def test_a_plan_is_what_the_loaders_of_ranks_train_on(world_size, options):
    def run(exchange):
        given = {"token_budget": 128, "shuffle": False, "process_group": exchange, **options}
        process_fn = lambda tokens: {"input_ids": [1] * tokens}  # noqa: E731
        return steps_of_rank(ODBDataLoader(LENGTHS, process_fn=process_fn, **given))

    steps = [[*step] for step in zip(*on_ranks(world_size, run), strict=True)]
    assert plan_epoch(LENGTHS, 128, world_size=world_size, **options) == steps


def spread(steps, costs):
    """How much the largest of a step costs, relative to the mean: 1 where ranks are even."""
    sums = np.array([[costs[group].sum() for group in step] for step in steps])
    return (sums.max(axis=1) / sums.mean(axis=1)).mean()


def test_the_groups_of_a_step_are_matched_by_costs():
    lengths = np.array(LENGTHS)
    costs = lengths**2  # What attention takes, whatever the budget is of.
    job = {"world_size": 4, "window": 128}
    by_costs = plan_epoch(lengths, 128, costs=costs, **job)
    assert spread(by_costs, costs) < spread(plan_epoch(lengths, 128, **job), costs) - 0.05


test_refusals = refuses(
    [
        ({"lengths": []}, ValueError, "lengths.*\\[\\]"),
        ({"lengths": [3, 0]}, ValueError, "lengths.*at least 1"),
        ({"lengths": [[3]]}, ValueError, "lengths.*one row"),
        ({"costs": [1]}, ValueError, "costs.*2 integers.*\\[1\\]"),
        ({"costs": [1, -1]}, ValueError, "costs.*at least 0"),
        ({"costs": [1, 1.5]}, ValueError, "costs.*integers"),
        ({"world_size": 0}, ValueError, "world_size.*0"),
        ({"window": 0}, ValueError, "window.*0"),
        ({"uneven": "no"}, ValueError, "uneven.*no"),
        ({"budget": TokenBudget(4, oversize="error")}, SampleError, "5 tokens"),
    ],
    lambda given: plan_epoch(**{"lengths": [3, 5], "budget": 8, **given}),
)
