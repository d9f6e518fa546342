"""TensorBoard is told the numbers that are in the records, each step once, also after a resume."""

import subprocess
import sys

import numpy as np
import pytest
from monitors import loader_of, train

from odb_nodes.monitor import Monitor, read_run, scalars

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for batches", "ignore:.*are padding")

GROUPS = ("mean", "sum", "peak", "last")


def scalars_of(folder):
    """(tag, step) -> value; a step that comes twice is an error."""
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder / "tensorboard"), {"scalars": 0})
    events.Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            assert (tag, event.step) not in found
            found[tag, event.step] = event.value
    return found


def values_of(folder):
    """The same of the records, as 32-bit floats, which TensorBoard keeps."""
    run = read_run(folder)
    return {
        (f"{prefix}{group}/{name}", record["step"]): float(np.float32(value))
        for prefix, records in (("", run.steps), ("epoch_", run.epochs))
        for record in records
        for group in GROUPS
        for name, value in record[group].items()
    }


def test_the_scalars_are_the_values_of_the_records_over_a_resume(tmp_path):
    options = {"every": 3, "writers": ("jsonl", "tensorboard")}
    loader, states = loader_of(), {}
    with Monitor(tmp_path, **options) as monitor:

        def after(step):
            states[step] = (monitor.state_dict(), loader.state_dict())

        train(monitor, loader, after=after, steps=8)
    assert scalars_of(tmp_path) == values_of(tmp_path)
    state, position = states[4]
    with Monitor(tmp_path, **options) as monitor:
        monitor.load_state_dict(state)
        loader.load_state_dict(position)
        train(monitor, loader)
    found = scalars_of(tmp_path)
    assert found == values_of(tmp_path)
    assert len({step for tag, step in found if tag == "mean/loss"}) == 4


@pytest.mark.slow
def test_what_is_missing_is_named_when_the_monitor_is_made():
    code = """
import sys; sys.modules["tensorboard"] = None
from odb_nodes.monitor import Monitor
Monitor("x", writers=["tensorboard"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install 'odb-nodes[tools]'" in done.stderr


class Service:
    """A writer such as one for a tracking service."""

    def __init__(self):
        self.attempts, self.values, self.closed = [], [], 0

    def begin(self, attempt):
        self.attempts.append(attempt)

    def write(self, record):
        self.values.append((record["step"], scalars(record)))

    def close(self):
        self.closed += 1


def test_a_writer_of_the_user_is_told_what_is_in_the_file(tmp_path):
    service, loader, state = Service(), loader_of(), None
    for _ in range(2):
        monitor = Monitor(tmp_path, every=2, writers=("jsonl", service), config={"lr": 0.1})
        with monitor:
            if state is not None:
                monitor.load_state_dict(state)
            train(monitor, loader, steps=4)
            state = monitor.state_dict()
    run = read_run(tmp_path)
    assert service.attempts == run.attempts and len(run.attempts) == 2
    assert service.closed == 2
    found = {(name, step): value for step, one in service.values for name, value in one.items()}
    assert {key: float(np.float32(value)) for key, value in found.items()} == values_of(tmp_path)


@pytest.mark.parametrize("writers", ["jsonl", ("wandb",), (Service,), ("jsonl", print)])
def test_writers_that_are_not_there_are_refused(tmp_path, writers):
    with pytest.raises((TypeError, ValueError), match="`writers`"):
        Monitor(tmp_path, writers=writers)
