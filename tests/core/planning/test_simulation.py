"""Whole epochs of all ranks, planned in one process from the lengths of the samples alone."""

from dataclasses import replace
from itertools import chain, pairwise
from typing import NamedTuple
from unittest.mock import patch

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
    plan_round,
    rank_plan,
    round_steps,
    simulate_steps,
    simulation,
)
from odb_nodes.core.planning.caps import costs_of
from odb_nodes.core.planning.group_planner import RoundSettings
from odb_nodes.core.planning.rank_plan import RankPlan
from odb_nodes.core.planning.rounds import COSTS, FILLER, SAMPLES, UNKNOWN_REMAINING, next_settings
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
LEVELLED = [(1 + at * 7919 % 60, at % 3) for at in range(200)]
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


def cost_column(report):
    """What each group of a report costs."""
    return costs_of(report.table[: report.groups, COSTS])


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
        assert [report.remaining for report in reports] == left


def test_a_rank_that_shares_nothing_tells_so_and_one_that_does_not_know_its_end_too():
    samples, job = [(5, 0)] * 200, SimulationOptions(world_size=2, budget=20, window=16)

    def left(**options):
        rounds = rounds_of(samples, options.pop("job", job), **options)
        return {report.remaining for one in rounds for report in one.reports}

    assert left(shares_rest=False) == {-1}
    assert left(job=replace(job, uneven="stop")) == {-1}
    # Until its source has ended.
    known = {report for report in left(knows_length=False) if report != UNKNOWN_REMAINING}
    assert UNKNOWN_REMAINING in left(knows_length=False) and all(0 <= one < 200 for one in known)
    assert UNKNOWN_REMAINING not in left()


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
    assert any(agreed) and {len(of_round) for of_round in agreed} <= {0, *range(2, 9)}
    by_function = caps(replace(job, step_time=len))  # Groups are formed by cost, and matched by it.
    assert 9 in by_function[0] and any(by_function[1])
    packed = TokenBudget(100, layout="packed")
    for none in (
        replace(job, world_size=1),
        replace(job, world_size=1, step_time=StepTime(squares=1)),
        replace(job, budget=packed, step_time=StepTime()),
    ):
        offers, agreed = caps(none)
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
                costs = np.sort(cost_column(report)[1:])  # the first was read before
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
        costs = [cost for one in reports for cost in cost_column(one)[1:].tolist()]
        assert max(costs, default=0) <= (limit or 100)
        assert limit or not costs or max(costs) > asked


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


# --- level in time --------------------------------------------------------------------------------

TIMES = StepTime(squares=1 / 30)


def level_steps(**options):
    given = {"world_size": 3, "budget": 100, "window": 60, "round_size": 8, "step_time": TIMES}
    return planned(LEVELLED * 3, SimulationOptions(**{**given, **options}))


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"largest_first": 4},
        {"accumulate": 3},
        {"window": 8},
        {"window": "auto"},
        {"window_start": "early"},
        {"step_time": shortest_first},
        {"max_patches": 4},
        {"max_samples": 3},
    ],
    ids=lambda options: options if isinstance(options, str) else ", ".join(options),
)
def test_ranks_that_are_level_in_time_take_each_sample_once_in_the_same_number_of_steps(
    layout, options
):
    limits = {name: options[name] for name in options if name.startswith("max_")}
    budget = TokenBudget(100, layout=layout, **limits)
    options = {name: value for name, value in options.items() if name not in limits}
    steps = level_steps(budget=budget, **options)
    groups = [group for step in steps for group in step if group is not None]
    assert sorted(chain(*groups)) == [*range(len(LEVELLED) * 3)]
    for group in groups:
        tokens, patches = zip(*((LEVELLED * 3)[at] for at in group), strict=True)
        assert budget.cost(tokens) <= 100
        assert sum(patches) <= (budget.max_patches or sum(patches))
        assert len(group) <= (budget.max_samples or len(group))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_with_stop_ranks_that_are_level_in_time_end_together(layout):
    steps = level_steps(budget=TokenBudget(100, layout=layout), uneven="stop")
    groups = [*chain(*steps)]
    assert all(groups)
    items = [*chain(*groups)]
    assert len({*items}) == len(items) >= 0.9 * len(LEVELLED) * 3


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
    [("packed", 2, 0.97, 0.1), ("packed", 4, 0.97, 0.2), ("padded", 4, 0.85, 0.18)],
)
def test_ranks_that_are_told_what_a_step_takes_wait_less(layout, world_size, least, gain):
    lengths = lognormal(world_size * 800, cv=1.5, seed=11)
    step_time = StepTime(squares=1 / 1_600)
    job = {"budget": TokenBudget(16_384, layout=layout), "world_size": world_size, "window": 256}
    level = time_efficiency(lengths, step_time, step_time=step_time, **job)
    by_tokens = time_efficiency(lengths, step_time, step_time=StepTime(), **job)
    assert level > max(least, by_tokens + gain)


def test_packed_rows_are_level_in_the_time_of_a_typical_model_by_default():
    job = {"world_size": 2, "window": 60, "budget": PACKED}
    default, typical, by_tokens = (
        [[group and group.data() for group in step] for step in simulate_steps(LENGTHS, **options)]
        for options in (
            job,
            {**job, "step_time": StepTime.typical(PACKED)},
            {**job, "step_time": StepTime()},
        )
    )
    assert default == typical
    big = TokenBudget(16_384, layout="packed")
    lengths = lognormal(1_600, cv=1.5, seed=11)
    assert time_efficiency(
        lengths, StepTime.typical(big), world_size=2, window=256, budget=big
    ) > 0.01 + time_efficiency(
        lengths,
        StepTime.typical(big),
        world_size=2,
        window=256,
        budget=big,
        step_time=StepTime(),
    )
    assert len(default) <= len(by_tokens) + 2


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
