"""How much of the time of many ranks goes into real tokens, and how much online-dynamic-batching's.

    python examples/benchmarks/benchmark_ranks.py
    python examples/benchmarks/benchmark_ranks.py --quick
    python examples/benchmarks/benchmark_ranks.py --delays-ms 0 1 10 50

First table: simulated jobs of 8, 64 and 512 ranks on lognormal lengths. Second table: what aligning
costs a step where there is nothing to wait for, on one rank. Then, for each
number of samples per rank: both libraries on the same shards of the same lengths, in one process
per rank, joined by gloo on 127.0.0.1. See
`odb_nodes.tools.simulate.SimulationReport` for the columns.

With --delays-ms, one table alone: what a slow network costs a step of this library. Each rank has a
network namespace of its own, and a relay holds every packet back for so long. It needs Linux, root
and `ip`; it does not need `tc netem`, which not every kernel has.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import zip_longest
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import recv_handle, send_handle
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
DELAYED_S = 3_600.0  # limit for all measurements with delays
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


def run_ranks(
    target: Callable[..., None],
    *args: Any,
    prepare: Callable[[list[Connection]], None] = lambda _: None,
    limit_s: float = TIMEOUT_S,
) -> list[Any]:
    """Return the result of each rank. No process is left, whatever happens.

    Args:
        target: what a rank runs, with its number, a file for the store, and where its result goes.
        args: further arguments of `target`.
        prepare: called once the ranks have started, with the connections to them.
        limit_s: seconds that all of it may take.

    Raises:
        SystemExit: a rank ends without a result, or has none after `limit_s`.
    """
    context = multiprocessing.get_context("spawn")
    ranks: list[tuple[SpawnProcess, Connection]] = []
    deadline_s = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(REAL_RANKS):
                results, sender = context.Pipe()
                of_rank = (rank, f"{folder}/store", sender, *args)
                process = context.Process(target=target, args=of_rank)
                process.start()
                sender.close()
                ranks.append((process, results))
            prepare([results for _, results in ranks])
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
        raise SystemExit(f"Rank {rank} has no result in time.")
    try:
        return results.recv()
    except EOFError:
        raise SystemExit(f"Rank {rank} ended without a result.") from None


def print_comparison(windows: list[int], samples_per_rank: int, warm_up: bool) -> None:
    """Run both loaders on all windows and print a table."""
    rows = []
    for window in windows:
        by_rank = run_ranks(run_rank, samples_per_rank, window, warm_up)
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


# --- a slow network -------------------------------------------------------------------------------

_CLONE_NEWNET, _TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x4000_0000, 0x4004_54CA, 1, 0x1000
STEP_S = 0.02  # of a training loop, in place of its model


def enter_network(rank: int) -> int:
    """Give this process a network of its own, and return where its packets come out."""
    import fcntl  # not on Windows

    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise SystemExit(f"No network namespace: {os.strerror(ctypes.get_errno())}.")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"odb0", _IFF_TUN | _IFF_NO_PI))
    for command in (
        "link set lo up",
        f"address add 10.77.0.{rank + 1}/24 dev odb0",
        "link set odb0 up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return device


def relay(devices: list[int], delay_s: Any) -> None:
    """Deliver each packet after the present `delay_s`."""
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        now_s = time.monotonic()
        while waiting and waiting[0][0] <= now_s:
            _, device, packet = waiting.popleft()
            os.write(device, packet)
        due_s = max(0.0, waiting[0][0] - now_s) if waiting else None
        for device in select.select(devices, [], [], due_s)[0]:
            packet = os.read(device, 1 << 16)
            is_v4, last_byte = packet[0] >> 4 == 4, packet[19]  # of the address it goes to
            if is_v4 and 1 <= last_byte <= len(devices):
                due = time.monotonic() + delay_s.value
                waiting.append((due, devices[last_byte - 1], packet))


def run_delayed_rank(
    rank: int, _store: str, results: Connection, samples: int, delays_s: list[float], delay_s: Any
) -> None:
    """Send, for each delay, the steps of an epoch and the seconds that parts of it take."""
    os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None
    send_handle(results, enter_network(rank), parent.pid)
    os.environ["GLOO_SOCKET_IFNAME"] = "odb0"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method="tcp://10.77.0.1:29500",
        rank=rank,
        world_size=REAL_RANKS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    lengths = lognormal_lengths(REAL_RANKS * samples, cv=1.0).tolist()
    measured = []
    for delay in delays_s:
        dist.barrier()
        delay_s.value = delay
        dist.barrier()
        times_s = [time.perf_counter()]
        for _ in odb_nodes_batches(lengths, window=256):
            times_s.append(time.perf_counter())
            time.sleep(STEP_S)
        steps = len(times_s) - 1
        start, stop = int(0.4 * steps), int(0.75 * steps)  # rounds are short before, and after
        step_s = (times_s[stop] - times_s[start]) / (stop - start)
        epoch_s = time.perf_counter() - times_s[0]
        measured.append((steps, times_s[1] - times_s[0], step_s, epoch_s))
        if rank == 0:  # Progress: all of it takes minutes.
            print(f"delay {1e3 * delay:g} ms: epoch of {epoch_s:.1f} s", file=sys.stderr)
    results.send(measured)
    parent.join()


def print_cost_of_delays(delays_ms: list[float], samples: int, repeats: int) -> None:
    """Run all delays in turn, `repeats` times, and print a table of medians."""
    delay_s = multiprocessing.get_context("spawn").Value("d", 0.0)

    def start_relay(ranks: list[Connection]) -> None:
        devices = [recv_handle(results) for results in ranks]
        threading.Thread(target=relay, args=(devices, delay_s), daemon=True).start()

    delays_s = [delay_ms / 1e3 for delay_ms in delays_ms] * repeats
    args = (samples, delays_s, delay_s)
    of_ranks = run_ranks(run_delayed_rank, *args, prepare=start_relay, limit_s=DELAYED_S)
    slowest = np.max(of_ranks, axis=0).reshape(repeats, len(delays_ms), 4)
    rows = []
    for delay_ms, of_delay in zip(delays_ms, np.median(slowest, axis=0), strict=True):
        steps, first_s, step_s, epoch_s = of_delay
        rows.append(
            {
                "delay": f"{delay_ms:g} ms",
                "first batch": f"{first_s:.2f} s",
                "a step": f"{1e3 * step_s:.1f} ms",
                f"an epoch of {steps:.0f} steps": f"{epoch_s:.1f} s",
            }
        )
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
    parser.add_argument("--delays-ms", type=float, nargs="+", help="of each packet, one way")
    parser.add_argument("--repeats", type=int, default=3, help="of each delay")
    args = parser.parse_args()
    if args.delays_ms:
        print_cost_of_delays(args.delays_ms, 300 if args.quick else 10_000, args.repeats)
        return
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
