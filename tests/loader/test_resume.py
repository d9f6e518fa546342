import re
from dataclasses import replace

import numpy as np
import pytest
from graphs import ABOVE, BELOW, make, make_dataloader, process
from torchdata.nodes import Mapper

from odb_nodes import LengthObserver, Loader, WindowBucketer
from odb_nodes.sources import ShardedSampler
from odb_nodes.testing import assert_resumes_exactly


@pytest.mark.sampled(2)
@pytest.mark.parametrize("state", ["replay", "payload"])
@pytest.mark.parametrize("below", BELOW)
def test_every_step_of_three_epochs_over_every_source(below, state, exhaustive, sampled):
    if below == "ParallelMapper-process" and not exhaustive:
        pytest.skip("torchdata forks while its reader thread runs: now and then a worker hangs")
    options = sampled(every=7, horizon=12, chain=1)
    report = assert_resumes_exactly(lambda: make(below, state), epochs=3, **options)
    assert report.steps > 40


@pytest.mark.parametrize("above", ABOVE)
def test_every_step_of_three_epochs_under_every_node(above, sampled):
    assert_resumes_exactly(
        lambda: make("Mapper", above=above), epochs=3, **sampled(every=7, horizon=12, chain=1)
    )


def test_a_graph_that_does_not_resume_exactly_is_found_out():
    class Forgetful(WindowBucketer):
        """Restores from where the source is now, as if nothing of the pool were older."""

        def save(self):
            return replace(super().save(), source=self.source.state_dict())

    def graph():
        observed = LengthObserver(Mapper(ShardedSampler(40, rank=0, world_size=1), process))
        return Forgetful(observed, 100, 8)

    with pytest.raises(AssertionError, match="resumed after 1 items of epoch 0"):
        assert_resumes_exactly(graph)
    with pytest.raises(AssertionError, match="no items"):
        assert_resumes_exactly(lambda: Loader(ShardedSampler(1, rank=1, world_size=2)))


class Counting:
    """An iterable whose state is a list with a count of some type."""

    def __init__(self, kind):
        self.kind, self.count = kind, 0

    def __iter__(self):
        while self.count < 3:
            self.count += 1
            yield self.count
        self.count = 0

    def state_dict(self):
        return {"counts": [0, self.kind(self.count)]}

    def load_state_dict(self, state):
        self.count = int(state["counts"][1])


@pytest.mark.parametrize("kind", [np.int64, np.array, lambda count: b"", lambda count: object])
def test_what_a_state_cannot_hold_is_named(kind):
    place = re.escape("`state_dict()['counts'][1]` is a `")
    with pytest.raises(AssertionError, match=rf"{place}.*refuses\. Save plain Python data"):
        assert_resumes_exactly(lambda: Counting(kind))
    assert assert_resumes_exactly(lambda: Counting(int)).steps == 6


OLD = make_dataloader()
REFUSALS = [
    ({"every": 0}, ValueError, "`every`"),
    ({"epochs": 0}, ValueError, "`epochs`"),
    ({"epochs": 1.5}, TypeError, "`epochs`"),
    ({"chain": -1}, ValueError, "`chain`"),
    ({"horizon": 0}, ValueError, "`horizon`"),
    ({"make_graph": OLD}, TypeError, "`make_graph` must be a function"),
    ({"make_graph": lambda: OLD}, ValueError, "a new graph each time"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSALS)
def test_arguments_of_the_assertion_that_are_not_valid_are_named(options, error, message):
    with pytest.raises(error, match=message):
        assert_resumes_exactly(**{"make_graph": make_dataloader, **options})
