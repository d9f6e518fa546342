"""Counts with their nouns, and tables of a notebook."""

import pytest

from odb_nodes._core.text import counted, html_table
from odb_nodes.tools.lengths import LengthTable
from odb_nodes.tools.profile import profile
from odb_nodes.tools.simulate import simulate

TABLE = LengthTable.of([5, 9, 40, 7] * 20)


def test_cells_are_escaped_and_the_first_row_has_the_titles():
    table = html_table([{"a": "<1>", "b": "2"}, {"a": "3", "b": "&"}])
    assert table == (
        "<table><tr><th>a</th><th>b</th></tr><tr><td>&lt;1&gt;</td><td>2</td></tr>"
        "<tr><td>3</td><td>&amp;</td></tr></table>"
    )
    assert html_table([]) == ""


def test_what_is_looked_at_is_a_table():
    for made, cells in [
        (TABLE, ["80", "1,220", "15", "40"]),
        (profile(TABLE, budget=128, windows=(16,)), ["all samples", "-&gt;", "1% of the best"]),
        (simulate(TABLE, world_size=1, budget=128), ["steps"]),
    ]:
        html = made._repr_html_()
        assert html.count("<table>") == html.count("</table>") >= 1
        assert all(cell in html for cell in cells)


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 samples"), (1, "1 sample"), (2, "2 samples"), (1200, "1,200 samples")],
)
def test_a_count_has_its_noun_in_the_right_number(number, words):
    assert counted(number, "sample") == words
