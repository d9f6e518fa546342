"""Checks of arguments: what passes, and what the errors say."""

from types import SimpleNamespace

import pytest

from odb_nodes._core.checks import check_choice, check_type, describe


def test_a_choice_that_is_allowed_passes():
    check_choice("uneven", "join", ("fill", "join", "stop"))


@pytest.mark.parametrize(
    "value, shown", [("x", "'x'"), (None, "None"), (3, "3"), (["fill"], r"\['fill'\]")]
)
def test_a_choice_that_is_not_allowed_is_named_with_those_that_are(value, shown):
    rule = rf'^`uneven` must be one of \("fill", "stop"\), but is {shown} instead\.$'
    with pytest.raises(ValueError, match=rule):
        check_choice("uneven", value, ("fill", "stop"))


def test_the_remedy_ends_the_message():
    with pytest.raises(ValueError, match=r'but is \'x\' instead\. Use "fill"\.$'):
        check_choice("uneven", "x", ("fill",), 'Use "fill".')
    with pytest.raises(TypeError, match=r"but is 3 instead\. Use a string\.$"):
        check_type("path", 3, str, "Use a string.")


class Option:
    pass


@pytest.mark.parametrize("expected", [Option, Option | None, int | Option])
def test_an_instance_passes(expected):
    check_type("option", Option(), expected)


def test_none_passes_where_the_type_says_so():
    check_type("option", None, Option | None)
    with pytest.raises(TypeError, match="`option` must be an `Option`, but is None instead"):
        check_type("option", None, Option)


@pytest.mark.parametrize(
    "expected, rule",
    [
        (Option, "an `Option`"),
        (dict, "a `dict`"),
        (Option | None, "an `Option` or None"),
        (str | bytes | None, "a `str` or a `bytes` or None"),
    ],
)
def test_the_error_names_all_types_that_are_allowed(expected, rule):
    with pytest.raises(TypeError, match=f"^`option` must be {rule}, but is 1.5 instead.$"):
        check_type("option", 1.5, expected)


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


def test_a_long_value_is_cut():
    assert len(describe(list(range(1000)))) == 80
