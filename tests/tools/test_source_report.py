import pytest

from odb_nodes import ODBDataLoader, SourceCount, pop_step_info
from odb_nodes.tools.source_report import SourceReport

DATA = {
    "short": [{"input_ids": [1] * 2} for _ in range(30)],
    "long": [{"input_ids": [1] * 8} for _ in range(10)],
}


def infos():
    loader = ODBDataLoader(DATA, token_budget=32, window=8, weights={"short": 3, "long": 1})
    return [pop_step_info(batch) for batch in loader]


def reported(steps):
    report = SourceReport()
    for info in steps:
        report.add(info)
    return report


def test_it_adds_up_what_steps_have_had_and_goes_on_from_a_checkpoint():
    steps = infos()
    first, report = reported(steps[:2]), SourceReport()
    report.load_state_dict(first.state_dict())
    for info in steps[2:]:
        report.add(info)
    assert report.counts == {"short": SourceCount(30, 60), "long": SourceCount(10, 80)}
    assert report.shares() == {"short": 0.75, "long": 0.25}
    assert report.shares("tokens") == pytest.approx({"short": 3 / 7, "long": 4 / 7})
    assert first.counts == reported(steps[:2]).counts
    assert report.over_ranks().counts == report.counts
    loader = ODBDataLoader(DATA["long"], token_budget=32)
    assert reported(pop_step_info(batch) for batch in loader).counts == {}


def test_its_table_shows_shares_beside_weights():
    def cells(report, weights):
        lines = report.table(weights).splitlines()
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]

    head, _, long, short = cells(reported(infos()), {"short": 3, "long": 1})
    assert head == ["source", "samples", "of samples", "tokens", "of tokens", "weight"]
    assert long == ["long", "10", "25.00%", "80", "57.14%", "25.00%"]
    assert short == ["short", "30", "75.00%", "60", "42.86%", "75.00%"]
    assert str(SourceReport()) == "no samples of any source so far"
    (*_, line, _) = cells(SourceReport(), {"short": 3, "long": 1})  # has had nothing yet
    assert line == ["long", "0", "0.00%", "0", "0.00%", "25.00%"]


REFUSALS = [
    (lambda: reported(infos()).table(3), TypeError, "`weights` must be a dict"),
    (lambda: reported(infos()).table({"short": 1}), ValueError, "`weights` must have the names"),
    (lambda: SourceReport().add({"input_ids": []}), TypeError, "`info` must be a `StepInfo`"),
]


@pytest.mark.parametrize(("call", "error", "match"), REFUSALS)
def test_what_is_wrong_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()
