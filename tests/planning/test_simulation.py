"""Whole epochs of all ranks, planned in one process from the lengths of the samples alone."""

from dataclasses import replace
from itertools import chain, pairwise
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pools import LIMITS, ROW_SIZES
from refusals import refuses

from odb_nodes import SampleError, TokenBudget
from odb_nodes.planning import (
    SimulationOptions,
    plan_epoch,
    plan_round,
    rank_plan,
    round_steps,
    simulate_steps,
    simulation,
)
from odb_nodes.planning.group_planner import RoundSettings
from odb_nodes.planning.levelling import UNKNOWN_LEFT
from odb_nodes.planning.rank_plan import RankPlan
from odb_nodes.planning.rounds import COST, FILLER, SAMPLES, next_settings
from odb_nodes.planning.simulation import SampleCosts, plan_steps

few = settings(max_examples=max(20, settings.default.max_examples // 5))

LENGTHS = np.random.default_rng(0).integers(1, 41, 500).tolist()
budgets = st.one_of(
    st.builds(TokenBudget, st.integers(30, 200), **LIMITS, **ROW_SIZES),
    st.builds(TokenBudget, st.integers(60, 300), attention_tokens=st.integers(20, 90), **LIMITS),
    st.builds(TokenBudget, st.integers(30, 200), layout=st.just("packed"), **LIMITS),
    st.builds(TokenBudget, st.integers(20, 60), oversize=st.sampled_from(["alone", "drop"])),
)
jobs = st.builds(
    SimulationOptions,
    world_size=st.integers(1, 4),
    budget=budgets,
    window=st.sampled_from([1, 7, 60, "auto"]),
    round_size=st.integers(1, 12),
    accumulate=st.integers(1, 3),
    dearest_first=st.sampled_from([0, 0, 3]),
    seed=st.integers(0, 9),
)


def random_samples(count, longest, seed):
    """Tokens and patches of each sample; processing skips those without tokens."""
    draws = np.random.default_rng(seed).integers(0, (longest + 1, 10), (count, 2))
    return [*map(tuple, draws.tolist())]


datasets = st.builds(
    random_samples, st.integers(1, 45), st.sampled_from([1, 20, 40, 90]), st.integers(0, 2**16)
)


def costs_of(samples):
    tokens, patches = np.array(samples, np.int64).T
    return SampleCosts(tokens, np.maximum(tokens - 1, 0), patches, np.zeros_like(tokens))


def shards_of(samples, world_size):
    order = np.arange(len(samples))
    return [order[rank::world_size] for rank in range(world_size)]


def planned(samples, job, **options):
    """The indices of each rank's group of each step; `None` for one that fills."""
    shards = shards_of(samples, job.world_size)
    steps = plan_steps(costs_of(samples), shards, job, **options)
    return [[group and group.data() for group in step] for step in steps]


def emitted_of(samples, job):
    """The samples that an epoch has: those that are neither skipped nor dropped."""
    budget = TokenBudget.of(job.budget)
    return [
        index
        for index, (tokens, patches) in enumerate(samples)
        if tokens and not (budget.oversize == "drop" and budget.is_oversize(tokens, patches))
    ]


LEVELLED = [(1 + at * 7919 % 60, at % 3) for at in range(200)]
LEVEL_JOB = SimulationOptions(world_size=2, budget=100, window=60, round_size=8)
"""Of which ranks agree on caps, and share out the rest."""


@given(datasets, jobs, st.booleans(), st.booleans())
@example(LEVELLED, LEVEL_JOB, True, True)
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


# --- rounds: fillers, the end of an epoch, settings -----------------------------------------------


class Round(NamedTuple):
    reports: list
    plan: object
    settings: RoundSettings | None = None  # of the next round; `None` after the last


def rounds_of(samples, job, **options):
    """The rounds of an epoch."""
    rounds = []

    def plan(reports, **given):
        rounds.append(Round(reports, plan_round(reports, **given)))
        return rounds[-1].plan

    def settings_after(*given, **options):
        settings = next_settings(*given, **options)
        if not rounds[-1].plan.last:
            rounds[-1] = rounds[-1]._replace(settings=settings)
        return settings

    with (
        patch.object(rank_plan, "plan_round", plan),
        patch.object(rank_plan, "next_settings", settings_after),
    ):
        planned(samples, job, **options)
    return rounds


def samples_in(report):
    return int(report.table[: report.groups, SAMPLES].sum())


@given(datasets, jobs, st.booleans())
@few
def test_a_rank_fills_only_at_its_end_and_where_it_has_fewer_samples_than_steps(
    samples, job, shares_rest
):
    for reports, plan, _ in rounds_of(samples, job, shares_rest=shares_rest):
        steps = plan.groups.shape[1]
        for report, row in zip(reports, plan.groups.tolist(), strict=True):
            assert row.count(FILLER) == max(0, steps - samples_in(report))
            assert report.ended or FILLER not in row


@given(datasets, jobs)
@few
def test_rounds_have_the_steps_said_before_until_the_last_which_may_be_shared_out(samples, job):
    rounds = rounds_of(samples, job)
    given = (job.world_size, job.round_size, job.accumulate)
    for number, (_, plan, next_round) in enumerate(rounds):
        is_over = number == len(rounds) - 1
        assert plan.last == is_over == (next_round is None)
        assert is_over or not next_round.is_last or number == len(rounds) - 2
        if not is_over:
            assert plan.groups.shape[1] == round_steps(number, *given)
            assert plan.groups.shape[1] % job.accumulate == 0


@given(datasets, jobs)
@few
def test_a_rank_knows_how_many_samples_it_has_after_a_round(samples, job):
    job = replace(job, world_size=1 + job.world_size, budget=TokenBudget(60))  # drops nothing
    samples = [(1 + tokens, 0) for tokens, _ in samples]
    left = [len(shard) for shard in shards_of(samples, job.world_size)]
    for reports, _, next_round in rounds_of(samples, job):
        left = [before - samples_in(one) for before, one in zip(left, reports, strict=True)]
        if next_round is None:
            return  # after ranks have shared out the rest
        assert [report.left for report in reports] == left


def test_a_rank_that_shares_nothing_tells_so_and_one_that_does_not_know_its_end_too():
    samples, job = [(5, 0)] * 200, SimulationOptions(world_size=2, budget=20, window=16)

    def left(**options):
        rounds = rounds_of(samples, options.pop("job", job), **options)
        return {report.left for one in rounds for report in one.reports}

    assert left(shares_rest=False) == {-1}
    assert left(job=replace(job, uneven="stop")) == {-1}
    # Until its source has ended.
    known = {report for report in left(knows_length=False) if report != UNKNOWN_LEFT}
    assert UNKNOWN_LEFT in left(knows_length=False) and all(0 <= one < 200 for one in known)
    assert UNKNOWN_LEFT not in left()


@pytest.mark.parametrize("knows_length", [True, False])
def test_an_auto_window_is_chosen_in_the_first_round_and_stays(knows_length):
    samples = [(1 + at % 20, 0) for at in range(1200)]
    job = SimulationOptions(world_size=2, budget=100, window="auto")
    windows = [
        one.settings.window for one in rounds_of(samples, job, knows_length=knows_length)[:-1]
    ]
    assert len(windows) > 1
    assert len({*windows}) == 1 and windows[0] == pytest.approx(32 * 100 / 10.5, rel=0.1)
    fixed = rounds_of(samples, replace(job, window=64), knows_length=knows_length)
    assert {one.settings.window for one in fixed[:-1]} == {0}


def test_ranks_offer_caps_where_groups_are_matched_by_what_they_cost_under_the_budget():
    samples = [(at * 7919 % 60 + 1, 0) for at in range(300)]
    job = SimulationOptions(world_size=2, budget=100, window=100, round_size=8)

    def caps(job):
        rounds = rounds_of(samples, job)
        offers = {len(report.pool.offer) for one in rounds for report in one.reports}
        return offers, [one.settings.caps for one in rounds[:-1]]

    offers, agreed = caps(job)
    assert offers <= {0, 1 + 8} and 9 in offers
    assert any(agreed) and {len(of_round) for of_round in agreed} <= {0, *range(5, 9)}
    for other in (replace(job, cost_fn=len), replace(job, world_size=1)):
        offers, agreed = caps(other)
        assert offers == {0} and not any(agreed)
    wider = replace(job, accumulate=3)
    assert caps(wider)[0] <= {0, 1 + 9}  # a round of whole optimizer steps


def test_groups_are_within_the_caps_of_their_round():
    samples = [(at * 7919 % 60 + 1, 0) for at in range(500)]
    job = SimulationOptions(world_size=2, budget=100, window=100, round_size=8)
    rounds = rounds_of(samples, job)
    checked = 0
    for before, (reports, _, _) in pairwise(rounds):
        if before.settings.is_last or not before.settings.caps:
            continue
        for report in reports:
            if not report.ended:
                costs = np.sort(report.table[1 : report.groups, COST])  # the first was read before
                alone = report.table[1 : report.groups, SAMPLES] == 1
                assert alone.any() or (costs <= before.settings.caps[-len(costs) :]).all()
                checked += 1
    assert checked


def test_what_a_rank_asks_for_bounds_the_groups_of_all_ranks_from_the_next_round_on():
    """Except the first group of that round, which was formed with the round before."""
    lengths = [1 + at * 7919 % 30 for at in range(300)]
    samples, asked = [(length, 0) for length in lengths], 40

    class Asking(RankPlan):
        def report(self, rest):
            is_late = self._rank == 1 and self.planner.pool.pulled > 60
            return super().report(rest, max_tokens=asked if is_late else 0)

    job = SimulationOptions(world_size=3, budget=100, window=20, round_size=4)
    with patch.object(simulation, "RankPlan", Asking):
        rounds = rounds_of(samples, job, shares_rest=False)
        steps = planned(samples, job, shares_rest=False)
    assert sorted(chain(*(group for step in steps for group in step if group))) == [*range(300)]
    limits = [0, *(one.settings.max_tokens for one in rounds[:-1])]
    assert limits == sorted(limits) and {*limits} == {0, asked}
    for limit, (reports, *_) in zip(limits, rounds, strict=True):
        costs = [cost for one in reports for cost in one.table[1 : one.groups, COST].tolist()]
        assert max(costs) <= (limit or 100)
        assert limit or max(costs) > asked


def test_an_epoch_may_have_caps_and_a_last_round_that_is_shared_out():
    """The example of other tests, which would show little otherwise."""
    settings_ = [one.settings for one in rounds_of(LEVELLED, LEVEL_JOB)[:-1]]
    assert any(one.caps for one in settings_) and settings_[-1].is_last


def test_sharing_saves_fillers_and_steps():
    lengths = [40 if at % 2 else 5 for at in range(400)]  # one rank has the long ones
    job = SimulationOptions(world_size=2, budget=80, window=40, round_size=8)
    samples = [(length, 0) for length in lengths]
    shared, alone = (planned(samples, job, shares_rest=shares) for shares in (True, False))
    assert len(shared) <= len(alone)
    assert sum(step.count(None) for step in shared) <= sum(step.count(None) for step in alone)


# --- oversize samples, seeds ----------------------------------------------------------------------


@given(datasets, budgets)
@few
def test_a_sample_is_oversize_under_the_same_rule_in_a_table_and_alone(samples, budget):
    expected = [budget.is_oversize(*sample) for sample in samples]
    assert costs_of(samples).are_oversize(budget).tolist() == expected


def test_an_oversize_sample_is_alone_or_dropped_or_an_error_that_names_it():
    lengths = [10, 90, 20]
    assert plan_epoch(lengths, TokenBudget(50)) in ([[[1]], [[0, 2]]], [[[0, 2]], [[1]]])
    assert plan_epoch(lengths, TokenBudget(50, oversize="drop")) == [[[0, 2]]]
    with pytest.raises(
        SampleError, match=r"90 tokens and 0 patches exceeds TokenBudget\(tokens=50"
    ):
        plan_epoch(lengths, TokenBudget(50, oversize="error"))
    assert plan_epoch([10, 20], TokenBudget(50, oversize="error")) == [[[0, 1]]]


@given(datasets, jobs, st.integers(1, 99))
@few
def test_seed_and_epoch_decide_the_order_of_steps_and_nothing_else(samples, job, seed):
    def sorted_steps(job, **options):
        return sorted(map(str, planned(samples, job, **options)))

    assert sorted_steps(replace(job, seed=seed), epoch=seed % 3) == sorted_steps(job)


def test_another_seed_and_another_epoch_have_another_order():
    samples, job = (
        [(length, 0) for length in LENGTHS[:200]],
        SimulationOptions(world_size=2, budget=64),
    )
    plans = [planned(samples, replace(job, seed=seed)) for seed in range(3)]
    plans += [planned(samples, job, epoch=epoch) for epoch in range(1, 3)]
    assert len({*map(str, plans)}) == 5


def test_without_samples_there_is_no_step():
    nothing = [(0, 0)] * 5
    assert planned(nothing, SimulationOptions(world_size=2, budget=64)) == []


# --- plans of lengths alone -----------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_plan_has_the_steps_of_the_first_epoch_and_nothing_where_a_rank_fills(world_size):
    lengths = LENGTHS[:100]
    job = {"world_size": world_size, "window": 16, "round_size": 4, "seed": 3}
    steps = [
        [[] if group is None else group.data() for group in step]
        for step in simulate_steps(lengths, budget=64, **job)
    ]
    assert plan_epoch(lengths, 64, **job) == steps
    assert plan_epoch(np.array(lengths, np.uint16), TokenBudget(64), **job) == steps


def test_the_end_of_the_data_is_known_when_a_pull_finds_nothing():
    """Before that the best group is taken, and then that of the oldest sample."""
    lengths = [60, *[10] * 7]
    assert plan_epoch(lengths, 100, window=8) == [[[*range(1, 8)]], [[0]]]
    assert plan_epoch(lengths, 100, window=9) == [[[0]], [[*range(1, 8)]]]


def test_fewer_samples_than_ranks_leave_ranks_without_any():
    assert plan_epoch([5], 64, world_size=3) == [[[0], [], []]]


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
        ({"lengths": [4, 4], "costs": [2**31 - 1, 1]}, ValueError, "`costs` must be in 0.*648"),
        ({"world_size": 0}, ValueError, "world_size.*0"),
        ({"window": 0}, ValueError, "window.*0"),
        ({"uneven": "no"}, ValueError, "uneven.*no"),
        ({"budget": TokenBudget(4, oversize="error")}, SampleError, "5 tokens"),
    ],
    lambda given: plan_epoch(**{"lengths": [3, 5], "budget": 8, **given}),
)
