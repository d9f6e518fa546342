import copy
import io
import multiprocessing
import threading
from contextlib import nullcontext, suppress
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling import fewer
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
)
from torchdata.nodes import (
    BaseNode,
    Batcher,
    IterableWrapper,
    Mapper,
    ParallelMapper,
    Prefetcher,
    SamplerWrapper,
    Unbatcher,
)
from torchdata.nodes import Loader as StockLoader

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    ParallelProcessor,
    SampleError,
    ShardedSampler,
    StateError,
    WindowBucketer,
)
from odb_nodes.testing import assert_resumes_exactly


class Numbers(BaseNode):
    """(epoch, 0), (epoch, 1), ...; can be told to raise, and tells when it was pulled from."""

    def __init__(self, size=3):
        super().__init__()
        self.size, self.epoch, self.position, self.started = size, 0, 0, False
        self.requested = None
        self.faults = {}  # item or "reset" -> exception, raised until it is taken out
        self.pulled = threading.Event()

    def set_epoch(self, epoch):
        self.requested = epoch

    def reset(self, initial_state=None):
        super().reset(initial_state)
        if initial_state is None:
            if self.requested is not None:
                self.epoch = self.requested
            elif self.started:
                self.epoch += 1
            self.position, self.started = 0, False
        else:
            self.epoch, self.position, self.started = initial_state["place"]
        self.requested = None
        self._raise("reset")

    def next(self):
        self.started = True
        item = (self.epoch, self.position)
        self._raise(item)
        if self.position == self.size:
            raise StopIteration
        self.position += 1
        self.pulled.set()
        return item

    def get_state(self):
        return {"place": (self.epoch, self.position, self.started)}

    def _raise(self, what):
        if what in self.faults:
            raise self.faults[what]


class Live(BaseNode):
    """Hands out its live state, and adopts the one it is given."""

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.state = {"seen": []} if initial_state is None else initial_state

    def next(self):
        if len(self.state["seen"]) == 4:
            raise StopIteration
        self.state["seen"].append(len(self.state["seen"]))
        return self.state["seen"][-1]

    def get_state(self):
        return self.state


def epoch(number, size=3):
    return [(number, index) for index in range(size)]


def take(loader, count):
    """Begin an epoch and take its first items."""
    return list(islice(iter(loader), count))


def resumed(state, root=None, loader_class=Loader, **options):
    loader = loader_class(Numbers() if root is None else root, **options)
    loader.load_state_dict(state)
    return loader


def state_after(count, root=None, loader_class=Loader):
    """The state after `count` items of the first epoch; -1 stands for its end."""
    loader = loader_class(Numbers() if root is None else root)
    if count < 0:
        list(loader)
    else:
        take(loader, count)
    return loader.state_dict()


START = Loader(Numbers()).state_dict()


def collect(items, loader):
    """Append an epoch item by item, so that those before an exception are kept."""
    for item in loader:
        items.append(item)


# The faults of torchdata's Loader beside what ours does. Where the first of a pair fails, upstream
# has repaired it: say so in docs/upstream_faults.md.

BOTH = pytest.mark.parametrize("loader_class", [StockLoader, Loader], ids=["torchdata", "ours"])


@BOTH
def test_p1_a_state_is_loaded_also_after_state_dict_was_called(loader_class):
    state = state_after(1, loader_class=loader_class)
    loader = loader_class(Numbers())
    loader.state_dict()
    loader.load_state_dict(state)
    first, second = list(loader), list(loader)
    if loader_class is StockLoader:
        assert (first, second) == (epoch(0), epoch(0)[1:])  # ignored, then applied an epoch late
    else:
        assert (first, second) == (epoch(0)[1:], epoch(1))


@BOTH
def test_p2_after_the_state_of_an_end_is_loaded_states_move_on(loader_class):
    loader = resumed(state_after(-1, loader_class=loader_class), loader_class=loader_class)
    places = []
    for _ in range(2):
        for _ in loader:
            places.append(loader.state_dict()["root"]["place"])
    if loader_class is StockLoader:
        assert places[3:] == [(0, 3, True)] * 3  # frozen at the end of epoch 0
    else:
        assert places == [(e, i, True) for e in (1, 2) for i in (1, 2, 3)]


@BOTH
def test_p3_an_item_may_be_none(loader_class):
    def root():
        return IterableWrapper(["first", None, "last"])

    loader = resumed(state_after(1, root(), loader_class), root(), loader_class)
    expected = [None, "last"]
    if loader_class is StockLoader:
        expected = ["first", None, "last"]  # taken for the end, so it starts over
    assert list(loader) == expected


@BOTH
def test_p4_items_are_counted_once(loader_class):
    loader = resumed(state_after(1, loader_class=loader_class), loader_class=loader_class)
    take(loader, 1)
    assert loader.state_dict()["num_yielded"] == (3 if loader_class is StockLoader else 2)


