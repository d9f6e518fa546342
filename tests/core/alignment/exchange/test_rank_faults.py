"""Whatever goes wrong on one rank is an error on all of them, soon, and none hangs."""

import json
import os
import re
import signal
import time

import pytest
from rank_jobs import RankJob, run_ranks

EXIT_LIMIT_S = 30


@pytest.fixture
def job(tmp_path):
    """Starts a job, and ends all that it leaves when the test is over."""
    jobs = []

    def start(body, world_size, *args, lines=0):
        jobs.append(RankJob(tmp_path, body, world_size, *args))
        for program in jobs[-1].ranks:
            for _ in range(lines):
                program.line()
        return jobs[-1]

    yield start
    for started in jobs:
        started.kill()


def errors_of(results):
    """The last line that each rank complained, by rank, which is its error."""
    assert {code for code, _, _ in results.values()} == {1}, results
    return {rank: errors.strip().splitlines()[-1] for rank, (_, _, errors) in results.items()}


STEPS = """
    loader = r.make_loader(400, read_ahead=int(sys.argv[1]), timeout_s=int(sys.argv[2]))
    for batch in loader:
        print("step", flush=True)
        time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("ranks", "victim", "how", "read_ahead", "timeout_s"),
    [
        (4, 2, signal.SIGKILL, 0, 20),
        (3, 0, signal.SIGSTOP, 2, 4),  # Rank 0 hosts the store: a call into it would never return.
    ],
)
def test_a_rank_that_is_killed_or_stopped(ranks, victim, how, read_ahead, timeout_s, job):
    run = job(STEPS, ranks, read_ahead, timeout_s, lines=6)
    os.kill(run.ranks[victim].process.pid, how)
    start = time.monotonic()
    errors = errors_of(run.results_of({*range(ranks)} - {victim}, EXIT_LIMIT_S))
    assert time.monotonic() - start < max(timeout_s, 15)
    for rank, error in errors.items():
        assert "PeerError: round" in error and "was lost" in error
        assert f"rank {victim} was lost" in error or (victim, how) == (0, signal.SIGKILL)
        if how == signal.SIGSTOP:
            assert f"rank {rank} waited in vain; rank 0, which hosts the store of the job" in error


def test_all_ranks_that_are_lost_are_named(job):
    run = job(STEPS, 4, 2, 6, lines=6)
    for victim in (2, 3):
        os.kill(run.ranks[victim].process.pid, signal.SIGKILL)
    for error in errors_of(run.results_of({0, 1}, EXIT_LIMIT_S)).values():
        assert "ranks 2 and 3 were lost: they crashed, left the epoch, or did not answer" in error


def test_a_late_rank_learns_that_rank_0_has_the_error(job, tmp_path):
    go_on = tmp_path / "go on"
    run = job(
        """
        loader = r.make_loader(400, timeout_s=20)
        for step, batch in enumerate(loader):
            print("step", flush=True)
            while rank == 2 and step == 5 and not os.path.exists(sys.argv[1]):
                time.sleep(0.05)
        """,
        3,
        go_on,
        lines=6,
    )
    os.kill(run.ranks[1].process.pid, signal.SIGKILL)
    (first,) = errors_of(run.results_of({0}, EXIT_LIMIT_S)).values()
    assert re.search("ranks? 1 .*lost", first)
    go_on.touch()
    (late,) = errors_of(run.results_of({2}, EXIT_LIMIT_S)).values()
    assert "rank 0, or a rank that it gave up waiting for, was lost" in late
    assert "If rank 0 has raised an error, that names the rank: see its output." in late


def test_a_rank_that_stops_early(job):
    run = job(
        """
        loader = r.make_loader(400, read_ahead=2, timeout_s=4)
        for step, batch in enumerate(loader):
            if rank == 1 and step == 5:
                time.sleep(600)
        """,
        3,
    )
    for error in errors_of(run.results_of((0, 2), EXIT_LIMIT_S)).values():
        assert "PeerError: round" in error and "rank 1 was lost" in error
        assert "did not answer within 4" in error


def test_ranks_that_answer_after_a_short_timeout_are_not_reported_lost(job):
    run = job(
        """
        import numpy as np
        from odb_nodes.core.alignment.exchange import GlooExchange
        exchange = GlooExchange([0, 1], 20.0)
        exchange.connect(3)
        exchange.timeout_s = 0.05  # from now on
        dist.barrier()
        if rank == 1:
            time.sleep(1)
        try:
            for _ in range(2):
                print(exchange.all_gather(np.full(3, rank)).tolist(), flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        dist.barrier()
        r.finish()
        """,
        2,
    )
    for _, out, errors in run.results(EXIT_LIMIT_S):
        *rows, error, _ = out.splitlines()
        assert set(rows) <= {"[[0, 0, 0], [1, 1, 1]]"}, (out, errors)
        assert error.startswith("PeerError the ranks did not all come within 0.05 s (`timeout_s`)")
        assert "rank 0 waited in vain; rank 1 waited in vain" in error


FIRST_EXCHANGE = """
    loader = r.make_loader(400, timeout_s=3)
    action = json.loads(sys.argv[1])[rank]
    if action == "die":
        time.sleep(2)
        os._exit(3)
    if action:
        time.sleep(int(action))
    start = time.monotonic()
    try:
        next(iter(loader))
    except Exception as error:
        print(type(error).__name__, error)
    print(time.monotonic() - start, flush=True)
    if "late" in sys.argv:
        dist.barrier()
    os._exit(0)
"""


def test_a_rank_that_arrives_when_the_others_have_given_up(job):
    run = job(FIRST_EXCHANGE, 2, json.dumps(["", "6"]), "late")
    (first, _), (second, seconds) = [out.splitlines() for _, out, _ in run.results(EXIT_LIMIT_S)]
    assert "PeerError rank 1 did not come to the first exchange within 3" in first
    assert "A missing rank has crashed (see its output) or is late. Build and iterate" in first
    assert "PeerError rank 0 had given up waiting" in second
    assert float(seconds) < 3


@pytest.mark.parametrize("actions", [["die", "", ""], ["", "7"]], ids=str)
def test_the_host_of_the_store_is_gone_in_the_first_exchange(actions, job):
    results = job(FIRST_EXCHANGE, len(actions), json.dumps(actions)).results(EXIT_LIMIT_S)
    for code, out, errors in results[1:]:
        error, seconds = out.splitlines()
        assert (code, float(seconds) < 5) == (0, True), (out, errors)
        assert error.startswith("PeerError rank 0, which hosts the store of the job,")
        assert "it was killed or stopped, or had given up waiting for a late rank" in error


def test_leaving_while_the_host_of_the_store_is_stopped_does_not_hang(job):
    run = job(
        """
        loader = r.make_loader(400, read_ahead=2, timeout_s=600)
        next(iter(loader))
        print("step", flush=True)
        time.sleep(4 if rank else 600)  # in the next exchange, on a thread
        start = time.monotonic()
        loader.close()
        print(time.monotonic() - start, flush=True)
        """,
        2,
        lines=1,
    )
    os.kill(run.ranks[0].process.pid, signal.SIGSTOP)
    code, out, errors = run.ranks[1].finish(EXIT_LIMIT_S)
    assert (code, float(out) < 5) == (0, True), (out, errors)


def test_a_host_that_is_stopped_for_less_than_the_timeout_is_waited_for(job):
    run = job(f"{STEPS}\n    loader.close()\n    r.finish()", 2, 0, 20, lines=3)
    os.kill(run.ranks[0].process.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(run.ranks[0].process.pid, signal.SIGCONT)
    run.finish(EXIT_LIMIT_S)


FINE = {
    "a rank that is late": (
        2,
        """
        if rank == 1:
            time.sleep(4)
        r.epochs_of(r.make_loader(40), 1)
        r.finish()
        """,
    ),
    "leaving in the middle of a wait": (
        3,
        """
        loader = r.make_loader(400, read_ahead=2, timeout_s=60)
        for step, batch in enumerate(loader):
            if step == 5:
                break
        if rank == 1:
            time.sleep(3)
        r.finish()
        """,
    ),
    "a pause after breaking out": (
        2,
        """
        import warnings
        warnings.simplefilter("ignore")  # of padding
        loader = r.make_loader(400, read_ahead=2 + 6 * rank, timeout_s=2)
        for step, batch in enumerate(loader):
            if step == 9:
                break
        loader.close()
        time.sleep(int(sys.argv[1]))  # a validation: gloo must not give up what is left behind
        r.check_epochs([400, 400], r.epochs_of(loader, 1))
        loader.close()
        r.finish()
        """,
    ),
}


@pytest.mark.parametrize("what", FINE)
def test_what_is_neither_an_error_nor_a_warning_nor_a_hang(what, job, exhaustive):
    world_size, body = FINE[what]
    for code, _, errors in job(body, world_size, 14 if exhaustive else 5).results(EXIT_LIMIT_S):
        assert (code, errors) == (0, "")


# --- ranks hold no more after many epochs than after one, and nothing after the end ---------------


def test_an_epoch_leaves_nothing_behind_and_the_end_of_a_loader_nothing_at_all(tmp_path):
    body = """
    before = r.held()
    loader = r.make_dataloader(180 if rank == 0 else 60, sharded=True, num_workers=1)
    epochs = []
    for _ in range(4):
        r.epochs_of(loader, 1)
        epochs.append(r.held())
    loader.close()
    closed = r.held()
    del loader
    gc.collect()
    r.finish([before, epochs, closed, r.held()])
    """
    # In interpreters of their own: what a forked one opens later, this would count as left behind.
    for before, (first, *later), closed, gone in run_ranks(tmp_path, body, 2, warm=()):
        assert before["process groups"] == first["process groups"] == 1
        for held in later:
            assert not {name: held[name] for name in first if held[name] > first[name]}
        assert (first["children"], closed["children"]) == (1, 0)
        assert closed["connections"] > gone["connections"]
        assert not {name: gone[name] for name in gone if gone[name] > before[name]}


def test_a_loader_can_be_saved_and_closed_when_torch_distributed_is_gone(tmp_path):
    body = """
    group = dist.new_group([0, 1])
    loader = r.make_dataloader(60, num_workers=1, process_group=group)
    iterator = iter(loader)
    next(iterator)
    before = loader.state_dict()
    next(iterator)
    after = loader.state_dict()
    dist.destroy_process_group()
    assert loader.state_dict() == after != before
    loader.close()
    assert loader.state_dict() == after
    print("true")
    """
    run_ranks(tmp_path, body, 2)


WATCH = """
    import weakref
    import numpy as np
    from odb_nodes.core.alignment.exchange import GlooExchange, Interrupted
    exchange = GlooExchange([0, 1], 20)
    exchange.connect(100)
    threads, from_numpy = [], torch.from_numpy  # that let go of a tensor
    def watched(array):
        tensor = from_numpy(array)
        weakref.finalize(tensor, lambda: threads.append(threading.get_ident()))
        return tensor
    torch.from_numpy = watched
"""


def test_no_thread_of_gloo_is_the_last_to_hold_a_tensor(tmp_path):
    # It would need the interpreter to let go of it, and aborts the process where that is ending.
    body = f"""{WATCH}
    for _ in range(500):
        exchange.all_gather(np.arange(100))
        time.sleep(0.004)  # as the exchanges of a loader have a round between them
    of_gloo = sum(thread != threading.get_ident() for thread in threads)
    r.finish([len(threads), of_gloo])
    """
    for tensors, of_gloo in run_ranks(tmp_path, body, 2):
        assert tensors >= 498
        assert of_gloo <= 5  # where gloo's thread does not get a core for 4 ms


def test_what_a_pending_call_uses_outlives_its_exchange(tmp_path):
    # Or gloo's thread would let go of it when the other rank ends, perhaps at the very end of this.
    body = f"""{WATCH}
    if rank == 0:
        threading.Timer(0.2, exchange.interrupt).start()
        try:
            exchange.all_gather(np.arange(100))
        except Interrupted:
            pass
        del exchange
        gc.collect()
        print(json.dumps(threads), flush=True)
        os._exit(0)
    time.sleep(2)
    print([])
    os._exit(0)
    """
    assert run_ranks(tmp_path, body, 2) == [[], []]


def test_a_forked_worker_may_collect_a_loader_that_is_gone(tmp_path):
    # The connections of that one are in the worker, too, but the threads that they had are not.
    body = """
    def loader(fault=None):
        workers = WorkerOptions(num_workers=1, start_method="fork")
        return ODBDataLoader(w.Texts(60, fault=fault), token_budget=96, window=16, workers=workers)
    gc.disable()
    first = loader()
    next(iter(first))
    first.close()
    del first  # and it is garbage from here on
    second = loader(fault=lambda index: gc.collect())
    batches = list(second)
    second.close()
    r.finish(len(batches))
    """
    batches, others = run_ranks(tmp_path, body, 2, timeout_s=60)
    assert batches == others > 3


def test_loaders_that_begin_at_once_on_threads_meet_their_own_ranks(tmp_path):
    # Whichever thread comes first: the ranks of one loader must not meet those of another.
    body = """
    for _ in range(10):
        loaders = [r.make_loader([40, 0][rank], seed=seed, read_ahead=2) for seed in range(4)]
        iterators = [iter(loader) for loader in loaders]  # four threads now connect
        time.sleep(0.01 * rank)
        counts = [len(list(iterator)) for iterator in iterators]
        assert len({*map(tuple, r.gathered(counts))}) == 1
        for loader in loaders:
            loader.close()
    r.finish()
    """
    run_ranks(tmp_path, body, 2)


@pytest.mark.parametrize(("what", "action"), [("node", "next")])
def test_a_forked_child_of_a_rank_is_told_so_and_its_parent_goes_on(what, action, tmp_path):
    body = """
    from odb_nodes.core.contract.graph import walk
    what, action = sys.argv[1:]
    node = loader = r.make_loader(40)
    iterator = iter(loader)
    if what == "node":
        node = iterator = next(one for one in walk(loader.root) if isinstance(one, RankAligner))
    next(iterator)
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        signal.alarm(20)
        try:
            next(iterator if action == "next" else iter(node))
            said = "it went on"
        except WorkerError as error:
            said = str(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    said = open(reader).read()
    assert os.waitpid(pid, 0)[1] == 0
    r.finish([said, os.getpid(), len(list(iterator))])
    """
    ranks = run_ranks(tmp_path, body, 2, what, action, timeout_s=60)
    for said, pid, left in ranks:
        assert f"was started in process {pid}; " in said
        assert "Make another loader" in said
        assert left == ranks[0][2] > 3
