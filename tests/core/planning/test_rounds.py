"""Rounds: what ranks tell each other, and the steps that all of them plan from it."""

import random
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_nodes import TokenBudget
from odb_nodes.core.planning import CostReport, GroupCost, plan_round, round_steps
from odb_nodes.core.planning.caps import NO_CAPS
from odb_nodes.core.planning.facts import Facts
from odb_nodes.core.planning.group_planner import GroupPlanner, PoolReport, RoundSettings
from odb_nodes.core.planning.rounds import (
    COLUMNS,
    FILLER,
    UNKNOWN_REMAINING,
    SplitLadder,
    begins_last_round,
    cut_by_length,
    next_settings,
    report_of,
    shuffled,
    spread_steps,
    step_totals,
    table_row,
)

few = settings(max_examples=max(20, settings.default.max_examples // 5))

TASKS = 2


def measure(group):
    """Of a group: its cost under a padded budget, and sums that differ for each sample."""
    of_tasks = [int(group.targets[group.task == task].sum()) for task in range(TASKS)]
    flags = int(np.bitwise_or.reduce(group.patches, initial=0))
    cost = len(group) * max(group.lengths)
    return GroupCost(len(group), int(group.targets.sum()), cost, flags, tuple(of_tasks))


def group_of(*lengths, rank=0, number=0):
    """A group of samples of these lengths, which differ in all that is told of them."""
    tokens = np.array(lengths, np.int64)
    return Facts(
        ordinal=1000 * rank + 10 * number + np.arange(len(tokens)),
        tokens=tokens,
        targets=tokens % 5,
        patches=1 << tokens % 3,
        task=tokens % 4 == 0,
    )


groups_of_rank = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), max_size=5)


def random_ranks(ranks, seed):
    """Of each rank, the lengths of the samples of each group."""
    draw = random.Random(seed)
    return [
        [
            [draw.randint(1, 30) for _ in range(draw.randint(1, 5))]
            for _ in range(draw.randint(0, 5))
        ]
        for _ in range(ranks)
    ]


ranks_of_groups = st.builds(random_ranks, st.integers(2, 5), st.integers(0, 2**16))


def ladder_and_report(groups, most, **options):
    """The ladder of groups, and the report of it."""
    ladder = SplitLadder(groups, measure)
    options = {"has_ended": True, "may_split": True, "pool": PoolReport()} | options
    return ladder, report_of(ladder, most, remaining=-1, tasks=TASKS, **options)


def round_of(lengths, most=None, *, uneven="fill", seed=0):
    """One round: groups before splits, reports, the plan, and groups after splits."""
    most = most or max(1, *map(len, lengths))
    groups, ladders, reports = [], [], []
    for rank, of_rank in enumerate(lengths):
        formed = [
            group_of(*group, rank=rank, number=number) for number, group in enumerate(of_rank)
        ]
        groups.append(formed[:most])
        ladder, report = ladder_and_report(formed[:most], most, has_ended=len(formed) <= most)
        ladders.append(ladder)
        reports.append(report)
    plan = plan_round(reports, uneven=uneven, seed=seed)
    emitted = [ladder.groups(splits) for ladder, splits in zip(ladders, plan.splits, strict=True)]
    return groups, reports, plan, emitted


def steps_of(plan, emitted):
    """The group of each rank in each step; `None` for one that fills."""
    return [
        [
            None if index == FILLER else of_rank[index]
            for of_rank, index in zip(emitted, step, strict=True)
        ]
        for step in plan.groups.T.tolist()
    ]


def samples_of(groups):
    return sorted(ordinal for group in groups for ordinal in group.ordinal.tolist())


# --- the plan of a round -------------------------------------------------------------------------


@given(ranks_of_groups, st.integers(0, 2**64 - 1))
@few
def test_each_group_is_in_one_step_whole_or_in_parts_that_make_it_up(lengths, seed):
    groups, _, plan, emitted = round_of(lengths, seed=seed)
    steps = steps_of(plan, emitted)
    for rank, of_rank in enumerate(groups):
        planned = [step[rank] for step in steps if step[rank] is not None]
        assert samples_of(planned) == samples_of(of_rank)
        assert len(planned) == len(of_rank) + plan.splits[rank]
        assert all(len(group) for group in planned)


