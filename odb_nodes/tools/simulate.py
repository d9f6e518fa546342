"""What many ranks would do with given lengths: the planning of a whole job, in one process.

python -m odb_nodes.tools.simulate --ranks 64 --window 256 1024 --cv 1.0
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from itertools import product
from typing import get_args

import numpy as np
import numpy.typing as npt

from odb_nodes.planning import CostFn, TokenBudget, Uneven, simulate_steps
from odb_nodes.planning.table import IntArray
from odb_nodes.tools.report import SimulationReport, markdown_table

__all__ = ["lognormal_lengths", "simulate", "simulate_steps"]


def simulate(
    lengths: npt.ArrayLike,
    *,
    world_size: int,
    budget: int | TokenBudget,
    window: int = 1024,
    round_size: int = 32,
    accumulate: int = 1,
    seed: int = 0,
    uneven: Uneven = "fill",
    cost_fn: CostFn | None = None,
) -> SimulationReport:
    """Plan the first epoch of a job, and return what it comes to.

    Args:
        lengths: of all samples, in tokens, (n,). Rank r has every `world_size`-th, from the r-th
            on, as `ShardedSampler(shuffle=False)` deals them out.
        world_size: number of ranks.
        budget: padded tokens of a group, or a `TokenBudget`.
        window: samples in the pool of each rank.
        round_size: steps that are planned at a time; see `RankAligner`, as for what follows.
        accumulate: steps of an optimizer step.
        seed: of the permutations.
        uneven: `"fill"`, `"join"` or `"stop"`.
        cost_fn: group -> cost, by which steps are matched. The samples have their tokens, their
            index into `lengths` as `data`, and no patches. Default: the cost under the budget.

    Raises:
        TypeError, ValueError: an argument is not what is said above, or there is no step.
        SampleError: a sample is too long under `oversize="error"`.
    """
    budget = TokenBudget.of(budget)
    steps = simulate_steps(
        lengths,
        world_size=world_size,
        budget=budget,
        window=window,
        round_size=round_size,
        accumulate=accumulate,
        seed=seed,
        uneven=uneven,
        cost_fn=cost_fn,
    )
    return SimulationReport.of(steps, budget)


def lognormal_lengths(
    samples: int,
    *,
    cv: float,
    mean_tokens: int = 800,
    shortest_tokens: int = 16,
    longest_tokens: int = 8192,
    seed: int = 0,
) -> IntArray:
    """Return clipped lognormal lengths, (samples,) int64.

    Args:
        samples: how many.
        cv: coefficient of variation before clipping: standard deviation / mean.
        mean_tokens: before clipping.
        shortest_tokens: what shorter ones become.
        longest_tokens: what longer ones become.
        seed: of numpy's generator.
    """
    sigma = math.sqrt(math.log(1 + cv**2))
    mu = math.log(mean_tokens) - sigma**2 / 2
    tokens = np.random.default_rng(seed).lognormal(mu, sigma, samples)
    return np.clip(tokens, shortest_tokens, longest_tokens).astype(np.int64)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate all combinations of the options on lognormal lengths, and print a table."""
    parser = argparse.ArgumentParser(prog="odb_nodes.tools.simulate", description=main.__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64])
    parser.add_argument("--window", type=int, nargs="+", default=[1024], help="samples per rank")
    parser.add_argument("--cv", type=float, nargs="+", default=[1.0], help="of the lengths")
    parser.add_argument("--round-size", type=int, nargs="+", default=[32], help="steps")
    parser.add_argument("--accumulate", type=int, default=1, help="steps of an optimizer step")
    parser.add_argument("--uneven", choices=get_args(Uneven), default="fill")
    parser.add_argument("--budget", type=int, default=16_384, help="tokens of a group")
    parser.add_argument("--layout", choices=("padded", "packed"), default="padded")
    parser.add_argument(
        "--shapes", type=int, help="most shapes of batches (default: any); adds what it costs"
    )
    parser.add_argument("--samples-per-rank", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0, help="of the lengths and the permutations")
    args = parser.parse_args(arguments)
    rows = []
    budgets = [
        TokenBudget(args.budget, layout=args.layout, shapes=shapes)
        for shapes in ([None] if args.shapes is None else [args.shapes, None])
    ]
    for cv, ranks, window, round_size in product(args.cv, args.ranks, args.window, args.round_size):
        report, *any_shape = (
            simulate(
                lognormal_lengths(ranks * args.samples_per_rank, cv=cv, seed=args.seed),
                world_size=ranks,
                budget=budget,
                window=window,
                round_size=round_size,
                accumulate=args.accumulate,
                seed=args.seed,
                uneven=args.uneven,
            )
            for budget in budgets
        )
        run = {"CV": cv, "ranks": ranks, "window": window, "round": round_size}
        row = {key: str(value) for key, value in run.items()} | report.as_row()
        for other in any_shape:
            row["extra padding"] = f"{report.padded_tokens / other.padded_tokens - 1:.1%}"
        rows.append(row)
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
