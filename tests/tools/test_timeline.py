import numpy as np
import pytest

from odb_nodes import TokenBudget
from odb_nodes.planning import simulate_steps
from odb_nodes.tools.timeline import Timeline


def test_the_costs_are_those_of_the_groups():
    budget = TokenBudget(20, attention_tokens=10)
    steps = [*simulate_steps([8, 3, 8], world_size=2, budget=budget)]
    drawn = Timeline.of(steps, budget, window=8)
    assert drawn.costs.T.tolist() == [
        [budget.cost([sample.tokens for sample in group]) if group else 0 for group in step]
        for step in steps
    ]
    assert drawn.balance == drawn.costs.sum() / 2 / drawn.costs.max(axis=0).sum()
    with pytest.raises(ValueError, match="no step"):
        Timeline.of([], budget, window=8)


def test_the_text_and_the_figure_have_a_cell_for_each_rank_and_step():
    drawn = Timeline(np.array([[8.0, 4.0, 0.0], [8.0, 8.0, 1.0]]), window=1024)
    head, *ranks = str(drawn).splitlines()
    assert ranks == ["    0 █▄ ", "    1 ██▁"]
    assert head == (
        "2 ranks, window 1,024, 3 steps; dearest batch 8 tokens, balance 0.853, 1 filler slot"
    )
    (cells,) = drawn.figure().data
    assert [*map(list, cells.z)] == [[1.0, 0.5, 0.0], [1.0, 1.0, 0.125]]
    assert drawn.figure().layout.title.text.endswith(": 2 ranks, window 1,024")
    drawn = Timeline(np.ones((2, 1_000)), window=8)  # many steps share a column
    head, first, _ = str(drawn).splitlines()
    assert len(first) < 90 and "12.5 steps a column" in head
    assert drawn.figure().data[0].z.shape == (2, 240)
    assert drawn.to_html().count("Plotly.newPlot") == 1
