"""What `assert_resumes_exactly` finds, and how it says so."""

from dataclasses import dataclass

import numpy as np
import pytest
from refusals import refuses
from torchdata.nodes import BaseNode, IterableWrapper, Prefetcher

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    ParallelProcessor,
    ShardedSampler,
    StatefulNode,
    WindowBucketer,
)
from odb_nodes.core.contract import NodeState, SourceState
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
    assert (report.steps, len(graphs)) == (12, 1 + report.resumes)
    assert report.state_bytes > 100
    places = 1 + 2 * (6 + 1)  # before the first item, after each of them, and after each end
    assert report.resumes == places if chain == 0 else report.resumes > places
    furthest = 12 if horizon is None else max(horizon, 5)  # a link of a chain takes up to 5
    assert max(graph.taken for graph in graphs[1:]) <= furthest
    assert horizon is None or chain or max(graph.taken for graph in graphs[1:]) == horizon


ONE = Numbers()


test_what_does_not_resume_or_is_not_valid_is_named = refuses(
    [
        (lambda: Numbers(lost=1), {}, AssertionError, r"resumed after 0 items of epoch 0: .*of 0"),
        (lambda: Numbers(np.int64), {}, AssertionError, r"\['parts'\]\[0\]` is a `numpy.int64`"),
        (lambda: Numbers(lambda n: {n}.pop), {}, AssertionError, r"is a `builtins.builtin_func"),
        (lambda: IterableWrapper([]), {}, AssertionError, "there is nothing to resume"),
        (lambda: ONE, {}, ValueError, "must return a new graph each time, .*`Numbers`"),
        (ONE, {}, TypeError, "`make_graph` must be a function"),
        (lambda: [1], {}, TypeError, "`make_graph` must return a node or a loader"),
        (Numbers, {"every": 0}, ValueError, "`every`"),
        (Numbers, {"epochs": 0}, ValueError, "`epochs`"),
        (Numbers, {"chain": -1}, ValueError, "`chain`"),
        (Numbers, {"horizon": 0}, ValueError, "`horizon`"),
    ],
    lambda make, options: assert_resumes_exactly(make, **options),
)


@dataclass(kw_only=True)
class CounterState(NodeState):
    source: SourceState
    passed: int


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


@pytest.mark.parametrize(
    "above",
    [
        lambda source: GroupCollator(WindowBucketer(source, budget=32, window=16)),
        lambda source: Prefetcher(source, 2),
    ],
)
def test_a_counter_that_is_not_restored_is_found_below_what_hides_its_state(above):
    def make(forgetful):
        samples = ParallelProcessor(ShardedSampler(DATASET, seed=0), DATASET.__getitem__, seed=0)
        return above(Counter(LengthObserver(samples), forgetful))

    options = {"every": 2, "horizon": 5, "chain": 0}
    with pytest.raises(AssertionError, match=r"`Counter` was reset .*'passed'\] is 0 instead of"):
        assert_resumes_exactly(lambda: make(True), **options)
    assert_resumes_exactly(lambda: make(False), **options)
