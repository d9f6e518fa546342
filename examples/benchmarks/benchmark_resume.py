"""How long the first batch of a resumed run takes, where samples are made again in three ways.

    python examples/benchmarks/benchmark_resume.py
    python examples/benchmarks/benchmark_resume.py --window 128 --process-ms 1 --steps 20 60

"keys": the source reads items by their keys, so just those samples are made again that are needed.
"raw": it is an iterable, so raw items are read again, and what is not needed is not processed.
"all": a node between processor and pool hides that either is possible: all samples are processed
again from the last snapshot on, as libraries do that count positions. Each run is resumed at the
same steps, in the same process, one way after the other; processing is a sleep.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes import (
    IterableSource,
    LengthObserver,
    ParallelProcessor,
    RankAligner,
    ShardedSampler,
    WindowBucketer,
    WorkerOptions,
)
from odb_nodes.tools.simulate import lognormal_lengths

BUDGET_TOKENS = 16_384


class Process:
    """Takes `seconds` for a sample of the length that its index has."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self.seconds = 0.0

    def __call__(self, index: int) -> int:
        """Return the length of a sample."""
        if self.seconds:
            time.sleep(self.seconds)
        return self._lengths[index]


class Opaque(BaseNode[Any]):
    """Passes samples on, and nothing else that its source can do."""

    def __init__(self, source: BaseNode[Any]) -> None:
        super().__init__()
        self.source = source

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Go to where a state stands."""
        super().reset(initial_state)
        self.source.reset(initial_state)

    def next(self) -> Any:
        """Return the next sample."""
        return next(self.source)

    def get_state(self) -> dict[str, Any]:
        """Return the state of the source."""
        return self.source.state_dict()


def graph(way: str, process: Process, window: int, size: int) -> RankAligner:
    """Return the graph of a job of one rank."""
    source: BaseNode[Any] = ShardedSampler(size, rank=0, world_size=1)
    if way == "raw":
        source = IterableSource(range(size), 0, 1)
    workers = WorkerOptions(num_workers=2, method="thread")
    node: BaseNode[Any] = ParallelProcessor(
        source, process, seed=None, workers=workers, rank=0, world_size=1
    )
    node = LengthObserver(node, int)
    bucketer = WindowBucketer(Opaque(node) if way == "all" else node, BUDGET_TOKENS, window)
    return RankAligner(bucketer)


def states_at(make: Callable[[], RankAligner], steps: list[int]) -> list[dict[str, Any]]:
    """Return the state after so many steps of an epoch."""
    node, states = make(), []
    node.reset(None)
    for step in range(1, max(steps) + 1):
        next(node)
        if step in steps:
            states.append(node.state_dict())
    return states


def resumed(make: Callable[[], RankAligner], state: dict[str, Any]) -> tuple[float, int, list[int]]:
    """Return seconds to the first step, samples that were made again, and the step's lengths."""
    node = make()
    start_s = time.perf_counter()
    node.reset(state)
    first = next(node)
    seconds = time.perf_counter() - start_s
    again = node.replayed_samples + node.source.replayed_samples  # type: ignore[union-attr]
    return seconds, again, [sample.tokens for sample in first[0]]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--process-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, nargs="+", default=[150, 260, 310])
    args = parser.parse_args()
    steps = sorted(args.steps)
    size = (max(steps) + 80) * 40 + 2 * args.window
    lengths = lognormal_lengths(size, cv=1.0, mean_tokens=800).tolist()
    process = Process(lengths)
    print(f"window {args.window}, {args.process_ms} ms a sample, 2 threads\n")
    print("| step | way | samples made again | s to the first batch | of `all` |")
    print("|---|---|---|---|---|")
    makes = {way: partial(graph, way, process, args.window, size) for way in ("all", "raw", "keys")}
    process.seconds = 0.0
    states = {way: states_at(make, steps) for way, make in makes.items()}
    process.seconds = args.process_ms / 1000
    for number, step in enumerate(steps):
        firsts, base_s = {}, 0.0
        for way, make in makes.items():
            seconds, again, firsts[way] = resumed(make, states[way][number])
            base_s = base_s or seconds
            print(f"| {step} | {way} | {again} | {seconds:.2f} | {seconds / base_s:.2f} |")
        assert firsts["all"] == firsts["keys"]


if __name__ == "__main__":
    main()
