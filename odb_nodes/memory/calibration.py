"""Find the largest budget by steps of training that are tried."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from odb_nodes._core.checks import check_callable, check_count, check_type
from odb_nodes._core.progress import Bar
from odb_nodes.memory.checkpointing import enable_checkpointing
from odb_nodes.memory.edge_search import Edge, EdgeSearch
from odb_nodes.memory.meter import MemoryMeter, check_meter
from odb_nodes.memory.model import MemoryModel
from odb_nodes.memory.training_state import TrainingState, unchanged_training
from odb_nodes.memory.trials import MakeBatch, TrainStep, Trial, Trials
from odb_nodes.planning import TokenBudget

__all__ = ["Calibration", "find_budget"]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What `find_budget` has found.

    Attributes:
        points: the trials, in their order. The first one is not in the model: in it, the optimizer
            may only begin to have its state.
        model: the model of the others.
        budget: the largest budget whose batches fit.
        tokens_per_s: tokens per second of the largest batches that fitted, one of each width.
        checkpointing: whether the steps were made with activation checkpointing by `find_budget`.
        slower: where both ways were compared, what the slower one gave; else `None`.
    """

    points: tuple[Trial, ...]
    model: MemoryModel
    budget: TokenBudget
    tokens_per_s: float
    checkpointing: bool = False
    slower: Calibration | None = None

    def __repr__(self) -> str:
        budget = ", ".join(
            f"{one.name}={value!r}"
            for one in fields(self.budget)
            if (value := getattr(self.budget, one.name)) != one.default
        )
        parts = [
            f"budget=TokenBudget({budget})",
            f"tokens_per_s={self.tokens_per_s:.0f}",
            f"checkpointing={self.checkpointing}",
            f"points=<{len(self.points)} trials, {sum(one.fits for one in self.points)} fit>",
            "model=...",
        ]
        if self.slower is not None:
            parts.append(f"slower=<{self.slower.tokens_per_s:.0f} tokens per second>")
        return f"{type(self).__name__}(\n    " + ",\n    ".join(parts) + ",\n)"


def find_budget(
    train_step: TrainStep,
    make_batch: MakeBatch,
    *,
    meter: MemoryMeter,
    widths: Sequence[int],
    patches_per_row: int = 0,
    max_trials: int = 24,
    states: Sequence[Any] = (),
    checkpointing: torch.nn.Module | None = None,
) -> Calibration:
    """Find the largest budget whose batches fit into memory, by trying steps of training.

    For each width it doubles the rows of a batch until a step fails or takes more than the limit,
    then bisects. Weights, buffers, gradients, optimizers, schedulers, scalers and random generators
    are afterwards as they were, bitwise, and so they are if a step fails or raises. They are found
    from the variables that `train_step` and `make_batch` use, and kept on the CPU meanwhile.
    Counters and lists of your own in `train_step` are not put back.

    Args:
        train_step: makes one whole step of training with a batch, the optimizer's step included.
        make_batch: (rows, width) -> batch of rows padded to `width` tokens, as those of training
            are; with `patches_per_row` (rows, width, patches) -> batch.
        meter: measures what a step takes, and says what it may take: `CudaMeter()` on a GPU.
        widths: tokens of rows to try: the shortest samples of the data, the longest, and one or two
            between. The budget is verified at these, and predicted between them.
        patches_per_row: image patches of each row of a batch.
        max_trials: most steps, at least 4. Where both ways are compared, of each.
        states: models, optimizers and others that the search from `train_step` does not reach, as
            where it calls a library's function.
        checkpointing: a model to compare with and without activation checkpointing, in tokens per
            second, which is not checkpointed yet. It is left as it was: where
            `Calibration.checkpointing` is true, call `enable_checkpointing(model)`.

    Returns:
        The faster way, where both are compared.

    Raises:
        ShapeTooLargeError: one row of a width does not fit.
        RuntimeError: an optimizer steps that was not found: pass it in `states`.
        TypeError, ValueError: an argument is not valid, or the peaks do not grow with the batch.
        Exception: what `train_step` or `make_batch` raises, if it is not that memory ran out.
    """
    sizes = _check_widths(widths)
    check_meter(meter)
    check_callable("train_step", train_step)
    check_callable("make_batch", make_batch)
    check_count("patches_per_row", patches_per_row, 0)
    check_count("max_trials", max_trials, 4)
    check_type("checkpointing", checkpointing, torch.nn.Module | None)

    def calibrate(state: TrainingState) -> Calibration:
        with Bar(None, "steps tried to find the budget", max_trials) as bar:
            trials = Trials(train_step, make_batch, meter, state, patches_per_row, bar)
            search = EdgeSearch(trials, meter.limit_bytes, max_trials)
            edges = search.run(sizes)
        model = search.model()
        return Calibration(
            points=tuple(trials.done),
            model=model,
            budget=verified_budget(model, edges, meter.limit_bytes, patches_per_row),
            tokens_per_s=_tokens_per_s(trials.done, edges),
        )

    roots = (train_step, make_batch)
    if checkpointing is not None:
        with ExitStack() as stack:
            stack.callback(enable_checkpointing(checkpointing).disable)
            state = stack.enter_context(unchanged_training(roots, states))
            saving = replace(calibrate(state), checkpointing=True)
    with unchanged_training(roots, states) as state:
        plain = calibrate(state)
    if checkpointing is None:
        return plain
    slower, faster = sorted((saving, plain), key=lambda one: one.tokens_per_s)
    return replace(faster, slower=slower)


