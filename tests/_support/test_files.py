"""Locks that save work: one after the other, and never a wait without an end."""

import threading

from odb_nodes._support.files import taking_turns


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
