"""Files that are replaced whole, and locks that save work: never a wait without an end."""

import os
import threading

import pytest

from odb_nodes._support.files import replacing, taking_turns


def test_a_new_file_has_the_permissions_of_the_old_one(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with replacing(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_share_that_refuses_permissions_keeps_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def refuse(*_):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    with pytest.raises(OSError) as raised, replacing(path):
        pass
    assert raised.value.filename == str(path)
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == b"old"


def test_threads_take_turns(tmp_path):
    inside, most = [], []

    def enter():
        with taking_turns(tmp_path / "lock", 60.0):
            inside.append(1)
            most.append(len(inside))
            threading.Event().wait(0.01)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1] * 5


def test_a_wait_ends_although_another_one_is_within(tmp_path):
    with taking_turns(tmp_path / "lock", 60.0), taking_turns(tmp_path / "lock", 0.05):
        pass
    with taking_turns(tmp_path / "lock", 0.0):
        pass


def test_a_folder_that_does_not_exist_stops_nobody(tmp_path):
    with taking_turns(tmp_path / "nowhere" / "lock", 60.0):
        pass
