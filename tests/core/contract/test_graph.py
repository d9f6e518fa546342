import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
from torch.utils.data import DistributedSampler, IterableDataset
from torchdata.nodes import (
    BaseNode,
    Batcher,
    IterableWrapper,
    Mapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    Prefetcher,
    SamplerWrapper,
    Unbatcher,
)

from odb_nodes import (
    GroupCollator,
    IterableSource,
    LengthObserver,
    ParallelProcessor,
    ShardedSampler,
    WindowBucketer,
)
from odb_nodes.core.contract.graph import (
    begin_epoch,
    close_nodes,
    epochs_of,
    length_of,
    stop_threads,
    walk,
)


def indices(size=10, rank=0, world_size=1):
    return ShardedSampler(size, False, 0, rank, world_size)


class Node(BaseNode):
    """A node with whatever attributes a test wants to be searched."""

    def __init__(self, **attributes):
        super().__init__()
        vars(self).update(attributes)
        self.calls = set()

    def close(self):
        self.calls.add("close")

    def interrupt(self):
        self.calls.add("interrupt")


class Gated(BaseNode):
    """0, 1, ...; from the second item on a thread stays inside of `next` until `gate` is set."""

    def __init__(self):
        super().__init__()
        self.position = 0
        self.inside, self.gate = threading.Event(), threading.Event()

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.position = initial_state or 0

    def next(self):
        if self.position:
            self.inside.set()
            self.gate.wait(30)
        self.position += 1
        return self.position - 1

    def get_state(self):
        return self.position


@pytest.fixture
def gated():
    node = Gated()
    yield node
    node.gate.set()


# walk


def test_a_node_comes_before_its_sources_also_inside_of_torchdatas():
    source = indices()
    inner = ParallelMapper(source, str, 1, prebatch=4)
    mixer = MultiNodeWeightedSampler({"a": inner, "b": indices()}, {"a": 0.5, "b": 0.5})
    nodes = list(walk(Prefetcher(mixer, 2)))
    assert [type(node).__name__ for node in nodes[:2]] == ["Prefetcher", type(mixer).__name__]
    assert nodes.index(mixer) < nodes.index(inner) < nodes.index(source)
    names = {type(node).__name__ for node in nodes}
    assert {"Unbatcher", "_ParallelMapperImpl", "Batcher"} <= names


@pytest.mark.parametrize("hold", [list, tuple, lambda nodes: dict(enumerate(nodes))])
def test_sources_are_found_in_containers(hold):
    sources = [Node(), Node()]
    assert list(walk(Node(label="text", raw=b"bytes", sources=hold(sources))))[1:] == sources


def test_a_shared_node_is_walked_once():
    shared = Node()
    parent = Node(left=Node(source=shared), right=Node(source=shared))
    shared.parent = parent
    nodes = list(walk(parent))
    assert len(nodes) == len(set(map(id, nodes))) == 4


def test_a_chain_of_mappers_is_walked_in_linear_time():
    """A mapper refers to its source twice: 2**16 visits where each is followed."""
    node = indices()
    for _ in range(16):
        node = Mapper(node, str)
    assert sum(1 for _ in zip(walk(node), range(1000), strict=False)) <= 33


