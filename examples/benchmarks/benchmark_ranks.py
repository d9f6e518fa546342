"""How much of the time of many ranks goes into real tokens, and how much online-dynamic-batching's.

    python examples/benchmarks/benchmark_ranks.py
    python examples/benchmarks/benchmark_ranks.py --quick

First table: simulated jobs of 8, 64 and 512 ranks on lognormal lengths. Second table: what aligning
costs a step where there is nothing to wait for, on one rank. Then, for each
number of samples per rank: both libraries on the same shards of the same lengths, in one process
per rank, joined by gloo on 127.0.0.1. See
`odb_nodes.tools.simulate.SimulationReport` for the columns.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from itertools import zip_longest
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from statistics import median
from typing import Any

import numpy as np
import odb
import torch
import torch.distributed as dist
from torchdata.nodes import BaseNode
from tqdm import tqdm

from benchmark_grouping import make_bucketer
from odb_nodes import ODBDataLoader, RankAligner, Sample, TokenBudget, pop_step_info
from odb_nodes.tools.simulate import SimulationReport, lognormal_lengths, markdown_table, simulate

BUDGET_TOKENS = 16_384
REAL_RANKS = 4
TIMEOUT_S = 600.0
MOST_SAMPLES = 20_480_000  # of a simulated job: 40,000 for each of 512 ranks

# Coefficient of variation of the lengths, ranks, window in samples, steps of a round.
JOBS = [
    (1.0, 8, 256, 32),
    (1.0, 8, 1024, 32),
    (1.0, 64, 256, 32),
    (1.0, 64, 1024, 32),
    (1.0, 64, 1024, 64),
    (1.0, 64, 1024, 128),
    (1.0, 512, 256, 32),
    (1.0, 512, 1024, 32),
    (2.0, 64, 1024, 32),
    (2.0, 64, 1024, 64),
    (2.0, 64, 1024, 128),
]

Batches = list[list[int] | None]
"""The lengths of the samples in each batch of one rank, in tokens; `None` for filler."""


def print_jobs(samples_per_rank: int) -> None:
    """Simulate all jobs and print a table."""
    rows = []
    for cv, ranks, window, round_size in tqdm(JOBS, "simulating jobs", disable=None):
        samples = min(ranks * samples_per_rank, MOST_SAMPLES)
        lengths = lognormal_lengths(samples, cv=cv)
        start = time.perf_counter()
        report = simulate(
            lengths, world_size=ranks, budget=BUDGET_TOKENS, window=window, round_size=round_size
        )
        rows.append(
            {
                "CV": str(cv),
                "ranks": str(ranks),
                "window": str(window),
                "round": str(round_size),
                "samples / rank": f"{samples // ranks:,}",
                **report.as_row(),
                "took": f"{time.perf_counter() - start:.0f} s",
            }
        )
    print(markdown_table(rows))


def print_cost_of_aligning(samples: int) -> None:
    """Run a bucketer with and without an aligner on it, one after the other, and print a table."""
    lengths = lognormal_lengths(samples, cv=1.0).tolist()
    rows = []
    for window in (256, 1024):
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for aligned in [False, True] * 3:
            bucketer = make_bucketer(lengths, window)
            node: BaseNode[Any] = RankAligner(bucketer) if aligned else bucketer
            start_s = time.perf_counter()
            node.reset(None)
            steps = sum(1 for _ in node)
            seconds[aligned].append((time.perf_counter() - start_s) / steps)
        alone_us, aligned_us = (1e6 * median(seconds[aligned]) for aligned in (False, True))
        rows.append(
            {
                "window": str(window),
                "bucketer, us / step": f"{alone_us:.0f}",
                "with aligner": f"{aligned_us:.0f}",
                "ratio": f"{aligned_us / alone_us:.2f}",
            }
        )
    print(markdown_table(rows))


class Shard(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Texts of given lengths in tokens, made when they are read."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [0] * self.lengths[index]}


def keep_lengths(samples: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Collate nothing but the lengths, which is all that is counted."""
    return {"input_ids": np.array([len(sample["input_ids"]) for sample in samples])}


def odb_nodes_batches(lengths: list[int], window: int) -> Iterator[list[int] | None]:
    """Yield what this rank's loader of this library yields, which splits the data itself."""
    with ODBDataLoader(
        Shard(lengths),
        token_budget=BUDGET_TOKENS,
        window=window,
        shuffle=False,
        collate_fn=keep_lengths,
        timeout_s=TIMEOUT_S,
    ) as loader:
        for batch in loader:
            yield None if pop_step_info(batch).is_filler else batch["input_ids"].tolist()


