"""The node of docs/own-nodes.md in a process that is killed, and goes on from a file."""

import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import IterableDataset
from torchdata.nodes import BaseNode, Batcher, IterableWrapper, Mapper, Prefetcher, SamplerWrapper

from odb_nodes import (
    EpochNode,
    IterableSource,
    LengthObserver,
    Loader,
    ODBDataLoader,
    ParallelProcessor,
    ShardedSampler,
    SourceMixer,
    StateError,
    WindowBucketer,
)
from odb_nodes.core.contract import (
    EpochState,
    NodeState,
    SourceState,
    SourceStates,
    StatefulNode,
    copy_state,
    snapshot,
)
from odb_nodes.core.contract.node import take
from odb_nodes.core.sample import ItemKey
from odb_nodes.testing import assert_resumes_exactly

PAGE = Path(__file__).parents[3] / "docs" / "own-nodes.md"
NODE, EXPLICIT = re.findall(r"```python.*?\n(.*?)```", PAGE.read_text(), re.S)[:2]
JOB = """
import os, signal, sys
from odb_nodes import GroupCollator, IterableSource, LengthObserver, Loader, WindowBucketer
from odb_nodes import load_state, save_state

path, steps = sys.argv[1], int(sys.argv[2])
data = [{"input_ids": [n] * (n % 37 + 1)} for n in range(150)]
kept = ShortSampleFilter(LengthObserver(IterableSource(data, 0, 1)), 8)
loader = Loader(GroupCollator(WindowBucketer(kept, 256, 16)))
if os.path.exists(path):
    loader.load_state_dict(load_state(path))
for batch in loader:
    print(batch["input_ids"].tolist(), flush=True)
    save_state(loader.state_dict(), path)
    steps -= 1
    if not steps:
        os.kill(os.getpid(), signal.SIGKILL)
print(kept.dropped_samples)
"""


