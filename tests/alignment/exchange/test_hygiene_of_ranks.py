"""Ranks hold no more of the system after many epochs than after one, and nothing after the end."""

import pytest
from rank_jobs import run_ranks


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
    from odb_nodes.alignment.exchange import GlooExchange, Interrupted
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


@pytest.mark.parametrize(("what", "action"), [("loader", "iter"), ("node", "next")])
def test_a_forked_child_of_a_rank_is_told_so_and_its_parent_goes_on(what, action, tmp_path):
    body = """
    from odb_nodes.contract.graph import walk
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
        assert "Make a loader of its own" in said
        assert left == ranks[0][2] > 3
