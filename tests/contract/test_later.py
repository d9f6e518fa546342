"""Values of a state that are made later."""

import copy
import pickle

import pytest

from odb_nodes import ShardedSampler, WindowBucketer
from odb_nodes.contract import copy_state
from odb_nodes.contract.later import Later, keeps_states


def test_a_value_is_made_once_when_it_is_asked_for_and_again_after_an_error():
    attempts = iter([0, 1])
    later = Later(lambda: 1 // next(attempts))
    with pytest.raises(ZeroDivisionError):
        later.value()
    assert later.value() == later.value() == 1


@pytest.mark.parametrize(
    "copied", [copy_state, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))]
)
def test_a_copy_holds_the_value_itself(copied):
    value = [b"rows", {"n": 3}]
    state = {"source": {"pool": Later(lambda: value)}, "parts": [Later(lambda: None)]}
    found = copied(state)
    assert found == {"source": {"pool": value}, "parts": [None]}
    assert found["source"]["pool"] is not value
    assert found["source"]["pool"][1] is not value[1]


class Mixin:
    def state_dict(self):
        return {"mine": super().state_dict()}


class Mixed(Mixin, WindowBucketer):
    pass


class Saves(WindowBucketer):
    def save(self):
        return super().save()


class SavesBoth(Saves):
    def save_to_keep(self):
        return super().save_to_keep()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (WindowBucketer, True),
        (ShardedSampler, False),
        (Mixed, False),
        (Saves, False),
        (SavesBoth, True),
    ],
)
def test_what_a_class_defines_anew_is_what_its_kept_states_say(kind, expected):
    assert keeps_states(kind) is expected