def run(path, steps):
    command = [sys.executable, "-c", NODE + JOB, str(path), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.stdout.splitlines(), done.returncode == 0


def test_a_killed_job_with_a_custom_node_resumes_exactly(tmp_path):
    expected, ended = run(tmp_path / "whole.pt", 0)
    assert ended
    batches = []
    for steps in (5, 0):
        lines, ended = run(tmp_path / "killed.pt", steps)
        assert ended == (not steps)
        batches += lines
    assert batches == expected


@dataclass(kw_only=True)
class PairsState(EpochState):
    sources: SourceStates
    half: list = field(default_factory=list)


class Pairs(EpochNode):
    """Yields an item of each of two sources, one after the other; all its methods are defaults."""

    STATE = PairsState

    def __init__(self, *sources):
        super().__init__()
        self.sources = dict(zip("ab", sources, strict=True))

    def next(self):
        if not self.half:
            self.half = [next(source) for source in self.sources.values()]
        return self.half.pop(0), self.epoch


def filtered(kind):
    exec(NODE + EXPLICIT, names := {"__name__": "own_node"})
    data = [{"input_ids": [n] * (n % 37 + 1)} for n in range(40)]
    return names[kind](LengthObserver(IterableSource(data, 0, 1)), 8)


@pytest.mark.parametrize(
    "make",
    [
        partial(filtered, "ShortSampleFilter"),
        partial(filtered, "ExplicitFilter"),
        lambda: Pairs(*(IterableSource(range(9 * n), 0, 1) for n in (1, 2))),
    ],
    ids=["declared", "explicit", "several sources"],
)
def test_a_node_resumes_exactly_by_the_attributes_that_its_state_declares(make):
    assert_resumes_exactly(make, epochs=2)


def test_a_snapshot_that_is_kept_shares_nothing_that_the_node_changes():
    node = Pairs(*(IterableSource(range(9 * n), 0, 1) for n in (1, 2)))
    next(node)
    kept, saved = snapshot(node), node.state_dict()
    list(node)
    assert copy_state(kept) == {name: value for name, value in saved.items() if name != "digest"}


def test_the_node_of_the_page_begins_each_epoch_with_its_defaults():
    node = filtered("ShortSampleFilter")
    dropped = [(list(node), node.reset(), node.dropped_samples)[2] for _ in range(2)]
    assert dropped == [0, 0]
    list(node)
    assert node.dropped_samples > 0


@dataclass(kw_only=True)
class OneOfTwoState(NodeState):
    first: SourceState


class OneOfTwo(StatefulNode):
    """Declares one of the two sources that it holds, and knows a node below the other."""

    STATE = OneOfTwoState

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, (second,)
        self.below = second.source

    def next(self):
        return next(self.first), next(self.second[0])


class SavesOneOfTwo(OneOfTwo):
    def save(self):
        return OneOfTwoState(first=snapshot(self.first))


@pytest.mark.parametrize("kind", [OneOfTwo, SavesOneOfTwo])
def test_a_source_that_the_state_leaves_out_is_an_error_that_names_it(kind):
    first, second = (LengthObserver(IterableSource([5, 6], 0, 1), int) for _ in range(2))
    with pytest.raises(TypeError, match="lacks a field for .*'second'"):
        kind(first, second).reset()
    assert next(kind(first, first))  # one node, by two names


def test_an_annotation_that_only_a_type_checker_can_read_is_named():
    @dataclass(kw_only=True)
    class State(NodeState):
        seen: "Missing" = 0  # noqa: F821

    with pytest.raises(TypeError, match="annotations of `State`.* name 'Missing' is not defined"):

        class Node(StatefulNode):
            STATE = State


def with_extra(node):
    node.late = 1
    return node


BOTH = NODE + EXPLICIT
DEFAULT = "dropped_samples: int = 0", "dropped_samples: int"
MISTAKES = {  # what replaces a piece of the node -> the error, when it is made or asked for a state
    "another STATE": (("    STATE = FilterState\n", ""), r"lacks a field for \['source'\]"),
    "no source": (("    source: SourceState\n", ""), r"lacks a field for \['source'\]"),
    "no STATE": (
        ("    STATE = FilterState\n", ""),
        "must define `begin_epoch`, or declare its state",
    ),
    "no default": (DEFAULT, "`dropped_samples` of `FilterState` must have a default"),
    "nothing saved": (("return FilterState(", "FilterState("), "but returned None"),
    "slots": (("kw_only=True", "kw_only=True, slots=True"), "without `slots`"),
    "an attribute": (
        ("return FilterState(", "return with_extra(FilterState("),
        r"has \['late'\], which are no fields of `FilterState`",
    ),
    "numpy": (("dropped_samples=self.dropped_samples", "dropped_samples=np.int64(1)"), "numpy"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_custom_node_is_named_before_its_first_state(mistake):
    (before, after), message = MISTAKES[mistake]
    is_declared = mistake in ("no STATE", "no default", "no source")
    code = (NODE if is_declared else BOTH).replace(before, after)
    if mistake == "an attribute":
        code = code.replace("dropped_samples=self.dropped_samples)", "dropped_samples=1))")
    assert code not in (NODE, BOTH)
    names = {"with_extra": with_extra, "np": np, "__name__": "own_node"}
    with pytest.raises(TypeError, match=message):
        exec(code, names)
        kind = names.get("ExplicitFilter") or names["ShortSampleFilter"]
        node = kind(LengthObserver(IterableSource([], 0, 1)), 8)
        node.reset()
        node.state_dict()


# --- nodes that do not say where they stand -------------------------------------------------------


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

    def begin_epoch(self):
        self.source.reset(None)

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
    named = "`Forgetful`" if graph in ("root", "below a Mapper") else ".*"
    said = rf"`get_state` of {named} must return its position.* returned ({{}}|None).*position"
    with pytest.raises((TypeError, StateError), match=said):
        list(Loader(GRAPHS[graph](Forgetful(state))))


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


# --- a chunk of items at once: those that single calls of `next` give, also of derived nodes -----


class Marked:
    """What a node may take from a mixin."""

    def next(self):
        return f"{super().next()}!"


class MarkedSampler(Marked, ShardedSampler):
    pass


class MarkedProcessor(ParallelProcessor):
    def next(self):
        return f"{super().next()}!"


class KeyedProcessor(ParallelProcessor):
    def item_key(self):
        key = super().item_key()
        return ItemKey(key.source, key.key + 1000, key.world_size)


class SquareSampler(MarkedSampler):
    """Defines anew what it hands on at once."""

    def next_chunk(self, count):
        indices, keys = self._take(count), [None] * count
        return [index * index for index in indices], keys


def sampler(kind=ShardedSampler):
    return kind(5, False, 0, 0, 1)


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize(
    ("kind", "mark", "first_key"),
    [(ParallelProcessor, "", 0), (MarkedProcessor, "!", 0), (KeyedProcessor, "", 1000)],
)
def test_a_processor_may_be_derived(kind, mark, first_key, together):
    node, items, keys = kind(sampler(), str), [], []
    node.reset(None)
    while len(items) < 5:
        some, their_keys = take(node, together)
        items, keys = [*items, *some], keys + [key.key for key in their_keys]
    assert items == [f"{number}{mark}" for number in range(5)]
    assert keys == [*range(first_key, first_key + 5)]
    assert list(kind(sampler(), str)) == items


def test_a_chunk_is_taken_where_it_is_defined_beside_or_below_next_and_not_above_it():
    assert take(sampler(SquareSampler), 3) == ([0, 1, 4], [None] * 3)
    derived = type("Derived", (MarkedSampler,), {})
    assert list(ParallelProcessor(sampler(derived), str)) == ["0!", "1!", "2!", "3!", "4!"]


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (([], []), "0 and 0 keys"),
        (([1, 2], [None]), "2 and 1 keys"),
        (([1, 2, 3], [None] * 3), "must return 1 to 2 items"),
    ],
)
def test_a_next_chunk_of_the_wrong_size_is_refused(chunk, message):
    class Wrong(ShardedSampler):
        def next_chunk(self, count):
            return chunk

    node = sampler(Wrong)
    for _ in range(2):  # The items are lost: it stays an error until a reset.
        with pytest.raises(TypeError, match=rf"`next_chunk` of `Wrong`.*{message}|{message}"):
            take(node, 2)
