"""Training: speed, padding and held-out loss of one epoch in each way of batching.

All contenders have one loop, one model and one loss, the exact mean over the targets of an
optimizer step of all ranks: what differs is the batches. Fixed batches have room for their longest
sample within the budget, and as many of them make an optimizer step as hold the samples of ours.
The clock has our loader, but neither the planning of others nor the worker process of
online-dynamic-batching.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from comparing.batching import ODB, PACKED, PACKED_PLANS, PADDED, PADDED_PLANS, Plan
from comparing.common import (
    Options,
    Row,
    Table,
    Tables,
    attempts,
    in_ranks,
    isolated,
    rival,
    spread,
)
from comparing.tasks import (
    CONTENDERS,
    FIXED,
    HALVES,
    LHOTSE,
    SCALED,
    TASKS,
    Batch,
    Task,
    lengths_of,
)
from odb_nodes import ODBDataLoader, TokenBudget, pop_step_info
from odb_nodes.integrations.learning_rate import LrScaling

LIMIT_S = 3600.0
WINDOW = 256  # samples that wait to be grouped
POINTS = 8  # evaluations in an epoch
# The order of a run that may end early: task, ranks, seed.
TURNS = (
    ("text", 1, 0),
    ("images and text", 1, 0),
    *(("images and text, short epoch", 1, seed) for seed in range(3)),
    ("encoder-decoder", 1, 0),
    ("text", 1, 1),
    ("images and text", 1, 1),
    *(("text", ranks, seed) for seed in range(3) for ranks in (2, 4)),
    ("text", 1, 2),
    ("images and text", 1, 2),
    ("encoder-decoder", 1, 1),
    ("encoder-decoder", 1, 2),
)
ON_RANKS = (FIXED, ODB, LHOTSE, PADDED, PACKED)
QUICK_TURNS = (
    ("text", 1, 0),
    ("text", 2, 0),
    ("images and text", 1, 0),
    ("encoder-decoder", 1, 0),
)

Epoch = dict[str, Any]
"""Figures of an epoch over all ranks, and its curve; see `train`."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train: a contender, and its settings.

    Attributes:
        planner: the name of what makes the batches.
        budget: tokens of a batch, padding included.
        accumulate: batches of an optimizer step.
        reference_samples: samples of a step for which the learning rate is not scaled.
        seed: of model and order.
        device: of the model.
    """

    planner: str
    budget: int
    accumulate: int = 1
    reference_samples: int | None = None
    seed: int = 0
    device: str = "cpu"


def batches_of(task: Task, way: Way, model: Any, rank: int, ranks: int) -> Iterable[Batch | None]:
    """Return the batches of a rank; `None` where it has none in a step."""
    if way.planner == ODB:
        return odb_batches(task, way, rank, ranks)
    is_packed = way.planner in PACKED_PLANS
    collate = task.pack(model) if is_packed else task.collate
    if way.planner.startswith("odb_nodes"):
        return our_batches(task, way, "packed" if is_packed else "padded", collate)
    planner = {**PADDED_PLANS, **PACKED_PLANS}[way.planner]
    plan = Plan(
        lengths=lengths_of(task.train),
        budget=way.budget,
        ranks=ranks,
        window=WINDOW,
        seed=way.seed,
        accumulate=way.accumulate,
    )
    batches = [list(step[rank]) for step in planner(plan)]
    return (collate([task.train[n] for n in batch]) if batch else None for batch in batches)


def our_batches(task: Task, way: Way, layout: Any, collate: Any) -> Iterator[Batch | None]:
    """Yield the batches of this library's loader."""
    with ODBDataLoader(
        task.train,
        token_budget=TokenBudget(way.budget, layout=layout),
        window=WINDOW,
        collate_fn=collate,
        accumulate=way.accumulate,
        seed=way.seed,
    ) as loader:
        for batch in loader:
            yield None if pop_step_info(batch).is_filler else batch


def odb_batches(task: Task, way: Way, rank: int, ranks: int) -> Iterator[Batch]:
    """Yield the batches of the package online-dynamic-batching."""
    odb = rival("odb")
    torch.manual_seed(way.seed)
    # As tensors: it sees no length in an array, and drops the sample.
    shard = [
        {key: torch.as_tensor(value) for key, value in sample.items()}
        for sample in task.train[rank::ranks]
    ]
    yield from odb.ODBDataLoader(
        shard,
        token_budget=way.budget,
        batch_size=1,
        shuffle=True,
        num_workers=1,
        prefetch_factor=WINDOW,
        join=False,
        collate_fn=task.collate,
    )


