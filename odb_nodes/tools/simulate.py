"""What many ranks would do with given lengths: the planning of a whole job, in one process.

    python -m odb_nodes.tools.simulate --ranks 64 --window 256 1024 --cv 1.0

The functions that plan here are those that plan in `RankAligner`, so the steps are the same.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import count, product
from typing import get_args

import numpy as np
import numpy.typing as npt

from odb_nodes.checks import check_count
from odb_nodes.errors import SampleError
from odb_nodes.hashing import mix
from odb_nodes.nodes.budget_defaults import BudgetCost
from odb_nodes.nodes.group_costs import CostFn, GroupMeter, tokens_of
from odb_nodes.planning import (
    Offer,
    RollingPool,
    TokenBudget,
    Uneven,
    make_offer,
    plan_round,
    round_steps,
)
from odb_nodes.planning.alignment import FILLER
from odb_nodes.planning.table import IntArray
from odb_nodes.sample import Sample
from odb_nodes.tools.report import SimulationReport, markdown_table

Step = list[list[Sample] | None]
"""The group of each rank; `None` for a rank that has none left."""


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


def simulate_steps(
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
) -> Iterator[Step]:
    """Yield the steps of the first epoch. Arguments and errors are those of `simulate`."""
    if uneven not in get_args(Uneven):
        raise ValueError(f"`uneven` must be one of {get_args(Uneven)}, but is {uneven!r} instead.")
    check_count("world_size", world_size)
    check_count("round_size", round_size)
    check_count("accumulate", accumulate)
    check_count("window", window)
    tokens, budget = _check_lengths(lengths), TokenBudget.of(budget)
    if budget.oversize == "error" and budget.is_oversize(longest := int(tokens.max())):
        raise SampleError(f"a sample of {longest} tokens exceeds {budget} on its own.")
    shards = [range(rank, len(tokens), world_size) for rank in range(world_size)]
    cost_fn = cost_fn or BudgetCost(budget)
    ranks = [_Rank(tokens, shard, budget, window, cost_fn) for shard in shards]
    for number in count():
        most = round_steps(
            number, world_size=world_size, round_size=round_size, accumulate=accumulate
        )
        offers = [rank.offer(most) for rank in ranks]
        plan = plan_round(offers, uneven=uneven, key=mix(seed, 0, number))  # 0: the first epoch
        groups = [rank.groups(splits) for rank, splits in zip(ranks, plan.splits, strict=True)]
        for step in plan.groups.T.tolist():
            yield [
                None if index == FILLER else of_rank[index]
                for of_rank, index in zip(groups, step, strict=True)
            ]
        if plan.last:
            return


class _Rank:
    """What `WindowBucketer` and `RankAligner` do on one rank."""

    def __init__(
        self,
        tokens: IntArray,
        shard: range,
        budget: TokenBudget,
        window: int,
        cost_fn: CostFn,
    ) -> None:
        self._shard, self._tokens = shard, tokens[shard.start :: shard.step]
        self._budget, self._meter = budget, GroupMeter(cost_fn, {})
        self._pool: RollingPool[int] = RollingPool(budget, window)  # places in the shard
        self._ended = False  # known only once there was nothing to pull

    def offer(self, most: int) -> Offer:
        """Return the offer of the next round."""
        groups: list[list[Sample]] = []
        while self._refill() and len(groups) < most:
            groups.append(self._samples(self._pool.take(draining=self._ended)))
        offer, self._ladder = make_offer(
            groups, most=most, ended=not len(self._pool), measure=self._meter, tokens=tokens_of
        )
        return offer

    def groups(self, splits: int) -> list[list[Sample]]:
        """Return the groups of the round after that many splits."""
        return self._ladder.groups(splits)

    def _refill(self) -> bool:
        """Fill the pool, and tell whether there is anything in it."""
        pool, drop = self._pool, self._budget.oversize == "drop"
        while not self._ended and (room := pool.room()) > 0:
            lengths = self._tokens[pool.pulled : pool.pulled + room].tolist()
            kept = [
                (place, length)
                for place, length in enumerate(lengths, pool.pulled)
                if not (drop and self._budget.is_oversize(length))
            ]
            pool.pulled += len(lengths)
            places = [place for place, _ in kept]
            pool.add(places, [length for _, length in kept], [0] * len(kept), places)
            self._ended = len(lengths) < room
        return len(pool) > 0

    def _samples(self, places: list[int]) -> list[Sample]:
        lengths = self._tokens[places].tolist()
        return [
            Sample(self._shard[place], length, length - 1)
            for place, length in zip(places, lengths, strict=True)
        ]


def _check_lengths(lengths: npt.ArrayLike) -> IntArray:
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu" or tokens.min() < 1:
        raise ValueError(
            "`lengths` must be one row of integers of at least 1, one for each sample, but is "
            f"{lengths!r:.80} instead."
        )
    return tokens.astype(np.int64)


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
