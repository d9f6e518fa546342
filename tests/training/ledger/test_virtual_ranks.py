"""Processes that host virtual ranks record the same on any number of processes."""

import os

import pytest
from aligned_ranks import on_ranks
from elastic import EXCLUDED, SAMPLES, make
from ledgers import info_of

from odb_nodes import Ledger, audit, pop_step_info, reshard
from odb_nodes.training.ledger.history import read_steps
from odb_nodes.training.ledger.records import MAGIC

pytestmark = pytest.mark.filterwarnings("ignore:.*skipped", "ignore:.*dropped")
VIRTUAL = 4


def run(folder, processes, states=None, batches=None, is_killed=False):
    """Record an epoch, or some batches of each process, and return the states after each step."""

    def process(exchange):
        loader = make(exchange, virtual_ranks=VIRTUAL)
        if states is not None:
            loader.load_state_dict(states[exchange.rank])
        ledger = Ledger(folder, rank=exchange.rank, world_size=processes)
        saved = []
        for number, batch in enumerate(loader, start=1):
            ledger.record(pop_step_info(batch))
            saved.append(loader.state_dict())
            if number == batches:
                break
        ledger.close(ended=not is_killed)
        loader.close()
        return saved

    return on_ranks(processes, process)


def states_after(saved, step):
    """The states of all processes after so many steps."""
    ranks_per_process = VIRTUAL // len(saved)
    return [of_process[step * ranks_per_process - 1] for of_process in saved]


def facts(folder):
    result = audit(folder, SAMPLES)
    assert result.ok, result.problems
    (epoch,) = result.epochs
    assert epoch.is_complete and epoch.world_sizes == (VIRTUAL,)
    return epoch.digest, epoch.steps, epoch.fates


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The ledger of a run of as many processes as virtual ranks."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, VIRTUAL)
    return folder


def test_the_audit_and_the_steps_are_the_same_on_any_number_of_processes(whole, tmp_path):
    run(tmp_path, 1)
    assert facts(tmp_path) == facts(whole)
    fates = facts(whole)[2]
    assert sum(fates.values()) == SAMPLES and fates["excluded"] == len(EXCLUDED)
    steps = read_steps(tmp_path, 0, [0, 3])
    assert steps == read_steps(whole, 0, [0, 3]) and len(steps[3]) == VIRTUAL


def test_no_cut_of_a_process_that_hosts_them_reads_ok(tmp_path):
    saved = run(tmp_path, 2, batches=4, is_killed=True)
    run(tmp_path, 1, states=reshard([of_process[1] for of_process in saved], 1))
    assert audit(tmp_path).ok
    path = tmp_path / "rank-00000.ledger"
    whole = path.read_bytes()
    begin = whole.rindex(MAGIC)
    for size in [*range(begin, begin + 300, 19), *range(len(whole) - 100, len(whole), 3)]:
        path.write_bytes(whole[:size])
        assert not audit(tmp_path).ok, size


def test_what_could_not_be_written_is_said_of_each_virtual_rank(tmp_path, monkeypatch):
    """The batches of step 1's second rank and of step 2, in a process that hosts both ranks."""
    steps = [
        info_of(number, [number], ends=number == 7, ranks_per_process=2) for number in range(8)
    ]
    with Ledger(tmp_path) as ledger:
        for info in steps[:3]:
            ledger.record(info)
        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="cannot be written"):
            patch.setattr(os, "write", lambda file, data: 0)
            for info in steps[3:6]:
                ledger.record(info)
        for info in steps[6:]:
            ledger.record(info)
    texts = [text for text in audit(tmp_path).problems if "could not be written" in text]
    assert [text.partition(" could")[0] for text in texts] == [
        "rank 0: 1 step from epoch 0 step 2 on",
        "rank 1: 2 steps from epoch 0 step 1 on",
    ]


@pytest.mark.parametrize("first, then, further", [(4, 2, 0), (1, 4, 3), (2, 2, 1)])
def test_steps_after_the_checkpoint_are_replaced(first, then, further, whole, tmp_path):
    """Also a step within which both ranks of a process were saved."""
    step = 5
    saved = run(tmp_path, first, batches=step * VIRTUAL // first + further, is_killed=True)
    states = reshard(states_after(saved, step), then)
    if first == then == 2:
        states = [of_process[6] for of_process in saved]
    run(tmp_path, then, states=states)
    assert facts(tmp_path) == facts(whole)


def test_steps_that_were_lost_are_missed(tmp_path):
    saved = run(tmp_path, 1, batches=4, is_killed=True)
    later = run(tmp_path / "elsewhere", 1, states=[saved[0][3]], batches=8)[0][-1]
    run(tmp_path, 2, states=reshard([later], 2))
    result = audit(tmp_path, SAMPLES)
    assert any("not recorded: step 1 to 2" in text for text in result.problems), result.problems
