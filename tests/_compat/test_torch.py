"""Canaries: what we rely on inside of torch."""

import gc
import multiprocessing
import os
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from multiprocessing import forkserver, process

import pytest
import torch
import torch.distributed as dist
from canary import relies_on

from odb_nodes._compat import torch as compat
from odb_nodes._compat import torch_distributed as distributed
from odb_nodes._compat.multiprocessing import keep_from_forks

Pair = namedtuple("Pair", ("a", "b"))


class Pinned:
    def pin_memory(self):
        return "pinned"


@relies_on("torch", "torch.utils.data._utils.pin_memory.pin_memory", "_compat/torch.py")
def test_pin_memory_reaches_into_any_nesting_and_leaves_the_rest():
    batch = {"a": Pinned(), "b": [Pinned(), 1], "c": Pair(Pinned(), "text"), "d": None}
    pinned = compat.pin_memory(batch)
    assert pinned == {"a": "pinned", "b": ["pinned", 1], "c": Pair("pinned", "text"), "d": None}
    assert type(pinned["c"]) is Pair, pinned


@relies_on("torch", "torch.default_generator", "_support/seeds.py")
def test_the_default_generator_is_the_one_that_is_seeded():
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(7)
        first = torch.rand(3)
        torch.manual_seed(7)
        assert torch.equal(first, torch.rand(3))


@relies_on("torch", "GradScaler._per_optimizer_states", "_compat/torch.py (`find_budget`)")
def test_a_scaler_forgets_the_step_that_failed():
    weight = torch.ones(2, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu")
    for again in (False, True):
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        if again:
            break
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)
        compat.forget_step(scaler)


@relies_on("torch", "OptimizedModule._orig_mod", "_compat/torch.py")
def test_a_compiled_model_has_the_one_that_it_was_made_of():
    model = torch.nn.Linear(2, 2)
    assert compat.uncompiled(torch.compile(model)) is compat.uncompiled(model) is model


# canaries: what we rely on inside of torch.distributed. Two gloo groups live in this process


SLICE = timedelta(milliseconds=50)
LONG = timedelta(seconds=30)

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")


def canary(behaviour):
    return relies_on("torch", behaviour, "_compat/torch_distributed.py (`GlooExchange`)")


@pytest.fixture
def groups():
    """The groups of two ranks, which meet at a store of this process."""
    store = dist.HashStore()

    def connect(rank):
        return distributed.gloo_group(dist.PrefixStore("canary", store), rank, 2, 30.0)

    with canary("torch.distributed.ProcessGroupGloo, built by hand"):
        with ThreadPoolExecutor(2) as pool:
            groups = dict(enumerate(pool.map(connect, range(2))))
        assert not dist.is_initialized()
        assert (groups[0].rank(), groups[1].size()) == (0, 2)
    yield groups
    groups.clear()
    gc.collect()


class Call:
    """An all-gather of one rank, which sends its number."""

    def __init__(self, groups, rank):
        self.rows = torch.zeros((2, 3), dtype=torch.int64)
        self.tensor = torch.full((3,), rank + 1)
        self.work = distributed.begin_all_gather(groups[rank], self.rows.unbind(), self.tensor)

    def ends(self):
        self.work.wait(LONG)
        return self.work.is_completed() and self.rows.tolist() == [[1, 1, 1], [2, 2, 2]]


@canary("Work.wait(timeout), is_completed() and their message, or AllgatherOptions.timeout")
def test_a_wait_that_times_out_leaves_its_call_under_way(groups):
    options = dist.distributed_c10d.AllgatherOptions()
    options.timeout = timedelta(days=365)
    assert options.timeout == timedelta(days=365)
    first = Call(groups, 0)
    for _ in range(3):
        with pytest.raises(RuntimeError) as raised:
            first.work.wait(SLICE)
        assert distributed.is_wait_timeout(raised.value), str(raised.value)
        assert not first.work.is_completed()
    assert Call(groups, 1).ends() and first.ends()


@canary("the matching of all-gathers of a group by their order")
def test_calls_meet_in_their_order(groups):
    early = [Call(groups, 0), Call(groups, 0)]
    assert all(Call(groups, 1).ends() for _ in range(2))
    assert all(call.ends() for call in early)


@canary("the error of a call whose peer is gone")
def test_a_lost_rank_ends_a_call_with_an_error_that_is_no_timeout(groups):
    call = Call(groups, 0)
    groups.pop(1)
    gc.collect()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with pytest.raises(RuntimeError) as raised:
            call.work.wait(SLICE)
        if call.work.is_completed():
            break
    assert call.work.is_completed()
    assert not distributed.is_wait_timeout(raised.value), str(raised.value)


@pytest.mark.skipif(not hasattr(dist.TCPStore, "clone"), reason="is of later versions of torch")
@canary("collectives as operations of c10d, which a TorchDispatchMode sees")
def test_a_collective_is_refused_and_no_other_operation():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    tensor = torch.ones(1)
    try:
        with distributed.RefusingCollectives("not now"):
            for call in (
                lambda: dist.all_reduce(tensor),
                lambda: dist.all_gather([torch.zeros(1)], tensor),
                lambda: dist.broadcast(tensor, 0),
                dist.barrier,
            ):
                with pytest.raises(RuntimeError, match="not now"):
                    call()
            assert tensor + 1 == 2
        dist.all_reduce(tensor)
    finally:
        dist.destroy_process_group()


@canary("TCPStore.clone")
def test_a_store_over_tcp_can_be_cloned():
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    clone = store.clone()
    assert clone is not store
    clone.set("key", "value")
    assert store.get("key") == b"value"


@canary("torch.distributed.distributed_c10d._get_default_store")
def test_the_store_of_the_job_is_found():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        distributed.job_store().set("canary", "1")
        assert dist.distributed_c10d._get_default_store().get("canary") == b"1"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("by_agent", "host"), [("True", "torchrun"), ("False", "rank 0")])
@canary("the environment variable TORCHELASTIC_USE_AGENT_STORE, set by torchrun")
def test_the_host_of_the_store_is_known(by_agent, host, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", by_agent)
    uses_agent = import_module("torch.distributed.rendezvous")._torchelastic_use_agent_store()
    assert uses_agent == (host == "torchrun")
    assert distributed.store_host() == host


def test_a_kept_object_outlives_its_names():
    group = type("Group", (), {})()
    before = sys.getrefcount(group)
    distributed.keep_alive(group)
    assert sys.getrefcount(group) == before + 1
    distributed.stop_keeping_alive(group)
    assert sys.getrefcount(group) == before


# --- canaries: what we rely on inside of multiprocessing -----------------------------------------


def test_the_server_that_forks_has_a_known_process_id():
    if not hasattr(forkserver._forkserver, "_forkserver_pid"):
        version = ".".join(map(str, sys.version_info[:3]))
        pytest.fail(
            f"Python {version} has changed: `_forkserver._forkserver_pid` of "
            "`multiprocessing.forkserver` is not what odb_nodes/_compat/multiprocessing.py relies "
            "on."
        )


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
