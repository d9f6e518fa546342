"""The last round of an epoch: which samples ranks give each other."""

from itertools import chain
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import facts_of, lognormal

from odb_nodes import TokenBudget
from odb_nodes.core.planning import StepTime
from odb_nodes.core.planning.facts import Facts
from odb_nodes.core.planning.level_cut import LevelCut
from odb_nodes.core.planning.levelling import (
    _deal,
    gifts,
    moves_of,
    receivers,
    remaining_message,
)

few = settings(max_examples=max(20, settings.default.max_examples // 5))

lengths = st.lists(st.integers(1, 200), max_size=40)


@given(lengths, st.floats(-100, 5_000))
@few
def test_gifts_are_different_samples_that_the_surplus_has_room_for(tokens, surplus):
    work = TokenBudget(200).row_cost(np.array(tokens, np.int64))
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
    tokens = [1 + index * 7 % 3 for index in range(300)]
    longest_first = sorted(range(300), key=lambda index: (-tokens[index], index))
    every_eighth = [index for start in range(8) for index in longest_first[start::8]]
    assert gifts(np.array(tokens), sum(tokens)) == every_eighth
    level_cut = LevelCut(facts_of(tokens), TokenBudget(30))
    cut = [index for group in level_cut.groups(level_cut.fewest)[::-1] for index in group]
    assert sorted(cut, key=tokens.__getitem__) == sorted(range(300), key=tokens.__getitem__)


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
    holders = [
        [(rank, place) for place in range(len(left.facts))] for rank, left in enumerate(lefts)
    ]
    for rank, of_rank in enumerate(moves):
        places = np.flatnonzero(lefts[rank].may_move)
        for row, receiver in of_rank:
            sample = (rank, int(places[row]))
            holders[rank].remove(sample)
            holders[receiver].append(sample)
    return holders


def moves_between(lefts, budget, step_time):
    messages = [remaining_message(left.facts, left.may_move, budget, step_time) for left in lefts]
    return moves_of(messages, budget, step_time)


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
        (rank, place) for rank, left in enumerate(lefts) for place in range(len(left.facts))
    ]
    assert sorted(chain(*after(lefts, moves))) == everything
    assert moves_between(lefts, budget, step_time) == moves


def test_a_remaining_message_has_movable_samples_and_sums_of_the_others():
    left = Left.of([10, 20, 30, 40], kept=2, patches=np.array([1, 2, 3, 4]))
    assert remaining_message(*left, TokenBudget(100), None).tolist() == [30, 0, 30, 40, 3, 4]
    step_time = StepTime(squares=0.1, patches=2)
    assert remaining_message(*left, TokenBudget(100), step_time).tolist() == [30, 56, 30, 40, 3, 4]
    assert remaining_message(*Left.of([]), TokenBudget(100), step_time).tolist() == [0, 0]


def totals(lefts, holders, values):
    """The sum of what the samples of each rank take."""
    of_each = [values(left.facts) for left in lefts]
    return np.array([sum(int(of_each[rank][place]) for rank, place in held) for held in holders])


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
        return budget.row_cost(facts.tokens)

    def extra(facts):
        return step_time.extra(facts.tokens, facts.patches)

    def largest(holders):
        """The sum over ranks of the difference between their largest samples, one by one."""
        of_ranks = [
            sorted((int(extra(lefts[rank].facts)[place]) for rank, place in held), reverse=True)[:8]
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
    assert [
        sum(lefts[rank].facts.lengths[place] == 100 for rank, place in held) for held in moved
    ] == [
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
