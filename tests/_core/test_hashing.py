"""Hashes of integers, and names of callables: what an object declares of itself."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes import PerSource, TokenBudget
from odb_nodes._core.hashing import hash_ints, hash_rows, stable_name
from odb_nodes.planning.group_costs import BudgetCost

INTS = st.integers(-(2**70), 2**70)
COLUMNS = st.integers(1, 40).flatmap(
    lambda rows: st.lists(st.lists(INTS, min_size=rows, max_size=rows), min_size=1, max_size=4)
)


def test_golden_hashes():
    golden = [0, 16294208416658607535, 875356130342922583]
    assert [hash_ints(), hash_ints(0), hash_ints(1, -2, 2**63)] == golden
    with pytest.raises(TypeError):
        hash_rows([1, 2.5])


@given(COLUMNS)
def test_rows_hash_as_their_integers(columns):
    found = hash_rows(*columns)
    assert found == [hash_ints(*row) for row in zip(*columns, strict=True)]
    assert {*map(type, found)} == {int}


class Crop:
    def __init__(self, tokens):
        self.fingerprint_name = f"Crop({tokens})"

    def __call__(self, item):
        return item


class Plain:
    __call__ = Crop.__call__


@pytest.mark.parametrize(
    ("named", "name"),
    [
        (Crop(5), "Crop(5)"),
        (partial(Crop(5), 3), "Crop(5)(3)"),
        (Plain(), "Plain"),
        (Crop, "Crop"),
        (PerSource({"a": Crop(3), "b": Plain()}), "PerSource(a=Crop(3), b=Plain)"),
        (BudgetCost(TokenBudget(64, layout="packed")), "packed_tokens"),
    ],
)
def test_an_object_is_known_by_the_name_that_it_declares_or_its_class(named, name):
    assert stable_name(named) == name
