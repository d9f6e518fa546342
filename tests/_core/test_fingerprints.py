"""Names of callables: what an object declares of itself."""

from functools import partial

from odb_nodes import PerSource, TokenBudget
from odb_nodes._core.fingerprints import stable_name
from odb_nodes.planning.group_costs import BudgetCost


class Crop:
    def __init__(self, tokens):
        self.tokens = tokens

    @property
    def fingerprint_name(self):
        return f"Crop({self.tokens})"

    def __call__(self, item):
        return item[: self.tokens]


class Plain:
    def __call__(self, item):
        return item


def test_an_object_is_known_by_the_name_that_it_declares():
    assert stable_name(Crop(5)) == "Crop(5)"
    assert stable_name(partial(Crop(5), 3)) == "Crop(5)(3)"


def test_an_object_that_declares_none_is_known_by_its_class():
    assert stable_name(Plain()) == "Plain"


def test_a_class_is_known_by_its_own_name():
    assert stable_name(Crop) == "Crop"


def test_what_dispatches_by_source_has_the_names_of_all_functions():
    assert stable_name(PerSource({"a": Crop(3), "b": Plain()})) == "PerSource(a=Crop(3), b=Plain)"


def test_the_cost_under_a_budget_is_known_by_its_layout():
    assert stable_name(BudgetCost(TokenBudget(64, layout="packed"))) == "packed_tokens"