@given(ranks_of_groups, st.integers(1, 8))
@few
def test_a_round_has_as_many_steps_as_the_rank_with_most_groups_and_no_more(lengths, most):
    groups, reports, plan, _ = round_of(lengths, most)
    assert plan.groups.shape == (len(lengths), max(map(len, groups)))
    assert max(map(len, groups)) <= most
    # A rank that is told to go on has as many groups as the round may have.
    assert all(report.ended or report.groups == most for report in reports)
    assert plan.last == all(report.ended for report in reports)


@given(ranks_of_groups)
@few
def test_a_rank_fills_only_where_it_has_fewer_samples_than_the_round_has_steps(lengths):
    _, _, plan, _ = round_of(lengths)
    steps = plan.groups.shape[1]
    for of_rank, row in zip(lengths, plan.groups.tolist(), strict=True):
        samples = sum(map(len, of_rank))
        assert row.count(FILLER) == max(0, steps - samples)


@given(ranks_of_groups, st.integers(0, 2**64 - 1))
@few
def test_totals_of_a_step_are_the_sums_of_its_groups(lengths, seed):
    """The reports alone say what the parts of groups hold that other ranks will split."""
    _, _, plan, emitted = round_of(lengths, seed=seed)
    for step, totals in zip(steps_of(plan, emitted), plan.totals.tolist(), strict=True):
        costs = [measure(group) for group in step if group is not None]
        flags = np.bitwise_or.reduce([cost.flags for cost in costs]) if costs else 0
        assert totals == [
            sum(cost.samples for cost in costs),
            sum(cost.targets for cost in costs),
            flags,
            max((cost.cost for cost in costs), default=0),
            *np.sum([cost.tasks for cost in costs], axis=0).tolist(),
        ]


@given(
    st.lists(
        st.lists(st.integers(1, 30), min_size=1, max_size=4),
        min_size=2,
        max_size=3,
    )
)
@few
def test_no_other_matching_has_a_smaller_sum_of_the_largest_groups_of_steps(costs):
    plan = round_of([[[cost] for cost in of_rank] for of_rank in costs])[2]
    steps = max(map(len, costs))
    first, *others = [of_rank + [0] * (steps - len(of_rank)) for of_rank in costs]
    least = min(
        sum(map(max, zip(first, *matching, strict=True)))
        for matching in product(*map(permutations, others))
    )
    assert plan.totals[:, 3].sum() == least


@given(ranks_of_groups, st.integers(0, 2**64 - 1), st.sampled_from(["fill", "stop"]))
@few
def test_every_rank_plans_the_same_from_the_messages_of_all(lengths, seed, uneven):
    _, reports, plan, _ = round_of(lengths, seed=seed, uneven=uneven)
    messages = [report.to_message() for report in reports]
    again = [CostReport.from_message(message, TASKS) for message in messages]
    plan_again = plan_round(again, uneven=uneven, seed=seed)
    assert (plan_again.groups == plan.groups).all()
    assert (plan_again.totals == plan.totals).all()
    assert (plan_again.splits, plan_again.last) == (plan.splits, plan.last)


def test_of_equally_dear_groups_the_first_comes_first():
    """A sort that is not stable would differ from machine to machine."""
    costs = [index * 7 % 3 for index in range(300)]
    table = np.array([table_row(GroupCost(1, 1, cost)) for cost in costs])
    plan = plan_round([CostReport(table, 300, ended=True)] * 2, uneven="fill", seed=5)
    largest_first = np.array(sorted(range(300), key=lambda index: (-costs[index], index)))
    assert (plan.groups == largest_first[shuffled(300, 5)]).all()


def timed_report(costs, times, **options):
    rows = [
        table_row(GroupCost(2, 1, cost, time=time)) for cost, time in zip(costs, times, strict=True)
    ]
    return CostReport(np.array(rows), len(rows), ended=True, **options)