@pytest.mark.slow
@BOTH
def test_p7_a_reset_waits_for_a_slow_source(loader_class):
    class Slow(BaseNode):
        """The second call of `next` lasts until `go_on` is set."""

        def __init__(self):
            super().__init__()
            self.calls = self.position = 0
            self.inside, self.go_on = threading.Event(), threading.Event()
            self.lock = threading.Lock()

        def reset(self, initial_state=None):
            super().reset(initial_state)
            self.position = 0

        def next(self):
            self.calls += 1
            if self.calls == 2:
                self.inside.set()
                self.go_on.wait(30)
            with self.lock:
                if self.position == 6:
                    raise StopIteration
                self.position += 1
                return self.position - 1

        def get_state(self):
            return {"position": self.position}

    source = Slow()
    loader = loader_class(Prefetcher(source, 2))
    take(loader, 1)
    source.inside.wait(30)
    old_thread = loader.root._it._thread
    if loader_class is Loader:
        threading.Timer(1.4, source.go_on.set).start()
    it = iter(loader)  # the stock one waits for 0.5 s, twice
    if loader_class is StockLoader:
        source.go_on.set()
    source.go_on.wait(30)
    old_thread.join(30)
    # The old thread takes an item of the new epoch, if that has begun.
    assert len(list(it)) == (5 if loader_class is StockLoader else 6)


@BOTH
def test_p14_asking_for_an_iterator_twice_does_not_skip_an_epoch(loader_class):
    source = Numbers()
    loader = loader_class(Prefetcher(source, 2))
    iter(loader)
    source.pulled.wait(30)
    assert list(loader) == epoch(1 if loader_class is StockLoader else 0)


@BOTH
@pytest.mark.parametrize("restart", [True, False])
def test_p18_a_state_between_the_last_item_and_the_end_has_that_end_ahead(loader_class, restart):
    loader = resumed(
        state_after(3, loader_class=loader_class),
        loader_class=loader_class,
        restart_on_stop_iteration=restart,
    )
    epochs = [list(loader) for _ in range(2)]
    if loader_class is StockLoader and restart:
        assert epochs == [epoch(1), epoch(2)]  # the end of epoch 0 is lost
    else:
        assert epochs == [[], epoch(1)]


@BOTH
def test_p22_stock_samplers_restored_at_the_end_of_an_epoch_go_on_with_the_next(loader_class):
    def root():
        return SamplerWrapper(DistributedSampler(range(9), num_replicas=1, rank=0, seed=1))

    run = loader_class(root())
    list(run)
    state = copy.deepcopy(run.state_dict())
    second = list(run)
    # The stock Loader looks ahead for a last item, and so repairs its own end, but not others'.
    assert list(resumed(state, root(), loader_class)) == second


# What follows a state.

GRAPHS = {
    "bare": lambda: Numbers(),
    "prefetcher": lambda: Prefetcher(Numbers(), 2),
    "rare snapshots": lambda: Prefetcher(Numbers(), 2, snapshot_frequency=3),
    "batcher": lambda: Batcher(Numbers(), 2, drop_last=False),
    "batcher that drops": lambda: Batcher(Numbers(), 2, drop_last=True),
    "threads": lambda: ParallelMapper(Numbers(), str, 2),
    "prebatched threads": lambda: ParallelMapper(Numbers(), str, 2, prebatch=2),
    "stock sampler": lambda: SamplerWrapper(DistributedSampler(range(4), 1, 0, seed=1)),
    "stock sampler behind a prefetcher": lambda: Prefetcher(
        Mapper(SamplerWrapper(DistributedSampler(range(4), 1, 0, seed=1)), str), 2
    ),
}


# torchdata's reset waits half a second for each of its threads
THREADED = {"threads", "prebatched threads"}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.slow] if name in THREADED else [])
        for name, make in GRAPHS.items()
    ],
)
def test_items_and_ends_of_epochs_follow_as_in_the_run_that_saved(make, sampled):
    slow = type(make()) not in (Numbers, Batcher, SamplerWrapper)  # to stop its threads
    assert_resumes_exactly(make, epochs=3, **sampled(chain=0, every=3) if slow else {})


class Expected:
    """What a `Loader` over `Numbers` is said to do, in as few words as possible."""

    def __init__(self):
        self.place = (0, 0, False)  # epoch, items out, end seen
        self.running = False  # there is an iterator
        self.held = False  # a state was loaded, or kept by `close`
        self.touched = False
        self.requested = None
        self.left = False  # `set_epoch` was called, and no item taken since
        self.leaving = False  # closed after an item was taken

    def iter(self):
        if self.held:
            if self.place[2] or self.left or self.leaving:
                self.begin(self.place[0] + 1)
        elif not self.running:
            self.begin(0)
        elif self.touched:
            self.begin(self.place[0] + 1)
        self.held, self.running, self.touched, self.leaving = False, True, False, False

    def begin(self, following):
        self.place = (following if self.requested is None else self.requested, 0, False)
        self.requested, self.left = None, False

    def next(self):
        """Return the next item; `None` at the end."""
        self.touched, self.left = True, False
        number, index, _ = self.place
        self.place = (number, min(index + 1, 3), index == 3)
        return None if index == 3 else (number, index)

    def state(self):
        if not self.held and not self.running:
            self.iter()
        return self.place, self.requested, self.left

    def load(self, state):
        self.place, self.requested, self.left = state
        self.held, self.running, self.leaving = True, False, False

    def close(self):
        if self.running:
            self.held, self.running, self.leaving = True, False, self.touched

    def set_epoch(self, number):
        if self.place[2] or self.left or self.leaving or not self.held:
            self.requested, self.touched = number, True
            self.left = self.left or self.running or self.leaving


