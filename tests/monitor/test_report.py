"""A report has the numbers of the records, in every form, and its page needs nothing else."""

import csv
import json
import re
import shutil
import sys
import xml.etree.ElementTree as xml

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from monitors import loader_of, loss_of, train

from odb_nodes import Ledger, pop_step_info
from odb_nodes.cli import main
from odb_nodes.monitor import Monitor, read_run, report

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for batches")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of two runs, one with a ledger, and with names that a page has to escape."""
    folder = tmp_path_factory.mktemp("runs")
    with (
        Monitor(folder / "a <b>", every=2) as monitor,
        Ledger(folder / "a <b>" / "ledger") as ledger,
    ):
        for batch in loader_of(accumulate=1):
            info = pop_step_info(batch)
            by_source = {
                name: (3.0 * one.tokens, one.tokens) for name, one in info.local_sources.items()
            }
            monitor.step(batch, info, loss=loss_of(info), lr=0.1, loss_by_source=by_source)
            ledger.record(info)
    with Monitor(folder / "other", every=1) as monitor:
        train(monitor, loader_of(), epochs=2)
    return [folder / "a <b>", folder / "other"]


def strings(values):
    return {name: "" if value is None else str(value) for name, value in values.items()}


def test_csv_and_json_have_the_numbers_of_the_records(tmp_path, runs):
    report(runs, csv=tmp_path / "r.csv", json=tmp_path / "r.json")
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    found = json.loads((tmp_path / "r.json").read_text())["runs"]
    for folder, one in zip(runs, found, strict=True):
        run = read_run(folder)
        assert one["steps"] == run.steps and one["epochs"] == run.epochs
        own = [row for row in rows if row["run"] == one["name"]]
        for row, record in zip(own, [*run.steps, *run.epochs], strict=True):
            for group in ("mean", "sum", "peak", "last"):
                for name, value in strings(record[group]).items():
                    assert row[f"{group}.{name}"] == value


def test_the_summary_of_a_run_is_what_the_record_of_its_epoch_says(runs):
    summary = report(runs[0]).runs[0]
    (epoch,) = read_run(runs[0]).epochs
    for group in ("mean", "sum", "peak"):
        assert summary.whole[group] == pytest.approx(epoch[group])
    assert {name: one["tokens"] for name, one in summary.sources().items()} == {
        name: epoch["sum"][f"tokens/{name}"] for name in ("web", "code")
    }
    assert summary.sources()["web"]["loss"] == pytest.approx(3.0)


def test_the_text_and_a_notebook_have_a_column_for_each_run_and_the_audit(runs):
    found = report(runs)
    share = found.runs[0].whole["mean"]["padding_share"]
    assert re.search(r"samples +100 +200\n", str(found))
    assert re.search(f"padding share +{100 * share:.1f} %", str(found))
    assert re.search(r"share of tokens.*\ncode .* [\d.]+ %\n", str(found))
    assert ": OK" in str(found) and "epoch 0: complete" in str(found)
    html = found._repr_html_()
    assert html.count("<table>") == 5  # figures, settings, sources of two runs, epochs
    assert "<th>a &lt;b&gt;</th>" in html and "a <b>" not in html


def page_of(folder, runs):
    path = folder / "report.html"
    report(runs, html=path)
    return path.read_text()


def test_a_page_is_whole_and_asks_for_nothing(tmp_path, runs):
    text = page_of(tmp_path, runs)
    xml.fromstring(re.sub("<!doctype html>|<meta[^>]*>", "", text))  # every element is closed
    assert not re.search(r"https?:|url\(|@import|<script|<link|<img|src=", text)
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert "<b>" not in text and "a &lt;b&gt;" in text
    assert "epoch 0: complete" in text
    figures = re.findall("<figure>.*?</figure>", text, re.DOTALL)
    assert len(figures) >= 8
    for figure in figures:
        picture = xml.fromstring(re.search("<svg.*</svg>", figure, re.DOTALL)[0])
        texts = {child.tag: child.text for child in picture}
        assert texts["title"] and re.search(": (from|[0-9])", texts["desc"])
        assert picture.get("aria-label") == f"{texts['title']}. {texts['desc']}"
        assert "<caption>" in figure or "<th" in figure
        for child in picture.iter():
            points = child.get("points")
            places = [tuple(map(float, one.split(","))) for one in (points or "").split()]
            assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)


def test_a_curve_is_drawn_at_the_values_of_the_records():
    points = [(1.0, 2.0), (40.0, 7.5), (90.0, 3.25)]
    picture = xml.fromstring(line_chart("t", "d", "x", [Curve(0, points)]))
    (line,) = [one for one in picture.iter() if one.tag == "polyline"]
    texts = [(one.text, float(one.get("x")), float(one.get("y"))) for one in picture.iter("text")]
    x_at = {label: x for label, x, y in texts if y > HEIGHT - 40 and label != "x"}
    y_at = {label: y - 4 for label, x, y in texts if y < HEIGHT - 40}
    drawn = [tuple(map(float, one.split(","))) for one in line.get("points").split()]
    for (x, y), (at_x, at_y) in zip(points, drawn, strict=True):
        assert at_x == pytest.approx(between(x_at, x), abs=0.2)
        assert at_y == pytest.approx(between(y_at, y), abs=0.2)


def test_a_curve_that_lies_on_another_is_drawn_with_gaps_and_others_are_not(tmp_path, runs):
    shutil.copytree(runs[0], tmp_path / "again")
    text = page_of(tmp_path, [runs[0], tmp_path / "again", runs[1]])
    (loss,) = re.findall("<figure><h3>Loss, .*?</figure>", text, re.DOTALL)
    lines = re.findall("<polyline[^>]*>", loss)
    assert ["dasharray" in one for one in lines] == [False, True, False]
    assert re.search(r"again \(dashed, on .*a &lt;b&gt;\): from", loss)
    for figure in re.findall("<figure>.*?</figure>", text, re.DOTALL):
        colors = {one[-1] for one in re.findall(r'class="(?:c\d)', figure)}
        assert colors == {one[-1] for one in re.findall("swatch s[0-9]", figure)} != set()


