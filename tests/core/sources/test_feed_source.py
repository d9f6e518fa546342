"""What others make of the items of a source: in order of `put`, each once, after any restart."""

import multiprocessing
import os
import pickle
import socket
import threading
import time
from contextlib import closing, contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from aligned_ranks import on_ranks
from refusals import refuses

from odb_nodes import (
    FeedClient,
    FeedSource,
    IterableSource,
    LengthObserver,
    ODBDataLoader,
    PackedCollate,
    ShardedSampler,
    Skipped,
    StateError,
    TokenBudget,
    WindowBucketer,
    WorkerError,
    pop_step_info,
)
from odb_nodes.core.collate.rows import RowsCollate, RowsObserve
from odb_nodes.core.sources import feed_client, feed_source
from odb_nodes.errors import SampleError

PACKED = TokenBudget(256, layout="packed")


def feed_of(size=40, **options):
    """A feed over the indices 0 to `size` in order."""
    options = {"max_ahead": 8, "timeout_s": 30.0, **options}
    return FeedSource(ShardedSampler(size, shuffle=False, rank=0, world_size=1), **options)


def rows_of(index):
    """Two answers to prompt `index`, of unlike length."""
    return [{"input_ids": [index] * (3 + 7 * index % 31 + row)} for row in range(2)]


@contextmanager
def generators(feed, make=rows_of, count=2):
    """Threads that put what `make` returns, for as long as the feed is open."""

    def run():
        for request in feed.requests():
            feed.put(request.key, make(request.item))

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        feed.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def loader_over(feed, **options):
    options = {"token_budget": PACKED, "window": 4, "prefetch": 0, **options}
    return ODBDataLoader(feed, **options)


def keys_of(loader):
    return [key for batch in loader for key in pop_step_info(batch).keys]


def test_items_come_in_the_order_in_which_they_are_put():
    feed = feed_of(4)
    feed.reset()
    first, second, third, last = (feed.request() for _ in range(4))
    assert [first.item, last.item] == [0, 3] and feed.in_flight == [0, 1, 2, 3]
    for request in (third, first, last, second):
        assert feed.put(request.key, rows_of(request.item))
    items = []
    while (item := next(feed, None)) is not None:
        items.append(item)
        assert feed.item_key().key == item[0]["input_ids"][0]
    assert items == [rows_of(2), rows_of(0), rows_of(3), rows_of(1)]


def test_each_key_is_trained_once_in_each_epoch_and_its_rows_share_a_batch():
    feed = feed_of()
    with loader_over(feed) as loader, generators(feed):
        for _ in range(2):
            keys = []
            for batch in loader:
                info = pop_step_info(batch)
                ids = batch["input_ids"][0]
                rows = np.split(ids.numpy(), batch["cu_seq_lens_q"][1:-1].numpy())
                assert sorted(int(row[0]) for row in rows) == sorted([*info.keys] * 2)
                assert len(ids) <= PACKED.tokens and info.local_tokens == len(ids)
                assert info.local_targets == len(ids) - len(rows)
                keys += info.keys
            assert sorted(keys) == [*range(40)]


def test_answers_that_share_their_prompt_cost_it_once():
    def answers(index):
        prompt, masked = [index] * 20, [-100] * 20
        return [
            {"input_ids": [*prompt, *answer], "labels": [*masked, *answer]}
            for answer in ([1] * 3, [2] * (4 + index % 5))
        ]

    feed = feed_of()
    collate = RowsCollate(PackedCollate.of(PACKED, mask_dtype=torch.bool), share_prefix=True)
    with loader_over(feed, collate_fn=collate) as loader, generators(feed, answers):
        keys = []
        for batch in loader:
            info = pop_step_info(batch)
            assert batch["input_ids"].numel() == info.local_tokens <= PACKED.tokens
            assert info.local_tokens == sum(20 + 3 + 1 + 4 + key % 5 for key in info.keys)
            keys += info.keys
    assert sorted(keys) == [*range(40)]


def test_after_a_restore_at_any_step_each_key_is_trained_once():
    feed = feed_of()
    states = [(0, None)]
    keys = []
    with loader_over(feed) as loader, generators(feed):
        for batch in loader:
            keys += pop_step_info(batch).keys
            states.append((len(keys), loader.state_dict()))
    for count, state in states[1:]:
        feed = feed_of()
        with loader_over(feed) as loader, generators(feed):
            loader.load_state_dict(state)
            assert sorted(keys[:count] + keys_of(loader)) == [*range(40)]


