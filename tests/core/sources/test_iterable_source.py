import random

import pytest
import torch
from damaged_states import resealed
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.nodes import Prefetcher
from toys import Once

from odb_nodes import IterableSource, SampleError, StateError
from odb_nodes._support import progress
from odb_nodes.testing import assert_resumes_exactly


def source(iterable, rank=0, world_size=1):
    return IterableSource(iterable, rank, world_size)


def epoch_of(node):
    """The items of the next epoch, its end included."""
    node.reset(None)
    return list(node)


def taken(node, count):
    """A node after some items of an epoch."""
    node.reset(None)
    for _ in range(count):
        next(node)
    return node


class Shuffled(IterableDataset):
    """Another order in every epoch, as `set_epoch` says; counts what is read of it."""

    def __init__(self, size=6):
        self.size, self.epoch, self.epochs, self.reads = size, 0, [], 0

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.epochs.append(epoch)

    def order(self):
        return random.Random(self.epoch).sample(range(self.size), self.size)

    def __iter__(self):
        for item in self.order():
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
        for item in self.order()[self.position :]:
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


@pytest.mark.parametrize("iterable", [[3, None, 2], (3, 1), {3: 0, 1: 0}, "312"], ids=str)
def test_any_iterable_is_read_anew_in_every_epoch(iterable):
    node = source(iterable)
    assert epoch_of(node) == epoch_of(node) == list(iterable)


@pytest.mark.parametrize(("size", "world_size"), [(1, 1), (1, 2), (7, 3), (20, 4), (5, 17)])
def test_ranks_share_the_items_out(size, world_size, monkeypatch):
    nodes = [source(range(size), rank, world_size) for rank in range(world_size)]
    shards = [epoch_of(node) for node in nodes]
    assert shards == [[*range(size)][rank::world_size] for rank in range(world_size)]
    assert [len(node) for node in nodes] == [len(shard) for shard in shards]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    assert epoch_of(IterableSource(range(size))) == shards[0]


# Epochs.


@pytest.mark.parametrize("kind", [Shuffled, Resumable])
def test_the_iterable_is_told_every_epoch(kind):
    data = kind()
    node = source(data)
    epochs = [epoch_of(node) for _ in range(3)]
    assert data.epochs == [0, 1, 2]
    assert [{epoch for epoch, _ in items} for items in epochs] == [{0}, {1}, {2}]
    node.set_epoch(7)
    assert data.epochs == [0, 1, 2]
    epoch_of(node)
    epoch_of(node)
    assert data.epochs == [0, 1, 2, 7, 8]


def test_what_splits_itself_over_the_ranks_is_not_split_again(monkeypatch):
    name = {"__module__": "litdata.streaming.dataset"}
    streaming = type("StreamingDataset", (Shuffled,), name)()
    assert len(epoch_of(source(streaming, 1, 2))) == 3  # of ranks within one process
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"`StreamingDataset` splits itself .* `sharded=True`"):
        source(streaming, 1, 2)
    assert len(epoch_of(source(streaming))) == 6
    with pytest.raises(ValueError, match=r"`DistributedSampler` splits itself"):
        IterableSource(DistributedSampler(range(20), 2, 0), 0, 2, yields_indices=True)


# State: of kinds of data and of ends of epochs that no job of the machine has.


class OfItsLoader(Shuffled):
    """Has a state that only a loader of its own kind can ask for, as LitData's and MosaicML's."""

    def state_dict(self, num_samples_yielded, num_workers, batch_size):
        raise AssertionError

    load_state_dict = state_dict


@pytest.mark.parametrize(
    "make",
    [
        lambda: source(Shuffled(7), 2, 3),
        lambda: source(Resumable(7), 2, 3),
        lambda: source(Resumable(1)),
        lambda: Prefetcher(source(Resumable(3)), 2),
        lambda: source(OfItsLoader(4)),
        lambda: source(DistributedSampler(range(5), num_replicas=1, rank=0)),
    ],
    ids="shard stateful-shard one-item prefetched of-its-loader sampler".split(),
)
def test_it_resumes_exactly(make):
    assert_resumes_exactly(make, epochs=2, chain=1)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_an_iterable_that_starts_over_from_its_last_state_resumes_exactly_too():
    """`StatefulDataLoader` takes the state of its end for the beginning of its next epoch."""
    stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        return source(stateful_dataloader.StatefulDataLoader([5, 6, 7], batch_size=None))

    assert_resumes_exactly(make, epochs=2, chain=1)


class NotStateful(DataLoader):
    """What pytorch#166732 makes of a `DataLoader` without `stateful=True`."""

    stateful = False

    def state_dict(self):
        raise RuntimeError("DataLoader.state_dict() requires stateful=True.")

    load_state_dict = state_dict


