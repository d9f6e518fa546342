"""A Ray cluster on this machine, and the actors that live in it, for several tests."""

import importlib.util
import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

TESTS = Path(__file__).parent
MARKS = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray"),
]


@contextmanager
def cluster():
    """Ray, which this process is connected to; actors find the modules beside the tests."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (TESTS.parent, TESTS))))
        patch.chdir(TESTS)  # which actors have on their path as well
        ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def is_running(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def children(pid=None, name=""):
    """Process ids of all that live below a process, and have a name in their command line."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if is_running(child.pid) and name in "".join(child.cmdline()):
                found.append(child.pid)
    return sorted(found)


def actor_pids():
    """Process ids of the actors of all loaders that use the cluster of this process."""
    return children(name="ChunkActor")


def wait_for(pids, count=0, seconds=20):
    """Wait until a function gives so many process ids."""
    deadline = time.monotonic() + seconds
    while len(found := pids()) != count:
        assert time.monotonic() < deadline, f"{found}, but not {count}"
        time.sleep(0.05)
    return found
