"""The items of a source that has no keys: numbered, and read again from a state of the source."""

import gzip
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import fewer
from torchdata.nodes import BaseNode, Mapper

from odb_nodes import (
    IterableSource,
    JsonlSource,
    LengthObserver,
    Loader,
    ParallelProcessor,
    SampleError,
    ShardedSampler,
    Skipped,
    SourceMixer,
    StateError,
    WindowBucketer,
    WorkerOptions,
)
from odb_nodes.core.contract import NodeState, StatefulNode, copy_state
from odb_nodes.core.contract.config import loading_with
from odb_nodes.core.contract.numbered_items import NumberedItems
from odb_nodes.core.sample import ItemKey
from odb_nodes.testing import assert_resumes_exactly

SIZE, WINDOW, BUDGET = 120, 16, 150


class Letters(BaseNode):
    """A node of a user: no keys, a state that is a position, and counts of what it is asked for."""

    def __init__(self, size=SIZE, fails_at=None):
        super().__init__()
        self.size, self.fails_at, self.position = size, fails_at, 0
        self.states, self.reads, self.resets = 0, [], 0

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.position = initial_state["position"] if initial_state else 0
        self.resets += 1

    def get_state(self):
        self.states += 1
        return {"position": self.position}

    def next(self):
        if self.position == self.size:
            raise StopIteration
        self.position += 1  # before it fails: the item is lost
        if self.position - 1 == self.fails_at:
            raise OSError("disk")
        self.reads.append(self.position - 1)
        return f"item {self.position - 1}"


class Chunks(StatefulNode):
    """The same items, several at a time; it changes the state that it is reset with."""

    @dataclass(kw_only=True)
    class STATE(NodeState):
        positions: list

    def __init__(self, size=SIZE):
        super().__init__()
        self.size, self.positions, self.reads, self.saved = size, [0], [], 0

    def begin_epoch(self):
        self.positions = [0]

    def save(self):
        self.saved += 1
        return self.STATE(positions=self.positions)

    def next(self):
        raise NotImplementedError

    def next_chunk(self, count):
        first = self.positions[0]
        last = min(first + count, self.size)
        if first == last:
            raise StopIteration
        self.positions[0] = last
        self.reads += range(first, last)
        return names(range(first, last)), [None] * (last - first)

    def reset(self, initial_state=None):
        super().reset(initial_state)
        if initial_state is not None:
            initial_state["positions"].clear()


class Keyed(Letters):
    """It tells keys, by which it cannot read."""

    def item_key(self):
        return ItemKey("", 1000 + self.position, 1)


def numbered(distance=4, source=None, **options):
    source = source or Letters(**options)
    source.reset(None)
    items = NumberedItems(source, "a node", distance)
    items.begin()
    return items, source


def resumed(items, number, source=None, distance=4):
    """The items of a fresh source, from the state for an item, and those that are kept."""
    first, state = items.state_at(number)
    source = source or Letters()
    source.reset(state)
    again = NumberedItems(source, "a node", distance)
    again.restore(state, first, number)
    return again, source


def taken(items, count):
    result = []
    while len(result) < count:
        result += items.take(count - len(result))[0]
    return result


def rest_of(items):
    result = []
    while True:
        try:
            result += items.take(7)[0]
        except StopIteration:
            return result


def names(numbers):
    return [f"item {number}" for number in numbers]


# --- states, and items that are read again --------------------------------------------------------


@given(st.data())
@fewer(3)
def test_from_any_state_the_kept_items_and_the_rest_are_read_again(data):
    size, distance = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 9))
    items, _ = numbered(distance, size=size)
    oldest = 0
    items.keep_from(oldest, distance)
    out = 0  # what is taken and not out is with workers
    while items.position < size and data.draw(st.integers(0, 9)):
        taken(items, min(data.draw(st.integers(1, 6)), size - items.position))
        out = data.draw(st.integers(out, items.position))
        oldest = data.draw(st.integers(oldest, out))
        items.keep_from(oldest, distance := data.draw(st.integers(1, 9)))
        items.forget(out)
        first, _ = items.state_at(out)
        assert first <= oldest
    again, source = resumed(items, out, Letters(size), distance)
    again.keep_from(oldest, distance)
    wanted = data.draw(st.sets(st.integers(oldest, out - 1))) if oldest < out else set()
    for holder, most in (again, out), (items, items.position):
        by_number = holder.read_again(wanted)
        assert by_number == {number: (f"item {number}", None) for number in wanted}
        assert holder.position == most
    assert len(source.reads) == len({*source.reads})  # in order, once
    assert rest_of(again) == names(range(out, size))
    assert rest_of(items) == names(range(most, size))
    assert again.read_again(wanted).keys() == wanted  # after the end, too
    with pytest.raises(StopIteration):
        again.take(1)