OPERATIONS = st.lists(
    st.one_of(
        st.sampled_from(["iter", "next", "next", "next", "save", "load", "close"]),
        st.integers(0, 9),
    ),
    max_size=25,
)


def compare_with_expected(root, operations):
    loader, model, saved, it = Loader(root), Expected(), [], None
    for operation in [*operations, "iter", "next", "next"]:
        if operation == "iter" or (operation == "next" and it is None):
            it = iter(loader)
            model.iter()
        if operation == "next":
            assert next(it, None) == model.next()
        elif operation == "save":
            state, place = loader.state_dict(), model.state()
            assert (state["num_yielded"], state["ended"]) == place[0][1:]
            saved.append((state, place))
        elif operation == "load" and saved:
            state, place = saved[len(saved) // 2]
            loader.load_state_dict(state)
            model.load(place)
            it = None
        elif operation == "close":
            loader.close()
            model.close()
            it = None
        elif isinstance(operation, int):
            loader.set_epoch(operation)
            model.set_epoch(operation)
            it = None
    loader.close()


@given(OPERATIONS)
def test_any_sequence_of_calls_does_what_the_docstring_says(operations):
    compare_with_expected(Numbers(), operations)


@given(OPERATIONS)
@fewer(5)
def test_any_sequence_of_calls_does_the_same_behind_a_prefetcher(operations):
    compare_with_expected(Prefetcher(Numbers(), 2), operations)


def test_iter_returns_the_present_iterator_as_long_as_that_has_not_yielded():
    loader = Loader(Numbers())
    it = iter(loader)
    assert iter(loader) is it
    next(it)
    assert iter(loader) is not it


@pytest.mark.parametrize(
    "outdate", [iter, Loader.close, lambda loader: loader.load_state_dict(START)]
)
def test_an_older_iterator_is_no_longer_valid(outdate):
    loader = Loader(Numbers())
    it = iter(loader)
    next(it)
    outdate(loader)
    with pytest.raises(RuntimeError, match=r"this iterator is no longer valid: .* Use the newest"):
        next(it)


def test_an_ended_iterator_stays_ended():
    loader = Loader(Numbers())
    it = iter(loader)
    assert list(it) == epoch(0)
    assert list(it) == list(it) == []
    assert list(loader) == epoch(1)


@pytest.mark.parametrize("make", [Numbers, lambda: Prefetcher(Numbers(), 2)])
@pytest.mark.parametrize("taken", [1, 2, 3])
def test_an_epoch_that_was_left_does_not_leak_into_the_next(make, taken):
    with Loader(make()) as loader:
        for _ in range(3):
            take(loader, taken)
        assert list(loader) == epoch(3)


@pytest.mark.parametrize("make", [Numbers, lambda: Prefetcher(Numbers(), 2)])
def test_without_restart_the_state_of_an_end_gives_nothing_and_then_the_next_epoch(make):
    state = state_after(-1, make())
    loader = resumed(state, make(), restart_on_stop_iteration=False)
    assert loader.state_dict() == state
    assert list(loader) == []
    assert loader.state_dict()["ended"]
    assert list(loader) == epoch(1)


def test_without_restart_other_states_and_epochs_are_as_ever():
    loader = resumed(state_after(1), restart_on_stop_iteration=False)
    assert [list(loader) for _ in range(3)] == [epoch(0)[1:], epoch(1), epoch(2)]


# States.


@pytest.mark.parametrize("count", [0, 1, 3, -1])
def test_right_after_loading_the_state_is_what_was_loaded(count):
    state = state_after(count)
    loader = resumed(state)
    assert loader.state_dict() == loader.state_dict() == state
    assert list(loader) == list(resumed(state))


@pytest.mark.parametrize("count", [0, 1, 3, -1])
@pytest.mark.parametrize("between", [None, iter, Loader.state_dict, list, Loader.close])
def test_a_state_can_be_loaded_twice(count, between):
    state = state_after(count)
    loader = resumed(state)
    if between is not None:
        between(loader)
    loader.load_state_dict(state)
    following = resumed(state)
    assert [list(loader), list(loader)] == [list(following), list(following)]


def test_the_last_of_several_states_counts():
    loader = resumed(state_after(-1))
    loader.load_state_dict(state_after(2))
    loader.load_state_dict(state_after(1))
    assert list(loader) == epoch(0)[1:]


def test_a_state_is_asked_for_before_the_first_epoch_without_beginning_it_twice():
    loader = Loader(Prefetcher(Numbers(), 2))
    state = loader.state_dict()
    assert list(loader) == epoch(0)
    assert list(resumed(state, Prefetcher(Numbers(), 2))) == epoch(0)


def spoil(state):
    """Change a state deeply."""
    for value in state.values():
        if isinstance(value, dict):
            spoil(value)
        elif isinstance(value, list):
            value.append("spoiled")
    state["spoiled"] = True


def test_a_loaded_state_is_neither_changed_nor_kept():
    state = state_after(2, Live())
    before = copy.deepcopy(state)
    loader = resumed(state, Live())
    assert list(loader) == [2, 3]
    assert state == before
    loader.load_state_dict(state)
    spoil(state)
    assert loader.state_dict() == before
    assert list(loader) == [2, 3]


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_returned_state_is_the_callers(loaded, begun):
    loader = resumed(state_after(2, Live()), Live()) if loaded else Loader(Live())
    it = iter(loader) if begun else None
    state = loader.state_dict()
    before = copy.deepcopy(state)
    spoil(state)
    assert loader.state_dict() == before
    assert list(it or loader) == [0, 1, 2, 3][2 if loaded else 0 :]


def test_a_returned_state_does_not_move_with_the_graph():
    loader = Loader(Live())
    it = iter(loader)
    states = [loader.state_dict() for _ in it]
    assert [state["root"]["seen"] for state in states] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_tensors_in_a_state_are_copied():
    class Tensor(Live):
        def reset(self, initial_state=None):
            BaseNode.reset(self, initial_state)
            self.state = {"at": torch.zeros(1)} if initial_state is None else initial_state

        def next(self):
            self.state["at"] += 1
            return self.state["at"].item()

    loader = Loader(Tensor())
    it = iter(loader)
    next(it)
    state = loader.state_dict()
    assert (next(it), next(iter(resumed(state, Tensor()))), state["root"]["at"]) == (2, 2, 1)


def test_a_state_is_plain_data():
    buffer = io.BytesIO()
    torch.save(state_after(2, Prefetcher(ShardedSampler(5, rank=0, world_size=1), 2)), buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)


# States that do not fit.


def without(state, key):
    return {name: value for name, value in state.items() if name != key}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "must be a state saved by a Loader, but is NoneType 'None' instead"),
        ({}, r"must be a state saved by a Loader, but is a dict with keys \[\]"),
        ([1], r"must be a state saved by a Loader, but is list '\[1\]'"),
        (StockLoader(Numbers()).state_dict(), r"a dict with keys \['num_yielded', 'root'\]"),
        (ShardedSampler(3, True, 0, 0, 1).state_dict(), "by `ShardedSampler`, but .* `Loader`"),
        (
            {**START, "version": 99},
            "the state of Loader has `version` 99, but this odb_nodes reads",
        ),
        (without(START, "version"), "has `version` None"),
        (without(START, "root"), "the state of Loader lacks `root`: it is incomplete"),
        (without(without(START, "ended"), "num_yielded"), "lacks `num_yielded`, `ended`"),
    ],
)
def test_what_is_no_state_is_refused_at_once_and_says_what_is_wrong(state, message):
    loader = Loader(Numbers())
    take(loader, 1)
    with pytest.raises(StateError, match=message):
        loader.load_state_dict(state)
    assert loader.state_dict()["num_yielded"] == 1


