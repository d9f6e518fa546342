"""The plan of one rank, driven by hand: facts in, reports between ranks, steps out."""

import json
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pools import facts_of

from odb_nodes.core.planning import GroupCost, TokenBudget, round_steps
from odb_nodes.core.planning.budget import Limits
from odb_nodes.core.planning.caps import joined_costs
from odb_nodes.core.planning.facts import Facts
from odb_nodes.core.planning.group_planner import GroupPlanner, RoundSettings, UserGroups
from odb_nodes.core.planning.options import JobOptions
from odb_nodes.core.planning.rank_plan import LastRound, RankPlan, SettledRound
from odb_nodes.core.planning.rounds import UNKNOWN_REMAINING

few = settings(max_examples=max(20, settings.default.max_examples // 5))
fewer = settings(max_examples=max(10, settings.default.max_examples // 5))

BUDGET = TokenBudget(100)
OF_JOB = JobOptions.__dataclass_fields__
OF_PLANNER = ("window", "window_start", "largest_first", "diversity")
SHARD = 10_000  # the samples of rank r are numbered from r * SHARD on, over all ranks


def measure(group):
    targets = int(group.targets.sum())
    return GroupCost(len(group), targets, BUDGET.cost(group.lengths), 1, (targets, 0))


class Rank:
    """One rank: its samples, its planner, and its plan."""

    def __init__(self, rank, world_size, lengths, *, chunk=None, knows_length=True, **options):
        job = {name: options.pop(name) for name in OF_JOB & options.keys()}
        job = {"window": 8, "round_size": 6} | job
        self.chunk, self.length = chunk, len(lengths)
        self.items = np.arange(len(lengths)) + SHARD * rank
        sharers = world_size if options.get("shares_rest", True) else 1
        self.samples = facts_of(lengths, task=np.arange(len(lengths)) % 4, sharers=sharers)
        place = {"rank": rank, "world_size": world_size, "tasks": 2}

        def make():
            of_planner = {name: value for name, value in job.items() if name in OF_PLANNER}
            epoch_samples = (lambda: self.length) if knows_length else lambda: None
            planner = self.planner_of(epoch_samples=epoch_samples, **of_planner)
            return RankPlan(planner, JobOptions(**job), measure, **place, **options)

        self.make, self.plan = make, make()

    def planner_of(self, **options):
        return GroupPlanner(BUDGET, **options)

    @property
    def planner(self):
        return self.plan.planner

    def feed(self, between=lambda rank: None):
        """Form the groups that are due, from at most `chunk` samples at a time."""
        while (room := self.plan.lacks()) > 0:
            self.pull(room)
            between(self)

    def pull(self, room):
        start, count = self.planner.pool.pulled, min(room, self.chunk or room)
        if start + count > self.length:
            self.planner.end()
        rows = np.arange(start, min(start + count, self.length))
        # Every ninth sample is skipped by processing.
        self.planner.add(self.facts(rows[rows % 9 != 8]), len(rows))

    def facts(self, ordinals):
        return self.samples.take(np.array(ordinals, np.int64))

    def items_of(self, groups):
        return [item for group in groups for item in self.items[group.ordinal].tolist()]

    def take_over(self, facts, items):
        """Number samples that other ranks have given."""
        first = len(self.items)
        self.items = np.concatenate((self.items, np.array(items, np.int64)))
        received = facts_of(facts.tokens, first, task=facts.task)
        self.samples = Facts.joined([self.samples, received])
        return received

    def state(self):
        """What a state holds of the plan, as plain data: samples are their ordinals."""
        plan, settled = self.plan, self.plan.settled
        groups = [*settled.remaining, *plan.formed]
        state = {
            "plan": {"round": plan.round, "step": plan.step, "is_last": plan.is_last},
            "settings": plan.settings.to_state(),
            "totals": settled.totals.tolist(),
            "emitted": settled.emitted,
            "groups": [None if group is None else group.ordinal.tolist() for group in groups],
            "planner": self.planner_state(),
        }
        return json.loads(json.dumps(state))

    def planner_state(self):
        planner = self.planner
        return {
            "waiting": planner.pool.ordinals().tolist(),
            "pulled": planner.pool.pulled,
            "ended": planner.ended,
            "limits": planner.limits,
            "window": planner.window_state(),
            "caps": planner.pool.caps.tolist(),
            "largest_groups": planner.largest_groups,
        }

    def restore_planner(self, *, waiting, limits, caps, **state):
        limits, caps = Limits(*limits), np.array(caps, np.int64)
        self.planner.restore(self.facts(waiting), limits=limits, caps=caps, **state)

    def restart(self):
        """Go on with another plan, from the state of this one."""
        state = self.state()
        self.plan = self.make()
        self.restore_planner(**state["planner"])
        groups = [None if group is None else self.facts(group) for group in state["groups"]]
        emitted, totals = state["emitted"], np.array(state["totals"], np.int64).reshape(-1, 6)
        to_come = len(totals) - emitted
        self.plan.restore(
            **state["plan"],
            settings=RoundSettings(*state["settings"]),
            settled=SettledRound(totals, [None] * emitted + groups[:to_come], emitted),
            formed=groups[to_come:],
        )


class GivenRank(Rank):
    """A rank whose groups are formed by a node of the user."""

    def __init__(self, rank, world_size, groups, **options):
        super().__init__(
            rank, world_size, [length for group in groups for length in group], **options
        )
        self.given, stop = [], 0
        for group in groups:
            self.given.append(self.samples.take([*range(stop, stop := stop + len(group))]))
        self.to_come = [*self.given]

    def planner_of(self, **_):
        return UserGroups()

    def pull(self, room):
        assert room == 1
        self.planner.give(self.to_come.pop(0)) if self.to_come else self.planner.end()

    def planner_state(self):
        return {"ended": self.planner.ended}

    def restore_planner(self, ended):
        if ended:
            self.planner.end()


class Ranks:
    """All ranks of a job, in step."""

    def __init__(self, shards, kind=Rank, **options):
        self.ranks = [
            kind(rank, len(shards), shard, **options) for rank, shard in enumerate(shards)
        ]
        self.plans = [rank.plan for rank in self.ranks]
        self.dropped = [[] for _ in shards]
        self.rounds = []  # what was told, and what was agreed on, as plain data
        self.ahead = []  # of each step: its round, and the groups that are formed of the next one

    def steps(self, before=lambda ranks: None, between=lambda rank: None):
        """Yield the samples of each rank's group, step by step; `None` for a rank that fills."""
        while True:
            before(self)
            for rank in self.ranks:
                rank.feed(between)
            self.plans = [rank.plan for rank in self.ranks]
            if self.plans[0].is_between_rounds:
                self.settle()
            assert len({(plan.is_at_end, plan.round, plan.step) for plan in self.plans}) == 1
            if self.plans[0].is_at_end:
                return
            plan = self.plans[0]
            place = plan.round, len(plan.settled), plan.settled.emitted, plan.settings.is_last
            self.ahead.append((*place, [len(plan.formed) for plan in self.plans]))
            groups = [plan.next_step() for plan in self.plans]
            yield [
                None if group is None else rank.items_of([group])
                for rank, group in zip(self.ranks, groups, strict=True)
            ]

    def settle(self):
        rests = [None] * len(self.ranks)
        if self.plans[0].settings.is_last:
            rests = [plan.last_round() for plan in self.plans]
            share(self.ranks, rests)
        reports = [plan.report(rest) for plan, rest in zip(self.plans, rests, strict=True)]
        agreements = [plan.agree(reports) for plan in self.plans]
        described_agreements = [described(agreement) for agreement in agreements]
        assert all(agreed == described_agreements[0] for agreed in described_agreements)
        self.rounds.append(
            (described_agreements[0], [report.to_message().tolist() for report in reports])
        )
        for number, rank in enumerate(self.ranks):
            self.dropped[number] += rank.items_of(rank.plan.settle(agreements[number]))


def described(agreement):
    plan, settings = agreement
    return plan.totals.tolist(), plan.groups.tolist(), plan.splits, plan.last, settings


def share(ranks, rests):
    """Share out what ranks have left, and cut it."""
    moves = rests[0].moves([rest.message() for rest in rests])
    assert all(rest.moves([other.message() for other in rests]) == moves for rest in rests)
    places_of = [rest.give(moves) for rest in rests]
    given_away = [rest.given_away for rest in rests]
    items = [rank.items[facts.ordinal] for rank, facts in zip(ranks, given_away, strict=True)]
    for rank, rest, places in zip(ranks, rests, places_of, strict=True):
        facts = [given_away[giver].take([row]) for giver, row in places]
        rest.add(rank.take_over(Facts.joined(facts), [items[giver][row] for giver, row in places]))
    assert sorted(chain(*places_of)) == [
        (giver, row) for giver, facts in enumerate(given_away) for row in range(len(facts))
    ]
    steps = max([rest.fewest_steps() for rest in rests])
    for rest in rests:
        rest.cut(steps)
        assert len(rest.groups) <= steps == rest.steps


def steps_of(shards, **options):
    return [*Ranks(shards, **options).steps()]


def items_of(steps):
    return sorted(item for step in steps for group in step for item in group or ())


def samples_of(shards):
    """The samples that an epoch has: all that processing does not skip."""
    return [
        rank * SHARD + number
        for rank, shard in enumerate(shards)
        for number in range(len(shard))
        if number % 9 != 8
    ]


def check_budget(shards, steps, budget):
    """A group is within the budget, unless it is a sample that is not."""
    lengths = {
        rank * SHARD + index: n for rank, of in enumerate(shards) for index, n in enumerate(of)
    }
    for group in (group for step in steps for group in step if group):
        assert len(group) == 1 or max(lengths[item] for item in group) * len(group) <= budget


def random_shards(sizes, seed):
    """Lengths of the samples of each rank. Some exceed the budget."""
    draws = np.random.default_rng(seed)
    return [draws.integers(1, draws.choice([30, 110]), size).tolist() for size in sizes]


sizes = st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(any)
shards = st.builds(random_shards, sizes, st.integers(0, 2**16))
jobs = st.fixed_dictionaries(
    {
        "accumulate": st.sampled_from([1, 1, 3]),
        "round_size": st.integers(1, 9),
        "largest_first": st.sampled_from([0, 0, 3]),
        "window": st.sampled_from([1, 8, 30, "auto"]),
        "window_start": st.sampled_from(["full", "early"]),
        "uneven": st.sampled_from(["fill", "fill", "stop"]),
        "shares_rest": st.booleans(),
        "knows_length": st.booleans(),
    }
)
LEVELLED = [[1 + index * 7919 % 60 for index in range(size)] for size in (120, 150)]
LEVEL_JOB = {"window": 40, "round_size": 8}
"""Of which ranks agree on caps, and share out the rest."""


# --- every sample is in one step of one rank -----------------------------------------------------


@given(shards, jobs, st.integers(1, 5))
@example(LEVELLED, LEVEL_JOB, 3)
@fewer
def test_every_sample_is_in_one_step_of_one_rank_however_many_come_at_a_time(shards, job, chunk):
    ranks = Ranks(shards, chunk=chunk, **job)
    steps = [*ranks.steps()]
    assert steps == steps_of(shards, **job)
    check_budget(shards, steps, 100)
    if job.get("uneven") != "stop":
        assert items_of(steps) == samples_of(shards)
        assert not any(ranks.dropped)


@given(shards, jobs)
@few
def test_ranks_stop_with_the_first_that_ends_and_say_what_no_step_has(shards, job):
    ranks = Ranks(shards, **job | {"uneven": "stop"})
    steps = [*ranks.steps()]
    assert all(group is not None for step in steps for group in step)
    items = items_of(steps)
    for rank, dropped in zip(ranks.ranks, ranks.dropped, strict=True):
        unread = {*rank.items[rank.planner.pool.pulled :].tolist()} & {*samples_of(shards)}
        items += [*dropped, *unread, *rank.items[rank.planner.pool.ordinals()].tolist()]
        assert not rank.plan.formed
    assert sorted(items) == samples_of(shards)
    first_to_end = [
        rank.planner.is_done and not dropped
        for rank, dropped in zip(ranks.ranks, ranks.dropped, strict=True)
    ]
    assert any(first_to_end)


def test_the_example_has_caps_and_a_last_round_that_is_shared_out():
    ranks = Ranks(LEVELLED, **LEVEL_JOB)
    steps = [*ranks.steps()]
    settings_ = [agreed[-1] for agreed, _ in ranks.rounds]
    assert any(round_settings.caps for round_settings in settings_[:-1]) and settings_[-2].is_last
    assert any(item >= SHARD for step in steps for item in step[0])  # of the other rank


# --- a plan that is saved ------------------------------------------------------------------------


@given(shards, jobs)
@example(LEVELLED, LEVEL_JOB)
@fewer
def test_ranks_that_restart_at_every_step_take_the_same_steps(shards, job):
    def restart_all(ranks):
        for rank in ranks.ranks:
            rank.restart()

    restarted, whole = Ranks(shards, **job), Ranks(shards, **job)
    assert [*restarted.steps(restart_all, Rank.restart)] == [*whole.steps()]
    assert restarted.rounds == whole.rounds
    assert restarted.dropped == whole.dropped


def test_a_plan_holds_no_group_whose_step_is_out_and_no_round_between_two():
    ranks = Ranks([[10] * 80, [10] * 60])
    for _ in ranks.steps():
        for rank in ranks.ranks:
            plan, to_come = rank.plan, [*filter(None, rank.state()["groups"])]
            held = [*filter(None, plan.settled.groups), *plan.formed]
            assert len(held) == len(to_come)
            assert plan.is_between_rounds == (len(plan.settled) == 0)
            # The last round stays, for what is told of its last step.
            assert plan.is_at_end == (plan.settled.emitted == len(plan.settled) > 0)


# --- a plan that is changed ----------------------------------------------------------------------


class Change:
    """Has all ranks plan anew once, from the end of the optimizer step of step `at` on."""

    def __init__(self, step, accumulate, limit=None, removes=False):
        self.at, self.accumulate, self.limit, self.removes = step, accumulate, limit, removes
        self.planned = None  # steps that stay as they were planned
        self.gone = []

    def __call__(self, ranks):
        plan = ranks.plans[0]
        if self.planned is not None or plan.step < self.at or plan.is_at_end:
            return
        keep = plan.settled.emitted + -plan.settled.emitted % self.accumulate
        for rank in ranks.ranks:
            self.replan(rank, keep)
        settled = ranks.plans[0].settled
        self.planned = plan.step + len(settled) - settled.emitted

    def replan(self, rank, keep):
        plan, planner = rank.plan, rank.planner
        further = [*plan.settled.groups[keep:], *plan.formed]
        waiting = planner.pool.ordinals().tolist()
        if self.limit:
            planner.lower_limits(planner.limits._replace(tokens=self.limit))
        again = plan.replan(keep).ordinal.tolist()
        assert sorted(again) == sorted(
            ordinal for group in further if group for ordinal in group.ordinal.tolist()
        )
        assert len(plan.settled) <= keep and not plan.formed and not plan.is_last
        held = {*again, *waiting}
        out = {ordinal for ordinal in held if self.removes and ordinal % 5 == 2}
        planner.remove(np.array([*out], np.int64))
        planner.put_back(rank.facts([ordinal for ordinal in again if ordinal not in out]))
        assert planner.pool.ordinals().tolist() == sorted(held - out)
        self.gone += rank.items[[*out]].tolist() if out else []


@given(shards, jobs, st.integers(0, 30), st.none() | st.just(40), st.booleans())
@example(LEVELLED, LEVEL_JOB, 12, 40, True)
@example(LEVELLED, LEVEL_JOB, 28, None, True)
@fewer
def test_steps_that_are_planned_anew_lose_and_repeat_nothing(shards, job, step, limit, removes):
    """Under a lower budget, or without some samples; the optimizer step is finished before."""
    job = job | {"uneven": "fill"}
    ranks, change = Ranks(shards, **job), Change(step, job.get("accumulate", 1), limit, removes)
    steps = [*ranks.steps(change)]
    assert sorted([*items_of(steps), *change.gone]) == samples_of(shards)
    if change.planned is not None:
        assert steps[: change.planned] == steps_of(shards, **job)[: change.planned]
        check_budget(shards, steps[change.planned :], limit or 100)


def test_a_round_ends_where_it_is_planned_anew_or_with_its_last_step():
    for keep, steps in [(3, 3), (9, 4)]:
        ranks = Ranks([[50] * 60], round_size=4)
        all_steps = ranks.steps()
        for _ in range(1 + 2 + 2):  # two steps of the round of 4
            next(all_steps)
        plan = ranks.plans[0]
        plan.replan(keep)
        assert (len(plan.settled), plan.settled.emitted) == (steps, 2)
        assert not plan.is_between_rounds
        plan.replan(2)
        assert plan.is_between_rounds and len(plan.settled) == 0


def test_steps_to_come_of_the_last_round_may_be_planned_anew_too():
    ranks = Ranks([[50] * 6], round_size=8)
    all_steps = ranks.steps()
    while not ranks.plans[0].is_last:
        next(all_steps)
    ranks.ranks[0].planner.put_back(ranks.plans[0].replan(ranks.plans[0].settled.emitted))
    assert not ranks.plans[0].is_at_end
    assert len([*all_steps]) > 0


# --- groups that are formed ahead ----------------------------------------------------------------


def formed_ahead(seed):
    """What long epochs of ranks have formed ahead, until the data of a rank ends."""
    ranks = Ranks(random_shards([400, 500], seed), round_size=10, knows_length=False)
    for _ in ranks.steps():
        if any(plan.planner.ended for plan in ranks.plans):
            return ranks.ahead[:-1]
    raise AssertionError("the epoch is too short")


def test_how_many_groups_are_formed_ahead_follows_from_the_step_alone():
    """A group more than the next round has, evenly; the first of them came with the round."""
    first, second = formed_ahead(1), formed_ahead(2)
    common = min(len(first), len(second))
    assert common > 60 and first[:common] == second[:common]
    for number, steps, emitted, _, formed in first:
        following = round_steps(number, 2, 10, 1)
        # Those of the first step of a round are formed after it, with those of the second.
        expected = max(1, (emitted + 1) * (following + 1) // steps) if emitted else 1
        assert formed == [expected] * 2
        assert expected + steps - emitted <= max(steps, following) + 2


def test_groups_of_the_last_round_are_formed_two_with_each_step_and_the_others_at_its_end():
    ranks = Ranks([[50] * 100] * 2, round_size=4)
    assert len([*ranks.steps()]) == 45
    assert [formed for *_, is_last, formed in ranks.ahead if is_last][:4] == [
        [1, 1],
        [4, 4],
        [6, 6],
        [7, 7],
    ]
    assert ranks.ahead[-1][-1] == [0, 0]


class Notes(UserGroups):
    """Notes what it is told to use, and after how many groups."""

    def __init__(self):
        super().__init__()
        self.formed, self.used = 0, []

    def next_group(self):
        self.formed += 1
        return super().next_group()

    def use(self, settings, caps=()):
        self.used.append((self.formed, settings.max_tokens, tuple(caps)))


class NotingRank(GivenRank):
    def planner_of(self, **_):
        return Notes()


def settings_used(settings_):
    """What the planner of a rank is told, after how many groups, in the round of the settings."""
    ranks = Ranks([[[5, 6]] * 11] * 2, NotingRank)
    for rank in ranks.ranks:
        rank.plan.settings, rank.plan.round = settings_, 3  # of 4 steps
        rank.feed()
    return ranks.plans[0].planner


def test_caps_are_for_the_groups_after_the_first_and_the_largest_for_the_one_after_them():
    """The first was formed with the round before, under the largest cap of that."""
    planner = settings_used(RoundSettings(caps=(10, 20, 30, 40), max_tokens=50))
    assert planner.used == [(1, 50, (10, 20, 30)), (4, 50, (40,))]
    assert planner.formed == 5


def test_the_last_round_is_of_all_groups_and_has_no_caps():
    planner = settings_used(RoundSettings(caps=(10, 20, 30, 40), is_last=True))
    assert planner.used == [(1, 0, ())]
    assert planner.formed == 11


# --- what is told, and what is agreed on ---------------------------------------------------------


def plan_of(lengths=(), *, options=None, planner=None, ended=True, **columns):
    """A plan that has all samples, and its groups."""
    planner = planner or GroupPlanner(BUDGET, 8, epoch_samples=lambda: 100)
    plan = RankPlan(planner, JobOptions(**options or {}), measure, tasks=2, world_size=2)
    plan.round = 3  # of 4 steps
    planner.add(facts_of(lengths, **columns), len(lengths))
    if ended:
        planner.end()
    assert plan.lacks() == 0 or not ended
    return plan


def test_a_plan_tells_how_many_samples_it_waits_for():
    plan = plan_of(ended=False)
    assert plan.lacks() == 8
    plan.planner.add(facts_of([10] * 5), 6)  # one of them is left out
    assert plan.lacks() == 2
    plan.planner.end()
    assert plan.lacks() == 0
    assert [len(group) for group in plan.formed] == [5]


def test_a_report_has_what_is_measured_of_each_group_and_whether_the_data_has_ended():
    plan = plan_of([10, 30])
    report = plan.report()
    # Of the shorter one; the other one costs 30.
    split = [1, 5, joined_costs(10, 10), joined_costs(30, 30), 1 << 30 | 1, 5, 0]
    assert report.table.tolist() == [[2, 20, joined_costs(60, 60), 0, 1, 20, 0], split]
    assert (report.groups, report.ended, report.max_tokens) == (1, True, 0)
    assert plan.report(max_tokens=70).max_tokens == 70
    assert not plan_of([10] * 90, ended=False).report().ended


@pytest.mark.parametrize(
    ("lengths", "before", "expected"), [([10], False, True), ([], True, True), ([], False, False)]
)
def test_a_rank_can_fill_if_it_has_a_group_or_has_had_one(lengths, before, expected):
    assert plan_of(lengths).report(has_filler=before).has_filler is expected


@pytest.mark.parametrize(
    ("lengths", "columns", "options", "left"),
    [
        ([50] * 10, {}, {}, 100 - 2 * 4),
        ([50] * 10, {}, {"epoch_samples": None}, UNKNOWN_REMAINING),
        ([50] * 10, {"sharers": 1}, {}, -1),  # other ranks cannot make them
        ([50] * 10, {"sharers": [2] * 9 + [1]}, {}, -1),
        ([50] * 10, {"sharers": [1] * 8 + [2] * 2}, {}, 100 - 2 * 4),
        ([50] * 10, {}, {"uneven": "stop"}, -1),
        ([50] * 10, {"sharers": 1}, {"world_size": 1}, -1),
        ([50] * 10, {}, {"shares_rest": False}, -1),
        ([50] * 8, {"sharers": 1}, {}, 0),  # nothing is left, so there is nothing to share
    ],
)
def test_a_rank_reports_its_remaining_samples_if_they_can_move(lengths, columns, options, left):
    length = options.pop("epoch_samples", 100)
    job = {"uneven": options.pop("uneven", "fill")}
    planner = GroupPlanner(BUDGET, 1, epoch_samples=lambda: length)
    options = {"world_size": 2, "tasks": 2} | options
    plan = RankPlan(planner, JobOptions(**job), measure, **options)
    plan.round = 3  # of 4 steps
    planner.add(facts_of(lengths, **{"sharers": 2} | columns), len(lengths))
    if len(lengths) < 10:
        planner.end()
    assert plan.lacks() == 0
    assert plan.report().remaining == left


# --- the last round, shared out ------------------------------------------------------------------


def shared_out(ranks, budget):
    """The groups of each rank's last round, of samples that have these lengths."""
    made = [Rank(rank, len(ranks), lengths) for rank, lengths in enumerate(ranks)]
    rests = [
        LastRound(of_rank.samples, budget, rank, len(ranks)) for rank, of_rank in enumerate(made)
    ]
    share(made, rests)
    return made, [rest.groups for rest in rests]


remainders = st.lists(st.lists(st.integers(1, 40), max_size=30), min_size=2, max_size=5)


@given(
    remainders,
    st.sampled_from(
        [BUDGET, TokenBudget(100, layout="packed"), TokenBudget(120, attention_tokens=50)]
    ),
)
@few
def test_the_last_round_shares_out_all_samples_within_the_budget(lengths, budget):
    ranks, groups_of_ranks = shared_out(lengths, budget)
    items = [rank.items_of(groups) for rank, groups in zip(ranks, groups_of_ranks, strict=True)]
    assert sorted(sum(items, [])) == [
        SHARD * rank + index
        for rank, of_rank in enumerate(lengths)
        for index in range(len(of_rank))
    ]
    work = [budget.row_cost(np.array(of_rank, np.int64)).sum() for of_rank in lengths]
    after = [0] * len(ranks)
    for rank, groups in enumerate(groups_of_ranks):
        for group in groups:
            assert len(group) == 1 or budget.cost(group.lengths) <= budget.tokens
            after[rank] += budget.row_cost(group.tokens).sum()
    assert min(work) <= min(after) and max(after) <= max(work)
    assert max(after) - sum(after) / len(after) <= budget.row_cost(40)  # the longest sample


def test_a_rank_without_samples_gets_some_and_steps_are_as_few_as_the_budget_allows():
    _, (first, second) = shared_out([[10] * 20, []], TokenBudget(50))
    assert [sum(map(len, groups)) for groups in (first, second)] == [10, 10]
    assert len(first) == len(second) == 2


def test_a_rank_gives_only_what_all_others_can_make():
    samples = facts_of([10] * 20, sharers=[2, 1] * 10)
    rests = [
        LastRound(facts, BUDGET, rank, 2) for rank, facts in enumerate((samples, facts_of([20])))
    ]
    # What cannot move counts, too.
    assert rests[0].message().tolist() == [100, 0, *[10] * 10, *[0] * 10]
    moves = rests[0].moves([rest.message() for rest in rests])
    assert rests[0].give(moves) == []
    assert rests[1].give(moves) == [(0, row) for row in range(9)]
    given_away = rests[0].given_away.ordinal
    assert len(given_away) == 9 and not (given_away % 2).any()
    assert not len(rests[1].given_away)


# --- groups of a node of the user ----------------------------------------------------------------

user_groups = st.lists(
    st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=4), max_size=25),
    min_size=1,
    max_size=3,
).filter(any)


@given(user_groups, jobs)
@few
def test_groups_of_a_users_node_are_taken_as_they_are(groups, job):
    """Split, at most, in the last round, where a rank has fewer than the others."""

    def restart_all(ranks):
        for rank in ranks.ranks:
            rank.restart()

    job = {name: job[name] for name in ("accumulate", "round_size", "uneven")}
    ranks = Ranks(groups, GivenRank, **job)
    steps = [*ranks.steps(restart_all)]
    agreed = [agreed for agreed, _ in ranks.rounds]
    assert not any(settings.is_last or settings.caps for *_, settings in agreed)
    for number, rank in enumerate(ranks.ranks):
        whole = [rank.items_of([group]) for group in rank.given]
        taken = [step[number] for step in steps if step[number] is not None]
        if len(groups) == 1:
            assert taken == whole
        if job["uneven"] == "stop":
            assert all(group in whole for group in taken)
            unread = [item for group in rank.to_come for item in rank.items_of([group])]
            assert sorted([*sum(taken, []), *ranks.dropped[number], *unread]) == sum(whole, [])
        else:
            assert sorted(sum(taken, [])) == sum(whole, [])
            splits = sum(splits[number] for *_, splits, _, _ in agreed)
            assert len(taken) == len(whole) + splits


def test_a_rank_whose_data_has_ended_uses_the_settings_of_a_round_that_it_has_no_group_for():
    """Samples that return to the pool later are grouped under them."""
    planner = GroupPlanner(BUDGET, 8)
    plan = RankPlan(planner, JobOptions(round_size=4), measure, tasks=2)
    assert plan.lacks() == 8
    planner.add(facts_of([10, 10]), 2)
    planner.end()
    assert plan.lacks() == 0
    agreement = plan.agree([plan.report()])
    plan.settle(agreement._replace(settings=RoundSettings(max_tokens=20)))
    assert (plan.formed, planner.limits.tokens) == ([], 20)
