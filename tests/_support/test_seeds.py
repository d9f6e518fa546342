"""Threads of this library take turns with the global generators."""

import multiprocessing
import threading
import time
from contextlib import suppress

import pytest

from odb_nodes._support import seeds
from odb_nodes._support.seeds import exclusive_rngs
from odb_nodes.errors import WorkerError

LIMIT_S = 20.0


def take_a_turn():
    with exclusive_rngs(LIMIT_S):
        pass


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_threads_of_its_parent():
    holds, is_done = threading.Event(), threading.Event()

    def hold():
        with exclusive_rngs(LIMIT_S):
            holds.set()
            is_done.wait(LIMIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait(LIMIT_S)
    child = multiprocessing.get_context("fork").Process(target=take_a_turn)
    child.start()
    child.join(LIMIT_S / 4)
    is_waiting = child.is_alive()
    child.kill()
    child.join()
    is_done.set()
    thread.join()
    assert not is_waiting


def test_a_forked_child_ends_the_turn_that_it_was_forked_in():
    with exclusive_rngs(LIMIT_S):
        child = multiprocessing.get_context("fork").Process(target=take_a_turn)
        child.start()
        child.join(LIMIT_S)
    assert child.exitcode == 0


@pytest.mark.parametrize(("turns", "turn_s", "is_error"), [(5, 0.2, False), (1, 1.2, True)])
def test_a_thread_waits_for_many_turns_but_for_none_above_its_limit(
    monkeypatch, turns, turn_s, is_error
):
    """All turns together take longer than the limit of one."""
    monkeypatch.setattr(seeds, "_POLL_S", 0.01)
    holds = threading.Event()

    def take_turns():
        for _ in range(turns):
            with exclusive_rngs(0.7):
                holds.set()
                time.sleep(turn_s)

    def wait():
        with suppress(WorkerError), exclusive_rngs(0.7):
            return
        errors.append(True)

    errors = []
    threads = [threading.Thread(target=target) for target in (take_turns, wait)]
    threads[0].start()
    holds.wait(LIMIT_S)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert errors == [True] * is_error
