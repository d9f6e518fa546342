"""A report has the numbers of the records in every format; its page needs no network."""

import csv
import json
import re
import sys
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from monitors import DATA, loader_of, loss_of, train
from refusals import refuses

from odb_nodes import Ledger, Observation, ODBDataLoader, pop_step_info
from odb_nodes.training.monitor import Monitor, RowLosses, read_run, report
from odb_nodes.training.monitor.figures import Curve, curves
from odb_nodes.training.monitor.records import line_of

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for batches")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of two runs, one with a ledger, and with names that a page has to escape."""
    folder = tmp_path_factory.mktemp("runs")
    first = folder / "a <b>"
    with Monitor(first, every=2) as monitor, Ledger(first / "ledger") as ledger:
        for batch in loader_of(accumulate=1):
            info = pop_step_info(batch)
            by_source = {
                name: (3.0 * count.tokens, count.tokens)
                for name, count in info.local_sources.items()
            }
            options = {"lr": 0.1, "loss_by_source": by_source, "values": {"weight/web": info.step}}
            monitor.step(batch, info, loss=loss_of(info), **options)
            ledger.record(info)
    with Monitor(folder / "other", every=1) as monitor:
        train(monitor, loader_of(), epochs=2)
    return [first, folder / "other"]


def test_csv_and_json_have_the_numbers_of_the_records(tmp_path, runs):
    report(runs, csv=tmp_path / "r.csv", json=tmp_path / "r.json")
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    reported = json.loads((tmp_path / "r.json").read_text())["runs"]
    for folder, report_of_run in zip(runs, reported, strict=True):
        run = read_run(folder)
        assert report_of_run["steps"] == run.steps and report_of_run["epochs"] == run.epochs
        rows_of_run = [row for row in rows if row["run"] == report_of_run["name"]]
        for row, record in zip(rows_of_run, [*run.steps, *run.epochs], strict=True):
            for group in ("mean", "sum", "peak", "last"):
                for name, value in record[group].items():
                    assert row[f"{group}.{name}"] == str(value)


def test_the_summary_of_a_run_is_what_the_record_of_its_epoch_says(runs):
    summary = report(runs[0]).runs[0]
    (epoch,) = read_run(runs[0]).epochs
    for group in ("mean", "sum", "peak", "last", "weight"):
        assert summary.whole[group] == pytest.approx(epoch[group])
    assert summary.sources()["web"]["loss"] == pytest.approx(3.0)


def test_a_mean_of_the_run_is_weighted_by_loss_weight(tmp_path):
    """Here by samples, and where only a part of the steps tells a loss, by theirs."""
    infos = []
    with Monitor(tmp_path, every=2) as monitor:
        for number, batch in enumerate(monitor.watch(loader_of(accumulate=1))):
            infos.append(pop_step_info(batch))
            loss = float(number) if number % 3 else None
            monitor.step(batch, infos[-1], loss=loss, loss_weight=infos[-1].local_samples)
    counted = [(number, info.local_samples) for number, info in enumerate(infos) if number % 3]
    expected = sum(a * b for a, b in counted) / sum(b for _, b in counted)
    assert read_run(tmp_path).epochs[0]["mean"]["loss"] == pytest.approx(expected)
    assert report(tmp_path).runs[0].whole["mean"]["loss"] == pytest.approx(expected)


def test_the_text_and_a_notebook_have_a_column_for_each_run_and_the_audit(runs):
    text_report = report(runs)
    share = text_report.runs[0].whole["mean"]["padding_share"]
    assert re.search(r"\| samples +\| +100 \| +200 \|\n", str(text_report))
    assert re.search(rf"\| padding share +\| +{100 * share:.1f} % \|", str(text_report))
    assert "token_budget" in str(text_report) and "Sources and tasks of a <b>" in str(text_report)
    assert ": OK" in str(text_report) and "epoch 0: complete" in str(text_report)
    html = text_report._repr_html_()
    assert html.count("<table>") == 4  # figures, settings, sources of two runs
    assert "<th>a &lt;b&gt;</th>" in html and "a <b>" not in html


def test_a_page_has_all_tables_and_figures_and_needs_no_network(tmp_path, runs):
    page_report = report(runs, html=tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]* (src|href)=|@import", text)
    assert text.count("plotly.js v") == 1 and "width=device-width" in text
    body = text.partition("<body>")[2]
    assert "<b>" not in body and "a &lt;b&gt;" in body
    for table in ("padding share", "token_budget", "Sources and tasks of other", ": complete"):
        assert table in body
    drawn = [figure.layout.title.text for figure in page_report.figures()]
    assert re.findall("<h3>(.*?)</h3>", body) == drawn and len(drawn) >= 9
    assert body.count("Plotly.newPlot") == body.count('["sendChartToCloud"]') == len(drawn)


