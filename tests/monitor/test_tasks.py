"""Tasks are shown as sources are: their samples, tokens, losses and weights, in every form."""

from collections import Counter

import pytest
import torch
from monitors import DATA

from odb_nodes import Observation, ODBDataLoader, pop_step_info
from odb_nodes.monitor import Monitor, RowLosses, read_run, report

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for batches")

LOSSES = {"long": 3.0, "short": 1.0, "web": 2.0}


def task_of(sample):
    length = len(sample["input_ids"])
    return "long" if length > 20 else "short" if length > 10 else "web"


def observe(sample):
    """Short samples have the task "web", which is a source as well, of samples of all tasks."""
    return Observation(len(sample["input_ids"]), task=task_of(sample))


def losses_of(info, batch):
    targets = batch["attention_mask"].sum(1) - 1
    return RowLosses(targets * torch.tensor([LOSSES[task] for task in info.row_tasks]), targets)


def by_task(info, losses):
    found = {}
    for task, total, targets in zip(info.row_tasks, *losses, strict=True):
        before = found.get(task, (0.0, 0))
        found[task] = before[0] + total, before[1] + int(targets)
    return found


@pytest.fixture(scope="module", params=["by task", "by row"])
def run(request, tmp_path_factory):
    """A run of two steps a record, and how its losses were told."""
    folder = tmp_path_factory.mktemp("run")
    loader = ODBDataLoader(DATA, token_budget=96, window=12, observe=observe)
    with Monitor(folder, every=2) as monitor:
        for number, batch in enumerate(monitor.watch(loader)):
            info = pop_step_info(batch)
            losses = losses_of(info, batch)
            how = {"loss_by_source": by_task(info, losses)}
            if request.param == "by row":
                how = {"row_losses": losses}
            monitor.step(batch, info, lr=0.5, values={"weight/long": float(number)}, **how)
    return folder


def test_a_task_has_its_samples_tokens_and_loss_in_records_and_reports(run):
    samples, tokens = Counter(), Counter()
    for row in (row for rows in DATA.values() for row in rows):
        samples[task_of(row)] += 1
        tokens[task_of(row)] += len(row["input_ids"])
    (epoch,) = read_run(run).epochs
    for counts, kind in ((samples, "samples"), (tokens, "tokens")):
        told = {name: one for name, one in epoch["sum"].items() if name.startswith(f"{kind}/")}
        assert told == {f"{kind}/{name}": one for name, one in counts.items()}
    for name, loss in LOSSES.items():
        assert epoch["mean"][f"loss/{name}"] == pytest.approx(loss)
        assert epoch["sum"][f"targets/{name}"] == tokens[name] - samples[name]
    assert "loss/code" not in epoch["mean"]
    for record in read_run(run).steps:
        assert record["last"]["weight/long"] == record["step"] - 1
    found = report(run)
    sources = found.runs[0].sources()
    assert {*sources} == {*LOSSES} and sources["long"]["loss"] == pytest.approx(3.0)
    assert sum(one["share of tokens"] for one in sources.values()) == pytest.approx(1.0)
    (line,) = [line for line in str(found).splitlines() if line.startswith("| long ")]
    assert line.split()[3] == str(sources["long"]["samples"])
    drawn = {one.layout.title.text: [curve.name for curve in one.data] for one in found.figures()}
    assert drawn["Loss by source or task, nats per supervised token"] == ["long", "short", "web"]
    assert drawn["weight"] == ["long"]


def test_a_task_without_a_sample_in_an_epoch_is_counted_and_warned_of(tmp_path):
    tasks = ["long", "short", "web", "none"]
    loader = ODBDataLoader(DATA, token_budget=96, window=12, observe=observe, tasks=tasks)
    with pytest.warns(UserWarning) as caught, Monitor(tmp_path, every=2) as monitor:
        for _ in range(2):
            for batch in monitor.watch(loader):
                monitor.step(batch, pop_step_info(batch))
    assert sum("'none' had no sample in epoch 0" in str(one.message) for one in caught) == 1
    assert not any("'web' had no sample" in str(one.message) for one in caught)
    for epoch in read_run(tmp_path).epochs:
        assert epoch["sum"]["samples/none"] == 0 < epoch["sum"]["samples/web"]
