"""What a monitor writes: exact values, no step twice and none missing, on one rank or several."""

import json
import os
import re
import subprocess
import sys
import warnings

import pytest
import torch
from aligned_ranks import on_ranks
from monitors import DATA, loader_of, loss_of, records_of, train

from odb_nodes import ODBDataLoader, PeerError, StateError, pop_step_info
from odb_nodes.alignment.exchange.in_process import InProcessHub
from odb_nodes.monitor import Monitor, read_run, report
from odb_nodes.monitor.notices import Notices
from odb_nodes.monitor.window import Share, Totals

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for batches", "ignore:.*are padding")


def check_steps_follow(records):
    """No step is in two records, and none in no record."""
    assert [one["first_step"] for one in records[1:]] == [one["step"] + 1 for one in records[:-1]]


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 4])
def test_the_records_add_up_to_the_data(tmp_path, every):
    infos, shapes = [], {}
    with Monitor(tmp_path, every=every) as monitor:
        for batch in monitor.watch(loader_of()):
            infos.append(pop_step_info(batch))
            shape = "{}x{}".format(*batch["input_ids"].shape)
            shapes[shape] = shapes.get(shape, 0) + 1
            monitor.step(batch, infos[-1], loss=loss_of(infos[-1]), lr=0.1)
    run = read_run(tmp_path)
    (epoch,) = run.epochs
    check_steps_follow([{"step": 0}, *run.steps])
    assert (epoch["first_step"], epoch["step"]) == (1, run.steps[-1]["step"])
    assert all(one["step"] - one["first_step"] == every - 1 for one in run.steps[:-1])
    tokens = {name: sum(len(one["input_ids"]) for one in rows) for name, rows in DATA.items()}
    sums = epoch["sum"]
    assert sums["samples"] == 100
    assert sums["tokens"] == sum(tokens.values())
    assert {name: sums[f"tokens/{name}"] for name in tokens} == tokens
    assert {name: sums[f"samples/{name}"] for name in DATA} == {"web": 60, "code": 40}
    assert sums["padded_tokens"] == sum(info.local_padded_tokens for info in infos)
    assert epoch["peak"]["padded_tokens"] == max(info.local_padded_tokens for info in infos)
    assert epoch["mean"]["padding_share"] == 1 - sums["tokens"] / sums["padded_tokens"]
    targets = [info.local_targets for info in infos]
    assert sums["targets"] == sum(targets)
    losses = [float(loss_of(info)) for info in infos]
    mean = sum(map(lambda a, b: a * b, losses, targets)) / sum(targets)
    assert epoch["mean"]["loss"] == pytest.approx(mean, rel=1e-14)
    for name in ("samples", "tokens", "padded_tokens", "targets", "optimizer_steps"):
        assert sum(one["sum"][name] for one in run.steps) == sums[name]
    for one in run.steps:
        for shape, number in one["shapes"].items():
            shapes[shape] -= number
    assert not any(shapes.values())
    assert epoch["seconds"] == run.steps[-1]["seconds"] >= sums["data_wait_s"]


def test_the_loss_of_a_record_is_the_mean_over_its_targets_alone(tmp_path):
    with Monitor(tmp_path, every=3) as monitor:
        infos = []
        for batch in monitor.watch(loader_of(accumulate=1)):
            infos.append(pop_step_info(batch))
            monitor.step(batch, infos[-1], loss=loss_of(infos[-1]))
    for number, one in enumerate(read_run(tmp_path).steps):
        part = infos[3 * number : 3 * number + 3]
        mean = sum(float(loss_of(i)) * i.local_targets for i in part)
        assert one["mean"]["loss"] == pytest.approx(
            mean / sum(i.local_targets for i in part), rel=1e-14
        )


