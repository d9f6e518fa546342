"""Canaries: what we rely on inside of torch.distributed. Two gloo groups live in this process."""

import gc
import sys
import threading
import time
from datetime import timedelta
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from canary import relies_on

from odb_nodes._compat import torch_distributed as compat

USED_IN = "_compat/torch_distributed.py (`GlooExchange`)"
SLICE = timedelta(milliseconds=50)
LONG = timedelta(seconds=30)

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")


@pytest.fixture
def groups():
    """The groups of two ranks, which meet at a store of this process."""
    store = dist.HashStore()
    made = {}

    def connect(rank):
        made[rank] = compat.gloo_group(dist.PrefixStore("canary", store), rank, 2, 30.0)

    with relies_on("torch", "torch.distributed.ProcessGroupGloo, built by hand", USED_IN):
        threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(made) == [0, 1]
    yield made
    made.clear()
    gc.collect()


class Call:
    """An all-gather of one rank, which sends its number."""

    def __init__(self, groups, rank):
        self.rows = torch.zeros((2, 3), dtype=torch.int64)
        self.own = torch.full((3,), rank + 1)
        self.work = compat.begin_all_gather(groups[rank], self.rows.unbind(), self.own)


def test_a_group_is_not_registered_with_the_job(groups):
    with relies_on("torch", "a ProcessGroupGloo that init_process_group did not make", USED_IN):
        assert not dist.is_initialized()
        assert groups[0].rank() == 0
        assert groups[1].size() == 2


def test_a_wait_that_times_out_leaves_its_call_under_way(groups):
    with relies_on("torch", "Work.wait(timeout), is_completed() and their message", USED_IN):
        first = Call(groups, 0)
        with pytest.raises(RuntimeError) as raised:
            first.work.wait(SLICE)
        assert compat.is_wait_timeout(raised.value), str(raised.value)
        assert not first.work.is_completed()
        second = Call(groups, 1)
        for call in (first, second):
            call.work.wait(LONG)
            assert call.work.is_completed()
            assert call.rows.tolist() == [[1, 1, 1], [2, 2, 2]]


def test_a_call_does_not_time_out_within_gloo(groups):
    with relies_on("torch", "AllgatherOptions.timeout", USED_IN):
        options = dist.distributed_c10d.AllgatherOptions()
        options.timeout = timedelta(days=365)
        assert options.timeout == timedelta(days=365)
        first = Call(groups, 0)
        for _ in range(3):
            with pytest.raises(RuntimeError):
                first.work.wait(SLICE)
        second = Call(groups, 1)
        first.work.wait(LONG)
        second.work.wait(LONG)


def test_calls_meet_in_their_order(groups):
    with relies_on("torch", "the matching of all-gathers of a group by their order", USED_IN):
        early = [Call(groups, 0), Call(groups, 0)]
        late = []
        for _ in range(2):
            late.append(Call(groups, 1))
            late[-1].work.wait(LONG)
        for call in early:
            call.work.wait(LONG)
            assert call.rows.tolist() == [[1, 1, 1], [2, 2, 2]]


def test_a_lost_rank_ends_a_call_with_an_error_that_is_no_timeout(groups):
    with relies_on("torch", "the error of a call whose peer is gone", USED_IN):
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


def test_a_store_over_tcp_can_be_cloned():
    with relies_on("torch", "TCPStore.clone", USED_IN):
        store = dist.TCPStore("127.0.0.1", 0, 1, True)
        clone = store.clone()
        assert clone is not store
        clone.set("key", "value")
        assert store.get("key") == b"value"


def test_the_store_of_the_job_is_found():
    with relies_on("torch", "torch.distributed.distributed_c10d._get_default_store", USED_IN):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            compat.job_store().set("canary", "1")
            assert dist.distributed_c10d._get_default_store().get("canary") == b"1"
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize(("by_agent", "host"), [("True", "torchrun"), ("False", "rank 0")])
def test_the_host_of_the_store_is_known(by_agent, host, monkeypatch):
    name = "TORCHELASTIC_USE_AGENT_STORE"
    with relies_on("torch", f"the environment variable {name}, set by torchrun", USED_IN):
        monkeypatch.setenv(name, by_agent)
        assert import_module("torch.distributed.rendezvous")._torchelastic_use_agent_store() == (
            host == "torchrun"
        )
        assert compat.store_host() == host


def test_a_kept_object_outlives_its_names():
    class Group:
        pass

    group = Group()
    before = sys.getrefcount(group)
    compat.keep(group)
    assert sys.getrefcount(group) == before + 1
    compat.release(group)
    assert sys.getrefcount(group) == before
