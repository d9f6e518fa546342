import copy
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import fewer
from torchdata.nodes import IterableWrapper, Mapper

from odb_nodes import (
    GroupCollator,
    IterableSource,
    JsonlSource,
    LengthObserver,
    Loader,
    Mixing,
    ParallelProcessor,
    PerSource,
    RankAligner,
    Sample,
    SampleError,
    ShardedSampler,
    SourceItem,
    SourceMixer,
    StateError,
    WindowBucketer,
    WorkerOptions,
)
from odb_nodes.testing import assert_resumes_exactly

SIZES = {"chat": 50, "caption": 90, "ocr": 20}
WEIGHTS = {"chat": 0.5, "caption": 0.3, "ocr": 0.2}


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
    return SourceMixer(
        {
            name: LengthObserver(Mapper(sampler(name, size), FUNCTIONS[name]))
            for name, size in sizes.items()
        },
        WEIGHTS,
        **options,
    )


def test_shares_follow_the_weights_at_every_point():
    node = mixer({"chat": 20_000, "caption": 20_000, "ocr": 20_000}, stop="first_exhausted")
    node.reset(None)
    counts = Counter()
    for step in range(1, 20_001):
        counts[next(node).source] += 1
        for name, weight in WEIGHTS.items():
            assert abs(counts[name] - weight * step) < 2
    assert node.samples == counts


def test_shares_of_tokens():
    node = observed(by="tokens", stop="cycle")
    total = sum(one.tokens for one in Loader(node))
    assert sum(node.tokens.values()) == total
    for name, weight in WEIGHTS.items():
        assert abs(node.tokens[name] - weight * total) <= 40  # the longest sample


def lengths(name, size=20_000):
    """Samples whose lengths are nothing like those of another source."""
    scale = {"chat": 40, "caption": 5, "ocr": 300}[name]
    return LengthObserver(
        Mapper(sampler(name, size), lambda index: scale * (1 + index % 7)), observe=int
    )


@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_shares_are_within_a_hundredth_of_the_weights(by):
    node = SourceMixer({name: lengths(name) for name in WEIGHTS}, WEIGHTS, by=by, stop="cycle")
    node.reset(None)
    for _ in range(20_000):
        next(node)
    had = getattr(node, by)
    for name, weight in WEIGHTS.items():
        assert abs(had[name] / sum(had.values()) - weight) < 0.01 * weight


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_mix_alike_and_share_the_samples_out(world_size):
    found, shares = [], []
    for rank in range(world_size):
        sources = {
            name: ShardedSampler(size, seed=1, rank=rank, world_size=world_size)
            for name, size in SIZES.items()
        }
        items = list(Loader(SourceMixer(sources, WEIGHTS)))
        found += items
        first = Counter(item.source for item in items[:24])
        shares.append({name: first[name] for name in WEIGHTS})
    assert sorted(found) == sorted((name, i) for name, size in SIZES.items() for i in range(size))
    assert all(share == shares[0] for share in shares)


@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_a_state_shares_nothing_with_the_node(by):
    make = observed if by == "tokens" else mixer
    node, again = make(by=by), make(by=by)
    node.reset(None)
    for _ in range(20):
        next(node)
    state = node.state_dict()
    kept = copy.deepcopy(state)
    expected = list(node)
    assert state == kept
    for _ in range(2):
        again.reset(state)
        assert list(again) == expected
        assert state == kept


def test_samples_know_their_source():
    counts = Counter(one.source for one in Loader(observed()))
    assert counts == SIZES


def test_the_length_is_known_where_each_sample_comes_once():
    assert len(mixer()) == sum(SIZES.values())
    with pytest.raises(TypeError, match='where `stop` is "first_exhausted"'):
        len(mixer(stop="first_exhausted"))


