import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refuses

from odb_nodes import TokenBudget
from odb_nodes.core.planning import SimulationOptions
from odb_nodes.core.sources import Mixing
from odb_nodes.tools.baselines import _SAMPLERS, STRATEGIES, Baselines, fixed_batches
from odb_nodes.tools.lengths import LengthTable
from odb_nodes.tools.profile import LengthSummary, profile
from odb_nodes.tools.simulate import TableEpoch, lognormal_lengths, simulate

LENGTHS = lognormal_lengths(600, cv=1.0, mean_tokens=90, longest_tokens=700)


def plain(table_profile):
    """The text of a profile, whose tables are not aligned."""
    return re.sub(" +", " ", str(table_profile))


def mixed_table():
    table = LengthTable.of(LENGTHS, seed="0")
    tokens = np.where(np.arange(600) == 17, 0, LENGTHS)
    sources = {"sources": np.arange(600) // 400, "names": ("code & more", "text")}
    return LengthTable(**{**vars(table), **sources, "tokens": tokens, "sizes": (400, 200)})


@pytest.fixture(scope="module")
def table_profile():
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


def test_there_is_a_summary_of_all_and_of_each_source(table_profile):
    assert [
        (summary.source, summary.samples, summary.skipped) for summary in table_profile.lengths
    ] == [
        ("all samples", 599, 1),
        ("code & more", 399, 1),
        ("text", 200, 0),
    ]
    assert table_profile.lengths[2].tokens == LENGTHS[400:].sum()
    data = json.loads(table_profile.to_json())
    assert data["lengths"][2]["tokens"] == int(LENGTHS[400:].sum())
    assert (
        data["comparisons"][-1]["figures"]["steps"] == table_profile.comparisons[-1].figures.steps
    )
    assert data["budget"]["tokens"] == 1500


def test_fixed_batches_of_one_sample_are_told_of_and_no_title_is_wider_than_its_figure(
    table_profile,
):
    text = profile(mixed_table(), budget=1500, batch_size=1).heading
    assert text.endswith("1 sample: no padding, but each sample takes a step")
    figures = table_profile.figures()
    assert all(len(figure.layout.xaxis.title.text) < 30 for figure in figures)


def test_the_comparisons_are_those_of_the_baselines(table_profile):
    assert len(table_profile.comparisons) == 2 * (4 + 2 * 2)
    baselines = Baselines(epoch=TableEpoch(table=mixed_table()))
    for comparison in table_profile.comparisons[::3]:
        job = SimulationOptions(
            world_size=comparison.world_size, budget=1500, window=comparison.window or 1024
        )
        assert comparison.figures == baselines.figures(comparison.strategy, job)
    assert table_profile.batch_size == 1500 // LENGTHS.max()
    assert (
        table_profile.heading
        == f"token_budget=1500; fixed batches of {table_profile.batch_size} samples"
    )


def test_an_auto_window_is_shown_in_samples():
    table_profile = profile(mixed_table(), budget=1500, world_sizes=(2,))
    samples = round(32 * 1500 / np.delete(LENGTHS, 17).mean())
    by_name = {comparison.strategy: comparison for comparison in table_profile.comparisons}
    windows = {name: comparison.window for name, comparison in by_name.items()}
    assert windows["odb_nodes"] == windows["sorted windows"] == samples
    assert windows["random"] is None and not by_name["random"].is_auto
    assert f"| 2 | odb_nodes | auto ({samples}) |" in plain(table_profile)
    report = TableEpoch(table=mixed_table()).report(SimulationOptions(world_size=2, budget=1500))
    assert by_name["odb_nodes"].figures.steps == report.steps


def test_the_window_to_take_comes_first(table_profile):
    for best_choice in table_profile.best:
        choices = [
            other
            for other in table_profile.comparisons
            if (other.world_size, other.strategy) == (best_choice.world_size, "odb_nodes")
        ]
        best = max(other.figures.efficiency for other in choices)
        near = [other for other in choices if other.figures.efficiency >= 0.99 * best]
        assert best_choice.window == min(other.window for other in near)
    rows = table_profile.rows()
    assert [row[""] for row in rows] == ["->", "->", *[""] * (len(rows) - 2)]
    assert [row["ranks"] for row in rows[:2]] == ["1", "2"]
    shown = sorted(str({**row, "": ""}) for row in rows)
    assert shown == sorted(
        str({"": ""} | comparison.as_row()) for comparison in table_profile.comparisons
    )


def test_the_page_has_tables_and_figures_and_needs_no_other_file(table_profile):
    text = table_profile.to_html()
    assert not re.search(r"<(script|link|img|iframe)[^>]* (src|href)=|@import", text)
    body = text.partition("<body>")[2]
    assert "code &amp; more" in body and "code & more" not in body
    assert body.count("Plotly.newPlot") == 1 + len(table_profile.lengths) and "-&gt;" in body
    assert "Efficiency: real tokens / (ranks x sum over" in body


def test_figures_have_the_efficiencies_and_the_lengths(table_profile):
    chart, *lengths = table_profile.figures()
    assert [bars.name for bars in chart.data] == ["1 rank", "2 ranks"]
    efficiencies = [value for bars in chart.data for value in bars.x]
    assert efficiencies == [
        comparison.figures.efficiency for comparison in table_profile.comparisons
    ]
    marked = [name for bars in chart.data for name in bars.y if name.endswith("&lt;- take")]
    assert (
        marked[0] == f"1 rank, odb_nodes {table_profile.best[0].window} &lt;- take"
        and len(marked) == 2
    )
    for figure, summary in zip(lengths, table_profile.lengths, strict=True):
        (bars,) = figure.data
        assert list(bars.y) == list(summary.counts)
        assert bars.x[0] == f"{summary.edges[0]:,} to {summary.edges[1] - 1:,}"


test_errors_name_what_is_wrong = refuses(
    [
        ({"windows": ("Auto",)}, ValueError, "`window`"),
        ({"batch_size": 0}, ValueError, "`batch_size`"),
        ({"weights": {"a": 1}}, ValueError, "`weights`"),
        ({"world_sizes": 3}, TypeError, "`world_sizes` must be a `Sequence`"),
        ({"windows": "auto"}, TypeError, "`windows` must be a `Sequence`"),
    ],
    lambda change: profile(mixed_table(), **{"budget": 1500, **change}),
)


# --- baselines by hand, and against the samplers of transformers and Accelerate themselves --------


def figures(strategy, lengths, batch_size=None, **options):
    epoch = TableEpoch(table=LengthTable.of(lengths))
    return Baselines(epoch=epoch, batch_size=batch_size).figures(
        strategy, SimulationOptions(**options)
    )


def figures_by_hand(batches, lengths, world_size, budget):
    """The figures of batches of rank 0, 1, ..., 0, 1, ...; each batch has indices of samples."""
    padded = [max(lengths[i] for i in batch) * len(batch) for batch in batches]
    steps = [padded[start : start + world_size] for start in range(0, len(padded), world_size)]
    real = sum(lengths[i] for batch in batches for i in batch)
    return pytest.approx(
        {
            "steps": len(steps),
            "rows": sum(map(len, batches)),
            "padding_share": 1 - real / sum(padded),
            "fill": np.mean(padded) / budget,
            "largest_tokens": max(padded),
            "efficiency": real / (world_size * sum(map(max, steps))),
        }
    )


MEASURED = ("steps", "rows", "padding_share", "fill", "largest_tokens", "efficiency")


def measured(*args, **options):
    """The figures that `figures_by_hand` returns, of a strategy."""
    report = figures(*args, **options)
    return {name: getattr(report, name) for name in MEASURED}


@pytest.mark.parametrize(
    ("samples", "world_size", "accumulate"), [(420, 2, 3), (5, 4, 3), (5, 1, 1), (397, 1, 1)]
)
def test_fixed_batches_are_those_of_the_trainer(samples, world_size, accumulate):
    """Fixed batches equal the batches of the samplers, as Accelerate deals them to the ranks."""
    utils = pytest.importorskip("transformers.trainer_pt_utils")
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    lengths = lognormal_lengths(samples, cv=1.2, mean_tokens=90, longest_tokens=700).tolist()
    job = {"world_size": world_size, "accumulate": accumulate, "seed": 7, "budget": 2800}
    grouped, rebalanced = [], []
    for rank in range(world_size):
        sampler = utils.LengthGroupedSampler(
            4 * accumulate, lengths=lengths, generator=torch.Generator().manual_seed(7)
        )
        batches = BatchSampler(sampler, 4, drop_last=False)
        if world_size > 1:
            batches = BatchSamplerShard(batches, world_size, rank)
        grouped.append([*batches])
        rebalanced.append(
            utils.BatchRebalanceSampler(
                lengths, 4 * world_size * accumulate, world_size, accumulate, seed=7, rank=rank,
                drop_last=False,  # as the Trainer does by default
            )
        )  # fmt: skip
    for strategy, ranks in (("group_by_length", grouped), ("batch_rebalance", rebalanced)):
        steps = [[*step] for step in zip(*ranks, strict=True)]
        rank_batches = fixed_batches(strategy, lengths, 4, SimulationOptions(**job))
        assert [[*step] for step in rank_batches] == steps, strategy
        batches = [batch for step in steps for batch in step]
        expected = figures_by_hand(batches, lengths, world_size, 2800)
        assert measured(strategy, lengths, 4, **job) == expected, strategy


def test_strategies_of_the_trainer_need_transformers(monkeypatch):
    monkeypatch.setattr("odb_nodes._compat.transformers.sampler_class", lambda name: None)
    with pytest.raises(ImportError, match="BatchRebalanceSampler of transformers"):
        figures("batch_rebalance", [3], world_size=1, budget=20)
    table_profile = profile(LengthTable.of([3, 4]), budget=20)
    assert {comparison.strategy for comparison in table_profile.comparisons} == {*STRATEGIES} - {
        *_SAMPLERS
    }


def test_random_batches_by_hand():
    order = torch.randperm(7, generator=torch.Generator().manual_seed(3)).tolist()
    lengths = [5, 3, 8, 1, 9, 2, 7]
    batches = [order[0:2], order[2:4], order[4:6], [order[6], order[0]]]
    expected = figures_by_hand(batches, lengths, 2, 20)
    assert measured("random", lengths, 2, world_size=2, budget=20, seed=3) == expected
    alone = figures_by_hand([*batches[:3], order[6:]], lengths, 1, 20)
    assert measured("random", lengths, 2, world_size=1, budget=20, seed=3) == alone


def test_a_fixed_batch_has_room_for_the_longest_samples_that_are_not_dropped():
    assert figures("random", [10, 3, 4, 5], world_size=1, budget=25).largest_tokens <= 20
    assert figures("random", [30, 3, 4, 5], world_size=1, budget=25).steps == 4
    baselines = Baselines(epoch=TableEpoch(table=LengthTable.of([30, 200, 50])))
    assert baselines.fixed_size(TokenBudget(100, oversize="drop")) == 2
    assert baselines.fixed_size(TokenBudget(100)) == 1


def test_offline_batches_are_cut_from_all_samples_and_sorted_windows_start_over():
    lengths = [10, 2, 9, 3, 8, 2]
    # Longest first, under 20 padded tokens: 10 9 | 8 3 | 2 2.
    expected = figures_by_hand([[0, 2], [4, 3], [1, 5]], lengths, 1, 20)
    assert measured("offline", lengths, world_size=1, budget=20) == expected
    two = figures("offline", lengths, world_size=2, budget=20)
    assert (two.steps, two.efficiency) == (2, pytest.approx(34 / (2 * (20 + 4))))
    assert two.fill == pytest.approx((20 + 16 + 4) / 3 / 20)
    packed = TokenBudget(17, layout="packed")
    assert figures("offline", lengths, world_size=1, budget=packed).padding_share == 0
    # In the order of the data: 10 2 | 9 3 | 8 2, each longest first.
    epoch = TableEpoch(table=LengthTable.of(lengths), shuffle=False)
    job = SimulationOptions(world_size=1, budget=20, window=2)
    report = Baselines(epoch=epoch).figures("sorted windows", job)
    assert (report.steps, report.padding_share) == (3, pytest.approx(1 - 34 / (20 + 18 + 16)))


def test_skipped_and_dropped_samples_are_left_out():
    table = LengthTable.of([5, 30, 4, 3])
    table = LengthTable(**{**vars(table), "tokens": np.array([5, 30, 0, 3])})
    job = SimulationOptions(world_size=1, budget=TokenBudget(20, oversize="drop"))
    rows = {
        name: Baselines(epoch=TableEpoch(table=table)).figures(name, job).rows
        for name in STRATEGIES
    }
    assert rows == dict.fromkeys(STRATEGIES, 2)
    with pytest.raises(ValueError, match="`strategy` must be one of"):
        figures("best", [3], world_size=1, budget=20)


@pytest.mark.parametrize(
    ("stop", "weights"),
    [
        ("first_exhausted", {"short": 1, "long": 3}),
        ("all_exhausted", None),
        ("cycle", {"short": 1, "long": 3}),
    ],
)
def test_all_ways_are_compared_on_the_samples_that_a_mixture_draws(stop, weights):
    table = two_sources()
    epoch = TableEpoch(table=table, weights=Mixing(weights=weights, stop=stop))
    job = SimulationOptions(world_size=1, budget=300, window=32)
    lengths = sorted(table.tokens[epoch.order(job)[1][0]].tolist())
    assert (len(lengths) == len(table)) == (stop == "all_exhausted")
    for strategy in STRATEGIES:
        batches = Baselines(epoch=epoch).batches(strategy, job)
        counts = batches.samples.sum(), batches.real.sum()
        assert counts == (len(lengths), sum(lengths)), strategy


def two_sources():
    """Lengths of 60 short samples, and of 20 long ones."""
    short = lognormal_lengths(60, cv=0.5, mean_tokens=20)
    long = lognormal_lengths(20, cv=0.5, mean_tokens=150, longest_tokens=300)
    sources = np.repeat([0, 1], [60, 20])
    table = LengthTable.of(np.concatenate((short, long)))
    keys = np.concatenate((np.arange(60), np.arange(20)))
    return replace(table, sources=sources, keys=keys, names=("short", "long"), sizes=(60, 20))


def test_a_notebook_shows_results_as_tables():
    table = LengthTable.of([5, 9, 40, 7] * 20)
    for shown, cells in [
        (profile(table, budget=128, windows=(16,)), ["all samples", "-&gt;", "1% of the best"]),
        (simulate(table, world_size=1, budget=128), ["steps"]),
    ]:
        html = shown._repr_html_()
        assert html.count("<table>") == html.count("</table>") >= 1
        assert all(cell in html for cell in cells)