def test_groups_are_matched_by_time_instead_of_cost():
    """And what a step costs at most is told still."""
    reports = [timed_report([9, 5, 1], [10, 30, 20]), timed_report([2, 4, 8], [33, 11, 22])]
    plan = plan_round(reports, uneven="fill", seed=0)
    steps = sorted(plan.groups.T.tolist())
    assert steps == [[0, 1], [1, 0], [2, 2]]
    costs = [(9, 5, 1)[first] for first, _ in plan.groups.T.tolist()]
    others = [(2, 4, 8)[second] for _, second in plan.groups.T.tolist()]
    assert plan.totals[:, 3].tolist() == [*map(max, costs, others)]


def test_steps_are_shuffled_by_the_key_alone():
    assert all(sorted(shuffled(9, seed)) == [*range(9)] for seed in range(20))
    assert len({tuple(shuffled(9, seed)) for seed in range(20)}) == 20
    assert shuffled(9, 5).tolist() == shuffled(9, 5).tolist()
    assert shuffled(0, 5).tolist() == []
    lengths = [[[9], [5], [1]], [[8], [6], [2]]]
    plans = [round_of(lengths, seed=seed)[2] for seed in range(20)]
    together = {tuple(sorted(map(tuple, plan.groups.T.tolist()))) for plan in plans}
    assert len(together) == 1  # the same groups share a step
    assert len({str(plan.groups) for plan in plans}) > 1  # at another place


@given(
    st.lists(st.integers(1, 30).map(float), max_size=40),
    st.integers(1, 9),
    st.integers(0, 2**64 - 1),
)
@few
def test_an_optimizer_step_has_a_step_of_each_part_of_the_lengths(lengths, accumulate, seed):
    order = spread_steps(np.array(lengths), accumulate, seed).tolist()
    assert sorted(order) == [*range(len(lengths))]
    assert order == spread_steps(np.array(lengths), accumulate, seed).tolist()
    whole = len(lengths) // accumulate
    optimizer_steps = [
        order[number * accumulate : (number + 1) * accumulate] for number in range(whole)
    ]
    ascending = sorted(lengths[step] for steps in optimizer_steps for step in steps)
    for steps in optimizer_steps:
        for part, length in enumerate(sorted(lengths[step] for step in steps)):
            assert ascending[part * whole] <= length <= ascending[(part + 1) * whole - 1]


