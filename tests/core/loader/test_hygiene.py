"""Nothing is left behind: no process, thread, file or shared memory, however a run ends."""

import gc
import os
import signal
import sys
import threading
import time
import traceback

import psutil
import pytest
from worker_functions import Endless, Program, Texts, dataloader, processor, same

from odb_nodes import Loader, ODBDataLoader, WorkerError
from odb_nodes.core.nodes.read_ahead import ReadAhead

ORPHAN_LIMIT_S = 5.0
EXIT_LIMIT_S = 10.0


def wait_until(condition, limit_s=ORPHAN_LIMIT_S):
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def assert_nobody_is_left(program, limit_s=ORPHAN_LIMIT_S):
    wait_until(lambda: not program.running(), limit_s)
    left = [" ".join(psutil.Process(pid).cmdline()) for pid in program.running()]
    assert not left, f"{len(left)} processes still run after {limit_s} s: {left}"


def complaints(errors):
    """What a program wrote to stderr, but for the progress of workers that start slowly."""
    return [line for line in errors.splitlines() if "samples in the pool before" not in line]


def finish_well(program, limit_s=120):
    """What a program printed until it ended, without a complaint."""
    code, out, errors = program.finish(limit_s)
    assert (code, complaints(errors)) == (0, []), errors
    return out


@pytest.fixture
def run(tmp_path):
    """Starts a program, and ends all that it leaves when the test is over."""
    programs = []

    def start(body, *args, **options):
        programs.append(Program(tmp_path, body, *args, **options))
        return programs[-1]

    yield start
    for program in programs:
        program.kill()


# --- a trainer that is killed ---------------------------------------------------------------------

KILLED = """
    method, *names = sys.argv[1:]
    def begin(fault=None, seconds=0.0, **options):
        return iter(w.dataloader(w.Texts(200, seconds, fault), method, **options))
    def begin_on_a_thread():
        begun = []
        thread = threading.Thread(target=lambda: begun.append(make["busy in C"]()))
        thread.start()
        thread.join()
        return begun[0]
    make = {
        "idle": begin,
        "without prefetch": lambda: begin(seconds=0.01, prefetch=0),
        "writing": lambda: begin(process_fn=w.enlarge, collate_fn=w.keep_ids),
        "sleeping": lambda: begin(w.sleep),
        "computing": lambda: begin(w.compute),
        "busy in C": lambda: begin(w.hold_the_gil, prefetch=0),
        "busy in C, of a thread that has ended": begin_on_a_thread,
    }
    iterators = [make[name]() for name in names]
    threads = [threading.Thread(target=next, args=[one], daemon=True) for one in iterators]
    for thread in threads:
        thread.start()
    for name, thread in zip(names, threads):
        if name in ("idle", "without prefetch", "writing"):
            thread.join()
    time.sleep(1)
    print("ready", flush=True)
    time.sleep(600)
"""
DOING = ["idle", "without prefetch", "writing", "sleeping", "computing", "busy in C"]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_killed_trainer_leaves_no_process(start_method, run, exhaustive):
    names = [*DOING, "busy in C, of a thread that has ended"]
    if start_method != "fork" and not exhaustive:  # where each worker imports torch
        names = ["idle", "computing"]
    program = run(KILLED, start_method, *names)
    program.line()
    assert len(program.running()) > 2 * len(names)
    os.kill(program.process.pid, signal.SIGSTOP)  # so that nobody reads what workers write
    time.sleep(0.5)
    os.kill(program.process.pid, signal.SIGKILL)
    # Those that were started last may still import torch.
    assert_nobody_is_left(program, ORPHAN_LIMIT_S if start_method == "fork" else 30)


def test_a_trainer_killed_while_its_workers_start_leaves_no_process(run):
    program = run('print("ready", flush=True)\nnext(iter(w.dataloader(w.Texts(), "spawn")))')
    program.line()
    wait_until(lambda: len(program.running()) >= 4, 30)  # with the resource tracker
    os.kill(program.process.pid, signal.SIGKILL)
    assert_nobody_is_left(program, 6 * ORPHAN_LIMIT_S)  # those that start first import torch


