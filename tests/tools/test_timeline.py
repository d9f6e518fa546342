from xml.etree import ElementTree

import numpy as np
import pytest

from odb_nodes import TokenBudget
from odb_nodes.planning import simulate_steps
from odb_nodes.tools.svg import bars
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


def pictures(text, tag):
    root = ElementTree.fromstring(text)
    return root, [one for one in root.iter() if one.tag.endswith(tag)]


def test_the_text_and_the_picture_have_a_cell_for_each_rank_and_step():
    drawn = Timeline(np.array([[8.0, 4.0, 0.0], [8.0, 8.0, 1.0]]), window=1024)
    head, *ranks = str(drawn).splitlines()
    assert ranks == ["    0 █▄ ", "    1 ██▁"]
    assert head == (
        "2 ranks, window 1,024, 3 steps; dearest batch 8 tokens, balance 0.853, 1 filler slot"
    )
    root, cells = pictures(drawn.to_svg(), "rect")
    assert [cell.get("fill-opacity") for cell in cells] == "1.00 0.50 0.00 1.00 1.00 0.12".split()
    assert root.get("role") == "img"
    title, _, words = root.get("aria-label").partition(". ")
    assert title.endswith(": 2 ranks, window 1,024") and words.startswith("3 steps; ")
    assert title in [one.text for one in root]
    drawn = Timeline(np.ones((2, 1_000)), window=8)  # many steps share a column
    head, first, _ = str(drawn).splitlines()
    assert len(first) < 90 and "12.5 steps a column" in head
    assert len(drawn.to_svg()) < 200_000


def test_bars_are_as_high_as_their_counts():
    root, found = pictures(
        bars([1, 4, 0], ["a", "b", "c", "<d>"], axes=("x", "y"), title="T", text="t"), "rect"
    )
    heights = [float(one.get("height")) for one in found]
    assert heights == [40.0, 160.0, 0.0]
    assert [one[0].text for one in found] == ["a to b: 1", "b to c: 4", "c to <d>: 0"]
    assert root.get("aria-label") == "T. t"
