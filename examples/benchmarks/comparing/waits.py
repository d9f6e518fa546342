"""Waiting: real ranks that sleep in place of a model, for as long as each batch would take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from comparing.batching import PACKED, PACKED_PLANS, PADDED, PADDED_PLANS, Plan, Planner
from comparing.common import (
    Options,
    Row,
    Table,
    Tables,
    in_ranks,
    in_turns,
    isolated,
    spread,
)
from comparing.padding import ATTENTION_TOKENS, AWARE_PLANS, BUDGET, STEP_TIME
from comparing.padding import measure as simulate
from odb_nodes import ODBDataLoader, TokenBudget, pop_step_info
from odb_nodes.tools.simulate import lognormal_lengths

CV, WINDOW, RANKS = 2.0, 256, (2, 4)
S_PER_TOKEN = 2e-6
TIMEOUT_S = 300.0

PLANS: dict[str, dict[str, Planner]] = {
    "padded": PADDED_PLANS | AWARE_PLANS["padded"],
    "packed": PACKED_PLANS,
}
CONTENDERS = {
    "fixed batches": "padded",
    "`batch_rebalance` of transformers": "padded",
    "lhotse, buffer as our window": "padded",
    "lhotse, `quadratic_duration`": "padded",
    PADDED: "padded",
    f"{PADDED}, `step_time`": "padded",
    f"{PADDED}, lengths known": "padded",
    "TRL, best fit decreasing": "packed",
    "axolotl's first fit, written anew": "packed",
    PACKED: "packed",
    f"{PACKED}, lengths known": "packed",
}


class Waited(NamedTuple):
    """What an epoch of a contender comes to: seconds of it, and of a mean rank."""

    epoch_s: float
    busy_s: float
    waiting_s: float


class Batch(NamedTuple):
    """The indices of the samples of a batch, and whether it is filler."""

    indices: list[int]
    is_filler: bool = False


def own_batches(name: str, plan: Plan) -> Iterator[Batch]:
    """Yield the batches of this rank's loader of this library."""
    options: dict[str, Any] = {"window": plan.window}
    if name.endswith("known"):
        options = {"lengths": plan.lengths}
    if name.endswith("`step_time`"):
        options["step_time"] = STEP_TIME
    with ODBDataLoader(
        range(len(plan.lengths)),
        token_budget=TokenBudget(plan.budget, layout=CONTENDERS[name]),  # type: ignore[arg-type]
        process_fn=partial(sample_of, plan.lengths),
        collate_fn=indices_of,
        **options,
    ) as loader:
        for batch in loader:
            yield Batch(batch["id"], pop_step_info(batch).is_filler)


def sample_of(lengths: Sequence[int], index: int) -> dict[str, Any]:
    """Return a sample."""
    return {"input_ids": np.zeros(lengths[index], np.int64), "id": index}


def indices_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate nothing but the indices."""
    return {"id": [sample["id"] for sample in samples]}


def planned_batches(name: str, plan: Plan, rank: int) -> Iterator[Batch]:
    """Yield the batches of a rank, all of which have been planned before."""
    steps = [step[rank] for step in PLANS[CONTENDERS[name]][name](plan)]
    return (Batch([*indices]) for indices in steps)


def seconds_of(name: str, lengths: np.ndarray[Any, Any]) -> float:
    """Return how long a batch of samples of these lengths takes."""
    if CONTENDERS[name] == "padded":
        lengths = np.full_like(lengths, lengths.max(initial=0))
    return float((lengths + lengths**2 / ATTENTION_TOKENS).sum()) * S_PER_TOKEN


def measure(name: str, plan: Plan, rank: int, ranks: int) -> Waited:
    """Run an epoch on each rank, from its first batch on; ranks meet after each step."""
    batches = (
        own_batches(name, plan) if name.startswith("odb") else planned_batches(name, plan, rank)
    )
    lengths = np.array(plan.lengths)
    are_left = torch.ones(1)
    busy_s = waiting_s = 0.0
    batch = next(batches, None)
    dist.barrier()
    began_s = time.perf_counter()
    while are_left:
        loaded_s = time.perf_counter()
        if batch is not None:
            time.sleep(seconds_of(name, lengths[batch.indices]))
        arrived_s = time.perf_counter()
        are_left[0] = batch is not None
        dist.all_reduce(are_left)
        useful_s = 0.0 if batch is None or batch.is_filler else arrived_s - loaded_s
        busy_s += useful_s
        waiting_s += time.perf_counter() - loaded_s - useful_s
        batch = next(batches, None)
    epoch_s = time.perf_counter() - began_s
    of_ranks: list[Any] = [None] * ranks
    dist.all_gather_object(of_ranks, (epoch_s, busy_s, waiting_s))
    epochs_s, all_busy_s, all_waiting_s = zip(*of_ranks, strict=True)
    return Waited(max(epochs_s), statistics.fmean(all_busy_s), statistics.fmean(all_waiting_s))


def tables(options: Options) -> Tables:
    """Yield the table."""
    samples = 600 if options.quick else 4_000
    lengths = lognormal_lengths(samples, cv=CV).tolist()
    rows: dict[str, Row] = {name: {"": name} for name in CONTENDERS}
    for ranks in RANKS:
        plan = Plan(lengths=lengths, budget=BUDGET, window=WINDOW, ranks=ranks)
        runs = {
            name: partial(isolated, in_ranks, measure, (name, plan), ranks, limit_s=TIMEOUT_S)
            for name in CONTENDERS
        }
        for name, epochs in in_turns(runs, options.rounds).items():
            layout = CONTENDERS[name]
            report = simulate(PLANS[layout][name], layout, plan).report
            levels = [epoch.busy_s / (epoch.busy_s + epoch.waiting_s) for epoch in epochs]
            rows[name] |= {
                f"epoch, s, {ranks} ranks": spread([epoch.epoch_s for epoch in epochs], 1),
                f"balance, simulated, {ranks} ranks": f"{report.time_balance:.3f}",
                f"balance, measured, {ranks} ranks": spread(levels, 3),
            }
    yield Table(
        "Waiting",
        f"{samples:,} samples of lognormal lengths (CV {CV:g}) on real gloo ranks, which meet "
        f"after each step; in place of a model, each sleeps {1e6 * S_PER_TOKEN:g} us for each "
        f"padded token, and for attention: half of the time of {ATTENTION_TOKENS:,} tokens. "
        f"Budget {BUDGET:,} tokens, window {WINDOW} samples a rank. Balance: busy time of the "
        "ranks / their busy and waiting time; simulated, it is mean time / time of the slowest "
        "rank. Batches of others are planned before the clock starts; for ours, an epoch also has "
        "the time of the loader, and ranks wait for one whose batch comes late. "
        f"The median of {options.rounds}, and the range.",
        [row for row in rows.values() if len(row) > 1],
    )
