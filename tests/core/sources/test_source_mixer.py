from collections import Counter

import numpy as np
import pytest
from refusals import refuses
from torchdata.nodes import IterableWrapper, Mapper
from toys import Epochs, Once

from odb_nodes import (
    IterableSource,
    JsonlSource,
    LengthObserver,
    Loader,
    Mixing,
    ParallelProcessor,
    PerSource,
    Sample,
    SampleError,
    ShardedSampler,
    SourceItem,
    SourceMixer,
    StateError,
)
from odb_nodes.core.contract.again import ItemsAgain, make_again

SIZES = {"chat": 50, "caption": 90, "ocr": 20}
WEIGHTS = {"chat": 0.5, "caption": 0.3, "ocr": 0.2}
STOPS = ["first_exhausted", "all_exhausted", "cycle"]


def sampler(name, size):
    return ShardedSampler(size, seed=len(name), rank=0, world_size=1)


def mixer(sizes=SIZES, weights=WEIGHTS, **options):
    return SourceMixer(
        {name: sampler(name, size) for name, size in sizes.items()}, weights, **options
    )


def sample(length):
    return {"input_ids": [1] * length, "length": length}


def chat(index):
    return sample(3 + 5 * index % 17)


def caption(index):
    return sample(2 + index % 5)


def ocr(index):
    return sample(30 + index % 9)


FUNCTIONS = {"chat": chat, "caption": caption, "ocr": ocr}


def observed(sizes=SIZES, **options):
    """Every source processed and observed on its own, so that it yields `Sample`."""
    nodes = {
        name: LengthObserver(Mapper(sampler(name, size), FUNCTIONS[name]))
        for name, size in sizes.items()
    }
    return SourceMixer(nodes, WEIGHTS, **options)


# Shares.


@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_shares_follow_the_weights_at_every_point(by):
    make = observed if by == "tokens" else mixer
    node = make(dict.fromkeys(WEIGHTS, 3000), by=by, stop="cycle")
    node.reset(None)
    had, longest = Counter(), 40 if by == "tokens" else 2
    for _ in range(3000):
        sample = next(node)
        had[sample.source] += sample.tokens if by == "tokens" else 1
        for name, weight in WEIGHTS.items():
            assert abs(had[name] - weight * had.total()) <= longest
    assert getattr(node, by) == had


def test_weights_may_be_numbers_of_numpy_and_are_shares():
    weights = {"chat": np.float32(0.5), "caption": np.int64(1), "ocr": 1}
    saved = mixer(weights=weights).fingerprint()["weights"]
    assert saved == {"chat": 1.0, "caption": 2.0, "ocr": 2.0}
    assert {type(weight) for weight in saved.values()} == {float}
    node, doubled = mixer(), mixer(weights={name: 2 * weight for name, weight in WEIGHTS.items()})
    node.reset(None)
    for _ in range(5):
        next(node)
    doubled.reset(node.state_dict())
    assert list(doubled) == list(node)


# Names.


def test_items_and_samples_keep_their_source():
    items = list(Loader(SourceMixer({"a": IterableWrapper([1, 2])})))
    assert items == [SourceItem("a", 1), SourceItem("a", 2)]
    assert Counter(sample.source for sample in Loader(observed())) == SIZES
    inner = SourceMixer({"b": IterableWrapper([1]), "c": IterableWrapper([2])})
    process = PerSource({"a": sample, "in": PerSource({"b": sample, "c": sample})})
    outer = SourceMixer({"a": IterableWrapper([3]), "in": inner})
    processed = ParallelProcessor(outer, process, rank=0, world_size=1)
    sources = [sample.source for sample in Loader(LengthObserver(processed))]
    assert sorted(sources) == ["a", "in/b", "in/c"]


def broken(index):
    raise OSError("not there")


test_an_error_of_processing_names_source_and_sample = refuses(
    [
        ({**FUNCTIONS, "ocr": broken}, r"source='ocr', item=\d+.*OSError: not there"),
        ({"chat": chat, "caption": caption}, "no function for source 'ocr'"),
    ],
    lambda functions: list(
        Loader(ParallelProcessor(mixer(), PerSource(functions), rank=0, world_size=1))
    ),
    SampleError,
)