def test_ranks_of_unlike_speed_train_long_items_as_often_as_short_ones():
    """Also over a restore: the same steps on both ranks, and each key once, with all its tokens."""

    def tokens_of(index):
        return sum(len(row["input_ids"]) for row in rows_of(index))

    def run(exchange, state=None, stop=None):
        rank = exchange.rank
        feed = FeedSource(ShardedSampler(50, rank=rank, world_size=2), max_ahead=8, timeout_s=30)

        def make(index):
            time.sleep(0.00003 * tokens_of(index) * (1 + 4 * rank))
            return rows_of(index)

        infos, state_of = [], None
        with loader_over(feed, process_group=exchange) as loader, generators(feed, make):
            if state is not None:
                loader.load_state_dict(state[rank])
            for step, batch in enumerate(loader):
                infos.append(pop_step_info(batch))
                if step == stop:
                    state_of = loader.state_dict()
                    break
        return infos, state_of

    whole = [infos for infos, _ in on_ranks(2, run)]
    begun = on_ranks(2, partial(run, stop=3))
    states = [state for _, state in begun]
    resumed = on_ranks(2, partial(run, state=states))
    joined = [first + rest for (first, _), (rest, _) in zip(begun, resumed, strict=True)]
    for ranks in (whole, joined):
        steps = [[info.step for info in infos] for infos in ranks]
        assert steps[0] == steps[1] == [*range(len(steps[0]))]
        infos = [info for infos in ranks for info in infos if not info.is_filler]
        assert sorted(key for info in infos for key in info.keys) == [*range(50)]
        for info in infos:
            assert info.local_tokens == sum(map(tokens_of, info.keys))


def test_a_state_has_what_was_put_and_issues_again_what_was_not():
    feed = feed_of(5)
    feed.reset()
    for _ in range(4):
        feed.request()
    feed.put(2, rows_of(2), version=7)
    feed.oldest_version = 5
    state = feed.state_dict()
    again = feed_of(5)
    again.reset(state)
    assert next(again) == rows_of(2) and again.oldest_version == 5
    assert [again.request().key for _ in range(4)] == [0, 1, 3, 4]
    assert again.request(timeout_s=0.01) is None
    assert feed.put(0, rows_of(0)) and not feed.put(0, rows_of(0))


def test_what_is_older_than_the_version_that_is_asked_for_is_left_out_by_name():
    feed = feed_of(6)

    def make(index):
        feed.oldest_version = 3
        return rows_of(index)

    def run():
        for request in feed.requests():
            feed.put(request.key, make(request.item), version=2 + request.key % 2)

    thread = threading.Thread(target=run, daemon=True)
    with loader_over(feed) as loader:
        thread.start()
        keys, left_out = [], []
        with pytest.warns(UserWarning, match="stale"):
            for batch in loader:
                info = pop_step_info(batch)
                keys += info.keys
                left_out += [(sample.key, sample.reason) for sample in info.left_out]
    thread.join(10)
    assert sorted(keys) == [1, 3, 5]
    assert sorted(left_out) == [(0, "stale"), (2, "stale"), (4, "stale")]


def test_a_request_of_which_nothing_can_be_made_is_left_out():
    feed = feed_of(4)
    feed.reset()
    for _ in range(4):
        key = feed.request().key
        feed.put(key, Skipped("refused", "by the judge") if key == 1 else rows_of(key))
    items = [next(feed) for _ in range(4)]
    assert items[1] == Skipped("refused", "by the judge")


def test_a_request_that_takes_longest_is_issued_first_after_a_restore_at_any_moment():
    feed = feed_of(12, max_ahead=3)
    feed.reset()
    slow = feed.request()
    for key in range(1, 12):
        states = [feed.state_dict()]
        assert feed.request().key == key
        states.append(feed.state_dict())
        feed.put(key, rows_of(key))
        states.append(feed.state_dict())
        assert next(feed) == rows_of(key)
        for state in states:
            again = feed_of(12, max_ahead=3)
            again.reset(state)
            assert again.request() == slow
    feed.put(slow.key, rows_of(slow.item))
    assert next(feed) == rows_of(slow.item) and next(feed, None) is None


