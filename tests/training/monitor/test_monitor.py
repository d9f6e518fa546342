"""The values in the records of a monitor are exact."""

import json
import re
import sys
from functools import partial

import numpy as np
import pytest
import torch
from monitors import (
    DATA,
    check_steps_follow,
    composed_loader,
    loader_of,
    loss_of,
    steps_of,
    train,
)
from torch.utils.data import IterableDataset

import odb_nodes
from odb_nodes import JsonlSource, ODBDataLoader, TokenBudget, pop_step_info
from odb_nodes._support import progress
from odb_nodes.core.planning import StepTime
from odb_nodes.training.monitor import Monitor, StepMeter, read_run, summarize

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for batches")


def mean_loss(infos):
    """Over their targets alone: a filler has a NaN."""
    infos = [info for info in infos if info.local_targets]
    total = sum(float(loss_of(info)) * info.local_targets for info in infos)
    return pytest.approx(total / sum(info.local_targets for info in infos), rel=1e-14)


@pytest.mark.filterwarnings("ignore:a batch has .* labels:UserWarning")
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_padding_is_a_share_of_what_observe_counts(tmp_path, layout):
    """Twice the tokens under twice the budget are the same batches, with as much padding."""

    def shares(times):
        budget = TokenBudget(96 * times, layout=layout)
        options = {
            "token_budget": budget,
            "observe": lambda sample: times * len(sample["input_ids"]),
        }
        with Monitor(tmp_path / f"{times}", every=1) as monitor:
            train(monitor, loader_of(**options))
        run = read_run(tmp_path / f"{times}")
        return [record["mean"]["padding_share"] for record in [*run.steps, *run.epochs]]

    doubled = shares(2)
    assert doubled == shares(1)
    assert max(doubled) > 0 or layout == "packed"


def test_the_records_add_up_to_the_data(tmp_path):
    infos, shapes = [], {}
    with Monitor(tmp_path, every=2) as monitor:
        for batch in monitor.watch(loader_of()):
            infos.append(pop_step_info(batch))
            shape = "{}x{}".format(*batch["input_ids"].shape)
            shapes[shape] = shapes.get(shape, 0) + 1
            monitor.step(batch, infos[-1], loss=loss_of(infos[-1]), lr=0.1)
    run = read_run(tmp_path)
    (epoch,) = run.epochs
    check_steps_follow([{"step": 0}, *run.steps])
    assert (epoch["first_step"], epoch["step"]) == (1, run.steps[-1]["step"])
    assert all(record["step"] - record["first_step"] == 1 for record in run.steps[:-1])
    tokens = {name: sum(len(sample["input_ids"]) for sample in rows) for name, rows in DATA.items()}
    sums = epoch["sum"]
    assert sums["samples"] == 100
    assert sums["tokens"] == sum(tokens.values())
    assert {name: sums[f"tokens/{name}"] for name in tokens} == tokens
    assert {name: sums[f"samples/{name}"] for name in DATA} == {"web": 60, "code": 40}
    assert sums["padded_tokens"] == sum(info.local_padded_tokens for info in infos)
    assert epoch["peak"]["padded_tokens"] == max(info.local_padded_tokens for info in infos)
    assert epoch["mean"]["padding_share"] == 1 - sums["tokens"] / sums["padded_tokens"]
    assert sums["targets"] == sum(info.local_targets for info in infos)
    assert epoch["mean"]["loss"] == mean_loss(infos)
    for number, record in enumerate(run.steps):
        assert record["mean"]["loss"] == mean_loss(infos[4 * number : 4 * number + 4])
    for name in ("samples", "tokens", "padded_tokens", "targets", "optimizer_steps"):
        assert sum(record["sum"][name] for record in run.steps) == sums[name]
    for record in run.steps:
        for shape, number in record["shapes"].items():
            shapes[shape] -= number
    assert not any(shapes.values())
    assert epoch["seconds"] == run.steps[-1]["seconds"] >= sums["data_wait_s"]


