"""The contract of all trainers in the registry of `trainers.py`."""

import shutil
import signal

import language_models as lm
import pytest
import torch
import trainers
from ledgers import check_ledger, rows_of
from monitors import records_of

from odb_nodes import StepMemoryError, audit
from odb_nodes.training.monitor import read_run

pytestmark = pytest.mark.filterwarnings(trainers.OF_LIGHTNING)

SIZE, EPOCHS = 40, 2
METRICS = ("padding_share", "rank_balance", "filler_share", "data_wait_share")
METRICS += ("real_tokens_per_step", "real_tokens_per_s", "samples_per_step")


class Whole:
    """An uninterrupted run, with a checkpoint after each optimizer step."""

    def __init__(self, trainer, folder, accumulate):
        self.trainer, self.folder, self.accumulate = trainer, folder, accumulate
        self.run = self.train(name="whole", save_every=1)
        self.entries = self.job("whole").entries()

    def job(self, name, **options):
        defaults = {"folder": self.folder, "accumulate": self.accumulate, "records": True}
        return trainers.Job(name=name, **defaults | options)

    def train(self, **options):
        return trainers.TRAINERS[self.trainer](self.job(**options))


FAILURES_OF_EACH = pytest.mark.parametrize("trainer", trainers.OWN_CODE, indirect=True)


@pytest.fixture(scope="module", params=trainers.TRAINERS)
def trainer(request):
    return request.param


@pytest.fixture(scope="module", params=[1, 3])
def whole(trainer, request, tmp_path_factory):
    return Whole(trainer, tmp_path_factory.mktemp("whole"), request.param)


# --- one rank -------------------------------------------------------------------------------------


def test_every_sample_comes_once_and_the_gradient_is_that_of_the_mean_over_all_targets(whole):
    assert lm.check_steps([whole.entries], SIZE) < 1e-12
    assert {entry["epoch"] for entry in whole.entries} == {*range(EPOCHS)}


def test_the_optimizer_steps_where_the_step_info_says_also_after_the_shorter_last_step(whole):
    real = [
        [end for end, fills in zip(entry["ends"], entry["fillers"], strict=True) if not fills]
        for entry in whole.entries
    ]
    assert all(ends == [False] * (len(ends) - 1) + [True] for ends in real)
    assert min(map(len, real)) <= whole.accumulate == max(map(len, real))
    assert whole.accumulate == 1 or min(map(len, real)) < whole.accumulate
    assert not any(any(entry["fillers"]) for entry in whole.entries)


def test_the_steps_are_known_ahead(whole):
    assert abs(whole.run.estimate - len(whole.entries)) <= 2


def test_the_metrics_are_logged(whole):
    logs = whole.run.logs
    assert {f"odb/{name}" for name in METRICS} <= {*logs[0]}
    assert sum(entry["odb/samples_per_step"] for entry in logs) == SIZE * EPOCHS
    tokens = sum(len(lm.sample_of(index)["input_ids"]) for index in range(SIZE))
    assert sum(entry["odb/real_tokens_per_step"] for entry in logs) == tokens * EPOCHS
    progress = [entry.get("odb/epoch", entry.get("epoch", 0)) for entry in logs]
    assert progress == sorted(progress) and progress[-1] in (0, EPOCHS)


def test_the_ledger_has_what_was_trained_on(whole):
    trained = [
        ids
        for entry in whole.entries
        for ids, is_filler in zip(entry["ids"], entry["fillers"], strict=True)
        if not is_filler
    ]
    rows = rows_of(whole.job("whole").ledger)
    assert [[key for key, *_ in step] for step in rows if step] == trained
    check_ledger(whole.job("whole").ledger, SIZE)


def test_the_monitor_has_the_exact_loss(whole):
    run = read_run(whole.folder / "monitor")
    assert [record["step"] for record in run.steps] == [entry["step"] for entry in whole.entries]
    totals = [[0.0, 0] for _ in range(EPOCHS)]
    for record, entry in zip(run.steps, whole.entries, strict=True):
        ids = lm.ids_of([entry])
        before = torch.tensor(entry["before"], dtype=torch.float64)
        expected = lm.expected_loss(before, ids)
        targets = sum(lm.targets_of(lm.sample_of(index)["labels"]) for index in ids)
        assert record["mean"].get("loss", 0.0) == pytest.approx(expected, rel=1e-9)
        assert record["last"]["lr"] > 0
        totals[record["epoch"]][0] += expected * targets
        totals[record["epoch"]][1] += targets
    losses = [total / targets for total, targets in totals]
    assert [record["mean"]["loss"] for record in run.epochs] == pytest.approx(losses, rel=1e-9)
    assert [record["sum"]["samples"] for record in run.epochs] == [SIZE] * EPOCHS


