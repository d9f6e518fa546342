from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from odb_nodes import StateError, StatefulNode
from odb_nodes.contract import (
    Count,
    InRange,
    NodeState,
    RowsOf,
    SourceState,
    SourceStates,
    Sparse,
)
from odb_nodes.contract.fields import check_fields, source_fields
from odb_nodes.contract.state import seal, unseal


@dataclass(kw_only=True)
class Declared(NodeState):
    count: Count = 0
    percent: Annotated[int, InRange(0, 100)] = 0
    flag: bool = False
    share: float = 0.0
    name: str | None = None
    table: Annotated[bytes | None, RowsOf(4)] = None
    lengths: list[Count] | None = None
    pair: tuple[int, bytes] = (0, b"")
    names: tuple[str, ...] = ()
    by_name: dict[str, Count] | None = None
    anything: Any = None
    source: SourceState = field(default_factory=dict)
    sources: SourceStates = field(default_factory=dict)


FIELDS = {  # what passes, and what breaks a rule
    "count": ([0, 2**63 - 1], [-1, 2**63, True, 1.0, None, "1"]),
    "percent": ([0, 100], [101]),
    "flag": ([True], [1, None]),
    "share": ([1.5, 2], ["1", True]),
    "name": (["x", None], [1]),
    "table": ([None, b"1234"], [b"", b"123", "1234"]),
    "lengths": ([None, [], [1, 2]], [[-1], (1,), [None]]),
    "pair": ([(1, b"x")], [(1,), (1, "x"), [1, b"x"]]),
    "names": ([(), ("a", "b")], [("a", 1), "ab"]),
    "by_name": ([{}, {"a": 1}], [{1: 1}, {"a": -1}]),
    "anything": ([None, object(), [1]], []),
    "source": ([{"x": 1}], [[]]),
    "sources": ([{"a": {"x": 1}}], [{"a": None}]),
}


def broken(name, value):
    return check_fields(Declared, {**vars(Declared()), name: value})


@pytest.mark.parametrize("name", FIELDS)
def test_what_is_declared_passes_and_anything_else_breaks_a_rule_of_the_field(name):
    good, bad = FIELDS[name]
    for value in good:
        assert broken(name, value) == {}, value
    for value in bad:
        assert list(broken(name, value)) == [name], value


def test_the_rule_is_a_sentence():
    assert broken("percent", 101) == {"percent": "be an integer in 0..100"}
    assert broken("table", b"123") == {"table": "hold rows of 4 bytes"}
    assert broken("pair", (1,)) == {"pair": "have 2 elements"}
    assert broken("lengths", [True]) == {
        "lengths": "be an integer, each of its elements or be None"
    }


def test_a_type_that_cannot_be_checked_is_an_error_of_the_node():
    @dataclass(kw_only=True)
    class Unknown(NodeState):
        x: set

    with pytest.raises(TypeError, match="cannot declare a field of type"):
        check_fields(Unknown, {"x": set()})


def test_states_of_sources_are_known():
    assert source_fields(Declared) == {"source", "sources"}


def test_every_field_that_is_damaged_is_named():
    state = seal("Node", {}, {**vars(Declared()), "count": -1, "flag": 2})
    with pytest.raises(StateError, match=r"Node is damaged: `count` must .*; `flag` must be True"):
        unseal(state, "Node", Declared, {})


@dataclass(kw_only=True)
class Span(NodeState):
    first: Count
    last: Count

    def validate(self):
        if self.first > self.last:
            raise ValueError("`first` must not be after `last`.")


def test_fields_that_do_not_go_together_are_damage():
    with pytest.raises(StateError, match="Node is damaged: `first` must not be after `last`"):
        unseal(seal("Node", {}, {"first": 2, "last": 1}), "Node", Span, {})


@dataclass(kw_only=True)
class WithSparse(NodeState):
    count: Count
    weights: Annotated[dict[str, float], Sparse()] = field(default_factory=dict)


class Counting(StatefulNode):
    """Counts to 2, and notes a weight where it is told one."""

    STATE = WithSparse

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def begin_epoch(self):
        self.at = 0

    def restore(self, state):
        self.at, self.weights = state.count, state.weights

    def save(self):
        return WithSparse(count=self.at, weights=self.weights)

    def next(self):
        if self.at == 2:
            raise StopIteration
        self.at += 1
        return self.at


def test_a_state_leaves_out_a_sparse_field_that_holds_its_default():
    node, other = Counting({}), Counting({"a": 1.5})
    assert {*node.state_dict()} == {"version", "node", "config", "count"}
    state = other.state_dict()
    assert state["weights"] == {"a": 1.5}
    node.reset(state)
    assert node.weights == {"a": 1.5}
    node.reset({**state, "weights": {}})
    node.reset({key: value for key, value in state.items() if key != "weights"})
    assert node.weights == {}
    node.weights["a"] = 2.0  # is its own, and not the default of all
    assert Counting({}).state_dict().keys() == {"version", "node", "config", "count"}


def test_a_sparse_field_is_checked_where_it_is_there():
    state = Counting({"a": 1.5}).state_dict()
    with pytest.raises(StateError, match="`weights` must be a number, each of its elements"):
        Counting({}).reset({**state, "weights": {"a": "x"}})
    del state["count"]
    with pytest.raises(StateError, match="lacks `count`"):
        Counting({}).reset(state)
