"""Logs of micro-steps, as a run writes them."""

import json

import numpy as np

from odb_nodes.tools.step_time import StepTime

TRUE = StepTime(constant_s=0.03, token_s=4e-5, square_s=3e-9)


def write_log(path, steps, noise=0.0, seed=0):
    """A log of batches of many shapes, which take as long as `TRUE` says."""
    rng = np.random.default_rng(seed)
    records = []
    for _ in range(steps):
        width = int(rng.integers(50, 4000))
        rows = int(rng.integers(1, 16_384 // width + 2))
        (seconds,) = TRUE.seconds(np.array([rows * width]), np.array([rows * width * width]))
        seconds *= 1 + noise * rng.standard_normal()
        records.append(
            {"rows": rows, "width": width, "padded_tokens": rows * width, "step_s": seconds}
        )
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records