def test_states_keep_their_distance_and_unneeded_ones_are_dropped():
    items, source = numbered(distance=10)
    items.keep_from(0, 10)
    taken(items, 100)
    assert source.states == 10  # before 0, 10, ..., 90
    assert items.state_at(100)[0] == 0
    items.keep_from(57, 20)
    items.forget(100)
    assert items.state_at(100)[0] == items.state_at(0)[0] == 50
    assert items.state_at(53)[0] == 50  # where 47 of them are not out yet
    items.keep_from(None, 20)
    assert items.state_at(95)[0] == 90
    taken(items, 20)
    assert source.states == 11  # before 110
    items.note_state()
    assert items.state_at(120) == (120, {"position": 120})
    assert source.resets == 1


def test_a_state_that_is_noted_does_not_replace_those_that_are_needed():
    items, _ = numbered()
    items.keep_from(3, 4)
    taken(items, 10)
    assert not items.note_state()
    assert items.state_at(10)[0] == 0
    assert not items.note_state()
    items.keep_from(10, 4)
    assert items.note_state()
    assert items.state_at(10)[0] == 10


def test_of_a_source_of_chunks_states_are_as_far_apart_and_are_kept_as_they_were():
    items, source = numbered(distance=10, source=Chunks())
    items.keep_from(0, 10)
    assert taken(items, 95) == names(range(95))
    assert source.saved == 10
    for _ in range(2):
        assert items.read_again([31])[31][0] == "item 31"
        assert source.reads[-65:] == [*range(30, 95)]
    assert rest_of(items) == names(range(95, SIZE))


def test_keys_that_the_source_tells_come_with_the_items():
    items, _ = numbered(source=Keyed())
    items.keep_from(0, 4)
    taken(items, 9)
    again = items.make_again([ItemKey("", number, 1) for number in (7, 2)])
    assert [run[row] for run, row in again.take([0, 1])] == ["item 7", "item 2"] and again.are_made
    reread = items.read_again([7, 2])
    assert {number: key.key for number, (_, key) in reread.items()} == {7: 1008, 2: 1003}


def test_after_a_restore_the_source_is_read_forward_once():
    items, _ = numbered()
    items.keep_from(13, 4)
    taken(items, 30)
    again, source = resumed(items, 30)
    assert source.reads == []  # somebody may ask for some of these
    again.read_again([14, 20])
    assert source.reads == [*range(12, 30)] and taken(again, 1) == names([30])
    again, source = resumed(items, 30)
    assert taken(again, 1) == names([30])
    assert source.reads == [*range(12, 31)] and source.resets == 1


# --- what does not fit ----------------------------------------------------------------------------


def state_after(count, kept=0):
    items, _ = numbered()
    items.keep_from(kept, 4)
    if count == SIZE:
        rest_of(items)
    else:
        taken(items, count)
    return items


@pytest.mark.parametrize("how", ["take", "read_again", "catch_up"])
def test_a_source_that_ends_before_an_item_that_it_had_yielded_is_an_error(how):
    again, _ = resumed(state_after(30), 30, Letters(25))
    calls = {"take": lambda: again.take(1), "read_again": lambda: again.read_again([3])}
    with pytest.raises(StateError, match="a node cannot .* the source ended before sample 25 of"):
        calls.get(how, again.catch_up)()


def test_a_source_that_has_more_than_it_had_is_an_error():
    again, _ = resumed(state_after(SIZE), SIZE, Letters(SIZE + 1))
    with pytest.raises(StateError, match=f"had ended after {SIZE} samples .* has more now"):
        again.expect_end()
    again, _ = resumed(state_after(SIZE), SIZE)
    again.expect_end()
    with pytest.raises(StopIteration):
        again.take(1)


