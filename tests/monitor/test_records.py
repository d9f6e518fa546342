"""The file of a run: one writer, torn lines, full disks, runs that begin anew."""

import os

import pytest
from monitors import loader_of, train

from odb_nodes import pop_step_info
from odb_nodes.monitor import Monitor, read_run

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
