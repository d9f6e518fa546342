"""TensorBoard is told the numbers that are in the records, each step once, also after a resume."""

import sys

import numpy as np
import pytest
from monitors import loader_of, train

from odb_nodes.monitor import Monitor, read_run, scalars

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for batches")

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


class Service:
    """A writer such as one for a tracking service."""

    def __init__(self):
        self.attempts, self.values, self.closed = [], {}, 0

    def begin(self, attempt):
        self.attempts.append(attempt)

    def write(self, record):
        for name, value in scalars(record).items():
            self.values[name, record["step"]] = float(np.float32(value))

    def close(self):
        self.closed += 1


def test_every_writer_is_told_the_values_of_the_records_over_a_resume(tmp_path):
    service, loader, states = Service(), loader_of(), {}
    options = {"every": 3, "writers": ("jsonl", "tensorboard", service), "config": {"lr": 0.1}}
    with Monitor(tmp_path, **options) as monitor:

        def after(step):
            states[step] = (monitor.state_dict(), loader.state_dict())

        train(monitor, loader, after=after, steps=8)
    assert scalars_of(tmp_path) == service.values == values_of(tmp_path)
    state, position = states[4]
    with Monitor(tmp_path, **options) as monitor:
        monitor.load_state_dict(state)
        loader.load_state_dict(position)
        train(monitor, loader)
    found = scalars_of(tmp_path)
    assert found == values_of(tmp_path)
    assert {*found.items()} <= {*service.values.items()}  # which was told of step 6, too
    assert len({step for tag, step in found if tag == "mean/loss"}) == 4
    assert service.attempts == read_run(tmp_path).attempts and service.closed == 2


def test_what_is_missing_is_named_when_the_monitor_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'odb-nodes\[tools\]'"):
        Monitor(tmp_path, writers=["tensorboard"])
