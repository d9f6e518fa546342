from dataclasses import dataclass
from typing import Any

import pytest
import torch

from odb_nodes import StateError
from odb_nodes.contract import NodeState, copy_state
from odb_nodes.contract.state import add_digest, seal, seal_whole, unseal, unseal_whole


@dataclass(kw_only=True)
class OneField(NodeState):
    x: int


@dataclass(kw_only=True)
class AnyField(NodeState):
    x: Any


def test_a_state_is_copied_whole():
    state = {"a": [1, (2, {"b": torch.ones(2)})], "c": "x"}
    copy = copy_state(state)
    state["a"][1][1]["b"][0] = 5
    state["a"].append(3)
    assert copy["a"][0] == 1
    assert len(copy["a"]) == 2
    assert copy["a"][1][1]["b"].tolist() == [1, 1]


REFUSALS = [
    ({}, "must be a state saved by a Node"),
    (None, "but is NoneType 'None'"),
    ([1], "but is list"),
    ({"model": 1, "optimizer": 2}, r"keys \['model', 'optimizer'\]"),
    (seal("Other", {}, {"x": 1}), "saved by `Other`.* into `Node`"),
    ({**seal("Node", {}, {"x": 1}), "version": 99}, "`version` 99, but .* reads 8"),
    (seal("Node", {}, {}), "lacks `x`"),
    (seal("Node", {}, {"x": 1, "other": 0}), "has `other`"),
    ({**seal("Node", {}, {"x": 1}), "config": 3}, "`config` must be a dict, but is 3"),
    ({**add_digest(seal("Node", {}, {"x": 1})), "x": 2}, "Node is damaged: its digest"),
    (seal("Node", {"k": 1}, {"x": 1}), "`k` was 1 .* is 'absent' now"),
]


@pytest.mark.parametrize(("state", "message"), REFUSALS)
def test_a_state_that_does_not_fit_says_why(state, message):
    with pytest.raises(StateError, match=message):
        unseal(state, "Node", OneField, {})
    if (
        isinstance(state, dict)
        and "config" in state
        and state["config"] == {}
        and "digest" not in state
    ):
        with pytest.raises(StateError, match=message):
            unseal_whole(add_digest(state), "Node", OneField)


def test_true_is_not_one_in_a_configuration():
    with pytest.raises(StateError, match="`window` was True .* is 1 now"):
        unseal(seal("Node", {"window": True}, {"x": 1}), "Node", OneField, {"window": 1})


def test_a_whole_state_is_refused_after_any_change():
    state = seal_whole("Node", OneField(x=7))
    assert unseal_whole(state, "Node", OneField) == OneField(x=7)
    digests = None, True, state["digest"] + 1, float(state["digest"]), torch.ones(2)
    changes = [*({"digest": digest} for digest in digests), {"x": 8}]
    for broken in (*({**state, **change} for change in changes), seal("Node", {}, {"x": 7})):
        with pytest.raises(StateError, match="its digest is not"):
            unseal_whole(broken, "Node", OneField)


@pytest.mark.parametrize("place", ["whole", "node", "config", "x", "digest", "unknown"])
@pytest.mark.parametrize("kind", [list, dict])
def test_a_state_that_is_nested_too_deeply_is_refused(place, kind):
    deep = 1
    for _ in range(2000):
        deep = {"a": deep} if kind is dict else kind([deep])
    state = deep if place == "whole" else {**seal_whole("Node", AnyField(x=7)), place: deep}
    with pytest.raises(StateError, match="the state (of|for) Node|this odb_nodes reads"):
        unseal_whole(state, "Node", AnyField)


def test_a_digest_is_of_values_whatever_the_order_of_keys():
    mixed = {2: 0, "2": 1, (1, b"x"): 2, None: 3}
    states = [{"b": mixed, "a": 2**70}, {"a": 2**70, "b": dict(reversed(mixed.items()))}]
    assert len({add_digest(one)["digest"] for one in states}) == 1


def test_a_digest_is_of_values_however_a_tensor_lies_in_memory():
    sparse, dense = torch.ones(3)[::2][:1], torch.ones(1)
    assert sparse.stride() != dense.stride()
    assert add_digest({"row": sparse})["digest"] == add_digest({"row": dense})["digest"]


@pytest.mark.parametrize(
    ("value", "other"),
    [
        *(((1, 2), [1, 2]), ({1: 2}, {"1": 2}), (1, True), (1, 1.0), (b"1", "1"), ([b"1"], [b"2"])),
        *((None, "None"), ({}, []), ([[1], 2], [[1, 2]]), (0.0, -0.0), (2**70, 2**70 + 1)),
    ],
)
def test_a_digest_tells_values_of_other_types_apart(value, other):
    digests = [add_digest({"x": [one]})["digest"] for one in (value, other)]
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ({0, 1}, {7, 8}),
        (1 + 2j, 2 + 1j),
        (bytearray(b"a"), bytearray(b"b")),
        (torch.Size([2]), torch.Size([3])),
        (torch.float32, torch.float16),
        (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
    ],
)
def test_a_digest_covers_whatever_a_file_may_hold(value, other):
    state = seal_whole("Node", AnyField(x=value))
    assert type(unseal_whole(state, "Node", AnyField).x) is type(value)
    with pytest.raises(StateError, match="digest"):
        unseal_whole({**state, "x": other}, "Node", AnyField)