def test_figures_have_a_series_for_each_run_with_the_values_of_the_records(runs):
    figures = {figure.layout.title.text: figure for figure in report(runs).figures()}
    loss = figures["Loss, nats per supervised token"]
    assert [curve.name for curve in loss.data] == ["a &lt;b&gt;", "other"]  # the legend reads HTML
    for folder, drawn in zip(runs, loss.data, strict=True):
        steps = read_run(folder).steps
        assert list(drawn.x) == [record["step"] for record in steps]
        assert list(drawn.y) == [record["mean"]["loss"] for record in steps]
    tokens = [record["sum"]["tokens"] for record in read_run(runs[1]).steps]
    over_tokens = figures["Loss over real tokens, nats per supervised token"].data[1]
    assert list(over_tokens.x) == [sum(tokens[: n + 1]) for n in range(len(tokens))]
    by_source = figures["Loss by source or task, nats per supervised token"]
    assert [curve.name for curve in by_source.data] == ["a &lt;b&gt;: code", "a &lt;b&gt;: web"]
    assert figures["weight"].data[0].name == "a &lt;b&gt;: web"
    shapes = report(runs).runs[1].shapes()
    dots = figures["Shapes of the batches of rank 0"].data[1]
    assert [*zip(dots.x, dots.y, strict=True)] == [*shapes]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_a_long_curve_is_drawn_with_its_extremes_in_its_order(values):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("odb_nodes.training.monitor.figures._MOST_POINTS", 40)
        (drawn,) = curves("", "", [Curve("", list(enumerate(values)))]).data
    kept = [*zip(drawn.x, drawn.y, strict=True)]
    assert len(kept) <= 40 and kept == sorted(kept)
    assert all(values[x] == y for x, y in kept)
    assert (min(drawn.y), max(drawn.y)) == (min(values), max(values))


def test_changed_settings_are_reported_by_attempt(tmp_path, runs):
    """A run of 4 ranks goes on with 2 after step 3, in the third attempt."""
    first, *records = (runs[1] / "monitor.jsonl").read_text().splitlines()
    attempt = json.loads(first) | {"world_size": 4, "config": {"lr": 0.1}}
    del attempt["crc"]
    other = attempt | {"world_size": 9, "step": 5, "resumed_at": 5}
    last = attempt | {"world_size": 2, "step": 3, "resumed_at": 3, "config": {"lr": 0.2}}
    attempt_lines = [line_of(record).rstrip() for record in (attempt, other, last)]
    lines = [
        attempt_lines[0],
        *records[:5],
        attempt_lines[1],
        records[5],
        attempt_lines[2],
        *records[3:],
    ]
    (tmp_path / "monitor.jsonl").write_text("\n".join(lines) + "\n")
    run_report = report(tmp_path)
    (summary,) = run_report.runs
    assert summary.facts()["ranks"] == "4, then 2 from step 4"
    assert summary.facts()["rank balance in time"] == pytest.approx(1.0)
    assert summary.facts()["resumed after step"] == "3"
    assert summary.facts()["optimizer steps without a record"] is None
    gap = [line for line in lines if json.loads(line).get("first_step") != 2]
    (tmp_path / "monitor.jsonl").write_text("\n".join(gap) + "\n")
    (summary,) = report(tmp_path).runs
    assert summary.facts()["optimizer steps without a record"] == 1
    assert summary.settings()["lr (config)"] == "0.1, then 0.2 from step 4"
    assert summary.settings()["token_budget"] == "96"
    drawn = {figure.layout.title.text: figure for figure in run_report.figures()}
    assert "Balance of the ranks, %" in drawn  # of the part with several
    assert [line.x0 for line in drawn["Learning rate"].layout.shapes] == [3]


def test_a_ledger_beside_several_runs_belongs_to_none(tmp_path):
    def audits(*names):
        return [report(tmp_path / name).runs[0].audit for name in names]

    loader = loader_of()
    with Monitor(tmp_path / "one") as monitor, Ledger(tmp_path / "ledger") as ledger:
        for batch in monitor.watch(loader):
            info = pop_step_info(batch)
            monitor.step(batch, info)
            ledger.record(info)
    assert audits("one") != [None]
    with Monitor(tmp_path / "two") as monitor:
        train(monitor, loader_of(), steps=2)
    assert audits("one", "two") == [None, None]


