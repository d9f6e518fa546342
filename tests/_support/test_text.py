"""Counts with nouns, tables, checks of arguments, progress, and warnings."""

import io
import logging
import re
import sys
import time
import warnings
from types import SimpleNamespace

import pytest
from torchdata.nodes import IterableWrapper
from tqdm import std

from odb_nodes import LengthObserver, Loader, WindowBucketer
from odb_nodes._support import progress
from odb_nodes._support.checks import (
    check_bool,
    check_callable,
    check_choice,
    check_integer,
    check_type,
    describe,
)
from odb_nodes._support.progress import Bar, SlowProgress
from odb_nodes._support.text import counted, html_table, named_ranks
from odb_nodes.core.nodes.read_ahead import ReadAhead
from odb_nodes.testing import assert_resumes_exactly
from odb_nodes.tools.lengths import LengthTable
from odb_nodes.tools.profile import profile
from odb_nodes.tools.simulate import simulate

TABLE = LengthTable.of([5, 9, 40, 7] * 20)


def test_ranks_are_named():
    names = [named_ranks(range(first, 4)) for first in (3, 2, 1)]
    assert names == ["rank 3", "ranks 2 and 3", "ranks 1, 2 and 3"]


def test_cells_are_escaped_and_the_first_row_has_the_titles():
    table = html_table([{"a": "<1>", "b": "2"}, {"a": "3", "b": "&"}])
    assert table == (
        "<table><tr><th>a</th><th>b</th></tr><tr><td>&lt;1&gt;</td><td>2</td></tr>"
        "<tr><td>3</td><td>&amp;</td></tr></table>"
    )
    assert html_table([]) == ""


def test_a_notebook_shows_results_as_tables():
    for shown, cells in [
        (profile(TABLE, budget=128, windows=(16,)), ["all samples", "-&gt;", "1% of the best"]),
        (simulate(TABLE, world_size=1, budget=128), ["steps"]),
    ]:
        html = shown._repr_html_()
        assert html.count("<table>") == html.count("</table>") >= 1
        assert all(cell in html for cell in cells)


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 samples"), (1, "1 sample"), (2, "2 samples"), (1200, "1,200 samples")],
)
def test_a_count_has_its_noun_in_the_right_number(number, words):
    assert counted(number, "sample") == words


# --- checks of arguments: what passes, and what the errors say -----------------------------------


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


# --- progress of what takes long ------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


@pytest.mark.parametrize(
    ("first_s", "seconds"),
    [(1.0, [10, 20, 40, 80, 140, 200]), (25.0, [25, 50, 100, 160]), (0.0, [])],
)
def test_progress_lines_come_soon_and_then_each_minute(clock, caplog, first_s, seconds):
    slow = SlowProgress("samples read", 200)
    clock[0] += first_s  # of the first item
    slow.update(1)
    for done in range(2, 202 - int(first_s)):
        clock[0] += first_s > 0
        slow.update(done)
    assert [int(message.split()[-2]) for message in caplog.messages] == seconds
    if first_s == 1:
        assert caplog.messages[1] == "samples read: 20 of 200 after 20 s"
    assert {(record.name, record.levelno) for record in caplog.records} <= {
        ("odb_nodes", logging.WARNING)
    }


@pytest.mark.parametrize(("rank", "lines"), [(0, 3), (1, 0)])
def test_a_bar_without_a_terminal_is_lines_of_rank_0(monkeypatch, caplog, capsys, rank, lines):
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert [*Bar(iter("ab"), "letters", 2)] == ["a", "b"]
    with Bar(None, "trials", None) as bar:
        bar.set_postfix_str("8 x 16 fits", refresh=False)
        bar.update()
    expected = ["letters: 1 of 2 after 0 s", "letters: 2 of 2 after 0 s"]
    assert caplog.messages == [*expected, "trials: 1 after 0 s; 8 x 16 fits"][:lines]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("size", [(-1, 23), (79, -1)])
def test_a_terminal_without_a_size_has_a_bar(monkeypatch, caplog, capsys, size):
    """tqdm takes one off the rows and columns that the terminal tells: of 0, -1 are left."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(std, "_screen_shape_wrapper", lambda: lambda file: size)
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    assert [*Bar(range(3), "numbers", 3, mininterval=0)] == [0, 1, 2]
    shown = capsys.readouterr().err
    assert "3/3" in shown and "█" * 20 in shown
    assert caplog.messages == []


def test_without_stderr_there_are_lines(monkeypatch, caplog):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    for stderr in (closed, None):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert [*Bar(range(3), "numbers", 3)] == [0, 1, 2]
        assert "numbers: 1 of 3 after 0 s" in caplog.messages
        caplog.clear()


# --- where warnings point, and how often one is said ---------------------------------------------


def said_by(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        run()
    return [warning for warning in caught if warning.category is UserWarning]


def narrow_loader():
    lengths = [1 + n * 7919 % 200 for n in range(300)]
    return Loader(WindowBucketer(LengthObserver(IterableWrapper(lengths), int), 600, 8))


def test_a_warning_points_to_the_line_of_the_user_or_of_a_thread():
    (warning,) = said_by(lambda: list(narrow_loader()))
    assert "are padding" in str(warning.message) and warning.filename == __file__
    samples = LengthObserver(IterableWrapper([1, 9, 1]), int)
    (warning,) = said_by(lambda: list(Loader(ReadAhead(WindowBucketer(samples, 5), 2))))
    assert warning.filename.endswith("exclusions.py")


def test_each_cause_is_warned_of_once():
    assert len(said_by(lambda: assert_resumes_exactly(narrow_loader, every=9))) == 1
    assert len(said_by(narrow_loader().__iter__().__next__)) == 0
    assert len(said_by(lambda: list(narrow_loader()))) == 1  # other filters: said anew
