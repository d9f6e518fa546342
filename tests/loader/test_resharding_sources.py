"""Mixtures go on with another number of ranks, in the shares that they had."""

import random
from collections import Counter

import pytest
from aligned_ranks import TIMEOUT_S, on_ranks
from elastic import LEFT_OUT, job, resharded, states_at

from odb_nodes import Mixing, ODBDataLoader, StateError, WorkerOptions, reshard
from odb_nodes.contract.graph import walk
from odb_nodes.sources import SourceMixer

pytestmark = pytest.mark.filterwarnings(*LEFT_OUT)


def text(index):
    return {"input_ids": [1] * random.Random(index).randint(2, 40), "id": index}


EQUAL = {"a": 1, "b": 1, "c": 1}


def mixed(sizes=(120, 40, 61), **mixing):
    """What makes a loader of sources of such sizes."""

    def make(exchange, **options):
        datasets = {name: range(size) for name, size in zip("abc", sizes, strict=False)}
        given = {"token_budget": 90, "window": 12, "round_size": 8, "timeout_s": TIMEOUT_S}
        given |= {"weights": Mixing(**mixing), "process_fn": text}
        given |= {"workers": WorkerOptions(chunk_size=5)}
        return ODBDataLoader(datasets, process_group=exchange, **given | options)

    return make


def of_node(states, node, field):
    """The field of the first node of that name in each state."""

    def find(state):
        if isinstance(state, dict):
            if state.get("node") == node:
                return state
            return next(filter(None, map(find, state.values())), None)
        return None

    return [find(state)[field] for state in states]


@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_shares_go_on(by):
    make = mixed(by=by, stop="cycle", weights={"a": 4, "b": 1, "c": 2})
    begun = job(4, make=make, steps=3)
    states = resharded(begun, -1, 2)
    counted = [Counter(one) for one in of_node(states, "SourceMixer", by)]
    for one in counted:
        assert one["a"] / one.total() == pytest.approx(4 / 7, abs=0.06)
    if by == "samples":  # those behind the state of the mixture, too
        pulled = of_node(states_at(begun, -1), "WindowBucketer", "pulled")
        assert sum(counted, Counter()).total() == sum(pulled)
    else:
        before = of_node(states_at(begun, -1), "SourceMixer", by)
        assert sum(counted, Counter()) == sum(map(Counter, before), Counter())


@pytest.mark.parametrize("stop", ["cycle", "first_exhausted"])
def test_a_rank_may_have_nothing_left_of_a_source_that_others_had(stop):
    make = mixed((400, 4), weights={"a": 30, "b": 1}, stop=stop)
    begun = job(1, make=make, steps=20)
    for step in (1, 19):
        states = resharded(begun, step, 4)
        had = [one["b"] for one in of_node(states, "SourceMixer", "samples")]
        assert 0 in had and any(had)
        assert all(len(found) == 5 for found, _ in job(4, states, make=make, steps=5))


def test_sources_that_began_again_on_some_ranks_alone_are_refused():
    begun = job(3, make=mixed(stop="cycle"))
    outcomes = []
    for step in range(0, len(begun[0][1]), 2):
        try:
            outcomes.append(bool(resharded(begun, step, 2)))
        except StateError as error:
            assert "begun again" in str(error)
            outcomes.append(False)
    assert outcomes[:3] == [True] * 3 and False in outcomes


def test_ranks_that_have_set_different_weights_are_not_resharded():
    def run(exchange):
        loader = mixed(weights=EQUAL)(exchange)
        next(iter(loader))
        loader.set_weights({**EQUAL, "a": 1 + exchange.rank})
        return loader.state_dict()

    with pytest.raises(StateError, match="`next_weights`"):
        reshard(on_ranks(2, run), 1)


def test_weights_that_were_set_go_on_in_the_epoch_after():
    make = mixed(weights=EQUAL)

    def run(exchange):
        loader = make(exchange)
        loader.set_weights({**EQUAL, "b": 2})
        batches = iter(loader)
        for _ in range(8):
            next(batches)
        loader.set_weights({**EQUAL, "a": 8})
        return loader.state_dict()

    def drawn(exchange):
        loader = make(exchange)
        loader.load_state_dict(states[exchange.rank])
        found = [repr(next(node for node in walk(loader.root) if isinstance(node, SourceMixer)))]
        for _ in range(2):
            next(iter(loader))
            mixers = (node for node in walk(loader.root) if isinstance(node, SourceMixer))
            found.append(repr(next(mixers)))
        return found

    states = reshard(on_ranks(3, run), 2)
    for initial, rest, following in on_ranks(2, drawn):
        assert "a 0.333, b 0.333, c 0.333" in initial
        assert "a 0.25, b 0.5, c 0.25" in rest
        assert "a 0.8, b 0.1, c 0.1" in following