def test_values_of_steps_may_be_numbers_tensors_and_of_numpy(tmp_path):
    weight = torch.nn.Parameter(torch.tensor([0.5]))
    values = {"tensor": weight * 2, "numpy": np.float32(0.25), "whole": np.int64(3)}
    first, second, third, *_ = steps_of(loader_of(accumulate=1))
    with pytest.warns(UserWarning, match="loss is inf"), Monitor(tmp_path, every=2) as monitor:
        by_source = {"web": (torch.tensor(6.0), 3), "code": (float("nan"), 0)}
        norm = torch.tensor(3.0)
        monitor.step(*first, loss_by_source=by_source, grad_norm=norm, lr=0.2, wait_s=0.5)
        by_source = {"web": (np.float32(2), np.int64(1))}
        options = {"grad_norm": 1.0, "lr": torch.tensor(0.5), "values": values, "ooms": np.int64(1)}
        monitor.step(*second, loss_by_source=by_source, wait_s=0.5, **options)
        monitor.step(*third, loss=float("inf"), grad_norm=float("nan"))
    earlier, later = read_run(tmp_path).steps
    assert (earlier["mean"]["loss/web"], earlier["sum"]["targets/web"]) == (2.0, 4)
    assert "loss/code" not in earlier["mean"] and "loss" not in earlier["mean"]
    assert (earlier["mean"]["grad_norm"], earlier["peak"]["grad_norm"]) == (2.0, 3.0)
    last = {"tensor": 1.0, "numpy": 0.25, "whole": 3.0}
    assert earlier["last"] == {"grad_norm": 1.0, "lr": 0.5} | last
    assert (earlier["sum"]["ooms"], earlier["sum"]["data_wait_s"]) == (1, 1.0)
    # What is not finite is null, which JSON has.
    for line in (tmp_path / "monitor.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    assert later["mean"]["loss"] is None
    assert later["last"]["grad_norm"] is None and later["peak"]["grad_norm"] is None


def test_a_device_is_not_waited_for_before_a_record_is_written(tmp_path):
    unreadable = torch.empty((), device="meta")  # to read it is an error
    monitor = Monitor(tmp_path, every=3)
    first, second, third, *_ = steps_of(loader_of(accumulate=1))
    monitor.step(*first, loss=unreadable, grad_norm=unreadable)
    monitor.step(*second, loss=unreadable, grad_norm=unreadable)
    with pytest.raises((NotImplementedError, RuntimeError)):
        monitor.step(*third, loss=unreadable, grad_norm=unreadable)


REFUSALS = [
    ({"values": {"a": None}}, TypeError, r"`values\['a'\]` must .* is None"),
    ({"values": {"a": torch.ones(2)}}, ValueError, r"`values\['a'\]` must be one"),
    ({"values": {1: 1.0}}, TypeError, "`values` must .* has 1"),
    ({"values": [1.0]}, TypeError, "`values` must be a `Mapping`"),
    ({"values": {"lr": 1.0}}, ValueError, r"names that records use .* has \['lr'\]"),
    ({"lr": "x"}, TypeError, "`lr` must be a number"),
    ({"loss": "x"}, TypeError, "`loss` must be a number"),
    ({"loss": torch.zeros(3)}, ValueError, r"`loss` must be .* \(3,\)"),
    ({"grad_norm": torch.ones(2)}, ValueError, "`grad_norm` must be one"),
    ({"loss": 1.0, "loss_weight": -1}, ValueError, "`loss_weight` must be in .0, "),
    ({"loss_by_source": [("a", 1.0, 1)]}, TypeError, "`loss_by_source` must be a `Mapping`"),
    ({"loss_by_source": {"a": 1}}, TypeError, r"\['a'\]` must be a pair"),
    ({"loss_by_source": {"a": ("x", 1)}}, TypeError, r"\['a'\]\[0\]` must be a"),
    ({"loss_by_source": {"a": (1.0, "x")}}, TypeError, r"\['a'\]\[1\]` must be a"),
    ({"loss_by_source": {"a": (1.0, -1)}}, ValueError, r"\['a'\]\[1\]` must be in"),
    ({"ooms": -1}, ValueError, "`ooms` must be .* -1"),
    ({"ooms": True}, TypeError, "`ooms` must be .* True"),
    ({"wait_s": float("nan")}, ValueError, "`wait_s` must be .* nan"),
]


@pytest.mark.parametrize(("options", "error", "match"), REFUSALS)
def test_bad_arguments_of_step_are_refused_and_not_counted(tmp_path, options, error, match):
    batch = next(iter(loader_of()))
    info = pop_step_info(batch)
    monitor = Monitor(tmp_path, every=100)
    with pytest.raises(error, match=match):
        monitor.step(batch, info, **options)
    monitor.step(batch, info, loss=1.0)
    monitor.close()
    monitor.close()
    (record,) = read_run(tmp_path).steps
    assert record["sum"]["micro_steps"] == 1 and record["mean"]["loss"] == 1.0
    with pytest.raises(ValueError, match="closed"):
        monitor.step(batch, info)
    monitor.reset()
    monitor.step(batch, info)


ARGUMENTS = [
    ({"every": 0}, "`every`"),
    ({"timeout_s": 0}, "`timeout_s`"),
    ({"progress": None}, "`progress`"),
    ({"config": [("lr", 0.1)]}, "`config` must be a `Mapping`"),
    ({"config": {1: 0.1}}, "`config` must .* has 1"),
    ({"config": {"lr": float("nan")}}, r"`config\['lr'\]` must be data"),
    ({"folder": __file__}, "must be a folder, but .* is a file"),
    ({"writers": "jsonl"}, "`writers`"),
    ({"writers": ("wandb",)}, "`writers`"),
    ({"writers": (dict,)}, "`writers`"),
]


@pytest.mark.parametrize(("options", "match"), ARGUMENTS)
def test_bad_arguments_of_the_monitor_are_refused(tmp_path, options, match):
    with pytest.raises((TypeError, ValueError), match=match):
        Monitor(**{"folder": tmp_path} | options)


def test_an_interrupted_run_keeps_its_earlier_records(tmp_path):
    loader = loader_of()
    with pytest.raises(KeyboardInterrupt), Monitor(tmp_path / "error", every=2) as monitor:
        train(monitor, loader, steps=3)
        raise KeyboardInterrupt
    assert [record["step"] for record in read_run(tmp_path / "error").steps] == [2]
    with Monitor(tmp_path / "left") as monitor:
        train(monitor, loader, steps=2)
        monitor.attach(loader)
        for step in steps_of(loader):
            monitor.step(*step)
    first, second = read_run(tmp_path / "left").epochs
    assert 0 < first["sum"]["samples"] < 100 == second["sum"]["samples"]


def test_an_attempt_records_the_settings_of_the_run(tmp_path):
    config = {
        "lr": 0.1,
        "data": tmp_path,
        "layers": (1, 2),
        "collate": loss_of,
        "o": [object(), partial(loss_of)],
    }
    budget = TokenBudget(96, layout="packed")
    weights = {"web": 1.0, "code": 3.0}
    loader = loader_of(
        token_budget=budget, seed=3, weights=weights, exclude={"web": [1]}, observe=observe
    )
    with Monitor(tmp_path, config=config) as monitor:
        config["lr"] = 0.2
        train(monitor, loader, steps=2)
    (attempt,) = read_run(tmp_path).attempts
    texts = {"data": str(tmp_path), "collate": "monitors.loss_of"}  # no addresses
    objects = ["<object object>", "functools.partial(<function loss_of>)"]
    assert attempt["config"] == {"lr": 0.1, "layers": [1, 2], "o": objects, **texts}
    assert attempt["loader"] == {
        "token_budget": {"tokens": 96, "layout": "packed"},
        **{"window": 12, "seed": 3, "accumulate": 2},
        **{"observe": f"{__name__}.observe", "weights": weights},
    }
    assert attempt["versions"]["torch"] == torch.__version__
    assert attempt["versions"]["odb_nodes"] == odb_nodes.__version__
    options = {"token_budget": 96, "window": 12, "sampler": [*range(60)] * 2}
    with Monitor(tmp_path / "long") as monitor:
        train(monitor, ODBDataLoader(DATA["web"], **options), steps=2)
    (attempt,) = read_run(tmp_path / "long").attempts
    assert attempt["loader"] == options | {"seed": 0, "accumulate": 1, "sampler": "120 items"}
    with Monitor(tmp_path / "composed") as monitor:
        train(monitor, composed_loader())
    assert read_run(tmp_path / "composed").attempts[0]["loader"] == {}


def observe(sample):
    return len(sample["input_ids"])


def test_a_bar_shows_the_samples_and_the_rates_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Monitor(tmp_path, every=1) as monitor:
        train(monitor, loader_of())
    shown = capsys.readouterr().err
    assert "epoch 0: 100%" in shown and "100/100" in shown and "padding=" in shown
    with Monitor(tmp_path / "other", every=1, progress=False) as monitor:
        train(monitor, loader_of())
    assert "100/100" not in capsys.readouterr().err


@pytest.mark.parametrize("is_watched", [True, False])
def test_without_a_terminal_progress_is_logged(tmp_path, monkeypatch, caplog, is_watched):
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    monitor, loader = Monitor(tmp_path, every=2), loader_of(accumulate=1)
    for batch in monitor.watch(loader) if is_watched else loader:
        step = batch, pop_step_info(batch)
        monitor.step(*step, loss=2.5)
        if step[1].step == 4:
            break
    first, _, third, *_ = [
        message for message in caplog.messages if message.startswith("optimizer step")
    ]
    samples = r", \d+ of 100 samples" if is_watched else ""
    assert re.fullmatch(f"optimizer steps: 1 after 0 s; epoch 0{samples}", first)
    figures = r", loss 2.5, tokens/s [\d,]+, padding [\d.]+%, waiting \d+%"
    assert re.fullmatch(f"optimizer steps: 3 after 0 s; epoch 0{samples}{figures}", third)
    caplog.clear()
    train(Monitor(tmp_path / "off", progress=False), loader_of())
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    Monitor(tmp_path / "rank 1", every=100).step(*step)
    assert not [message for message in caplog.messages if message.startswith("optimizer step")]


class Lines(IterableDataset):
    def __iter__(self):
        return iter(DATA["web"])


def loader_without_length(kind, folder):
    """A loader that does not know how many samples an epoch has."""
    if kind == "composed":
        return composed_loader()
    data = Lines() if kind == "dataset" else JsonlSource(folder / "web.jsonl", 0, 1)
    return ODBDataLoader(data, token_budget=96, window=12)


@pytest.mark.parametrize("kind", ["composed", "dataset", "lines"])
def test_a_loader_that_does_not_know_its_length_is_watched(tmp_path, kind):
    (tmp_path / "web.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DATA["web"]))
    with Monitor(tmp_path / "run", every=2) as monitor:
        train(monitor, loader := loader_without_length(kind, tmp_path))
    if kind == "lines":
        loader.close()
    (epoch,) = read_run(tmp_path / "run").epochs
    assert epoch["sum"]["samples"] == (100 if kind == "composed" else 60)


@pytest.mark.parametrize(
    ("layout", "positions"), [("padded", None), ("packed", None), ("packed", (4, 1, -1))]
)
def test_a_record_has_the_squares_of_the_lengths_that_attend(tmp_path, layout, positions):
    """Models of images have positions (4, 1, T)."""
    data, expected = DATA["web"], 0
    loader = ODBDataLoader(data, token_budget=TokenBudget(96, layout=layout), window=12)
    with Monitor(tmp_path, every=100) as monitor:
        for batch in monitor.watch(loader):
            info = pop_step_info(batch)
            lengths = [len(data[key]["input_ids"]) for key in info.keys]
            rows = lengths if layout == "packed" else [max(lengths)] * len(lengths)
            expected += sum(length * length for length in rows)
            if positions is not None:
                batch["position_ids"] = batch["position_ids"].expand(positions)
            monitor.step(batch, info)
    (record,) = read_run(tmp_path).steps
    assert record["sum"]["slowest_squares"] == expected
    assert record["sum"]["slowest_tokens"] == record["sum"]["padded_tokens"]


def test_a_function_as_step_time_records_no_time_balance(tmp_path):
    for step_time in (None, StepTime(squares=0.5), len):
        folder = tmp_path / str(step_time)
        loader = ODBDataLoader(DATA["web"], token_budget=96, window=12, step_time=step_time)
        with Monitor(folder) as monitor:
            train(monitor, loader, steps=2)
        run = read_run(folder)
        assert ("time_balance" in run.steps[0]["mean"]) == (step_time is not len)
        assert (run.attempts[0]["step_time"] is None) == (step_time is len)


# --- metrics --------------------------------------------------------------------------------------


def test_the_metrics_of_two_ranks_by_hand():
    rows = torch.tensor(
        [[[2, 10, 10, 0, 0], [2, 8, 10, 0, 10**6]], [[1, 20, 20, 0, 0], [0, 0, 5, 1, 3 * 10**6]]]
    )
    metrics = summarize(rows, 2, 10.0)
    assert metrics["odb/rank_balance"] == pytest.approx(45 / (2 * 30))
    assert metrics["odb/padding_share"] == pytest.approx(1 - 38 / 45)
    assert metrics["odb/filler_share"] == 0.25
    assert (metrics["odb/real_tokens_per_step"], metrics["odb/samples_per_step"]) == (19.0, 2.5)
    assert metrics["odb/real_tokens_per_s"] == 3.8
    assert metrics["odb/data_wait_share"] == pytest.approx(4 / 20)


def test_a_meter_counts_batches_and_the_wait_for_each():
    dataset = [{"input_ids": [1] * (n % 7 + 2)} for n in range(50)]
    meter, padded, batches = StepMeter(), 0, 0
    for batch in ODBDataLoader(dataset, token_budget=32, window=8, accumulate=2):
        meter.add(batch, pop_step_info(batch), wait_s=0.25)
        padded, batches = padded + batch["input_ids"].numel(), batches + 1
    rows, steps, _ = meter.take()
    metrics, real = (
        summarize(rows[None], steps, 10.0),
        sum(len(sample["input_ids"]) for sample in dataset),
    )
    assert metrics["odb/padding_share"] == pytest.approx(1 - real / padded)
    assert metrics["odb/samples_per_step"] == 50 / steps
    assert metrics["odb/data_wait_share"] == pytest.approx(0.25 * batches / 10)
    assert meter.take()[0].shape == (0, 5)


def test_nothing_counted():
    assert summarize(torch.zeros(2, 0, 5), 0, 0.0)["odb/padding_share"] == 0


# --- the memory of a GPU is read where a record is written, and nothing of it is reset ------------


def test_memory_is_in_the_records(tmp_path, monkeypatch):
    reads = []

    def statistics():
        reads.append(len(reads))
        return {
            "allocated_bytes.all.current": 100 + len(reads),
            "allocated_bytes.all.peak": 1000 - len(reads),
            "reserved_bytes.all.current": 300,
            "reserved_bytes.all.peak": 3000,
        }

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", statistics)
    with Monitor(tmp_path, every=4) as monitor:
        train(monitor, loader_of(), steps=8)
    earlier, later = read_run(tmp_path).steps
    assert len(reads) == 2
    assert earlier["last"]["memory_allocated_bytes"] == 101
    assert later["last"]["memory_allocated_bytes"] == 102
    assert earlier["peak"]["memory_allocated_bytes"] == 999
    assert earlier["peak"]["memory_reserved_bytes"] == 3000


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_a_real_gpu(tmp_path):
    tensor = torch.zeros(2**20, device="cuda")
    with Monitor(tmp_path, every=1) as monitor:
        train(monitor, loader_of(), steps=1)
    (record,) = read_run(tmp_path).steps
    assert record["last"]["memory_allocated_bytes"] >= tensor.nbytes
    assert record["peak"]["memory_reserved_bytes"] >= record["peak"]["memory_allocated_bytes"]