def sampled(size=4, **wrong):
    return ShardedSampler(size, False, 0, 0, 1)


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (sampled(5), "ShardedSampler: `size` was 4 when saved, but is 5 now"),
        (LengthObserver(sampled()), "saved by `ShardedSampler`, but is loaded into `LengthObs"),
        (Prefetcher(sampled(), 2), "(?i)snapshot.* same nodes in the same order"),
        (Batcher(sampled(), 2), "(?i)source.* same nodes in the same order"),
    ],
)
def test_a_state_of_another_graph_is_refused_by_iter_and_says_what_is_wrong(root, message):
    loader = resumed(state_after(1, sampled()), root)
    with pytest.raises(StateError, match=message):
        iter(loader)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda node: node,
        lambda node: Prefetcher(node, 2),
        lambda node: ParallelMapper(node, abs, 2),
        lambda node: Prefetcher(Mapper(node, abs), 2),
    ],
    ids=["bare", "prefetcher", "threads", "mapper behind a prefetcher"],
)
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_a_refused_state_stays_loaded_and_another_one_can_be_loaded(wrap, used):
    good, bad = state_after(1, wrap(sampled())), state_after(1, wrap(sampled(5)))
    with Loader(wrap(sampled())) as loader:
        if used:
            take(loader, 2)
        loader.load_state_dict(bad)
        for _ in range(2):
            with pytest.raises(StateError, match="`size` was 5 when saved, but is 4 now"):
                iter(loader)
        assert loader.state_dict() == bad
        loader.load_state_dict(good)
        assert list(loader) == [1, 2, 3]


@pytest.mark.parametrize("wrap", [lambda node: node, lambda node: Prefetcher(node, 2)])
def test_without_strict_another_configuration_is_a_warning(wrap):
    loader = Loader(wrap(sampled(5)))
    loader.load_state_dict(state_after(1, wrap(sampled())), strict=False)
    with pytest.warns(UserWarning, match="`size` was 4 when saved, but is 5 now"):
        assert list(loader) == [1, 2, 3, 4]
    again = resumed(loader.state_dict(), wrap(sampled(5)))
    assert list(again) == list(loader)


