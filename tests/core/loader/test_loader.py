"""A `Loader` goes on exactly, whatever is called in whatever order, and whatever raises."""

import copy
import gc
import pickle
import threading
import weakref
from contextlib import nullcontext, suppress
from importlib.metadata import version
from itertools import islice

import pytest
import torch
from graphs import ABOVE, BELOW, make
from hypothesis import example, given
from hypothesis import strategies as st
from refusals import refuses
from sampling import fewer
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler
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

from odb_nodes import LengthObserver, Loader, SampleError, ShardedSampler, StateError
from odb_nodes.testing import assert_resumes_exactly


class Numbers(BaseNode):
    """(epoch, 0), (epoch, 1), ...; can be told to raise."""

    def __init__(self, size=3):
        super().__init__()
        self.size, self.epoch, self.position, self.started = size, 0, 0, False
        self.requested = None
        self.faults = {}  # "next", "reset" or "state" -> exception, raised until it is taken out

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
        self.fail("reset")

    def next(self):
        self.fail("next")
        self.started = True
        if self.position == self.size:
            raise StopIteration
        self.position += 1
        return (self.epoch, self.position - 1)

    def get_state(self):
        if self.position == 2:
            self.fail("state")
        return {"place": (self.epoch, self.position, self.started)}

    def fail(self, what):
        if what in self.faults:
            raise self.faults[what]


def epoch(number, size=3):
    return [(number, index) for index in range(size)]


def take(loader, count):
    """Begin an epoch and take its first items; `None` takes all."""
    return list(islice(iter(loader), count))


def resumed(state, root=None, kind=Loader, **options):
    loader = kind(Numbers() if root is None else root, **options)
    loader.load_state_dict(state)
    return loader


def state_after(count, root=None, kind=Loader):
    """The state after `count` items of the first epoch, or after its end."""
    loader = kind(Numbers() if root is None else root)
    take(loader, count)
    return copy.deepcopy(loader.state_dict())


def collect(items, loader):
    """Append an epoch item by item, so that those before an exception are kept."""
    for item in loader:
        items.append(item)


def p1(kind):
    """A state that is loaded after `state_dict` is ignored, then applied an epoch late."""
    loader = kind(Numbers())
    loader.state_dict()
    loader.load_state_dict(state_after(1, kind=kind))
    return [list(loader), list(loader)]


def p2(kind):
    """After the state of an end is loaded, states stand still."""
    loader = resumed(state_after(None, kind=kind), kind=kind)
    return [loader.state_dict()["root"]["place"] for _ in range(2) for _ in loader]


def p3(kind):
    """An item that is None is taken for the end, and the epoch starts over."""
    root = IterableWrapper(["first", None, "last"])
    return list(resumed(state_after(1, root, kind), root, kind))


def p4(kind):
    """Items are counted twice after a resume."""
    loader = resumed(state_after(1, kind=kind), kind=kind)
    take(loader, 1)
    return loader.state_dict()["num_yielded"]


def p14(kind):
    """To ask for an iterator twice skips an epoch."""
    pulled = threading.Event()
    loader = kind(Prefetcher(Mapper(Numbers(), lambda item: pulled.set() or item), 2))
    iter(loader)
    pulled.wait(30)
    return list(loader)


def p18(kind):
    """An end that was not seen yet is lost."""
    loader = resumed(state_after(3, kind=kind), kind=kind)
    return [list(loader), list(loader)]


ENDS = [(e, i, True) for e in (1, 2) for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("run", "theirs", "ours"),
    [
        (p1, [epoch(0), epoch(0)[1:]], [epoch(0)[1:], epoch(1)]),
        (p2, [(0, 3, True)] * 6, ENDS),
        (p3, ["first", None, "last"], [None, "last"]),
        (p4, 3 if version("torchdata") < "0.12" else 2, 2),
        (p14, epoch(1), epoch(0)),
        (p18, [epoch(1), epoch(2)], [[], epoch(1)]),
    ],
)
def test_faults_of_torchdatas_loader_and_what_ours_does(run, theirs, ours):
    """Where the first fails, upstream is repaired: say so in docs/internals/upstream_faults.md."""
    assert run(StockLoader) == theirs
    assert run(Loader) == ours


