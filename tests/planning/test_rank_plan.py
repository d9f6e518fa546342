"""The plan of one rank, driven by hand: facts in, reports between ranks, steps out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_nodes.planning import TokenBudget
from odb_nodes.planning.facts import NO_FACTS, Facts
from odb_nodes.planning.options import JobOptions
from odb_nodes.planning.rank_plan import RankPlan

BUDGET = TokenBudget(100)


def facts_of(tokens, first=0, item=0, **columns):
    """Facts of samples of these lengths, numbered from `first` on."""
    numbers = np.arange(len(tokens))
    zeros = np.zeros_like(numbers)
    defaults = {"patches": zeros, "task": zeros, "flags": zeros}
    return Facts(
        **defaults | columns,
        ordinal=numbers + first,
        tokens=tokens,
        targets=np.maximum(0, np.array(tokens, int) - 1),
        item=numbers + item,
    )


class Feed:
    """Feeds one rank's lengths into a plan, at most `chunk` at a time."""

    def __init__(self, lengths, chunk=1000, item=0, **options):
        self.lengths, self.chunk, self.item = lengths, chunk, item
        job = {name: options.pop(name) for name in JobOptions.__dataclass_fields__ & options.keys()}
        self.plan = RankPlan(
            BUDGET,
            JobOptions(**{"window": 8, "round_size": 4} | job),
            epoch_samples=lambda: len(lengths),
            **options,
        )

    def advance(self):
        plan = self.plan
        while (room := plan.advance()) > 0:
            start, count = plan.pulled, min(room, self.chunk)
            tokens = self.lengths[start : start + count]
            plan.feed(facts_of(tokens, start, self.item + start), len(tokens))
            if len(tokens) < count:
                plan.end()


def steps_of(shards, chunk=1000, **options):
    """The items of each rank's group, step by step; `None` where a rank fills."""
    firsts = np.cumsum([0, *map(len, shards)]).tolist()
    feeds = [
        Feed(shard, chunk, first, rank=rank, world_size=len(shards), **options)
        for rank, (shard, first) in enumerate(zip(shards, firsts, strict=False))
    ]
    plans, steps = [feed.plan for feed in feeds], []
    while not plans[0].is_last:
        for feed in feeds:
            feed.advance()
        if plans[0].settings.is_last:
            share_rest(plans)
        reports = [plan.report() for plan in plans]
        agreements = [plan.agree(reports) for plan in plans]
        for plan, agreement in zip(plans, agreements, strict=True):
            assert str(agreement) == str(agreements[0])
            plan.settle(agreement)
        assert len({len(plan.steps) for plan in plans}) == 1
        while plans[0].steps:
            groups = [plan.steps.popleft() for plan in plans]
            steps.append([None if group is None else group.item.tolist() for group in groups])
    return steps


def share_rest(plans):
    costs = [plan.rest_cost() for plan in plans]
    given_away = [plan.give(costs) for plan in plans]
    received = [plan.receive(costs, given_away) for plan in plans]
    assert sorted(np.concatenate([facts.item for facts in given_away])) == sorted(
        np.concatenate([facts.item for facts in received])
    )
    steps = max([plan.fewest_steps() for plan in plans])
    for plan in plans:
        plan.cut(steps)


shards = st.lists(st.lists(st.integers(1, 110), max_size=60), min_size=1, max_size=4).filter(any)


@settings(max_examples=40)
@given(shards, st.booleans(), st.integers(1, 3), st.integers(0, 3))
def test_every_sample_is_in_one_step_of_one_rank(shards, shares_rest, accumulate, largest):
    options = {"accumulate": accumulate, "dearest_first": largest, "shares_rest": shares_rest}
    steps = steps_of(shards, **options)
    items = [item for step in steps for group in step for item in group or ()]
    assert sorted(items) == [*range(sum(map(len, shards)))]


@settings(max_examples=30)
@given(shards, st.integers(1, 7))
def test_the_steps_do_not_depend_on_how_many_samples_come_at_a_time(shards, chunk):
    assert steps_of(shards, chunk) == steps_of(shards)


@settings(max_examples=30)
@given(shards)
def test_no_group_exceeds_the_budget_unless_a_sample_does(shards):
    lengths = [length for shard in shards for length in shard]
    for step in steps_of(shards):
        for group in step:
            tokens = [lengths[item] for item in group or ()]
            assert len(tokens) <= 1 or max(tokens) * len(tokens) <= BUDGET.tokens


@settings(max_examples=30)
@given(shards)
def test_ranks_stop_with_the_first_that_ends(shards):
    steps = steps_of(shards, uneven="stop")
    items = [item for step in steps for group in step for item in group or ()]
    assert len(items) == len({*items})
    if not all(shards):
        assert steps == []
    assert all(group is not None for step in steps for group in step)


def test_a_rank_without_samples_fills_the_steps_of_the_others():
    steps = steps_of([[50] * 8, []], shares_rest=False)
    assert [step[1] for step in steps] == [None] * len(steps)
    assert sorted(item for step in steps for item in step[0]) == [*range(8)]


def test_ranks_share_out_what_they_have_left():
    steps = steps_of([[50] * 40, [50] * 24])  # two samples fill a group
    assert all(group for step in steps for group in step)
    assert len(steps) == (40 + 24) // 2 // 2


def test_a_plan_tells_how_many_samples_it_waits_for():
    plan = RankPlan(BUDGET, JobOptions(window=8))
    assert plan.advance() == 8
    plan.feed(facts_of([10] * 5), 6)  # one of them is left out
    assert (plan.pulled, plan.advance()) == (6, 2)
    plan.end()
    assert plan.advance() == 0


def test_a_report_has_the_sums_of_each_group():
    plan = RankPlan(BUDGET, JobOptions(window=4), tasks=2)
    assert plan.advance() == 4
    plan.feed(facts_of([10, 10, 10, 10], task=[0, 1, 1, 1], flags=[1, 0, 4, 0]), 4)
    plan.end()
    assert plan.advance() == 0
    assert plan.report().table[0].tolist() == [4, 36, 40, 0, 5, 9, 27]


def test_a_cost_of_a_group_is_an_integer_of_at_least_0():
    plan = RankPlan(BUDGET, JobOptions(window=4), cost=lambda group: -len(group))
    plan.advance()
    plan.feed(facts_of([10, 10]), 2)
    plan.end()
    plan.advance()
    with pytest.raises(ValueError, match=r"`cost_fn` .* -2"):
        plan.report()


def test_facts_are_taken_joined_and_numbered():
    facts = facts_of([5, 6, 7], first=3, item=20)
    assert facts.take([2, 0]).lengths == [7, 5] and len(facts.take([])) == 0
    assert facts.take(slice(1, 3)).item.tolist() == [21, 22]
    assert facts.without([1]).ordinal.tolist() == [3, 5]
    assert facts.numbered_from(9).ordinal.tolist() == [9, 10, 11]
    assert facts.ordinal.tolist() == [3, 4, 5]
    assert Facts.joined([facts, NO_FACTS, facts.take([0])]).lengths == [5, 6, 7, 5]
    assert len(Facts.joined([])) == 0