def train(task: Task, way: Way, rank: int, ranks: int) -> Epoch:
    """Train for one epoch on one rank.

    Returns:
        Counts and times over all ranks. `cpu_s` are the CPU seconds of the slowest rank of each
        step: the time of ranks that have a core each. `curve` has the counts and times at which
        the held-out loss was measured, which no time includes.
    """
    torch.set_num_threads(1)
    model = task.make_model(way.seed).to(way.device)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=task.learning_rate, betas=(0.9, 0.95))
    model.train()
    steps, losses = [], []  # counts and times of each step; steps done and loss
    largest = samples = 0
    source = iter(batches_of(task, way, model, rank, ranks))
    while True:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        batches = [batch for batch in islice(source, way.accumulate) if batch is not None]
        targets = [count_targets(batch, task.is_causal) for batch in batches]
        shapes = [shape_of(batch) for batch in batches]
        counts = [sum(column) for column in zip([0, 0, 0, 0], *shapes, strict=True)]
        totals = sum_ranks([sum(targets), *counts], ranks)
        if not totals[-1]:  # All ranks end together: when none has a batch.
            break
        for batch, count in zip(batches, targets, strict=True):
            largest = max(largest, int(batch["input_ids"].numel()))
            if count:
                (loss_of(model, batch, way.device) * (count / totals[0])).backward()
        if ranks > 1:
            add_gradients(weights)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        with learning_rate_of(way, optimizer, int(totals[3])):
            optimizer.step()
        optimizer.zero_grad()
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        steps.append([*totals, seconds, cpu_s])
        before, samples = samples, samples + int(totals[3])
        size = len(task.train) / POINTS
        if before // size < samples // size:
            losses.append((len(steps), held_out_loss(task, model, way.device, rank)))
            if ranks > 1:
                dist.barrier()  # The others wait for the first rank.
    if losses[-1][0] < len(steps):
        losses.append((len(steps), held_out_loss(task, model, way.device, rank)))
    figures = summary(torch.tensor(steps, dtype=torch.float64), losses, largest, ranks)
    return {**figures, "parameters": sum(weight.numel() for weight in weights)}


def summary(
    steps: torch.Tensor, losses: list[tuple[int, float]], largest: int, ranks: int
) -> Epoch:
    """Return the figures of an epoch from those of its steps on this rank."""
    all_cpu_s, largest_tokens = float(steps[:, -1].sum()), torch.tensor(largest)
    if ranks > 1:
        (all_cpu_s,) = sum_ranks([all_cpu_s], ranks)
        dist.all_reduce(largest_tokens, dist.ReduceOp.MAX)
        dist.all_reduce(steps, dist.ReduceOp.MAX)  # only the times differ
    names = ("targets", "real_tokens", "padded_tokens", "samples", "batches", "seconds", "cpu_s")
    done = steps.cumsum(0)
    curve = [
        {"steps": step, "loss": loss, **dict(zip(names, done[step - 1].tolist(), strict=True))}
        for step, loss in losses
    ]
    return {
        **curve[-1],
        "largest": int(largest_tokens),
        "all_cpu_s": all_cpu_s,
        "curve": curve,
    }


def sum_ranks(values: Sequence[float], ranks: int) -> list[float]:
    """Return the sums over all ranks."""
    totals = torch.tensor(values, dtype=torch.float64)
    if ranks > 1:
        dist.all_reduce(totals)
    return list(totals.tolist())