@pytest.mark.parametrize("kind", [StockLoader, Loader])
def test_p22_stock_samplers_restored_at_the_end_of_an_epoch_go_on_with_the_next(kind):
    def root():
        return SamplerWrapper(DistributedSampler(range(9), num_replicas=1, rank=0, seed=1))

    run = kind(root())
    list(run)
    state = copy.deepcopy(run.state_dict())
    # The stock Loader looks ahead for a last item, and so repairs its own end, but not others'.
    assert list(resumed(state, root(), kind)) == list(run)


# What follows a state, and any sequence of calls.


class Expected:
    """What a `Loader` over `Numbers` is said to do, in as few words as possible."""

    def __init__(self, restart):
        self.restart = restart
        self.place = (0, 0, False)  # epoch, items out, end seen
        self.running = False  # there is an iterator
        self.held = False  # a state was loaded, or kept by `close`
        self.touched = False
        self.has_state = False  # the state of the place was taken
        self.requested = None  # by `set_epoch`: what begins next
        self.asked = None  # by `set_epoch`, of a loaded state within an epoch
        self.leaving = False  # closed after an item was taken, or failed to begin the next epoch
        self.left = False  # the latter, which a state says too

    @property
    def is_within(self):
        """Whether a state was loaded that goes on in its epoch."""
        return self.held and not self.leaving and self.place[1] > 0 and not self.place[2]

    @property
    def is_contradicted(self):
        """Whether `set_epoch` has named another epoch than that of a loaded state with items."""
        return self.is_within and self.place[1] < 3 and self.asked not in (None, self.place[0])

    def iter(self):
        self.has_state &= self.running and not self.touched
        if self.held:
            asked = self.asked if self.is_within else self.requested
            asks_for_another = asked is not None and (self.place[2] or asked != self.place[0])
            if asked is not None:
                self.requested = asked
            if self.leaving or (self.place[2] and self.restart) or asks_for_another:
                self.begin(self.place[0] + 1)
            elif asked is not None:
                self.requested = None
        elif not self.running:
            self.begin(0)
        elif self.touched:
            self.begin(self.place[0] + 1)
        self.held, self.running, self.touched, self.leaving = False, True, False, False
        self.asked, self.left = None, False

    def iter_raises(self):
        """Return whether `iter` has to reset the graph, which raises."""
        if self.running and not self.touched:
            return False
        if self.held or self.running:
            self.left = self.leaving = self.leaving or self.running
            self.held, self.running = True, False
        return True

    def takes_failing_state(self):
        """Return whether `iter` leaves an epoch where `Numbers` may fail to tell its state."""
        return self.running and self.touched and self.place[1] == 2 and not self.has_state

    def begin(self, following):
        self.place = (following if self.requested is None else self.requested, 0, False)
        self.requested = None

    def next(self):
        """Return the next item; `None` at the end."""
        self.touched, self.has_state = True, False
        number, index, _ = self.place
        self.place = (number, min(index + 1, 3), index == 3)
        return None if index == 3 else (number, index)

    def next_raises(self):
        """Return whether there is an item to take, which raises."""
        self.touched = True
        if self.place[2]:
            return False
        self.held, self.running, self.leaving = True, False, False
        return True

    def state(self):
        if not self.held and not self.running:
            self.iter()
        self.has_state = True
        return self.place, self.requested, self.left

    def load(self, state):
        self.place, self.requested, self.left = state
        self.held, self.running, self.leaving, self.asked = True, False, self.left, None

    def close(self):
        if self.running:
            self.held, self.running, self.leaving = True, False, self.touched

    def set_epoch(self, number):
        if self.is_within:
            self.asked = number
        else:
            self.requested, self.touched = number, True


CALLS = ["iter", "next", "next", "next", "save", "load", "kill", "close"]
RAISING = {"iter raises": "reset", "next raises": "next", "state raises": "state"}
"""Call -> where `Numbers` raises."""


def sequences(calls):
    return st.lists(st.one_of(st.sampled_from(calls), st.integers(0, 9)), max_size=25)