class Unreadable:
    broken = True

    def __iter__(self):
        for number in range(5):
            if number == 3 and self.broken:
                raise OSError("no route to host")
            yield number


def test_an_error_of_reading_names_source_and_sample_and_loses_nothing(tmp_path):
    data, seen = Unreadable(), []
    loader = Loader(SourceMixer({"a": IterableSource(data, 0, 1), "b": sampler("b", 4)}))
    with pytest.raises(SampleError, match="source 'a': .* sample 3 .*OSError.'no route"):
        for item in loader:
            seen.append(item)
    data.broken = False
    seen += loader
    assert sorted(seen) == sorted([("a", i) for i in range(5)] + [("b", i) for i in range(4)])
    path = tmp_path / "chats.jsonl"
    path.write_text("{}\n{broken")
    with pytest.raises(SampleError, match=r"source 'chat': .*chats\.jsonl, line 2"):
        list(Loader(SourceMixer({"chat": JsonlSource(path, 0, 1)})))


# Ends.


@pytest.mark.parametrize("stop", STOPS)
def test_when_an_epoch_ends(stop):
    items = list(Loader(mixer(stop=stop)))
    items_of = {name: [item for source, item in items if source == name] for name in SIZES}
    if stop == "first_exhausted":
        assert any(len(items_of[name]) == size for name, size in SIZES.items())
    for name, size in SIZES.items():
        if stop == "all_exhausted":
            assert sorted(items_of[name]) == list(range(size))
        elif stop == "cycle":
            assert {*items_of[name]} == {*range(size)}
        else:
            assert len({*items_of[name]}) == len(items_of[name])
    if stop == "all_exhausted":
        assert len(mixer(stop=stop)) == len(items)
    else:
        with pytest.raises(TypeError, match=f'`stop` is "{stop}"'):
            len(mixer(stop=stop))


def test_a_source_may_have_an_empty_name():
    sources = {name: ShardedSampler(size, shuffle=False) for name, size in {"": 2, "b": 4}.items()}
    items = [item for _, item in Loader(SourceMixer(sources))]
    assert sorted(items) == [0, 0, 1, 1, 2, 3]


