"""Plan the steps of a whole job, on any number of ranks, from lengths alone, in one process.

python -m odb_nodes.tools.simulate --ranks 64 --window 256 1024 --cv 1.0
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, get_args

import numpy as np
import numpy.typing as npt

from odb_nodes.planning import SimulationOptions, TokenBudget, Uneven, simulate_steps
from odb_nodes.planning.auto_window import parse_window, shown, window_samples
from odb_nodes.planning.budget import Layout, RowSizes
from odb_nodes.planning.simulation import SimulationKeywords, steps_of
from odb_nodes.planning.table import IntArray
from odb_nodes.sources import Mixing
from odb_nodes.sources.mixing import Weights
from odb_nodes.tools.length_table import LengthTable
from odb_nodes.tools.simulation_report import SimulationReport
from odb_nodes.tools.table_epoch import TableEpoch
from odb_nodes.tools.tables import markdown_table

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SimulationOptions", "lognormal_lengths", "simulate", "simulate_steps"]


def simulate(
    lengths: npt.ArrayLike | LengthTable,
    *,
    shuffle: bool = True,
    weights: Weights | Mixing = None,
    **options: Unpack[SimulationKeywords],
) -> SimulationReport:
    """Plan the first epoch of a job, and return its efficiency, balance and filler.

        simulate(lengths, world_size=64, budget=16_384, window=512)
        simulate(LengthTable.load("lengths.npz"), world_size=64, budget=16_384)

    Args:
        lengths: tokens of each sample, (n,). Rank r has every `world_size`-th, from the r-th on, as
            `ShardedSampler(shuffle=False)` deals them out. Or a `LengthTable`, whose samples are
            read as an `ODBDataLoader` reads them; where it has some of the dataset's samples, the
            counts are those of the whole dataset, estimated.
        shuffle: of a table: whether the samples are shuffled that are not those of streams.
        weights: of a table with several sources: how they are mixed, as for an `ODBDataLoader`.
        options: the fields of `SimulationOptions`: `world_size` and `budget`, and where they differ
            from the defaults `window`, `round_size`, `uneven`, `dearest_first`, `diversity`,
            `accumulate`, `seed` and `cost_fn`.

    Raises:
        TypeError, ValueError: an option is not valid, or there is no step.
        SampleError: a sample is too long under `oversize="error"`.
    """
    job = SimulationOptions(**options)
    if isinstance(lengths, LengthTable):
        return TableEpoch(table=lengths, shuffle=shuffle, weights=weights).report(job)
    if weights is not None:
        raise ValueError("`weights` must be None: mere lengths have no sources. Pass a table.")
    return SimulationReport.of(steps_of(lengths, job), TokenBudget.of(job.budget))


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
        samples: number of lengths.
        cv: coefficient of variation before clipping: standard deviation / mean.
        mean_tokens: mean length before clipping.
        shortest_tokens: lower bound, to which shorter lengths are clipped.
        longest_tokens: upper bound, to which longer lengths are clipped.
        seed: seed of numpy's generator.
    """
    if not 0 <= cv < math.inf:
        raise ValueError(f"`cv` must be a number of at least 0, but is {cv!r}.")
    sigma = math.sqrt(math.log(1 + cv**2))
    mu = math.log(mean_tokens) - sigma**2 / 2
    tokens = np.random.default_rng(seed).lognormal(mu, sigma, samples)
    return np.clip(tokens, shortest_tokens, longest_tokens).astype(np.int64)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate all combinations of the options on lognormal lengths, and print a table."""
    args = _parser().parse_args(arguments)
    rows = []
    budgets = [
        TokenBudget(
            args.budget,
            layout=args.layout,
            shapes=shapes,
            attention_tokens=args.attention_tokens,
            row_sizes=args.row_sizes,
        )
        for shapes in ([None] if args.shapes is None else [args.shapes, None])
    ]
    for cv, ranks, window, round_size in product(args.cv, args.ranks, args.window, args.round_size):
        lengths = lognormal_lengths(ranks * args.samples_per_rank, cv=cv, seed=args.seed)
        report, *any_shape = (
            simulate(
                lengths,
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
        samples = shown(window, window_samples(window, budgets[0], lengths))
        run = {"CV": cv, "ranks": ranks, "window": samples, "round": round_size}
        row = {key: str(value) for key, value in run.items()} | report.as_row()
        for other in any_shape:
            row["extra padding"] = f"{report.padded_tokens / other.padded_tokens - 1:.1%}"
        rows.append(row)
    print(markdown_table(rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="odb_nodes.tools.simulate", description=main.__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64])
    parser.add_argument("--window", type=parse_window, nargs="+", help="samples per rank, or auto")
    parser.add_argument("--cv", type=float, nargs="+", default=[1.0], help="of the lengths")
    parser.add_argument("--round-size", type=int, nargs="+", help="steps")
    parser.add_argument("--accumulate", type=int, help="steps of an optimizer step")
    parser.add_argument("--uneven", choices=get_args(Uneven))
    parser.add_argument("--budget", type=int, default=16_384, help="tokens of a group")
    parser.add_argument(
        "--attention-tokens", type=int, help="length at which attention doubles a row's cost"
    )
    parser.add_argument(
        "--row-sizes",
        choices=get_args(RowSizes),
        default=TokenBudget.row_sizes,
        help="numbers of rows of batches",
    )
    parser.add_argument("--layout", choices=get_args(Layout), default=TokenBudget.layout)
    parser.add_argument(
        "--shapes", type=int, help="most shapes of batches (default: any); adds what it costs"
    )
    parser.add_argument("--samples-per-rank", type=int, default=40_000)
    parser.add_argument("--seed", type=int, help="of the lengths and the permutations")
    parser.set_defaults(
        window=[SimulationOptions.window],
        round_size=[SimulationOptions.round_size],
        accumulate=SimulationOptions.accumulate,
        uneven=SimulationOptions.uneven,
        seed=SimulationOptions.seed,
    )
    return parser


if __name__ == "__main__":
    main()