def compare_with_expected(make_root, operations, restart):
    root = make_root()
    loader, model = Loader(root, restart), Expected(restart)
    saved, it = [], None
    for operation in [*operations, "iter", "next", "next"]:
        if operation == "iter raises" or (operation == "next raises" and it is not None):
            is_iter = operation == "iter raises"
            raises = model.iter_raises() if is_iter else model.next_raises()
            root.faults[RAISING[operation]] = OSError("disk")
            with pytest.raises(OSError, match="disk") if raises else nullcontext():
                iter(loader) if is_iter else next(it, None)
            root.faults.clear()
            it = None if raises else it
            continue
        if operation == "state raises":
            if model.takes_failing_state():  # The iterator stays valid.
                root.faults["state"] = OSError("disk")
                with pytest.raises(OSError, match="disk"):
                    iter(loader)
                root.faults.clear()
            continue
        begins = operation == "iter" or (operation == "next" and it is None)
        if begins and model.is_contradicted:
            with pytest.raises(StateError, match=f"be given {model.place[0]}, .* remain"):
                iter(loader)
            continue
        if begins:
            it = iter(loader)
            model.iter()
        if operation == "next":
            assert next(it, None) == model.next()
        elif operation == "save":
            state, place = loader.state_dict(), model.state()
            assert (state["num_yielded"], state["ended"]) == place[0][1:]
            saved.append((state, place))
        elif operation in ("load", "kill") and saved:
            state, place = saved[len(saved) // 2]
            if operation == "kill":
                loader.close()
                root = make_root()
                loader = Loader(root, restart)
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            model.load(place)
            it = None
        elif operation == "close":
            loader.close()
            model.close()
            it = None
        elif isinstance(operation, int):
            loader.set_epoch(operation)
            model.set_epoch(operation)
    loader.close()


WITHIN, WHOLE = ["next", "save", "kill"], ["next"] * 4
"""A resume after one item, and an epoch of three."""


@given(sequences([*CALLS, *RAISING]), st.booleans())
@example(["next", "save", "load", "iter", "close"], True)  # what chance seldom draws
@example(["next", "iter raises", "save", "load"], True)
@example(["next", 7, "save", "load", 0, "next"], True)
@example([*WITHIN, 0, *WHOLE, 1, *WHOLE, 2, *WHOLE], True)  # the usual loop of epochs
@example([*WHOLE, "save", "kill", 1, *WHOLE, 2, *WHOLE], True)
@example(["next", "next", "next", "save", "kill", 0, "next", 1, *WHOLE], True)
@example(["save", "kill", 1, "next"], True)
@example([*WITHIN, 1, "iter", "iter", 0, "iter", 1, "iter", "next"], True)  # contradicts the state
@example(["next", 7, "next", "save", *WHOLE, "kill", *WHOLE, "load", 0, *WHOLE], True)
@example(["next", 7, "next raises", *WHOLE, *WHOLE], True)
@example(["next", 7, "save", "iter", *WHOLE], True)
@example(["next", 7, "close", "iter", *WHOLE], True)
@example(["next", "next", "state raises", "state raises", "iter", "next"], True)
@example(["next", "next", "state raises", *WHOLE], True)
@example([*WHOLE, 7, "iter raises", "close", "save", *WHOLE], True)
@example(["next", "iter raises", "close", "iter", *WHOLE], True)
@example(["next", "close", "save", "load", *WHOLE], True)
def test_any_sequence_of_calls_follows_the_model(operations, restart):
    compare_with_expected(Numbers, operations, restart)


@given(sequences(CALLS), st.booleans())
@example(["next", 7, "next", "save", *WHOLE, "kill", *WHOLE, "load", 0, *WHOLE], True)
@fewer(5)
def test_any_sequence_of_calls_does_the_same_behind_a_prefetcher(operations, restart):
    compare_with_expected(lambda: Prefetcher(Numbers(), 2), operations, restart)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_a_loader_is_an_error_with_a_remedy(duplicate):
    loader = Loader(Numbers())
    with pytest.raises(TypeError, match=r"a `Loader` cannot be copied .* load `state_dict\(\)`"):
        duplicate(loader)


@pytest.mark.parametrize("take_items", [iter, list, lambda loader: next(iter(loader))])
def test_an_unreferenced_loader_is_freed_at_once(take_items):
    """And so are the worker processes of its nodes, which would else last until a collection."""
    loader = Loader(Numbers())
    taken, gone = take_items(loader), weakref.ref(loader)
    gc.disable()
    try:
        del loader, taken
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "outdate", [iter, Loader.close, lambda loader: loader.load_state_dict(state_after(0))]
)
def test_an_older_iterator_is_no_longer_valid(outdate):
    loader = Loader(Numbers())
    it = iter(loader)
    assert iter(loader) is it  # as long as it has not yielded
    next(it)
    outdate(loader)
    with pytest.raises(RuntimeError, match="no longer valid"):
        next(it)


# States.


