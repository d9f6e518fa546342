"""What `assert_resumes_exactly` finds, and how it says so."""

from dataclasses import dataclass

import numpy as np
import pytest
from torchdata.nodes import BaseNode, IterableWrapper, Prefetcher

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    ParallelProcessor,
    ShardedSampler,
    StatefulNode,
    WindowBucketer,
)
from odb_nodes.contract import Count, NodeState, SourceState
from odb_nodes.testing import assert_resumes_exactly


class Numbers(BaseNode):
    """Yields 0 to 5. Its state is its position, as `saved` makes it."""

    def __init__(self, saved=int, lost=0):
        super().__init__()
        self.saved, self.lost = saved, lost

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.position = 0 if initial_state is None else initial_state["parts"][0] + self.lost

    def next(self):
        if self.position >= 6:
            raise StopIteration
        self.position += 1
        return self.position - 1

    def get_state(self):
        return {"parts": [self.saved(self.position)]}


def test_it_counts_what_it_went_through():
    report = assert_resumes_exactly(lambda: ShardedSampler(6, rank=0, world_size=1), epochs=2)
    assert report.steps == 12
    assert report.resumes > 14  # one from each item and end, and chains of them
    assert report.state_bytes > 100


@pytest.mark.parametrize("chain", [0, 2])
@pytest.mark.parametrize("horizon", [2, None])
def test_each_resume_counts_and_goes_as_far_as_the_horizon(horizon, chain):
    graphs = []

    class Taken(Numbers):
        taken = 0

        def next(self):
            number = super().next()
            self.taken += 1
            return number

    def make():
        graphs.append(Taken())
        return graphs[-1]

    report = assert_resumes_exactly(make, epochs=2, horizon=horizon, chain=chain)
    assert len(graphs) == 1 + report.resumes
    places = 1 + 2 * (6 + 1)  # before the first item, after each of them, and after each end
    assert report.resumes == places if chain == 0 else report.resumes > places
    furthest = 12 if horizon is None else max(horizon, 5)  # a link of a chain takes up to 5
    assert max(graph.taken for graph in graphs[1:]) <= furthest
    assert horizon is None or chain or max(graph.taken for graph in graphs[1:]) == horizon


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Numbers(lost=1), r"resumed after 0 items of epoch 0: .*\[?.*instead of 0"),
        (lambda: Numbers(np.int64), r"\['root'\]\['parts'\]\[0\]` is a `numpy.int64`"),
        (lambda: Numbers(lambda n: {n}.pop), r"\['parts'\]\[0\]` is a `builtins.builtin_function"),
        (lambda: IterableWrapper([]), "there is nothing to resume"),
    ],
)
def test_what_does_not_resume_is_named(make, message):
    with pytest.raises(AssertionError, match=message):
        assert_resumes_exactly(make)


def test_one_graph_is_not_resumed_into_itself():
    graph = Numbers()
    with pytest.raises(ValueError, match="must return a new graph each time"):
        assert_resumes_exactly(lambda: graph)
    with pytest.raises(TypeError, match="must be a function"):
        assert_resumes_exactly(graph)


@dataclass(kw_only=True)
class CounterState(NodeState):
    source: SourceState
    passed: Count


class Counter(StatefulNode):
    """Passes everything on and counts it; `forgetful`, it does not restore the count."""

    STATE = CounterState

    def __init__(self, source, forgetful):
        super().__init__()
        self.source, self.forgetful = source, forgetful
        self.passed = 0

    def begin_epoch(self):
        self.source.reset(None)
        self.passed = 0

    def restore(self, state):
        self.source.reset(state.source)
        if not self.forgetful:
            self.passed = state.passed

    def save(self):
        return CounterState(source=self.source.state_dict(), passed=self.passed)

    def next(self):
        item = next(self.source)
        self.passed += 1
        return item


DATASET = [{"input_ids": [0] * (n % 7 + 1)} for n in range(50)]


def counted_graph(forgetful, below):
    """A graph with a counter below a node whose state hides that of its source."""
    samples = ParallelProcessor(ShardedSampler(DATASET, seed=0), DATASET.__getitem__, seed=0)
    counter = Counter(LengthObserver(samples), forgetful)
    if below == "WindowBucketer":
        return GroupCollator(WindowBucketer(counter, budget=32, window=16))
    return Prefetcher(counter, 2)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("below", ["WindowBucketer", "Prefetcher"])
def test_a_counter_that_is_not_restored_is_found_wherever_it_stands(below, every):
    with pytest.raises(
        AssertionError,
        match=r"`Counter` was reset to a state, .*: state\['passed'\] is 0 instead of \d",
    ):
        assert_resumes_exactly(lambda: counted_graph(True, below), every=every, horizon=5)
    assert_resumes_exactly(lambda: counted_graph(False, below), every=every, horizon=5)
