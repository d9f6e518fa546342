import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, IterableDataset
from torchdata.nodes import Prefetcher

from odb_nodes import IterableSource, Loader, ODBDataLoader, SampleError, StateError
from odb_nodes._core import progress
from odb_nodes.testing import assert_resumes_exactly


def source(iterable, rank=0, world_size=1):
    return IterableSource(iterable, rank, world_size)


def epoch_of(node):
    """The items of the next epoch, its end included."""
    node.reset(None)
    return list(node)


class Shuffled(IterableDataset):
    """Another order in every epoch, as `set_epoch` says; counts what is read of it."""

    def __init__(self, size=6):
        self.size, self.epoch, self.told, self.reads = size, 0, [], 0

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.told.append(epoch)

    def __iter__(self):
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        for item in order:
            self.reads += 1
            yield (self.epoch, item)


class Resumable(Shuffled):
    """As streaming datasets are: restored once it is iterated, and then for that iteration only.

    Its state is right from the first item of an iteration on; before, there is none.
    """

    def __init__(self, size=6):
        super().__init__(size)
        self.position, self._start = None, 0

    def __iter__(self):
        self.position, self._start = self._start, 0
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        for item in order[self.position :]:
            self.reads += 1
            self.position += 1
            yield (self.epoch, item)

    def state_dict(self):
        if self.position is None:
            raise RuntimeError("there is no state before the first item")
        return {"position": self.position}

    def load_state_dict(self, state):
        self._start, self.position = state["position"], None


# What it yields.


@pytest.mark.parametrize("iterable", [[3, 1, 2], (3, 1, 2), {3: 0, 1: 0, 2: 0}, "312"], ids=str)
def test_any_iterable_is_read_anew_in_every_epoch(iterable):
    node = source(iterable)
    assert epoch_of(node) == epoch_of(node) == list(iterable)


@pytest.mark.parametrize(
    "iterator", [(n for n in range(3)), iter([1, 2]), map(str, [1]), zip([1], strict=True)]
)
def test_what_can_be_read_only_once_is_refused(iterator):
    with pytest.raises(TypeError, match=r"`iterable` must be .* but is an? `\w+` instead\. Wrap"):
        source(iterator)


@pytest.mark.parametrize("nothing", [3, None, object()])
def test_what_cannot_be_iterated_is_refused(nothing):
    with pytest.raises(TypeError, match="`iterable` must be an iterable"):
        source(nothing)


@given(size=st.integers(1, 200), world_size=st.integers(1, 17))
def test_ranks_share_the_items_out(size, world_size):
    items = list(range(size))
    nodes = [source(items, rank, world_size) for rank in range(world_size)]
    shards = [epoch_of(node) for node in nodes]
    assert shards == [items[rank::world_size] for rank in range(world_size)]
    assert [len(node) for node in nodes] == [len(shard) for shard in shards]


def test_the_rank_is_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert epoch_of(IterableSource(range(8))) == [1, 4, 7]


def test_items_may_be_none():
    assert epoch_of(source([None, 1, None])) == [None, 1, None]


def test_a_length_is_known_where_the_iterable_knows_its_own():
    assert len(source([1, 2, 3])) == 3
    with pytest.raises(TypeError, match="`Shuffled` has no length"):
        len(source(Shuffled()))


# Epochs.


@pytest.mark.parametrize("kind", [Shuffled, Resumable])
def test_the_iterable_is_told_every_epoch(kind):
    data = kind()
    node = source(data)
    epochs = [epoch_of(node) for _ in range(3)]
    assert data.told == [0, 1, 2]
    assert [{epoch for epoch, _ in items} for items in epochs] == [{0}, {1}, {2}]


def test_set_epoch_is_passed_on_at_the_next_reset():
    data = Shuffled()
    node = source(data)
    node.reset(None)
    node.set_epoch(7)
    assert data.told == [0]
    epoch_of(node)
    epoch_of(node)
    assert data.told == [0, 7, 8]


def test_a_restored_epoch_is_passed_on_before_anything_is_read():
    node, data = source(Shuffled()), Shuffled()
    node.set_epoch(4)
    node.reset(None)
    read = [next(node) for _ in range(2)]
    again = source(data)
    again.reset(node.get_state())
    assert data.told == [4]
    assert read + list(again) == epoch_of(source_at(4))


def source_at(epoch):
    node = source(Shuffled())
    node.set_epoch(epoch)
    return node


class OfItsLoader(Shuffled):
    """Has a state that only a loader of its own kind can ask for, as LitData's and MosaicML's."""

    def state_dict(self, num_samples_yielded, num_workers, batch_size):
        raise AssertionError

    load_state_dict = state_dict


