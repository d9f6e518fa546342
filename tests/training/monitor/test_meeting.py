"""Records over several ranks in one process; warnings; each batch is counted once."""

import re
import warnings
from dataclasses import replace

import pytest
import torch
from aligned_ranks import on_ranks
from in_process import InProcessHub
from monitors import loader_of, loss_of, steps_of

from odb_nodes import Observation, ODBDataLoader, PeerError, StateError, pop_step_info
from odb_nodes.core.planning import StepTime
from odb_nodes.training.monitor import Monitor, read_run, report
from odb_nodes.training.monitor.counts import Counts
from odb_nodes.training.monitor.watching import RunWarnings

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for batches")


def samples_of(rank):
    return [{"input_ids": [1] * (n % (9 + 7 * rank) + 2)} for n in range(30 + 20 * rank)]


def test_ranks_write_one_file_with_the_mean_over_all_targets(tmp_path):
    """Two ranks with separate data; the rank with less data fills."""
    hub = InProcessHub(2, 20.0)  # an exchange meets the next call of the others: one for each use

    def run(exchange):
        meeting = hub.exchange(exchange.rank)
        loader = ODBDataLoader(
            [*samples_of(0), *samples_of(1)], token_budget=64, window=8, process_group=exchange
        )
        infos = []
        with Monitor(tmp_path, every=4, process_group=meeting, progress=False) as monitor:
            for batch in monitor.watch(loader):
                info = pop_step_info(batch)
                infos.append(info)
                loss = loss_of(info) + exchange.rank
                monitor.step(batch, info, loss=loss, ooms=exchange.rank, lr=5.0 + exchange.rank)
        return infos

    infos_of_ranks = on_ranks(2, run)
    (epoch,) = read_run(tmp_path).epochs
    assert read_run(tmp_path).attempts[0]["world_size"] == 2
    weighted = sum(
        (float(loss_of(info)) + rank) * info.local_targets
        for rank, infos in enumerate(infos_of_ranks)
        for info in infos
        if info.local_targets
    )
    targets = sum(info.local_targets for infos in infos_of_ranks for info in infos)
    assert epoch["sum"]["targets"] == targets
    assert epoch["mean"]["loss"] == pytest.approx(weighted / targets, rel=1e-14)
    assert epoch["sum"]["samples"] == 80 and epoch["last"]["lr"] == 5.0  # of rank 0
    assert epoch["sum"]["ooms"] == epoch["sum"]["optimizer_steps"] == len(infos_of_ranks[0])
    padded = [[info.local_padded_tokens for info in infos] for infos in infos_of_ranks]
    busiest = sum(map(max, *padded))
    assert epoch["mean"]["rank_balance"] == pytest.approx(sum(map(sum, padded)) / (2 * busiest))


def test_the_time_balance_of_ranks_follows_the_step_time():
    """Rank 0 has rows of 8 x 2 and 4 x 4 tokens, rank 1 of 1 x 16 twice."""
    rows = [[1, 16, 16, 0, 0] * 2, [1, 16, 16, 0, 0] * 2]
    ranks = [
        Counts(rows=of_rank, squares=squares, sums={"rank_seconds": 1.0})
        for of_rank, squares in zip(rows, ([32, 64], [256, 256]), strict=True)
    ]
    whole = Counts.over_ranks(ranks, StepTime(tokens=2, squares=0.5, base=8))
    times = [[8 + 32 + 16, 8 + 32 + 32], [8 + 32 + 128] * 2]
    assert whole.sums["times"] == sum(map(sum, times))
    assert whole.sums["longest_times"] == 2 * (168 + 168)
    assert whole.sums["slowest_squares"] == 512
    assert whole.groups()["mean"]["time_balance"] == sum(map(sum, times)) / (4 * 168)
    by_function = Counts.over_ranks(ranks, None)
    assert "time_balance" not in by_function.groups()["mean"]
    assert by_function.sums["slowest_squares"] == 512


@pytest.mark.parametrize(
    ("every", "timeout_s", "error", "match"),
    [
        ([1, 2], 20.0, StateError, "`Monitor.every` is 1 on rank 0, 2 on rank 1"),
        ([1, 99], 0.5, PeerError, None),  # rank 1 does not come: an error and no hang
    ],
)
def test_ranks_at_different_steps_are_an_error(tmp_path, every, timeout_s, error, match):
    steps = steps_of(loader_of(accumulate=1))

    def run(exchange):
        monitor = Monitor(tmp_path, every=every[exchange.rank], process_group=exchange)
        for step in steps if every[exchange.rank] < 3 else []:
            monitor.step(*step)

    with pytest.raises(error, match=match):
        on_ranks(2, run, timeout_s=timeout_s)


