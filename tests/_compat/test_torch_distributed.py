"""Canaries: what we rely on inside of torch.distributed. Two gloo groups live in this process."""

import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from canary import relies_on

from odb_nodes._compat import torch_distributed as compat

SLICE = timedelta(milliseconds=50)
LONG = timedelta(seconds=30)

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")


def canary(what):
    return relies_on("torch", what, "_compat/torch_distributed.py (`GlooExchange`)")


@pytest.fixture
def groups():
    """The groups of two ranks, which meet at a store of this process."""
    store = dist.HashStore()

    def connect(rank):
        return compat.gloo_group(dist.PrefixStore("canary", store), rank, 2, 30.0)

    with canary("torch.distributed.ProcessGroupGloo, built by hand"):
        with ThreadPoolExecutor(2) as pool:
            made = dict(enumerate(pool.map(connect, range(2))))
        assert not dist.is_initialized()
        assert (made[0].rank(), made[1].size()) == (0, 2)
    yield made
    made.clear()
    gc.collect()


class Call:
    """An all-gather of one rank, which sends its number."""

    def __init__(self, groups, rank):
        self.rows = torch.zeros((2, 3), dtype=torch.int64)
        self.own = torch.full((3,), rank + 1)
        self.work = compat.begin_all_gather(groups[rank], self.rows.unbind(), self.own)

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
        assert compat.is_wait_timeout(raised.value), str(raised.value)
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
    assert not compat.is_wait_timeout(raised.value), str(raised.value)


@pytest.mark.skipif(not hasattr(dist.TCPStore, "clone"), reason="is of later versions of torch")
@canary("collectives as operations of c10d, which a TorchDispatchMode sees")
def test_a_collective_is_refused_and_no_other_operation():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    one = torch.ones(1)
    try:
        with compat.RefusingCollectives("not now"):
            for call in (
                lambda: dist.all_reduce(one),
                lambda: dist.all_gather([torch.zeros(1)], one),
                lambda: dist.broadcast(one, 0),
                dist.barrier,
            ):
                with pytest.raises(RuntimeError, match="not now"):
                    call()
            assert one + 1 == 2
        dist.all_reduce(one)
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
        compat.job_store().set("canary", "1")
        assert dist.distributed_c10d._get_default_store().get("canary") == b"1"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("by_agent", "host"), [("True", "torchrun"), ("False", "rank 0")])
@canary("the environment variable TORCHELASTIC_USE_AGENT_STORE, set by torchrun")
def test_the_host_of_the_store_is_known(by_agent, host, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", by_agent)
    uses_agent = import_module("torch.distributed.rendezvous")._torchelastic_use_agent_store()
    assert uses_agent == (host == "torchrun")
    assert compat.store_host() == host


def test_a_kept_object_outlives_its_names():
    group = type("Group", (), {})()
    before = sys.getrefcount(group)
    compat.keep(group)
    assert sys.getrefcount(group) == before + 1
    compat.release(group)
    assert sys.getrefcount(group) == before