@pytest.mark.parametrize(
    "of", [lambda feed: feed, lambda feed: client_of(feed)], ids=["thread", "client"]
)
def test_put_refuses_what_the_loader_cannot_train_on_and_nothing_else_is_lost(of):
    feed = feed_of()
    with loader_over(feed) as loader:
        batches = iter(loader)
        generator = of(feed)
        assert generator.request().key == 0
        with pytest.raises(SampleError, match=r"for key 0: .*`input_ids`.* stays in flight"):
            generator.put(0, [{"text": "no tokens"}])
        assert feed.in_flight == [0] and generator.put(0, Skipped("refused"))
        assert not generator.put(0, [{"text": "no tokens"}])  # The key is no longer in flight.
        with generators(feed), pytest.warns(UserWarning, match="refused"):
            infos = [pop_step_info(batch) for batch in batches]
    assert sorted(key for info in infos for key in info.keys) == [*range(1, 40)]
    left_out = [sample for info in infos for sample in info.left_out]
    assert [(sample.key, sample.reason) for sample in left_out] == [(0, "refused")]


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ({"input_ids": [1.5, 2]}, "`input_ids` must hold integers"),
        ([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}], r"same keys.*\['labels'\]"),
        ({"input_ids": [1, 2], "labels": [1, 2, 3]}, r"`labels` must have the length"),
    ],
    ids=["floats", "keys", "length"],
)
def test_put_refuses_what_our_collate_functions_refuse(items, words):
    for options in ({}, {"collate_fn": RowsCollate(PackedCollate.of(PACKED))}):
        feed = feed_of()
        with loader_over(feed, **options) as loader:
            iter(loader)
            key = feed.request().key
            with pytest.raises(SampleError, match=f"for key 0: .*{words}.* stays in flight"):
                feed.put(key, items)
            assert feed.put(key, rows_of(0))
    feed = feed_of()
    with loader_over(feed, collate_fn=list) as loader:  # which may take them
        iter(loader)
        assert feed.put(feed.request().key, items)


def test_an_error_of_collating_names_the_option_that_leaves_the_key_out():
    feed = feed_of(2)

    def make(index):
        return {"input_ids": [index], **({"reward": 1.0} if index else {})}

    with loader_over(feed) as loader, generators(feed, make, count=1):
        message = r"\(key 0\).*same keys.*lacks \['reward'\].*in `exclude`"
        with pytest.raises(SampleError, match=message):
            keys_of(loader)


def test_a_key_whose_collating_fails_is_excluded_by_name_after_a_restore():
    def collate(rows):
        if any(row["input_ids"][0] == 3 for row in rows):
            raise ValueError("cannot be collated")
        return PackedCollate.of(PACKED)(rows)

    feed = feed_of()
    keys = []
    with loader_over(feed, collate_fn=collate) as loader, generators(feed):
        with pytest.raises(SampleError, match=r"cannot be collated.*\(key 3\).*in `exclude`"):
            for batch in loader:
                keys += pop_step_info(batch).keys
        state = loader.state_dict()
    feed = feed_of()
    with loader_over(feed, collate_fn=collate, exclude=[3]) as loader, generators(feed):
        loader.load_state_dict(state)
        keys += keys_of(loader)
    assert sorted(keys) == [*range(3), *range(4, 40)]


def test_generators_do_not_run_further_ahead_than_max_ahead():
    feed = feed_of(max_ahead=3)
    feed.reset()
    for _ in range(3):
        feed.request()
    assert feed.request(timeout_s=0.01) is None
    feed.put(0, rows_of(0))
    assert feed.request(timeout_s=0.01) is None
    next(feed)
    assert feed.request(timeout_s=0.01).key == 3


def test_a_wait_for_generators_ends_and_names_what_is_awaited():
    feed = feed_of(timeout_s=0.2)
    feed.reset()
    for _ in range(8):
        feed.request()
    assert feed.put(3, rows_of(3)) and not feed.put(30, rows_of(3))
    next(feed)
    message = r"7 requests in flight \(0, 1, 2, 4, 5 and so on\).* 1 call of"
    with pytest.raises(WorkerError, match=message) as caught:
        next(feed)
    assert "No generator" not in str(caught.value)
    feed.put(0, rows_of(0))
    assert next(feed) == rows_of(0)


