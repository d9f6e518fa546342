"""What a ledger costs: CPU time of a step, bytes a sample, and the audit of many samples.

python examples/benchmarks/benchmark_ledger.py --samples 10000000 --ranks 4
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from odb_nodes import Ledger, StepInfo


def write(
    folder: str, samples: int, ranks: int, per_step: int, kind: str
) -> tuple[list[float], int]:
    """Record one epoch; return the CPU seconds of each step, and the bytes of all files.

    Args:
        folder: where the ledger is written.
        samples: of all ranks.
        ranks: number of ranks.
        per_step: samples of a step of one rank.
        kind: of the keys: "index", "jsonl", or "mixed" for those with a source and a repeat.
    """
    keys = np.random.default_rng(0).permutation(samples)
    if kind != "index":
        keys = keys * 1000 + (1 << 40)
    seconds = []
    for rank in range(ranks):
        rows = keys[rank::ranks].tolist()
        steps = -(-len(rows) // per_step)
        with Ledger(folder, rank=rank, world_size=ranks) as ledger:
            for step in range(steps):
                own = tuple(rows[step * per_step : (step + 1) * per_step])
                sources = tuple("web" if key % 3 else "code" for key in own)
                info = StepInfo(
                    step=step,
                    local_samples=len(own),
                    local_targets=len(own),
                    all_samples_this_step=len(own) * ranks,
                    all_targets=len(own) * ranks,
                    optimizer_samples=len(own) * ranks,
                    optimizer_targets=len(own) * ranks,
                    keys=own,
                    row_sources=sources if kind == "mixed" else ("",) * len(own),
                    row_repeats=(step % 2,) * len(own) if kind == "mixed" else (0,) * len(own),
                    ends_epoch=step == steps - 1,
                )
                start_s = time.thread_time()
                ledger.record(info)
                seconds.append(time.thread_time() - start_s)
    return seconds, sum(path.stat().st_size for path in Path(folder).iterdir())


def main() -> None:
    """Write ledgers, audit them in a process of its own, and print figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--per-step", type=int, default=16, help="samples of a step of one rank")
    parser.add_argument("--kinds", nargs="+", default=["index", "jsonl", "mixed"])
    args = parser.parse_args()
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as folder:
            seconds, size = write(folder, args.samples, args.ranks, args.per_step, kind)
            median, worst = np.quantile(seconds, [0.5, 0.99]) * 1e6
            print(
                f"{kind}: {median:.1f} us a step (99 %: {worst:.1f} us, mean "
                f"{np.mean(seconds) * 1e6:.1f} us), {size / args.samples:.2f} bytes a sample"
            )
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = [sys.executable, "-m", "odb_nodes", "audit", folder]
            subprocess.run([*command] + ["--size", str(args.samples)] * (kind == "index"))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            peak = after.ru_maxrss / 1024
            print(f"audited in {cpu_s:.1f} CPU s, start of Python included; peak {peak:.0f} MiB\n")


if __name__ == "__main__":
    main()
