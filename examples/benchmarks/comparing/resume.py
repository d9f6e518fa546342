"""The first batch of a start and of a resume, what is processed again, and what is lost.

Each contender makes an epoch of batches in a process of its own: first without a break, then up to
a state, then from that state on, in a new loader. Processing a sample is a sleep, and is counted.
Those that share data among ranks do the same on four real ranks.
"""

from __future__ import annotations

import gc
import os
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from comparing.common import Options, Table, Tables, attempts, in_ranks, isolated
from comparing.starts import (
    BATCH_SAMPLES,
    BUDGET,
    CONTENDERS,
    SLEEP_MS,
    WORKERS,
    Batch,
    Process,
    Running,
    Start,
)
from odb_nodes.tools.simulate import lognormal_lengths

MEAN_TOKENS, LONGEST_TOKENS = 400, 4096
RANKS = 4
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a resume came to.

    Attributes:
        start_s: until the first batch of a fresh start.
        resume_s: until the first batch of a resume.
        again: samples processed until then that had been processed before the state was taken.
        lost: samples that came neither before the state nor after it.
        repeated: samples that came again.
        same: whether the batches were those of a run without a break.
    """

    start_s: float
    resume_s: float
    again: int
    lost: int
    repeated: int
    same: bool


@dataclass
class Begins:
    """Begins an epoch of a contender, again and again; each counts its own calls."""

    start: Start
    lengths: list[int]
    window: int
    folder: Path
    times: int = 0

    def __call__(self, sleep_ms: float, state: bytes) -> tuple[Process, Running]:
        """Begin at a pickled state, with samples that take so long."""
        self.times += 1
        os.environ[SLEEP_MS] = str(sleep_ms)
        process = Process(self.lengths, self.folder / f"calls-{self.times}")
        return process, self.start(process, self.window, pickle.loads(state))


def measure(start: Start, lengths: list[int], window: int, sleep_ms: float) -> Found:
    """Run an epoch without a break, and one that is broken off and resumed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        begin, fresh = Begins(start, lengths, window, Path(name)), pickle.dumps(None)
        whole = [*begin(0, fresh)[1].batches]
        _, running = begin(0, fresh)
        half, seen = len(lengths) // 2, list[int]()
        while len(seen) < half:
            seen += next(running.batches)
        state = pickle.dumps(running.state())
        del running
        gc.collect()  # No clock has the end of another loader.
        began_s = time.perf_counter()
        _, running = begin(sleep_ms, fresh)
        next(running.batches)
        start_s = time.perf_counter() - began_s
        del running
        gc.collect()
        began_s = time.perf_counter()
        process, running = begin(sleep_ms, state)
        first = next(running.batches)
        resume_s = time.perf_counter() - began_s
        made = process.count()
        rest = [*begin(0, state)[1].batches]
    after = Counter(index for batch in rest for index in batch)
    before = Counter(seen)
    return Found(
        start_s=start_s,
        resume_s=resume_s,
        again=made - len(first),
        lost=len(set(range(len(lengths))) - set(before) - set(after)),
        repeated=(before + after).total() - len(before | after),
        same=[*batches_after(whole, len(seen))] == rest,
    )


def batches_after(batches: list[Batch], samples: int) -> Iterator[Batch]:
    """Yield what comes after so many samples."""
    for batch in batches:
        if samples <= 0:
            yield batch
        samples -= len(batch)


class FoundOnRanks(NamedTuple):
    """What a resume of several ranks came to: see `Found`.

    Attributes:
        seconds: until the slowest rank has its first batch.
        steps: batches of each rank in an epoch.
        lost, repeated: samples, over all ranks.
        same: whether all ranks had the batches of a run without a break.
    """

    seconds: float
    steps: list[int]
    lost: int
    repeated: int
    same: bool