@pytest.mark.parametrize("numbers", [[11], [30], [12, 99], [-1]])
def test_numbers_that_no_state_is_for_are_an_error(numbers):
    again, _ = resumed(state_after(30, kept=13), 30)
    with pytest.raises(StateError, match="the state of a node is damaged"):
        again.read_again(numbers)


@pytest.mark.parametrize(("first", "position"), [(-1, 5), (6, 5)])
def test_a_state_after_its_position_is_an_error(first, position):
    items, _ = numbered()
    with pytest.raises(StateError, match="the state of a node is damaged"):
        items.restore({"position": 3}, first, position)


# --- graphs over sources without keys -------------------------------------------------------------


class Process:
    """Makes a sample of a number, with random tokens; notes which."""

    def __init__(self, changed=(), skipped=()):
        self.changed, self.skipped, self.made = changed, skipped, []
        self.fault = lambda number: None  # may return what is made in place of a sample

    def __call__(self, item):
        number = int(str(getattr(item, "item", item)).split()[-1])
        if (faulty := self.fault(number)) is not None:
            return faulty
        self.made.append(number)
        if number in self.skipped:
            return Skipped("empty")
        drawn = [random.randrange(100) for _ in range(3 + number * 7919 % 31)]
        return {"input_ids": [number, *drawn, number in self.changed]}


def numbers_of(groups, count=None):
    numbers = []
    for group in groups:
        numbers.append([sample.data["input_ids"][0] for sample in group])
        if len(numbers) == count:
            break
    return numbers


def gz(folder):
    path = folder / "data.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write("".join(f"{number}\n" for number in range(SIZE)))
    return JsonlSource(path, rank=0, world_size=1, shuffle=False)


def mixed(_):
    return SourceMixer({"a": ShardedSampler(60, rank=0, world_size=1), "b": Letters(60)})


SOURCES = {
    "iterable": lambda _: IterableSource([f"item {n}" for n in range(SIZE)], 0, 1),
    "own node": lambda _: Letters(),
    "compressed": gz,
    "mixture": mixed,
}
every_source = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)


def pool_of(source, process=None, workers=0, between=None, exclude=None, **options):
    workers = WorkerOptions(num_workers=workers, chunk_size=5, method="thread")
    node = ParallelProcessor(
        source, process or Process(), seed=3, workers=workers, rank=0, world_size=1
    )
    node = LengthObserver(Mapper(node, lambda sample: sample) if between else node)
    return WindowBucketer(node, BUDGET, WINDOW, exclude=exclude, **options)