def test_the_loss_by_source_the_gradient_and_the_learning_rate(tmp_path):
    loader = loader_of(accumulate=1)
    with Monitor(tmp_path, every=2) as monitor:
        for number, batch in enumerate(loader):
            info = pop_step_info(batch)
            by_source = {"web": (torch.tensor(6.0), 3), "code": (float("nan"), 0)}
            monitor.step(
                batch,
                info,
                loss_by_source=by_source,
                grad_norm=torch.tensor([3.0, 1.0][number % 2]),
                lr=number / 10,
                ooms=number == 1,
                wait_s=0.5,
            )
            if number == 1:
                break
    (one,) = read_run(tmp_path).steps
    assert one["mean"]["loss/web"] == 2.0
    assert "loss/code" not in one["mean"] and "loss" not in one["mean"]
    assert one["mean"]["grad_norm"] == 2.0
    assert one["peak"]["grad_norm"] == 3.0
    assert one["last"] == {"grad_norm": 1.0, "lr": 0.1}
    assert one["sum"]["ooms"] == 1
    assert one["sum"]["data_wait_s"] == 1.0


def test_what_is_not_finite_is_null(tmp_path):
    with Monitor(tmp_path, every=1) as monitor:
        for batch in loader_of():
            monitor.step(batch, pop_step_info(batch), loss=float("inf"), grad_norm=float("nan"))
            if read_run_or_none(tmp_path):
                break
    text = (tmp_path / "monitor.jsonl").read_text()
    one = json.loads(text.splitlines()[1], parse_constant=pytest.fail)
    assert one["mean"]["loss"] is None
    assert one["last"]["grad_norm"] is None and one["peak"]["grad_norm"] is None


def read_run_or_none(folder):
    return read_run(folder).steps if (folder / "monitor.jsonl").exists() else None


def test_a_device_is_not_waited_for_before_a_record_is_written(tmp_path):
    unreadable = torch.empty((), device="meta")  # to read it is an error
    monitor, steps = Monitor(tmp_path, every=3), 0
    for batch in loader_of(accumulate=1):
        info = pop_step_info(batch)
        if steps == 2:
            with pytest.raises((NotImplementedError, RuntimeError)):
                monitor.step(batch, info, loss=unreadable, grad_norm=unreadable)
            break
        monitor.step(batch, info, loss=unreadable, grad_norm=unreadable)
        steps += 1


# --- resumed runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3, 100])
def test_a_run_that_is_resumed_at_any_step_writes_what_the_whole_run_writes(tmp_path, every):
    whole, states = Monitor(tmp_path / "whole", every=every), {}
    loader = loader_of()

    def keep(step):
        states[step] = (whole.state_dict(), loader.state_dict())

    train(whole, loader, epochs=2, after=keep)
    whole.close()
    expected = records_of(tmp_path / "whole")
    assert len(expected[1]) == 2
    for step, (state, position) in states.items():
        folder = tmp_path / f"at-{step}"
        first = Monitor(folder, every=every)
        train(first, loader_of(), epochs=2, steps=step + 2)  # it went on after the checkpoint
        first.close()
        resumed, again = Monitor(folder, every=every), loader_of()
        resumed.load_state_dict(state)
        again.load_state_dict(position)
        train(resumed, again, epochs=2 - state["epoch"])
        resumed.close()
        found = records_of(folder)
        check_steps_follow([{"step": 0}, *found[0]])
        assert found == expected, step


def test_the_clock_goes_on_after_a_resume(tmp_path):
    first, loader = Monitor(tmp_path, every=2), loader_of()
    train(first, loader, steps=3)
    state = first.state_dict()
    second = Monitor(tmp_path, every=2)
    second.load_state_dict(state)
    first.close()
    train(second, loader, steps=2)
    one, other = read_run(tmp_path).steps[:2]
    assert other["seconds"] >= one["seconds"] + state["share"]["seconds"]


def test_a_state_that_was_changed_is_refused(tmp_path):
    state = Monitor(tmp_path).state_dict()
    with pytest.raises(StateError, match="damaged"):
        Monitor(tmp_path).load_state_dict({**state, "step": 3})
    with pytest.raises(StateError, match="saved by a Monitor"):
        Monitor(tmp_path).load_state_dict({})


BODY = """
import os, sys, signal
sys.path.insert(0, {tests!r})
from monitors import loader_of, train
from odb_nodes import Checkpoints
from odb_nodes.monitor import Monitor
monitor, loader = Monitor({folder!r} + "/run", every=3), loader_of()
checkpoints = Checkpoints({folder!r} + "/checkpoints", dict(monitor=monitor, loader=loader))
checkpoints.load()
kill_at = int(sys.argv[1])
def after(step):
    at = monitor._at.step
    if at % 4 == 0:
        checkpoints.save(at)
    if at == kill_at:
        os.write(os.open({folder!r} + "/run/monitor.jsonl", os.O_WRONLY | os.O_APPEND), b'{{"kind"')
        os.kill(os.getpid(), signal.SIGKILL)
train(monitor, loader, after=after)
monitor.close()
"""


