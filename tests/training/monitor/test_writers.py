"""Every writer gets the numbers of the records, each step once, also after a resume."""

import sys
import time

import numpy as np
import pytest
from monitors import loader_of, train

from odb_nodes.training.monitor import MlflowWriter, Monitor, WandbWriter, read_run, scalars

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*waiting for batches"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the services' packages
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def values_of(folder):
    """(name, step) -> value of the records, as 32-bit floats, which TensorBoard keeps."""
    run = read_run(folder)
    return {
        (f"{prefix}{group}/{name}", record["step"]): float(np.float32(value))
        for prefix, records in (("", run.steps), ("epoch_", run.epochs))
        for record in records
        for group in ("mean", "sum", "peak", "last")
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


def resumed_run(folder, make_writer):
    """A run of 8 steps, which goes on from its checkpoint of step 4; returns the last writer."""
    loader, states = loader_of(), {}
    options = {"every": 3, "config": {"lr": 0.1}, "progress": False}
    with Monitor(folder, writers=("jsonl", make_writer()), **options) as monitor:

        def after(step):
            states[step] = (monitor.state_dict(), loader.state_dict())

        train(monitor, loader, after=after, steps=8)
    writer = make_writer()
    with Monitor(folder, writers=("jsonl", writer), **options) as monitor:
        monitor.load_state_dict(states[4][0])
        loader.load_state_dict(states[4][1])
        train(monitor, loader)
    return writer


def test_a_custom_writer_gets_each_record_and_attempt(tmp_path):
    service = Service()
    resumed_run(tmp_path, lambda: service)
    # Of step 6 it was told by the first attempt.
    assert {*values_of(tmp_path).items()} <= {*service.values.items()}
    assert service.attempts == read_run(tmp_path).attempts and service.closed == 2


def test_tensorboard_has_each_step_once(tmp_path):
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    resumed_run(tmp_path, lambda: "tensorboard")
    events = module.EventAccumulator(str(tmp_path / "tensorboard"), {"scalars": 0}).Reload()
    values = [
        ((tag, event.step), event.value)
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    ]
    assert sorted(values) == sorted(values_of(tmp_path).items())


def offline_records(data):
    """The records of a file of wandb, which has LevelDB's log format after 7 bytes."""
    offset, parts = 7, []
    while offset + 7 <= len(data):
        if offset % 2**15 > 2**15 - 7:  # the rest of a block
            offset += -offset % 2**15
            continue
        size, kind = int.from_bytes(data[offset + 4 : offset + 6], "little"), data[offset + 6]
        parts.append(data[offset + 7 : offset + 7 + size])
        offset += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


@pytest.mark.slow
def test_weights_and_biases_has_the_scalars_over_the_optimizer_step(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto import wandb_internal_pb2 as internal

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = {"project": "tests", "dir": str(tmp_path), "id": "run-1", "resume": "allow"}
    resumed_run(tmp_path / "run", lambda: WandbWriter(**options))
    values, config, ends = {}, {}, 0
    end_s = time.monotonic() + 30
    while ends < 2 and time.monotonic() < end_s:  # its service writes on after `finish`
        paths = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
        records = [
            internal.Record.FromString(data)
            for path in sorted(paths)
            for data in offline_records(path.read_bytes())
        ]
        ends = sum(record.WhichOneof("record_type") == "exit" for record in records)
        time.sleep(0.1)
    for record in records:
        config |= {item.key: item.value_json for item in record.run.config.update}
        row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        for name in (name for name in row if "/" in name):
            values[name, int(row["optimizer_step"])] = float(np.float32(float(row[name])))
    assert {*values_of(tmp_path / "run").items()} <= {*values.items()}
    assert config["lr"] == "0.1" and config["token_budget"] == "96"


@pytest.mark.slow
def test_mlflow_has_the_scalars_and_the_settings(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    run_id = mlflow.tracking.MlflowClient().create_run("0").info.run_id
    resumed_run(tmp_path / "run", lambda: MlflowWriter(run_id=run_id))
    assert mlflow.active_run() is None
    client = mlflow.tracking.MlflowClient()
    values = {
        (name, metric.step, float(np.float32(metric.value)))
        for name in client.get_run(run_id).data.metrics
        for metric in client.get_metric_history(run_id, name)
    }
    for (name, step), value in values_of(tmp_path / "run").items():
        assert (name.replace("/", ".").replace(".", "/", 1), step, value) in values
    assert client.get_run(run_id).data.params["lr"] == "0.1"
    with (
        mlflow.start_run() as outer,
        Monitor(tmp_path / "own", writers=[MlflowWriter()]) as monitor,
    ):
        train(monitor, loader_of(), steps=2)
        assert mlflow.active_run() is not None
    assert "mean/loss" in client.get_run(outer.info.run_id).data.metrics


@pytest.mark.parametrize(
    ("missing", "make", "extra"),
    [
        (
            "torch.utils.tensorboard",
            lambda folder: Monitor(folder, writers=["tensorboard"]),
            "tools",
        ),
        ("wandb", lambda _: WandbWriter(), "tracking"),
        ("mlflow", lambda _: MlflowWriter(), "tracking"),
    ],
)
def test_a_missing_package_is_named_when_the_writer_is_made(
    tmp_path, monkeypatch, missing, make, extra
):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"pip install 'odb-nodes\[{extra}\]'"):
        make(tmp_path)