def test_the_tokens_and_squares_are_those_of_the_largest_rank_of_each_step(tmp_path):
    hub, rows = InProcessHub(2, 20.0), {0: [4, 4, 1], 1: [1, 8, 1]}  # of 1000, 1000, 20000 tokens
    widths = [1000, 500, 20_000]
    ((_, info), *_) = steps_of(loader_of(accumulate=1))

    def run(exchange):
        with Monitor(tmp_path, every=3, process_group=hub.exchange(exchange.rank)) as monitor:
            for step, (height, width) in enumerate(zip(rows[exchange.rank], widths, strict=True)):
                if exchange.rank == 1 and step == 2:
                    width = 19_000
                ids = torch.empty(height, width, dtype=torch.int8)
                step_info = replace(info, step=step, local_padded_tokens=height * width)
                monitor.step({"input_ids": ids}, step_info)

    on_ranks(2, run)
    (record,) = read_run(tmp_path).steps
    assert record["sum"]["slowest_tokens"] == 4 * 1000 + 8 * 500 + 20_000
    assert record["sum"]["slowest_squares"] == 4 * 1000**2 + 8 * 500**2 + 20_000**2


# --- warnings: each once --------------------------------------------------------------------------


def warned(loader, folder, losses=(), **options):
    """Return the warnings of a run whose first losses are `losses`, and later ones 1.0."""
    with warnings.catch_warnings(record=True) as caught, Monitor(folder, every=2) as monitor:
        warnings.simplefilter("always", UserWarning)
        for number, batch in enumerate(monitor.watch(loader)):
            loss = losses[number] if number < len(losses) else 1.0
            monitor.step(batch, pop_step_info(batch), loss=loss, **options)
    texts = [str(warning.message) for warning in caught if warning.category is UserWarning]
    return [text for text in texts if "are padding" not in text]


def test_waiting_for_data_and_a_loss_of_nan_are_warned_of_once(tmp_path):
    assert warned(loader_of(), tmp_path / "good", wait_s=0.0) == []
    (text,) = warned(loader_of(), tmp_path / "starved", wait_s=1.0)
    assert "goes into waiting for batches" in text
    nan = float("nan")
    (text,) = warned(loader_of(accumulate=1), tmp_path / "nan", [1.0, nan, 1, 1, nan], wait_s=0.0)
    assert text.startswith("the loss is nan in a record")
    assert re.search(r"loss that is not finite \| +2 \|\n", str(report([str(tmp_path / "nan")])))


@pytest.mark.parametrize("observe", [None, lambda sample: Observation(8, task="small")])
def test_a_source_that_runs_dry_is_warned_of_once(tmp_path, observe):
    data = {"big": [{"input_ids": [1] * 8}] * 300, "small": [{"input_ids": [1] * 8}] * 10}
    options = {"weights": {"big": 1, "small": 1}, "observe": observe}
    loader = ODBDataLoader(data, token_budget=32, window=16, **options)
    (text,) = warned(loader, tmp_path, wait_s=0.0)
    assert text.startswith("source 'small' ran dry before ")


WAITS = [
    Counts(rows=[1, 8, 8, 0, wait], squares=[8], sums={"rank_seconds": 10.0})
    for wait in (0, 6_000_000)
]
LATE = [
    Counts(rows=[1, 8, 8, 0, 0], squares=[8], sums={"record_wait_s": wait_s, "rank_seconds": 1.0})
    for wait_s in (0.3, 0.0, 0.3)
]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (WAITS, "rank 1 waits for batches 60% of its time"),
        (WAITS[:1] * 2, None),
        (LATE, "rank 1 is slower than the other ranks"),
    ],
)
def test_a_slow_rank_is_named(shares, expected):
    run_warnings = RunWarnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            run_warnings.check(shares, Counts.over_ranks(shares), None)
    texts = [str(warning.message) for warning in caught if str(warning.message).startswith("rank")]
    assert len(texts) == (expected is not None) and all(text.startswith(expected) for text in texts)