def test_strict_is_back_with_the_next_load():
    loader = Loader(sampled(5))
    loader.load_state_dict(state_after(1, sampled()), strict=False)
    loader.load_state_dict(state_after(1, sampled()))
    with pytest.raises(StateError, match="`size`"):
        iter(loader)


def test_data_that_has_grown_since_the_end_of_an_epoch_is_an_error():
    loader = resumed(state_after(-1), Numbers(size=4))
    with pytest.raises(StateError, match="at the end of an epoch, but the graph yields more items"):
        iter(loader)


@pytest.mark.parametrize("root", [[1, 2], None, iter([1])])
def test_a_root_that_is_no_node_is_refused(root):
    with pytest.raises(TypeError, match="`root` must be a `BaseNode`, but is"):
        Loader(root)


def test_a_graph_without_an_order_is_refused():
    """P20: its states lose and repeat items."""
    root = Batcher(ParallelMapper(Numbers(), tuple, 2, in_order=False), 2)
    with pytest.raises(ValueError, match=r"`in_order` of `_?ParallelMapper\w*` must be True"):
        Loader(root)


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(9)),
        RandomSampler(range(9), generator=torch.Generator()),
        SubsetRandomSampler(range(9)),
        BatchSampler(RandomSampler(range(9)), 2, False),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_that_cannot_yield_its_order_again_is_refused(sampler):
    root = Mapper(SamplerWrapper(sampler), str)
    with pytest.raises(ValueError, match=r"whose order cannot be drawn again: .* `ShardedSampler`"):
        Loader(root)


# A node in two loaders.


def test_a_node_that_another_loader_iterates_is_refused():
    node = Numbers()
    loader, other = Loader(Mapper(node, str)), Loader(Batcher(node, 2))
    it = iter(loader)
    first = next(it)
    with pytest.raises(RuntimeError, match=r"a `Numbers` of this `Loader` is iterated by another"):
        iter(other)
    assert [first, *it] == list(map(str, epoch(0)))


def test_a_node_of_a_loader_that_was_closed_may_be_taken_and_given_back():
    node = Numbers()
    loader, other = Loader(node), Loader(node)
    it = iter(loader)
    first = next(it)
    loader.close()
    assert list(other) == epoch(1)
    with pytest.raises(RuntimeError, match="iterated by another"):
        iter(loader)
    other.close()
    assert first == epoch(0)[0]
    assert list(loader) == epoch(2)


def test_a_node_of_a_loader_that_is_gone_may_be_taken():
    node = Numbers()
    next(iter(Loader(node)))
    assert len(list(Loader(node))) == 3


# set_epoch


def test_set_epoch_before_the_first_iter():
    loader = Loader(Numbers())
    loader.set_epoch(5)
    assert [list(loader), list(loader)] == [epoch(5), epoch(6)]


def test_set_epoch_between_epochs():
    loader = Loader(Numbers())
    list(loader)
    loader.set_epoch(5)
    assert [list(loader), list(loader)] == [epoch(5), epoch(6)]


@pytest.mark.parametrize("make", [Numbers, lambda: Prefetcher(Numbers(), 2)])
def test_set_epoch_for_every_epoch_as_trainers_do(make):
    loader = Loader(make())
    epochs = []
    for number in range(3):
        loader.set_epoch(number)
        epochs.append(list(loader))
    assert epochs == [epoch(0), epoch(1), epoch(2)]


def test_set_epoch_can_be_repeated_and_the_last_one_counts():
    loader = Loader(Numbers())
    for number in (4, 2, 2):
        loader.set_epoch(number)
    assert list(loader) == epoch(2)
    loader.set_epoch(2)
    assert list(loader) == epoch(2)


@pytest.mark.parametrize("make", [Numbers, lambda: Prefetcher(Numbers(), 2)])
def test_set_epoch_after_iter_or_state_dict_but_before_the_first_item(make):
    for begin in (iter, Loader.state_dict):
        loader = Loader(make())
        begin(loader)
        loader.set_epoch(5)
        assert list(loader) == epoch(5)


def test_set_epoch_does_not_change_the_epoch_that_runs():
    loader = Loader(Numbers())
    it = iter(loader)
    next(it)
    loader.set_epoch(5)
    assert list(it) == epoch(0)[1:]
    assert list(loader) == epoch(5)


@pytest.mark.parametrize("count", [0, 1])
def test_set_epoch_and_close_begin_that_epoch(count):
    loader = Loader(Numbers())
    take(loader, count)
    loader.set_epoch(5)
    loader.close()
    assert [list(loader), list(loader)] == [epoch(5), epoch(6)]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_set_epoch_does_not_discard_a_loaded_state_within_an_epoch(count):
    loader = resumed(state_after(count))
    loader.set_epoch(0)
    loader.set_epoch(7)
    assert [list(loader), list(loader)] == [epoch(0)[count:], epoch(1)]


@pytest.mark.parametrize("restart", [True, False])
def test_set_epoch_holds_after_a_loaded_end(restart):
    loader = resumed(state_after(-1), restart_on_stop_iteration=restart)
    loader.set_epoch(7)
    epochs = [list(loader) for _ in range(3)]
    assert [items for items in epochs if items][:2] == [epoch(7), epoch(8)]


