"""What grouping gives and costs, and what its state costs, on lognormal lengths.

    python examples/benchmarks/benchmark_grouping.py
    python examples/benchmarks/benchmark_grouping.py --samples 5000 --windows 64 256

First table: groups of the rolling pool beside those of sorted windows (collect a window, sort it,
cut it longest first, start over). Second table: the state of a `WindowBucketer` over a source that
costs next to nothing, that of a `Loader` over both, and a restore from the state of the run that
has the most to make again: with a source that reads items by their keys, and with one that cannot,
from whose snapshot items are read again.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median
from typing import Any, TypeVar

from torchdata.nodes import Mapper

from odb_nodes import LengthObserver, Loader, ShardedSampler, TokenBudget, WindowBucketer
from odb_nodes.core.planning import RollingPool, SimulationOptions
from odb_nodes.tools.baselines import Baselines
from odb_nodes.tools.lengths import LengthTable
from odb_nodes.tools.simulate import SimulationReport, TableEpoch, lognormal_lengths

T = TypeVar("T")

BUDGET_TOKENS = 16_384
REPEATS = 3


def timed(call: Callable[..., T], *args: Any) -> tuple[T, float]:
    """Return what `call(*args)` returns, and how many seconds it took."""
    start = time.perf_counter()
    return call(*args), time.perf_counter() - start


def rolling_groups(lengths: list[int], window: int) -> tuple[list[list[int]], int]:
    """Return the groups of a rolling pool, and the age of the oldest sample in it, in samples."""
    pool = RollingPool(TokenBudget(BUDGET_TOKENS), window)
    groups: list[list[int]] = []
    ended, oldest_samples = False, 0
    while True:
        while not ended and (room := pool.room()) > 0:
            first = pool.pulled
            tokens = lengths[first : first + room]
            pool.pulled += len(tokens)
            pool.add(range(first, pool.pulled), tokens, [0] * len(tokens))
            ended = len(tokens) < room
        if not len(pool):
            return groups, oldest_samples
        oldest_samples = max(oldest_samples, pool.pulled - pool.oldest)
        groups.append([lengths[at] for at in pool.take(draining=ended).tolist()])


def sorted_windows(lengths: list[int], window: int) -> SimulationReport:
    """Return what batches come to that are cut from one sorted window after the other."""
    epoch = TableEpoch(table=LengthTable.of(lengths), shuffle=False)
    job = SimulationOptions(world_size=1, budget=BUDGET_TOKENS, window=window)
    return Baselines(epoch=epoch).figures("sorted windows", job)


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """How well groups use the budget.

    Attributes:
        density: real tokens per padded token.
        fill: padded tokens per token of the budget, mean over the groups.
        largest: the same of the largest group.
    """

    density: float
    fill: float
    largest: float

    @classmethod
    def of(cls, groups: list[list[int]]) -> Efficiency:
        """Return the efficiency of groups of lengths in tokens."""
        padded = [max(group) * len(group) for group in groups]
        return cls(
            density=sum(map(sum, groups)) / sum(padded),
            fill=fmean(padded) / BUDGET_TOKENS,
            largest=max(padded) / BUDGET_TOKENS,
        )


def print_grouping(lengths: list[int], windows: list[int]) -> None:
    """Print the first table."""
    print(
        f"{'':>8}|{'rolling pool':^52}|{'sorted windows':^20}\n"
        f"{'window':>8}|{'real/padded':>12}{'fill':>8}{'largest':>9}{'oldest':>11}{'us/group':>11} "
        f"|{'real/padded':>12}{'fill':>8}"
    )
    for window in windows:
        runs = [timed(rolling_groups, lengths, window) for _ in range(REPEATS)]
        groups, oldest_samples = runs[0][0]
        group_s = median(seconds for _, seconds in runs) / len(groups)
        ours = Efficiency.of(groups)
        baseline = sorted_windows(lengths, window)
        print(
            f"{window:>8}|{ours.density:>12.3f}{ours.fill:>8.3f}{ours.largest:>9.3f}"
            f"{oldest_samples / window:>9.2f} W{group_s * 1e6:>11.0f} "
            f"|{1 - baseline.padding_share:>12.3f}{baseline.fill:>8.3f}"
        )


@dataclass(frozen=True, kw_only=True)
class StateCost:
    """What the states of one run cost, one state after each group.

    Attributes:
        state_s: seconds of `state_dict()`, median; those of the source's own are not counted.
        loader_state_s: seconds of `state_dict()` of a `Loader`, median, its digest included.
        bytes_per_sample: pickled size per pooled sample; the source's own is not counted.
        replayed_samples: samples that a restore made again, from the state with the most.
        restore_s: seconds of that restore, median.
    """

    state_s: float
    loader_state_s: float
    bytes_per_sample: float
    replayed_samples: int
    restore_s: float


def make_bucketer(lengths: list[int], window: int, *, by_keys: bool = True) -> WindowBucketer:
    """Return a bucketer whose samples are nothing but indices, with their lengths in tokens.

    Args:
        lengths: tokens of each sample.
        window: samples in the pool.
        by_keys: whether a restore may read items by their keys.
    """
    indices = ShardedSampler(lengths)
    source = indices if by_keys else Mapper(indices, int)  # torchdata's has no keys
    observer = LengthObserver(source, observe=lengths.__getitem__)
    return WindowBucketer(observer, BUDGET_TOKENS, window)


def measure_state(lengths: list[int], window: int, *, by_keys: bool) -> StateCost:
    """Run one epoch with a state after each group, and restore from the costliest of them."""
    bucketer = make_bucketer(lengths, window, by_keys=by_keys)
    seconds: list[float] = []
    own_bytes = pooled_samples = emitted_samples = most_samples = 0
    costliest: dict[str, Any] = {}
    for group in bucketer:
        state, state_s = timed(bucketer.state_dict)
        source_state, source_s = timed(bucketer.source.state_dict)
        seconds.append(state_s - source_s)
        own_bytes += len(pickle.dumps(state)) - len(pickle.dumps(source_state))
        emitted_samples += len(group)
        pooled = state["pulled"] - emitted_samples
        pooled_samples += pooled
        again = pooled if by_keys else state["pulled_since_source"]
        if again >= most_samples:
            most_samples, costliest = again, state
    with Loader(make_bucketer(lengths, window, by_keys=by_keys)) as loader:
        loader_seconds = [timed(loader.state_dict)[1] for _ in loader]
    resumed = make_bucketer(lengths, window, by_keys=by_keys)
    restore_s = median(timed(resumed.reset, costliest)[1] for _ in range(REPEATS))
    return StateCost(
        state_s=median(seconds),
        loader_state_s=median(loader_seconds),
        bytes_per_sample=own_bytes / pooled_samples,
        replayed_samples=resumed.replayed_samples,
        restore_s=restore_s,
    )


def print_state(lengths: list[int], windows: list[int]) -> None:
    """Print the second table."""
    print(
        f"{'window':>8} {'restore from':<13}|{'us/state_dict':>14}{'of a Loader':>13}"
        f"{'bytes/pooled sample':>21}{'most replayed':>15}{'ms/restore':>12}"
    )
    for window, by_keys in product(windows, (True, False)):
        cost = measure_state(lengths, window, by_keys=by_keys)
        print(
            f"{window:>8} {'keys' if by_keys else 'a snapshot':<13}|"
            f"{cost.state_s * 1e6:>14.1f}{cost.loader_state_s * 1e6:>13.1f}"
            f"{cost.bytes_per_sample:>21.1f}{cost.replayed_samples / window:>13.2f} W"
            f"{cost.restore_s * 1e3:>12.1f}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=60_000, help="samples of the stream")
    parser.add_argument("--windows", type=int, nargs="+", default=[64, 256, 1024, 8192])
    args = parser.parse_args()
    for cv in (1.0, 2.0):
        lengths = lognormal_lengths(args.samples, cv=cv).tolist()
        print(f"{args.samples:,} samples, CV {cv}, budget {BUDGET_TOKENS:,} tokens\n")
        print_grouping(lengths, args.windows)
        print()
        print_state(lengths, args.windows)
        print()


if __name__ == "__main__":
    main()