def measure_on_ranks(
    start: Start, lengths: list[int], window: int, sleep_ms: float, _rank: int, ranks: int
) -> FoundOnRanks:
    """Do as `measure` on each rank, up to half of the steps that all ranks have."""

    def of_all_ranks(value: Any) -> list[Any]:
        values: list[Any] = [None] * ranks
        dist.all_gather_object(values, value)
        return values

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        begin, fresh = Begins(start, lengths, window, Path(name)), pickle.dumps(None)
        whole = [*begin(0, fresh)[1].batches]
        steps = of_all_ranks(len(whole))
        half = min(steps) // 2
        _, running = begin(0, fresh)
        seen = [next(running.batches) for _ in range(half)]
        state = pickle.dumps(running.state())
        dist.barrier()
        start_s = time.perf_counter()
        _, resumed = begin(sleep_ms, state)
        next(resumed.batches)
        seconds = time.perf_counter() - start_s
        dist.barrier()
        rest = [*begin(0, state)[1].batches]
    runs = of_all_ranks((seconds, [*seen, *rest], rest == whole[half:]))
    counts = Counter(index for _, batches, _ in runs for batch in batches for index in batch)
    return FoundOnRanks(
        seconds=max(of_rank[0] for of_rank in runs),
        steps=steps,
        lost=len(lengths) - len(counts),
        repeated=counts.total() - len(counts),
        same=all(of_rank[2] for of_rank in runs),
    )


CONTENDERS_ON_RANKS = (
    "`StatefulDataLoader`, list",
    "Grain",
    "Grain, `ElasticIterator`",
    "datasets, stream",
    "lhotse, lengths from processing",
    "odb_nodes, list",
    "odb_nodes, stream",
)


def table_of_ranks(lengths: list[int], window: int, sleep_ms: float) -> Table:
    """Return the table of several ranks."""
    found = attempts(
        {
            name: partial(
                isolated,
                in_ranks,
                measure_on_ranks,
                (CONTENDERS[name][1], lengths, window, sleep_ms),
                RANKS,
                limit_s=TIMEOUT_S,
            )
            for name in CONTENDERS_ON_RANKS
        }
    )
    return Table(
        f"Resume on {RANKS} ranks",
        f"{len(lengths):,} samples of {sleep_ms:g} ms over {RANKS} gloo ranks with {WORKERS} "
        f"workers and a window or buffer of {window:,} samples each, resumed after half of the "
        "steps; seconds until the slowest rank has its first batch.",
        [
            {
                "": name,
                "batches": CONTENDERS[name][0],
                "resume, s": f"{result.seconds:.1f}",
                "steps of ranks": f"{min(result.steps)} to {max(result.steps)}",
                "lost": f"{result.lost:,}",
                "repeated": f"{result.repeated:,}",
                "same batches": "yes" if result.same else "no",
            }
            for name, result in found.items()
        ],
    )


def tables(options: Options) -> Tables:
    """Yield the tables of one rank and of several."""
    samples, window, sleep_ms = (600, 64, 1.0) if options.quick else (4_000, 1024, 20.0)
    lengths = lognormal_lengths(
        samples, cv=1.0, mean_tokens=MEAN_TOKENS, longest_tokens=LONGEST_TOKENS
    ).tolist()
    found = attempts(
        {
            name: partial(isolated, measure, start, lengths, window, sleep_ms, limit_s=TIMEOUT_S)
            for name, (_, start) in CONTENDERS.items()
        }
    )
    conditions = (
        f"{samples:,} samples of {sleep_ms:g} ms; {WORKERS} workers or threads, but none of lhotse "
        f"and datasets; a window or buffer of {window:,} samples. Fixed batches have "
        f"{BATCH_SAMPLES} samples, and need no buffer; a budget is {BUDGET:,} tokens. Resumed "
        "after half of the samples."
    )
    yield Table(
        "First batch",
        conditions,
        [
            {
                "": name,
                "batches": CONTENDERS[name][0],
                "start, s": f"{result.start_s:.1f}",
                "resume, s": f"{result.resume_s:.1f}",
            }
            for name, result in found.items()
        ],
    )
    yield Table(
        "Resume",
        f"{conditions} Samples made again are counted until the first batch, without that batch; "
        "those that are prefetched for the next ones are among them.",
        [
            {
                "": name,
                "made again": f"{result.again:,}",
                "lost": f"{result.lost:,}",
                "repeated": f"{result.repeated:,}",
                "same batches": "yes" if result.same else "no",
            }
            for name, result in found.items()
        ],
    )
    yield table_of_ranks(lengths, window // RANKS, sleep_ms)
