"""The file of a run: one writer, torn lines, full disks, runs that begin anew."""

import json
import os
import shutil
import warnings

import pytest
from monitors import loader_of, train

from odb_nodes import pop_step_info
from odb_nodes.monitor import Monitor, read_run, report

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for batches", "ignore:.*are padding")


def test_a_folder_has_one_monitor(tmp_path):
    with Monitor(tmp_path, every=1) as monitor:
        train(monitor, loader_of(), steps=1)
        with pytest.raises(RuntimeError, match="Give each run a folder of its own"):
            train(Monitor(tmp_path, every=1), loader_of(), steps=1)
        train(monitor, loader_of(), steps=1)
    train(Monitor(tmp_path, every=1), loader_of(), steps=1)


def test_a_full_disk_warns_once_and_is_a_gap(tmp_path, monkeypatch):
    write = os.write

    def full(file, data):
        return write(file, data[:10])

    with Monitor(tmp_path, every=1) as monitor:

        def after(step):
            monkeypatch.setattr(os, "write", full if step in (2, 3) else write)

        with pytest.warns(UserWarning, match="cannot be written") as caught:
            train(monitor, loader_of(), steps=6, after=after)
    assert sum("cannot be written" in str(one.message) for one in caught) == 1
    assert [one["step"] for one in read_run(tmp_path).steps] == [1, 2, 5, 6]


@pytest.mark.parametrize("writers", [("jsonl",), ("tensorboard",), ("jsonl", "tensorboard")])
def test_a_folder_that_is_deleted_is_noticed_and_made_anew(tmp_path, writers):
    if "tensorboard" in writers:
        pytest.importorskip("tensorboard")
    folder = tmp_path / "run"

    def after(step):
        if step == 2:
            shutil.rmtree(folder)

    monitor = Monitor(folder, every=1, writers=writers, losses_by_sample=True)
    with monitor, pytest.warns(UserWarning, match="deleted") as caught:
        train(monitor, loader_of(), steps=5, after=after)
    assert 1 <= sum("deleted" in str(one.message) for one in caught) <= 3
    if "jsonl" in writers:
        run = read_run(folder)
        assert [one["step"] for one in run.steps] == [4, 5] and len(run.attempts) == 1
    if "tensorboard" in writers:
        assert any((folder / "tensorboard").iterdir())


def test_a_run_that_begins_anew_hides_the_one_before_and_says_so(tmp_path):
    with Monitor(tmp_path, every=1) as monitor:
        train(monitor, loader_of(), steps=5)
    with pytest.warns(UserWarning, match="begins anew"), Monitor(tmp_path, every=1) as monitor:
        train(monitor, loader_of(), steps=3)
    assert [one["step"] for one in read_run(tmp_path).steps] == [1, 2, 3]


