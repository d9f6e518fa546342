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


def test_it_adds_up_what_steps_have_had():
    report = reported(infos())
    assert report.counts == {"short": SourceCount(30, 60), "long": SourceCount(10, 80)}
    assert report.shares() == {"short": 0.75, "long": 0.25}
    assert report.shares("tokens") == pytest.approx({"short": 3 / 7, "long": 4 / 7})


def test_it_goes_on_from_a_checkpoint():
    steps = infos()
    first = reported(steps[:2])
    rest = SourceReport()
    rest.load_state_dict(first.state_dict())
    for info in steps[2:]:
        rest.add(info)
    assert rest.counts == reported(steps).counts
    assert first.counts == reported(steps[:2]).counts


def test_its_table_shows_shares_beside_weights():
    head, long, short = reported(infos()).table({"short": 3, "long": 1}).splitlines()
    assert head.split() == ["source", "samples", "share", "tokens", "share", "weight"]
    assert long.split() == ["long", "10", "25.00%", "80", "57.14%", "25.00%"]
    assert short.split() == ["short", "30", "75.00%", "60", "42.86%", "75.00%"]
    assert str(SourceReport()).split() == head.split()[:-1]


def test_a_source_that_has_had_nothing_yet_has_a_line():
    line = reported(infos()[:0]).table({"short": 3, "long": 1}).splitlines()[1]
    assert line.split() == ["long", "0", "0.00%", "0", "0.00%", "25.00%"]


@pytest.mark.parametrize("weights", [{"short": 1}, 3])
def test_weights_of_other_sources_are_refused(weights):
    if weights == 3:
        with pytest.raises(TypeError, match="`weights` must be a dict"):
            reported(infos()).table(weights)
        return
    with pytest.raises(ValueError, match="`weights` must have the names of `sources`"):
        reported(infos()).table({"short": 1})


def test_steps_without_sources_count_nothing():
    loader = ODBDataLoader(DATA["long"], token_budget=32)
    assert reported(pop_step_info(batch) for batch in loader).counts == {}


def test_without_other_ranks_it_is_what_there_is():
    report = reported(infos())
    assert report.over_ranks().counts == report.counts


def test_what_is_no_step_info_is_refused():
    with pytest.raises(TypeError, match="`info` must be a `StepInfo`, but.*`pop_step_info.batch.`"):
        SourceReport().add({"input_ids": []})
