"""What a monitor warns of: once, and only where it is so."""

import re
import warnings

import pytest
from monitors import loader_of

from odb_nodes import Observation, ODBDataLoader, pop_step_info
from odb_nodes.monitor import Monitor, report
from odb_nodes.monitor.notices import Notices
from odb_nodes.monitor.window import Share, Totals

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for batches", "ignore:.*are padding")


def test_a_loader_that_starves_the_device_is_warned_of_once(tmp_path):
    with pytest.warns(UserWarning) as caught, Monitor(tmp_path, every=2) as monitor:
        for batch in loader_of():
            monitor.step(batch, pop_step_info(batch), wait_s=1.0)
    assert sum("goes into waiting for batches" in str(one.message) for one in caught) == 1


def test_a_loss_that_is_not_finite_is_warned_of_once(tmp_path):
    with pytest.warns(UserWarning) as caught, Monitor(tmp_path, every=1) as monitor:
        for number, batch in enumerate(loader_of()):
            loss = float("nan") if number in (2, 4) else 1.0
            monitor.step(batch, pop_step_info(batch), loss=loss, wait_s=0.0)
    assert sum("the loss is nan in a record" in str(one.message) for one in caught) == 1
    assert re.search(r"loss that is not finite +2\n", str(report([str(tmp_path)])))


@pytest.mark.filterwarnings("error", "ignore:.*are padding")
def test_what_is_as_it_should_be_is_not_warned_of(tmp_path):
    with Monitor(tmp_path, every=2) as monitor:
        for batch in loader_of():
            monitor.step(batch, pop_step_info(batch), wait_s=0.0)


@pytest.mark.parametrize("observe", [None, lambda sample: Observation(8, task="small")])
def test_a_source_that_runs_dry_is_warned_of_once(tmp_path, observe):
    data = {"big": [{"input_ids": [1] * 8}] * 600, "small": [{"input_ids": [1] * 8}] * 20}
    loader = ODBDataLoader(data, token_budget=64, window=16, observe=observe)
    with pytest.warns(UserWarning) as caught, Monitor(tmp_path, every=2) as monitor:
        for batch in monitor.watch(loader):
            monitor.step(batch, pop_step_info(batch), wait_s=0.0)
    (said,) = [str(one.message) for one in caught if "ran dry" in str(one.message)]
    assert said.startswith("source 'small' ran dry before ")


@pytest.mark.parametrize(
    ("waits", "said"),
    [((0.0, 6.0), "rank 1 waits for batches 60% of its time"), ((0.0, 0.0), None)],
)
def test_a_rank_that_waits_more_than_the_others_is_named(waits, said):
    shares = [
        Share(rows=[1, 8, 8, 0, int(wait_s * 1e6)], seconds=10.0, optimizer_steps=1)
        for wait_s in waits
    ]
    assert warnings_of(shares) == ([said] if said else [])


def test_a_rank_that_comes_late_to_each_record_is_named():
    shares = [
        Share(rows=[1, 8, 8, 0, 0], sums={"record_wait_s": wait_s}, seconds=1.0)
        for wait_s in (0.3, 0.0, 0.3)
    ]
    assert warnings_of(shares) == ["rank 1 is slower than the others"]


def warnings_of(shares):
    """How the warnings of three records begin that are all the same."""
    notices = Notices()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            notices.look(shares, Totals.of(shares), None)
    found = [str(one.message) for one in caught]
    return [one.partition(",")[0].partition(":")[0] for one in found if one.startswith("rank")]
