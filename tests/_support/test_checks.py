"""Checks of arguments: what passes, and what the errors say."""

import re
from types import SimpleNamespace

import pytest

from odb_nodes._support.checks import (
    check_bool,
    check_callable,
    check_choice,
    check_integer,
    check_type,
    describe,
)


class Option:
    pass


@pytest.mark.parametrize("value, shown", [("x", "'x'"), (None, "None"), (["fill"], "['fill']")])
def test_a_choice_that_is_not_allowed_is_named_with_those_that_are(value, shown):
    check_choice("uneven", "stop", ("fill", "stop"))
    rule = f'`uneven` must be one of ("fill", "stop"), but is {shown} instead. Use "fill".'
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
        check_choice("uneven", value, ("fill", "stop"), 'Use "fill".')


@pytest.mark.parametrize(
    "expected, rule",
    [
        (Option, "an `Option`"),
        (dict, "a `dict`"),
        (int, "an `int`"),
        (Option | None, "an `Option` or None"),
        (str | bytes | None, "a `str` or a `bytes` or None"),
    ],
)
def test_the_error_names_all_types_that_are_allowed(expected, rule):
    check_type("option", Option(), int | Option)
    check_type("option", None, Option | None)
    with pytest.raises(TypeError, match=f"^`option` must be {rule}, but is 1.5 instead. Use it.$"):
        check_type("option", 1.5, expected, "Use it.")


@pytest.mark.parametrize(
    "value, shown",
    [
        ("skip", "'skip'"),
        (None, "None"),
        (Option, "the class `Option`"),
        (Option(), "an `Option`"),
        (describe, "the function `describe`"),
        (SimpleNamespace(), "a `SimpleNamespace`"),
    ],
)
def test_values_are_described_by_themselves_or_by_their_class(value, shown):
    assert describe(value) == shown
    assert len(describe(list(range(1000)))) == 80  # cut


def test_a_long_value_is_cut_in_every_error():
    value = [*range(1000)]
    for check in (check_integer, check_bool, check_callable):
        with pytest.raises(TypeError, match="^`option` must be .* but is .0, 1") as caught:
            check("option", value)
        assert len(str(caught.value)) < 200
