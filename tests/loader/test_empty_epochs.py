"""An epoch without an item, where one before had some: data that can be read only once."""

import pytest
from torchdata.nodes import BaseNode, IterableWrapper, Prefetcher

from odb_nodes import Loader, ODBDataLoader, SampleError

SAMPLES = [{"input_ids": [1] * (n % 5 + 1)} for n in range(20)]


class ReadOnce(BaseNode):
    """A node whose reset does not begin its data anew."""

    def __init__(self):
        super().__init__()
        self.samples, self.position = iter(SAMPLES), 0

    def reset(self, initial_state=None):
        super().reset(initial_state)

    def next(self):
        self.position += 1
        return next(self.samples)

    def get_state(self):
        return {"position": self.position}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Loader(ReadOnce()),
        lambda: Loader(Prefetcher(ReadOnce(), 2)),
        lambda: ODBDataLoader(ReadOnce(), token_budget=16),
        lambda: ODBDataLoader(ReadOnce(), token_budget=16, num_workers=1),
    ],
)
def test_a_node_that_can_be_read_only_once_is_named_at_the_next_epoch_and_every_later_one(make):
    with make() as loader:
        assert list(loader)
        for _ in range(3):
            with pytest.raises(SampleError, match=r"\(`ReadOnce`\) is empty, or can be read only"):
                list(loader)


def test_no_thread_outlives_it(new_threads):
    loader = Loader(Prefetcher(ReadOnce(), 2))
    list(loader)
    with pytest.raises(SampleError, match="can be read only"):
        list(loader)
    assert new_threads() == []


def test_it_is_seen_also_after_close():
    loader = Loader(ReadOnce())
    assert len(list(loader)) == 20
    loader.close()
    with pytest.raises(SampleError, match="one before had some"):
        list(loader)


def test_the_rest_of_an_epoch_may_be_empty_and_so_may_all_epochs():
    loader = Loader(IterableWrapper(SAMPLES))
    it = iter(loader)
    for _ in SAMPLES:
        next(it)
    state = loader.state_dict()
    again = Loader(IterableWrapper(SAMPLES))
    again.load_state_dict(state)
    assert [len(list(again)) for _ in range(3)] == [0, 20, 20]
    assert [list(empty) for empty in [Loader(IterableWrapper([]))] * 2] == [[], []]
