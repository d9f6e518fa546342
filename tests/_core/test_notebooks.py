"""Tables of a notebook."""

import pytest

from odb_nodes._core.notebooks import html_table
from odb_nodes.tools.length_table import LengthTable
from odb_nodes.tools.profile import profile
from odb_nodes.tools.simulate import simulate
from odb_nodes.tools.tune import tune

TABLE = LengthTable.of([5, 9, 40, 7] * 20)


def test_cells_are_escaped_and_the_first_row_has_the_titles():
    table = html_table([{"a": "<1>", "b": "2"}, {"a": "3", "b": "&"}])
    assert table == (
        "<table><tr><th>a</th><th>b</th></tr><tr><td>&lt;1&gt;</td><td>2</td></tr>"
        "<tr><td>3</td><td>&amp;</td></tr></table>"
    )
    assert html_table([]) == ""


@pytest.mark.parametrize(
    ("make", "cells"),
    [
        (lambda: TABLE, ["80", "1,220", "15", "40"]),
        (
            lambda: profile(TABLE, budget=128, windows=(16,)),
            ["all samples", "-&gt;", "1% of the best"],
        ),
        (lambda: simulate(TABLE, world_size=1, budget=128), ["steps"]),
        pytest.param(
            lambda: tune(TABLE, world_size=1, limit=128), ["-&gt;"], marks=pytest.mark.slow
        ),
    ],
    ids=["lengths", "profile", "simulation", "tuning"],
)
def test_what_is_looked_at_is_a_table(make, cells):
    html = make()._repr_html_()
    assert html.count("<table>") == html.count("</table>") >= 1
    assert all(cell in html for cell in cells)
