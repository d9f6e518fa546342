"""What `assert_resumes_exactly` finds, and how it says so."""

import numpy as np
import pytest
from torchdata.nodes import BaseNode, IterableWrapper

from odb_nodes import ShardedSampler
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
