"""The global generators, which threads of this library take turns with."""

import multiprocessing
import threading

import pytest

from odb_nodes._support.seeds import own_rngs

LIMIT_S = 20.0


def take_a_turn():
    with own_rngs(LIMIT_S):
        pass


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_waits_for_no_thread_that_it_does_not_have():
    holds, is_done = threading.Event(), threading.Event()

    def hold():
        with own_rngs(LIMIT_S):
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


def test_a_fork_within_a_turn_leaves_it_to_the_child_to_end():
    with own_rngs(LIMIT_S):
        child = multiprocessing.get_context("fork").Process(target=take_a_turn)
        child.start()
        child.join(LIMIT_S)
    assert child.exitcode == 0