@pytest.mark.slow
@pytest.mark.workers
def test_a_run_that_is_killed_in_mid_line_goes_on(tmp_path):
    tests = os.path.dirname(os.path.dirname(__file__))
    body = BODY.format(tests=tests, folder=str(tmp_path))
    for kill_at in (7, 9, 0):
        done = subprocess.run([sys.executable, "-c", body, str(kill_at)], timeout=120)
        assert done.returncode == (-9 if kill_at else 0)
    with Monitor(tmp_path / "whole", every=3) as whole:
        train(whole, loader_of())
    assert records_of(tmp_path / "run") == records_of(tmp_path / "whole")
    assert [one["step"] for one in read_run(tmp_path / "run").attempts] == [0, 3, 6]


# --- the file -------------------------------------------------------------------------------------


def test_a_folder_has_one_monitor(tmp_path):
    with Monitor(tmp_path, every=1) as monitor:
        train(monitor, loader_of(), steps=1)
        with pytest.raises(RuntimeError, match="Give each run a folder of its own"):
            train(Monitor(tmp_path, every=1), loader_of(), steps=1)
        train(monitor, loader_of(), steps=1)
    train(Monitor(tmp_path, every=1), loader_of(), steps=1)


def test_a_full_disk_warns_once_and_is_a_gap(tmp_path, monkeypatch):
    write = os.write

    def full(file, data):
        return write(file, data[:10])

    with Monitor(tmp_path, every=1) as monitor:

        def after(step):
            monkeypatch.setattr(os, "write", full if step in (2, 3) else write)

        with pytest.warns(UserWarning, match="cannot be written") as caught:
            train(monitor, loader_of(), steps=6, after=after)
    assert sum("cannot be written" in str(one.message) for one in caught) == 1
    assert [one["step"] for one in read_run(tmp_path).steps] == [1, 2, 5, 6]


def test_a_run_that_begins_anew_hides_the_one_before_and_says_so(tmp_path):
    with Monitor(tmp_path, every=1) as monitor:
        train(monitor, loader_of(), steps=5)
    with pytest.warns(UserWarning, match="begins anew"), Monitor(tmp_path, every=1) as monitor:
        train(monitor, loader_of(), steps=3)
    assert [one["step"] for one in read_run(tmp_path).steps] == [1, 2, 3]


def test_a_closed_monitor_records_nothing_until_it_is_reset(tmp_path):
    monitor = Monitor(tmp_path, every=1)
    monitor.close()
    monitor.close()
    with pytest.raises(ValueError, match="closed"):
        train(monitor, loader_of(), steps=1)
    monitor.reset()
    train(monitor, loader_of(), steps=1)


def test_an_error_in_the_block_loses_the_rest_and_nothing_else(tmp_path):
    with pytest.raises(KeyboardInterrupt), Monitor(tmp_path, every=2) as monitor:
        train(monitor, loader_of(), steps=3)
        raise KeyboardInterrupt
    assert [one["step"] for one in read_run(tmp_path).steps] == [2]


def test_records_of_a_later_version_are_refused(tmp_path):
    (tmp_path / "monitor.jsonl").write_text('{"kind": "attempt", "version": 99, "step": 0}\n')
    with pytest.raises(ValueError, match="version 99"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no `monitor.jsonl`"):
        read_run(tmp_path / "other")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"every": 0}, "`every`"),
        ({"timeout_s": 0}, "`timeout_s`"),
        ({"progress": None}, "`progress`"),
    ],
)
def test_an_argument_that_is_not_valid_is_refused(tmp_path, options, error):
    with pytest.raises((TypeError, ValueError), match=error):
        Monitor(tmp_path, **options)


def test_a_bar_shows_the_samples_and_the_rates_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Monitor(tmp_path, every=1) as monitor:
        train(monitor, loader_of())
    shown = capsys.readouterr().err
    assert "epoch 0: 100%" in shown and "100/100" in shown and "padding=" in shown
    with Monitor(tmp_path / "other", every=1, progress=False) as monitor:
        train(monitor, loader_of())
    assert "100/100" not in capsys.readouterr().err