def test_a_process_forked_by_others_keeps_no_worker_alive(run):
    program = run("""
        import multiprocessing
        loader = w.dataloader(w.Texts())
        iterator = iter(loader)
        foreign = multiprocessing.get_context("fork").Process(target=w.sleep, args=(0,))
        foreign.start()  # with the trainer's ends of the sockets
        print(foreign.pid, *loader.worker_pids, flush=True)
        time.sleep(600)
    """)
    foreign, *workers = map(int, program.line().split())
    os.kill(program.process.pid, signal.SIGKILL)
    wait_until(lambda: not set(workers) & set(program.running()))
    assert program.running() == [foreign]


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start_method", "doing"),
    [("fork", "training"), ("spawn", "waiting")],
)
def test_ctrl_c_ends_everything(start_method, doing, run):
    program = run(
        """
        loader = w.dataloader(w.Texts(2000, fault=w.SleepFrom(40)), sys.argv[1])
        for batch in loader:
            print("step", flush=True)
            if sys.argv[2] == "training":
                time.sleep(600)
        """,
        start_method,
        doing,
    )
    program.line()
    time.sleep(1)
    os.killpg(program.session, signal.SIGINT)
    code, _, errors = program.finish(EXIT_LIMIT_S)
    assert code == -signal.SIGINT
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert errors.count("Traceback") == 1
    assert_nobody_is_left(program)


def test_ctrl_c_again_and_again(run):
    # While workers start, work and stop: a KeyboardInterrupt each time, never a hang.
    program = run("""
        loader = w.dataloader(w.Texts(3000))
        print("ready", flush=True)
        while True:
            try:
                for batch in loader:
                    print("batch", flush=True)
            except KeyboardInterrupt:
                print("caught", flush=True)
    """)
    program.line()
    program.line()
    for gap_s in (0.0, 0.003, 0.01, 0.03, 0.06, 0.1):
        os.killpg(program.session, signal.SIGINT)
        time.sleep(gap_s)
        os.killpg(program.session, signal.SIGINT)
        time.sleep(0.3)
    program.process.send_signal(signal.SIGUSR1)  # By default this ends it.
    code, out, err = program.finish(200)
    assert "WorkerError" not in err
    if code == -signal.SIGUSR1:
        assert out.count("caught") > 3
    else:  # It came outside of the `try`.
        assert code == -signal.SIGINT


def test_sigterm_to_all_is_handled_by_the_trainer_alone(run):
    # As a cluster announces preemption: the trainer finishes its step, saves and leaves.
    program = run("""
        asked = []
        def handle(*_):
            print("asked", os.getpid(), flush=True)
            asked.append(1)
        signal.signal(signal.SIGTERM, handle)
        loader = w.dataloader(w.Texts(2000, 0.001))
        for step, batch in enumerate(loader):
            if step == 3:
                os.killpg(0, signal.SIGTERM)
            if step == 20:
                break
        print(len(asked), step, flush=True)
    """)
    out = finish_well(program)
    assert out.splitlines() == [f"asked {program.process.pid}", "1 20"]


# --- a program that just ends ---------------------------------------------------------------------

ENDINGS = """
    from odb_nodes.core.nodes.read_ahead import ReadAhead
    ending, start_method = sys.argv[1:]
    if ending == "sigterm handler":
        signal.signal(signal.SIGTERM, lambda *_: None)
    fault = w.SleepFrom(30) if ending == "busy" else None
    def compute():
        end, row = time.monotonic() + 1.5, torch.ones(20_000)
        while time.monotonic() < end:
            row.add(1)
    if ending == "inside torch":  # the thread of a loader that nobody holds
        loader = Loader(ReadAhead(w.Endless(compute), 4))
    else:
        loader = w.dataloader(w.Texts(500, 0.001, fault), start_method)
    for step, batch in enumerate(loader):
        if step == 0 and ending != "next epoch":
            break
    if ending == "inside torch":
        del loader
    time.sleep(0.5)
    print("done", flush=True)
    if ending == "exception":
        raise ValueError("loss is NaN")
    if ending == "next epoch":
        next(iter(loader))
"""


@pytest.mark.parametrize(
    ("ending", "start_method"),
    [
        ("unfinished", "forkserver"),
        ("busy", "fork"),
        ("exception", "fork"),
        ("sigterm handler", "fork"),
        ("inside torch", "thread"),
    ],
)
def test_a_program_ends_without_close(ending, start_method, run):
    # Whoever uses `weakref.finalize` (here a temporary folder) before multiprocessing is imported
    # makes multiprocessing clean up first at exit: with SIGTERM, which forked workers handle too.
    header = "import tempfile\nfolder = tempfile.TemporaryDirectory()\n"
    program = run(ENDINGS, ending, start_method, header=header * (ending == "sigterm handler"))
    program.line()
    if ending == "exception":
        code, _, errors = program.finish(EXIT_LIMIT_S)
        said = complaints(errors)
        assert (code, said[0][:9], said[-1]) == (1, "Traceback", "ValueError: loss is NaN")
        assert errors.count("Traceback") == 1
    else:
        finish_well(program, EXIT_LIMIT_S)
    assert_nobody_is_left(program)


