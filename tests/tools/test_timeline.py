import numpy as np

from odb_nodes.tools.timeline import timeline_page, timeline_text


def test_the_text_and_the_page_have_a_cell_for_each_rank_and_step():
    costs = np.array([[8.0, 4.0, 0.0], [8.0, 8.0, 1.0]]).T
    assert timeline_text(costs, "2 ranks, window 8").splitlines() == [
        "2 ranks, window 8, 3 steps; highest cost 8, balance 0.853, 1 filler slot",
        "    0 █▄ ",
        "    1 ██▁",
    ]
    page = timeline_page(costs, "2 ranks")
    assert page.count("Plotly.newPlot") == 1 and "step by step: 2 ranks</h3>" in page
    head, first, _ = timeline_text(np.ones((1_000, 2)), "").splitlines()  # steps share a column
    assert len(first) < 90 and "12.5 steps a column" in head