def test_the_error_says_that_no_generator_has_come_since_the_feed_was_closed():
    feed = feed_of(timeout_s=0.02)
    feed.reset()
    feed.request()
    for _ in range(2):
        feed.close()
        assert not feed.put(0, rows_of(0))
        feed.reset()
        with pytest.raises(WorkerError, match="0 requests .* No generator has called `requests`"):
            next(feed)


def test_a_request_of_a_closed_feed_waits_for_its_opening(monkeypatch):
    monkeypatch.setattr(feed_source, "POLL_S", 30)
    feed = feed_of()
    feed.reset()
    feed.close()
    assert feed.request(timeout_s=0.01) is None
    threading.Timer(0.05, feed.reset).start()
    assert feed.request().key == 0


def test_an_error_of_the_source_comes_after_what_was_requested_before_it():
    def items():
        yield 0
        raise OSError("disk")

    class Broken:
        def __iter__(self):
            return items()

    feed = FeedSource(IterableSource(Broken(), 0, 1), timeout_s=5)
    feed.reset()
    assert feed.request().item == 0 and feed.request(timeout_s=0.01) is None
    feed.put(0, rows_of(0))
    assert next(feed) == rows_of(0)
    with pytest.raises(OSError, match="disk"):
        next(feed)


@pytest.mark.parametrize("end", ["interrupt", "close"])
def test_a_wait_ends_when_the_feed_is_closed(end):
    feed = feed_of()
    feed.reset()
    threading.Timer(0.1, getattr(feed, end)).start()
    with pytest.raises(WorkerError, match="closed"):
        next(feed)


def serve_twice():
    with closing(feed_of()) as feed:
        feed.serve()
        feed.serve()


test_bad_arguments = refuses(
    [
        (lambda: FeedSource([1]), TypeError, "`source`"),
        (lambda: feed_of(max_ahead=0), ValueError, "`max_ahead`.*0"),
        (lambda: feed_of(timeout_s=0), ValueError, "`timeout_s`.*0"),
        (lambda: feed_of().put("a", [1]), TypeError, "`key`.*'a'"),
        (lambda: feed_of().put(-1, [1]), ValueError, "`key`.*-1"),
        (lambda: feed_of().put(1, []), ValueError, "`items`.*empty"),
        (lambda: feed_of().put(1, None), TypeError, "`items`.*None"),
        (lambda: feed_of().put(1, ([1],)), TypeError, "`items`.*tuple"),
        (lambda: feed_of().serve(29417), TypeError, "`address`.*29417"),
        (lambda: feed_of().serve(("127.0.0.1", -1)), ValueError, r"`address\[1\]`.*-1"),
        (lambda: feed_of().serve(authkey=b""), ValueError, "`authkey`"),
        (lambda: FeedClient("127.0.0.1:29417", b"secret"), TypeError, "`address`.*29417"),
        (lambda: FeedClient(("127.0.0.1", 0), b"secret"), ValueError, r"`address\[1\]`.* 0 "),
        (lambda: FeedClient(("127.0.0.1", 29417), "secret"), ValueError, "`authkey`.*a `str`"),
        (lambda: serve_twice(), ValueError, "served already"),
        (lambda: feed_of().put(1, [1], version=-2), ValueError, "`version`.*-2"),
        (lambda: feed_of().put(1, [object()]), SampleError, "`object`"),
        (lambda: WindowBucketer(LengthObserver(feed_of()), 8), ValueError, "`state`.*payload"),
        (lambda: loader_over(feed_of(), process_fn=len), ValueError, "`process_fn`"),
        (lambda: loader_over(feed_of(), num_workers=2), ValueError, "`num_workers`"),
        (lambda: loader_over(feed_of(), sampler=range(2)), ValueError, "`sampler`"),
        (lambda: loader_over(feed_of(), shuffle=True), ValueError, "`shuffle`"),
    ]
)


def test_a_damaged_state_is_refused():
    feed = feed_of()
    feed.reset()
    feed.request()
    state = feed.get_state()
    state["requests"] = [(1, 2)]
    del state["digest"]
    with pytest.raises(StateError, match="damaged"):
        feed_of().reset(state)


