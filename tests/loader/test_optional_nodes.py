"""States of loaders whose graphs differ by a node that an argument adds: the error names it."""

import pytest
from gradients import samples_of

from odb_nodes import Mixing, ODBDataLoader, StateError


def loader_of(**options):
    data = {"a": samples_of(0, 20), "b": samples_of(20, 20)}
    return ODBDataLoader(data, token_budget=60, window=8, **options)


def begun(**options):
    """The state of a loader after its first batch."""
    with loader_of(**options) as loader:
        next(iter(loader))
        return loader.state_dict()


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ({"virtual_ranks": 2}, "`virtual_ranks`"),
        ({"weights": Mixing(weights={"a": 1, "b": 1}, settable=True)}, "`settable` of a `Mixing`"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_of_a_graph_with_another_node_names_the_argument(option, name, strict):
    for saved, loaded in ((option, {}), ({}, option)):
        loader = loader_of(**loaded)
        loader.load_state_dict(begun(**saved), strict=strict)
        with pytest.raises(StateError, match=f"with the {name} that it had when it saved"):
            next(iter(loader))


def test_a_loader_says_how_many_virtual_ranks_it_plans_for():
    assert "4 virtual ranks, epoch 0" in repr(loader_of(virtual_ranks=4))
    assert "virtual" not in repr(loader_of())
