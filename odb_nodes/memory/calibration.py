"""Try steps of training: find the largest budget that fits, or check one before a run."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, isqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from odb_nodes._compat.torch import forget_step
from odb_nodes._core.checks import MAX_COUNT, check_callable, check_count, check_type, describe
from odb_nodes._core.progress import Bar
from odb_nodes._core.seeds import GENERATORS, load_rngs, put_back, save_rngs, state_of
from odb_nodes._core.user_warning import warn_user
from odb_nodes.memory.checkpointing import enable_checkpointing
from odb_nodes.memory.meter import (
    MemoryMeter,
    ShapeTooLargeError,
    check_meter,
    free_memory,
    is_out_of_memory,
    measuring,
    warn_of_fragments,
)
from odb_nodes.memory.model import MemoryModel, design_of, fitted_time
from odb_nodes.planning import StepTime, TokenBudget
from odb_nodes.planning.budget import allowed_rows

TrainStep = Callable[[Any], Any]
MakeBatch = Callable[..., Any]
"""(rows, width), or (rows, width, patches) where rows have patches, -> batch."""

TOLERANCE = 0.02  # of the rows that fit: a bracket that is not wider is good enough
LARGEST_LEAP = 8  # times the rows that fit, which the next trial may have at most
FARTHEST = 32  # times the difference of two peaks, to which these tell the edge
STALLED_TOKENS = 2**22  # of a batch that takes no more than the smallest one: nothing grows
LEAST_TRIALS = 2  # of each width: one that fits and one that does not
TRIALS_TO_SEE = 3  # after which a meter that has seen nothing is one that sees nothing
ENOUGH_POINTS = 4  # for a model of large batches alone
MISFIT = 0.1  # relative error of a model of all batches, from which on there is one
CANDIDATES = 512  # widths that are looked at for the fullest batch


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One step of training with a batch of one shape.

    Attributes:
        rows: rows of the batch.
        width: tokens of each row.
        patches: image patches of the batch.
        peak_bytes: what the step took at its peak; where it failed, up to then.
        fits: whether it ended, and took no more than the meter's limit.
        seconds: how long it took.
        error: what the step that ran out of memory said; `""` for others.
    """

    rows: int
    width: int
    patches: int
    peak_bytes: int
    fits: bool
    seconds: float
    error: str = ""

    def reason(self, limit_bytes: int) -> str:
        """Return, for an error, why the step does not fit under a meter's limit."""
        taken = f"it took {self.peak_bytes:,} bytes, but the limit is {limit_bytes:,}"
        return self.error.strip().rstrip(".") or taken


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The result of `find_budget`.

    Attributes:
        points: the trials, in their order.
        model: a model of the trials, but for the first one, in which the optimizer may only begin
            to have its state, and for small batches where these take no more than its step does.
        budget: the largest budget whose batches fit.
        tokens_per_s: tokens per second of the largest batches that fitted, one of each width.
        step_time: what a step takes, in seconds, fitted to the steps that fitted into memory, each
            made once; `None` where these are of one width, which does not tell attention from
            tokens. The log of a run tells more: see `odb_nodes.monitor.fitted_step_time`.
        checkpointing: whether the steps were made with activation checkpointing by `find_budget`.
        slower: where both ways were compared, what the slower one gave; else `None`.
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
    """Find the largest budget whose batches fit into memory, by trying steps of training.

    For each width it raises the rows of a batch until a step fails or takes more than the limit,
    then bisects. It keeps all `states`, and the random generators of torch, numpy and Python, on
    the CPU, and restores them bitwise, even if a step fails or raises. Other changes that
    `train_step` and `make_batch` make remain.

    Args:
        train_step: makes one whole step of training with a batch, the optimizer's step included.
        make_batch: (rows, width) -> batch of rows padded to `width` tokens, as in training; with
            `patches_per_row` (rows, width, patches) -> batch.
        states: all that the steps change: models with their gradients and buffers, optimizers,
            random generators, and others that have `state_dict` and `load_state_dict`, such as
            schedulers and scalers.
        meter: measures the memory of a step, and has its limit: `CudaMeter()` on a GPU.
        widths: tokens of rows to try: the shortest samples of the data, the longest, and one or two
            between. The budget is verified at these, and predicted between them.
        patches_per_row: image patches of each row of a batch.
        max_trials: most steps, at least 4; with `checkpointing`, most steps of each way.
        checkpointing: a model to compare with and without activation checkpointing, in tokens per
            second. It must not be checkpointed yet, and is left as it was: if
            `Calibration.checkpointing` is true, call `enable_checkpointing(model)`.

    Returns:
        The calibration; with `checkpointing`, of the faster way.

    Raises:
        ShapeTooLargeError: one row of a width does not fit.
        RuntimeError: an optimizer steps that is not in `states`.
        TypeError, ValueError: an argument is not valid, or the peaks do not grow with the batch.
        Exception: what `train_step` or `make_batch` raises, if it is not that memory ran out.
    """
    sizes = sorted(set(_checked_widths(widths)))
    check_count("max_trials", max_trials, 4)
    check_type("checkpointing", checkpointing, nn.Module | None)
    warn_of_fragments(meter)

    def calibrate() -> Calibration:
        with Bar(None, "steps tried to find the budget", max_trials) as bar:
            search = BudgetSearch(train_step, make_batch, states, meter, patches_per_row, bar)
            with search:
                brackets = search.find(sizes, max_trials)
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
        saving = replace(calibrate(), checkpointing=True)
    slower, faster = sorted((saving, calibrate()), key=lambda one: one.tokens_per_s)
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
    """Make a step of training with each of the largest batches that a budget allows.

    These are the batch with the widest rows, the batch with the most rows, and the most expensive
    batch. With `oversize="alone"`, the widest is a row of the longest data, above the budget or
    not. Everything that the steps change is restored, as in `find_budget`. Each step is made twice,
    since the optimizer may create its state in the first one.

    Args:
        train_step: as for `find_budget`.
        make_batch: as for `find_budget`.
        budget: the budget of the run; a number counts padded tokens.
        states: as for `find_budget`.
        meter: measures the memory of a step, and has its limit.
        widths: lengths of the data, in tokens: the shortest and the longest one suffice. `None`:
            all that the budget allows, which may be longer than the model does.
        patches_per_row: image patches of each row; a batch has `max_patches` at most.

    Returns:
        The trials, one of each shape.

    Raises:
        ShapeTooLargeError: a batch does not fit.
        RuntimeError: an optimizer steps that is not in `states`.
        TypeError, ValueError: an argument is not valid, or the meter sees nothing of the steps.
        Exception: what `train_step` or `make_batch` raises, if it is not that memory ran out.
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
        trials.check_seen()
    return tuple(trials.done[1:])


def _largest_shapes(budget: TokenBudget, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return rows and width of the widest batch, of the fullest and of the most numerous one."""
    lengths = _checked_widths(lengths)
    is_alone = max(lengths) > budget.capacity and budget.oversize == "alone"
    alone = [budget.shape([max(lengths)])] * is_alone
    if budget.layout == "packed":
        return [*alone, budget.shape([budget.capacity])]
    shortest, longest = (
        budget.width(min(one, budget.capacity)) for one in (min(lengths), max(lengths))
    )
    candidates = {budget.width(round(one)) for one in np.geomspace(shortest, longest, CANDIDATES)}
    shapes = [(_most_rows(budget, width), width) for width in sorted(candidates)]
    fullest = max(shapes, key=lambda shape: (shape[0] * budget.row_cost(shape[1]), shape[1]))
    return list(dict.fromkeys((*alone, shapes[-1], fullest, shapes[0])))