def test_an_iterable_whose_state_takes_arguments_is_read_again():
    assert_resumes_exactly(lambda: Loader(source(OfItsLoader())), epochs=3)


def test_what_splits_itself_over_the_ranks_is_not_split_again(monkeypatch):
    name = {"__module__": "litdata.streaming.dataset"}
    streaming = type("StreamingDataset", (Shuffled,), name)()
    assert len(epoch_of(source(streaming, 1, 2))) == 3  # of ranks within one process
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"`StreamingDataset` splits itself .* `sharded=True`"):
        source(streaming, 1, 2)
    assert len(epoch_of(source(streaming))) == 6
    sampler = DistributedSampler(range(20), 2, 0)
    with pytest.raises(ValueError, match=r"`DistributedSampler` splits itself"):
        IterableSource(sampler, 0, 2, yields_indices=True)


def test_a_stock_sampler_is_an_iterable_with_epochs():
    sampler = DistributedSampler(range(20), num_replicas=1, rank=0, seed=3)
    epochs = [epoch_of(node) for node in [source(sampler)] for _ in range(3)]
    for epoch, items in enumerate(epochs):
        sampler.set_epoch(epoch)
        assert items == list(sampler)


# State.


@pytest.mark.parametrize(
    "make",
    [
        lambda: source([5, 6, 7, 8]),
        lambda: source([5]),
        lambda: source(range(8), 1, 3),
        lambda: source(Shuffled()),
        lambda: source(Shuffled(7), 2, 3),
        lambda: source(Resumable()),
        lambda: source(Resumable(7), 2, 3),
        lambda: source(Shuffled(1)),
        lambda: Prefetcher(source(Resumable(3)), 2),
        lambda: source(DistributedSampler(range(5), num_replicas=1, rank=0)),
    ],
    ids="list one-item range-shard dataset dataset-shard stateful stateful-shard one-sample "
    "stateful-prefetched sampler".split(),
)
def test_it_resumes_exactly_at_every_step(make):
    assert_resumes_exactly(make, epochs=3, chain=2)


@pytest.mark.parametrize("kind", [Shuffled, Resumable])
def test_an_empty_shard_resumes_into_the_next_epoch(kind):
    node, again = source(kind(2), 2, 3), source(kind(2), 2, 3)
    for _ in range(2):
        assert epoch_of(node) == []
    again.reset(node.get_state())
    assert list(again) == []
    assert again.get_state() == node.get_state()
    again.reset(None)
    assert again.get_state()["epoch"] == 2


@pytest.mark.parametrize(("kind", "reads"), [(Shuffled, 6), (Resumable, 2)])
def test_what_has_a_state_of_its_own_is_not_read_again(kind, reads):
    node, data = source(kind()), kind()
    node.reset(None)
    for _ in range(4):
        next(node)
    again = source(data)
    again.reset(node.get_state())
    assert list(again) == list(node)
    assert data.reads == reads


def test_a_state_asked_for_before_the_first_item_does_not_ask_the_iterable():
    node, again = source(Resumable()), source(Resumable())
    node.reset(None)
    start = node.get_state()
    again.reset(start)
    assert again.get_state() == start
    assert list(again) == list(node)


def test_a_state_asked_for_after_restoring_is_the_one_restored():
    node, again, third = source(Resumable()), source(Resumable()), source(Resumable())
    node.reset(None)
    next(node)
    again.reset(node.get_state())
    third.reset(again.get_state())
    assert node.get_state() == again.get_state() == third.get_state()
    assert list(third) == list(node)


@pytest.mark.parametrize("then", [None, "start"])
def test_a_restored_position_that_was_not_used_is_forgotten(then):
    """A dataset restored lazily must not carry the position over into another iteration."""
    node = source(Resumable())
    node.reset(None)
    start = node.get_state()
    whole = list(node)
    node.reset({**start, "position": 4, "started": True, "iterable": {"position": 4}})
    node.reset(None if then is None else start)
    assert len(list(node)) == len(whole)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_an_iterable_that_starts_over_from_its_last_state_resumes_exactly_too():
    """`StatefulDataLoader` takes the state of its end for the beginning of its next epoch."""
    stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        return source(stateful_dataloader.StatefulDataLoader([5, 6, 7], batch_size=None))

    assert_resumes_exactly(make, epochs=2, chain=1)


def test_the_state_shares_nothing_with_the_iterable():
    class Live(Resumable):
        """Hands out, and keeps, one live object."""

        def __init__(self):
            super().__init__()
            self.live = {"position": 0, "seen": []}

        def __iter__(self):
            for item in super().__iter__():
                self.live["position"] = self.position
                self.live["seen"].append(item)
                yield item

        def state_dict(self):
            return self.live

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.live = state

    node, again = source(Live()), source(Live())
    node.reset(None)
    first = [next(node), next(node)]
    state = node.get_state()
    assert state["iterable"] == {"position": 2, "seen": first}
    rest = list(node)
    again.reset(state)
    assert list(again) == rest
    assert state["iterable"] == {"position": 2, "seen": first}