class Live(BaseNode):
    """Hands out its live state, and adopts the one it is given."""

    def reset(self, initial_state=None):
        super().reset(initial_state)
        fresh = {"seen": [], "at": torch.zeros(1)}
        self.state = fresh if initial_state is None else initial_state

    def next(self):
        if len(self.state["seen"]) == 4:
            raise StopIteration
        self.state["seen"].append(len(self.state["seen"]))
        self.state["at"] += 1
        return self.state["seen"][-1]

    def get_state(self):
        return self.state


def spoil(state):
    """Change a state deeply."""
    state["spoiled"] = True
    state["root"]["seen"].append("spoiled")
    state["root"]["at"] += 7


def test_a_state_is_the_callers_and_a_loaded_one_is_neither_changed_nor_kept():
    loader = Loader(Live())
    states = [loader.state_dict() for _ in loader]
    assert [len(saved["root"]["seen"]) for saved in states] == [1, 2, 3, 4]
    assert [saved["root"]["at"].item() for saved in states] == [1, 2, 3, 4]
    state, before = states[1], copy.deepcopy(states[1])
    loader = resumed(state, Live())
    spoil(loader.state_dict())
    it = iter(loader)
    spoil(loader.state_dict())
    assert loader.state_dict() == before
    assert list(it) == [2, 3]
    assert state == before
    loader.load_state_dict(state)
    spoil(state)
    assert loader.state_dict() == before
    assert list(loader) == [2, 3]


# Refusals.

START = Loader(Numbers()).state_dict()


def without(state, *keys):
    return {name: value for name, value in state.items() if name not in keys}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "must be a state saved by a Loader, .*'None'"),
        ({**START, "version": 99}, "`version` 99"),
        (without(START, "ended", "num_yielded"), "lacks `num_yielded`, `ended`"),
    ],
)
def test_load_state_dict_refuses_other_data_at_once(state, message):
    loader = Loader(Numbers())
    take(loader, 1)
    with pytest.raises(StateError, match=message):
        loader.load_state_dict(state)
    assert loader.state_dict()["num_yielded"] == 1


def sampler(size=4):
    return ShardedSampler(size, False, 0, 0, 1)


test_a_state_of_another_graph_is_refused_by_iter = refuses(
    [
        (sampler(), LengthObserver(sampler()), "loaded into `LengthObserver`"),
        (sampler(), Prefetcher(sampler(), 2), "by a `ShardedSampler`, but .* is a `Prefetcher`"),
        (sampler(), Batcher(sampler(), 2), "is a `Batcher`.* same nodes in the same order"),
        (Mapper(sampler(), str), Prefetcher(sampler(), 2), "snapshot.* same nodes in the same"),
        (Numbers(), Numbers(size=4), "but the graph yields more items"),
    ],
    lambda saved, root: iter(resumed(state_after(None, saved), root)),
    StateError,
)


@pytest.mark.parametrize("wrap", [lambda node: node, lambda node: Prefetcher(Mapper(node, abs), 2)])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_a_refused_state_stays_loaded_another_may_be_loaded_and_strict_is_for_one_load(wrap, used):
    good, bad = state_after(1, wrap(sampler())), state_after(1, wrap(sampler(5)))
    with Loader(wrap(sampler())) as loader:
        if used:
            take(loader, 2)
        loader.load_state_dict(bad, strict=False)
        with pytest.warns(UserWarning, match="`size` was 5 when saved, but is 4 now"):
            assert list(loader) == [1, 2, 3]
        loader.load_state_dict(bad)
        for _ in range(2):
            with pytest.raises(StateError, match="`size` was 5 when saved, but is 4 now"):
                iter(loader)
        assert loader.state_dict() == bad
        loader.load_state_dict(good)
        assert list(loader) == [1, 2, 3]


def wrapped(sampler):
    return Mapper(SamplerWrapper(sampler), str)


@pytest.mark.parametrize(
    ("root", "error", "message"),
    [
        ([1, 2], TypeError, "`root` must be a `BaseNode`"),
        (wrapped(RandomSampler(range(9))), ValueError, "cannot be drawn again: .*`ShardedSampler`"),
        (wrapped(SubsetRandomSampler(range(9))), ValueError, "cannot be drawn again"),
        (wrapped(BatchSampler(RandomSampler(range(9)), 2, False)), ValueError, "cannot be drawn"),
        (  # P20: its states lose and repeat items.
            Batcher(ParallelMapper(Numbers(), tuple, 2, in_order=False), 2),
            ValueError,
            r"`in_order` of `_?ParallelMapper\w*` must be True",
        ),
    ],
)
def test_a_root_that_is_refused(root, error, message):
    with pytest.raises(error, match=message):
        Loader(root)


