from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graphs import make, sampler

from odb_nodes import Loader, StateError, load_state, save_state
from odb_nodes.contract import NodeState, copy_state
from odb_nodes.contract.state import add_digest, seal, seal_whole, unseal, unseal_whole


@dataclass(kw_only=True)
class OneField(NodeState):
    x: int


@dataclass(kw_only=True)
class AnyField(NodeState):
    x: Any


def resealed(state):
    """Return a changed state as one that was saved like that."""
    return add_digest({key: value for key, value in state.items() if key != "digest"})


def test_a_state_is_copied_whole():
    state = {"a": [1, (2, {"b": torch.ones(2)})], "c": "x"}
    copy = copy_state(state)
    state["a"][1][1]["b"][0] = 5
    state["a"].append(3)
    assert copy["a"][0] == 1
    assert len(copy["a"]) == 2
    assert copy["a"][1][1]["b"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "must be a state saved by a Node"),
        (None, "but is NoneType 'None'"),
        ([1], "but is list"),
        ({"model": 1, "optimizer": 2}, r"a dict with keys \['model', 'optimizer'\]"),
        (seal("Other", {}, {"x": 1}), "saved by `Other`, but is loaded into `Node`"),
        ({**seal("Node", {}, {"x": 1}), "version": 99}, "has `version` 99, but .* reads 6"),
        (seal("Node", {}, {}), "lacks `x`: it is incomplete"),
        (seal("Node", {"k": 1}, {"x": 1}), "`k` was 1 when saved, but is 'absent' now"),
    ],
)
def test_a_state_that_does_not_fit_says_why(state, message):
    with pytest.raises(StateError, match=message):
        unseal(state, "Node", OneField, {})


def test_a_whole_state_is_refused_after_any_change():
    state = seal_whole("Node", OneField(x=7))
    assert unseal_whole(state, "Node", OneField) == OneField(x=7)
    for digest in (None, True, state["digest"] + 1, float(state["digest"]), torch.ones(2)):
        with pytest.raises(StateError, match="its digest is not that of what was saved"):
            unseal_whole({**state, "digest": digest}, "Node", OneField)
    with pytest.raises(StateError, match="its digest is not that of what was saved"):
        unseal_whole({**state, "x": 8}, "Node", OneField)
    with pytest.raises(StateError, match="its digest is not that of what was saved"):
        unseal_whole(seal("Node", {}, {"x": 7}), "Node", OneField)
    with pytest.raises(StateError, match="`x` must be an integer"):
        unseal_whole({**state, "x": "7"}, "Node", OneField)
    with pytest.raises(StateError, match="must be a state saved by a Node"):
        unseal_whole([state], "Node", OneField)


@pytest.mark.parametrize("place", ["whole", "node", "config", "x", "digest", "unknown"])
@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_a_state_that_is_nested_too_deeply_is_refused(place, kind):
    deep = 1
    for _ in range(2000):
        deep = {"a": deep} if kind is dict else kind([deep])
    state = deep if place == "whole" else {**seal_whole("Node", AnyField(x=7)), place: deep}
    with pytest.raises(StateError, match="the state (of|for) Node|this odb_nodes reads"):
        unseal_whole(state, "Node", AnyField)


def test_a_digest_is_of_values_however_a_tensor_lies_in_memory():
    sparse, dense = torch.ones(3)[::2][:1], torch.ones(1)
    assert sparse.stride() != dense.stride()
    assert add_digest({"row": sparse})["digest"] == add_digest({"row": dense})["digest"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "state.pt"
    save_state({"step": 1}, path)
    with pytest.raises(Exception, match="pickle"):
        save_state({"step": lambda: 2}, path)
    assert load_state(path) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.pt"]


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path, keep):
    path = tmp_path / "state.pt"
    save_state(Loader(sampler()).state_dict(), path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(StateError, match=r"state.pt` \(\d+ bytes\) is truncated or not a state"):
        load_state(path)


def test_a_file_with_code_in_it_is_refused(tmp_path):
    torch.save({"call": print}, tmp_path / "state.pt")
    with pytest.raises(StateError, match="not a state file"):
        load_state(tmp_path / "state.pt")


def test_a_file_that_is_not_there_is_not_a_bad_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / "none.pt")


def test_a_state_of_another_version_is_refused_at_any_depth():
    loader = make("Mapper", above="bare")
    next(iter(loader))
    state = loader.state_dict()
    state["root"]["source"]["version"] = 0
    again = make("Mapper", above="bare")
    again.load_state_dict(resealed(state))
    with pytest.raises(StateError, match="WindowBucketer has `version` 0"):
        next(iter(again))


@pytest.mark.parametrize("value", [np.float64(1), np.ones(2), Path("x")])
def test_what_could_not_be_loaded_is_not_saved(tmp_path, value):
    path = tmp_path / "state.pt"
    save_state({"step": 1}, path)
    with pytest.raises(StateError, match="`state` must hold plain data .* but holds `"):
        save_state({"loss": value}, path)
    assert load_state(path) == {"step": 1}


def test_what_is_nested_too_deeply_is_not_saved(tmp_path):
    deep = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(StateError, match="`state` is nested too deeply"):
        save_state({"step": deep}, tmp_path / "state.pt")
    assert not any(tmp_path.iterdir())


def test_a_state_and_a_path_that_are_swapped_are_told_apart(tmp_path):
    with pytest.raises(TypeError, match=r"`path` must be a path, .* `dict` .*save_state\(state, p"):
        save_state(tmp_path / "state.pt", {"step": 1})


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "state.pt"
    save_state(Loader(sampler()).state_dict(), path)
    data = bytearray(path.read_bytes())
    data[data.index(b"position") + 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateError, match="is truncated or not a state file"):
        load_state(path)


def test_a_file_has_the_permissions_of_any_other(tmp_path):
    (tmp_path / "other").touch()
    save_state({}, tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_mode == (tmp_path / "other").stat().st_mode
