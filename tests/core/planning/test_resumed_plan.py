"""The plan of an epoch as a rank follows it, in integers."""

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes import TokenBudget
from odb_nodes.core.planning import resumed_plan
from odb_nodes.core.planning.budget import Limits
from odb_nodes.core.planning.known_epochs import KnownJob
from odb_nodes.core.planning.resumed_plan import EarlierRanks, KnownEpoch, RankProgress, ResumedPlan

SIZE = 60
TOKENS = np.random.default_rng(2).integers(1, 40, SIZE)
BUDGET = TokenBudget(100)
LIMITS = Limits.of(BUDGET)


def epoch_of(world_size, largest_first=0):
    job = KnownJob(
        budget=BUDGET, world_size=world_size, window=None, largest_first=largest_first, seed=0
    )
    return KnownEpoch(job, 0, TOKENS)


def plans_of(world_size, rows=None, **options):
    """Those of all ranks."""
    rows = np.arange(SIZE) if rows is None else rows
    epoch = epoch_of(world_size)
    return [ResumedPlan(epoch, rank, LIMITS, rows, **options) for rank in range(world_size)]


def remaining(plans):
    return sorted(row for plan in plans for row in plan.remaining().tolist())


def progress_of(plan):
    state = plan.to_state()
    return RankProgress(state["is_alone"], state["rows"], state["taken"])


def waiting_of(rows, tokens):
    return np.array([rows, tokens], "<i8").tobytes() or None


ranks = st.lists(st.integers(1, 4), min_size=2, max_size=4)


@given(ranks=ranks, taken=st.integers(0, 6), lowers=st.sets(st.integers(0, 3)), data=st.data())
def test_each_sample_comes_once_over_any_numbers_of_ranks(ranks, taken, lowers, data):
    done, waiting, earlier = set(), [], []
    for number, world_size in enumerate(ranks):
        plans = plans_of(world_size, earlier=earlier)
        assert remaining(plans) == sorted({*range(SIZE)} - done)
        if number in lowers:
            plans = [plan.lowered(50) for plan in plans]
            assert remaining(plans) == sorted({*range(SIZE)} - done)
        for plan in plans:
            out = min(taken, len(plan))
            done |= {row for step in range(out) for row in plan.group(step).tolist()}
            plan.go_to(out, is_at_end=False)
        waiting = data.draw(st.sets(st.sampled_from(sorted(done)), max_size=3)) if done else set()
        done -= waiting
        state = EarlierRanks(
            [*map(progress_of, plans)], plans[0].limits, waiting_of([*waiting], [9] * len(waiting))
        ).to_state()
        earlier = [*earlier, EarlierRanks.from_state(state)]
    assert remaining(plans_of(2, earlier=earlier)) == sorted({*range(SIZE)} - done)


def test_waiting_samples_are_planned_by_their_observed_lengths():
    (before,) = plans_of(1)
    before.go_to_end()
    waiting = waiting_of([3, 4], [100, 90])
    earlier = [EarlierRanks([progress_of(before)], LIMITS, waiting)]
    (plan,) = plans_of(1, earlier=earlier)
    for lower in plan, plan.lowered(99):
        assert [lower.group(step).tolist() for step in range(len(lower))] in (
            [[3], [4]],
            [[4], [3]],
        )
        assert lower.were_in_group(np.arange(6)).tolist() == [False] * 3 + [True] * 2 + [False]
    again = ResumedPlan(
        epoch_of(1),
        0,
        plan.lowered(99).limits,
        np.array([3, 4]),
        is_alone=True,
        earlier=[*map(EarlierRanks.from_state, plan.lowered(99).to_state()["earlier"])],
    )
    assert len(again) == 2 and again.group_budget.tokens == 99


def test_ranks_of_a_process_share_a_plan_as_long_as_one_has_it():
    plans = plans_of(3)
    assert len({id(plan._plan) for plan in plans}) == 1
    kept = len(resumed_plan._plans)
    del plans
    gc.collect()
    assert len(resumed_plan._plans) < kept


def test_only_an_epoch_that_begins_has_the_longest_first():
    plan = ResumedPlan(epoch_of(1, largest_first=1), 0, LIMITS, np.arange(SIZE))
    assert TOKENS[plan.group(0)].max() == TOKENS.max()
    plan.taken = 1
    left = plan.alone(plan.remaining(), LIMITS)
    assert TOKENS[left.group(0)].max() < TOKENS[left.remaining()].max()


def test_positions_beyond_the_epoch_are_refused():
    (plan,) = plans_of(1)
    for taken in (-1, len(plan) + 1):
        with pytest.raises(ValueError, match=f"{taken} groups of {len(plan)}"):
            plan.go_to(taken, is_at_end=False)
    for waiting in (waiting_of([SIZE], [3]), waiting_of([-1], [3]), b"\1"):
        with pytest.raises(ValueError):
            plans_of(1, earlier=[EarlierRanks([progress_of(plan)], LIMITS, waiting)])
    with pytest.raises(ValueError, match="a sample that does not exist"):
        plans_of(1, np.array([SIZE]), is_alone=True)


def emitted(plan, moved):
    """Rows of all groups, emitted one at a time; those in `moved` come later."""
    rows = []
    while (following := plan.next_group(None)) is not None:
        step, group = following
        late = group[np.isin(group, moved)] if step < len(plan) else group[:0]
        plan.emit(step, group)
        plan.later.add(late, TOKENS[late], np.zeros_like(late))
        rows += group[~np.isin(group, late)].tolist()
    return rows


@given(moved=st.sets(st.integers(0, SIZE - 1)), world_size=st.integers(1, 3))
def test_groups_come_in_order_and_later_samples_last(moved, world_size):
    for plan in plans_of(world_size):
        planned = plan.remaining().tolist()
        rows = emitted(plan, [*moved])
        late = [row for row in planned if row in moved]
        assert rows[: len(planned) - len(late)] == [row for row in planned if row not in moved]
        assert sorted(rows) == sorted(planned)
        assert plan.to_state()["is_at_end"]


def test_later_samples_wait_for_the_groups_in_flight_and_end_with_the_epoch():
    (plan,) = plans_of(1)
    last = len(plan) - 1
    plan.later.add(np.array([3]), np.array([9]), np.array([0]))
    assert plan.next_group(last) is None
    plan.taken = len(plan)
    assert not plan.to_state()["is_at_end"]
    assert plan.end() == [3]
    assert plan.to_state()["is_at_end"] and plan.next_group(None) is None