def test_a_run_goes_on_from_each_checkpoint_as_the_one_that_was_not_stopped(whole, exhaustive):
    """Its batches, weights, ledger and monitor: within an epoch, around its end, and at the end."""
    steps, end = len(whole.entries), len(whole.entries) // 2
    places = range(1, steps) if exhaustive else {1, end - 1, end, end + 1, steps - 1}
    records = records_of(whole.folder / "monitor")
    digests = [epoch.digest for epoch in audit(whole.job("whole").ledger, SIZE).epochs]
    for place in sorted(places):
        resumed = whole.train(name=f"from-{place}", resume=place)
        later = whole.job(f"from-{place}").entries()
        assert later == whole.entries[place:], place
        assert torch.equal(resumed.weights, whole.run.weights), place
        check_same(records_of(whole.folder / "monitor"), records)
        assert [
            epoch.digest for epoch in check_ledger(whole.job("whole").ledger, SIZE).epochs
        ] == digests


def check_same(actual, expected):
    """Records without what depends on the clock; losses may differ in the last bits."""
    for record, expected_record in zip(sum(actual, []), sum(expected, []), strict=True):
        assert record.pop("mean") == pytest.approx(expected_record["mean"], rel=1e-9)
        ignored = dict.fromkeys(("mean", "peak", "last"))
        assert record | ignored == expected_record | ignored