def test_an_error_of_reading_names_the_source(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("{}\n{broken")
    node = SourceMixer({"chat": JsonlSource(path, 0, 1)})
    with pytest.raises(SampleError, match=r"source 'chat': .*chats\.jsonl, line 2, is not valid"):
        list(Loader(node))


def test_a_mixture_of_mixtures_names_both():
    inner = SourceMixer({"b": IterableWrapper([1]), "c": IterableWrapper([2])})
    process = PerSource({"a": same_length, "in": PerSource({"b": same_length, "c": same_length})})
    outer = SourceMixer({"a": IterableWrapper([3]), "in": inner})
    processed = ParallelProcessor(outer, process, rank=0, world_size=1)
    sources = [one.source for one in Loader(LengthObserver(processed))]
    assert sorted(sources) == ["a", "in/b", "in/c"]


def same_length(length):
    return sample(length)


def test_all_exhausted_yields_every_sample_once():
    items = list(Loader(mixer(stop="all_exhausted")))
    for name, size in SIZES.items():
        assert sorted(item for source, item in items if source == name) == list(range(size))


def test_first_exhausted_ends_with_the_first():
    counts = Counter(item.source for item in Loader(mixer(stop="first_exhausted")))
    assert any(counts[name] == size for name, size in SIZES.items())
    assert all(counts[name] <= size for name, size in SIZES.items())


def test_cycle_repeats_the_short_ones_in_new_orders():
    items = list(Loader(mixer(stop="cycle")))
    counts = Counter(source for source, _ in items)
    assert all(counts[name] >= size for name, size in SIZES.items())
    indices = [item for source, item in items if source == "ocr"]
    first, second = indices[:20], indices[20:40]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def orders_of_ocr(loader, epoch):
    """The orders in which a cycled source of 20 comes in an epoch."""
    if epoch is not None:
        loader.set_epoch(epoch)
    items = [item for source, item in loader if source == "ocr"]
    return [tuple(items[i : i + 20]) for i in range(0, len(items) // 20 * 20, 20)]


CYCLED = {"sizes": {"chat": 200, "ocr": 20}, "weights": {"chat": 0.5, "ocr": 0.5}}


@pytest.mark.parametrize("nested", [False, True])
def test_no_order_comes_twice_where_the_epoch_is_set(nested):
    def make():
        node = mixer(**CYCLED, stop="cycle")
        if nested:  # begun again as a whole, by the outer one
            node = SourceMixer({"in": node, "big": sampler("big", 300)}, {"in": 0.6, "big": 0.4})
            node = SourceMixer({"a": node, "b": sampler("b", 1000)}, stop="cycle")
            node = Mapper(node, inner)
        return Loader(node)

    loader = make()
    orders = [order for epoch in range(3) for order in orders_of_ocr(loader, epoch)]
    assert len(orders) >= 24
    assert len(set(orders)) == len(orders)
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders_of_ocr(make(), 2) == orders[-len(orders) // 3 :]  # whatever came before
    counted = make()
    assert [order for _ in range(3) for order in orders_of_ocr(counted, None)] == orders


def inner(item):
    while isinstance(item.item, SourceItem):
        item = item.item
    return item


def drawn(index):
    return {"input_ids": [1] * 3, "drawn": random.random()}


def test_no_random_number_comes_twice_where_a_source_begins_again():
    def processed(name, size):
        node = ParallelProcessor(sampler(name, size), drawn, rank=0, world_size=1)
        return LengthObserver(node)

    node = SourceMixer(
        {"many": processed("many", 60), "few": processed("few", 5)}, by="tokens", stop="cycle"
    )
    loader, numbers = Loader(node), []
    for epoch in range(2):
        loader.set_epoch(epoch)
        numbers += [one.data["drawn"] for one in loader if one.source == "few"]
    assert len(set(numbers)) == len(numbers) > 100


class Epochs:
    """Says which epochs it was told."""

    def __init__(self):
        self.told = []

    def set_epoch(self, epoch):
        self.told.append(epoch)

    def __iter__(self):
        return iter([1, 2, 3])


def test_an_iterable_that_begins_again_is_told_another_number():
    data = Epochs()
    node = SourceMixer({"a": IterableSource(data, 0, 1), "b": sampler("b", 9)}, stop="cycle")
    loader = Loader(node)
    for epoch in range(2):
        loader.set_epoch(epoch)
        list(loader)
    assert len(set(data.told)) == len(data.told) >= 6
    assert [epoch for epoch in data.told if epoch < 2] == [0, 1]
    assert all(0 <= epoch < 2**31 for epoch in data.told)


class Once:
    def __init__(self):
        self.items = iter([1, 2])

    def __iter__(self):
        return self.items


def test_a_source_that_cannot_begin_again_is_an_error_and_no_endless_loop(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # where an empty share alone is none
    monkeypatch.setenv("RANK", "0")
    node = SourceMixer({"a": IterableSource(Once(), 0, 1), "b": sampler("b", 9)}, stop="cycle")
    with pytest.raises(SampleError, match="source 'a' yielded nothing when it began again"):
        list(Loader(node))


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "cycle"])
@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_every_step_resumes(stop, by, sampled):
    make = observed if by == "tokens" else mixer
    less = sampled(every=31, horizon=12, chain=1)
    sizes = {"chat": 20, "caption": 36, "ocr": 8}
    assert_resumes_exactly(lambda: Loader(make(sizes, by=by, stop=stop)), epochs=3, **less)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    weights=st.data(),
    stop=st.sampled_from(["first_exhausted", "all_exhausted", "cycle"]),
)
@fewer(10)
def test_any_sources(sizes, weights, stop):
    named = {f"s{index}": size for index, size in enumerate(sizes)}
    drawn = {name: weights.draw(st.floats(0.2, 5)) for name in named}
    assert_resumes_exactly(lambda: Loader(mixer(named, drawn, stop=stop)), every=7, horizon=9)


def graph(num_workers=0):
    workers = WorkerOptions(num_workers=num_workers, chunk_size=7)
    processed = ParallelProcessor(
        mixer(), PerSource(FUNCTIONS), workers=workers, rank=0, world_size=1
    )
    bucketer = WindowBucketer(LengthObserver(processed), 120, 16)
    return Loader(GroupCollator(RankAligner(bucketer)))


def test_one_pool_of_workers_processes_all_sources(sampled):
    with graph(num_workers=2) as parallel, graph() as inline:
        expected = [batch["length"].tolist() for batch in inline]
        assert [batch["length"].tolist() for batch in parallel] == expected
    assert_resumes_exactly(graph, **sampled(every=4, horizon=12))


def test_an_error_names_source_and_sample():
    def broken(index):
        raise OSError("not there")

    process = PerSource({**FUNCTIONS, "ocr": broken})
    node = ParallelProcessor(mixer(), process, rank=0, world_size=1)
    with pytest.raises(SampleError, match=r"source='ocr', item=\d+.*OSError: not there"):
        list(Loader(node))


def test_a_source_without_a_function_is_named():
    process = PerSource({"chat": chat, "caption": caption})
    node = ParallelProcessor(mixer(), process, rank=0, world_size=1)
    with pytest.raises(SampleError, match="no function for source 'ocr'"):
        list(Loader(node))


def test_weights_of_the_same_ratio_are_the_same_configuration():
    node, doubled = mixer(), mixer(weights={name: 2 * one for name, one in WEIGHTS.items()})
    node.reset(None)
    items = [next(node) for _ in range(5)]
    doubled.reset(node.state_dict())
    assert items and list(doubled) == list(node)


def test_other_weights_are_refused():
    node = mixer()
    node.reset(None)
    with pytest.raises(StateError, match="`weights` was .* when saved"):
        mixer(weights={**WEIGHTS, "ocr": 0.1}).reset(node.state_dict())


@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_another_order_of_the_names_is_refused(by):
    children = {name: IterableWrapper([Sample(i, 5, 5) for i in range(9)]) for name in "ab"}
    node = SourceMixer(children, by=by)
    node.reset(None)
    next(node)
    turned = SourceMixer(dict(reversed(children.items())), by=by)
    with pytest.raises(StateError, match=r"`sources` was \['a', 'b'\] when saved"):
        turned.reset(node.state_dict())


def test_other_sources_are_refused_also_where_a_change_is_meant():
    loader = Loader(SourceMixer({"a": IterableWrapper(range(9)), "b": IterableWrapper(range(9))}))
    next(iter(loader))
    other = Loader(SourceMixer({"a": IterableWrapper(range(9)), "c": IterableWrapper(range(9))}))
    other.load_state_dict(loader.state_dict(), strict=False)
    with pytest.raises(StateError, match=r"has sources \['a', 'b'\], but there are \['a', 'c'\]"):
        next(iter(other))


@pytest.mark.parametrize("option", ["by", "stop"])
def test_a_mixing_rule_that_is_not_valid_is_named_where_it_is_given(option):
    with pytest.raises(ValueError, match=f"`{option}` must be one of .*, but is 'never' instead"):
        Mixing(**{option: "never"})


def test_an_empty_source_is_named():
    node = SourceMixer({"a": IterableWrapper([1]), "b": IterableWrapper([])}, stop="cycle")
    with pytest.raises(SampleError, match="source 'b' yielded no sample.* Leave it out, or mend"):
        list(Loader(node))


@pytest.mark.parametrize("stop", ["first_exhausted", "cycle"])
def test_a_rank_without_a_sample_of_a_source_says_what_to_do(stop, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    node = SourceMixer({"a": sampler("a", 9), "b": ShardedSampler(1)}, stop=stop)
    with pytest.raises(
        SampleError, match=f'"{stop}", each rank needs .* per rank.*"all_exhausted"'
    ):
        list(Loader(node))


class Unreadable:
    broken = True

    def __iter__(self):
        for number in range(5):
            if number == 3 and self.broken:
                raise OSError("no route to host")
            yield number


def test_an_error_of_an_iterable_names_source_and_sample_and_loses_nothing():
    data = Unreadable()
    loader = Loader(SourceMixer({"a": IterableSource(data, 0, 1), "b": sampler("b", 4)}))
    seen = []
    with pytest.raises(SampleError, match="source 'a': reading its sample 3 .*OSError.'no route"):
        for item in loader:
            seen.append(item)
    data.broken = False
    seen += loader
    assert sorted(seen) == sorted([("a", i) for i in range(5)] + [("b", i) for i in range(4)])


def test_shares_of_tokens_need_samples():
    with pytest.raises(SampleError, match="must yield `Sample` where `by` is"):
        list(Loader(mixer(by="tokens")))


def test_what_is_refused_is_not_counted():
    node = mixer(by="tokens")
    with pytest.raises(SampleError, match="must yield `Sample`"):
        next(node)
    assert {*node.samples.values()} == {*node.tokens.values()} == {0}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": {"chat": 1}}, ValueError, "`weights` must have the names of `sources`"),
        ({"weights": {**WEIGHTS, "ocr": 0}}, ValueError, r"`weights\['ocr'\]` must be a positive"),
        ({"weights": {**WEIGHTS, "ocr": "x"}}, ValueError, r"`weights\['ocr'\]`"),
        ({"stop": "x"}, ValueError, "`stop` must be one of"),
        ({"by": "x"}, ValueError, "`by` must be one of"),
        ({"sizes": {}, "weights": {}}, ValueError, "`sources` must name at least 1"),
    ],
)
def test_arguments_that_are_not_valid_are_named(options, error, message):
    with pytest.raises(error, match=message):
        mixer(**options)


def test_one_node_cannot_be_two_sources():
    node = sampler("a", 9)
    with pytest.raises(ValueError, match="`sources` must be different nodes"):
        SourceMixer({"a": node, "b": node})


def test_weights_may_be_numbers_of_numpy():
    weights = {"chat": np.float32(0.5), "caption": np.int64(1), "ocr": 1}
    known = mixer(weights=weights).fingerprint()["weights"]
    assert known == {"chat": 1.0, "caption": 2.0, "ocr": 2.0}
    assert {type(weight) for weight in known.values()} == {float}


def test_items_keep_their_source():
    items = list(Loader(SourceMixer({"a": IterableWrapper([1, 2])})))
    assert items == [SourceItem("a", 1), SourceItem("a", 2)]
