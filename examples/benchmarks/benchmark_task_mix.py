"""How evenly batches mix tasks, by the weight `diversity`, and what that costs.

    python examples/benchmarks/benchmark_task_mix.py
    python examples/benchmarks/benchmark_task_mix.py --samples 3000 --windows 256

First table: entropy of the tasks in a step of all ranks, as a share of the largest possible;
padding; and steps. Tasks come equally often, in random order, with lognormal lengths of CV 0.8,
clipped to 16..8192. Second table: time to choose a group.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from odb_nodes.core.planning import RollingPool, SimulationOptions, TokenBudget
from odb_nodes.core.planning.sample_costs import SampleCosts
from odb_nodes.core.planning.simulation import plan_steps
from odb_nodes.tools.simulate import SimulationReport, lognormal_lengths, markdown_table

BUDGET_TOKENS = 16_384
WEIGHTS = (0.0, 0.25, 0.5, 1.0)
MEAN_TOKENS = {
    "3, means 300, 800, 2000": [300, 800, 2000],
    "3, equal": [800] * 3,
    "8, means 300, 800, 2000": [300, 800, 2000, 300, 800, 2000, 300, 800],
    "8, equal": [800] * 8,
}


def mixed_tasks(mean_tokens: list[int], samples: int) -> SampleCosts:
    """Return samples of tasks that come equally often, in an order drawn at random."""
    tasks = np.random.default_rng(0).permutation(np.arange(samples) % len(mean_tokens))
    tokens = np.empty(samples, dtype=np.int64)
    for task, mean in enumerate(mean_tokens):
        of_task = np.flatnonzero(tasks == task)
        tokens[of_task] = lognormal_lengths(len(of_task), cv=0.8, mean_tokens=mean, seed=task)
    return SampleCosts(tokens, tokens - 1, np.zeros_like(tokens), tasks)


def evenness(tasks: NDArray[np.int64], among: int) -> float:
    """Return the entropy of some tasks, as a share of that of `among` equal ones."""
    counts = np.bincount(tasks)
    shares = counts[counts > 0] / len(tasks)
    return float(-(shares * np.log(shares)).sum() / np.log(among))


def mix_of(samples: SampleCosts, job: SimulationOptions) -> str:
    """Return the mean entropy of the steps of a job, its padding and its steps."""
    rows = np.arange(len(samples.tokens))
    steps = list(
        plan_steps(samples, [rows[r :: job.world_size] for r in range(job.world_size)], job)
    )
    report, among = SimulationReport.of(steps, TokenBudget.of(job.budget)), samples.tasks.max() + 1
    mixes = [
        evenness(samples.tasks[[sample.data for group in step if group for sample in group]], among)
        for step in steps
    ]
    return f"{fmean(mixes):.3f}, {1 - report.density:.1%}, {report.steps:,}"


def choice_us(window: int, tasks: int, diversity: float) -> float:
    """Return the median time to take a group out of a pool of some tasks, in microseconds."""
    samples = mixed_tasks([800] * tasks, window + 6000)
    tokens, numbers = samples.tokens.tolist(), samples.tasks.tolist()
    pool = RollingPool(TokenBudget(BUDGET_TOKENS), window, diversity)
    times = []
    while (stop := pool.pulled + pool.room()) <= len(tokens):
        new = range(pool.pulled, stop)
        of_new = slice(new.start, stop)
        pool.add(new, tokens[of_new], [0] * len(new), numbers[of_new])
        pool.pulled = stop
        start = time.perf_counter()
        pool.take()
        times.append(time.perf_counter() - start)
    return 1e6 * median(times)


def main() -> None:
    """Measure, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=24_000, help="of each rank")
    parser.add_argument("--windows", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layout", choices=["padded", "packed"], default="padded")
    args = parser.parse_args()

    print("Entropy of the tasks in a step, padding, steps\n")
    rows = []
    for (name, mean_tokens), window in product(MEAN_TOKENS.items(), args.windows):
        samples, row = mixed_tasks(mean_tokens, args.samples * args.ranks), {"tasks": name}
        row["window"] = str(window)
        for weight in WEIGHTS if args.layout == "padded" else WEIGHTS[:1]:
            job = SimulationOptions(
                world_size=args.ranks,
                budget=TokenBudget(BUDGET_TOKENS, layout=args.layout),
                window=window,
                diversity=weight,
            )
            row[f"diversity {weight:g}"] = mix_of(samples, job)
        rows.append(row)
    print(markdown_table(rows))

    print("\nMicroseconds to choose a group\n")
    rows = []
    for window in args.windows:
        row = {"window": str(window), "no diversity": f"{choice_us(window, 3, 0.0):.0f}"}
        row |= {f"{n} tasks": f"{choice_us(window, n, 0.5):.0f}" for n in (3, 16, 64)}
        rows.append(row)
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
