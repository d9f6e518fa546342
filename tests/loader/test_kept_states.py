"""States that are kept: whenever they are made, they are what they would have been at once."""

import random
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.nodes import Batcher, Prefetcher

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    ODBDataLoader,
    ParallelProcessor,
    ShardedSampler,
    Skipped,
    StateError,
    TokenBudget,
    WindowBucketer,
)
from odb_nodes.alignment import RankAligner
from odb_nodes.contract import copy_state, snapshot
from odb_nodes.nodes.sample_records import to_records, with_digests
from odb_nodes.planning.table import ORDINALS
from odb_nodes.sample_block import DATA

SIZE = 150
LENGTHS = np.random.default_rng(3).integers(3, 90, SIZE).tolist()


def text(index):
    if index % 37 == 5:
        return Skipped("bad", "on purpose")
    return {"input_ids": torch.arange(LENGTHS[index]) + index}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(SIZE))


def observed(process=text):
    sampler = ShardedSampler(SIZE, rank=0, world_size=1)
    return LengthObserver(ParallelProcessor(sampler, process))


def unmade_in(state):
    """How many values of a state are not made yet."""
    parts = state.values() if isinstance(state, dict) else state
    if hasattr(state, "to_state"):
        return 1
    return sum(map(unmade_in, parts)) if isinstance(state, (dict, list, tuple)) else 0


def content_of(node):
    """What a state holds of pooled samples, from the samples themselves."""
    pool = node._pool
    ordinals = np.sort(pool.table()[ORDINALS])
    bits = np.zeros(pool.pulled - pool.oldest, np.uint8)
    bits[pool.pulled - 1 - ordinals] = 1
    records = to_records(with_digests(node._table.all()))
    return np.packbits(bits).tobytes() or None, records, None


def options_of(draw, data):
    return {
        "token_budget": TokenBudget(
            draw.choice([200, 600]),
            layout=draw.choice(["padded", "packed"]),
            oversize=draw.choice(["alone", "drop"]),
        ),
        "window": draw.choice([8, 40, "auto"]),
        "state": draw.choice(["replay", "replay", "payload"]),
        "accumulate": draw.choice([1, 2]),
        "prefetch": draw.choice([0, 2]),
        "round_size": draw.choice([4, 16]),
        "virtual_ranks": draw.choice([None, None, 2]) if not isinstance(data, Stream) else None,
        "exclude": draw.choice([None, [1, 4, 30]]) if type(data) is range else None,
    }


def make(data, options):
    return ODBDataLoader(data, process_fn=text, seed=2, **options)


@pytest.mark.parametrize("seed", range(8))
def test_a_state_is_the_same_whenever_it_is_made(seed):
    """Over random graphs, with breaks, resumes, exclusions and smaller budgets."""
    draw = random.Random(seed)
    data = draw.choice([range(SIZE), range(SIZE), Stream(), {"a": range(SIZE), "b": range(70)}])
    options = options_of(draw, data)
    kept, unmade = [], 0
    loader = make(data, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            stop = draw.choice([2, 9, 1000])
            for number, _ in enumerate(loader):
                mine = snapshot(loader.root)
                unmade += unmade_in(mine)
                given = copy_state(loader.root.state_dict())
                given.pop("digest", None)  # of a state that is handed out alone
                kept.append((mine, given))
                assert not unmade_in(kept[-1][1])
                if draw.random() < 0.2:
                    assert loader.state_dict()["root"] == kept[-1][1]
                if number == stop:
                    break
            state, how = loader.state_dict(), draw.choice(["go on", "load", "anew", "less"])
            if how == "load":
                loader.load_state_dict(state)
            if how in ("anew", "less"):
                loader.close()
                exclude = [1, 4, 30, 31, 77] if type(data) is range else options["exclude"]
                tokens = options["token_budget"].tokens // (1 + (how == "less"))
                budget = replace(options["token_budget"], tokens=tokens)
                changed = {**options, "exclude": exclude, "token_budget": budget}
                loader = make(data, changed)
                loader.load_state_dict(state, change_budget=True)
                try:
                    iter(loader)
                    options = changed
                except StateError:  # within an optimizer step, say
                    loader = make(data, options)
                    loader.load_state_dict(state)
        loader.close()
    assert unmade or options["state"] == "payload"
    for state, at_once in kept:
        assert copy_state(state) == at_once


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("every", [1, 7])
def test_a_pool_in_a_state_is_that_of_the_pooled_samples_in_whatever_order_it_is_asked_for(
    keyed, every
):
    draw = random.Random(every)
    source = observed() if keyed else Prefetcher(observed(), 1)
    node = WindowBucketer(source, 300, 70)
    node.reset(None)
    kept = []
    with pytest.warns(UserWarning, match="skipped"):
        for number, _ in enumerate(node):
            if number % every == 0:
                kept.append((snapshot(node), content_of(node)))
                table = node._table  # has no data but of pooled samples
                assert sum(table._left.values()) == len(node._pool) and all(table._left.values())
                facts = table._facts_of(node._pool.table()[ORDINALS] - table._first)
                assert {*table._left} == {*table._sources} == {*facts[DATA].tolist()}
                if draw.random() < 0.5:  # of this state or one before it, maybe again
                    state, content = draw.choice(kept)
                    assert copy_state(state)["pool"] == content
    assert len(kept) > 2
    for state, content in kept:
        assert copy_state(state)["pool"] == content


def test_samples_do_not_stay_for_the_sake_of_a_state():
    class Data(dict):
        alive = 0

        def __init__(self, index):
            super().__init__(input_ids=list(range(LENGTHS[index])))
            Data.alive += 1

        def __del__(self):
            Data.alive -= 1

    aligner = RankAligner(WindowBucketer(observed(Data), 400, 16))
    aligner.reset(None)
    kept = []
    for group, _ in aligner:
        kept.append(snapshot(aligner))
        del group
    assert unmade_in(kept) > 20
    assert Data.alive <= 2  # the sample to fill with, and the last one of the processor


class SavesOtherwise(WindowBucketer):
    def save(self):
        return replace(super().save(), dropped_samples=99)


class SaysOtherwise(WindowBucketer):
    def get_state(self):
        return {**super().get_state(), "dropped_samples": 99}


@pytest.mark.parametrize("kind", [SavesOtherwise, SaysOtherwise])
def test_a_derived_node_is_asked_for_its_own_state(kind):
    next(node := kind(observed(), 400, 30))
    assert snapshot(node)["dropped_samples"] == 99
    assert bool(unmade_in(snapshot(node))) is (kind is SavesOtherwise)


@pytest.mark.parametrize("between", ["Prefetcher", "Batcher"])
def test_nodes_of_torchdata_between_are_handed_plain_data(between):
    collated = GroupCollator(RankAligner(WindowBucketer(observed(), 400, 30)), rank=0)
    wrap = {"Prefetcher": lambda one: Prefetcher(one, 2), "Batcher": lambda one: Batcher(one, 2)}
    loader = Loader(wrap[between](collated))
    with pytest.warns(UserWarning, match="skipped"):
        for _ in loader:
            assert not unmade_in(loader.position.root)
            assert not unmade_in(loader.root.state_dict())
    loader.close()
