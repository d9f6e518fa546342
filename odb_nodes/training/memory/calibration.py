"""Trial training steps: find the largest budget that fits into memory, or check a budget."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import ceil, isqrt
from typing import Any

import numpy as np
from torch import nn

from odb_nodes._support.checks import MAX_COUNT, check_count, check_type
from odb_nodes._support.progress import Bar
from odb_nodes.core.planning import StepTime, TokenBudget
from odb_nodes.core.planning.budget import allowed_rows
from odb_nodes.training.memory.checkpointing import enable_checkpointing
from odb_nodes.training.memory.meter import MemoryMeter, ShapeTooLargeError, warn_of_fragments
from odb_nodes.training.memory.model import MemoryModel, design_of, fitted_time
from odb_nodes.training.memory.trials import MakeBatch, TrainStep, Trial, Trials, checked_widths

TOLERANCE = 0.02  # width of an exact bracket, as a share of the rows that fit
LARGEST_LEAP = 8  # most rows of the next trial, as a multiple of the rows that fit
MOST_EXTRAPOLATED = 32  # most room above the larger of two peaks, in differences of the peaks
STALLED_TOKENS = 2**22  # if a larger batch takes no more than the smallest, memory never grows
LEAST_TRIALS = 2  # for each width: a trial that fits and a trial that does not
ENOUGH_POINTS = 4  # trials that suffice to fit the model to large batches alone
MISFIT = 0.1  # relative error from which the model is fitted to large batches alone
CANDIDATE_WIDTHS = 512  # widths that are compared to find the fullest batch


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The result of `find_budget`.

    Attributes:
        points: the trials, in their order; most of them are the points of `model`.
        model: the memory model of the trials. It omits the first trial, before which the optimizer
            may have no state, and small batches if their peak is the optimizer's step.
        budget: the largest budget whose batches fit.
        tokens_per_s: tokens per second of the largest batches that fit, averaged over widths.
        step_time: seconds of a step, fitted to the trials that fit into memory; `None` if they have
            a single width, which does not separate attention from tokens. Records of a run give a
            better fit: see `odb_nodes.monitor.fitted_step_time`.
        checkpointing: whether `find_budget` enabled activation checkpointing for these trials.
        slower: the slower calibration, if `find_budget` compared both ways; else `None`.
    """

    points: tuple[Trial, ...] = field(repr=False)
    model: MemoryModel = field(repr=False)
    budget: TokenBudget
    tokens_per_s: float
    step_time: StepTime | None
    checkpointing: bool = False
    slower: Calibration | None = field(default=None, repr=False)


def find_budget(
    train_step: TrainStep,
    make_batch: MakeBatch,
    *,
    states: Sequence[Any],
    meter: MemoryMeter,
    widths: Sequence[int],
    patches_per_row: int = 0,
    max_trials: int = 24,
    checkpointing: nn.Module | None = None,
) -> Calibration:
    """Find the largest budget whose batches fit into memory, by trial training steps.

    For each width, the search adds rows to a batch until a step fails or exceeds the limit, then
    bisects. It copies all `states` and the random generators of torch, numpy and Python to the CPU,
    and restores them bitwise, even if a step fails or raises. Other changes that `train_step` and
    `make_batch` make remain.

    Args:
        train_step: trains on a batch: forward, backward and the optimizer's step.
        make_batch: (rows, width) -> batch of rows padded to `width` tokens, as in training; with
            `patches_per_row` (rows, width, patches) -> batch.
        states: everything that the steps change: models with their gradients and buffers,
            optimizers, random generators, and objects with `state_dict` and `load_state_dict`, such
            as schedulers and scalers.
        meter: measures the memory of a step and holds the limit: `CudaMeter()` on a GPU.
        widths: row lengths to try, in tokens: the shortest samples of the data, the longest, and
            one or two between. The budget is verified at these widths and predicted between them.
        patches_per_row: image patches of each row of a batch.
        max_trials: most steps, at least 4; with `checkpointing`, most steps with and most without.
        checkpointing: a model to compare with and without activation checkpointing, in tokens per
            second. It must not be checkpointed yet. If `Calibration.checkpointing` is true, call
            `enable_checkpointing(model)` afterwards.

    Returns:
        The calibration; with `checkpointing`, the faster of both.

    Raises:
        ShapeTooLargeError: one row of a width does not fit.
        RuntimeError: an optimizer steps that is not in `states`.
        TypeError, ValueError: an argument is not valid, or the peaks do not grow with the batch.
        Exception: any error of `train_step` or `make_batch` other than out of memory.
    """
    widths_tried = sorted({*checked_widths(widths)})
    check_count("max_trials", max_trials, 4)
    check_type("checkpointing", checkpointing, nn.Module | None)
    warn_of_fragments(meter)

    def calibrate() -> Calibration:
        with Bar(None, "steps tried to find the budget", max_trials) as bar:
            search = BudgetSearch(train_step, make_batch, states, meter, patches_per_row, bar)
            with search:
                brackets = search.find(widths_tried, max_trials)
        return Calibration(
            points=tuple(search.done),
            model=search.model(),
            budget=search.verified_budget(brackets),
            tokens_per_s=search.tokens_per_s(brackets),
            step_time=search.step_time(),
        )

    if checkpointing is None:
        return calibrate()
    with ExitStack() as stack:
        stack.callback(enable_checkpointing(checkpointing).disable)
        checkpointed = replace(calibrate(), checkpointing=True)
    slower, faster = sorted((checkpointed, calibrate()), key=lambda way: way.tokens_per_s)
    return replace(faster, slower=slower)


