"""A chunk of items at once: those that single calls of `next` give, also of derived nodes."""

import pytest

from odb_nodes import ParallelProcessor, ShardedSampler
from odb_nodes.contract.node import take
from odb_nodes.sample import ItemKey


class Marked:
    """What a node may take from a mixin."""

    def next(self):
        return f"{super().next()}!"


class MarkedSampler(Marked, ShardedSampler):
    pass


class MarkedProcessor(ParallelProcessor):
    def next(self):
        return f"{super().next()}!"


class KeyedProcessor(ParallelProcessor):
    def item_key(self):
        key = super().item_key()
        return ItemKey(key.source, key.key + 1000, key.world_size)


class SquareSampler(MarkedSampler):
    """Defines anew what it hands on at once."""

    def next_chunk(self, count):
        indices, keys = self._take(count), [None] * count
        return [index * index for index in indices], keys


def sampler(kind=ShardedSampler):
    return kind(5, False, 0, 0, 1)


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize(
    ("kind", "mark", "first_key"),
    [(ParallelProcessor, "", 0), (MarkedProcessor, "!", 0), (KeyedProcessor, "", 1000)],
)
def test_a_processor_may_be_derived(kind, mark, first_key, together):
    node, items, keys = kind(sampler(), str), [], []
    node.reset(None)
    while len(items) < 5:
        some, their_keys = take(node, together)
        items, keys = [*items, *some], keys + [key.key for key in their_keys]
    assert items == [f"{number}{mark}" for number in range(5)]
    assert keys == [*range(first_key, first_key + 5)]
    assert list(kind(sampler(), str)) == items


def test_a_chunk_is_taken_where_it_is_defined_beside_or_below_next_and_not_above_it():
    assert take(sampler(SquareSampler), 3) == ([0, 1, 4], [None] * 3)
    derived = type("Derived", (MarkedSampler,), {})
    assert list(ParallelProcessor(sampler(derived), str)) == ["0!", "1!", "2!", "3!", "4!"]


@pytest.mark.parametrize(
    "found, told",
    [
        (([], []), "0 and 0 keys"),
        (([1, 2], [None]), "2 and 1 keys"),
        (([1, 2, 3], [None] * 3), "must return 1 to 2 items"),
    ],
)
def test_what_is_not_as_declared_is_refused(found, told):
    class Wrong(ShardedSampler):
        def next_chunk(self, count):
            return found

    node = sampler(Wrong)
    for _ in range(2):  # The items are lost: it stays an error until a reset.
        with pytest.raises(TypeError, match=rf"`next_chunk` of `Wrong`.*{told}|{told}"):
            take(node, 2)
