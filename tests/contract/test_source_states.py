from dataclasses import dataclass

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
    StatefulNode,
    WindowBucketer,
)
from odb_nodes.contract import NodeState, SourceState, SourceStates

DATA = [{"input_ids": [1] * (n % 9 + 1)} for n in range(60)]


class Forgetful(BaseNode):
    """A plain node that does not say where it stands."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self._items = iter(DATA)

    def next(self):
        return next(self._items)

    def get_state(self):
        return self.state


class ForgetfulIterable(IterableDataset):
    def __init__(self, state):
        self.state = state

    def __iter__(self):
        return iter(DATA)

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


@dataclass(kw_only=True)
class PassingState(NodeState):
    source: SourceState


class Passing(StatefulNode):
    """A node that asks its source by `state_dict`."""

    STATE = PassingState

    def __init__(self, source):
        super().__init__()
        self.source = source

    def begin_epoch(self):
        self.source.reset(None)

    def restore(self, state):
        self.source.reset(state.source)

    def save(self):
        return PassingState(source=self.source.state_dict())

    def next(self):
        return next(self.source)


@dataclass(kw_only=True)
class ListedState(NodeState):
    sources: SourceStates


class Listed(Passing):
    """A node with a list of sources, whose states it names."""

    STATE = ListedState

    def __init__(self, source):
        super().__init__(source)
        self.sources = [source]

    def restore(self, state):
        self.source.reset(state.sources["first"])

    def save(self):
        return ListedState(sources={"first": self.sources[0].state_dict()})


GRAPHS |= {
    "below one's own": Passing,
    "in a list": Listed,
    "further below": lambda node: Passing(Mapper(node, dict)),
}


@pytest.mark.parametrize("state", [{}, None], ids=str)
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_plain_node_without_a_state_is_refused_before_its_items_are_lost(graph, state):
    with pytest.raises((TypeError, StateError), match="`get_state` of .* must return where"):
        list(Loader(GRAPHS[graph](Forgetful(state))))


def test_the_node_is_named():
    loader = Loader(LengthObserver(Mapper(Forgetful({}), dict)))
    with pytest.raises(TypeError, match=r"of `Forgetful` .* returned \{\}.*position"):
        next(iter(loader))


@pytest.mark.parametrize(
    "make",
    [
        lambda data: ODBDataLoader(data, token_budget=64, window=8),
        lambda data: Loader(IterableSource(data, 0, 1)),
        lambda data: Loader(Mapper(IterableWrapper(data), dict)),
        lambda data: Loader(Mapper(SamplerWrapper(data), dict)),
    ],
    ids=["loader", "source", "wrapper", "sampler"],
)
@pytest.mark.parametrize("state", [{}, None], ids=str)
def test_an_iterable_whose_own_state_is_empty_is_refused(make, state):
    with pytest.raises(TypeError, match="`state_dict` of `ForgetfulIterable` must return"):
        list(make(ForgetfulIterable(state)))