# --- leaks ----------------------------------------------------------------------------------------

EPOCHS = """
    import rank_jobs as r
    start_method, prefetch = sys.argv[1], int(sys.argv[2])
    before, shared_memory = r.held(), {*os.listdir("/dev/shm")}
    loader = w.dataloader(w.Texts(100), start_method, prefetch=prefetch)
    steps = set()
    for epoch in range(5):
        steps.add(sum(1 for batch in loader))
        for batch in loader:
            break
    assert len(steps) == 1
    loader.close()
    after = r.held()
    assert not {name: after[name] for name in after if after[name] > before[name]}, before
    deadline = time.monotonic() + 5
    while (more := {*os.listdir("/dev/shm")} - shared_memory) and time.monotonic() < deadline:
        time.sleep(0.1)  # Other programs come and go.
    assert not more
"""


@pytest.mark.parametrize(("start_method", "prefetch"), [("fork", 4), ("thread", 4)])
def test_many_epochs_leave_nothing_behind(start_method, prefetch, run):
    finish_well(run(EPOCHS, start_method, prefetch))


def own_threads():
    return [t.name for t in threading.enumerate() if "odb_nodes" in t.name or "_populate" in t.name]


def divide_by_zero(index):
    return 1 // 0


@pytest.mark.parametrize(
    ("when", "method", "prefetch"),
    [
        ("begun", "fork", 4),
        ("unfinished", "thread", 4),
        ("finished", "thread", 0),
        ("broken", "fork", 4),
    ],
)
def test_a_loader_that_is_forgotten_is_freed(when, method, prefetch):
    threads = own_threads()
    fault = None if when != "broken" else divide_by_zero
    loader = dataloader(Texts(100, fault=fault), method, prefetch=prefetch)
    iterator = iter(loader)
    pids = loader.worker_pids
    if when == "unfinished":
        next(iterator)
    elif when == "finished":
        list(iterator)
    elif when == "broken":
        with pytest.raises(ValueError, match="ZeroDivisionError"):
            next(iterator)
    del iterator, loader
    gc.collect()
    assert wait_until(lambda: own_threads() == threads), own_threads()
    assert wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def test_a_forgotten_loader_may_be_collected_on_the_thread_that_reads_ahead(monkeypatch):
    unraisable, go, done = [], threading.Event(), threading.Event()
    monkeypatch.setattr(
        sys, "unraisablehook", lambda unraised: unraisable.append(unraised.exc_value)
    )

    def collect():
        assert go.wait(20)
        gc.collect()
        done.set()

    threads = own_threads()
    loader = Loader(ReadAhead(Endless(collect), 4))
    loader.itself = loader  # garbage for the collector alone
    gc.disable()
    try:
        next(iter(loader))
        del loader
        go.set()
        assert done.wait(20)
    finally:
        gc.enable()
    assert wait_until(lambda: own_threads() == threads), own_threads()
    assert unraisable == []


# --- neighbours -----------------------------------------------------------------------------------


def ids(batches):
    return [batch["id"].tolist() for batch in batches]


@pytest.mark.parametrize("fate", ["killed", "closed"])
def test_of_two_loaders_one_may_lose_a_worker_or_be_closed(fate):
    with dataloader(Texts(100)) as loader:
        alone = ids(loader)
    # The workers of the second are forked while the sockets of the first are open.
    with dataloader(Texts(100)) as victim, dataloader(Texts(100)) as other:
        iterator, others = iter(victim), iter(other)
        seen = [ids([next(others)]), ids([next(iterator)])]
        if fate == "closed":
            victim.close()
            victim.load_state_dict(victim.state_dict())
            assert seen[1] + ids(victim) == alone
        else:
            os.kill(victim.worker_pids[0], signal.SIGKILL)
            started = time.monotonic()
            with pytest.raises(WorkerError, match="signal 9"):
                list(iterator), list(victim)  # maybe all was processed before
            assert time.monotonic() - started < 10
        assert [seen[0] + ids(others), ids(other)] == [alone, alone]


