"""The expected steps of a run whose number of ranks changes."""

import pytest

pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st

from odb_nodes.integrations.huggingface.run import RunState

COUNT = st.integers(1, 50)


def begun(steps_per_epoch, ranks, step=0, rank_steps=0):
    """A run of an estimate, after some steps."""
    plan = {"steps_per_epoch": steps_per_epoch, "planned_ranks": ranks, "rank_steps": rank_steps}
    return RunState(step=step, loader={}, **plan)


def gone_on(run, step, ranks):
    """The run where these ranks have taken it to a step."""
    rank_steps = run.rank_steps_at(step, ranks)
    return begun(run.steps_per_epoch, run.planned_ranks, step, rank_steps)


def test_half_the_ranks_take_twice_the_steps():
    run = gone_on(begun(10, 4), 5, 4)
    assert run.schedule_steps(3) == 30
    assert run.total_steps(3, 2) == 5 + 50
    assert [run.schedule_step(step, 2) for step in (5, 6, 7, 55)] == [5, 5.5, 6, 30]
    back = gone_on(run, 15, 2)  # on its ranks again, it is not where it would have been
    assert back.schedule_step(15, 4) == 10 and back.schedule_step(16, 4) == 11


@given(COUNT, COUNT, COUNT)
def test_as_many_ranks_as_before_keep_the_plan(steps_per_epoch, ranks, step):
    run = gone_on(begun(steps_per_epoch, ranks), step, ranks)
    assert run.schedule_step(step + 1, ranks) == step + 1
    assert run.total_steps(9.5, ranks) == max(step, run.schedule_steps(9.5))


@given(COUNT, COUNT, st.lists(st.tuples(COUNT, COUNT), max_size=6))
def test_a_schedule_never_jumps_and_ends_with_the_run(steps_per_epoch, planned, changes):
    run, ranks = begun(steps_per_epoch, planned), planned
    for steps, others in changes:
        last = run.step + steps
        after = gone_on(run, last, ranks)
        assert after.schedule_step(last, others) == run.schedule_step(last, ranks)
        run, ranks = after, others
    end = run.total_steps(2, ranks)
    rest = run.schedule_step(end, ranks) - run.schedule_steps(2)
    assert end == run.step or 0 <= rest < ranks / planned