def orders_of_ocr(loader, epoch):
    """The orders in which a cycled source of 20 comes in an epoch."""
    if epoch is not None:
        loader.set_epoch(epoch)
    items = [item for source, item in loader if source == "ocr"]
    return [tuple(items[i : i + 20]) for i in range(0, len(items) // 20 * 20, 20)]


def innermost(item):
    while isinstance(item.item, SourceItem):
        item = item.item
    return item


@pytest.mark.parametrize("nested", [False, True])
def test_no_order_comes_twice_where_the_epoch_is_set(nested):
    def make():
        node = mixer({"chat": 100, "ocr": 20}, {"chat": 0.5, "ocr": 0.5}, stop="cycle")
        if nested:  # begun again as a whole, by the outer one
            node = SourceMixer({"in": node, "big": sampler("big", 150)}, {"in": 0.6, "big": 0.4})
            node = SourceMixer({"a": node, "b": sampler("b", 500)}, stop="cycle")
            node = Mapper(node, innermost)
        return Loader(node)

    loader = make()
    orders = [order for epoch in range(2) for order in orders_of_ocr(loader, epoch)]
    assert len(orders) >= 8
    assert len(set(orders)) == len(orders)
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders_of_ocr(make(), 1) == orders[-len(orders) // 2 :]  # whatever came before
    counted = make()
    assert [order for _ in range(2) for order in orders_of_ocr(counted, None)] == orders


def test_an_iterable_that_begins_again_is_told_another_number():
    data = Epochs()
    node = SourceMixer({"a": IterableSource(data, 0, 1), "b": sampler("b", 9)}, stop="cycle")
    loader = Loader(node)
    for epoch in range(2):
        loader.set_epoch(epoch)
        list(loader)
    assert len(set(data.epochs)) == len(data.epochs) >= 6
    assert [epoch for epoch in data.epochs if epoch < 2] == [0, 1]
    assert all(0 <= epoch < 2**31 for epoch in data.epochs)


# State: of sources that begin again, and others that no job of the machine has.


def named(*names, by="samples"):
    return SourceMixer(
        {name: IterableWrapper([Sample(i, 5, 5) for i in range(9)]) for name in names}, by=by
    )


@pytest.mark.parametrize(
    ("saved", "changed", "message"),
    [
        (mixer, lambda: mixer(weights={**WEIGHTS, "ocr": 0.1}), "`weights` was"),
        (lambda: named("a", "b"), lambda: named("b", "a"), r"`sources` was \['a', 'b'\]"),
        (lambda: named("a", "b", by="tokens"), lambda: named("b", "a", by="tokens"), "`sources`"),
    ],
)
def test_another_mixture_is_refused(saved, changed, message):
    node = saved()
    node.reset(None)
    next(node)
    with pytest.raises(StateError, match=message):
        changed().reset(node.state_dict())


@pytest.mark.filterwarnings("ignore:.*`sources` was:UserWarning")
def test_other_sources_are_refused_also_where_a_change_is_meant():
    loader, other = Loader(named("a", "b")), Loader(named("a", "c"))
    next(iter(loader))
    other.load_state_dict(loader.state_dict(), strict=False)
    with pytest.raises(StateError, match=r"\['a', 'b'\], but there are \['a', 'c'\]"):
        next(iter(other))


# What it refuses.


FAULTY = {
    "empty": (
        lambda: SourceMixer({"a": IterableWrapper([1]), "b": IterableWrapper([])}, stop="cycle"),
        "source 'b' yielded no sample",
    ),
    "only once": (
        lambda: SourceMixer(
            {"a": IterableSource(Once(), 0, 1), "b": sampler("b", 9)}, stop="cycle"
        ),
        "source 'a' yielded nothing when it began",
    ),
    "no share, first": (
        lambda: SourceMixer({"a": sampler("a", 9), "b": ShardedSampler(1)}, stop="first_exhausted"),
        '\'b\' has 1 sample for 2 ranks, .*"first_exhausted", each rank needs .*"all_ex',
    ),
    "no share, cycle": (
        lambda: SourceMixer({"a": sampler("a", 9), "b": ShardedSampler(1)}, stop="cycle"),
        '"cycle", each rank needs .*"all_exhausted"',
    ),
    "no sample": (lambda: mixer(by="tokens"), "must yield `Sample` where `by` is"),
}


@pytest.mark.parametrize(("make", "message"), FAULTY.values(), ids=FAULTY)
def test_sources_that_cannot_be_mixed_are_errors_and_no_endless_loop(make, message, monkeypatch):
    if "each rank" in message or "began" in message:
        monkeypatch.setenv("WORLD_SIZE", "2")  # where an empty share alone is none
        monkeypatch.setenv("RANK", "1" if "each rank" in message else "0")
    node = make()
    with pytest.raises(SampleError, match=message):
        list(Loader(node))


ONE = sampler("a", 9)


test_arguments_that_are_not_valid_are_named = refuses(
    [
        (lambda: mixer(weights={"chat": 1}), "`weights` must have the names"),
        (lambda: mixer(weights={**WEIGHTS, "ocr": 0}), r"`weights\['ocr'\]` .* positive"),
        (lambda: mixer(weights={**WEIGHTS, "ocr": "x"}), r"`weights\['ocr'\]`"),
        (lambda: mixer(stop="x"), "`stop` must be one of .* 'x'"),
        (lambda: mixer(by="x"), "`by` must be one of .* 'x'"),
        (lambda: mixer({}, {}), "`sources` must name at least 1"),
        (lambda: SourceMixer({"a": ONE, "b": ONE}), "`sources` must be different"),
        (lambda: Mixing(by="never"), "`by` must be one of .* 'never'"),
        (lambda: Mixing(stop="never"), "`stop` must be one of .* 'never'"),
    ],
    error=ValueError,
)


def test_each_source_is_told_once_which_items_to_make_again_first(monkeypatch):
    wanted = []
    monkeypatch.setattr(ItemsAgain, "want", lambda _, rows: wanted.extend(rows))
    node, items = mixer(), []
    for _ in range(9):
        next(node)
        items.append(node.item_key())
    items_again = make_again(node, items)
    items_again.want([3, 0])
    for _ in range(2):
        items_again.take([0, 3, 5])
    assert len(wanted) == 3