class Counted(Sequence):
    """Data that is costly to read, and says how often it was."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 100

    def __getitem__(self, index):
        self.reads += 1
        return range(100)[index]


@pytest.mark.parametrize("wrap", [IterableSource, IterableWrapper, lambda data: Node(data=data)])
def test_data_is_not_read_in_search_of_nodes(wrap):
    """Or every `iter(loader)` would read the whole dataset, or `range(10**12)`."""
    data = Counted()
    list(walk(wrap(data)))
    assert data.reads == 0


# stop_threads


@pytest.mark.parametrize(
    "make",
    [
        lambda source: Prefetcher(source, 3),
        lambda source: ParallelMapper(source, abs, 2, in_order=False),
        lambda source: ParallelMapper(source, abs, 2, prebatch=2),
        lambda source: ParallelMapper(source, abs, 2, method="process"),
        lambda source: Prefetcher(ParallelMapper(Prefetcher(source, 2), abs, 2), 2),
        lambda source: Prefetcher(MultiNodeWeightedSampler({"a": source}, {"a": 1.0}), 2),
    ],
    ids="prefetcher unordered prebatch processes nested mixer".split(),
)
@pytest.mark.parametrize("stop", [stop_threads, close_nodes])
def test_no_thread_and_no_process_is_left(make, stop, new_threads):
    root = make(indices(100))
    root.reset(None)
    next(root)
    assert new_threads()
    stop(root, 30)
    assert (new_threads(), multiprocessing.active_children()) == ([], [])
    root.reset(None)
    assert next(root) == 0
    stop(root, 30)


def test_an_item_too_large_for_a_pipe_does_not_keep_the_program_from_exiting(tmp_path):
    """Killed workers read no more: what is on its way to them must not be waited for."""
    script = tmp_path / "program.py"
    script.write_text(
        "import time, torch\n"
        "from torchdata.nodes import IterableWrapper, ParallelMapper\n"
        "from odb_nodes import Loader\n"
        "def slow(item):\n"
        "    time.sleep(item[0])\n"
        "    return item[0]\n"
        "if __name__ == '__main__':\n"
        "    items = [bytes([n > 0]) * (1 << 20) for n in range(9)]\n"
        "    root = ParallelMapper(IterableWrapper(items), slow, 2, method='process')\n"
        "    with Loader(root) as loader:\n"
        "        print(next(iter(loader)), flush=True)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, timeout=60, text=True)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_a_thread_is_waited_for_until_it_has_left_its_source(gated, new_threads):
    root = Prefetcher(gated, 2)
    root.reset(None)
    gated.inside.wait(30)
    threading.Timer(0.7, gated.gate.set).start()
    stop_threads(root, 30)
    assert gated.gate.is_set()
    assert [name for name in new_threads() if "Timer" not in name] == []


@pytest.mark.parametrize("stop", [stop_threads, close_nodes])
@pytest.mark.parametrize(
    "make", [lambda source: Prefetcher(source, 3), lambda source: ParallelMapper(source, abs, 2)]
)
def test_a_thread_that_does_not_come_back_is_an_error_that_names_its_node(make, stop, gated):
    root = make(gated)
    root.reset(None)
    gated.inside.wait(30)
    name = type(root).__name__
    with pytest.raises(TimeoutError, match=rf"`_?{name}\w*` is still inside .* after 0.1 s"):
        stop(root, 0.1)
    gated.gate.set()
    stop(root, 30)


def test_every_node_is_closed_and_interrupted_also_in_a_graph_that_never_ran(new_threads):
    nodes = [Node(), Node()]
    close_nodes(Node(sources=nodes, below=Prefetcher(ParallelMapper(indices(), abs, 2), 2)), 1)
    assert [node.calls for node in nodes] == [{"close", "interrupt"}] * 2
    assert new_threads() == []


# length_of


class Unsized(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize(
    ("node", "length"),
    [
        (indices(10), 10),
        (indices(10, 1, 4), 3),
        (indices(2, 3, 4), 0),
        (IterableSource(range(10), 1, 4), 3),
        (IterableWrapper(range(10)), 10),
        (SamplerWrapper(range(10)), 10),
        (Mapper(indices(10), str), 10),
        (ParallelMapper(indices(10), str, 2), 10),
        (ParallelMapper(indices(10), str, 2, prebatch=3), 10),
        (Batcher(indices(10), 3, drop_last=True), 3),
        (Batcher(indices(10), 3, drop_last=False), 4),
        (Batcher(indices(9), 3, drop_last=False), 3),
        (Batcher(indices(2), 3, drop_last=True), 0),
        (Prefetcher(Batcher(Mapper(indices(10), str), 4, drop_last=False), 2), 3),
        (ParallelProcessor(IterableWrapper(range(10)), str), 10),
        (LengthObserver(Prefetcher(Mapper(indices(10), str), 2)), 10),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseNode) else None,
)
def test_a_length_that_can_be_known(node, length):
    assert length_of(node) == length


@pytest.mark.parametrize(
    ("make", "unknown"),
    [
        (lambda: GroupCollator(WindowBucketer(LengthObserver(indices()), 100)), "GroupCollator"),
        (lambda: WindowBucketer(LengthObserver(indices()), 100), "WindowBucketer"),
        (lambda: Unbatcher(Batcher(indices(), 2)), "Unbatcher"),
        (lambda: MultiNodeWeightedSampler({"a": indices()}, {"a": 1.0}), "MultiNodeWeighted"),
        (lambda: IterableSource(Unsized(), 0, 1), ""),
        (lambda: Prefetcher(Batcher(IterableWrapper(Unsized()), 2), 2), "IterableWrapper"),
        (lambda: SamplerWrapper(Unsized()), "SamplerWrapper"),
        (lambda: LengthObserver(IterableWrapper(Unsized())), "IterableWrapper"),
        (lambda: Node(), "Node"),
    ],
)
def test_a_length_that_cannot_be_known_is_a_type_error_that_names_the_node(make, unknown):
    with pytest.raises(TypeError, match=f"`{unknown}"):
        length_of(make())


def test_the_epochs_of_a_graph_are_those_that_its_nodes_say_they_are_in():
    sampler = SamplerWrapper(DistributedSampler(range(4), num_replicas=1, rank=0))
    graph = Node(several=[Mapper(indices(), str), sampler, Node(epoch="first")])
    assert epochs_of(graph) == {0}
    begin_epoch(graph, 7)  # The source of the mapper was not reset: it has given no item.
    assert epochs_of(graph) == {0, 7}
    graph.several[0].reset()
    assert epochs_of(graph) == {7}