def test_steps_of_like_lengths_come_in_any_order():
    lengths = np.arange(40.0)
    orders = {seed: spread_steps(lengths, 4, seed).tolist() for seed in range(20)}
    assert len({*map(tuple, orders.values())}) == 20
    # Neither the longest of an optimizer step nor the longest of all comes at a certain place.
    places = [max(range(4), key=lambda step: order[step]) for order in orders.values()]
    assert {*places} == {0, 1, 2, 3}
    assert len({order.index(39) // 4 for order in orders.values()}) > 5
    assert spread_steps(lengths, 1, 5).tolist() == shuffled(40, 5).tolist()
    assert spread_steps(lengths[:3], 4, 5).tolist() == shuffled(3, 5).tolist()


def test_a_rank_alone_takes_its_groups_as_they_come():
    lengths = [[[3, 4], [9], [5, 5]]]
    for seed, uneven in product(range(3), ("fill", "stop")):
        groups, _, plan, emitted = round_of(lengths, 3, seed=seed, uneven=uneven)
        assert steps_of(plan, emitted) == [[group] for group in groups[0]]
        assert (plan.splits, plan.last) == ([0], True)
        assert plan.totals.tolist() == step_totals([[*map(measure, groups[0])]]).tolist()
    assert not round_of([[[3], [4]]], 1)[2].last


# --- uneven="stop" -------------------------------------------------------------------------------


@given(ranks_of_groups, st.integers(1, 6))
@few
def test_with_stop_all_ranks_end_with_the_first_and_none_fills_or_splits(lengths, most):
    groups, reports, plan, emitted = round_of(lengths, most, uneven="stop")
    ended = [report.groups for report in reports if report.ended]
    assert plan.groups.shape[1] == (min(ended) if ended else most)
    assert plan.last == bool(ended)
    assert plan.splits == [0] * len(lengths)
    assert (plan.groups != FILLER).all()
    for of_rank, row, before in zip(emitted, plan.groups.tolist(), groups, strict=True):
        assert [*map(id, of_rank)] == [*map(id, before)]
        assert sorted(row) == [*range(len(row))]  # its first groups, each once


# --- splits --------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 6))
@few
def test_a_group_is_cut_by_length_into_parts_of_like_numbers_of_samples(lengths, pieces):
    parts = cut_by_length(lengths, pieces)
    assert sorted(row for part in parts for row in part) == [*range(len(lengths))]
    assert len(parts) == min(pieces, len(lengths))
    sizes = [*map(len, parts)]
    assert not sizes or max(sizes) - min(sizes) <= 1
    for part in parts:
        assert part == sorted(part)  # in the order of the group
    for shorter, longer in pairwise(parts):
        assert max(lengths[row] for row in shorter) <= min(lengths[row] for row in longer)


def test_of_samples_as_long_the_first_are_in_the_first_part():
    assert cut_by_length([5, 5, 5, 5, 1], 2) == [[0, 4], [1, 2, 3]]


def test_the_largest_group_of_two_samples_is_split_and_its_longer_half_keeps_its_place():
    groups = [group_of(9, 8), group_of(40), group_of(6, 12, 3), group_of(7, 7)]
    ladder = SplitLadder(groups, measure)
    assert [cost.cost for cost in ladder.costs] == [18, 40, 36, 14]
    off, rest = ladder.split()
    assert (off.cost, rest.cost) == (3, 24)
    assert [[*map(int, group.tokens)] for group in ladder.groups(1)] == [
        [9, 8],
        [40],
        [6, 12],
        [7, 7],
        [3],
    ]
    assert ladder.split()[0].cost == 6  # of [6, 12], which costs more than [9, 8]
    assert ladder.groups(0) == groups


def test_of_equally_dear_groups_the_first_is_split():
    ladder = SplitLadder([group_of(4), group_of(2, 2), group_of(2, 2)], measure)
    ladder.split()
    assert [len(group) for group in ladder.groups(1)] == [1, 1, 2, 1]


@given(groups_of_rank)
@few
def test_a_ladder_ends_when_each_sample_is_a_group(lengths):
    groups = [group_of(*group, number=number) for number, group in enumerate(lengths)]
    ladder, samples = SplitLadder(groups, measure), sum(map(len, lengths))
    splits = 0
    while ladder.split() is not None:
        splits += 1
        assert samples_of(ladder.groups(splits)) == samples_of(groups)
    assert splits == samples - len(groups)
    assert all(len(group) == 1 for group in ladder.groups(splits))


def test_the_group_with_the_longest_time_is_split_first():
    def timed(group):
        """Costs what is padded; takes the longer the more samples there are."""
        cost = len(group) * max(group.lengths)
        return GroupCost(len(group), 0, cost, 0, (0, 0), time=len(group) ** 3)

    groups = [group_of(40, 40), group_of(3, 2, 1), group_of(9)]
    ladder = SplitLadder(groups, timed)
    report = report_of(
        ladder, 5, has_ended=True, may_split=True, remaining=-1, pool=PoolReport(), tasks=TASKS
    )
    assert [len(group) for group in ladder.groups(1)] == [2, 2, 1, 1]
    other = [group_of(5)] * 5
    others = report_of(
        SplitLadder(other, timed),
        5,
        has_ended=True,
        may_split=True,
        remaining=-1,
        pool=PoolReport(),
        tasks=TASKS,
    )
    plan = plan_round([report, others], uneven="fill", seed=3)
    assert plan.splits == [2, 0]
    split = ladder.groups(2)
    for step, (samples, *_, cost, _, _) in zip(
        steps_of(plan, [split, other]), plan.totals.tolist(), strict=True
    ):
        assert samples == sum(map(len, step))
        assert cost == max(timed(group).cost for group in step)


def test_a_group_that_costs_nothing_can_be_split_too():
    ladder = SplitLadder([group_of(1, 2)], lambda group: GroupCost(len(group), 0, 0))
    assert ladder.split() is not None


@pytest.mark.parametrize(
    ("groups", "has_ended", "may_split", "rows"),
    [(2, True, True, 4), (1, True, True, 2), (2, True, False, 2), (2, False, True, 2)],
)
def test_a_rank_tells_of_splits_only_at_the_end_of_its_data_and_where_it_may(
    groups, has_ended, may_split, rows
):
    report = ladder_and_report(
        [group_of(5, 6), group_of(7, 8)][:groups], 4, has_ended=has_ended, may_split=may_split
    )[1]
    assert len(report.table) == rows
    assert (report.groups, report.ended) == (groups, has_ended)


def test_a_report_with_more_splits_than_its_groups_allow_is_an_error():
    row = table_row(GroupCost(1, 1, 5))
    damaged = CostReport(np.array([row, row]), 1, ended=True)
    other = CostReport(np.array([row, row]), 2, ended=True)
    with pytest.raises(ValueError, match="more splits than its groups allow"):
        plan_round([damaged, other], uneven="fill", seed=0)


# --- messages ------------------------------------------------------------------------------------

counts = st.integers(0, 2**40)
costs = st.integers(0, 2**31 - 1)
costs_of_groups = st.builds(
    GroupCost,
    counts,
    counts,
    costs,
    st.integers(0, 2**30 - 1),
    st.tuples(counts, counts),
    st.none() | costs,
)
reports = st.builds(
    lambda costs, splits, **fields: CostReport(
        np.array([table_row(cost) for cost in costs], np.int64).reshape(-1, COLUMNS + 2),
        max(0, len(costs) - splits),
        **fields,
    ),
    st.lists(costs_of_groups, max_size=6),
    st.integers(0, 2),
    ended=st.booleans(),
    has_filler=st.booleans(),
    max_tokens=counts,
    remaining=st.sampled_from([-1, 0, 5, UNKNOWN_REMAINING]),
    pool=st.builds(
        PoolReport,
        st.lists(counts, max_size=7).map(lambda costs: np.array(costs, np.int64)),
        st.tuples(counts, counts),
    ),
)


@given(reports, st.lists(counts, max_size=5))
@few
def test_a_report_comes_back_out_of_the_message_that_begins_with_it(report, padding):
    message = np.concatenate((report.to_message(), np.array(padding, np.int64)))
    again = CostReport.from_message(message, tasks=2)
    assert message.dtype == np.int64
    assert again.table.tolist() == report.table.tolist()
    assert again.pool.offer.tolist() == report.pool.offer.tolist()
    assert again.pool.lengths == report.pool.lengths
    for name in ("groups", "ended", "has_filler", "max_tokens", "remaining"):
        value = getattr(again, name)
        assert value == getattr(report, name) and type(value) is type(getattr(report, name))


@given(groups_of_rank, st.integers(1, 6), st.integers(0, 6))
@few
def test_a_report_fits_its_message_size(lengths, most, offered):
    offered = min(offered, most)
    planner = GroupPlanner(TokenBudget(10), 500)
    planner.add(group_of(*[*range(1, 11)] * 40), 400)
    groups = [group_of(*group) for group in lengths][:most]
    report = ladder_and_report(groups, most, pool=planner.report(offered))[1]
    assert bool(len(report.pool.offer)) == (offered > 0)
    assert len(report.to_message()) <= CostReport.message_size(most, TASKS)


# --- how long rounds are, and what the next is formed under --------------------------------------


@pytest.mark.parametrize(
    ("world_size", "round_size", "accumulate", "steps"),
    [
        (2, 32, 1, [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 22, 27, 32]),
        (64, 20, 1, [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 20, 20, 20]),
        (2, 2, 1, [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]),
        (2, 32, 3, [3, 3, 3, 6, 6, 6, 9, 9, 12, 12, 15, 18, 24, 27, 33]),
        (2, 4, 8, [8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8]),
        (1, 32, 1, [1, 2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]),
        (1, 32, 3, [3, 3, 3, 6, 6, 6, 9, 9, 12, 12, 15, 18, 24, 27, 33]),  # to be mixed
        (1, 2, 1, [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]),
    ],
)
def test_rounds_grow_in_whole_optimizer_steps(world_size, round_size, accumulate, steps):
    options = {"world_size": world_size, "round_size": round_size, "accumulate": accumulate}
    assert [round_steps(number, **options) for number in range(len(steps))] == steps
    assert round_steps(10**6, **options) == steps[-1]


def settings_after(reports, present, steps, planned_steps=0):
    return next_settings(
        reports, present, next_steps=steps, planned_steps=planned_steps, round_size=32
    )


def report(lengths=(0, 0), offer=NO_CAPS, max_tokens=0, remaining=-1):
    table = np.array([table_row(GroupCost(10, 10, 10))] * 4)
    pool = PoolReport(np.array(offer, np.int64), lengths)
    return CostReport(table, 4, ended=False, max_tokens=max_tokens, remaining=remaining, pool=pool)


@pytest.mark.parametrize(
    ("present", "asked", "agreed"),
    [(0, [0, 0], 0), (0, [0, 70], 70), (0, [90, 70], 70), (60, [90, 70], 60), (60, [0, 0], 60)],
)
def test_the_smallest_budget_that_a_rank_asks_for_is_agreed_on_and_stays(present, asked, agreed):
    reports = [report(max_tokens=tokens) for tokens in asked]
    assert settings_after(reports, RoundSettings(max_tokens=present), 8).max_tokens == agreed


def test_an_auto_window_is_chosen_once_in_an_epoch():
    budgets = 2**20
    few, many = report((300, 10 * budgets)), report((100, 10 * budgets))
    chosen = settings_after([few, many], RoundSettings(), 8)
    assert chosen.window == 32 * 20
    assert settings_after([many, many], chosen, 8).window == 32 * 20
    assert settings_after([report(), report()], RoundSettings(), 8).window == 0


def test_each_round_has_one_cap_per_step():
    offers = [report(offer=[100, 90, 60]), report(offer=[100, 80, 50])]
    chosen = settings_after(offers, RoundSettings(), 2)
    assert chosen.caps == (55, 85)
    assert len(settings_after(offers, RoundSettings(), 5).caps) == 5
    assert settings_after([report(), report()], chosen, 2).caps == ()


def test_settings_of_the_next_round_say_whether_it_is_the_last():
    many, few = report(remaining=1000), report(remaining=10)
    assert not settings_after([many, many], RoundSettings(), 8).is_last
    assert settings_after([few, few], RoundSettings(), 8).is_last


def test_the_last_round_shares_out_about_as_much_as_the_epoch_has_had_up_to_full_rounds():
    some = report(remaining=300)  # 30 steps of 10 samples
    planned = {steps: settings_after([some] * 2, RoundSettings(), 8, steps) for steps in (0, 7, 8)}
    assert [round_settings.is_last for round_settings in planned.values()] == [False, False, True]
    assert not settings_after([report(remaining=640)] * 2, RoundSettings(), 8, 10_000).is_last


offering = st.builds(
    report,
    lengths=st.tuples(st.integers(0, 99), st.integers(0, 2**24)),
    offer=st.sampled_from([[], [100, 90, 60], [100, 80, 50], [90, 80, 50]]),
    max_tokens=st.integers(0, 99),
    remaining=st.sampled_from([-1, 0, 5, 99, UNKNOWN_REMAINING]),
)


@given(st.lists(offering, min_size=1, max_size=5), st.integers(1, 8), st.data())
@few
def test_the_next_settings_do_not_depend_on_which_rank_reports_what(reports, steps, data):
    chosen = settings_after(reports, RoundSettings(), steps)
    again = settings_after(data.draw(st.permutations(reports)), RoundSettings(), steps)
    assert chosen == again
    assert all(type(cap) is int for cap in chosen.caps)


def report_with(remaining, groups=4, samples=10):
    table = np.zeros((groups, 5), dtype=np.int64)
    table[:, 0] = samples
    return CostReport(table, groups, ended=not remaining, remaining=remaining)


@pytest.mark.parametrize(
    ("remaining", "begins"),
    [
        ([400, 639], True),  # 10 samples a step: less than 2 rounds of 32 steps on one rank,
        ([640, 640], False),
        ([0, 1_280], True),  # and no more than 4 rounds on any.
        ([0, 1_281], False),
        ([100, UNKNOWN_REMAINING], False),
        ([100, -1], False),  # one cannot give
        ([0, 0], False),  # nothing is remaining
        ([100], False),  # nobody to share with
    ],
)
def test_the_last_round_begins_when_a_rank_has_little_left_and_none_has_much(remaining, begins):
    assert begins_last_round([report_with(samples) for samples in remaining], steps=32) is begins


def test_a_round_without_groups_is_followed_by_no_last_one():
    assert not begins_last_round([report_with(5, groups=0)] * 2, 4)
