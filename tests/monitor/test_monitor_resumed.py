"""A run that is resumed anywhere writes what the whole run writes: no step twice, none missing."""

import time

import pytest
from monitors import check_steps_follow, composed_loader, loader_of, records_of, train

from odb_nodes import StateError
from odb_nodes.monitor import Monitor, read_run

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for batches")


@pytest.mark.parametrize("every", [1, 3])
def test_a_run_that_is_resumed_at_any_step_writes_what_the_whole_run_writes(tmp_path, every):
    whole, states = Monitor(tmp_path / "whole", every=every), {}
    loader = loader_of()

    def keep(step):
        states[step] = (whole.state_dict(), loader.state_dict())

    train(whole, loader, epochs=2, after=keep)
    whole.close()
    expected = records_of(tmp_path / "whole")
    assert len(expected[1]) == 2
    for step, (state, position) in [*states.items()][:: every + 1]:
        folder = tmp_path / f"at-{step}"
        first = Monitor(folder, every=every)
        train(first, loader_of(), epochs=2, steps=step + 2)  # it went on after the checkpoint
        first.close()
        resumed, again = Monitor(folder, every=every), loader_of()
        resumed.load_state_dict(state)
        again.load_state_dict(position)
        train(resumed, again, epochs=2 - state["epoch"])
        resumed.close()
        found = records_of(folder)
        check_steps_follow([{"step": 0}, *found[0]])
        assert found == expected, step


@pytest.mark.parametrize("world_size", [None, 2])
def test_the_clock_goes_on_after_a_resume(tmp_path, world_size):
    with Monitor(tmp_path, every=2) as first:
        train(first, loader := loader_of(), steps=3, after=lambda _: time.sleep(0.05))
        state = first.state_dict()
        first.close(write=False)
    (written,) = read_run(tmp_path).steps
    since = state["counts"]["sums"]["rank_seconds"]
    assert written["seconds"] >= 0.05 and since >= 0.1
    with Monitor(tmp_path, every=2) as second:
        if world_size is not None:
            state, _ = Monitor.reshard_states([state], world_size)
        second.load_state_dict(state)
        train(second, loader, steps=2)
    assert read_run(tmp_path).steps[1]["seconds"] >= written["seconds"] + since


def test_a_state_that_was_changed_is_refused(tmp_path):
    state = Monitor(tmp_path).state_dict()
    with pytest.raises(StateError, match="damaged"):
        Monitor(tmp_path).load_state_dict({**state, "step": 3})
    with pytest.raises(StateError, match="saved by a Monitor"):
        Monitor(tmp_path).load_state_dict({})


@pytest.mark.parametrize(("every", "is_same"), [(1, False), (5, True)])
def test_a_run_that_goes_on_from_the_last_step_of_an_epoch_has_its_record(tmp_path, every, is_same):
    """Without a `RankAligner`, it is known only afterwards that the epoch has ended."""
    batches = sum(1 for _ in composed_loader())
    monitor, loader = Monitor(tmp_path, every=every), composed_loader()
    train(monitor, loader, steps=batches)
    state, position = monitor.state_dict(), loader.state_dict()
    if not is_same:
        monitor.close(write=False)
        monitor = Monitor(tmp_path, every=every)
    monitor.load_state_dict(state)
    loader = composed_loader()
    loader.load_state_dict(position)
    train(monitor, loader, epochs=2)
    monitor.close()
    run = read_run(tmp_path)
    check_steps_follow([{"step": 0}, *run.steps])
    first, second = run.epochs
    assert (first["first_step"], first["step"], second["first_step"]) == (1, batches, batches + 1)
    assert second["step"] == run.steps[-1]["step"]
    assert [one["sum"]["samples"] for one in run.epochs] == [100, 100]