def learning_rate_of(
    way: Way, optimizer: torch.optim.Optimizer, samples: int
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the learning rate is that of a step of so many samples."""
    if way.reference_samples is None:
        return contextlib.nullcontext()
    return LrScaling(reference_samples=way.reference_samples).applied(optimizer, samples)


def loss_of(model: torch.nn.Module, batch: Batch, device: str) -> torch.Tensor:
    """Return the mean loss over the targets of a batch, with matrix products in bf16."""
    inputs = {
        key: value.to(device) if torch.is_tensor(value) else value
        for key, value in batch.items()
        if key != "id"
    }
    with torch.autocast(device, dtype=torch.bfloat16):
        loss: torch.Tensor = model(**inputs).loss
    return loss


def count_targets(batch: Batch, is_causal: bool) -> int:
    """Return how many labels a batch's loss is the mean of."""
    labels = batch["labels"][:, 1:] if is_causal else batch["labels"]
    return int((labels != -100).sum())


def shape_of(batch: Batch) -> list[int]:
    """Return real tokens, padded tokens, samples, and 1."""
    ids = batch["input_ids"]
    if "cu_seq_lens_q" in batch:
        return [ids.numel(), ids.numel(), len(batch["cu_seq_lens_q"]) - 1, 1]
    return [int(batch["attention_mask"].sum()), ids.numel(), len(ids), 1]


def add_gradients(weights: Sequence[torch.nn.Parameter]) -> None:
    """Add up the gradients of all ranks."""
    parts = [torch.zeros_like(part) if part.grad is None else part.grad for part in weights]
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat)
    sums = flat.split([weight.numel() for weight in weights])
    for weight, total in zip(weights, sums, strict=True):
        weight.grad = total.view_as(weight)


@torch.no_grad()
def held_out_loss(task: Task, model: torch.nn.Module, device: str, rank: int) -> float:
    """Return the mean loss over all targets of the held-out samples, on the first rank."""
    if rank:
        return 0.0
    model.eval()
    samples = sorted(task.held_out, key=lambda sample: len(sample["input_ids"]))
    total = count = 0.0
    for start in range(0, len(samples), 8):
        batch = task.collate(samples[start : start + 8])
        targets = count_targets(batch, task.is_causal)
        total += float(loss_of(model, batch, device)) * targets
        count += targets
    model.train()
    return total / count


