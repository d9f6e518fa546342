"""The expected steps of a run whose number of ranks changes."""

import pytest

pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st

from odb_nodes.integrations.huggingface.run import StepPlan

COUNT = st.integers(1, 50)


def gone_on(plan, step, ranks):
    """The plan of a run that stops after a step, and goes on with another number of ranks."""
    return StepPlan(
        steps_per_epoch=plan.steps_per_epoch,
        planned_ranks=plan.planned_ranks,
        ranks=ranks,
        begun_at=step,
        rank_steps=plan.rank_steps_at(step),
    )


def new_plan(steps_per_epoch, ranks):
    return StepPlan(
        steps_per_epoch=steps_per_epoch,
        planned_ranks=ranks,
        ranks=ranks,
        begun_at=0,
        rank_steps=0,
    )


def test_half_the_ranks_take_twice_the_steps():
    plan = gone_on(new_plan(10, 4), 5, 2)
    assert plan.schedule_steps(3) == 30
    assert plan.steps(3) == 5 + 50
    assert [plan.schedule_step(step) for step in (5, 6, 7, 55)] == [5, 5.5, 6, 30]
    assert plan.steps_per_epoch_now == 20
    assert not plan.is_of_these_ranks


@given(COUNT, COUNT, COUNT)
def test_as_many_ranks_as_before_keep_the_plan(steps_per_epoch, ranks, step):
    plan = gone_on(new_plan(steps_per_epoch, ranks), step, ranks)
    assert plan.is_of_these_ranks
    assert plan.steps(9.5) == max(step, plan.schedule_steps(9.5))


def test_a_run_that_is_back_on_its_ranks_is_not_where_it_would_have_been():
    plan = gone_on(gone_on(new_plan(10, 4), 5, 2), 15, 4)
    assert plan.schedule_step(15) == 10 and plan.schedule_step(16) == 11
    assert not plan.is_of_these_ranks


@given(COUNT, COUNT, st.lists(st.tuples(COUNT, COUNT), max_size=6))
def test_a_schedule_never_jumps_and_ends_with_the_run(steps_per_epoch, ranks, changes):
    plan = new_plan(steps_per_epoch, ranks)
    for steps, others in changes:
        last = plan.begun_at + steps
        after = gone_on(plan, last, others)
        assert after.schedule_step(last) == plan.schedule_step(last)
        plan = after
    end = plan.steps(2)
    assert end == plan.begun_at or 0 <= plan.schedule_step(end) - plan.schedule_steps(2) < (
        plan.ranks / plan.planned_ranks
    )
