"""Logs of micro-steps, as a run writes them, and the records of a `Monitor`."""

import json

import numpy as np

from odb_nodes.core.planning import StepTime
from odb_nodes.training.monitor.counts import Counts
from odb_nodes.training.monitor.records import line_of

TRUE = StepTime(tokens=4e-5, squares=3e-9, base=0.03)


def write_log(path, steps, noise=0.0, seed=0):
    """A log of batches of many shapes, which take as long as `TRUE` says."""
    rng = np.random.default_rng(seed)
    records = []
    for _ in range(steps):
        width = int(rng.integers(50, 4000))
        rows = int(rng.integers(1, 16_384 // width + 2))
        seconds = TRUE.seconds_of(rows * width, rows * width**2)
        seconds *= 1 + noise * rng.standard_normal()
        records.append(
            {"rows": rows, "width": width, "padded_tokens": rows * width, "step_s": seconds}
        )
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def write_records(folder, seconds, tokens, squares, *, every, waits=None):
    """The records of a run whose steps took so long.

    Args:
        seconds: (S,), of each step.
        tokens: (S, R), of each rank; 0 where it fills.
        squares: (S, R).
        every: steps of a record.
        waits: (S,), seconds of them that all ranks waited for data.
    """
    waits = np.zeros(len(seconds)) if waits is None else waits
    ranks = tokens.shape[1]
    lines = [{"kind": "attempt", "version": 2, "step": 0, "resumed_at": 0, "world_size": ranks}]
    for start in range(0, len(seconds), every):
        part = slice(start, start + every)
        shares = [
            Counts(
                rows=[
                    number
                    for count, wait_s in zip(tokens[part, rank], waits[part], strict=True)
                    for number in (1, int(count), int(count), 0, round(wait_s * 1e6))
                ],
                squares=squares[part, rank].astype(int).tolist(),
                sums={
                    "targets": 1,
                    "rank_seconds": float(seconds[part].sum()),
                    "optimizer_steps": len(seconds[part]),
                },
            )
            for rank in range(ranks)
        ]
        place = {"first_step": start + 1, "step": start + len(seconds[part]), "epoch": 0}
        shapes = {"shapes": {"1x1": len(seconds[part])}, "seconds": 0.0}
        lines.append({"kind": "steps"} | place | Counts.over_ranks(shares).groups() | shapes)
    (folder / "monitor.jsonl").write_text("".join(map(line_of, lines)))