@pytest.mark.filterwarnings("ignore:no token of the optimizer step", "ignore:the run ends after")
@FAILURES_OF_EACH
def test_a_run_that_resumes_leaves_out_what_is_excluded_now(trainer, tmp_path):
    options = {"folder": tmp_path, "accumulate": 3, "records": True}
    trainers.train(trainer, save_every=2, **options)
    ledger = tmp_path / "ledger"
    entries = trainers.Job(**options).entries()
    before, later = (
        [index for entry in part if entry["epoch"] == 0 for index in lm.ids_of([entry])]
        for part in (entries[:2], entries[2:])
    )
    excluded = (before[0], later[0], later[len(later) // 2], later[-1])
    trainers.train(trainer, resume=2, exclude=excluded, **options)
    report = check_ledger(ledger, SIZE, attempts=2)
    assert [epoch.fates for epoch in report.epochs] == [
        {"trained": SIZE - 3, "excluded": 3},
        {"trained": SIZE - 4, "excluded": 4},
    ]


@FAILURES_OF_EACH
def test_a_step_that_failed_is_recorded_nowhere(trainer, tmp_path, new_threads):
    with pytest.raises(KeyboardInterrupt):
        trainers.train(trainer, folder=tmp_path, records=True, fail_at=5, epochs=1)
    assert len(rows_of(tmp_path / "ledger")) == 4
    assert audit(tmp_path / "ledger", SIZE).state == "open"
    assert [step["step"] for step in read_run(tmp_path / "monitor").steps] == [1, 2, 3, 4]
    assert not new_threads()


@pytest.mark.parametrize(
    "trainer", [*trainers.TRAINERS][1:], indirect=True
)  # not of a loop's own parts
def test_a_monitor_goes_on_at_the_step_of_a_checkpoint_without_one(trainer, tmp_path):
    trainers.train(trainer, folder=tmp_path, save_every=4, epochs=1)
    trainers.train(trainer, folder=tmp_path, resume=4, epochs=1, records=True)
    run = read_run(tmp_path / "monitor")
    assert run.attempts[0]["resumed_at"] == 4
    assert run.steps[0]["first_step"] == 5


# --- steps that run out of memory -----------------------------------------------------------------

OUT_OF_MEMORY = pytest.mark.filterwarnings(
    "ignore:no token of the optimizer step", "ignore:the run ends after"
)


@OUT_OF_MEMORY
@FAILURES_OF_EACH
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_that_runs_out_of_memory_is_that_without_and_resumes_exactly(
    trainer, tmp_path, accumulate
):
    folder = tmp_path / "failing"
    whole = trainers.train(trainer, folder=tmp_path, accumulate=accumulate)
    options = {"folder": folder, "accumulate": accumulate, "on_oom": "split", "fails_above": 40}
    failing = trainers.train(trainer, save_every=2, records=True, **options)
    entries = trainers.Job(**options).entries()
    assert whole.ooms == 0 < failing.ooms
    assert failing.weights == pytest.approx(whole.weights, abs=1e-10)
    assert lm.check_steps([entries], SIZE) < 1e-12
    if (folder / "monitor").exists():  # a loop tells it by itself, see docs/monitoring.md
        steps = read_run(folder / "monitor").steps
        assert sum(record["sum"]["samples"] for record in steps) == EPOCHS * SIZE
        assert len(steps) == len(entries)
        assert all(record["mean"]["loss"] > 0 for record in steps if record["sum"]["targets"])
        assert sum(record["sum"].get("ooms", 0) for record in steps) == failing.ooms
        assert sum(record.get("odb/ooms", 0.0) for record in failing.logs) == failing.ooms
        assert max(record.get("odb/parts", 0.0) for record in failing.logs) > 1
    resumed = trainers.train(trainer, name="resumed", resume=4, records=True, **options)
    assert torch.equal(resumed.weights, failing.weights)
    assert trainers.Job(name="resumed", **options).entries() == entries[4:]
    check_ledger(folder / "ledger", SIZE, attempts=2)


@OUT_OF_MEMORY
@FAILURES_OF_EACH
def test_a_sample_that_does_not_fit_alone_is_an_error_or_left_out(trainer, tmp_path):
    options = {"folder": tmp_path, "records": True, "epochs": 1, "fails_above": 20}
    with pytest.raises(StepMemoryError, match=r"rank 0: a sample \(key \d+\) with 2\d"):
        trainers.train(trainer, on_oom="split", **options | {"folder": tmp_path / "split"})
    trainers.train(trainer, on_oom="skip", **options)
    entries = trainers.Job(**options, on_oom="skip").entries()
    texts = [lm.sample_of(index) for index in range(SIZE)]
    long = {text["id"] for text in texts if len(text["input_ids"]) > 20}
    skipped = {*range(SIZE)} - {index for entry in entries for index in lm.ids_of([entry])}
    assert {index for index in long if lm.targets_of(texts[index]["labels"])} <= skipped <= long
    assert lm.check_steps([entries], SIZE, skipped) < 1e-12
    report = audit(tmp_path / "ledger", SIZE)
    assert report.ok and f"{len(skipped)} skipped (out of memory)" in str(report)


# --- ranks ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the run (continues|ends) after:UserWarning")
@FAILURES_OF_EACH
def test_ranks_train_exactly_and_go_on_after_a_kill_on_any_number_of_ranks(trainer, tmp_path):
    size, few = 37, tmp_path / "few"
    options = {"folder": tmp_path / "run", "size": size, "accumulate": 2, "epochs": 2}
    filled = {"folder": few, "size": 5, "token_budget": 4, "epochs": 1}
    with trainers.jobs_on_ranks(trainer, 2, {**options, "name": "whole"}, filled) as job:
        job.finish(200)
    expected = [trainers.Job(name="whole", **options).entries(rank) for rank in range(2)]
    assert lm.check_steps(expected, size) < 1e-12
    entries = [trainers.Job(**filled).entries(rank) for rank in range(2)]
    assert lm.check_steps(entries, 5) < 1e-12
    assert any(any(entry["fillers"]) for rank in entries for entry in rank)

    options["records"] = True
    with trainers.jobs_on_ranks(
        trainer, 2, {**options, "name": "killed", "save_every": 2, "kill_at": 4}
    ) as job:
        codes = [code for code, *_ in job.results(200)]
        assert -signal.SIGKILL in codes and 0 not in codes
    for world_size in (2, 3, 1):
        folder = tmp_path / f"on-{world_size}"
        shutil.copytree(tmp_path / "run", folder)
        resumed = {**options, "folder": folder, "name": "on", "resume": 2}
        if world_size == 1:
            trainers.train(trainer, **resumed)
        else:
            with trainers.jobs_on_ranks(trainer, world_size, resumed) as job:
                job.finish(200)
        later = [trainers.Job(**resumed).entries(rank) for rank in range(world_size)]
        if world_size == 2:
            assert later == [entries[2:] for entries in expected]
        report = check_ledger(folder / "ledger", size, attempts=2 if world_size == 2 else None)
        changed = (2, world_size) if world_size != 2 else (2,)
        assert report.epochs[0].world_sizes == changed
        first_steps = [expected[rank][:2] for rank in range(2)]
        done = [ids for step in zip(*first_steps, strict=True) for ids in lm.ids_of(step)]
        done += [
            ids
            for step in zip(*later, strict=True)
            if step[0]["epoch"] == 0
            for ids in lm.ids_of(step)
        ]
        assert sorted(done) == [*range(size)]
        monitored = read_run(folder / "monitor").epochs
        if world_size == 2 or trainer not in trainers.COUNTS_ANEW:
            assert [epoch["sum"]["samples"] for epoch in monitored] == [size] * 2
