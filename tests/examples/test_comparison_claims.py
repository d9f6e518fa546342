"""What pages claim of the comparison holds in each run, and stands there with its figures."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

REPOSITORY = Path(__file__).parents[2]
BENCHMARKS = REPOSITORY / "examples" / "benchmarks"
PAGE = """\
In the table, ours wastes
0.02 and theirs 0.05 to 0.07.

| | padding, fill | time |
| --- | --- | --- |
| ours | 0.02, 0.9 | 1 to 3 |

The end.
"""


@pytest.fixture
def comparing(monkeypatch):
    """Return the modules of the checker and of the page."""
    for folder in (BENCHMARKS.parent, BENCHMARKS):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("comparing.claims"), importlib.import_module("comparing.page")


def make_run(theirs, time="1 (0 to 9)"):
    ours = {"": "ours", "padding, fill": "0.02, 0.9", "time, s": time}
    return {"Padding": [ours, {"": "theirs", "padding, fill": f"{theirs}, 0.8", "time, s": ""}]}


def check(comparing, page, runs):
    claims, _ = comparing
    claim = claims.Claim(
        "ours wastes {ours} and theirs {theirs}.",
        lambda ours, theirs: ours < theirs,
        {name: claims.Cell("Padding", name, "padding, fill") for name in ("ours", "theirs")},
    )
    table = claims.PageTable(
        {"padding, fill": ("Padding", "padding, fill"), "time": ("Padding", "time, s")},
        {"ours": "ours"},
    )
    return claims.check(page, runs, [claim], [table])


RUNS = {"run1": make_run("0.05"), "run2": make_run("0.07", "3 (1 to 4)")}


def test_claims_that_hold_and_stand_on_the_page_pass(comparing):
    assert check(comparing, PAGE, RUNS) == ([], [], [], PAGE)


@pytest.mark.parametrize("run", RUNS)
def test_a_claim_that_a_run_contradicts_is_an_error_with_the_figures_of_both(comparing, run):
    errors = check(comparing, PAGE, {**RUNS, run: make_run("0.01")}).errors
    assert f"not so in {run}: ours wastes {{ours}}" in errors[0]
    assert "Padding" in errors[0] and errors[0].count("'theirs': [") == 2


def test_a_text_that_is_not_on_the_page_is_an_error(comparing):
    errors = check(comparing, PAGE.replace("wastes", "needs"), RUNS).errors
    assert errors == ["0 times on the page: ours wastes {ours} and theirs {theirs}."]


@pytest.mark.parametrize("other", [("0.07", "0.08"), ("| 1 to 3 |", "| 2 |")])
def test_another_figure_on_the_page_is_an_error_and_is_mended(comparing, other):
    report = check(comparing, PAGE.replace(*other), RUNS)
    (error,) = report.errors
    assert other[1] in error and other[0] in error
    assert report.page == PAGE


@pytest.mark.parametrize("runs, listed", [({}, "in_no_run"), ({**RUNS, "run2": {}}, "in_one_run")])
def test_a_table_that_runs_lack_is_listed(comparing, runs, listed):
    page = PAGE.replace(" to 0.07", "").replace("1 to 3", "1 (0 to 9)")
    report = check(comparing, page, runs)
    assert not report.errors
    lists = {name: getattr(report, name) for name in ("in_no_run", "in_one_run")}
    assert len(lists.pop(listed)) == 2 and lists.popitem()[1] == []


def test_a_claim_is_checked_in_the_one_run_that_has_its_table(comparing):
    errors = check(comparing, PAGE, {"run1": make_run("0.01"), "run2": {}}).errors
    assert "not so in run1" in errors[0]


def test_a_row_that_a_run_lacks_is_an_error(comparing):
    lacking = {"Padding": RUNS["run2"]["Padding"][:1]}
    errors = check(comparing, PAGE, {**RUNS, "run2": lacking}).errors
    assert errors == [
        "no row 'theirs' in the table 'Padding', for: ours wastes {ours} and theirs {theirs}."
    ]


@pytest.mark.parametrize("lack", ["row", "cell"])
def test_a_row_of_a_page_that_only_one_run_has_is_an_error(comparing, lack):
    ours, theirs = make_run("0.07")["Padding"]
    lacking = [theirs] if lack == "row" else [{**ours, "padding, fill": ""}, theirs]
    errors = check(comparing, PAGE, {**RUNS, "run2": {"Padding": lacking}}).errors
    assert "Padding: ours: padding, fill is in 1 of 2 runs, for: | |" in errors[-1]


def test_a_column_that_no_run_has_is_an_error(comparing):
    table = comparing[0].PageTable(
        {"padding": ("Padding", "padding, fill"), "time": ("Padding", "hours")}, {"ours": "ours"}
    )
    page = "| | padding | time |\n| --- | --- | --- |\n| ours | 0.02, 0.9 | |\n"
    errors = comparing[0].check(page, RUNS, [], [table]).errors
    assert errors == ["no column 'hours' in the table 'Padding', for: | | padding | time |"]


@pytest.mark.parametrize("cells, text", [(["yes", "no"], "yes / no"), (["1 s", "3 s"], "1 to 3 s")])
def test_cells_of_unlike_words_are_both_on_the_page(comparing, cells, text):
    assert comparing[0].merged(cells) == text


@pytest.mark.parametrize(
    "name", ["docs/comparison.md", "docs/performance.md", "docs/index.md", "README.md"]
)
def test_the_page_agrees_with_the_runs(comparing, name):
    claims, page = comparing
    runs = {path.name: claims.read_run(path) for path in BENCHMARKS.glob("results/*.json")}
    report = claims.check((REPOSITORY / name).read_text(), runs, *page.PAGES[name])
    assert report.errors == report.in_no_run == []
    assert all(part.startswith(page.IN_ONE_RUN) for part in report.in_one_run)


def test_a_quick_run_is_refused(comparing, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps([{"title": "Padding", "quick": True, "rows": []}]))
    with pytest.raises(ValueError, match=r"run\.json has tables of --quick.*Padding"):
        comparing[0].read_run(path)


@pytest.mark.slow
def test_a_run_replaces_the_tables_that_it_makes_and_keeps_all_others(comparing, tmp_path):
    common, path = importlib.import_module("comparing.common"), tmp_path / "run.json"
    path.write_text(json.dumps([{"name": name, "title": name} for name in ("waits", "padding")]))

    def tables(_options):
        yield common.Table("Padding", "conditions", [{"": "ours"}])
        raise KeyboardInterrupt

    command = ["compare.py", "--json", str(path), "--only", "padding", "waits"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sys, "argv", command)
        patch.setitem(sys.modules, "comparing.padding", SimpleNamespace(tables=tables))
        importlib.import_module("compare").main()
    assert [table["title"] for table in json.loads(path.read_text())] == ["waits", "Padding"]


@pytest.mark.slow
def test_epochs_of_another_length_or_device_are_not_those_of_a_run(comparing, tmp_path):
    training, path = importlib.import_module("comparing.training"), tmp_path / "epochs.json"
    kinds = [(False, "cpu"), (True, "cpu"), (False, "cuda")]
    for seed, kind in enumerate(kinds):
        epoch = {"task": "text", "ranks": 1, "contender": "ours", "seed": seed}
        training.Epochs(path, *kind).add(epoch)
    for seed, kind in enumerate(kinds):
        assert [*training.Epochs(path, *kind).of("text", 1)["ours"]] == [seed]


@pytest.mark.slow
def test_the_script_fails_where_a_table_is_not_in_the_runs_only_if_strict(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("[]")
    command = [sys.executable, str(BENCHMARKS / "check_claims.py"), str(path)]
    lax, strict = (
        subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
        for options in ([], ["--strict"])
    )
    assert lax.returncode == 0 and "comparison.md: in no run: Padding" in lax.stdout
    assert strict.returncode == 1
