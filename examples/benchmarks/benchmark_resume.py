"""How long the first batch of a resumed run takes, where samples are made again in three ways.

    python examples/benchmarks/benchmark_resume.py
    python examples/benchmarks/benchmark_resume.py --window 128 --process-ms 1 --steps 20 60
    python examples/benchmarks/benchmark_resume.py --ranks 2 --window 8192

"keys": the source reads items by their keys, so just those samples are made again that are needed,
those of the first batch first.
"raw": it is an iterable, so raw items are read again, and what is not needed is not processed.
"all": a node between processor and pool hides that either is possible: all samples are processed
again from the last snapshot on, as libraries do that count positions. Each run is resumed at the
same steps, in the same process, one way after the other; processing is a sleep.

With `--ranks`: seconds to the first batch of an `ODBDataLoader`, and of waiting over the next 50
steps, beside a run that goes on, and fresh starts that wait for the whole window and that do not.
Each rank has 2 worker processes, and a step takes a trainer `--slower` times as long as processing
its samples. Resumed within a round and at its border, and with `verify="eager"`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from torchdata.nodes import BaseNode

from odb_nodes import (
    IterableSource,
    LengthObserver,
    ODBDataLoader,
    ParallelProcessor,
    RankAligner,
    ShardedSampler,
    WindowBucketer,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.core.contract.config import sealed_states
from odb_nodes.core.planning.auto_window import WindowStart
from odb_nodes.tools.simulate import lognormal_lengths

BUDGET_TOKENS = 16_384
WORKERS = 2
FIRST_STEP = 60  # from which on runs are resumed
STEPS = 50  # over which waits are added up


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


def states_at(
    make: Callable[[], RankAligner], steps: list[int]
) -> list[tuple[dict[str, Any], list[int]]]:
    """Return the state after so many steps of an epoch, and the lengths of the next step."""
    node, found = make(), []
    node.reset(None)
    for step in range(max(steps) + 1):
        state = node.state_dict() if step in steps else None
        groups = next(node)
        if state is not None:
            found.append((state, lengths_of(groups)))
    return found


def lengths_of(groups: Any) -> list[int]:
    """Return the lengths of the samples of a step."""
    return [sample.tokens for sample in groups[0]]


def resumed(make: Callable[[], RankAligner], state: dict[str, Any]) -> tuple[float, int, list[int]]:
    """Return seconds to the first step, samples that were made again, and the step's lengths."""
    node = make()
    start_s = time.perf_counter()
    node.reset(state)
    first = next(node)
    seconds = time.perf_counter() - start_s
    again = node.replayed_samples + node.source.replayed_samples  # type: ignore[union-attr]
    return seconds, again, lengths_of(first)


class Texts:
    """Texts of given lengths, each of which takes a worker `seconds`, as many as it says now."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self.seconds = multiprocessing.get_context("fork").Value("d", 0.0)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a text and its labels."""
        if self.seconds.value:
            time.sleep(self.seconds.value)
        ids = np.full(self._lengths[index], index % 30_000)
        return {"input_ids": ids, "labels": ids}


def loader_of(texts: Texts, window: int, window_start: WindowStart = "auto") -> ODBDataLoader:
    """Return the loader of a rank."""
    workers = WorkerOptions(num_workers=WORKERS, start_method="fork")
    return ODBDataLoader(
        texts,
        token_budget=BUDGET_TOKENS,
        window=window,
        window_start=window_start,
        workers=workers,
    )


def is_at_border(state: dict[str, Any]) -> bool:
    """Tell whether a state stands between two rounds."""
    return any(
        one["node"] == "RankAligner" and one["totals"] is None for one in sealed_states(state)
    )


def waits_of(batches: Any, sample_s: float, slower: float) -> list[float]:
    """Return the seconds that each of the next batches was waited for."""
    waits = []
    for _ in range(STEPS + 1):
        start_s = time.perf_counter()
        info = pop_step_info(next(batches))
        waits.append(time.perf_counter() - start_s)
        samples = info.all_samples_this_step / info.world_size  # ranks take the same time
        time.sleep(slower * samples * sample_s / WORKERS)
    return waits


def run_rank(rank: int, port: int, args: argparse.Namespace) -> None:
    """Resume a run within a round and at its border; rank 0 prints how it went."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    size = args.ranks * max((FIRST_STEP + 3 * STEPS) * 40, 32 * args.window)
    texts = Texts(lognormal_lengths(size, cv=1.0, mean_tokens=800).tolist())
    sample_s = args.process_ms / 1000
    states: dict[str, Any] = {}
    with loader_of(texts, args.window) as loader:
        batches = iter(loader)
        step = 0
        while "at a border" not in states or "within a round" not in states:
            next(batches)
            step += 1
            if step >= FIRST_STEP:
                state = loader.state_dict()
                states.setdefault("at a border" if is_at_border(state) else "within a round", state)
        texts.seconds.value = sample_s
        report(rank, args, "goes on", waits_of(batches, sample_s, args.slower)[1:])
    starts: tuple[WindowStart, ...] = ("full", "auto")
    for start in starts:
        dist.barrier()
        start_s = time.perf_counter()
        with loader_of(texts, args.window, start) as loader:
            batches = iter(loader)
            first_s = time.perf_counter() - start_s
            waits = waits_of(batches, sample_s, args.slower)
        report(rank, args, f'fresh start, "{start}"', waits[1:], first_s + waits[0])
    for where, state in states.items():
        for verify in ("lazy", "eager"):
            dist.barrier()
            start_s = time.perf_counter()
            with loader_of(texts, args.window) as loader:
                loader.load_state_dict(state, verify=verify)
                batches = iter(loader)
                first_s = time.perf_counter() - start_s
                waits = waits_of(batches, sample_s, args.slower)
            first_s += waits[0]
            report(rank, args, f"resumed {where}, {verify}", waits[1:], first_s)
    dist.destroy_process_group()


def report(
    rank: int, args: argparse.Namespace, what: str, waits: list[float], first_s: float = 0.0
) -> None:
    """Print a row of the table, of rank 0."""
    if rank == 0:
        shown = f"{first_s:.2f}" if first_s else "-"
        load = os.getloadavg()[0]
        place = f"{args.ranks} | {args.process_ms:g} | {args.window}"
        print(f"| {place} | {what} | {shown} | {sum(waits):.2f} | {load:.1f} |", flush=True)


def print_waits(args: argparse.Namespace) -> None:
    """Print how resumed runs wait, beside one that goes on."""
    print("| ranks | ms | window | run | s to the first batch | s of the next 50 | load |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=run_rank, args=(rank, port, args)) for rank in range(args.ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        if process.exitcode:
            raise SystemExit(f"a rank has ended with exit code {process.exitcode}.")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--process-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, nargs="+", default=[150, 260, 310])
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--slower", type=float, default=2.0)
    args = parser.parse_args()
    if args.ranks:
        print_waits(args)
        return
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
        base_s = 0.0
        for way, make in makes.items():
            state, expected = states[way][number]
            seconds, again, first = resumed(make, state)
            assert first == expected, f"{way} goes on with another step than without a break"
            base_s = base_s or seconds
            print(f"| {step} | {way} | {again} | {seconds:.2f} | {seconds / base_s:.2f} |")


if __name__ == "__main__":
    main()
