"""What a monitor warns of: once, and only where it is so."""

import re
import warnings

import pytest
from monitors import loader_of

from odb_nodes import Observation, ODBDataLoader, pop_step_info
from odb_nodes.monitor import Monitor, report
from odb_nodes.monitor.watching import RunWarnings
from odb_nodes.monitor.window import Counts


def warned(loader, folder, losses=(), **options):
    """What a run of a loader warns of, with these losses first and then 1.0."""
    with warnings.catch_warnings(record=True) as caught, Monitor(folder, every=2) as monitor:
        warnings.simplefilter("always", UserWarning)
        for number, batch in enumerate(monitor.watch(loader)):
            loss = losses[number] if number < len(losses) else 1.0
            monitor.step(batch, pop_step_info(batch), loss=loss, **options)
    texts = [str(one.message) for one in caught if one.category is UserWarning]
    return [text for text in texts if "are padding" not in text]


def test_what_holds_a_run_up_is_warned_of_once_and_nothing_else(tmp_path):
    assert warned(loader_of(), tmp_path / "good", wait_s=0.0) == []
    (said,) = warned(loader_of(), tmp_path / "starved", wait_s=1.0)
    assert "goes into waiting for batches" in said
    nan = float("nan")
    (said,) = warned(loader_of(accumulate=1), tmp_path / "nan", [1.0, nan, 1, 1, nan], wait_s=0.0)
    assert said.startswith("the loss is nan in a record")
    assert re.search(r"loss that is not finite \| +2 \|\n", str(report([str(tmp_path / "nan")])))


@pytest.mark.parametrize("observe", [None, lambda sample: Observation(8, task="small")])
def test_a_source_that_runs_dry_is_warned_of_once(tmp_path, observe):
    data = {"big": [{"input_ids": [1] * 8}] * 300, "small": [{"input_ids": [1] * 8}] * 10}
    options = {"weights": {"big": 1, "small": 1}, "observe": observe}
    loader = ODBDataLoader(data, token_budget=32, window=16, **options)
    (said,) = warned(loader, tmp_path, wait_s=0.0)
    assert said.startswith("source 'small' ran dry before ")


WAITS = [
    Counts(rows=[1, 8, 8, 0, wait], squares=[8], sums={"rank_seconds": 10.0})
    for wait in (0, 6_000_000)
]
LATE = [
    Counts(rows=[1, 8, 8, 0, 0], squares=[8], sums={"record_wait_s": wait_s, "rank_seconds": 1.0})
    for wait_s in (0.3, 0.0, 0.3)
]


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        (WAITS, "rank 1 waits for batches 60% of its time"),
        (WAITS[:1] * 2, None),
        (LATE, "rank 1 is slower than the others"),
    ],
)
def test_a_rank_that_the_others_wait_for_is_named(shares, said):
    notices = RunWarnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            notices.look(shares, Counts.over_ranks(shares), None)
    found = [str(one.message) for one in caught if str(one.message).startswith("rank")]
    assert len(found) == (said is not None) and all(one.startswith(said) for one in found)