def reference_batches(lengths: list[int], window: int, warm_up: bool) -> Iterator[list[int]]:
    """Yield what the package's loader yields on this rank, from as many buffered samples."""
    loader = odb.ODBDataLoader(
        Shard(lengths[dist.get_rank() :: dist.get_world_size()]),
        token_budget=BUDGET_TOKENS,
        batch_size=1,
        num_workers=1,
        prefetch_factor=window,
        collate_fn=keep_lengths,
        no_warmup=not warm_up,
    )
    for batch in loader:
        yield batch["input_ids"].tolist()


def run_rank(
    rank: int, store: str, results: Connection, samples: int, window: int, warm_up: bool
) -> None:
    """Run both loaders on one rank, in a process and a process group of its own."""
    os.setsid()  # What the loaders start belongs to it, and ends with it.
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "ODB_ITERATOR_STARTUP_JITTER_SEC": "0"}
    # The package's processes know the ranks only as forks of this one; else each is alone. In a
    # spawned process, "spawn" is the default.
    multiprocessing.set_start_method("fork", force=True)
    warnings.filterwarnings("ignore", ".*all_gather_into_tensor", FutureWarning)  # the package's
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=REAL_RANKS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    # Made here: the ranks would start one after the other if they had to be sent.
    lengths = lognormal_lengths(REAL_RANKS * samples, cv=1.0).tolist()
    ours = list(odb_nodes_batches(lengths, window))
    results.send((ours, list(reference_batches(lengths, window, warm_up))))
    # Until all have sent theirs, others may need the process in which the package talks to them.
    # Then `run_ranks` ends everything: ended from here, that process would complain.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()


def run_ranks(samples: int, window: int, warm_up: bool) -> list[tuple[Batches, Batches]]:
    """Return what both loaders yield, by rank. No process is left, whatever happens.

    Args:
        samples: per rank.
        window: samples of the pool, and of the package's buffer.
        warm_up: leave the package its warm-up.

    Raises:
        SystemExit: a rank ends without a result, or has none after `TIMEOUT_S`.
    """
    context = multiprocessing.get_context("spawn")
    ranks: list[tuple[SpawnProcess, Connection]] = []
    deadline_s = time.monotonic() + TIMEOUT_S
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(REAL_RANKS):
                results, sender = context.Pipe(duplex=False)
                args = (rank, f"{folder}/store", sender, samples, window, warm_up)
                process = context.Process(target=run_rank, args=args)
                process.start()
                sender.close()
                ranks.append((process, results))
            return [_receive(rank, results, deadline_s) for rank, (_, results) in enumerate(ranks)]
        finally:
            for process, _ in ranks:
                assert process.pid is not None  # It has been started.
                with contextlib.suppress(ProcessLookupError):  # It has no group of its own yet.
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
            for process, _ in ranks:
                process.join()


def _receive(rank: int, results: Connection, deadline_s: float) -> Any:
    if not results.poll(max(0.0, deadline_s - time.monotonic())):
        raise SystemExit(f"Rank {rank} has no result after {TIMEOUT_S:.0f} s.")
    try:
        return results.recv()
    except EOFError:
        raise SystemExit(f"Rank {rank} ended without a result.") from None


def print_comparison(windows: list[int], samples_per_rank: int, warm_up: bool) -> None:
    """Run both loaders on all windows and print a table."""
    rows = []
    for window in windows:
        by_rank = run_ranks(samples_per_rank, window, warm_up)
        for name, batches in zip(
            ("odb_nodes", "online-dynamic-batching"), zip(*by_rank, strict=True), strict=True
        ):
            steps = (
                [batch and [Sample(None, length, length - 1) for length in batch] for batch in step]
                for step in zip_longest(*batches)
            )
            report = SimulationReport.of(steps, TokenBudget(BUDGET_TOKENS))
            row = {"window": str(window), "loader": name, "samples": f"{report.samples:,}"}
            rows.append(row | report.as_row())
    print(markdown_table(rows))


def main() -> None:
    """Simulate, run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples-per-rank", type=int, default=120_000, help="of simulated jobs")
    parser.add_argument(
        "--real-samples", type=int, nargs="+", default=[1_500, 20_000], help="per rank of real jobs"
    )
    parser.add_argument(
        "--warm-up",
        action="store_true",
        help="leave the package its warm-up, in which it groups less than a full buffer",
    )
    parser.add_argument("--quick", action="store_true", help="all of it, but too short to judge by")
    args = parser.parse_args()
    print_jobs(500 if args.quick else args.samples_per_rank)
    print()
    print_cost_of_aligning(2_000 if args.quick else 60_000)
    print()
    if args.quick:
        print_comparison([256], 1_000, args.warm_up)
    else:
        for samples in args.real_samples:
            print_comparison([256, 1024], samples, args.warm_up)
            print()


if __name__ == "__main__":
    main()