def preflight(
    train_step: TrainStep,
    make_batch: MakeBatch,
    budget: int | TokenBudget,
    *,
    states: Sequence[Any],
    meter: MemoryMeter,
    widths: Sequence[int] | None = None,
    patches_per_row: int = 0,
) -> tuple[Trial, ...]:
    """Try a training step with each of the largest batches that a budget allows.

    These are the batch with the widest rows, the batch with the most rows, and the most expensive
    batch. With `oversize="alone"`, the widest is a row of the longest sample, even above the
    budget. Everything that the steps change is restored, as in `find_budget`. The first shape is
    tried twice, since the optimizer may create its state in the first step.

    Args:
        train_step: as for `find_budget`.
        make_batch: as for `find_budget`.
        budget: the budget of the run; a number counts padded tokens.
        states: as for `find_budget`.
        meter: measures the memory of a step and holds the limit.
        widths: sample lengths of the data, in tokens: the shortest and the longest suffice. `None`:
            all lengths that the budget allows, which may exceed the model's.
        patches_per_row: image patches of each row; a batch has `max_patches` at most.

    Returns:
        The trials, one for each shape.

    Raises:
        ShapeTooLargeError: a batch does not fit.
        RuntimeError: an optimizer steps that is not in `states`.
        TypeError, ValueError: an argument is not valid, or the meter measures nothing of the steps.
        Exception: any error of `train_step` or `make_batch` other than out of memory.
    """
    budget = TokenBudget.of(budget)
    shapes = _largest_shapes(budget, [1, budget.capacity] if widths is None else widths)
    trials = Trials(train_step, make_batch, states, meter, patches_per_row)
    with trials:
        for rows, width in (shapes[0], *shapes):
            trial = trials.run(rows, width, budget.max_patches)
            if not trial.fits:
                with_patches = f" with {trial.patches} patches" if trial.patches else ""
                remedy = (
                    f"Lower `tokens` of the budget, which is {budget.tokens}"
                    if rows > 1
                    else 'Leave longer samples out, as with `oversize="drop"` and lower `tokens`'
                )
                raise ShapeTooLargeError(
                    f"a batch of {rows} rows of {width} tokens{with_patches} does not fit: "
                    f"{trial.reason(meter.limit_bytes)}. {remedy}, call `find_budget`, or enable "
                    "checkpointing.",
                    rows,
                    width,
                    trial.patches,
                )
        trials.check_meter_measures()
    return tuple(trials.done[1:])


