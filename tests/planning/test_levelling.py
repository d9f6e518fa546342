"""The last round of an epoch: when it begins, who gives what to whom, and into what it is cut."""

from itertools import chain
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import budgets, facts_of, lognormal

from odb_nodes import TokenBudget
from odb_nodes.planning import StepTime
from odb_nodes.planning.facts import Facts
from odb_nodes.planning.levelling import (
    Rest,
    _deal,
    gifts,
    moves_of,
    receivers,
    told_of,
    work_of,
)

few = settings(max_examples=max(20, settings.default.max_examples // 5))

lengths = st.lists(st.integers(1, 200), max_size=40)


@given(lengths, st.floats(-100, 5_000))
@few
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
@few
def test_ranks_come_as_near_to_each_other_as_samples_allow(ranks):
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
@few
def test_the_rest_is_cut_into_as_few_groups_as_asked_for_at_the_least_cost(tokens, budget, more):
    samples = facts_of(tokens, patches=np.arange(len(tokens)) % 4)
    rest = Rest(samples, budget)
    groups = rest.groups(rest.fewest + more)
    assert sorted(index for group in groups for index in group) == [*range(len(samples))]
    assert len(groups) <= rest.fewest + more

    def largest(cut):
        return max((budget.cost([tokens[index] for index in group]) for group in cut), default=0)

    assert largest(groups) <= largest(rest.groups(rest.fewest))  # also if a sample is oversize
    for group in groups:
        patches = sum(samples.patches[index] for index in group)
        alone = len(group) == 1
        assert alone or budget.cost([tokens[index] for index in group]) <= budget.tokens
        assert alone or patches <= (budget.max_patches or patches)
        assert len(group) <= (budget.max_samples or len(group))


def test_more_groups_make_the_largest_one_cheaper_also_beside_an_oversize_sample():
    lengths, costs = [*range(10, 60)], []
    for beside, more in (([], 0), ([], 4), ([], 8), ([500], 8)):
        samples = facts_of([*lengths, *beside])
        rest = Rest(samples, TokenBudget(400))
        cut = [samples.take(group).lengths for group in rest.groups(rest.fewest + more)]
        costs.append(max(max(group) * len(group) for group in cut if group != beside))
    assert costs[0] > costs[1] > costs[2]
    assert max(costs[2:]) < 0.83 * costs[0]


def test_a_gift_goes_to_the_rank_with_least_and_the_largest_first():
    # The ranks keep 5, 20 and 10. 9 to rank 0 (14), 8 to rank 2 (18), 3 to rank 0 (17).
    given_away = [np.array([3], np.int64), np.array([8, 9], np.int64), np.array([], np.int64)]
    assert receivers([8, 37, 10], given_away) == [[0], [2, 0], []]


def test_of_ranks_with_as_much_the_first_receives():
    given_away = [np.array([], np.int64), np.array([], np.int64), np.array([4, 4], np.int64)]
    assert receivers([5, 5, 28], given_away) == [[], [], [0, 1]]


def test_a_rank_gives_nothing_that_it_has_no_surplus_for():
    work = np.array([5, 9, 7], np.int64)
    assert gifts(work, 4.9) == gifts(work, 0) == gifts(work, -3) == []
    assert gifts(work, 5) == [0]
    assert gifts(work, 9) == [1]
    assert gifts(np.array([7, 7, 7]), 14) == [0, 1]  # the first of equal ones


def test_of_equal_samples_the_first_are_given_and_cut_first():
    """A sort that is not stable would differ from machine to machine."""
    tokens = [1 + at * 7 % 3 for at in range(300)]
    longest_first = sorted(range(300), key=lambda at: (-tokens[at], at))
    every_eighth = [at for start in range(8) for at in longest_first[start::8]]
    assert gifts(np.array(tokens), sum(tokens)) == every_eighth
    rest = Rest(facts_of(tokens), TokenBudget(30))
    cut = [at for group in rest.groups(rest.fewest)[::-1] for at in group]
    assert sorted(cut, key=tokens.__getitem__) == sorted(range(300), key=tokens.__getitem__)


def test_work_is_what_samples_cost_without_padding():
    budget = TokenBudget(100, attention_tokens=10, pad_to_multiple_of=4)
    assert work_of([3, 10, 20], budget).tolist() == [3, 20, 60]
    assert work_of([], budget).tolist() == []


@pytest.mark.parametrize("more", [1, 2, 5])
def test_a_cheaper_largest_group_would_make_more_groups(more):
    """The search is exact for padded rows under no further limit, of fewer than 2**14 tokens."""
    for seed in range(4):
        tokens = np.random.default_rng(seed).integers(1, 60, 30).tolist()
        rest = Rest(facts_of(tokens), budget := TokenBudget(400))
        most = rest.fewest + more
        cut = [[tokens[at] for at in group] for group in rest.groups(most)]
        largest = max(map(budget.cost, cut))
        assert len(cut) <= most and largest > max(tokens)
        assert Rest(facts_of(tokens), TokenBudget(largest - 1)).fewest > most


def test_groups_of_one_shape_are_cut_as_the_budget_cuts_them():
    tokens = [*range(1, 40)]
    rest = Rest(facts_of(tokens), TokenBudget(200, shapes=3))
    assert rest.groups(rest.fewest + 9) == rest.groups(rest.fewest)


def test_nothing_is_left_to_cut():
    rest = Rest(facts_of([]), TokenBudget(90))
    assert (rest.fewest, rest.groups(0), rest.groups(5)) == (0, [], [])


def test_oversize_samples_alone_are_cut_to_groups_of_their_own():
    rest = Rest(facts_of([500, 400]), TokenBudget(90))
    assert sorted(rest.groups(2)) == sorted(rest.groups(4)) == [[0], [1]]


def test_fewer_groups_than_the_budget_needs_are_refused():
    samples = facts_of([30] * 9)
    with pytest.raises(ValueError, match="`most` must be at least 3, but is 2"):
        Rest(samples, TokenBudget(90)).groups(2)


# --- which samples move ---------------------------------------------------------------------------


class Left(NamedTuple):
    """What a rank has left: tokens and patches of its samples, and which of them may move."""

    facts: Facts
    may_move: np.ndarray

    @classmethod
    def of(cls, tokens, kept=0, patches=0):
        """Samples of which the first `kept` cannot move."""
        facts = facts_of(tokens, patches=patches)
        return cls(facts, np.arange(len(facts)) >= kept)


def after(lefts, moves):
    """The samples of each rank after the moves, as (rank, place), with those that stayed."""
    holders = [[(rank, place) for place in range(len(one.facts))] for rank, one in enumerate(lefts)]
    for rank, of_rank in enumerate(moves):
        places = np.flatnonzero(lefts[rank].may_move)
        for row, receiver in of_rank:
            sample = (rank, int(places[row]))
            holders[rank].remove(sample)
            holders[receiver].append(sample)
    return holders


def moves_between(lefts, budget, step_time):
    told = [told_of(one.facts, one.may_move, budget, step_time) for one in lefts]
    return moves_of(told, budget, step_time)


lefts = st.lists(
    st.builds(Left.of, st.lists(st.integers(1, 200), max_size=30), st.integers(0, 5)),
    min_size=2,
    max_size=6,
)
step_times = st.sampled_from([None, StepTime(squares=1 / 40), StepTime(squares=1, patches=9)])


@given(lefts, st.sampled_from([TokenBudget(200), TokenBudget(300, layout="packed")]), step_times)
@few
def test_each_sample_moves_at_most_once_to_another_rank_and_some_stay(lefts, budget, step_time):
    moves = moves_between(lefts, budget, step_time)
    assert len(moves) == len(lefts)
    for rank, of_rank in enumerate(moves):
        rows = [row for row, _ in of_rank]
        assert len({*rows}) == len(rows)
        assert all(0 <= row < lefts[rank].may_move.sum() for row in rows)
        assert all(receiver != rank and 0 <= receiver < len(lefts) for _, receiver in of_rank)
    everything = [
        (rank, place) for rank, one in enumerate(lefts) for place in range(len(one.facts))
    ]
    assert sorted(chain(*after(lefts, moves))) == everything
    assert moves_between(lefts, budget, step_time) == moves


def test_what_a_rank_tells_are_the_samples_that_may_move_and_the_sums_of_the_others():
    left = Left.of([10, 20, 30, 40], kept=2, patches=np.array([1, 2, 3, 4]))
    assert told_of(*left, TokenBudget(100), None).tolist() == [30, 0, 30, 40, 3, 4]
    step_time = StepTime(squares=0.1, patches=2)
    assert told_of(*left, TokenBudget(100), step_time).tolist() == [30, 56, 30, 40, 3, 4]
    assert told_of(*Left.of([]), TokenBudget(100), step_time).tolist() == [0, 0]


def totals(lefts, holders, values):
    """The sum of what the samples of each rank take."""
    of_each = [values(one.facts) for one in lefts]
    return np.array([sum(int(of_each[rank][at]) for rank, at in held) for held in holders])


def spread(sums):
    return float((sums.max() - sums.min()) / sums.mean())


@pytest.mark.parametrize("kept", [0, 40])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_ranks_are_level_in_cost_and_in_time_after_the_moves(layout, kept):
    """Also where many samples cannot move."""
    budget, step_time = TokenBudget(16_384, layout=layout), StepTime(squares=1 / 800)
    lefts = [
        Left.of(np.array(lognormal(200 + 30 * rank, cv=1.0, seed=rank)) // (1 + rank % 2), kept)
        for rank in range(4)
    ]

    def cost(facts):
        return work_of(facts.tokens, budget)

    def extra(facts):
        return step_time.extra(facts.tokens, facts.patches)

    def largest(holders):
        """The sum over ranks of the difference between their largest samples, one by one."""
        of_ranks = [
            sorted((int(extra(lefts[rank].facts)[at]) for rank, at in held), reverse=True)[:8]
            for held in holders
        ]
        return int(np.ptp(np.array(of_ranks), axis=0).sum())

    before = after(lefts, [[] for _ in lefts])
    moved = after(lefts, moves_between(lefts, budget, step_time))
    assert spread(totals(lefts, before, extra)) > 0.2
    assert spread(totals(lefts, moved, extra)) < 0.1
    assert spread(totals(lefts, moved, cost)) < 0.02
    if not kept:
        assert largest(moved) < 0.6 * largest(before)
    by_cost = after(lefts, moves_between(lefts, budget, None))
    assert spread(totals(lefts, by_cost, cost)) < 0.02


def test_the_largest_samples_are_dealt_to_all_ranks_one_each():
    """Four that decide the times of steps, all of one rank; the others of another."""
    lefts = [Left.of([100] * 4 + [10] * 10), Left.of([11] * 40), Left.of([]), Left.of([12] * 9)]
    moved = after(lefts, moves_between(lefts, TokenBudget(120), StepTime(squares=1)))
    assert [sum(lefts[rank].facts.lengths[at] == 100 for rank, at in held) for held in moved] == [
        1,
        1,
        1,
        1,
    ]


@given(st.lists(st.integers(0, 3), max_size=20))
@few
def test_of_as_many_samples_as_ranks_each_gets_one_and_keeps_the_first_of_its_own(owners):
    holders = np.array(owners, np.int64)
    _deal(holders, np.arange(len(owners)), 4)
    whole = len(owners) // 4 * 4
    for start in range(0, whole, 4):
        assert sorted(holders[start : start + 4]) == [0, 1, 2, 3]
        for rank in {*owners[start : start + 4]}:
            first = start + owners[start : start + 4].index(rank)
            assert holders[first] == rank
    assert holders[whole:].tolist() == owners[whole:]


# --- the rest, cut for a time ---------------------------------------------------------------------


@given(lengths, budgets, st.integers(0, 5), step_times.filter(bool))
@few
def test_the_rest_is_cut_into_at_most_as_many_groups_whatever_they_are_level_in(
    tokens, budget, more, step_time
):
    samples = facts_of(tokens, patches=np.arange(len(tokens)) % 4)
    rest = Rest(samples, budget, step_time)
    groups = rest.groups(rest.fewest + more)
    assert sorted(index for group in groups for index in group) == [*range(len(samples))]
    assert len(groups) <= rest.fewest + more
    for group in groups:
        assert len(group) >= 1 and group == sorted(group)
        alone = len(group) == 1
        patches = sum(samples.patches[index] for index in group)
        assert alone or budget.cost([tokens[index] for index in group]) <= budget.tokens
        assert alone or patches <= (budget.max_patches or patches)
        assert len(group) <= (budget.max_samples or len(group))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_groups_of_the_rest_take_about_as_long_as_each_other(layout):
    tokens = lognormal(300, cv=1.0, seed=3)
    budget, step_time = TokenBudget(16_384, layout=layout), StepTime(squares=1 / 800)

    def longest(by):
        rest = Rest(facts_of(tokens), budget, by)
        groups = rest.groups(Rest(facts_of(tokens), budget).fewest + 3)
        times = [
            step_time.of_group([tokens[at] for at in group], [0] * len(group), budget)
            for group in groups
        ]
        return max(times)

    assert longest(step_time) < 0.95 * longest(None)