def ways_of(task: Task, options: Options) -> dict[str, Way]:
    """Return a way for each contender, with as many samples in an optimizer step as ours have."""
    lengths = lengths_of(task.train)
    plan = Plan(lengths=lengths, budget=task.budget, window=WINDOW)
    samples = len(lengths) / len([*PADDED_PLANS[PADDED](plan)])
    several = max(1, round(samples / plan.batch_size))
    ways = {}
    for name in task.contenders:
        way = Way(planner=name, budget=task.budget, device=options.device)
        if name.startswith(("fixed", "`")):
            way = replace(way, accumulate=several)
        elif name == HALVES:
            way = replace(way, planner=PADDED, accumulate=2, budget=task.budget // 2)
        elif name == SCALED:
            way = replace(way, planner=PADDED, reference_samples=round(samples))
        ways[name] = way
    return ways


class Epochs:
    """The epochs that have been trained, in a file if there is one.

    Args:
        path: a JSON file; epochs that it has are not trained again.
        quick: whether the epochs are the short ones.
        device: of the models; epochs of a file that names none are of the CPU.
    """

    def __init__(self, path: Path | None, quick: bool, device: str = "cpu") -> None:
        self._path, self._kind = path, (quick, device)
        self._all: list[Epoch] = []
        if path and path.exists():
            self._all = json.loads(path.read_text())

    def of(self, task: str, ranks: int) -> dict[str, dict[int, Epoch]]:
        """Return the epochs of a task, by contender and seed."""
        chosen: dict[str, dict[int, Epoch]] = {}
        for epoch in self._all:
            kind = epoch["quick"], epoch.get("device", "cpu")
            if (epoch["task"], epoch["ranks"], kind) == (task, ranks, self._kind):
                chosen.setdefault(epoch["contender"], {})[epoch["seed"]] = epoch
        return chosen

    def add(self, epoch: Epoch) -> None:
        """Keep an epoch."""
        quick, device = self._kind
        self._all.append({"quick": quick, "device": device, **epoch})
        if self._path:
            partial_path = self._path.with_suffix(".partial")
            partial_path.write_text(json.dumps(self._all, indent=1))
            partial_path.replace(self._path)


@cache
def trained(options: Options) -> Epochs:
    """Return all epochs, of `rounds` seeds; trains those that the file lacks."""
    epochs = Epochs(options.epochs, options.quick, options.device)
    for name, ranks, seed in QUICK_TURNS if options.quick else TURNS:
        if seed >= options.rounds:
            continue
        print(f"{name}, {ranks} ranks, seed {seed}", file=sys.stderr, flush=True)
        task = TASKS[name](options.quick)
        attempts(
            {
                contender: partial(run, epochs, task, contender, way, ranks, seed)
                for contender, way in ways_of(task, options).items()
                if ranks == 1 or contender in ON_RANKS
                if seed not in epochs.of(name, ranks).get(contender, {})
            }
        )
    return epochs


def run(epochs: Epochs, task: Task, contender: str, way: Way, ranks: int, seed: int) -> None:
    """Train for an epoch, in processes of its own, and keep its figures."""
    os.environ["ODB_ITERATOR_STARTUP_JITTER_SEC"] = "0"
    way = replace(way, seed=seed)
    figures: Epoch = isolated(in_ranks, train, (task, way), ranks, limit_s=LIMIT_S)
    names = {"task": task.name, "contender": contender, "ranks": ranks, "seed": seed}
    epochs.add({**names, "budget": task.budget, "load": os.getloadavg()[1], **figures})


def tables(options: Options) -> Tables:
    """Yield tables of the speed and of the batches, with a column for each task and ranks."""
    epochs = trained(options)
    speed: dict[str, Row] = {name: {"": name} for name in CONTENDERS}
    batches: dict[str, Row] = {name: {"": name} for name in CONTENDERS}
    conditions, loads = [], []
    for name, ranks in dict.fromkeys((name, ranks) for name, ranks, _ in (*TURNS, *QUICK_TURNS)):
        chosen = epochs.of(name, ranks)
        if FIXED not in chosen:
            continue
        column = name if ranks == 1 else f"{name}, {ranks} ranks"
        for contender in CONTENDERS:
            seeds = chosen.get(contender, {})
            speed[contender][column] = speed_cell(seeds, chosen[FIXED])
            batches[contender][column] = batches_cell(seeds)
            loads += [epoch["load"] for epoch in seeds.values()]
        conditions.append(conditions_of(column, [*chosen[FIXED].values()]))
    if not conditions:
        return
    yield Table(
        "Training: speed",
        "Real tokens per CPU second, of the slowest rank of each step, relative to fixed batches "
        "with the same seed: median, in brackets least and greatest of n seeds. "
        f"One thread a rank, matrix products in bf16. {'; '.join(conditions)}. Load average "
        f"{min(loads):.1f} to {max(loads):.1f}.",
        [*speed.values()],
    )
    yield Table(
        "Training: batches",
        "Padding, padded tokens of the largest batch, optimizer steps, and the held-out loss after "
        "the epoch in nats per token; means over the seeds.",
        [*batches.values()],
    )


def conditions_of(column: str, fixed: list[Epoch]) -> str:
    """Return what is trained in a column, by the epochs of fixed batches."""
    epoch = fixed[0]
    rate = statistics.median(map(tokens_per_s, fixed))
    return (
        f"{column}: n {len(fixed)}, {epoch['parameters'] / 1e6:.1f} million parameters, "
        f"{epoch['samples']:,.0f} samples, {epoch['real_tokens']:,.0f} tokens, room for "
        f"{epoch['budget']:,} padded ones, fixed batches at {rate:,.0f} real tokens / CPU s"
    )


def tokens_per_s(epoch: Epoch) -> float:
    """Return real tokens per CPU second."""
    return float(epoch["real_tokens"] / epoch["cpu_s"])


def speed_cell(epochs: dict[int, Epoch], fixed: dict[int, Epoch]) -> str:
    """Return the speed of a contender relative to fixed batches."""
    seeds = sorted(epochs.keys() & fixed.keys())
    if not seeds:
        return ""
    ratios = [tokens_per_s(epochs[seed]) / tokens_per_s(fixed[seed]) for seed in seeds]
    return spread(ratios, 2) + (f", n {len(seeds)}" if len(seeds) < len(fixed) else "")


def batches_cell(epochs: dict[int, Epoch]) -> str:
    """Return what the batches of a contender are like, and where they lead."""
    if not epochs:
        return ""
    padding, largest, steps, loss = (
        statistics.fmean(values)
        for values in zip(
            *(
                (1 - epoch["real_tokens"] / epoch["padded_tokens"], epoch["largest"],
                 epoch["steps"], epoch["loss"])
                for epoch in epochs.values()
            ),
            strict=True,
        )
    )  # fmt: skip
    return f"{padding:.3f}, {largest:,.0f}, {steps:,.0f}, {loss:.3f}"
