"""A store that does not answer is given up in time, and its calls keep their order."""

import threading
import time

import pytest
import torch.distributed as dist

from odb_nodes.alignment.exchange import Interrupted
from odb_nodes.alignment.exchange import store as store_module
from odb_nodes.alignment.exchange.store import BoundedStore, StoreLost


class StoppedStore:
    """A store whose host is stopped until `go`."""

    def __init__(self):
        self.go, self.calls = threading.Event(), []

    def set(self, key, value):
        assert self.go.wait(20)
        self.calls.append((key, value))

    def get(self, key):
        raise RuntimeError("Failed to recv, got 0 bytes.\nException raised from recv")


@pytest.fixture
def stopped(monkeypatch):
    store = StoppedStore()
    monkeypatch.setattr(store_module.compat, "job_store", lambda: store)
    yield store
    store.go.set()


def test_a_call_that_is_given_up_in_time_comes_before_the_next(stopped):
    store, start = BoundedStore(5.0), time.monotonic()
    for value in ("1", "2"):
        with pytest.raises(StoreLost, match="rank 0, which hosts .* not answered for 0.1 s"):
            store.call("set", "key", value, limit_s=0.1)
    assert 0.2 <= time.monotonic() - start < 3
    stopped.go.set()
    store.call("set", "key", "3", limit_s=5.0)
    assert stopped.calls == [("key", "1"), ("key", "2"), ("key", "3")]


def test_a_wait_can_be_interrupted(stopped):
    def interrupt():
        raise Interrupted

    start = time.monotonic()
    with pytest.raises(Interrupted):
        BoundedStore(5.0).call("set", "key", "1", limit_s=60.0, check=interrupt)
    assert time.monotonic() - start < 5


def test_a_store_that_is_gone_is_said_in_one_line(stopped, monkeypatch):
    gone = r"which hosts the store of the job, is gone \(Failed to recv, got 0 bytes.\)$"
    with pytest.raises(StoreLost, match=f"^rank 0, {gone}"):
        BoundedStore(5.0).call("get", "key", limit_s=5.0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(StoreLost, match="torchrun, which hosts the store"):
        BoundedStore(5.0).call("get", "key", limit_s=5.0)


def test_keys_stand_below_the_prefix(monkeypatch):
    below = dist.HashStore()
    monkeypatch.setattr(store_module.compat, "job_store", lambda: below)
    store = BoundedStore(5.0)
    store.use_prefix("odb_nodes")
    store.call("set", "key", "1", limit_s=5.0)
    assert below.get("odb_nodes/key") == b"1"