test_a_folder_without_records_is_an_error = refuses(
    [
        ("nowhere", FileNotFoundError, r"monitor.jsonl"),
        ([], ValueError, "at least 1 run"),
        ([3], TypeError, "`folders`"),
    ],
    lambda folders: report(folders),
)


def test_only_the_page_needs_plotly(tmp_path, runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    print(report(runs, csv=tmp_path / "r.csv"))
    with pytest.raises(ImportError, match=r"pip install 'odb-nodes\[report\]'"):
        report(runs, html=tmp_path / "r.html")


# --- tasks are shown as sources are ---------------------------------------------------------------


LOSSES = {"long": 3.0, "short": 1.0, "web": 2.0}


def task_of(sample):
    length = len(sample["input_ids"])
    return "long" if length > 20 else "short" if length > 10 else "web"


def observe(sample):
    """Short samples have the task "web", which is a source as well, of samples of all tasks."""
    return Observation(len(sample["input_ids"]), task=task_of(sample))


def losses_of(info, batch):
    targets = batch["attention_mask"].sum(1) - 1
    return RowLosses(targets * torch.tensor([LOSSES[task] for task in info.row_tasks]), targets)


def by_task(info, losses):
    sums = {}
    for task, total, targets in zip(info.row_tasks, *losses, strict=True):
        sum_before = sums.get(task, (0.0, 0))
        sums[task] = sum_before[0] + total, sum_before[1] + int(targets)
    return sums


@pytest.fixture(scope="module", params=["by task", "by row"])
def run(request, tmp_path_factory):
    """A run of two steps a record, and how its losses were told."""
    folder = tmp_path_factory.mktemp("run")
    loader = ODBDataLoader(DATA, token_budget=96, window=12, observe=observe)
    with Monitor(folder, every=2) as monitor:
        for number, batch in enumerate(monitor.watch(loader)):
            info = pop_step_info(batch)
            losses = losses_of(info, batch)
            how = {"loss_by_source": by_task(info, losses)}
            if request.param == "by row":
                how = {"row_losses": losses}
            monitor.step(batch, info, lr=0.5, values={"weight/long": float(number)}, **how)
    return folder


def test_a_task_has_its_samples_tokens_and_loss_in_records_and_reports(run):
    samples, tokens = Counter(), Counter()
    for row in (row for rows in DATA.values() for row in rows):
        samples[task_of(row)] += 1
        tokens[task_of(row)] += len(row["input_ids"])
    (epoch,) = read_run(run).epochs
    for counts, kind in ((samples, "samples"), (tokens, "tokens")):
        counted = {
            name: value for name, value in epoch["sum"].items() if name.startswith(f"{kind}/")
        }
        assert counted == {f"{kind}/{name}": count for name, count in counts.items()}
    for name, loss in LOSSES.items():
        assert epoch["mean"][f"loss/{name}"] == pytest.approx(loss)
        assert epoch["sum"][f"targets/{name}"] == tokens[name] - samples[name]
    assert "loss/code" not in epoch["mean"]
    for record in read_run(run).steps:
        assert record["last"]["weight/long"] == record["step"] - 1
    run_report = report(run)
    sources = run_report.runs[0].sources()
    assert {*sources} == {*LOSSES} and sources["long"]["loss"] == pytest.approx(3.0)
    assert sum(source["share of tokens"] for source in sources.values()) == pytest.approx(1.0)
    (line,) = [line for line in str(run_report).splitlines() if line.startswith("| long ")]
    assert line.split()[3] == str(sources["long"]["samples"])
    drawn = {
        figure.layout.title.text: [curve.name for curve in figure.data]
        for figure in run_report.figures()
    }
    assert drawn["Loss by source or task, nats per supervised token"] == ["long", "short", "web"]
    assert drawn["weight"] == ["long"]


def test_a_task_without_a_sample_in_an_epoch_is_counted_and_warned_of(tmp_path):
    tasks = ["long", "short", "web", "none"]
    loader = ODBDataLoader(DATA, token_budget=96, window=12, observe=observe, tasks=tasks)
    with pytest.warns(UserWarning) as caught, Monitor(tmp_path, every=2) as monitor:
        for _ in range(2):
            for batch in monitor.watch(loader):
                monitor.step(batch, pop_step_info(batch))
    assert sum("'none' had no sample in epoch 0" in str(warning.message) for warning in caught) == 1
    assert not any("'web' had no sample" in str(warning.message) for warning in caught)
    for epoch in read_run(tmp_path).epochs:
        assert epoch["sum"]["samples/none"] == 0 < epoch["sum"]["samples/web"]
