"""Canaries: what we rely on inside of multiprocessing."""

import multiprocessing
import os
import sys
from multiprocessing import process

import pytest

from odb_nodes._compat.multiprocessing import keep_from_forks


def test_a_forked_child_does_not_take_kept_processes_for_its_own():
    worker = multiprocessing.get_context("fork").Process(target=multiprocessing.Event().wait)
    worker.start()
    try:
        if worker not in process._children:
            version = ".".join(map(str, sys.version_info[:3]))
            pytest.fail(
                f"Python {version} has changed: `_children` of `multiprocessing.process` is not "
                "what odb_nodes/_compat/multiprocessing.py relies on."
            )
        keep_from_forks(worker)
        if (pid := os.fork()) == 0:
            os._exit(worker in process._children)
        assert os.waitpid(pid, 0)[1] == 0
        assert worker in multiprocessing.active_children()
    finally:
        worker.kill()
        worker.join(5)