def test_records_of_a_later_version_are_refused(tmp_path):
    (tmp_path / "monitor.jsonl").write_text('{"kind": "attempt", "version": 99, "step": 0}\n')
    with pytest.raises(ValueError, match="version 99"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no `monitor.jsonl`"):
        read_run(tmp_path / "other")


def test_lines_that_are_damaged_are_left_out_and_told(tmp_path):
    with Monitor(tmp_path, every=1) as monitor:
        for batch in loader_of():
            monitor.step(batch, pop_step_info(batch), wait_s=0.0)
    lines = (tmp_path / "monitor.jsonl").read_text().splitlines()
    whole = len(read_run(tmp_path).steps)
    lines[2], lines[3] = "garbage{", '{"kind": "steps"}'
    (tmp_path / "monitor.jsonl").write_text("\n".join([*lines, '{"kind": "st']))
    with pytest.warns(UserWarning, match="2 lines of .* are damaged"):
        assert len(read_run(tmp_path).steps) == whole - 2


def test_an_attempt_that_a_full_disk_has_no_room_for_comes_with_the_next_record(
    tmp_path, monkeypatch
):
    """Or the steps of the attempt before would count twice."""
    monitor, loader, states = Monitor(tmp_path, every=1), loader_of(), []
    train(monitor, loader, steps=5, after=lambda _: states.append(monitor.state_dict()))
    monitor.close()
    write = os.write
    attempt = len((tmp_path / "monitor.jsonl").read_bytes().splitlines()[0])
    for room in (0, 10, attempt + 20):  # bytes that are written of the attempt and the record
        again = Monitor(tmp_path, every=1)
        again.load_state_dict(states[1])
        monkeypatch.setattr(os, "write", lambda file, data, room=room: write(file, data[:room]))

        def after(step):
            monkeypatch.setattr(os, "write", write)

        with pytest.warns(UserWarning, match="cannot be written"), again:
            train(again, loader_of(), steps=3, after=after)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = read_run(tmp_path)
        assert [one["step"] for one in run.steps] == [1, 2, 4, 5]
    assert [one["step"] for one in run.attempts] == [0, 2, 2, 2]


@pytest.mark.parametrize(
    ("line", "path", "value", "said"),
    [
        (
            2,
            ("mean", "loss"),
            "2.5",
            r"line 2 of `.*monitor.jsonl` \(step 1\): `mean.loss` .*'2.5'",
        ),
        (2, ("sum", "tokens"), None, r"line 2 .*\(step 1\): `sum.tokens` must .* is None"),
        (2, ("sum",), [1], r"damaged"),
        (3, ("peak",), "high", r"line 3 .*\(step 2\): `peak` must be a number, but is 'high'"),
        (3, ("step",), "two", r"line 3 .*\(step 'two'\): `step` must be a number"),
        (3, ("shapes", "8x16"), True, r"line 3 .*\(step 2\): `shapes.8x16` must .* is True"),
        (3, ("shapes", "wide"), 1, r"line 3 .*\(step 2\): `shapes` must name .* has 'wide'"),
        (1, ("version",), "one", r"line 1 .*\(step 0\): `version` must be a number, .*'one'"),
        (1, ("world_size",), "2", r"line 1 .*: `world_size` must be a number, but is '2'"),
        (5, ("last", "epoch"), {}, r"line 5 .*: `last.epoch` must be a number, but is {}"),
    ],
)
def test_text_in_place_of_a_number_is_named(tmp_path, line, path, value, said):
    with Monitor(tmp_path, every=1) as monitor:
        train(monitor, loader_of(), steps=4)
    file = tmp_path / "monitor.jsonl"
    lines = file.read_text().splitlines()
    changed = json.loads(lines[line - 1])
    *groups, last = path
    (changed[groups[0]] if groups else changed)[last] = value
    lines[line - 1] = json.dumps(changed)
    file.write_text("\n".join(lines) + "\n")
    for read in (read_run, report):
        if said == "damaged":
            with pytest.warns(UserWarning, match="1 lines of .* are damaged"):
                read_run(tmp_path)
        else:
            with pytest.raises(ValueError, match=said):
                read(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "attempt"}',
        '{"kind": "attempt", "version": 1, "step": 3}',
        '{"kind": "steps", "step": 3, "mean": {}, "sum": {}, "peak": {}, "last": {}}',
        '{"kind": "epoch", "step": 3}',
        '{"kind": ["steps"]}',
        "[1]",
    ],
)
def test_a_line_that_lacks_what_its_kind_has_is_damaged(tmp_path, line):
    with Monitor(tmp_path, every=1) as monitor:
        train(monitor, loader_of(), steps=4)
    path = tmp_path / "monitor.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    with pytest.warns(UserWarning, match="1 lines of .* are damaged"):
        assert [one["step"] for one in read_run(tmp_path).steps] == [1, 2, 3, 4]


def test_a_run_whose_attempt_is_lost_is_reported_on(tmp_path):
    with Monitor(tmp_path, every=1) as monitor:
        train(monitor, loader_of(), steps=4)
    path = tmp_path / "monitor.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    assert report(tmp_path).runs[0].ranks() == [(1, 1)]