def _most_rows(budget: TokenBudget, width: int) -> int:
    most = budget.tokens // budget.row_cost(width)
    return int(allowed_rows(np.array([min(most, budget.max_samples or most)]), budget.row_sizes)[0])


def _checked_widths(widths: Sequence[int]) -> list[int]:
    check_type("widths", widths, list | tuple | range, "Pass a list of lengths in tokens.")
    if not widths:
        raise ValueError("`widths` must have one length or more, but is empty.")
    return [check_count("widths", width) for width in widths]


# --- trials ---------------------------------------------------------------------------------------


class Trials:
    """Makes steps of training with batches of given shapes, and puts back what they change."""

    def __init__(
        self,
        train_step: TrainStep,
        make_batch: MakeBatch,
        states: Sequence[Any],
        meter: MemoryMeter,
        patches_per_row: int,
        bar: Bar | None = None,
    ) -> None:
        check_callable("train_step", train_step)
        check_callable("make_batch", make_batch)
        self._train_step, self._make_batch, self._bar = train_step, make_batch, bar
        self._per_row = check_count("patches_per_row", patches_per_row, 0)
        self._meter = check_meter(meter)
        self._state = TrainingState(states)
        self.done: list[Trial] = []
        self._is_seen = False  # something, by the meter

    def __enter__(self) -> None:
        self._handle = register_optimizer_step_pre_hook(self._state.check_known)

    def __exit__(self, *error: object) -> None:
        self._handle.remove()
        free_memory()
        self._state.restore()

    def run(self, rows: int, width: int, most_patches: int | None = None) -> Trial:
        """Make one step with a batch of a shape."""
        meter, patches = self._meter, rows * self._per_row
        if most_patches is not None:
            patches = min(patches, most_patches)
        shape = (rows, width, patches) if self._per_row else (rows, width)
        failure: Exception | None = None
        weights, has_gradients = self._state.weights, set[bool]()
        without = [weight for weight in weights if weight.grad is None]
        hook = register_multi_grad_hook(weights, lambda _: has_gradients.add(True), mode="any")
        with measuring(meter):
            meter.reset()
            idle_bytes = meter.peak_bytes()
            start_s = time.perf_counter()
            try:
                self._train_step(self._make_batch(*shape))
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()  # an error may come only then
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
            finally:
                hook.remove()
            seconds = time.perf_counter() - start_s
            peak_bytes = meter.peak_bytes()
        if failure is not None:
            free_memory(failure)
            for weight in without:
                weight.grad = None
        self._state.restore_values()
        trial = Trial(
            rows=rows,
            width=width,
            patches=patches,
            peak_bytes=peak_bytes,
            fits=failure is None and peak_bytes <= meter.limit_bytes,
            seconds=seconds,
            error="" if failure is None else str(failure),
        )
        self.done.append(trial)
        self._is_seen |= peak_bytes > idle_bytes
        if self._bar is not None:
            outcome = f"fits, {trial.peak_bytes / 2**30:.2f} GiB" if trial.fits else "does not fit"
            self._bar.set_postfix_str(f"{rows} x {width} {outcome}", refresh=False)
            self._bar.update()
        if len(self.done) == 1 and failure is None and weights and not has_gradients:
            warn_user(
                "`train_step` has computed no gradient of the weights in `states`. If it makes no "
                "backward pass, a step of training takes more than is measured."
            )
        if len(self.done) == TRIALS_TO_SEE:
            self.check_seen()
        return trial

    def check_seen(self) -> None:
        """Check that the meter has seen something of the trials."""
        if not self._is_seen:
            trial = self.done[-1]
            raise ValueError(
                f"`meter` sees nothing of `train_step`: {len(self.done)} steps, the last one with "
                f"{trial.rows} rows of {trial.width} tokens, took no more than the "
                f"{trial.peak_bytes:,} bytes that were taken before. Pass a meter of the device "
                "that the model and its batches are on."
            )