def test_padded_rows_cost_rows_times_the_longest_and_all_samples_have_the_same_number():
    observe = RowsObserve(layout="padded")
    assert observe(rows_of(1))[:2] == (2 * 11, 9 + 10)
    with pytest.raises(SampleError, match="3 and the first had 2"):
        observe([*rows_of(1), *rows_of(2)[:1]])
    feed = feed_of()
    budget = TokenBudget(128)
    with loader_over(feed, token_budget=budget) as loader, generators(feed):
        keys = []
        for batch in loader:
            keys += (info := pop_step_info(batch)).keys
            assert len(batch["input_ids"]) == 2 * len(info.keys)
            assert batch["input_ids"].numel() <= budget.tokens
    assert sorted(keys) == [*range(40)]


def test_a_key_that_is_in_flight_and_comes_again_is_an_error():
    feed = FeedSource(IterableSource([5, 6, 5], 0, 1, yields_indices=True), timeout_s=5)
    feed.reset()
    assert [feed.request().key, feed.request().key] == [5, 6]
    assert feed.request(0.01) is None  # since the source has failed
    for key in (6, 5):
        feed.put(key, rows_of(key))
        assert next(feed) == rows_of(key)
    with pytest.raises(SampleError, match="key 5 is in flight"):
        next(feed)


def test_what_an_earlier_trainer_had_issued_is_taken_after_a_restore():
    feed = feed_of(3)
    feed.reset()
    assert feed.request().key == 0
    again = feed_of(3)
    again.reset(feed.state_dict())
    assert again.put(0, rows_of(0)) and not again.put(0, rows_of(0))
    assert again.request().key == 1 and not again.put(2, rows_of(2))


# --- other processes ------------------------------------------------------------------------------


def generate(client, delay_s):
    for request in client.requests():
        time.sleep(delay_s)
        client.put(request.key, rows_of(request.item), version=request.key)
    os._exit(7)


def put_in_child(feed, results):
    try:
        feed.put(0, rows_of(0))
    except WorkerError as error:
        results.put(str(error))


@pytest.mark.slow
def test_processes_put_and_the_requests_of_a_killed_process_are_issued_again():
    feed = feed_of(60)
    spawn, client = multiprocessing.get_context("spawn"), feed.serve()
    fast, slow = (
        spawn.Process(target=generate, args=(client, delay_s), daemon=True)
        for delay_s in (0.01, 1000)
    )
    with loader_over(feed) as loader:
        batches = iter(loader)
        slow.start()
        deadline = time.monotonic() + 120
        while not feed.in_flight and time.monotonic() < deadline:
            time.sleep(0.01)
        assert feed.in_flight == [0]
        fast.start()
        slow.kill()
        keys = [key for batch in batches for key in pop_step_info(batch).keys]
    assert sorted(keys) == [*range(60)]
    fast.join(60)
    slow.join(60)
    assert fast.exitcode == 7  # `requests` ends once the feed is closed


@pytest.mark.slow
def test_a_forked_copy_of_a_feed_says_that_nothing_reaches_it():
    feed = feed_of()
    feed.reset()
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    child = fork.Process(target=put_in_child, args=(feed, results))
    child.start()
    assert "feed.serve()" in results.get(timeout=60)
    child.join(60)


def test_a_client_that_reaches_nobody_says_so():
    feed = feed_of()
    client = feed.serve()
    feed.close()
    with pytest.raises(WorkerError, match=r"127\.0\.0\.1:\d+ cannot be reached"):
        client.request()


def client_of(feed):
    """A client as another process has it."""
    return pickle.loads(pickle.dumps(feed.serve()))


def test_a_put_does_not_wait_for_a_thread_that_requests():
    with closing(feed_of(max_ahead=1)) as feed:
        feed.reset()
        client = client_of(feed)
        assert client.request().key == 0
        thread = threading.Thread(target=client.request, args=(60,), daemon=True)
        thread.start()
        assert client.put(0, rows_of(0))
        assert next(feed) == rows_of(0)
        thread.join(30)
        assert not thread.is_alive() and feed.in_flight == [1]


def test_a_connection_that_says_nothing_keeps_nobody_out():
    with closing(feed_of()) as feed:
        feed.reset()
        client = client_of(feed)
        with socket.create_connection(client.address):
            assert client.request().key == 0
            with pytest.raises(WorkerError, match="digest|authkey"):
                FeedClient(client.address, b"wrong").request()


