import contextlib
import io
import random
import zlib

import pytest
import torch
from damaged_states import batches, damaged, graphs, outcome, resealed

from odb_nodes import DistributedState, Loader, StateError
from odb_nodes.contract import EpochNode, EpochState

GRAPHS = [
    "replay",
    "payload",
    "accumulate",
    "packed",
    "stop",
    "jsonl",
    "iterable",
    "stateful",
    "sampler",
    "mixed",
    "mixed by tokens",
    "mixed in cycles",
    "nodes",
    "torchdata",
]
IN_FULL = ["replay", "payload"]
SAMPLED = 12


@pytest.fixture
def make_graph(request, tmp_path):
    return graphs(tmp_path)[request.param]


def saved(make_graph, step=4):
    """Return a state in mid-epoch, and the batches that follow it."""
    graph = make_graph()
    it = iter(graph)
    for _ in range(step):
        next(it)
    state = graph.state_dict()
    graph.close()
    again = make_graph()
    again.load_state_dict(state)
    expected = batches(again)
    again.close()
    return state, expected


def sampled(state, name, everything):
    """Return mutations of a state: some, others for each graph, or all of them."""
    found = list(damaged(state))
    if everything:
        return found
    return random.Random(zlib.crc32(name.encode())).sample(found, SAMPLED)


@pytest.mark.parametrize("name", GRAPHS)
def test_no_damage_passes(name, tmp_path, exhaustive):
    make_graph = graphs(tmp_path)[name]
    state, expected = saved(make_graph)
    for what, broken in sampled(state, name, exhaustive):
        assert outcome(make_graph, broken, expected) == "refused", what


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_without_a_digest_no_damage_hangs_or_is_blamed_on_a_sample(
    name, everything, tmp_path, exhaustive
):
    """A value that the node could have saved may give other batches here: hence the digest."""
    if everything and not (exhaustive or name in IN_FULL):
        pytest.skip("in full only with --exhaustive")
    make_graph = graphs(tmp_path)[name]
    state, expected = saved(make_graph)
    for what, broken in sampled(state, name, everything):
        if "digest" not in what:
            found = outcome(make_graph, resealed(broken), expected)
            assert found in ("refused", "equal", "other"), what


@pytest.mark.parametrize("make_graph", ["replay", "payload", "mixed"], indirect=True)
@pytest.mark.parametrize(
    ("field", "value"),
    [("position", -1), ("position", None), ("epoch", True), ("source", None), ("pulled", "7")],
)
def test_the_error_names_node_and_field(make_graph, field, value):
    state, _ = saved(make_graph)

    def break_it(part):
        if field in part and "node" in part:
            part[field] = value
            return str(part["node"])
        inner = (one for one in part.values() if isinstance(one, dict))
        return next((found for one in inner if (found := break_it(one))), "")

    node = break_it(state)
    graph = make_graph()
    graph.load_state_dict(resealed(state))
    with pytest.raises(StateError, match=f"the state of {node} is damaged: `{field}` must"):
        next(iter(graph))


@pytest.mark.parametrize("make_graph", ["replay", "payload"], indirect=True)
def test_states_of_two_steps_do_not_mix(make_graph):
    early, late = (saved(make_graph, step)[0] for step in (2, 6))
    graph = make_graph()
    with pytest.raises(StateError, match="its digest is not that"):
        graph.load_state_dict({**early, "root": late["root"]})


@pytest.mark.parametrize("make_graph", ["replay", "payload", "mixed"], indirect=True)
def test_flipped_bits_in_the_bytes_of_a_distributed_state_are_found(make_graph, exhaustive):
    graph = make_graph()
    next(iter(graph))
    ((key, buffer),) = DistributedState(graph).state_dict().items()
    data, choose = buffer.getvalue(), random.Random(0)
    for _ in range(2000 if exhaustive else 200):
        flipped = bytearray(data)
        flipped[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        with pytest.raises(StateError, match="is damaged: its digest is not that of"):
            DistributedState(graph).load_state_dict({key: io.BytesIO(flipped)})
    for cut in (0, 10, 32, 40, len(data) // 2):
        with pytest.raises(StateError, match="is damaged"):
            DistributedState(graph).load_state_dict({key: io.BytesIO(data[:cut])})
    graph.close()


@pytest.mark.parametrize(
    "state", [None, 1, "x", [], {}, {"node": "Loader"}, {"node": None}, {1: 2}, (1, 2)], ids=repr
)
def test_what_is_no_state_is_refused(tmp_path, state):
    with pytest.raises(StateError):
        graphs(tmp_path)["replay"]().load_state_dict(state)


def test_a_state_survives_a_format_that_sorts_keys(tmp_path):
    make_graph = graphs(tmp_path)["mixed"]
    state, expected = saved(make_graph)

    def ordered(part):
        if not isinstance(part, dict):
            return part
        return {key: ordered(part[key]) for key in sorted(part)}

    assert outcome(make_graph, ordered(state), expected) == "equal"


class Counting(EpochNode):
    """A node whose own state is the epoch alone, and that fails on demand."""

    STATE = EpochState

    def __init__(self, size=3, fail_at=None):
        super().__init__()
        self.size, self.fail_at, self.position = size, fail_at, 0

    def begin_epoch(self):
        self.position = 0

    def restore(self, state):
        self.position = 0

    def save(self):
        return EpochState()

    def next(self):
        if self.position == self.fail_at:
            self.position += 1
            raise OSError("unreadable")
        if self.position == self.size:
            raise StopIteration
        self.position += 1
        return self.position, self._epochs.epoch


def test_an_error_is_raised_again_until_the_next_reset():
    node = Counting(fail_at=1)
    assert next(node) == (1, 0)
    for _ in range(3):
        with pytest.raises(OSError, match="unreadable"):
            next(node)
    with pytest.raises(StateError, match=r"Counting has no state after an error.*unreadable"):
        node.state_dict()
    node.reset(None)
    assert next(node) == (1, 1)


def test_a_node_whose_reset_failed_stands_nowhere():
    node = Counting()
    next(node)
    state = node.state_dict()
    with pytest.raises(StateError):
        node.reset({**state, "epoch": -1})
    with pytest.raises(StateError, match="`epoch` must be an integer"):
        next(node)
    with pytest.raises(StateError, match="no state after an error"):
        node.state_dict()
    node.reset(state)
    assert next(node) == (1, 0)


def test_epochs_are_counted_for_a_node_of_ones_own():
    loader = Loader(Counting())
    assert [list(loader) for _ in range(2)] == [[(1, 0), (2, 0), (3, 0)], [(1, 1), (2, 1), (3, 1)]]
    loader.set_epoch(7)
    assert next(iter(loader)) == (1, 7)


def test_a_state_that_a_file_held_is_checked_like_any_other(tmp_path):
    make_graph = graphs(tmp_path)["payload"]
    state, expected = saved(make_graph)
    torch.save(state, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert outcome(make_graph, state, expected) == "equal"
    with contextlib.suppress(KeyError):
        del state["root"]["config"]
    assert outcome(make_graph, state, expected) == "refused"