def test_a_state_saved_after_set_epoch_has_that_epoch_ahead():
    loader = Loader(Numbers())
    list(loader)
    loader.set_epoch(5)
    state = loader.state_dict()
    assert list(resumed(state)) == list(loader) == epoch(5)


def test_set_epoch_reaches_stock_samplers():
    sampler = DistributedSampler(range(9), 1, 0, seed=1)
    loader = Loader(SamplerWrapper(sampler))
    loader.set_epoch(3)
    items = list(loader)
    sampler.set_epoch(3)
    assert items == list(sampler)


def test_a_bad_epoch_is_refused_and_forgotten():
    loader = Loader(sampled())
    with suppress(ValueError):
        loader.set_epoch(-1)
        iter(loader)
    assert list(loader) == [0, 1, 2, 3]


# Exceptions in the graph, and close.


class Interrupted(BaseNode):
    """Raises `error` before its second item is pulled, as often as `times` says."""

    def __init__(self, source, error, times=1):
        super().__init__()
        self.source, self.error, self.times, self.out = source, error, times, 0

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.out = 0
        self.source.reset(None if initial_state is None else initial_state["source"])

    def next(self):
        if self.out == 1 and self.times:
            self.times -= 1
            raise self.error
        self.out += 1
        return next(self.source)

    def get_state(self):
        return {"source": self.source.state_dict()}


THREADED = {
    "bare": lambda: Numbers(),
    "prefetcher": lambda: Prefetcher(Numbers(), 2),
    "threads": lambda: ParallelMapper(Numbers(), tuple, 2),
    "nested": lambda: Prefetcher(ParallelMapper(Prefetcher(Numbers(), 2), tuple, 2), 2),
}


@pytest.mark.parametrize("make", THREADED.values(), ids=THREADED)
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_an_exception_stops_the_threads_and_keeps_the_position(make, error, new_threads):
    loader = Loader(Interrupted(make(), error))
    it = iter(loader)
    assert next(it) == (0, 0)
    with pytest.raises(type(error)) as raised:
        next(it)
    assert raised.value is error
    assert new_threads() == []
    with pytest.raises(RuntimeError, match="no longer valid"):
        next(it)
    state = loader.state_dict()
    assert state["num_yielded"] == 1
    assert [list(loader), list(loader)] == [epoch(0)[1:], epoch(1)]
    assert list(resumed(state, Interrupted(make(), error, times=0))) == epoch(0)[1:]
    loader.close()


def run_through_a_fault(root, mend):
    """Iterate; at the first exception try again, at the second mend the graph; then go on."""
    items = []
    with Loader(root) as loader:
        for action in (lambda: None, mend):
            with pytest.raises(OSError, match="disk"):
                collect(items, loader)
            action()
        collect(items, loader)
    return items


