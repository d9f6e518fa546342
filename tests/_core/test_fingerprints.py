"""Names of callables: what an object declares of itself."""

from functools import partial

import pytest

from odb_nodes import PerSource, TokenBudget
from odb_nodes._core.hashing import stable_name
from odb_nodes.planning.group_costs import BudgetCost


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
