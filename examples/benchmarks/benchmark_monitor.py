"""What a monitor costs: microseconds of a step, of one that writes a record, and of a state.

python examples/benchmarks/benchmark_monitor.py --every 10
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from odb_nodes import ODBDataLoader, pop_step_info
from odb_nodes.monitor import Monitor, RowLosses, report


def describe(name: str, seconds: Sequence[float]) -> str:
    """Return the median, the mean and the 99th percentile in microseconds."""
    median, high = np.quantile(seconds, [0.5, 0.99]) * 1e6
    mean = np.mean(seconds) * 1e6
    return f"{name:34}{median:8.1f} us (mean {mean:.1f}, 99 %: {high:.1f}; {len(seconds)} times)"


def main() -> None:
    """Take the steps of an epoch under a monitor, without a model, and print figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=10, help="steps in a record")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of waiting for batches: there is nothing else to do
    data = {
        name: [{"input_ids": [1] * (n % longest + 1)} for n in range(options.samples // 2)]
        for name, longest in (("web", 500), ("code", 900))
    }
    writers = {"": ("jsonl",), ", and TensorBoard": ("jsonl", "tensorboard")}
    for kind, names in writers.items():
        for by_sample in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                label = kind + ", losses of samples" * by_sample
                measure(Path(folder), options.every, names, by_sample, label, data)


def measure(
    folder: Path,
    every: int,
    writers: Sequence[str],
    by_sample: bool,
    label: str,
    data: dict[str, list[dict[str, list[int]]]],
) -> None:
    """Print what one kind of monitor costs."""
    loader = ODBDataLoader(data, token_budget=8192, window=256)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    monitor = Monitor(
        folder, every=every, writers=writers, losses_by_sample=by_sample, progress=False
    )
    loss, steps = torch.tensor(1.0), 0
    for batch in loader:
        info = pop_step_info(batch)
        rows = torch.rand(len(info.keys))
        losses = RowLosses(rows, torch.full(rows.shape, 9)) if by_sample else None
        start_s = time.perf_counter()
        monitor.step(batch, info, loss=loss, grad_norm=loss, lr=0.1, row_losses=losses)
        steps += 1
        seconds[steps % every == 0].append(time.perf_counter() - start_s)
    start_s = time.perf_counter()
    monitor.state_dict()
    state_s = time.perf_counter() - start_s
    monitor.close()
    print(describe(f"a step{label}", seconds[False]))
    print(describe("  with a record", seconds[True]))
    size = sum(path.stat().st_size for path in folder.glob("losses-*"))
    if by_sample:
        print(f"  {size / sum(map(len, data.values())):.1f} bytes a sample")
    start_s = time.perf_counter()
    report(folder, html=folder / "report.html")
    page_s = time.perf_counter() - start_s
    kilobytes = (folder / "report.html").stat().st_size / 1e3
    print(f"  a state {state_s * 1e6:.0f} us; the page {page_s:.2f} s, {kilobytes:.0f} kB")


if __name__ == "__main__":
    main()
