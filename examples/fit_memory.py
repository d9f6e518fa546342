"""Find the largest token budget of a model by trying, and train an epoch under it.

    python examples/fit_memory.py                    # on a CPU, with a memory of 140 MiB
    python examples/fit_memory.py --device cuda      # on a GPU, with 90 % of what is free

On a CPU the memory is what autograd saves for the backward pass, with a limit of our own: every
step of this script goes as on a GPU, the failures too.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from odb_nodes import ODBDataLoader, pop_step_info
from odb_nodes.memory import Calibration, CudaMeter, MemoryMeter, find_budget, preflight
from odb_nodes.testing import SavedTensorMeter
from tiny_lm import MAX_TOKENS, VOCABULARY_SIZE, build_model, load_corpus

WIDTHS = (16, 128, MAX_TOKENS)  # the shortest samples, the longest, and one between
MIB = 2**20


def main() -> None:
    """Calibrate, print what was found, and train under it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--limit-mib", type=int, default=140, help="on a CPU (%(default)s)")
    parser.add_argument("--every", type=int, default=16, help="train on one text in so many")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    meter = SavedTensorMeter(options.limit_mib * MIB) if on_cpu else CudaMeter()

    model = build_model(device=options.device, attention="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(batch: dict[str, torch.Tensor]) -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def make_batch(rows: int, width: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(VOCABULARY_SIZE, (rows, width), device=options.device)
        mask = torch.ones_like(ids)
        mask[0, 1:] = 0  # padding, as batches of training have: models drop a mask of ones
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}

    states = [model, optimizer]  # all that the steps change
    calibration = find_budget(train_step, make_batch, states=states, meter=meter, widths=WIDTHS)
    print_calibration(calibration, meter.limit_bytes)
    preflight(train_step, make_batch, calibration.budget, states=states, meter=meter, widths=WIDTHS)
    print("preflight: the widest, the fullest and the most numerous batch fit")

    corpus = load_corpus(every=options.every)
    loader = ODBDataLoader(
        corpus.train, token_budget=calibration.budget, window=128, process_fn=corpus.encode
    )
    largest_bytes, errors = 0, []
    with measured(meter):
        for batch in loader:
            pop_step_info(batch)
            rows, width = batch["input_ids"].shape
            meter.reset()
            train_step({name: values.to(options.device) for name, values in batch.items()})
            errors.append(meter.peak_bytes() / calibration.model.predict(rows, width) - 1)
            largest_bytes = max(largest_bytes, meter.peak_bytes())
    print(
        f"an epoch of {len(errors)} steps: largest peak {largest_bytes / MIB:.1f} MiB, "
        f"{largest_bytes / meter.limit_bytes:.1%} of the limit; the model was off by "
        f"{sum(map(abs, errors)) / len(errors):.1%} on average, and {max(errors):.1%} too low at "
        "most"
    )


def measured(meter: MemoryMeter) -> AbstractContextManager[Any]:
    """Return the block in which a meter measures."""
    return meter if isinstance(meter, SavedTensorMeter) else nullcontext()


def print_calibration(calibration: Calibration, limit_bytes: int) -> None:
    """Print the trials, the model and the budget."""
    print(f"limit {limit_bytes / MIB:.0f} MiB\n rows  width  peak, MiB")
    for trial in calibration.points:
        fate = "" if trial.fits else "  does not fit"
        print(f"{trial.rows:5} {trial.width:6} {trial.peak_bytes / MIB:10.1f}{fate}")
    fit = calibration.model.fit()
    print(
        f"model: {fit.constant_bytes / MIB:.1f} MiB, {fit.token_bytes:,.0f} bytes per token, "
        f"{fit.square_bytes:,.1f} per pair of tokens of a row; points off by at most "
        f"{fit.error:.1%}, margin {fit.margin:.1%}"
    )
    budget = calibration.budget
    print(f"budget: tokens={budget.tokens}, attention_tokens={budget.attention_tokens}")
    print(f"for whole cards, of this fit:\n{calibration.model.table()}")


if __name__ == "__main__":
    main()
