"""What a reset makes of workers that have died since the last one."""

import os
import signal
import time
import warnings

import pytest
from worker_functions import same

from odb_nodes import ParallelProcessor, ShardedSampler, WorkerOptions


def kill_worker(node):
    """Kill one of the workers, and wait until that is known."""
    victim = node.runner._pool._workers[0]
    os.kill(victim.pid, signal.SIGKILL)
    while not victim.is_buried:
        time.sleep(0.01)


def test_a_warning_of_dead_workers_that_is_an_error_comes_once():
    """The reset that raises it has started new workers: the next one finds them."""
    node = ParallelProcessor(
        ShardedSampler(50, rank=0, world_size=1), same, workers=WorkerOptions(num_workers=2)
    )
    node.reset(None)
    try:
        expected = [*node]
        kill_worker(node)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="-9.*nothing to do.* All workers are started"):
                node.reset(None)
            node.reset(None)
            assert sorted(node) == sorted(expected)
    finally:
        node.close()
