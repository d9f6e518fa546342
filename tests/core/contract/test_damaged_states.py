"""Whatever happens to the state of a graph: it is refused, and nothing hangs."""

import io
import random
import zlib
from itertools import islice

import pytest
from damaged_states import damaged, resealed
from in_process import InProcessHub
from jobs import KINDS, TIMEOUT_S

from odb_nodes import DistributedState, StateError
from odb_nodes.core.alignment.aligned_round import ordinals_of, totals_from_bytes
from odb_nodes.core.contract import EpochNode, EpochState
from odb_nodes.core.nodes.exclusions import ExcludedKeys

pytestmark = pytest.mark.filterwarnings("ignore:.*(skipped|exceed):UserWarning")


def make(kind, folder):
    return KINDS[kind].loader(InProcessHub(1, TIMEOUT_S).exchange(0), folder)


def saved(kind, folder, step=4):
    """A state in mid-epoch."""
    with make(kind, folder) as loader:
        list(islice(loader, step))
        return loader.state_dict()


NAMES = [name for name in KINDS if not name.startswith("virtual ")]  # as those that they host


@pytest.mark.parametrize("kind", NAMES)
def test_no_damage_passes(kind, tmp_path):
    broken = list(damaged(saved(kind, tmp_path)))
    with make(kind, tmp_path) as loader:
        for what, state in random.Random(zlib.crc32(kind.encode())).sample(broken, 150):
            with pytest.raises(StateError):
                loader.load_state_dict(state)
                pytest.fail(what)


@pytest.mark.parametrize("kind", ["replay", "mixed"])
def test_no_damage_of_a_node_s_own_state_passes(kind, tmp_path):
    """As of a graph that a `Loader` of torchdata iterates."""
    with make(kind, tmp_path) as loader:
        list(islice(loader, 4))
        root = loader.root
        state = root.state_dict()
        broken = list(damaged(state))
        for what, damaged_state in random.Random(zlib.crc32(kind.encode())).sample(broken, 150):
            if what == "digest: nothing":  # as a state within another
                continue
            with pytest.raises(StateError):
                root.reset(damaged_state)
                pytest.fail(what)
        root.reset(state)
        assert root.state_dict() == state


def changed(state, node, change):
    """A copy of a state, in which that of a node has other fields."""
    if isinstance(state, dict):
        state = {key: changed(value, node, change) for key, value in state.items()}
        return {**state, **change(state)} if state.get("node") == node else state
    return state


def with_held(position, change):
    """A change of a part of what a bucketer holds."""

    def held(state):
        parts = [*state["held"]]
        parts[position] = change(parts[position])
        return {"held": tuple(parts)}

    return held


REFUSED = {
    "a pool that begins before the epoch": ("WindowBucketer", with_held(0, lambda _: -1)),
    "a pool without its last samples": ("WindowBucketer", with_held(1, lambda bits: bits[:-1])),
    "a pool with a bit more": ("WindowBucketer", with_held(1, lambda bits: bits + b"\x80")),
    "a pool of which others wait": (
        "WindowBucketer",
        with_held(2, lambda bits: None if bits else b"\0"),
    ),
    "records of fewer samples": (
        "WindowBucketer",
        with_held(3, lambda records: (records[0][:-8], *records[1:])),
    ),
    "samples without keys": (
        "WindowBucketer",
        with_held(3, lambda records: (records[0], None, *records[2:])),
    ),
    "samples with numbers": ("WindowBucketer", lambda _: {"numbered": True}),
    "more pulled since the source than ever": (
        "WindowBucketer",
        lambda state: {"pulled_since_source": state["pulled"] + 1},
    ),
    "more taken than were out": (
        "ParallelProcessor",
        lambda state: {"taken": state["position"] + 1},
    ),
    "a group without a sample": (
        "RankAligner",
        lambda state: {"groups": (state["groups"][0], state["groups"][1][:-8])},
    ),
    "more steps out than there are": ("RankAligner", lambda _: {"emitted": 99}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_node_refuses_a_consistent_state_that_no_run_can_have_saved(what, tmp_path):
    """Its digest is right: as of a fault of the writer, not of the disk."""
    node, change = REFUSED[what]
    with make("replay", tmp_path) as loader:
        list(islice(loader, 4))
        root = loader.root
        state = root.state_dict()
        root.reset(resealed(changed(state, node, lambda _: {})))
        with pytest.raises(StateError, match=r"damaged|cannot resume|ended before|keys"):
            root.reset(resealed(changed(state, node, change)))
        root.reset(state)


def test_states_of_two_steps_do_not_mix(tmp_path):
    early, late = (saved("replay", tmp_path, step) for step in (2, 6))
    with pytest.raises(StateError, match="digest"):
        make("replay", tmp_path).load_state_dict({**early, "root": late["root"]})


def test_flipped_bits_in_the_bytes_of_a_distributed_state_are_found(tmp_path, exhaustive):
    with make("mixed", tmp_path) as loader:
        next(iter(loader))
        ((key, buffer),) = DistributedState(loader).state_dict().items()
        data, choose = buffer.getvalue(), random.Random(0)
        broken = [data[:cut] for cut in (0, 10, 32, 40, len(data) // 2)]
        for _ in range(2000 if exhaustive else 200):
            flipped = bytearray(data)
            flipped[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
            broken.append(flipped)
        for damaged_bytes in broken:
            with pytest.raises(StateError, match="is damaged"):
                DistributedState(loader).load_state_dict({key: io.BytesIO(damaged_bytes)})


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
    for call in (lambda: node.reset({**state, "epoch": -1}), lambda: next(node)):
        with pytest.raises(StateError, match="Counting is damaged: its digest is not"):
            call()
    with pytest.raises(StateError, match="no state after an error"):
        node.state_dict()
    node.reset(state)
    assert next(node) == (1, 0)


CUT = {
    "totals": totals_from_bytes,
    "groups": lambda data: ordinals_of(([1], data)),
    "excluded": lambda data: ExcludedKeys.from_state({"": data}),
}


@pytest.mark.parametrize("field", CUT)
def test_a_field_that_was_cut_within_a_number_is_named(field):
    with pytest.raises(StateError, match=f"`{field}` of a state is damaged"):
        CUT[field](bytes(15))
