import pytest
from torch.utils.data import IterableDataset
from torchdata.nodes import BaseNode, Batcher, IterableWrapper, Mapper, Prefetcher, SamplerWrapper

from odb_nodes import (
    IterableSource,
    LengthObserver,
    Loader,
    ODBDataLoader,
    ParallelProcessor,
    SourceMixer,
    StateError,
    WindowBucketer,
)


class Forgetful(BaseNode):
    """A plain node that does not say where it stands."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self._items = iter([{"input_ids": [1] * (n % 9 + 1)} for n in range(60)])

    def next(self):
        return next(self._items)

    def get_state(self):
        return self.state


class ForgetfulIterable(IterableDataset):
    def __init__(self, state):
        self.state = state

    def __iter__(self):
        return iter([{"input_ids": [1] * (n % 9 + 1)} for n in range(60)])

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        pass


GRAPHS = {
    "root": lambda node: node,
    "below ours": LengthObserver,
    "below a bucketer": lambda node: WindowBucketer(LengthObserver(node), 64, 8),
    "below a processor": lambda node: ParallelProcessor(node, dict, rank=0, world_size=1),
    "below a Mapper": lambda node: LengthObserver(Mapper(node, dict)),
    "below a Batcher": lambda node: Batcher(node, 2),
    "below a Prefetcher": lambda node: Prefetcher(Mapper(node, dict), 2),
    "in a mixer": lambda node: SourceMixer({"a": node}, {"a": 1}),
}


@pytest.mark.parametrize("state", [{}, None], ids=str)
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_plain_node_without_a_state_is_refused_before_its_items_are_lost(graph, state):
    loader = Loader(GRAPHS[graph](Forgetful(state)))
    with pytest.raises((TypeError, StateError), match="`get_state` of .* must return where"):
        list(loader)


def test_the_node_is_named():
    loader = Loader(LengthObserver(Mapper(Forgetful({}), dict)))
    with pytest.raises(TypeError, match=r"of `Forgetful` .* but returned \{\} instead.*position"):
        next(iter(loader))


@pytest.mark.parametrize("state", [{}, None], ids=str)
def test_an_iterable_whose_own_state_is_empty_is_refused(state):
    loader = ODBDataLoader(ForgetfulIterable(state), token_budget=64, window=8)
    with pytest.raises(TypeError, match="`state_dict` of `ForgetfulIterable` must return where"):
        list(loader)
    loader = Loader(IterableSource(ForgetfulIterable(state), 0, 1))
    with pytest.raises(TypeError, match="`state_dict` of `ForgetfulIterable` must return where"):
        list(loader)


@pytest.mark.parametrize("wrapper", [IterableWrapper, SamplerWrapper])
def test_an_iterable_of_torchdata_is_asked_only_after_it_has_begun(wrapper):
    it = iter(Loader(Mapper(wrapper(ForgetfulIterable({})), dict)))
    next(it)
    with pytest.raises(TypeError, match="`state_dict` of `ForgetfulIterable` must return where"):
        next(it)
