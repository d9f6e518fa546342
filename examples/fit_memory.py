"""Find the largest token budget of a model by trying, and train an epoch under it.

    python examples/fit_memory.py                    # on a CPU, with a memory of 140 MiB
    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    python examples/fit_memory.py --device cuda      # 196 million parameters, with all of a GPU
    python examples/fit_memory.py --device cuda --limit-mib 16384 --attention sdpa

On a CPU the memory is what autograd saves for the backward pass, with a limit of our own: every
step of this script goes as on a GPU, the failures too. On a GPU, what `estimate_training_memory`
says of each trial stands beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from odb_nodes import ODBDataLoader, pop_step_info
from odb_nodes.memory import (
    Calibration,
    CudaMeter,
    MemoryEstimate,
    MemoryMeter,
    enable_checkpointing,
    estimate_training_memory,
    find_budget,
    preflight,
)
from odb_nodes.testing import SavedTensorMeter
from tiny_lm import MAX_TOKENS, VOCABULARY_SIZE, build_model, load_corpus

WIDTHS = (16, 128, MAX_TOKENS)  # the shortest samples, the longest, and one between
MIB = 2**20


def main() -> None:
    """Calibrate, print what was found, and train under it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--limit-mib", type=int, help="default: 140 on a CPU, all of a GPU")
    parser.add_argument("--every", type=int, default=16, help="train on one text in so many")
    parser.add_argument("--attention", default="eager", help="eager or sdpa (%(default)s)")
    parser.add_argument("--checkpointing", action="store_true", help="of activations")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    meter = make_meter(options.device, options.limit_mib)

    size = {} if on_cpu else {"hidden_size": 1024, "layers": 12, "vocabulary_size": 32_000}
    model = build_model(device=options.device, attention=options.attention, **size)
    if options.checkpointing:
        enable_checkpointing(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if on_cpu else 1e-4)

    def train_step(batch: dict[str, torch.Tensor]) -> None:
        with torch.autocast(options.device, torch.bfloat16, enabled=not on_cpu):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def make_batch(rows: int, width: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(VOCABULARY_SIZE, (rows, width), device=options.device)
        mask = torch.ones_like(ids)
        mask[0, 1:] = 0  # padding, as batches of training have: models drop a mask of ones
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}

    states = [model, optimizer]  # all that the steps change
    calibration = find_budget(train_step, make_batch, states=states, meter=meter, widths=WIDTHS)
    if on_cpu:
        print_calibration(calibration, meter.limit_bytes)
    else:
        estimate = partial(
            estimate_training_memory,
            model,
            dtype=torch.bfloat16,
            checkpointing=options.checkpointing,
        )
        print_calibration(calibration, meter.limit_bytes, estimate)
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
    if isinstance(meter, CudaMeter):
        print(f"torch reserved {torch.cuda.max_memory_reserved() / MIB:.1f} MiB in the last step")


def make_meter(device: str, limit_mib: int | None) -> MemoryMeter:
    """Return a meter with a limit, which a GPU is held to."""
    if device == "cpu":
        return SavedTensorMeter((limit_mib or 140) * MIB)
    if limit_mib:
        total_bytes = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(limit_mib * MIB / total_bytes)
    return CudaMeter()


def measured(meter: MemoryMeter) -> AbstractContextManager[Any]:
    """Return the block in which a meter measures."""
    return meter if isinstance(meter, SavedTensorMeter) else nullcontext()


def print_calibration(
    calibration: Calibration,
    limit_bytes: int,
    estimate: Callable[[tuple[int, int]], MemoryEstimate] | None = None,
) -> None:
    """Print the trials, the model and the budget."""
    estimated = "" if estimate is None else "  estimate"
    print(f"limit {limit_bytes / MIB:.0f} MiB\n rows  width  peak, MiB{estimated}")
    for trial in calibration.points:
        if estimate is not None:
            total_bytes = estimate((trial.rows, trial.width)).total_bytes
            estimated = f"{total_bytes / MIB:10.1f}"
        fate = "" if trial.fits else "  does not fit"
        print(f"{trial.rows:5} {trial.width:6} {trial.peak_bytes / MIB:10.1f}{estimated}{fate}")
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