def test_a_connection_that_says_nothing_is_ended(monkeypatch):
    monkeypatch.setattr(feed_client, "_HANDSHAKE_S", 0.05)
    with closing(feed_of()) as feed:
        with socket.create_connection(feed.serve().address, timeout=30) as connection:
            while connection.recv(4096):  # the challenge, and then the end
                pass


def test_a_default_timeout_of_sockets_ends_no_connection():
    socket.setdefaulttimeout(30)
    try:
        with closing(feed_of()) as feed:
            feed.reset()
            client = client_of(feed)
            assert client.put(client.request().key, rows_of(0))
    finally:
        socket.setdefaulttimeout(None)


def test_a_client_that_ends_gives_back_only_what_it_holds():
    with closing(feed_of()) as feed:
        feed.reset()
        first = client_of(feed)
        second = FeedClient(first.address, first.authkey)
        assert [first.request().key, second.request().key, first.request().key] == [0, 1, 2]
        assert first.put(0, rows_of(0))
        first.close()
        deadline = time.monotonic() + 30
        while feed.in_flight != [1] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert feed.in_flight == [1] and second.put(1, rows_of(1))
        assert second.request().key == 2  # which the first had


def test_after_an_interrupted_call_answers_belong_to_their_calls(monkeypatch):
    with closing(feed_of()) as feed:
        feed.reset()
        client = client_of(feed)
        assert client.request().key == 0 and client.request().key == 1
        assert client.put(0, rows_of(0))
        line = client._lines["put"]
        with monkeypatch.context() as patch:
            patch.setattr(line, "_connection", Interrupted(line._connection))
            with pytest.raises(KeyboardInterrupt):
                client.put(1, rows_of(1))
        assert client.request().key == 2 and client.put(2, rows_of(2))


def break_off(line):
    """End a connection of a client as the kill of its peer does."""
    with socket.socket(fileno=os.dup(line._connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)


def test_a_client_that_has_lost_one_connection_uses_no_other_of_the_same_time():
    with closing(feed_of()) as feed:
        feed.reset()
        client = client_of(feed)
        assert client.put(client.request().key, rows_of(0))
        for line in client._lines.values():
            break_off(line)
        with pytest.raises(WorkerError, match="cannot be reached"):
            client.request()
        assert client.put(client.request().key, rows_of(1))


def test_a_request_whose_put_fails_is_issued_again():
    with closing(feed_of()) as feed:
        feed.reset()
        client = client_of(feed)
        assert client.put(client.request().key, rows_of(0))
        assert client.request().key == 1
        break_off(client._lines["put"])
        with pytest.raises(WorkerError, match="cannot be reached"):
            client.put(1, rows_of(1))
        deadline = time.monotonic() + 30
        while feed.in_flight and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.request().key == 1 and client.put(1, rows_of(1))


class Interrupted:
    """A connection that is interrupted after a message was sent."""

    def __init__(self, connection):
        self.send = connection.send

    def recv(self):
        raise KeyboardInterrupt


def test_a_feed_that_is_used_again_after_close_is_served_again():
    feed = feed_of(3)
    client = feed.serve()
    for _ in range(2):
        feed.reset()
        assert client.request().key == 0
        feed.close()
        client.close()


def test_a_client_that_stays_connected_is_served_once_the_feed_is_open_again(monkeypatch):
    monkeypatch.setattr(feed_client, "POLL_S", 0.01)
    feed = feed_of(3)
    client = client_of(feed)
    for _ in range(2):
        feed.reset()
        assert client.request().key == 0 and client.put(0, rows_of(0))
        assert next(feed) == rows_of(0) and client.request().key == 1
        feed.close()
        assert not client.put(1, rows_of(1)) and client.request() is None
    client.close()


def test_a_closed_feed_ends_the_connection_of_a_client_that_says_nothing(monkeypatch):
    monkeypatch.setattr(feed_client, "POLL_S", 0.01)
    monkeypatch.setattr(feed_client, "_FAREWELL_S", 0.02)
    feed = feed_of(3)
    client = client_of(feed)
    feed.reset()
    assert client.request().key == 0
    feed.close()
    assert client._lines["request"]._connection.poll(30)
    with pytest.raises(WorkerError, match="cannot be reached"):
        client.request()