def test_a_rank_is_named_only_if_consecutive_records_show_it():
    """No rank is slow if ranks are slow in turn."""
    run_warnings = RunWarnings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for shares in (LATE, LATE[1:] + LATE[:1]) * 3:
            run_warnings.check(shares, Counts.over_ranks(shares), None)


# --- each batch is counted once -------------------------------------------------------------------


def test_a_second_step_for_a_batch_is_refused(tmp_path):
    (first, second, *_) = steps_of(loader_of())  # micro-steps 0 and 1 of one optimizer step
    monitor = Monitor(tmp_path)
    monitor.step(*first)
    monitor.step(*second)
    with pytest.raises(ValueError, match="for step 1 of epoch 0 a second time"):
        monitor.step(*second)


def test_a_batch_without_a_step_is_warned_of_once(tmp_path):
    with Monitor(tmp_path, every=1) as monitor:
        with pytest.warns(UserWarning, match="was not called for step 3 of epoch 0") as caught:
            for number, step in enumerate(steps_of(loader_of())):
                if number not in (3, 5):
                    monitor.step(*step)
        assert sum("was not called for" in str(warning.message) for warning in caught) == 1
    loader, monitor = loader_of(), Monitor(tmp_path / "later")
    for step in steps_of(loader):
        monitor.step(*step)
    with pytest.warns(UserWarning, match="was not called for step 0 of epoch 1"):
        monitor.step(*steps_of(loader)[1])


def test_a_loader_that_restarts_or_resumes_is_not_warned_of(tmp_path):
    monitor, loader = Monitor(tmp_path, every=1), loader_of()
    for _ in range(2):  # each time the first step of a new loader
        for batch in monitor.watch(loader_of()):
            monitor.step(batch, pop_step_info(batch))
            break
    monitor.reset()
    for step in steps_of(loader)[4:]:
        monitor.step(*step)


@pytest.mark.parametrize(
    ("place", "is_watched"), [("first", True), ("first", False), ("middle", False), ("after", True)]
)
def test_a_batch_of_another_loader_is_refused_and_the_epoch_stays_whole(
    tmp_path, place, is_watched
):
    def evaluate():
        batches = steps_of(loader_of(window=5))[1:]
        with pytest.raises(ValueError, match="the batches of one loader: .* evaluation"):
            for step in batches:
                monitor.step(*step)

    loader = loader_of()
    with Monitor(tmp_path, every=1) as monitor:
        monitor.attach(loader)
        for number, batch in enumerate(monitor.watch(loader) if is_watched else loader):
            info = pop_step_info(batch)
            if is_watched and (place, number) == ("first", 0):
                evaluate()
            monitor.step(batch, info)
            if (place, number) in (("first", 2), ("middle", 5)):
                evaluate()
        if place == "after":
            evaluate()
    (epoch,) = read_run(tmp_path).epochs
    assert epoch["sum"]["samples"] == 100


def test_a_loader_that_was_evaluated_before_is_refused_in_a_later_epoch_too(tmp_path):
    other = loader_of()
    steps_of(other)
    monitor, loader = Monitor(tmp_path), loader_of()
    for batch in monitor.watch(loader):
        monitor.step(batch, pop_step_info(batch))
        with pytest.raises(ValueError, match="for step 0 of epoch 1, but its loader stands at"):
            monitor.step(*steps_of(other)[0])
        break


def test_a_second_watch_within_an_epoch_is_an_error(tmp_path):
    monitor = Monitor(tmp_path)
    with pytest.raises(RuntimeError, match="another `watch` of this monitor began"):
        for batch in monitor.watch(loader_of()):
            monitor.step(batch, pop_step_info(batch))
            for other_batch in monitor.watch(loader_of()):
                monitor.step(other_batch, pop_step_info(other_batch))


@pytest.mark.parametrize(
    ("counted", "expected"), [([], "any step of epoch 0"), ([0, 1, 2], "step [0-9]+ of epoch 0")]
)
def test_a_missing_step_at_the_end_of_an_epoch_is_warned_of_once(tmp_path, counted, expected):
    with Monitor(tmp_path) as monitor:
        with pytest.warns(UserWarning, match=f"was not called for {expected}") as caught:
            loader = loader_of()
            for _ in range(2):
                for number, batch in enumerate(monitor.watch(loader)):
                    if number in counted:
                        monitor.step(batch, pop_step_info(batch))
    files = [warning.filename for warning in caught if "was not called" in str(warning.message)]
    assert files == [__file__]