# --- the search -----------------------------------------------------------------------------------


@dataclass
class Bracket:
    """The most rows of a width that fit, 0 for none yet, and the fewest that do not."""

    width: int
    fits: int = 0
    fails: int | None = None

    @property
    def step(self) -> int:
        """Rows that a bracket may be wide."""
        return max(ceil(TOLERANCE * self.fits), 1)

    @property
    def most(self) -> int:
        """Rows that a trial may have, so that a budget can hold the batch."""
        return max(MAX_COUNT // self.width - 1, 1)

    @property
    def is_found(self) -> bool:
        """Whether the edge is between two numbers of rows that are close enough."""
        return self.fails is not None and self.fails - self.fits <= self.step


class BudgetSearch(Trials):
    """Finds how many rows of each width fit, in few trials, and the budget that follows."""

    def find(self, widths: Sequence[int], max_trials: int) -> list[Bracket]:
        """Return the bracket of each width, as far as the trials suffice."""
        self._try(Bracket(widths[0]), 1)  # in which the optimizer may begin to have its state
        *between, widest = widths
        brackets: list[Bracket] = []
        for number, width in enumerate([widest, *between]):
            bracket = Bracket(width)
            if not self._per_row:  # as many tokens as fit in wider rows
                wider = (one for one in brackets if one.width > width)
                bracket.fits = max((one.fits * one.width // width for one in wider), default=0)
            brackets.append(bracket)
            left = max_trials - len(self.done)
            for_others = LEAST_TRIALS * (len(widths) - number - 1)
            for _ in range(max(left - for_others, min(LEAST_TRIALS, left))):
                self._try(bracket, min(self._next_rows(bracket), bracket.most))
                if bracket.is_found or bracket.fits == bracket.most:
                    break
        return [one for one in brackets if one.fits or one.fails]

    def model(self) -> MemoryModel:
        """Return a model of the steps that ended: of large ones, where small ones do not fit in."""
        ended = self._ended()
        model = _model_of(ended)
        # Small ones may take no more than the optimizer's own step does, which shows nothing.
        large = [one for one in ended if 2 * one.peak_bytes > self._meter.limit_bytes]
        if len(large) < ENOUGH_POINTS or model.fit().error < MISFIT:
            return model
        return _model_of(large)

    def verified_budget(self, brackets: Sequence[Bracket]) -> TokenBudget:
        """Return the model's budget, in the bounds of what fitted and what did not."""
        model, found = self.model(), [one for one in brackets if one.is_found]
        try:
            budget = model.budget(self._meter.limit_bytes, threshold=1.0)
            most_tokens = model.budget(self._meter.limit_bytes, threshold=1.0, margin=0.0).tokens
        except ValueError:
            if not found:
                raise
            patches = min(one.fits for one in brackets) * self._per_row
            most_tokens = min((one.fits + 1) * one.width - 1 for one in brackets)
            budget = TokenBudget(most_tokens, max_patches=patches or None)
        tokens = budget.tokens
        if found and not self._per_row:  # with `max_patches`, batches have fewer rows than tried
            tried_tokens = min(one.fits * budget.row_cost(one.width) for one in found)
            tokens = max(tokens, min(tried_tokens, most_tokens))  # what fitted needs no margin
        for one in brackets:
            most_rows = one.fits
            if len(found) > 1 and not one.is_found:  # these tell the model how far it may go
                if one.fails is None:
                    continue
                most_rows = one.fails - 1
            if budget.max_patches is None or budget.max_patches > most_rows * self._per_row:
                tokens = min(tokens, (most_rows + 1) * budget.row_cost(one.width) - 1)
        return replace(budget, tokens=tokens)

    def tokens_per_s(self, brackets: Sequence[Bracket]) -> float:
        """Return the mean speed over the largest batch of each width that fitted."""
        largest = {(one.width, one.fits) for one in brackets}
        timed = {(one.width, one.rows): one.seconds for one in self.done}
        tried = largest & {*timed}  # more rows of a width than these may have fitted untried
        return sum(width * rows for width, rows in tried) / sum(timed[one] for one in tried)

    def step_time(self) -> StepTime | None:
        """Return the time of the steps that fitted, but for the first one, if it can be told."""
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
            bracket.fits = max(bracket.fits, rows)
            self._check_growth()
        elif rows > 1:
            bracket.fails = rows if bracket.fails is None else min(bracket.fails, rows)
        else:
            raise ShapeTooLargeError(
                f"a single row of {bracket.width} tokens does not fit: "
                f"{trial.reason(self._meter.limit_bytes)}. "
                "Leave longer samples out, enable checkpointing, or shard the model.",
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
                "batch, or `train_step` does not use it."
            )

    def _next_rows(self, bracket: Bracket) -> int:
        fits, fails, expected = bracket.fits, bracket.fails, self._expected_rows(bracket.width)
        most = max(LARGEST_LEAP * fits, 1)
        if fails is None:
            return most if expected is None else min(max(expected, fits + bracket.step), most)
        first, last = fits + bracket.step, fails - bracket.step
        done = self.done
        failed = [one for one in done if one.width == bracket.width and not one.fits]
        is_misled = expected is not None and expected >= fails and len(failed) > 1
        if expected is None or expected < fits or is_misled:
            rows = isqrt(fits * fails)
        else:
            rows = min(max(expected, first), last) if first < last else (first + last) // 2
        return min(max(rows, fits + 1), fails - 1)

    def _expected_rows(self, width: int) -> int | None:
        """Return how many rows of a width should fit, if anything tells."""
        peaks = {one.rows: one.peak_bytes for one in self._ended() if one.width == width}
        if len(peaks) >= 2:
            fewer, more = sorted(peaks)[-2:]
            difference = peaks[more] - peaks[fewer]
            room_bytes = self._meter.limit_bytes - peaks[more]
            if difference <= 0 or room_bytes > FARTHEST * difference:
                return None
            return more + int(room_bytes * (more - fewer) // difference)
        if len({one.width for one in self._ended()} - {width}) < 2:
            return None
        model = self.model()
        one, two = (model.predict(rows, width, rows * self._per_row) for rows in (1, 1001))
        row_bytes = (two - one) / 1000
        return 1 + int((self._meter.limit_bytes - one) // row_bytes) if row_bytes > 0 else None


def _model_of(trials: Sequence[Trial]) -> MemoryModel:
    model = MemoryModel()
    for trial in trials:
        model.add(trial.rows, trial.width, trial.patches, trial.peak_bytes)
    return model


# --- what the steps change ------------------------------------------------------------------------


class TrainingState:
    """What training changes in some objects, and the global generators: kept on the CPU."""

    def __init__(self, states: Sequence[Any]) -> None:
        check_type("states", states, list | tuple, "Pass a list of models, optimizers and others.")
        self._optimizers: list[tuple[Optimizer, Any]] = []
        self._groups: list[tuple[dict[str, Any], Any]] = []
        self._others: list[tuple[Callable[[Any], Any], Any]] = []
        self._scalers = [one for one in states if isinstance(one, torch.amp.GradScaler)]
        modules: dict[nn.Module, None] = {}
        for one in states:
            if isinstance(one, nn.Module):
                modules |= dict.fromkeys(one.modules())
            elif isinstance(one, Optimizer):
                self._optimizers.append((one, _copied(dict(one.state))))
                options = ({**group, "params": None} for group in one.param_groups)
                self._groups += zip(one.param_groups, map(_copied, options), strict=True)
            elif isinstance(one, GENERATORS):
                self._others.append((partial(put_back, one), _copied(state_of(one))))
            elif hasattr(one, "state_dict") and hasattr(one, "load_state_dict"):
                self._others.append((one.load_state_dict, _copied(one.state_dict())))
            else:
                raise TypeError(
                    "`states` must be models, optimizers, random generators and others with "
                    f"`state_dict` and `load_state_dict`, but one is {describe(one)} instead."
                )
        self._others.append((load_rngs, _copied(save_rngs())))
        known = [weight for one in modules for weight in one.parameters(recurse=False)]
        known += [weight for group, _ in self._groups for weight in group["params"]]
        self._values = {one: (_copied(one.data), _copied(one.grad)) for one in known}
        self._buffers = [
            (one._buffers, name, _copied(buffer))
            for one in modules
            for name, buffer in one._buffers.items()
        ]
        self.weights = [weight for weight in self._values if weight.requires_grad]

    def check_known(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Raise an error if what an optimizer is about to change is not kept."""
        is_known = any(one.state is optimizer.state for one, _ in self._optimizers)
        groups = optimizer.param_groups
        if not is_known or any(
            one not in self._values for group in groups for one in group["params"]
        ):
            raise RuntimeError(
                f"`train_step` makes a step of an `{type(optimizer).__name__}` that is not in "
                "`states`, so its weights could not be put back. Pass `states=[model, optimizer]`, "
                "and all else that the steps change."
            )

    def restore_values(self) -> None:
        """Put back what decides the next step, in no more memory than in the middle of a run."""
        for weight, (value, _) in self._values.items():
            weight.data.copy_(value.data)
        for buffers, name, saved in self._buffers:
            buffers[name] = _put_back(buffers.get(name), saved)
        for load, state in self._others:
            load(_copied(state))
        for scaler in self._scalers:
            forget_step(scaler)

    def restore(self) -> None:
        """Put everything back."""
        for weight, (_, gradient) in self._values.items():
            weight.grad = _put_back(weight.grad, gradient)
        for optimizer, state in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update(_copied(state))
        for group, options in self._groups:
            weights = group["params"]
            group.clear()
            group.update(_copied(options), params=weights)
        self.restore_values()


class _Tensor(NamedTuple):
    """A copy of a tensor, on the CPU, and where the tensor is."""

    data: torch.Tensor
    device: torch.device


def _copied(value: Any) -> Any:
    """Return a copy with a `_Tensor` for each tensor; of such a copy, one with tensors again."""
    if isinstance(value, _Tensor):
        return value.data.to(value.device, copy=True)
    if isinstance(value, torch.Tensor):
        return _Tensor(value.detach().to("cpu", copy=True), value.device)
    if type(value) is dict:
        return {key: _copied(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return copy.deepcopy(value)


def _put_back(current: torch.Tensor | None, saved: _Tensor | None) -> Any:
    """Return what was saved: in the present tensor, where that can hold it."""
    if current is None or saved is None:
        return None if saved is None else _copied(saved)
    kept, device = saved
    if (current.shape, current.dtype, current.device) != (kept.shape, kept.dtype, device):
        return _copied(saved)
    current.data.copy_(kept)
    return current