# --- ranks ----------------------------------------------------------------------------------------


def samples_of(rank):
    return [{"input_ids": [1] * (n % (9 + 7 * rank) + 2)} for n in range(30 + 20 * rank)]


def test_ranks_write_one_file_with_the_mean_over_the_targets_of_all(tmp_path):
    """Two ranks with data of their own, of which one has less, and fills."""
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
                monitor.step(batch, info, loss=loss, ooms=exchange.rank)
        return infos

    both = on_ranks(2, run)
    (epoch,) = read_run(tmp_path).epochs
    assert read_run(tmp_path).attempts[0]["world_size"] == 2
    weighted = sum(
        (float(loss_of(info)) + rank) * info.local_targets
        for rank, infos in enumerate(both)
        for info in infos
        if info.local_targets
    )
    targets = sum(info.local_targets for infos in both for info in infos)
    assert epoch["sum"]["targets"] == targets
    assert epoch["mean"]["loss"] == pytest.approx(weighted / targets, rel=1e-14)
    assert epoch["sum"]["samples"] == 80
    assert epoch["sum"]["ooms"] == epoch["sum"]["optimizer_steps"] == len(both[0])
    padded = [[info.local_padded_tokens for info in infos] for infos in both]
    busiest = sum(map(max, *padded))
    assert epoch["mean"]["rank_balance"] == pytest.approx(sum(map(sum, padded)) / (2 * busiest))


def test_ranks_at_different_steps_are_an_error_on_both(tmp_path):
    infos = []
    for batch in loader_of(accumulate=1):
        infos.append((batch, pop_step_info(batch)))

    def run(exchange):
        monitor = Monitor(tmp_path, every=1 + exchange.rank, process_group=exchange)
        with pytest.raises(StateError, match="`Monitor.every` is 1 on rank 0, 2 on rank 1"):
            for batch, info in infos:
                monitor.step(batch, info)

    on_ranks(2, run)


def test_a_rank_that_does_not_come_is_an_error_and_no_hang(tmp_path):
    batch = next(iter(loader_of(accumulate=1)))
    info = pop_step_info(batch)

    def run(exchange):
        if exchange.rank == 0:
            with pytest.raises(PeerError):
                Monitor(tmp_path, every=1, process_group=exchange).step(batch, info)

    on_ranks(2, run, timeout_s=1.0)


# --- warnings -------------------------------------------------------------------------------------


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


def test_lines_that_are_damaged_are_left_out_and_told(tmp_path):
    with Monitor(tmp_path, every=1) as monitor:
        for batch in loader_of():
            monitor.step(batch, pop_step_info(batch), wait_s=0.0)
    lines = (tmp_path / "monitor.jsonl").read_text().splitlines()
    whole = len(read_run(tmp_path).steps)
    lines[2], lines[3] = "garbage{", '{"kind": "steps"}'
    (tmp_path / "monitor.jsonl").write_text("\n".join([*lines, '{"kind": "st']))
    with pytest.warns(UserWarning, match="2 lines of .* are damaged"):
        assert len(read_run(tmp_path).steps) == whole - 2


def test_a_loss_of_several_numbers_and_a_file_for_a_folder_are_refused(tmp_path):
    batch = next(iter(loader_of()))
    info = pop_step_info(batch)
    with pytest.raises(ValueError, match=r"`loss` must be one number, but has the shape \(3,\)"):
        Monitor(tmp_path).step(batch, info, loss=torch.zeros(3))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="must be a folder, but .* is a file"):
        Monitor(tmp_path / "file")


@pytest.mark.filterwarnings("error", "ignore:.*are padding")
def test_what_is_as_it_should_be_is_not_warned_of(tmp_path):
    with Monitor(tmp_path, every=2) as monitor:
        for batch in loader_of():
            monitor.step(batch, pop_step_info(batch), wait_s=0.0)


def test_a_source_that_runs_dry_is_warned_of_once(tmp_path):
    data = {"big": [{"input_ids": [1] * 8}] * 600, "small": [{"input_ids": [1] * 8}] * 20}
    loader = ODBDataLoader(data, token_budget=64, window=16)
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