def _largest_shapes(budget: TokenBudget, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return rows and width of the widest batch, the most expensive one, the one of most rows."""
    lengths = checked_widths(lengths)
    is_alone = max(lengths) > budget.capacity and budget.oversize == "alone"
    alone = [budget.shape([max(lengths)])] if is_alone else []
    if budget.layout == "packed":
        return [*alone, budget.shape([budget.capacity])]
    shortest, longest = (
        budget.width(min(length, budget.capacity)) for length in (min(lengths), max(lengths))
    )
    candidates = {
        budget.width(round(width)) for width in np.geomspace(shortest, longest, CANDIDATE_WIDTHS)
    }
    shapes = [(_most_rows(budget, width), width) for width in sorted(candidates)]
    fullest = max(shapes, key=lambda shape: (shape[0] * budget.row_cost(shape[1]), shape[1]))
    return list(dict.fromkeys((*alone, shapes[-1], fullest, shapes[0])))


def _most_rows(budget: TokenBudget, width: int) -> int:
    most = budget.tokens // budget.row_cost(width)
    return int(allowed_rows(np.array([min(most, budget.max_samples or most)]), budget.row_sizes)[0])


@dataclass
class Bracket:
    """What the trials of a width have shown."""

    width: int
    fitting_rows: int = 0  # the most rows that fit; 0: none yet
    failing_rows: int | None = None  # the fewest rows that do not

    @property
    def tolerance(self) -> int:
        """How close `fitting_rows` and `failing_rows` must be, in rows."""
        return max(ceil(TOLERANCE * self.fitting_rows), 1)

    @property
    def most_rows(self) -> int:
        """The most rows of a trial: more would exceed the largest budget."""
        return max(MAX_COUNT // self.width - 1, 1)

    @property
    def is_exact(self) -> bool:
        """Whether `fitting_rows` is close to the most rows that fit."""
        return (
            self.failing_rows is not None
            and self.failing_rows - self.fitting_rows <= self.tolerance
        )


class BudgetSearch(Trials):
    """Finds in few trials how many rows of each width fit, and derives the budget."""

    def find(self, widths: Sequence[int], max_trials: int) -> list[Bracket]:
        """Return the bracket of each width that `max_trials` trials reached."""
        self._try(Bracket(widths[0]), 1)  # The optimizer may create its state here.
        *between, widest = widths
        brackets: list[Bracket] = []
        for number, width in enumerate([widest, *between]):
            bracket = Bracket(width)
            if not self._per_row:  # Tokens that fit in wider rows fit in these.
                wider = [earlier for earlier in brackets if earlier.width > width]
                fitting = [earlier.fitting_rows * earlier.width // width for earlier in wider]
                bracket.fitting_rows = max(fitting, default=0)
            brackets.append(bracket)
            trials_left = max_trials - len(self.done)
            reserved = LEAST_TRIALS * (len(widths) - number - 1)  # for the other widths
            for _ in range(max(trials_left - reserved, min(LEAST_TRIALS, trials_left))):
                self._try(bracket, min(self._next_rows(bracket), bracket.most_rows))
                if bracket.is_exact or bracket.fitting_rows == bracket.most_rows:
                    break
        return [bracket for bracket in brackets if bracket.fitting_rows or bracket.failing_rows]

    def model(self) -> MemoryModel:
        """Return a model of the finished trials; only of large ones if small ones do not match."""
        ended = self._ended()
        model = _model_of(ended)
        # The peak of a small batch may be the optimizer's step, which does not depend on the batch.
        large = [trial for trial in ended if 2 * trial.peak_bytes > self._meter.limit_bytes]
        if len(large) < ENOUGH_POINTS or model.fit().error < MISFIT:
            return model
        return _model_of(large)

    def verified_budget(self, brackets: Sequence[Bracket]) -> TokenBudget:
        """Return the model's budget, within the bounds that the trials set."""
        exact = [bracket for bracket in brackets if bracket.is_exact]
        budget, most_tokens = self._predicted_budget(brackets, must_predict=not exact)
        tokens = budget.tokens
        if exact and not self._per_row:  # With `max_patches`, batches have fewer rows than tried.
            costs = [tried.fitting_rows * budget.row_cost(tried.width) for tried in exact]
            tokens = max(tokens, min(*costs, most_tokens))  # A batch that fit needs no margin.
        for bracket in brackets:
            most_rows = bracket.fitting_rows
            if len(exact) > 1 and not bracket.is_exact:  # The exact brackets determine the model.
                if bracket.failing_rows is None:
                    continue
                most_rows = bracket.failing_rows - 1
            if budget.max_patches is None or budget.max_patches > most_rows * self._per_row:
                tokens = min(tokens, (most_rows + 1) * budget.row_cost(bracket.width) - 1)
        return replace(budget, tokens=tokens)

    def _predicted_budget(
        self, brackets: Sequence[Bracket], *, must_predict: bool
    ) -> tuple[TokenBudget, int]:
        """Return the budget of the model, and its tokens without a margin."""
        model = self.model()
        limit_bytes = self._meter.limit_bytes
        try:
            budget = model.budget(limit_bytes, threshold=1.0)
            return budget, model.budget(limit_bytes, threshold=1.0, margin=0.0).tokens
        except ValueError:
            if must_predict:
                raise
        patches = min(bracket.fitting_rows for bracket in brackets) * self._per_row
        tokens = min((bracket.fitting_rows + 1) * bracket.width - 1 for bracket in brackets)
        return TokenBudget(tokens, max_patches=patches or None), tokens

    def tokens_per_s(self, brackets: Sequence[Bracket]) -> float:
        """Return the mean tokens per second over the largest batch of each width that fit."""
        largest = {(bracket.width, bracket.fitting_rows) for bracket in brackets}
        seconds = {(trial.width, trial.rows): trial.seconds for trial in self.done}
        tried = largest & {*seconds}  # That some rows fit may follow from wider rows, untried.
        return sum(width * rows for width, rows in tried) / sum(seconds[shape] for shape in tried)

    def step_time(self) -> StepTime | None:
        """Return the fitted time of the steps that fit; `None` if they have a single width."""
        trials = [trial for trial in self._ended() if trial.fits]
        if len({trial.width for trial in trials}) < 2:
            return None
        design = design_of((trial.rows, trial.width, trial.patches) for trial in trials)
        return fitted_time(design, np.array([trial.seconds for trial in trials]))

    def _ended(self) -> list[Trial]:
        return [trial for trial in self.done[1:] if not trial.error]

    def _try(self, bracket: Bracket, rows: int) -> None:
        trial = self.run(rows, bracket.width)
        if trial.fits:
            bracket.fitting_rows = max(bracket.fitting_rows, rows)
            self._check_growth()
        elif rows > 1:
            bracket.failing_rows = min(rows, bracket.failing_rows or rows)
        else:
            raise ShapeTooLargeError(
                f"a single row of {bracket.width} tokens does not fit: "
                f"{trial.reason(self._meter.limit_bytes)}. "
                "Leave out longer samples, enable checkpointing, or shard the model.",
                rows,
                bracket.width,
                trial.patches,
            )

    def _check_growth(self) -> None:
        peaks = {trial.rows * trial.width: trial.peak_bytes for trial in self._ended()}
        if len({*peaks.values()}) == 1 and max(peaks) > STALLED_TOKENS:
            raise ValueError(
                f"a batch of {max(peaks):,} tokens takes as much as one of {min(peaks):,}, "
                f"{peaks[max(peaks)]:,} bytes: the meter does not see how memory grows with the "
                "batch, or `train_step` does not use the batch."
            )

    def _next_rows(self, bracket: Bracket) -> int:
        fitting, failing = bracket.fitting_rows, bracket.failing_rows
        expected = self._expected_rows(bracket.width)
        most = max(LARGEST_LEAP * fitting, 1)
        if failing is None:
            return (
                most if expected is None else min(max(expected, fitting + bracket.tolerance), most)
            )
        failed = [trial for trial in self.done if trial.width == bracket.width and not trial.fits]
        is_misled = expected is not None and expected >= failing and len(failed) > 1
        if expected is None or expected < fitting or is_misled:
            rows = isqrt(fitting * failing)
        else:
            first, last = fitting + bracket.tolerance, failing - bracket.tolerance
            rows = min(max(expected, first), last) if first < last else (first + last) // 2
        return min(max(rows, fitting + 1), failing - 1)

    def _expected_rows(self, width: int) -> int | None:
        """Return how many rows of a width should fit; `None` if the trials cannot tell."""
        peaks = {trial.rows: trial.peak_bytes for trial in self._ended() if trial.width == width}
        if len(peaks) >= 2:
            fewer, more = sorted(peaks)[-2:]
            difference = peaks[more] - peaks[fewer]
            room_bytes = self._meter.limit_bytes - peaks[more]
            if difference <= 0 or room_bytes > MOST_EXTRAPOLATED * difference:
                return None
            return more + int(room_bytes * (more - fewer) // difference)
        if len({trial.width for trial in self._ended()} - {width}) < 2:
            return None
        model = self.model()
        first_bytes = model.predict(1, width, self._per_row)
        row_bytes = (model.predict(1001, width, 1001 * self._per_row) - first_bytes) / 1000
        if row_bytes <= 0:
            return None
        return 1 + int((self._meter.limit_bytes - first_bytes) // row_bytes)


def _model_of(trials: Sequence[Trial]) -> MemoryModel:
    model = MemoryModel()
    for trial in trials:
        model.add(trial.rows, trial.width, trial.patches, trial.peak_bytes)
    return model
