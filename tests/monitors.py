"""Small runs under a `Monitor`, and what their records say that does not depend on the clock."""

import torch
from torchdata.nodes import Mapper

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    ODBDataLoader,
    ShardedSampler,
    WindowBucketer,
    pop_step_info,
)
from odb_nodes.training.monitor import read_run

DATA = {
    "web": [{"input_ids": [1] * (n % 20 + 2)} for n in range(60)],
    "code": [{"input_ids": [2] * (n % 31 + 2)} for n in range(40)],
}


def loader_of(**options):
    return ODBDataLoader(DATA, **{"token_budget": 96, "window": 12, "accumulate": 2, **options})


def composed_loader():
    """A loader of nodes without a `RankAligner`, whose epochs end where it has no more."""
    items = [sample for rows in DATA.values() for sample in rows]
    node = LengthObserver(Mapper(ShardedSampler(items), items.__getitem__))
    return Loader(GroupCollator(WindowBucketer(node, budget=96, window=12)))


def steps_of(loader):
    """The batch and the `StepInfo` of each step, as `Monitor.step` takes them."""
    return [(batch, pop_step_info(batch)) for batch in loader]


def loss_of(info):
    """A loss that tells each step from every other; NaN where there are no targets."""
    return torch.tensor(1.0 + info.epoch + info.step / 64 if info.local_targets else float("nan"))


def train(monitor, loader, epochs=1, after=None, steps=None):
    """Take the steps of a run; `after(step)` is called after each optimizer step."""
    step = 0
    for _ in range(epochs):
        for batch in monitor.watch(loader):
            info = pop_step_info(batch)
            ends = info.ends_optimizer_step
            norm = {"grad_norm": torch.tensor(float(info.step)), "lr": 0.1} if ends else {}
            monitor.step(batch, info, loss=loss_of(info), **norm)
            step += ends
            if ends and after is not None:
                after(step)
            if step == steps:
                return


def without_times(record):
    """A record without what depends on the clock."""
    kept = {name: value for name, value in record.items() if name not in ("seconds", "time_s")}
    return {
        name: {
            key: number
            for key, number in value.items()
            if not (key.endswith(("_s", "seconds")) or "wait" in key)
        }
        if isinstance(value, dict)
        else value
        for name, value in kept.items()
    }


def records_of(folder):
    """The records of steps and of epochs of a run that count, without times."""
    run = read_run(folder)
    return list(map(without_times, run.steps)), list(map(without_times, run.epochs))


def check_steps_follow(records):
    """No step is in two records, and none in no record."""
    assert [record["first_step"] for record in records[1:]] == [
        record["step"] + 1 for record in records[:-1]
    ]
