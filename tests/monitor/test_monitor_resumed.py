"""A run that is resumed anywhere writes what the whole run writes: no step twice, none missing."""

import os
import subprocess
import sys

import pytest
from monitors import check_steps_follow, composed_loader, loader_of, records_of, train

from odb_nodes import StateError
from odb_nodes.monitor import Monitor, read_run

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for batches", "ignore:.*are padding")


@pytest.mark.parametrize("every", [1, 3, 100])
def test_a_run_that_is_resumed_at_any_step_writes_what_the_whole_run_writes(tmp_path, every):
    whole, states = Monitor(tmp_path / "whole", every=every), {}
    loader = loader_of()

    def keep(step):
        states[step] = (whole.state_dict(), loader.state_dict())

    train(whole, loader, epochs=2, after=keep)
    whole.close()
    expected = records_of(tmp_path / "whole")
    assert len(expected[1]) == 2
    for step, (state, position) in states.items():
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


def test_the_clock_goes_on_after_a_resume(tmp_path):
    first, loader = Monitor(tmp_path, every=2), loader_of()
    train(first, loader, steps=3)
    state = first.state_dict()
    second = Monitor(tmp_path, every=2)
    second.load_state_dict(state)
    first.close()
    train(second, loader, steps=2)
    one, other = read_run(tmp_path).steps[:2]
    assert other["seconds"] >= one["seconds"] + state["share"]["seconds"]


def test_a_state_that_was_changed_is_refused(tmp_path):
    state = Monitor(tmp_path).state_dict()
    with pytest.raises(StateError, match="damaged"):
        Monitor(tmp_path).load_state_dict({**state, "step": 3})
    with pytest.raises(StateError, match="saved by a Monitor"):
        Monitor(tmp_path).load_state_dict({})


BODY = """
import os, sys, signal
sys.path.insert(0, {tests!r})
from monitors import loader_of, train
from odb_nodes import Checkpoints
from odb_nodes.monitor import Monitor
monitor, loader = Monitor({folder!r} + "/run", every=3), loader_of()
checkpoints = Checkpoints({folder!r} + "/checkpoints", dict(monitor=monitor, loader=loader))
checkpoints.load()
kill_at = int(sys.argv[1])
def after(step):
    at = monitor._at.step
    if at % 4 == 0:
        checkpoints.save(at)
    if at == kill_at:
        os.write(os.open({folder!r} + "/run/monitor.jsonl", os.O_WRONLY | os.O_APPEND), b'{{"kind"')
        os.kill(os.getpid(), signal.SIGKILL)
train(monitor, loader, after=after)
monitor.close()
"""


@pytest.mark.slow
def test_a_run_that_is_killed_in_mid_line_goes_on(tmp_path):
    tests = os.path.dirname(os.path.dirname(__file__))
    body = BODY.format(tests=tests, folder=str(tmp_path))
    for kill_at in (7, 9, 0):
        done = subprocess.run([sys.executable, "-c", body, str(kill_at)], timeout=120)
        assert done.returncode == (-9 if kill_at else 0)
    with Monitor(tmp_path / "whole", every=3) as whole:
        train(whole, loader_of())
    assert records_of(tmp_path / "run") == records_of(tmp_path / "whole")
    assert [one["step"] for one in read_run(tmp_path / "run").attempts] == [0, 3, 6]


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("is_same", [False, True], ids=["a new process", "gone back in one"])
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