def test_workers_start_while_other_threads_are_busy(run):
    # A forked child has none of these threads, but their locks as they were. (Not among them: the
    # lock of a file that threads write to; a forked worker must open its own. Nor that of a module
    # that a thread imports meanwhile, which Python leaves locked in the child.)
    program = run("""
        import importlib, logging, colorsys
        done = threading.Event()
        matrix = torch.rand(300, 300)
        logging.basicConfig(handlers=[logging.NullHandler()], level=logging.INFO)
        torch.set_num_threads(2)

        def repeat(do):
            while not done.is_set():
                do()

        def iterate():
            with w.dataloader(w.Texts(60)) as loader:
                repeat(lambda: list(loader))

        busy = [
            lambda: repeat(lambda: logging.info("a line %s", list(range(100)))),
            lambda: repeat(lambda: matrix @ matrix),
            lambda: repeat(lambda: importlib.reload(colorsys)),
            iterate,
        ]
        threads = [threading.Thread(target=one) for one in busy]
        for thread in threads:
            thread.start()
        groups = []
        try:
            for turn in range(6):
                with w.dataloader(w.Texts(60), process_fn=w.log_and_multiply) as loader:
                    groups.append([batch["id"].tolist() for batch in loader])
        finally:
            done.set()
        for thread in threads:
            thread.join()
        print(groups == groups[:1] * 6)
    """)
    assert finish_well(program) == "True\n"


# --- a forked child has a copy of the loader, and owns nothing of what the loader has started ----


LIMIT_S = 20


def in_child(action):
    """Run an action in a forked child; return what it returned, or raised, as text."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        signal.alarm(LIMIT_S)  # ends the child: a hang
        try:
            try:
                said = str(action())
            except Exception:
                said = traceback.format_exc()
            os.write(writer, said.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answers:
        said = answers.read().decode()
    assert os.waitpid(pid, 0)[1] == 0, "the child hung"
    return said


def first_ids(batches):
    return [int(row[0]) for batch in batches for row in batch["input_ids"]]


def forget(loader, iterator):
    del loader, iterator
    gc.collect()


@pytest.mark.parametrize(("method", "prefetch"), [("fork", 0), ("thread", 4)])
def test_using_a_loader_in_a_forked_child_is_an_error_and_harms_no_parent(method, prefetch):
    with dataloader(Texts(), method, prefetch=prefetch) as loader:
        iterator = iter(loader)
        first = next(iterator)
        for action in (lambda: next(iterator), lambda: iter(loader), loader.state_dict):
            said = in_child(action)
            assert f"WorkerError: this loader was started in process {os.getpid()}; " in said
            assert "Make another loader in the child process." in said
        assert in_child(loader.close) == in_child(lambda: forget(loader, iterator)) == "None"
        assert sorted(first_ids([first, *iterator])) == list(range(200))


def test_a_node_that_a_child_closes_goes_on_in_its_parent():
    node = processor(same, num_workers=2, chunk_size=4)
    node.reset(None)
    first = next(node)

    def again():
        with pytest.raises(WorkerError, match="Make another loader"):
            node.reset(None)
        node.close()
        node.reset(None)  # with workers of its own
        try:
            return len(list(node))
        finally:
            node.close()

    assert in_child(again) == "50"
    assert len([first, *node]) == 50
    node.close()


def test_a_loader_without_threads_or_not_begun_works_in_a_forked_child():
    loader = ODBDataLoader(Texts(), token_budget=64, window=12, prefetch=0)
    iterator = iter(loader)
    next(iterator)
    there = in_child(lambda: first_ids(iterator))
    assert there == str(first_ids(iterator))
    with dataloader(Texts()) as loader:
        assert in_child(lambda: (len(first_ids(loader)), loader.close())[0]) == "200"
        assert len(first_ids(loader)) == 200


@pytest.mark.parametrize("method", ["fork", "thread"])
def test_a_child_that_ends_by_sys_exit_disturbs_nobody(method, tmp_path):
    body = """
        loader = w.dataloader(w.Texts(), sys.argv[1])
        iterator = iter(loader)
        next(iterator)
        if (pid := os.fork()) == 0:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        print(sum(1 for _ in iterator) > 10)
    """
    with Program(tmp_path, body, method) as program:
        assert program.finish(200) == (0, "True\n", "")


def fork_once(index):
    """Leave a child behind that goes on as if it were the worker."""
    if index == 7:
        os.fork()
    return {"input_ids": [index + 1]}


def test_a_child_that_processing_has_forked_ends_and_takes_nothing():
    data = list(range(100))
    options = {"process_fn": fork_once, "shuffle": False, "window": 8, "num_workers": 1}
    with ODBDataLoader(data, token_budget=10, **options) as loader:
        first_ids = [int(i) for batch in loader for i in batch["input_ids"].flatten()]
        (worker,) = loader.worker_pids
        (child,) = psutil.Process(worker).children()
        deadline = time.monotonic() + LIMIT_S
        while child.status() != psutil.STATUS_ZOMBIE:  # which the worker does not reap
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert sorted(first_ids) == [index + 1 for index in data]