def _check_widths(widths: Sequence[int]) -> list[int]:
    check_type("widths", widths, list | tuple | range, "Pass a list of lengths in tokens.")
    if not widths:
        raise ValueError("`widths` must have one length or more, but is empty.")
    return sorted({check_count("widths", width) for width in widths})


def verified_budget(
    model: MemoryModel, edges: Sequence[Edge], limit_bytes: int, patches_per_row: int
) -> TokenBudget:
    """Return the model's budget, in the bounds of what fitted and what did not."""
    found = [edge for edge in edges if edge.is_found]
    try:
        budget = model.budget(limit_bytes, threshold=1.0)
        most_tokens = model.budget(limit_bytes, threshold=1.0, margin=0.0).tokens
    except ValueError:
        if not found:
            raise
        budget = _tried_budget(edges, patches_per_row)
        most_tokens = budget.tokens
    tokens = budget.tokens
    if found and not patches_per_row:  # within `max_patches`, batches have fewer rows than tried
        tried_tokens = min(edge.fits * budget.row_cost(edge.width) for edge in found)
        tokens = max(tokens, min(tried_tokens, most_tokens))  # what fitted needs no margin
    for edge in edges:
        most_rows = edge.fits
        if len(found) > 1 and not edge.is_found:  # these tell the model how far it may go
            if edge.fails is None:
                continue
            most_rows = edge.fails - 1
        if budget.max_patches is None or budget.max_patches > most_rows * patches_per_row:
            tokens = min(tokens, (most_rows + 1) * budget.row_cost(edge.width) - 1)
    return replace(budget, tokens=tokens)


def _tried_budget(edges: Sequence[Edge], patches_per_row: int) -> TokenBudget:
    """Return the largest budget whose batches fit because batches of that many rows did."""
    patches = min(edge.fits for edge in edges) * patches_per_row
    return TokenBudget(
        min((edge.fits + 1) * edge.width - 1 for edge in edges), max_patches=patches or None
    )


def _tokens_per_s(trials: Sequence[Trial], edges: Sequence[Edge]) -> float:
    """Return the mean speed over the largest batch of each width that fitted."""
    largest = {(edge.width, edge.fits) for edge in edges}
    timed = {(one.width, one.rows): one for one in trials if (one.width, one.rows) in largest}
    tokens = sum(one.rows * one.width for one in timed.values())
    return tokens / sum(one.seconds for one in timed.values())