def test_a_node_belongs_to_one_loader_until_it_is_closed_or_freed():
    node = Numbers()
    loader, other = Loader(Mapper(node, str)), Loader(Batcher(node, 2))
    first = next(iter(loader))
    with pytest.raises(RuntimeError, match="`Numbers` of this `Loader` is iterated by another"):
        iter(other)
    loader.close()
    assert list(other) == [epoch(1)[:2]]
    with pytest.raises(RuntimeError, match="iterated by another"):
        iter(loader)
    del other
    assert [first, *loader] == [str((0, 0)), *map(str, epoch(2))]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda loader: loader.set_epoch(-1), ValueError, "`epoch` must be in 0.."),
        (len, TypeError, "measure progress in samples"),
    ],
)
def test_invalid_calls_of_a_loader_are_refused(call, error, message):
    loader = Loader(Numbers())
    with pytest.raises(error, match=message):
        call(loader)
    assert loader and list(loader) == epoch(0)  # It is true without a length.


class ReadOnce(BaseNode):
    """A node whose reset does not begin its data anew."""

    def __init__(self):
        super().__init__()
        self.items, self.position = iter([1, 2]), 0

    def next(self):
        self.position += 1
        return next(self.items)

    def get_state(self):
        return {"position": self.position}


@pytest.mark.parametrize("make", [ReadOnce, lambda: Prefetcher(ReadOnce(), 2)])
@pytest.mark.parametrize("closing", [False, True])
def test_data_that_can_be_read_only_once_is_named_at_every_later_epoch(make, closing, new_threads):
    loader = Loader(make())
    assert list(loader) == [1, 2]
    for _ in range(2):
        if closing:
            loader.close()
        with pytest.raises(SampleError, match=r"\(`ReadOnce`\) is empty, or can be read only"):
            list(loader)
    assert new_threads() == []
    assert list(Loader(IterableWrapper([]))) == []  # as may be all epochs


# Exceptions in the graph, and close.


FRAGILE = {
    "mapper": lambda source, process: Mapper(source, process),
    "prefetcher": lambda source, process: Prefetcher(Mapper(source, process), 2),
    "rare snapshots": lambda source, process: Prefetcher(Mapper(source, process), 3, 4),
    "batcher": lambda source, process: Batcher(Prefetcher(Mapper(source, process), 1), 3, False),
    "unbatcher": lambda source, process: Unbatcher(
        Prefetcher(Mapper(Batcher(source, 4), process), 1)
    ),
    "observer": lambda source, process: LengthObserver(source, lambda item: len(process(item))),
    "above threads": lambda source, process: Mapper(Prefetcher(source, 2), process),
    "threads": lambda source, process: ParallelMapper(source, process, 2, snapshot_frequency=4),
    "prebatched": lambda source, process: ParallelMapper(source, process, 2, prebatch=3),
}


@pytest.mark.parametrize(
    ("name", "at"),
    [
        pytest.param(name, at, marks=[pytest.mark.slow] * (name in ("threads", "prebatched")))
        for name in FRAGILE
        for at in (0, 4)
    ],
)
def test_an_exception_stops_the_threads_and_is_raised_again_until_mended_and_loses_nothing(
    name, at, new_threads
):
    error = KeyboardInterrupt() if name == "above threads" else OSError("disk")
    faults, items = {(0, at)}, []

    def process(item):
        if not faults.isdisjoint(item if isinstance(item, list) else [item]):
            raise error
        return item

    loader = Loader(FRAGILE[name](Numbers(8), process))
    for closing in (False, True):
        with pytest.raises((type(error), SampleError)), loader if closing else nullcontext():
            collect(items, loader)
        assert new_threads() == []
        assert loader.state_dict()["num_yielded"] == len(items)
    state = loader.state_dict()
    faults.clear()
    again = [list(resumed(state, FRAGILE[name](Numbers(8), process))), list(loader)]
    assert again[0] == again[1]
    flat = [
        part for item in [*items, *again[0]] for part in (item if type(item) is list else [item])
    ]
    assert [getattr(part, "data", part) for part in flat] == epoch(0, 8)
    loader.close()


