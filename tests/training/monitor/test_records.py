"""The file of a run: one writer, torn lines, full disks, new runs and resumes."""

import json
import os
import shutil
import time

import pytest
from monitors import check_steps_follow, composed_loader, loader_of, records_of, train

from odb_nodes import StateError
from odb_nodes.training.monitor import Monitor, read_run, report

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for b", "ignore:.*are damaged")


def steps_of(folder):
    return [record["step"] for record in read_run(folder).steps]


def test_a_folder_has_one_monitor_and_a_new_run_in_it_is_warned_of(tmp_path):
    with Monitor(tmp_path, every=1) as monitor:
        train(monitor, loader_of(), steps=2)
        with pytest.raises(RuntimeError, match="Give each run its own folder"):
            train(Monitor(tmp_path, every=1), loader_of(), steps=1)
    with pytest.warns(UserWarning, match="begins anew"), Monitor(tmp_path, every=1) as monitor:
        train(monitor, loader_of(), steps=3)
    assert steps_of(tmp_path) == [1, 2, 3]


def test_a_full_disk_warns_once_and_is_a_gap(tmp_path, monkeypatch):
    write = os.write

    def after(step):
        full = step in (2, 3)
        monkeypatch.setattr(os, "write", lambda a, b: write(a, b[: 10 if full else None]))

    with Monitor(tmp_path, every=1) as monitor:
        with pytest.warns(UserWarning, match="cannot be written") as caught:
            train(monitor, loader_of(), steps=6, after=after)
    assert sum("cannot be written" in str(warning.message) for warning in caught) == 1
    assert steps_of(tmp_path) == [1, 2, 5, 6]


@pytest.mark.parametrize("writers", [("jsonl",), ("jsonl", "tensorboard")])
def test_a_deleted_folder_is_created_again_with_a_warning(tmp_path, writers):
    folder = tmp_path / "run"

    def after(step):
        if step == 2:
            shutil.rmtree(folder)

    monitor = Monitor(folder, every=1, writers=writers, losses_by_sample=True)
    with monitor, pytest.warns(UserWarning, match="deleted") as caught:
        train(monitor, loader_of(), steps=5, after=after)
    assert 1 <= sum("deleted" in str(warning.message) for warning in caught) <= 3
    assert steps_of(folder) == [4, 5] and len(read_run(folder).attempts) == 1
    if "tensorboard" in writers:
        assert any((folder / "tensorboard").iterdir())


def test_an_attempt_lost_to_a_full_disk_is_written_with_the_next_record(tmp_path, monkeypatch):
    """Or the steps of the attempt before would count twice."""
    monitor, loader, states = Monitor(tmp_path, every=1), loader_of(), []
    train(monitor, loader, steps=5, after=lambda _: states.append(monitor.state_dict()))
    monitor.close()
    write = os.write
    attempt = len((tmp_path / "monitor.jsonl").read_bytes().splitlines()[0])
    for room in (0, 10, attempt + 20):  # bytes that are written of the attempt and the record
        resumed = Monitor(tmp_path, every=1)
        resumed.load_state_dict(states[1])
        monkeypatch.setattr(os, "write", lambda file, data, room=room: write(file, data[:room]))
        with pytest.warns(UserWarning, match="cannot be written"), resumed:
            train(
                resumed,
                loader_of(),
                steps=3,
                after=lambda _: monkeypatch.setattr(os, "write", write),
            )
    run = read_run(tmp_path)
    assert [record["step"] for record in run.steps] == [1, 2, 4, 5]
    assert [attempt["step"] for attempt in run.attempts] == [0, 2, 2, 2]


@pytest.fixture
def run(tmp_path):
    """Replaces a line of the records of a run, counted from 1, by an object or a text."""
    with Monitor(tmp_path, every=1) as monitor:
        train(monitor, loader_of(), steps=4)
    path = tmp_path / "monitor.jsonl"
    lines = path.read_text().splitlines()

    def replace(number, change):
        record = json.loads(lines[number - 1])
        lines[number - 1] = change if isinstance(change, str) else json.dumps(change(record))
        path.write_text("\n".join(lines) + "\n")
        return tmp_path

    return replace


DAMAGED = [
    "garbage{",
    "[1]",
    '{"kind": "steps"}',
    '{"kind": "attempt", "version": 2, "step": 3}',
    '{"kind": ["steps"]}',
    lambda record: record | {"kind": "other"},
    lambda record: {name: value for name, value in record.items() if name != "weight"},
    lambda record: record | {"step": record["step"] + 1},  # record digit
]


@pytest.mark.parametrize("change", DAMAGED)
def test_a_damaged_line_is_skipped_with_a_warning(run, change):
    folder = run(3, change)
    with open(folder / "monitor.jsonl", "a") as file:
        file.write('{"kind": "st')  # torn by a kill: no word of that
    with pytest.warns(UserWarning, match=r"are damaged, and left out: 3\."):
        assert steps_of(folder) == [1, 3, 4]


def test_a_damaged_last_line_is_warned_of_if_it_was_written_whole(run):
    folder = run(5, "garbage{")
    with pytest.warns(UserWarning, match=r"are damaged, and left out: 5\."):
        read_run(folder)


def test_records_of_another_version_are_refused_and_a_folder_without_any(run):
    for version in (1, 99):
        folder = run(1, lambda record, version=version: {"kind": "attempt", "version": version})
        for read in (read_run, report):
            with pytest.raises(ValueError, match=f"version {version}, .* reads 2"):
                read(folder)
    with pytest.raises(FileNotFoundError, match=r"has no `monitor.jsonl`"):
        read_run("nowhere")


def test_no_step_counts_twice_where_the_attempt_is_damaged(run):
    """The run goes on from step 2; the line that says so is damaged."""
    folder = run(2, lambda record: record)
    lines = (folder / "monitor.jsonl").read_text().splitlines()
    damaged = [*lines, "{damaged", *lines[3:]]
    (folder / "monitor.jsonl").write_text("\n".join(damaged) + "\n")
    assert steps_of(folder) == [1, 2, 3, 4]
    assert "resumed after step" not in str(report(run(1, "")))  # the other attempt, too


# --- resumes: each step is recorded once ----------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
def test_a_run_resumed_at_any_step_writes_the_records_of_the_whole_run(tmp_path, every):
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
        resumed, resumed_loader = Monitor(folder, every=every), loader_of()
        resumed.load_state_dict(state)
        resumed_loader.load_state_dict(position)
        train(resumed, resumed_loader, epochs=2 - state["epoch"])
        resumed.close()
        records = records_of(folder)
        check_steps_follow([{"step": 0}, *records[0]])
        assert records == expected, step


@pytest.mark.parametrize("world_size", [None, 2])
def test_the_training_time_continues_after_a_resume(tmp_path, world_size):
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
def test_a_run_resumed_at_the_end_of_an_epoch_has_the_record_of_the_epoch(tmp_path, every, is_same):
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
    assert [record["sum"]["samples"] for record in run.epochs] == [100, 100]
