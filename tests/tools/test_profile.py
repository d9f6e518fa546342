import json
import re

import numpy as np
import pytest

from odb_nodes.planning import SimulationOptions
from odb_nodes.tools.baselines import Baselines
from odb_nodes.tools.lengths import LengthTable
from odb_nodes.tools.profile import LengthSummary, profile
from odb_nodes.tools.simulate import TableEpoch, lognormal_lengths

LENGTHS = lognormal_lengths(600, cv=1.0, mean_tokens=90, longest_tokens=700)


def plain(made):
    """The text of a profile, whose tables are not aligned."""
    return re.sub(" +", " ", str(made))


def mixed_table():
    table = LengthTable.of(LENGTHS, seed="0")
    tokens = np.where(np.arange(600) == 17, 0, LENGTHS)
    sources = {"sources": np.arange(600) // 400, "names": ("code & more", "text")}
    return LengthTable(**{**vars(table), **sources, "tokens": tokens, "sizes": (400, 200)})


@pytest.fixture(scope="module")
def made():
    return profile(mixed_table(), budget=1500, world_sizes=(1, 2), windows=(32, 64))


def test_a_summary_by_hand():
    summary = LengthSummary.of("a", np.array([2, 4, 4, 10]), 3)
    assert (summary.samples, summary.skipped, summary.tokens) == (4, 3, 20)
    assert summary.mean_tokens == 5.0
    assert summary.cv == pytest.approx(3.0 / 5)
    assert [summary.percentiles[percent] for percent in (0, 50, 100)] == [2, 4, 10]
    assert sum(summary.counts) == 4 and len(summary.edges) == len(summary.counts) + 1
    assert summary.counts[summary.edges.index(4)] == 2
    assert LengthSummary.of("one", np.array([7, 7]), 0).counts == (2,)


def test_there_is_a_summary_of_all_and_of_each_source(made):
    assert [(one.source, one.samples, one.skipped) for one in made.lengths] == [
        ("all samples", 599, 1),
        ("code & more", 399, 1),
        ("text", 200, 0),
    ]
    assert made.lengths[2].tokens == LENGTHS[400:].sum()
    found = json.loads(made.to_json())
    assert found["lengths"][2]["tokens"] == int(LENGTHS[400:].sum())
    assert found["comparisons"][-1]["figures"]["steps"] == made.comparisons[-1].figures.steps
    assert found["budget"]["tokens"] == 1500


def test_the_comparisons_are_those_of_the_baselines(made):
    assert len(made.comparisons) == 2 * (4 + 2 * 2)
    baselines = Baselines(epoch=TableEpoch(table=mixed_table()))
    for one in made.comparisons[::3]:
        job = SimulationOptions(world_size=one.world_size, budget=1500, window=one.window or 1024)
        assert one.figures == baselines.figures(one.strategy, job)
    assert made.batch_size == 1500 // LENGTHS.max()
    assert made.heading == f"token_budget=1500; fixed batches of {made.batch_size} samples"


def test_an_auto_window_is_shown_in_samples():
    made = profile(mixed_table(), budget=1500, world_sizes=(2,))
    samples = round(32 * 1500 / np.delete(LENGTHS, 17).mean())
    by_name = {one.strategy: one for one in made.comparisons}
    windows = {name: one.window for name, one in by_name.items()}
    assert windows["odb_nodes"] == windows["sorted windows"] == samples
    assert windows["random"] is None and not by_name["random"].is_auto
    assert f"| 2 | odb_nodes | auto ({samples}) |" in plain(made)
    report = TableEpoch(table=mixed_table()).report(SimulationOptions(world_size=2, budget=1500))
    assert by_name["odb_nodes"].figures.steps == report.steps


def test_the_window_to_take_comes_first(made):
    for one in made.best:
        own = [
            other
            for other in made.comparisons
            if (other.world_size, other.strategy) == (one.world_size, "odb_nodes")
        ]
        best = max(other.figures.efficiency for other in own)
        near = [other for other in own if other.figures.efficiency >= 0.99 * best]
        assert one.window == min(other.window for other in near)
    rows = made.rows()
    assert [row[""] for row in rows] == ["->", "->", *[""] * (len(rows) - 2)]
    assert [row["ranks"] for row in rows[:2]] == ["1", "2"]
    shown = sorted(str({**row, "": ""}) for row in rows)
    assert shown == sorted(str({"": ""} | one.as_row()) for one in made.comparisons)


def test_the_page_has_tables_and_figures_and_needs_no_other_file(made):
    text = made.to_html()
    assert not re.search(r"<(script|link|img|iframe)[^>]* (src|href)=|@import", text)
    body = text.partition("<body>")[2]
    assert "code &amp; more" in body and "code & more" not in body
    assert body.count("Plotly.newPlot") == 1 + len(made.lengths) and "-&gt;" in body


def test_figures_have_the_efficiencies_and_the_lengths(made):
    chart, *lengths = made.figures()
    assert [one.name for one in chart.data] == ["1 rank", "2 ranks"]
    efficiencies = [value for one in chart.data for value in one.x]
    assert efficiencies == [one.figures.efficiency for one in made.comparisons]
    marked = [name for one in chart.data for name in one.y if name.endswith("&lt;- take")]
    assert marked[0] == f"1 rank, odb_nodes {made.best[0].window} &lt;- take" and len(marked) == 2
    for figure, summary in zip(lengths, made.lengths, strict=True):
        (bars,) = figure.data
        assert list(bars.y) == list(summary.counts)
        assert bars.x[0] == f"{summary.edges[0]:,} to {summary.edges[1] - 1:,}"


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"windows": ("Auto",)}, ValueError, "`window`"),
        ({"batch_size": 0}, ValueError, "`batch_size`"),
        ({"weights": {"a": 1}}, ValueError, "`weights`"),
        ({"world_sizes": 3}, TypeError, "`world_sizes` must be a `Sequence`"),
        ({"windows": "auto"}, TypeError, "`windows` must be a `Sequence`"),
    ],
)
def test_errors_name_what_is_wrong(change, error, match):
    with pytest.raises(error, match=match):
        profile(mixed_table(), **{"budget": 1500, **change})