def test_a_dataloader_that_says_it_is_not_stateful_is_read_again():
    assert_resumes_exactly(lambda: source(NotStateful([5, 6, 7], batch_size=None)), epochs=2)


@pytest.mark.parametrize("kind", [Shuffled, Resumable])
def test_an_empty_shard_resumes_into_the_next_epoch(kind):
    node, restored = source(kind(2), 2, 3), source(kind(2), 2, 3)
    for _ in range(2):
        assert epoch_of(node) == []
    restored.reset(node.get_state())
    assert list(restored) == []
    assert restored.get_state() == node.get_state()
    restored.reset(None)
    assert restored.get_state()["epoch"] == 2


@pytest.mark.parametrize(("kind", "reads"), [(Shuffled, 6), (Resumable, 2)])
def test_what_has_a_state_of_its_own_is_not_read_again(kind, reads):
    node, data = taken(source(kind()), 4), kind()
    restored = source(data)
    restored.reset(node.get_state())
    assert list(restored) == list(node)
    assert data.reads == reads


@pytest.mark.parametrize("count", [0, 1])
def test_a_state_asked_for_after_restoring_is_the_one_restored(count):
    """Before the first item the iterable is not asked."""
    node, restored, third = (
        taken(source(Resumable()), count),
        source(Resumable()),
        source(Resumable()),
    )
    restored.reset(node.get_state())
    third.reset(restored.get_state())
    assert node.get_state() == restored.get_state() == third.get_state()
    assert list(third) == list(node)


@pytest.mark.parametrize("then", [None, "start"])
def test_a_restored_position_that_was_not_used_is_forgotten(then):
    """A dataset restored lazily must not carry the position over into another iteration."""
    node = taken(source(Resumable()), 0)
    start = node.get_state()
    changes = {"position": 4, "started": True, "iterable": {"position": 4}}
    node.reset(resealed({**start, **changes}))
    node.reset(None if then is None else start)
    assert len(list(node)) == 6


# What it refuses.


@pytest.mark.parametrize(
    "iterable",
    [(n for n in range(3)), iter([1, 2]), map(str, [1]), zip([1], strict=True), 3, None, object()],
)
def test_what_cannot_be_read_again_and_again_is_refused(iterable):
    with pytest.raises(TypeError, match="`iterable` must be an iterable"):
        source(iterable)


def test_data_without_an_item_are_an_error_but_a_share_without_one_is_none():
    with pytest.raises(SampleError, match=r"`iterable` \(`list`\) yielded no sample in epoch 0"):
        epoch_of(source([]))
    assert epoch_of(source([1], 1, 2)) == []
    node = source(Once())
    assert epoch_of(node) == [1, 2]
    with pytest.raises(SampleError, match=r"`Once`\) yielded no sample in epoch 1: .* only once"):
        epoch_of(node)


def test_data_without_an_item_for_a_state_to_continue_are_an_error_that_names_the_state():
    node = source([])
    node.reset(taken(source([1, 2]), 0).get_state())
    with pytest.raises(
        SampleError, match=r"`list`\) .* epoch 0, which a state continues: it is em"
    ):
        next(node)
    with pytest.raises(SampleError, match="no sample in epoch 1: it is empty"):
        epoch_of(node)


def test_data_that_has_shrunk_is_found_out_when_the_state_is_loaded():
    state = taken(source([1, 2, 3, 4]), 3).get_state()
    with pytest.raises(StateError, match=r"stands at item 3, .* ended after 2\."):
        source([1, 2]).reset(state)


class Unseeded(IterableDataset):
    """Samples of one length, in an order that nobody can draw again."""

    def __iter__(self):
        for number in torch.randperm(300).tolist():
            yield {"id": number, "input_ids": [1] * 10}


def test_an_order_that_is_not_seeded_is_found_out():
    state = taken(source(Unseeded()), 10).state_dict()
    with pytest.raises(StateError, match="`Unseeded` yielded other items .* not seeded"):
        source(Unseeded()).reset(state)


def test_only_items_of_this_rank_are_compared():
    """The others are for another rank to compare; else each rank would digest the whole dataset."""

    class OthersDiffer:
        def __iter__(self):
            return iter([0, random.random(), 2, random.random(), 4])

    node, restored = taken(source(OthersDiffer(), 0, 2), 3), source(OthersDiffer(), 0, 2)
    restored.reset(node.get_state())
    assert list(restored) == []


def test_reading_again_for_long_says_how_far_it_is(monkeypatch, caplog):
    state = taken(source(Shuffled(30)), 30).state_dict()
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    source(Shuffled(30)).reset(state)
    assert "items of `Shuffled` read again" in caplog.messages[0]
    assert "1 of 30" in caplog.messages[0]
