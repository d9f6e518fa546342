"""Virtual ranks of one process: one runs at a time, and their messages travel as one."""

import signal
import threading
import time

import numpy as np
import pytest
from aligned_ranks import on_ranks

from odb_nodes import PeerError
from odb_nodes.alignment.exchange import HostedRanks, Interrupted

TIMEOUT_S = 10.0


def team(hosted=3, process_group=None, processes=1, timeout_s=TIMEOUT_S):
    found = HostedRanks(hosted * processes, process_group, timeout_s)
    found.resume()
    return found


def row(*values):
    return np.array(values, dtype=np.int64)


def gathering(exchange, rounds=3):
    """What a virtual rank gathers in some rounds."""

    def run():
        exchange.connect(2)
        return [
            exchange.all_gather(row(exchange.rank, number)).tolist() for number in range(rounds)
        ]

    return run


def raising(error):
    def run():
        raise error

    return run


ENDS = iter(()).__next__


def test_all_virtual_ranks_of_all_processes_gather_the_same():
    def process(outer):
        hosts = team(3, outer, processes=2)
        return hosts.run([gathering(hosts.exchange(number)) for number in range(3)])

    expected = [[[rank, number] for rank in range(6)] for number in range(3)]
    assert on_ranks(2, process) == [[expected] * 3] * 2


def test_one_runs_at_a_time_and_the_next_while_it_waits():
    hosts, inside, most, order = team(), 0, 0, []

    def run(number):
        nonlocal inside, most
        for part in range(3):
            inside += 1
            most = max(most, inside)
            order.append((part, number))
            time.sleep(0.01)
            inside -= 1
            hosts.exchange(number).all_gather(row(part))
        return number

    assert hosts.run([lambda number=number: run(number) for number in range(3)]) == [0, 1, 2]
    assert most == 1
    assert [part for part, _ in order] == sorted(part for part, _ in order)


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        ([raising(PeerError("of rank 1")), raising(OSError()), raising(PeerError())], OSError),
        ([ENDS, raising(OSError()), ENDS], OSError),
        ([ENDS] * 3, StopIteration),
    ],
)
def test_the_cause_is_raised_and_not_what_others_say_of_it_nor_their_end(calls, error):
    with pytest.raises(error):
        team().run(calls)


def test_a_virtual_rank_that_does_not_come_is_named():
    hosts = team(timeout_s=0.3)
    with pytest.raises(PeerError, match=r"virtual rank \[2\] of this process within 0.3 s"):
        hosts.run([gathering(hosts.exchange(0)), gathering(hosts.exchange(1)), lambda: None])


def test_an_interrupt_ends_all_waits_until_it_is_taken_back():
    hosts = team()
    threading.Timer(0.1, hosts.interrupt).start()
    with pytest.raises(Interrupted):
        hosts.run([gathering(hosts.exchange(0)), gathering(hosts.exchange(1)), lambda: None])
    with pytest.raises(Interrupted):
        hosts.exchange(0).all_gather(row(1))
    hosts.resume()
    calls = [gathering(hosts.exchange(number), 1) for number in range(3)]
    assert hosts.run(calls) == [[[[0, 0], [1, 0], [2, 0]]]] * 3


def test_outside_of_a_step_one_speaks_for_all():
    assert team().exchange(1).all_gather(row(7, 8)).tolist() == [[7, 8]] * 3


def test_an_exit_in_one_ends_the_waits_of_the_others():
    hosts, start = team(), time.monotonic()
    leave = raising(SystemExit(3))
    with pytest.raises(SystemExit):
        hosts.run([gathering(hosts.exchange(0)), leave, gathering(hosts.exchange(2))])
    assert time.monotonic() - start < TIMEOUT_S / 2


@pytest.fixture
def heeds_ctrl_c():
    """Ctrl-C is ignored below a shell's `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_leaves_no_graph_within_a_step_and_a_second_one_none_when_one_begins(interrupts):
    hosts, may_end, has_ended = team(2), threading.Event(), threading.Event()

    def busy():  # while the trainer's thread waits for it
        hosts.exchange(1).all_gather(row(1))
        for _ in range(interrupts):
            time.sleep(0.2)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert may_end.wait(TIMEOUT_S)
        has_ended.set()

    if interrupts == 1:
        threading.Timer(0.6, may_end.set).start()
    with pytest.raises(KeyboardInterrupt):
        hosts.run([lambda: hosts.exchange(0).all_gather(row(0)), busy])
    assert has_ended.is_set() == (interrupts == 1)
    threading.Timer(0.2, may_end.set).start()
    hosts.leave_step()
    assert has_ended.is_set()


def test_a_process_hosts_its_share():
    exchange = HostedRanks(6, None, TIMEOUT_S).exchange(4)
    assert (exchange.rank, exchange.world_size, exchange.batch_of_step) == (4, 6, (4, 6))

    def process(outer):
        with pytest.raises(ValueError, match="multiple of the number of ranks"):
            HostedRanks(3, outer, TIMEOUT_S)
        return [HostedRanks(4, outer, TIMEOUT_S).exchange(number).rank for number in range(2)]

    assert on_ranks(2, process) == [[0, 1], [2, 3]]