@pytest.mark.filterwarnings("ignore:.*is skipped")
@pytest.mark.filterwarnings("ignore:of the .* skipped by processing")
@pytest.mark.parametrize("between", [False, True], ids=["right below", "a node between"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("state", ["replay", "payload"])
@every_source
@pytest.mark.slow
@pytest.mark.sampled(8)
def test_a_graph_without_keys_resumes_exactly_at_every_step(
    source, state, workers, between, tmp_path
):
    def make():
        process = Process(skipped=range(5, SIZE, 11))
        has_keys = source is not SOURCES["own node"] and not between
        exclude = {"": [8, 9, 40], "a": [7]} if has_keys else None
        options = {"between": between, "exclude": exclude, "state": state}
        return Loader(pool_of(source(tmp_path), process, workers, **options))

    assert_resumes_exactly(make, every=9, horizon=12, chain=1)


def read_numbers(source, count):
    """A state after so many groups, and the groups that follow."""
    node = pool_of(source)
    node.reset(None)
    numbers_of(node, count)
    return node.state_dict(), numbers_of(node)


@pytest.mark.parametrize("workers", [0, 2])
def test_items_are_reread_at_once_and_processed_when_needed(workers):
    state, rest = read_numbers(Letters(), 6)
    node = pool_of(source := Letters(), process := Process(), workers)
    node.reset(state)
    held = len(node.store)
    pulled = state["pulled"]
    assert source.reads[: pulled - source.reads[0]] == [*range(source.reads[0], pulled)]
    assert node.replayed_samples == held > WINDOW // 2
    assert workers or process.made == []
    first = numbers_of(node, 1)
    assert [*first, *numbers_of(node)] == rest
    assert len(process.made) == len({*process.made})  # each once, and none that was out before
    assert {*process.made} == {*sum(rest, [])}


def test_the_samples_of_a_source_without_keys_say_their_numbers():
    def ordinals(source):
        node = pool_of(source)
        node.reset(None)
        group = next(node)
        again = pool_of(type(source)() if isinstance(source, Letters) else source)
        again.reset(node.state_dict())
        held = again.store.look(again.store.ordinals())
        assert [sample.ordinal for sample in held] == again.store.ordinals().tolist()
        return [(sample.key, sample.ordinal) for sample in group]

    assert all(key is None and number is not None for key, number in ordinals(Letters()))
    iterable = SOURCES["iterable"](None)
    assert all(key == number for key, number in ordinals(iterable))


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("kind", [Letters, Keyed])
def test_an_order_that_is_not_seeded_is_an_error_that_says_so(kind, between):
    class Reordered(kind):
        def next(self):
            item = super().next()
            return f"item {(self.position * 7) % SIZE}" if self.position > 3 else item

    node = pool_of(kind(), between=between)
    node.reset(None)
    numbers_of(node, 4)
    state = node.state_dict()
    node = pool_of(Reordered(), between=between)
    with pytest.raises(
        StateError, match=r"cannot resume .*sample \d+ of the epoch.* order of the source is not"
    ):
        node.reset(state)
        list(node)


def test_items_of_each_source_are_counted_where_all_can_be_read_by_key():
    def counts(source):
        node = pool_of(source)
        node.reset(None)
        processor, states = node.source, []
        while hasattr(processor, "source") and not isinstance(processor, ParallelProcessor):
            processor = processor.source
        for _ in node:
            states.append(copy_state(vars(processor.save())))
        return [*states, vars(processor.save())]

    by_key = {name: ShardedSampler(60, rank=0, world_size=1) for name in "ab"}
    for state in counts(SourceMixer(by_key)):
        assert sum(items for items, _ in state["taken_of"].values()) == state["taken"]
    assert all(not state["taken_of"] for state in counts(mixed(None)))


FAULTS = {
    "observe": lambda number: {"x": number},
    "process": lambda number: 1 // 0,
}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("observe", r"^sample \d+ of the epoch, made again: a sample has no length"),
        (
            "process",
            r"made again for a restore \(sample \d+ of the epoch\), cannot be processed",
        ),
    ],
)
def test_an_error_of_a_sample_without_a_key_says_its_number(fault, message):
    node = pool_of(Letters())
    node.reset(None)
    numbers_of(node, 6)
    state = node.state_dict()
    again = pool_of(Letters(), process := Process())
    process.fault = lambda number: FAULTS[fault](number) if number < state["pulled"] else None
    again.reset(state)
    with pytest.raises(SampleError, match=message):
        list(again)


@pytest.mark.parametrize("eagerly", [{"makes_all": True}, {"may_differ": True}, {}])
@pytest.mark.filterwarnings("ignore:sample .* Further changed samples are not named")
def test_a_changed_sample_is_an_error_before_its_group(eagerly):
    make = SOURCES["iterable"]
    node = pool_of(make(None))
    node.reset(None)
    numbers_of(node, 4)
    state, waiting = node.state_dict(), node.store.ordinals().tolist()
    again = pool_of(make(None), process := Process(changed=waiting))
    message = r"sample \d+ of the epoch \(key \d+\) has other content"
    with loading_with(**eagerly):
        if "makes_all" in eagerly:
            with pytest.raises(StateError, match=message):
                again.reset(state)
            return
        again.reset(state)
    assert sorted(process.made) == (waiting if eagerly else [])
    if eagerly:  # a change that is meant
        assert {*waiting} <= {*sum(numbers_of(again), [])}
    else:
        with pytest.raises(StateError, match=message):
            next(again)


def test_an_error_of_the_source_loses_no_sample_in_flight():
    def make(fails_at=None, workers=2):
        return pool_of(Letters(fails_at=fails_at), workers=workers)

    whole = make()
    whole.reset(None)
    expected = numbers_of(whole)
    for fails_at in range(0, SIZE, 13):
        node, numbers = make(fails_at), []
        node.reset(None)
        with pytest.raises(OSError, match="disk"):
            for group in node:
                numbers += numbers_of([group])
        mended = make(workers=0)
        mended.reset(node.state_dict())
        assert [*numbers, *numbers_of(mended)] == expected, fails_at