def test_a_failure_of_the_data_keeps_the_position():
    class Flaky(Shuffled):
        bad = True

        def __iter__(self):
            for epoch, item in super().__iter__():
                if self.bad and self.reads == 4:
                    raise OSError("no route to host")
                yield epoch, item

    data = Flaky()
    loader = Loader(source(data))
    items = []
    with pytest.raises(OSError, match="no route"):
        for item in loader:
            items.append(item)
    data.bad = False
    assert items + list(loader) == epoch_of(source(Shuffled()))


# What it refuses.


def test_nothing_at_all_is_an_error():
    with pytest.raises(SampleError, match=r"`iterable` \(`list`\) yielded no sample in epoch 0"):
        epoch_of(source([]))


def test_an_iterable_that_can_be_read_only_once_is_found_out_in_the_second_epoch():
    class Once:
        def __init__(self):
            self._it = iter([1, 2])

        def __iter__(self):
            return self._it

    node = source(Once())
    assert epoch_of(node) == [1, 2]
    with pytest.raises(SampleError, match=r"`Once`\) yielded no sample in epoch 1: .* only once"):
        epoch_of(node)


def test_a_rank_without_items_of_its_own_is_no_error():
    assert epoch_of(source([1], 1, 2)) == []


def test_data_that_has_shrunk_is_found_out_when_the_state_is_loaded():
    node = source([1, 2, 3, 4])
    node.reset(None)
    for _ in range(3):
        next(node)
    message = r"IterableSource stands at item 3, but the iterable ended after 2\. Resume over"
    with pytest.raises(StateError, match=message):
        source([1, 2]).reset(node.get_state())


@pytest.mark.parametrize(("field", "value"), [("rank", 0), ("world_size", 3)])
def test_a_state_of_another_rank_is_refused_by_name(field, value):
    config = {"rank": 1, "world_size": 2}
    state = IterableSource([1, 2, 3], **config).state_dict()
    message = rf"IterableSource: `{field}` was {config[field]} when saved, but is {value} now"
    with pytest.raises(StateError, match=message):
        IterableSource([1, 2, 3], **{**config, field: value}).reset(state)


@pytest.mark.parametrize("given", [{"rank": 0}, {"world_size": 2}])
def test_rank_and_world_size_belong_together(given):
    with pytest.raises(ValueError, match="`rank` and `world_size` must be given together"):
        IterableSource([1], **given)


def test_an_order_that_is_not_seeded_is_found_out():
    class Unseeded:
        def __iter__(self):
            return iter(torch.randperm(100).tolist())

    node = IterableSource(Unseeded(), 0, 1)
    node.reset(None)
    for _ in range(10):
        next(node)
    with pytest.raises(StateError, match="`Unseeded` yielded other items .* not seeded"):
        IterableSource(Unseeded(), 0, 1).reset(node.state_dict())


class UnseededSamples(IterableDataset):
    """Samples of one length, in an order that nobody can draw again."""

    def __iter__(self):
        order = list(range(300))
        random.shuffle(order)
        for number in order:
            yield {"id": number, "input_ids": [1] * 10}


@pytest.mark.parametrize("state", ["replay", "payload"])
def test_samples_in_an_order_that_is_not_seeded_are_not_lost(state):
    def make_loader():
        return ODBDataLoader(UnseededSamples(), token_budget=512, window=32, state=state)

    loader, again = make_loader(), make_loader()
    it = iter(loader)
    for _ in range(3):
        next(it)
    again.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match=r"yielded other items .* not seeded.* Seed it in"):
        iter(again)


def test_only_items_of_this_rank_are_compared():
    """The others are for another rank to compare; else each rank would digest the whole dataset."""

    class OthersDiffer:
        def __iter__(self):
            return iter([0, random.random(), 2, random.random(), 4])

    node, again = (source(OthersDiffer(), 0, 2) for _ in range(2))
    node.reset(None)
    assert [next(node), next(node), next(node)] == [0, 2, 4]
    again.reset(node.get_state())
    assert list(again) == []


def test_reading_again_for_long_says_how_far_it_is(monkeypatch, caplog):
    node = source(Shuffled(30))
    state = [node.state_dict() for _ in node][-1]
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    source(Shuffled(30)).reset(state)
    first = "items of `Shuffled` read again up to the state's position: 1 of 30 after 0 s"
    assert caplog.messages[0] == first
