import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from odb_nodes import ShardedSampler, StateError, load_state, save_state
from odb_nodes._support import files
from odb_nodes.core.contract import NodeState, copy_state
from odb_nodes.core.contract.state import add_digest, seal, seal_whole, unseal, unseal_whole


@dataclass(kw_only=True)
class OneField(NodeState):
    x: int


@dataclass(kw_only=True)
class AnyField(NodeState):
    x: Any


def test_a_state_is_copied_whole():
    state = {"a": [1, (2, {"b": torch.ones(2)})], "c": "x"}
    copy = copy_state(state)
    state["a"][1][1]["b"][0] = 5
    state["a"].append(3)
    assert copy["a"][0] == 1
    assert len(copy["a"]) == 2
    assert copy["a"][1][1]["b"].tolist() == [1, 1]


REFUSALS = [
    ({}, "must be a state saved by a Node"),
    (None, "but is NoneType 'None'"),
    ([1], "but is list"),
    ({"model": 1, "optimizer": 2}, r"keys \['model', 'optimizer'\]"),
    (seal("Other", {}, {"x": 1}), "saved by `Other`.* into `Node`"),
    ({**seal("Node", {}, {"x": 1}), "version": 99}, "`version` 99, but .* reads 12"),
    (seal("Node", {}, {}), "lacks `x`"),
    (seal("Node", {}, {"x": 1, "other": 0}), "has `other`"),
    ({**seal("Node", {}, {"x": 1}), "config": 3}, "`config` must be a dict, but is 3"),
    ({**add_digest(seal("Node", {}, {"x": 1})), "x": 2}, "Node is damaged: its digest"),
    (seal("Node", {"k": 1}, {"x": 1}), "`k` was 1 .* is 'absent' now"),
]


@pytest.mark.parametrize(("state", "message"), REFUSALS)
def test_a_state_that_does_not_fit_says_why(state, message):
    with pytest.raises(StateError, match=message):
        unseal(state, "Node", OneField, {})
    if (
        isinstance(state, dict)
        and "config" in state
        and state["config"] == {}
        and "digest" not in state
    ):
        with pytest.raises(StateError, match=message):
            unseal_whole(add_digest(state), "Node", OneField)


def test_true_is_not_one_in_a_configuration():
    with pytest.raises(StateError, match="`window` was True .* is 1 now"):
        unseal(seal("Node", {"window": True}, {"x": 1}), "Node", OneField, {"window": 1})


def test_a_whole_state_is_refused_after_any_change():
    state = seal_whole("Node", OneField(x=7))
    assert unseal_whole(state, "Node", OneField) == OneField(x=7)
    digests = None, True, state["digest"] + 1, float(state["digest"]), torch.ones(2)
    changes = [*({"digest": digest} for digest in digests), {"x": 8}]
    for broken in (*({**state, **change} for change in changes), seal("Node", {}, {"x": 7})):
        with pytest.raises(StateError, match="its digest is not"):
            unseal_whole(broken, "Node", OneField)


@pytest.mark.parametrize("place", ["whole", "node", "config", "x", "digest", "unknown"])
@pytest.mark.parametrize("kind", [list, dict])
def test_a_state_that_is_nested_too_deeply_is_refused(place, kind):
    deep = 1
    for _ in range(2000):
        deep = {"a": deep} if kind is dict else kind([deep])
    state = deep if place == "whole" else {**seal_whole("Node", AnyField(x=7)), place: deep}
    with pytest.raises(StateError, match="the state (of|for) Node|this odb_nodes reads"):
        unseal_whole(state, "Node", AnyField)


def test_a_digest_does_not_depend_on_the_order_of_keys():
    mixed = {2: 0, "2": 1, (1, b"x"): 2, None: 3}
    states = [{"b": mixed, "a": 2**70}, {"a": 2**70, "b": dict(reversed(mixed.items()))}]
    assert len({add_digest(state)["digest"] for state in states}) == 1


def test_a_digest_is_of_values_however_a_tensor_lies_in_memory():
    sparse, dense = torch.ones(3)[::2][:1], torch.ones(1)
    assert sparse.stride() != dense.stride()
    assert add_digest({"row": sparse})["digest"] == add_digest({"row": dense})["digest"]


@pytest.mark.parametrize(
    ("value", "other"),
    [
        *(((1, 2), [1, 2]), ({1: 2}, {"1": 2}), (1, True), (1, 1.0), (b"1", "1"), ([b"1"], [b"2"])),
        *((None, "None"), ({}, []), ([[1], 2], [[1, 2]]), (0.0, -0.0), (2**70, 2**70 + 1)),
    ],
)
def test_a_digest_tells_values_of_other_types_apart(value, other):
    digests = [add_digest({"x": [content]})["digest"] for content in (value, other)]
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ({0, 1}, {7, 8}),
        (1 + 2j, 2 + 1j),
        (bytearray(b"a"), bytearray(b"b")),
        (torch.Size([2]), torch.Size([3])),
        (torch.float32, torch.float16),
        (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
    ],
)
def test_a_digest_covers_all_types_that_torch_load_allows(value, other):
    state = seal_whole("Node", AnyField(x=value))
    assert type(unseal_whole(state, "Node", AnyField).x) is type(value)
    with pytest.raises(StateError, match="digest"):
        unseal_whole({**state, "x": other}, "Node", AnyField)


# whatever happens while a state is saved or loaded: one clear error, and no file that stays


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
    for _ in range(100_000):
        deep = [deep]
    return deep


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: 0, "plain data and tensors only, but pickle refused"),
        (threading.Lock(), "plain data and tensors only, but pickle refused"),
        (print, r"but holds `(builtins\.)?print`"),
        (Path("x"), "but holds `pathlib"),
        (np.float64(1), "but holds `numpy"),
        (np.ones(2), "but holds `numpy"),
        (nested(), "`state` is nested too deeply"),
    ],
)
def test_unloadable_data_is_not_saved_and_leaves_no_file(value, message, path):
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
    state = load_state(path)  # on a slow disk, no call may have come to its end
    assert state == {"step": 1} or state["weights"].shape == (400_000,)
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
    made, lock = [], files._try_lock

    def lose_and_lock(file, *, wait):
        if not made:
            os.unlink(file.name)
        made.append(file.name)
        return lock(file, wait=wait)

    monkeypatch.setattr(files, "_try_lock", lose_and_lock)
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
