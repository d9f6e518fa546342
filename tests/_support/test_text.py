"""Counts with nouns, names of ranks, and tables."""

import pytest

from odb_nodes._support.text import counted, html_table, named_ranks


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


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 samples"), (1, "1 sample"), (2, "2 samples"), (1200, "1,200 samples")],
)
def test_a_count_has_its_noun_in_the_right_number(number, words):
    assert counted(number, "sample") == words