@pytest.mark.parametrize(
    "wrap",
    [
        lambda node: node,
        lambda node: Prefetcher(node, 2),
        lambda node: Prefetcher(node, 3, snapshot_frequency=4),
        lambda node: ParallelMapper(node, tuple, 2),
        lambda node: ParallelMapper(node, tuple, 2, snapshot_frequency=4),
        lambda node: Prefetcher(Mapper(node, tuple), 2),
    ],
    ids="bare prefetcher rare-snapshots threads threads-rare-snapshots mapper-prefetched".split(),
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_after_an_exception_it_is_raised_again_until_mended_and_nothing_is_lost(wrap, at):
    source = Numbers()
    source.faults[0, at] = OSError("disk")
    assert run_through_a_fault(wrap(source), source.faults.clear) == epoch(0)


@pytest.mark.parametrize("frequency", [1, 4])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_nothing_is_lost_where_mapping_raises_on_a_thread(frequency, at):
    faults = {(0, at)}

    def process(item):
        if item in faults:
            raise OSError("disk")
        return item

    root = ParallelMapper(Numbers(), process, 2, snapshot_frequency=frequency)
    assert run_through_a_fault(root, faults.clear) == epoch(0)


INLINE = {
    "mapper": lambda source, process: Mapper(source, process),
    "batcher": lambda source, process: Batcher(Prefetcher(Mapper(source, process), 1), 3, False),
    "unbatcher": lambda source, process: Unbatcher(
        Prefetcher(Mapper(Batcher(source, 4), process), 1)
    ),
    "prebatched threads": lambda source, process: ParallelMapper(source, process, 2, prebatch=3),
    "observer": lambda source, process: LengthObserver(source, lambda item: len(process(item))),
}


@pytest.mark.parametrize("make", INLINE.values(), ids=INLINE)
@pytest.mark.parametrize("at", [0, 3, 4])
def test_items_that_a_node_loses_by_an_exception_are_read_again(make, at):
    faults, items = {(0, at)}, []

    def process(item):
        if not faults.isdisjoint(item if isinstance(item, list) else [item]):
            raise OSError("disk")
        return item

    with Loader(make(Numbers(8), process)) as loader:
        with pytest.raises((OSError, SampleError), match="disk"):
            collect(items, loader)
        faults.clear()
        collect(items, loader)
        assert list(flat(items)) == epoch(0, 8)


def flat(items):
    for item in items:
        yield from item if isinstance(item, list) else [getattr(item, "data", item)]


@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("then", [None, Loader.close])
def test_a_state_that_could_not_be_taken_loses_nothing(prefetched, then):
    """A bare node has moved on when its state fails; a `Prefetcher` goes back to an older one."""
    source, items = Numbers(), []
    make = (lambda node: Prefetcher(node, 2)) if prefetched else (lambda node: node)
    get_state = source.get_state

    def fail():
        if source.position == 2:
            raise OSError("disk")
        return get_state()

    source.get_state = fail
    loader = Loader(make(source))
    with pytest.raises(OSError, match="disk"):
        collect(items, loader)
    source.get_state = get_state
    if then is not None:
        with suppress(OSError):
            then(loader)
    with nullcontext() if prefetched else pytest.raises(StateError, match="is unknown"):
        collect(items, loader)
        assert items == epoch(0)
    loader.load_state_dict(state_after(0, make(Numbers())))
    assert list(loader) == epoch(0)
    loader.close()


@pytest.mark.parametrize("make", [lambda node: node, lambda node: Prefetcher(node, 2)])
@pytest.mark.parametrize("then", [None, Loader.close, Loader.state_dict])
@pytest.mark.parametrize("taken", [1, -1], ids=["left", "ended"])
def test_an_epoch_that_could_not_begin_begins_at_the_next_try(make, then, taken):
    """Or the rest of the one that was left, as after `close`."""
    source = Numbers()
    loader = Loader(make(source))
    take(loader, taken if taken > 0 else None)
    source.faults["reset"] = OSError("disk")
    with pytest.raises(OSError):
        iter(loader)
    source.faults.clear()
    if then is not None:
        then(loader)
    following = list(loader)
    assert following == epoch(1) or (taken == 1 and following == epoch(0)[1:])
    assert loader.state_dict()["num_yielded"] == 3


def test_an_epoch_that_could_not_begin_is_still_the_one_that_was_set():
    source = Numbers()
    loader = resumed(state_after(-1), source)
    loader.set_epoch(7)
    source_reset = source.reset

    def reset(initial_state=None):
        source_reset(initial_state)
        if initial_state is None:
            raise OSError("disk")

    source.reset = reset
    with pytest.raises(OSError):
        iter(loader)
    source.reset = source_reset
    assert list(loader) == epoch(7)


@pytest.mark.parametrize("make", THREADED.values(), ids=THREADED)
@pytest.mark.parametrize("taken", [0, 1, 3, None], ids="after {}".format)
def test_close_keeps_the_position_and_can_be_repeated(make, taken, new_threads):
    loader = Loader(make())
    loader.close()
    take(loader, taken)
    loader.close()
    state = loader.state_dict()
    loader.close()
    assert new_threads() == []
    assert loader.state_dict() == state
    loader.load_state_dict(state)
    rest = [list(loader), list(loader)]
    loader.close()
    assert rest == ([epoch(1), epoch(2)] if taken is None else [epoch(0)[taken:], epoch(1)])
    assert new_threads() == []


def test_closing_leaves_no_worker_process(new_threads):
    loader = Loader(ParallelMapper(Numbers(20), tuple, 2, method="process"))
    assert take(loader, 2) == epoch(0, 2)
    loader.close()
    assert (multiprocessing.active_children(), new_threads()) == ([], [])
    assert list(loader) == epoch(1, 20)
    loader.close()


@pytest.mark.parametrize("error", [None, ValueError("in the loop"), KeyboardInterrupt()], ids=repr)
def test_as_a_context_manager_it_closes(error, new_threads):
    with suppress(ValueError, KeyboardInterrupt), Loader(Prefetcher(Numbers(), 2)) as loader:
        for _ in loader:
            assert new_threads()
            if error is not None:
                raise error
            break
    assert new_threads() == []
    loader.load_state_dict(loader.state_dict())
    assert list(loader) == epoch(0)[1:]
    loader.close()


@pytest.mark.parametrize("make", THREADED.values(), ids=THREADED)
@pytest.mark.parametrize("closing", [False, True])
def test_breaking_off_leaves_the_epoch_whether_or_not_the_loader_is_closed_then(make, closing):
    loader = Loader(make())
    for _ in range(3):
        take(loader, 1)
        if closing:
            loader.close()
    take(loader, 2)
    loader.set_epoch(7)
    with loader if closing else nullcontext():
        assert next(iter(loader)) == epoch(7)[0]
    state = loader.state_dict()
    assert list(loader) == epoch(8)
    assert list(resumed(state, make())) == epoch(7)[1:]
    loader.close()


def test_set_epoch_after_closing_within_an_epoch_is_in_the_state():
    loader = Loader(Numbers())
    take(loader, 1)
    loader.close()
    loader.set_epoch(5)
    state = loader.state_dict()
    assert list(loader) == list(resumed(state, Numbers())) == epoch(5)


def test_closing_before_an_item_is_taken_leaves_nothing():
    loader = Loader(Numbers())
    take(loader, 1)
    loader.load_state_dict(loader.state_dict())
    for _ in range(2):
        with loader:
            iter(loader)
    assert list(loader) == epoch(0)[1:]


def test_after_an_exception_in_the_graph_closing_leaves_nothing():
    failing = [(0, 1)]
    loader = Loader(Mapper(Numbers(), lambda item: 1 / 0 if item in failing else item))
    with pytest.raises(ZeroDivisionError), loader:
        list(loader)
    failing.clear()
    assert list(loader) == epoch(0)[1:]


def test_as_a_context_manager_it_lets_exceptions_pass():
    with pytest.raises(ValueError, match="in the loop"), Loader(Numbers()) as loader:
        take(loader, 1)
        raise ValueError("in the loop")


@pytest.mark.slow
@pytest.mark.parametrize("stop", [Loader.close, iter], ids=["close", "iter"])
def test_a_thread_that_hangs_is_an_error_and_loses_nothing(stop):
    go_on, inside = threading.Event(), threading.Event()

    def process(item):
        if item == (0, 1):
            inside.set()
            go_on.wait(30)
        return item

    loader = Loader(Prefetcher(Mapper(Numbers(), process), 2), stop_timeout_s=1)
    take(loader, 1)
    inside.wait(30)
    with pytest.raises(TimeoutError, match=r"`Prefetcher` is still inside .* after 1 s"):
        stop(loader)
    state = loader.state_dict()
    go_on.set()
    following = epoch(1) if stop is iter else epoch(0)[1:]
    assert list(resumed(state, Prefetcher(Mapper(Numbers(), process), 2))) == following
    assert list(loader) == epoch(1)
    loader.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_second_thread_in_next_is_an_error_and_disturbs_nothing(ahead):
    inside, go_on = threading.Event(), threading.Event()

    def process(item):
        inside.set()
        go_on.wait(30)
        return item

    node = Mapper(Numbers(), process)
    loader = Loader(Prefetcher(node, 2) if ahead else node)
    iterator = iter(loader)
    first = []
    thread = threading.Thread(target=lambda: first.append(next(iterator)))
    thread.start()
    assert inside.wait(30)
    with pytest.raises(RuntimeError, match="another thread is inside of `next`.*one thread must"):
        next(iterator)
    go_on.set()
    thread.join(30)
    assert first + list(iterator) == epoch(0)
    loader.close()


def test_threads_may_take_turns():
    iterator, taken = iter(Loader(Numbers())), []
    for _ in range(3):
        thread = threading.Thread(target=lambda: taken.append(next(iterator)))
        thread.start()
        thread.join(30)
    assert taken == epoch(0)


# Length.


@pytest.mark.parametrize(
    ("root", "length"),
    [
        (sampled(10), 10),
        (Mapper(sampled(10), str), 10),
        (Prefetcher(Batcher(sampled(10), 3), 2), 3),
        (Batcher(sampled(10), 3, drop_last=False), 4),
        (IterableWrapper(range(10)), 10),
        (SamplerWrapper(DistributedSampler(range(10), 3, 0)), 4),
        (ParallelMapper(sampled(10), str, 2, prebatch=4), 10),
    ],
    ids="sampler mapper prefetcher batcher wrapper sampler-wrapper prebatched".split(),
)
def test_the_length_of_an_epoch(root, length):
    loader = Loader(root)
    assert len(loader) == length
    assert len(list(loader)) == length
    assert len(loader) == length
    loader.close()


def test_the_length_of_dynamic_batches_is_not_known():
    for root in (WindowBucketer(LengthObserver(sampled()), 100), Numbers()):
        with pytest.raises(TypeError, match="does not know its length before the epoch has ended"):
            len(Loader(root))
        with pytest.raises(TypeError, match="measure progress in samples, by `local_samples`"):
            len(Loader(root))
    assert len(list(Loader(Numbers()))) == 3  # `list` asks for a length, and does without


def test_the_whole_graph_goes_on_after_close():
    def make():
        processed = ParallelProcessor(sampled(30), lambda n: {"input_ids": [1] * (n % 7 + 1)})
        return GroupCollator(WindowBucketer(LengthObserver(processed), 20, window=8))

    def widths(loader, count=None):
        return [tuple(batch["input_ids"].shape) for batch in islice(loader, count)]

    whole = widths(Loader(make()))
    loader = Loader(make())
    first = widths(loader, 3)
    loader.close()
    loader.load_state_dict(loader.state_dict())
    assert first + widths(loader) == whole


def test_a_second_thread_cannot_begin_an_epoch_while_an_item_is_taken():
    class Waiting(Numbers):
        def next(self):
            inside.set()
            go_on.wait(30)
            return super().next()

    inside, go_on, items = threading.Event(), threading.Event(), []
    loader = Loader(Waiting())
    assert loader
    thread = threading.Thread(target=lambda: items.extend(loader))
    thread.start()
    assert inside.wait(30)
    with pytest.raises(RuntimeError, match="one thread must take all items"):
        iter(loader)
    go_on.set()
    thread.join(30)
    assert items == epoch(0)
