"""What a rank has left behind is never taken for what follows, and the other way round."""

import threading
import time

import aligned_ranks
import numpy as np
import pytest
import torch.distributed as dist

from odb_nodes import PeerError, StateError
from odb_nodes.core.alignment.exchange import Channel, Interrupted
from odb_nodes.core.alignment.exchange import store as store_module
from odb_nodes.core.alignment.exchange.channel import _ROUND as ROUND
from odb_nodes.core.alignment.exchange.store import BoundedStore, StoreLost

CONFIG = {"epoch": 0, "step": 0, "RankAligner": {"seed": 0}}


class Rank:
    """A channel, and what its program may do with it."""

    def __init__(self, exchange, left_behind):
        self.exchange, self.rank = exchange, exchange.rank
        self.left_behind = left_behind  # an event of all ranks
        self.channel = Channel(self.exchange, 64)

    def agree(self, step=0, config=CONFIG):
        self.channel.agree({**config, "step": step})

    def begin(self, step=0):
        self.channel.begin()
        self.agree(step)

    def gather(self, value):
        return self.channel.gather(np.array([value]), "round 0")[:, 0].tolist()

    def leave_behind(self, call):
        """Send what `call` sends, and give up waiting for the others."""
        calls = self.exchange._calls

        def run():
            with pytest.raises(Interrupted):
                call()
                raise Interrupted  # What does not raise, `fail`, returns.

        thread = threading.Thread(target=run)
        thread.start()
        while self.exchange._calls == calls:
            time.sleep(0.001)
        self.exchange.interrupt()
        thread.join(10)
        assert not thread.is_alive()
        self.exchange.resume()
        self.left_behind.set()


def on_ranks(world_size, run, timeout_s=20.0):
    """What `run(rank)` returns on each rank, or the error that it raised."""
    left_behind = threading.Event()

    def caught(exchange):
        try:
            return run(Rank(exchange, left_behind))
        except (PeerError, StateError) as error:
            return error

    return aligned_ranks.on_ranks(world_size, caught, timeout_s)


LEFT_BEHIND = {
    "hello": lambda rank: rank.agree(step=3),
    "round": lambda rank: rank.gather(7),
    "failure": lambda rank: rank.channel.fail(OSError("gone"), "round 0"),
    "bad state": lambda rank: rank.channel.fail(StateError("gone"), "reset"),
}


def begin_and_leave(rank, kind):
    """Begin an epoch, of which rank 0 leaves something behind."""
    rank.begin()
    rank.gather(rank.rank)
    if kind == "hello":
        rank.channel.begin()
    if rank.rank == 0:
        rank.leave_behind(lambda: LEFT_BEHIND[kind](rank))
    assert rank.left_behind.wait(10)


@pytest.mark.parametrize("kind", LEFT_BEHIND)
def test_messages_of_a_left_epoch_harm_no_new_one(kind):
    def run(rank):
        begin_and_leave(rank, kind)
        rank.begin(step=5)
        return rank.gather(rank.rank)

    assert on_ranks(3, run) == [[0, 1, 2]] * 3


def fail_on_rank_1(rank):
    """What a rank does whose state, or another's, is refused."""
    rank.channel.begin()
    if rank.rank == 1:
        rank.channel.fail(StateError("not this one"), "reset")
        raise StateError("mine")
    rank.agree()


@pytest.mark.parametrize("kind", ["hello", "round", "failure"])
def test_a_bad_state_reaches_ranks_that_left_something_behind(kind):
    def run(rank):
        begin_and_leave(rank, kind)
        fail_on_rank_1(rank)

    check_that_a_bad_state_is_told(3, run)


@pytest.mark.parametrize("busy", [0, 1])
def test_a_bad_state_is_reported_when_one_rank_began_again(busy):
    def run(rank):
        if rank.rank == busy:
            rank.channel.begin()
        fail_on_rank_1(rank)

    check_that_a_bad_state_is_told(2, run)


def check_that_a_bad_state_is_told(world_size, run):
    start = time.monotonic()
    first, own, *others = on_ranks(world_size, run)
    assert time.monotonic() - start < 10
    for other in (first, *others):
        assert type(other) is PeerError
        assert "rank 1 failed in reset: StateError: not this one" in str(other)
    assert str(own) == "mine"


def test_a_hello_that_is_about_to_be_left_is_no_error():
    def run(rank):
        rank.begin()
        rank.gather(0)
        rank.channel.begin()
        if rank.rank == 0:  # It says hello, again and again, before the state is loaded.
            threading.Timer(3, rank.exchange.interrupt).start()
            with pytest.raises(Interrupted):
                rank.agree()
            rank.exchange.resume()
        rank.begin(step=5)
        return rank.gather(rank.rank)

    assert on_ranks(2, run) == [[0, 1]] * 2


def test_a_rank_that_began_once_more_without_a_step_is_met():
    def run(rank):
        if rank.rank == 1:
            rank.channel.begin()  # It asked its loader for a state, say.
        rank.begin()
        first = rank.gather(rank.rank)
        rank.begin()
        return first, rank.gather(rank.rank)

    assert on_ranks(2, run) == [([0, 1], [0, 1])] * 2


def test_a_rank_that_leaves_alone_is_an_error_until_all_begin_again():
    def run(rank):
        rank.begin()
        rank.gather(rank.rank)
        if rank.rank == 0:
            with pytest.raises(PeerError, match=r"rank 1 has left it and begun anew"):
                rank.gather(0)
            rank.begin(step=2)
        else:
            rank.begin(step=2)
        return rank.gather(rank.rank)

    assert on_ranks(2, run) == [[0, 1]] * 2


def test_a_rank_that_never_leaves_is_an_error_in_time():
    def run(rank):
        rank.begin()
        if rank.rank == 0:
            rank.begin()
        else:
            while True:  # It does not look at what it hears.
                rank.channel._send(ROUND, np.array([1]), "round 0")

    errors = on_ranks(2, run, timeout_s=3.0)
    assert "rank 1 stays in an epoch that the other ranks have left" in str(errors[0])


def test_other_places_and_configurations_are_the_same_error_on_all_ranks():
    def run(rank):
        rank.channel.begin()
        names = [f"files/{rank.rank}/{i}" for i in range(300)]  # more than one message takes
        config = {"RankAligner": {"seed": rank.rank % 2}, "JsonlSource": {"files": names}}
        if rank.rank == 0:
            config["ShardedSampler"] = {"size": 9}
        rank.agree(step=rank.rank // 2, config=config)

    errors = {str(error) for error in on_ranks(3, run)}
    assert len(errors) == 1
    (error,) = errors
    assert "`step` is 0 on rank 0, 1, 1 on rank 2" in error
    assert "`RankAligner.seed` is 0 on rank 0, 2, 1 on rank 1" in error
    assert '`JsonlSource.files` is ["files/0/0", ' in error
    assert "`ShardedSampler` is absent on rank 1, 2" in error
    assert "ShardedSampler.size" not in error


@pytest.mark.parametrize("sizes", [[0, 0], [3, 1000], [4096, 1]])
def test_bytes_of_any_lengths(sizes):
    def run(rank):
        rank.begin()
        return rank.channel.gather_bytes(bytes([rank.rank + 1]) * sizes[rank.rank], "here")

    expected = [bytes([rank + 1]) * size for rank, size in enumerate(sizes)]
    assert on_ranks(2, run) == [expected] * 2


# --- a store that does not answer is given up in time, and its calls keep their order ------------


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