@pytest.mark.parametrize(
    ("prefetched", "error"),
    [(False, OSError("disk")), (True, OSError("disk")), (False, KeyboardInterrupt())],
)
@pytest.mark.parametrize("then", [None, Loader.close])
def test_a_state_that_could_not_be_taken_loses_nothing(prefetched, then, error):
    """A bare node moves on when its state fails; a `Prefetcher` begins again from an older one."""
    source, items = Numbers(), []
    source.faults["state"] = error
    loader = Loader(Prefetcher(source, 2) if prefetched else source)
    with pytest.raises(type(error)):
        collect(items, loader)
    source.faults.clear()
    if then is not None:
        with suppress(OSError, KeyboardInterrupt):
            then(loader)
    with nullcontext() if prefetched else pytest.raises(StateError, match="is unknown"):
        collect(items, loader)
        assert items == epoch(0)
    loader.load_state_dict(state_after(0, Prefetcher(Numbers(), 2) if prefetched else Numbers()))
    assert list(loader) == epoch(0)
    loader.close()


@pytest.fixture
def gate():
    """A process function that waits within the item (0, 1), and its events."""
    inside, go_on = threading.Event(), threading.Event()

    def process(item):
        if item == (0, 1):
            inside.set()
            assert go_on.wait(30)
        return item

    yield process, inside, go_on
    go_on.set()


@pytest.mark.slow
@pytest.mark.parametrize("stop", [Loader.close, iter], ids=["close", "iter"])
def test_a_thread_that_hangs_is_an_error_and_loses_nothing(stop, gate):
    process, inside, go_on = gate
    loader = Loader(Prefetcher(Mapper(Numbers(), process), 2), stop_timeout_s=1)
    take(loader, 1)
    assert inside.wait(30)
    with pytest.raises(TimeoutError, match=r"`Prefetcher` is still inside .* after 1 s"):
        stop(loader)
    state = loader.state_dict()
    go_on.set()
    following = epoch(1) if stop is iter else epoch(0)[1:]
    assert list(resumed(state, Prefetcher(Mapper(Numbers(), process), 2))) == following
    assert list(loader) == epoch(1)
    loader.close()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("again", ["next", "iter"])
def test_a_second_thread_is_an_error_while_one_takes_an_item_and_disturbs_nothing(
    ahead, again, gate
):
    process, inside, go_on = gate
    node = Mapper(Numbers(), process)
    loader = Loader(Prefetcher(node, 2) if ahead else node)
    iterator = iter(loader)
    items = [next(iterator)]
    thread = threading.Thread(target=lambda: items.append(next(iterator)))
    thread.start()
    assert inside.wait(30)
    while loader._moving.acquire(blocking=False):  # The thread is not there yet.
        loader._moving.release()
    with pytest.raises(RuntimeError, match="one thread must take all items"):
        next(iterator) if again == "next" else iter(loader)
    go_on.set()
    thread.join(30)
    assert items + list(iterator) == epoch(0)  # They may take turns.
    loader.close()


def test_no_epoch_begins_while_a_thread_is_still_inside_of_one_that_was_closed(gate):
    process, inside, go_on = gate
    loader, said = Loader(Mapper(Numbers(), process)), []

    def take_all(iterator):
        with pytest.raises(RuntimeError, match="no longer valid") as raised:
            list(iterator)
        said.append(raised)

    thread = threading.Thread(target=take_all, args=[iter(loader)])
    thread.start()
    assert inside.wait(30)
    loader.close()
    with pytest.raises(RuntimeError, match="one thread must take all items"):
        iter(loader)
    go_on.set()
    thread.join(30)
    assert said and list(loader) == epoch(1)


# --- graphs of nodes of torchdata resume exactly --------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("state", ["replay", "payload"])
@pytest.mark.parametrize("below", BELOW)
def test_every_step_of_three_epochs_over_every_source(below, state, exhaustive, sampled):
    if below == "ParallelMapper-process" and not exhaustive:
        pytest.skip("torchdata forks while its reader thread runs: now and then a worker hangs")
    options = sampled(every=13, horizon=12, chain=1)
    report = assert_resumes_exactly(lambda: make(below, state), epochs=3, **options)
    assert report.steps > 40


@pytest.mark.parametrize("above", ABOVE)
def test_every_step_of_three_epochs_under_every_node(above, sampled):
    assert_resumes_exactly(
        lambda: make("Mapper", above=above), epochs=3, **sampled(every=13, horizon=12, chain=1)
    )
