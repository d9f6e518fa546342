"""A small model of two tasks of unlike size, and loaders whose samples have them."""

import torch
from aligned_ranks import on_ranks
from torch import nn

from odb_nodes import Observation, ODBDataLoader, pop_step_info
from odb_nodes.training.tasks import GradNorm, PCGrad, TaskWeights

NEAR_FAR = ("near", "far")
NEAR_FAR_WEIGHTS = {"near": 1.5, "far": 0.5}


def regression(count=240):
    """Two tasks on shared features; the targets of one are ten times as large."""
    rng = torch.Generator().manual_seed(0)
    rows = []
    for number in range(count):
        task = number % 2
        values = torch.randn(4, generator=rng, dtype=torch.float64)
        target = values.sum() * (1.0, 10.0)[task]
        rows.append({"input_ids": [1] * (number % 5 + 1), "x": values, "y": target, "task": task})
    return rows


def observe_row(row):
    return Observation(len(row["input_ids"]), 1, task=NEAR_FAR[row["task"]])


def collate(rows):
    return {
        "x": torch.stack([row["x"] for row in rows]),
        "y": torch.stack([row["y"] for row in rows]),
        "task": torch.tensor([row["task"] for row in rows]),
    }


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 8, dtype=torch.float64)
        self.heads = nn.ModuleList(nn.Linear(8, 1, dtype=torch.float64) for _ in NEAR_FAR)

    def losses(self, batch):
        hidden = torch.tanh(self.trunk(batch["x"]))
        predictions = torch.stack([head(hidden)[:, 0] for head in self.heads], 1)
        chosen = predictions.gather(1, batch["task"][:, None])[:, 0]
        return (chosen - batch["y"]).abs()


def loader_of(data, **options):
    tasks = {"observe": observe_row, "tasks": NEAR_FAR, "collate_fn": collate}
    return ODBDataLoader(data, token_budget=40, window=32, **tasks, **options)


def joint_batches(data, ranks, accumulate=1):
    """The batches of all ranks and micro-steps of each optimizer step, put together."""

    def run(exchange):
        shard, options = data[exchange.rank :: ranks], {"sharded": True, "shuffle": False}
        return [*loader_of(shard, accumulate=accumulate, process_group=exchange, **options)]

    of_ranks = on_ranks(ranks, run)
    for start in range(0, len(of_ranks[0]), accumulate):
        batches = [batch for of_rank in of_ranks for batch in of_rank[start : start + accumulate]]
        full = [batch for batch in batches if not pop_step_info(batch).is_filler]
        yield {key: torch.cat([batch[key] for batch in full]) for key in ("x", "y", "task")}


def balanced(loader, tasks=NEAR_FAR, spoil=lambda number: 1.0, **options):
    """A run with `GradNorm`, which yields it and its weights after each optimizer step."""
    model, weights = Model(), TaskWeights(dict.fromkeys(tasks, 1.0))
    balance = GradNorm(weights, model.trunk.parameters(), **options)
    yield balance, dict(weights)
    for number, batch in enumerate(loader):
        info = pop_step_info(batch)
        losses = model.losses(batch) * spoil(number)
        balance.observe(losses, info)
        if info.ends_optimizer_step:
            balance.step()
            yield balance, dict(weights)


def flat(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients])


def projected_gradients(loader, tasks=NEAR_FAR):
    """The gradient of each optimizer step of an epoch, with projection and without."""
    weights = TaskWeights({task: NEAR_FAR_WEIGHTS[task] for task in tasks})
    model, gradients = Model(), []
    conflicts = PCGrad(weights, model.parameters())
    for batch in loader:
        info = pop_step_info(batch)
        losses = model.losses(batch)
        conflicts.backward(losses, info)
        weights.loss(losses, info).backward()
        if info.ends_optimizer_step:
            plain = flat(weight.grad for weight in model.parameters())
            model.zero_grad()
            conflicts.step()
            gradients.append((flat(weight.grad for weight in model.parameters()), plain))
            model.zero_grad()
    return gradients
