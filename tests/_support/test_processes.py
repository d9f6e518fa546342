"""Freed memory is reused up to a limit; Ctrl-C is deferred and not lost."""

import signal
import subprocess
import sys

import pytest

from odb_nodes._support.processes import deferred_interrupt, limit_behind

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="is for glibc")

PROGRAM = """
import resource
import sys

import numpy as np
import psutil

from odb_nodes._support.processes import keep_freed_memory


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


keep_freed_memory(64 << 20)
memory, kept = psutil.Process().memory_info, []
before = memory().rss
for size_mib in range(100, 200, 10):  # larger each time, and below what stays
    block = np.ones(size_mib << 17)
    kept.append(np.ones(50_000))
    del block
grown = memory().rss - before
np.ones(20 << 17)
first = faults()
np.ones(20 << 17)
print(grown >> 20, faults() - first)
"""


@pytest.mark.slow
def test_freed_memory_is_reused_up_to_a_limit():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    grown_mib, pages = map(int, run.stdout.split())
    assert grown_mib < 80
    assert pages < 500  # of 5120


def test_ctrl_c_is_raised_after_an_error_too():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job may ignore it
    try:
        with pytest.raises(KeyboardInterrupt), deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            raise EOFError
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_lack_of_memory_is_a_limit_of_the_machine():
    assert "no memory left for a worker" in limit_behind(MemoryError())
