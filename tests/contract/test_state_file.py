"""Whatever happens while a state is saved or loaded: one clear error, and no file that stays."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from odb_nodes import ShardedSampler, StateError, load_state, save_state

STATE = {"weights": torch.zeros(400_000)}


@pytest.fixture
def path(tmp_path):
    """Where a state was saved before."""
    save_state({"step": 1}, tmp_path / "state.pt")
    return tmp_path / "state.pt"


def assert_unchanged(path):
    assert load_state(path) == {"step": 1}
    assert os.listdir(path.parent) == [path.name]


def test_a_full_disk_is_an_os_error_that_names_the_file(path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            save_state(STATE, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
    assert_unchanged(path)


def test_the_folder_is_flushed_after_the_rename(path, monkeypatch):
    """A rename that is not on the disk is undone by a loss of power."""
    calls, fsync, replace = [], os.fsync, os.replace
    folder = path.parent.stat().st_ino

    def watched_fsync(handle):
        calls.append("folder" if os.fstat(handle).st_ino == folder else "file")
        fsync(handle)

    def watched_replace(*names):
        calls.append("rename")
        replace(*names)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    save_state({"step": 2}, path)
    assert calls == ["file", "rename", "folder"]


@pytest.mark.parametrize("call", ["open", "fsync"])
def test_a_folder_that_cannot_be_flushed_loses_no_file(call, path, monkeypatch):
    original = getattr(os, call)

    def refuse_folders(target, *arguments):
        if os.path.isdir(target) if call == "open" else os.path.isdir(f"/proc/self/fd/{target}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(target, *arguments)

    monkeypatch.setattr(os, call, refuse_folders)
    save_state({"step": 2}, path)
    assert load_state(path) == {"step": 2} and os.listdir(path.parent) == [path.name]


def nested():
    deep = []
    for _ in range(2000):
        deep = [deep]
    return deep


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: 0, "plain data and tensors only, but holds what is"),
        (threading.Lock(), "plain data and tensors only, but holds what is"),
        (print, "but holds `print`"),
        (Path("x"), "but holds `pathlib"),
        (np.float64(1), "but holds `numpy"),
        (np.ones(2), "but holds `numpy"),
        (nested(), "`state` is nested too deeply"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved_and_leaves_no_file(value, message, path):
    with pytest.raises(StateError, match=message):
        save_state({"w": STATE["weights"], "x": [value]}, path)
    assert_unchanged(path)


def test_a_state_and_a_path_that_are_swapped_are_told_apart(path):
    with pytest.raises(TypeError, match=r"`path` must be a path, .* `dict`"):
        save_state(path, {"step": 1})


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-20],
        lambda data: data.replace(b"position", b"pos\0tion"),
    ],
)
def test_a_damaged_file_is_named(damage, path):
    save_state(ShardedSampler(9, rank=0, world_size=1).state_dict(), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StateError, match=r"state.pt` \(\d+ bytes\) is truncated"):
        load_state(path)


def test_a_file_with_code_in_it_is_refused(path):
    torch.save({"call": print}, path)
    with pytest.raises(StateError, match="not a state file"):
        load_state(path)


def test_a_file_has_the_permissions_of_any_other(path, tmp_path):
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_ctrl_c_while_saving_is_a_keyboard_interrupt(path):
    interrupts, done, is_saving = 0, threading.Event(), False

    def raise_within(*_):  # outside of a call, it would end the test
        nonlocal is_saving
        if is_saving:
            is_saving = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, raise_within)

    def interrupt():
        for delay in range(40):
            time.sleep(0.002 + 0.017 * delay % 0.013)
            os.kill(os.getpid(), signal.SIGINT)
        done.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        while not done.is_set():
            try:
                is_saving = True
                while not done.is_set():
                    save_state(STATE, path)
                is_saving = False
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        is_saving = False
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert interrupts > 20
    found = load_state(path)  # on a slow disk, no call may have come to its end
    assert found == {"step": 1} or found["weights"].shape == (400_000,)
    save_state(STATE, path)  # removes what an interrupt within the removal has left
    assert os.listdir(path.parent) == [path.name]


KILLED = """
import os, sys
import torch
from odb_nodes import save_state
class Dies:
    def __reduce__(self):
        os._exit(1)
save_state([torch.zeros(9), Dies()], sys.argv[1])
"""


def test_what_a_killed_process_left_is_removed_by_the_next(path):
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=60)
    other = path.parent / ".state.pt.notes"
    other.touch()
    assert len(os.listdir(path.parent)) == 3
    save_state({"step": 1}, path)
    assert sorted(os.listdir(path.parent)) == [other.name, path.name]


def test_two_may_write_the_same_path_at_once(path):
    class SavesToo:
        def __reduce__(self):
            save_state({"step": 2}, path)
            return OrderedDict, ()

    save_state({"step": 1, "x": SavesToo()}, path)
    assert load_state(path) == {"step": 1, "x": {}}
    assert os.listdir(path.parent) == [path.name]


def test_a_file_that_is_taken_for_a_stale_one_before_it_is_locked_is_made_again(path, monkeypatch):
    made, mkstemp = [], tempfile.mkstemp

    def make_and_lose(*args):
        handle, name = mkstemp(*args)
        if not made:
            os.unlink(name)
        made.append(name)
        return handle, name

    monkeypatch.setattr(tempfile, "mkstemp", make_and_lose)
    save_state({"step": 1}, path)
    assert len(made) == 2 and load_state(path) == {"step": 1}


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "/dev/null"])
def test_only_regular_files_are_read_and_replaced(name, tmp_path):
    path = tmp_path / name
    if name == "pipe":
        os.mkfifo(path)
    for call in (load_state, lambda path: save_state({}, path)):
        with pytest.raises(StateError, match=f"`{path}` is a pipe, socket or device"):
            call(path)
    assert not path.is_file()


def test_a_folder_or_nothing_is_not_a_state_file(tmp_path):
    for call in (load_state, lambda path: save_state({}, path)):
        with pytest.raises(IsADirectoryError, match="is a folder, not a state file"):
            call(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / "none.pt")