def test_a_run_that_went_on_otherwise_says_so_by_stretch(tmp_path, runs):
    """A run of 4 ranks goes on with 2 after step 3, in the second attempt."""
    first, *records = (runs[1] / "monitor.jsonl").read_text().splitlines()
    attempt = json.loads(first) | {"world_size": 4, "config": {"lr": 0.1}}
    other = attempt | {"world_size": 9, "step": 5, "resumed_at": 5}
    last = attempt | {"world_size": 2, "step": 3, "resumed_at": 3, "config": {"lr": 0.2}}
    lines = [json.dumps(attempt), *records[:5], json.dumps(other), records[5]]
    lines += [json.dumps(last), *records[3:]]
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    (resumed / "monitor.jsonl").write_text("\n".join(lines) + "\n")
    summary = report(resumed).runs[0]
    assert summary.facts()["ranks"] == "4, then 2 from step 4"
    assert summary.facts()["resumed after step"] == "3"
    assert summary.settings()["lr (config)"] == "0.1, then 0.2 from step 4"
    assert summary.settings()["token_budget"] == "96"
    text = page_of(tmp_path, [resumed])
    (loss,) = re.findall("<figure><h3>Loss, .*?</figure>", text, re.DOTALL)
    (mark,) = re.findall('<line class="c0" x1="([0-9.]+)"', loss)
    points = re.search('<polyline[^>]*points="([^"]*)"', loss)[1].split()
    assert points[2].split(",")[0] == mark  # of the third record, which ends with step 3
    assert "Balance of the ranks" in text  # of the part with several
    assert ">0.1, then 0.2 from step 4<" in text and "lr (config)" in str(report(resumed))


def between(places, value):
    """Where a value is on an axis, by two of its ticks."""
    (one, first), *_, (other, last) = places.items()
    one, other = float(one), float(other)
    return first + (value - one) / (other - one) * (last - first)


@given(st.lists(st.floats(-1e6, 1e6), max_size=400), st.integers(1, 40))
def test_a_thinned_curve_keeps_its_extremes_and_its_order(values, bins):
    points = list(enumerate(values))
    kept = thinned(points, bins)
    assert len(kept) <= 2 * bins and {*kept} <= {*points} and kept == sorted(kept)
    if points:
        ends = [value for _, value in kept]
        assert (min(ends), max(ends)) == (min(values), max(values))


@given(st.lists(st.floats(-1e9, 1e9), max_size=5))
@example([5e-324])
@example([1e9, 1e9 + 2e-7])
def test_an_axis_has_all_values_between_few_ticks(values):
    axis = Axis.linear(values)
    assert 2 <= len(axis.ticks) <= 9
    assert all(-1e-6 <= axis.place(value) <= 1 + 1e-6 for value in values)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0, "0"), (0.0123456, "0.0123"), (950, "950"), (54321, "54.3k"), (2e6, "2M")],
        *[(999_600, "1M"), (-999_600, "-1M"), (999_999_999, "1G"), (9999.9, "10,000")],
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("folders", "error", "match"),
    [
        ("nowhere", FileNotFoundError, r"monitor.jsonl"),
        ([], ValueError, "at least 1 run"),
        ([3], TypeError, "`folders`"),
    ],
)
def test_a_folder_without_records_is_an_error(folders, error, match):
    with pytest.raises(error, match=match):
        report(folders)


def test_only_the_page_needs_what_makes_it(tmp_path, runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    report(runs, csv=tmp_path / "r.csv")
    with pytest.raises(ImportError, match=r"pip install 'odb-nodes\[tools\]'"):
        report(runs, html=tmp_path / "r.html")


@pytest.mark.slow
def test_the_command_prints_the_table_and_writes_the_page(tmp_path, runs, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["report", *map(str, runs), "--html", str(tmp_path / "page.html")])
    assert "padding share" in capsys.readouterr().out
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_a_mean_of_the_run_is_weighed_by_what_it_is_a_mean_over(tmp_path):
    """Here by samples, and where only a part of the steps tells a loss, by theirs."""
    infos = []
    with Monitor(tmp_path, every=2) as monitor:
        for number, batch in enumerate(monitor.watch(loader_of(accumulate=1))):
            infos.append(pop_step_info(batch))
            loss = float(number) if number % 3 else None
            monitor.step(batch, infos[-1], loss=loss, loss_weight=infos[-1].local_samples)
    told = [(number, one.local_samples) for number, one in enumerate(infos) if number % 3]
    expected = sum(a * b for a, b in told) / sum(b for _, b in told)
    assert read_run(tmp_path).epochs[0]["mean"]["loss"] == pytest.approx(expected)
    assert report(tmp_path).runs[0].whole["mean"]["loss"] == pytest.approx(expected)


def test_records_without_weights_are_weighed_by_their_targets(tmp_path, runs):
    (tmp_path / "old").mkdir()
    records = map(json.loads, (runs[1] / "monitor.jsonl").read_text().splitlines())
    old = [{name: one for name, one in record.items() if name != "weight"} for record in records]
    (tmp_path / "old/monitor.jsonl").write_text("".join(json.dumps(one) + "\n" for one in old))
    found, expected = (report(one).runs[0].whole["mean"] for one in (tmp_path / "old", runs[1]))
    assert found == pytest.approx(expected)


def test_a_ledger_beside_several_runs_is_of_none_of_them(tmp_path):
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
