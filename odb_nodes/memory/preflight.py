"""Try the largest batches of a budget before the first step of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from odb_nodes._core.checks import check_callable, check_count
from odb_nodes.memory.failures import ShapeTooLargeError
from odb_nodes.memory.meter import MemoryMeter, check_meter
from odb_nodes.memory.training_state import unchanged_training
from odb_nodes.memory.trials import MakeBatch, TrainStep, Trial, Trials
from odb_nodes.planning import TokenBudget
from odb_nodes.planning.budget import allowed_rows

__all__ = ["preflight"]

CANDIDATES = 512  # widths that are looked at for the fullest batch


def preflight(
    train_step: TrainStep,
    make_batch: MakeBatch,
    budget: int | TokenBudget,
    *,
    meter: MemoryMeter,
    widths: Sequence[int] | None = None,
    patches_per_row: int = 0,
    states: Sequence[Any] = (),
) -> tuple[Trial, ...]:
    """Make a step of training with each of the largest batches that a budget allows.

    These are the batch with the widest rows, that with the most rows, and that which costs the
    most. With `oversize="alone"`, the widest is a row of the longest data, above the budget or not.
    Everything that the steps change is put back, as in `find_budget`. A step is made twice,
    since in the first one the optimizer may only begin to have its state.

    Args:
        train_step: makes one whole step of training with a batch, the optimizer's step included.
        make_batch: (rows, width) -> batch; with `patches_per_row` (rows, width, patches) -> batch.
        budget: the budget of the run; a number is one of so many padded tokens.
        meter: measures what a step takes, and says what it may take.
        widths: lengths of the data, in tokens: the shortest and the longest one suffice. `None`:
            all that the budget allows, which may be longer than the model does.
        patches_per_row: image patches of each row; a batch has `max_patches` at most.
        states: as for `find_budget`.

    Returns:
        The trials, one of each shape.

    Raises:
        ShapeTooLargeError: a batch does not fit.
        RuntimeError: an optimizer steps that was not found: pass it in `states`.
        TypeError, ValueError: an argument is not valid, or the meter sees nothing of the steps.
        Exception: what `train_step` or `make_batch` raises, if it is not that memory ran out.
    """
    budget = TokenBudget.of(budget)
    check_meter(meter)
    check_callable("train_step", train_step)
    check_callable("make_batch", make_batch)
    check_count("patches_per_row", patches_per_row, 0)
    shapes = _largest_shapes(budget, widths)
    with unchanged_training((train_step, make_batch), states) as state:
        trials = Trials(train_step, make_batch, meter, state, patches_per_row)
        for rows, width in (shapes[0], *shapes):
            trial = trials.run(rows, width, budget.max_patches)
            if not trial.fits:
                raise _too_large(trial, budget, meter.limit_bytes)
        trials.check_seen()
    return tuple(trials.done[1:])


def _largest_shapes(budget: TokenBudget, widths: Sequence[int] | None) -> list[tuple[int, int]]:
    """Return rows and width of the widest batch, of the fullest and of the most numerous one."""
    if widths is None:
        lengths = [1, budget.capacity]
    else:
        lengths = [check_count("widths", width) for width in widths]
        if not lengths:
            raise ValueError("`widths` must have one length or more, but is empty.")
    is_alone = max(lengths) > budget.capacity and budget.oversize == "alone"
    alone = [budget.shape([max(lengths)])] * is_alone
    if budget.layout == "packed":
        return [*alone, budget.shape([budget.capacity])]
    shortest, longest = (
        budget.width(min(one, budget.capacity)) for one in (min(lengths), max(lengths))
    )
    candidates = {budget.width(round(one)) for one in np.geomspace(shortest, longest, CANDIDATES)}
    shapes = [(_rows(budget, width), width) for width in sorted(candidates)]
    fullest = max(shapes, key=lambda shape: (shape[0] * budget.row_cost(shape[1]), shape[1]))
    return list(dict.fromkeys((*alone, shapes[-1], fullest, shapes[0])))


def _rows(budget: TokenBudget, width: int) -> int:
    most = budget.tokens // budget.row_cost(width)
    return int(allowed_rows(np.array([min(most, budget.max_samples or most)]), budget.row_sizes)[0])


def _too_large(trial: Trial, budget: TokenBudget, limit_bytes: int) -> ShapeTooLargeError:
    with_patches = f" with {trial.patches} patches" if trial.patches else ""
    remedy = (
        f"Lower `tokens` of the budget, which is {budget.tokens}"
        if trial.rows > 1
        else 'Leave longer samples out, as with `oversize="drop"` and lower `tokens`'
    )
    return ShapeTooLargeError(
        f"a batch of {trial.rows} rows of {trial.width} tokens{with_patches} does not fit: "
        f"{trial.reason(limit_bytes)}. {remedy}, call `find_budget`, or enable checkpointing.",
        trial.rows,
        trial.width,
        trial.patches,
    )
