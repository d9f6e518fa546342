"""`find_budget` finds nearly the largest budget; it and `preflight` restore all states."""

import copy
import random
import time
import weakref
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from refusals import refuses
from sampling import fewer
from small_lm import assert_same, make_batch, make_training, snapshot

from odb_nodes import ODBDataLoader, TokenBudget
from odb_nodes.core.planning import StepTime
from odb_nodes.testing import SavedTensorMeter
from odb_nodes.training.memory import (
    ShapeTooLargeError,
    enable_checkpointing,
    find_budget,
    free_memory,
    preflight,
)

MIB, GB = 2**20, 10**9
ROOM = 900 * MIB
WIDTHS = [12, 40, 96]


def find(training=None, limit_bytes=2 * MIB, **options):
    """`find_budget` for the step of a training, or for another step with its states."""
    training = make_training() if training is None else training
    options = {
        "states": [training.model, training.optimizer, *options.pop("more_states", [])],
        "meter": SavedTensorMeter(limit_bytes),
        "widths": WIDTHS,
        **options,
    }
    steps = options.pop("train_step", training.train_step), options.pop("make_batch", make_batch)
    return find_budget(*steps, **options)


def peak_of(training, *shape):
    with SavedTensorMeter(2**40) as meter:
        training.train_step(make_batch(*shape))
    return meter.peak_bytes()


def most_rows(peak, limit_bytes, width):
    """The most rows of a width that fit, by brute force."""
    low, high = 0, 1
    while peak(high, width) <= limit_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = peak(middle, width) <= limit_bytes
        low, high = (middle, high) if fits else (low, middle)
    return low


def in_the_middle_of_a_run(**options):
    """A training some steps old, with gradients that are accumulating, and with drawn numbers."""
    training = make_training(**options)
    for _ in range(2):
        training.train_step(make_batch(2, 10))
    training.model(*make_batch(1, 9)).backward()
    random.random(), np.random.rand()
    return training


# --- how near it comes ----------------------------------------------------------------------------


@dataclass
class Device:
    """The meter of a made-up device, whose steps take what a formula says."""

    limit_bytes: int
    constant: float = GB
    token: float = 30_000.0
    square: float = 20.0
    floor: float = 0.0  # of the optimizer's step
    grain: int = 1  # bytes that peaks are rounded up to
    noise: float = 0.0
    fails_above: float = 1.0  # times the limit: only there a step raises
    used_bytes = 0

    def reset(self):
        self.used_bytes = 0

    def peak_bytes(self):
        return self.used_bytes

    def peak(self, rows, width):
        exact = self.constant + rows * width * (self.token + self.square * width)
        scatter = self.noise * random.Random(rows * width).uniform(-1, 1)
        noisy = max(exact, self.floor) * (1 + scatter)
        return int(-(-noisy // self.grain)) * self.grain

    def train_step(self, shape):
        self.used_bytes = self.peak(*shape)
        if self.used_bytes > self.fails_above * self.limit_bytes:
            raise torch.OutOfMemoryError("out of memory")

    def find(self, widths, max_trials=24):
        options = {"states": [], "meter": self, "widths": widths, "max_trials": max_trials}
        result = find_budget(self.train_step, lambda *shape: shape, **options)
        assert len(result.points) <= max_trials
        return result

    def check_near(self, widths, share=0.95):
        """Check that the budget that is found is nearly the largest that fits, and fits."""
        budget = self.find(widths).budget
        rows = {width: budget.tokens // budget.row_cost(width) for width in widths}
        most = {width: most_rows(self.peak, self.limit_bytes, width) for width in widths}
        assert all(rows[width] <= most[width] for width in widths)
        assert any(rows[width] >= int(share * most[width]) for width in widths), (rows, most)


@given(
    st.integers(6, 9),  # bytes of the model, as a power of 10
    st.floats(2, 6),  # of a token
    st.floats(2, 4.5),  # times less of a pair of tokens
    st.floats(4, 5.5),  # tokens that fit, about
    st.sampled_from([0.0, 1.2]),
    st.sampled_from([1, 512]),
    st.sampled_from([1.0, 1.1]),
    st.lists(st.integers(32, 2048), min_size=1, max_size=3, unique=True),
)
@fewer(2)
def test_the_budget_is_nearly_the_largest_on_any_device(
    model, token, square, tokens, floor, grain, above, widths
):
    device = Device(
        limit_bytes=int(10**model * 1.6 + 10 ** (token + tokens)),
        constant=10**model,
        token=10**token,
        square=10 ** (token - square),
        floor=floor * 10**model,
        grain=grain,
        fails_above=above,
    )
    assume(all(most_rows(device.peak, device.limit_bytes, width) >= 2 for width in widths))
    device.check_near(widths, share=0.93)


@pytest.mark.parametrize(
    ("floor", "widths"), [(20 * GB, [32, 512, 4096]), (0, [*range(100, 1100, 100)])]
)
def test_the_optimizers_peak_and_many_widths_are_predicted(floor, widths):
    Device(limit_bytes=40 * GB, floor=floor).check_near(widths)


def test_noise_costs_a_little():
    device = Device(limit_bytes=16 * GB, noise=0.01, grain=2 * MIB)
    budget = device.find([32, 256, 2048]).budget
    for width in (32, 256, 2048):
        assert device.peak(budget.tokens // budget.row_cost(width), width) <= 1.01 * 16 * GB
    assert budget.tokens > 0.9 * (15 * GB / 30_000)


def test_after_few_trials_the_budget_is_what_fitted():
    result = Device(limit_bytes=40 * GB).find([32, 512, 4096], max_trials=6)
    tried = {trial.width: trial.rows for trial in result.points if trial.fits}
    assert len(tried) > 1
    for width, rows in tried.items():
        assert result.budget.tokens // result.budget.row_cost(width) <= rows


def test_a_single_row_may_be_the_budget_and_rows_are_bounded():
    budget = Device(limit_bytes=2 * GB, square=0.0).find([20_000]).budget
    assert budget.tokens // budget.row_cost(20_000) == 1
    result = Device(limit_bytes=10**12, constant=1e6, token=1e-3, square=0.0).find([64, 256])
    assert all(trial.fits for trial in result.points)
    assert 10**6 < max(trial.rows * trial.width for trial in result.points) < 2**31


def test_patches_get_their_own_limit():
    training = make_training()
    result = find(training, 8 * MIB, patches_per_row=100)
    assert all(trial.patches == 100 * trial.rows for trial in result.points)
    budget = result.budget
    peaks = [
        peak_of(training, budget.tokens // budget.row_cost(width), width, budget.max_patches)
        for width in WIDTHS
    ]
    assert 7 * MIB < max(peaks) <= 8 * MIB


def test_a_peak_above_the_limit_is_a_failure_also_if_the_step_ends():
    class Generous(SavedTensorMeter):
        limit_bytes = MIB

    result = find(meter=Generous(ROOM))
    assert not any(trial.error for trial in result.points)
    assert {trial.fits for trial in result.points} == {True, False}
    assert result.model.predict(1, 12) < MIB


def test_the_result_holds_no_tensors():
    training = make_training()
    result = find(training)
    assert (
        f"budget=TokenBudget(tokens={result.budget.tokens}" in repr(result)
        and len(repr(result)) < 400
    )
    alive = weakref.ref(training.model)
    del training
    free_memory()
    assert alive() is None


def test_find_budget_returns_the_faster_and_the_slower_way_of_checkpointing(monkeypatch):
    training, clock = make_training(layers=4), [0.0]
    before = snapshot(training)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def train_step(batch):
        clock[0] += 30.0 if "forward" in vars(training.model.blocks[0]) else 1.0
        training.train_step(batch)

    options = {"widths": [12, 96], "checkpointing": training.model, "max_trials": 8}
    result = find(training, 3 * MIB, train_step=train_step, **options)
    assert_same(before, snapshot(training))
    assert "forward" not in vars(training.model.blocks[0])
    assert result.slower.checkpointing and not result.checkpointing
    assert result.slower.budget.tokens > 1.5 * result.budget.tokens
    assert result.slower.tokens_per_s < result.tokens_per_s


def test_the_time_of_a_step_is_fitted_to_the_steps_that_fitted(monkeypatch):
    expected, clock = StepTime(base=0.05, tokens=2e-6, squares=1e-9), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Clocked(Device):
        def train_step(self, shape):
            rows, width = shape
            clock[0] += expected.seconds_of(rows * width, rows * width**2)
            clock[0] += 3.0 * (self.peak(*shape) > self.limit_bytes)  # until memory runs out
            super().train_step(shape)

    device = Clocked(20 * GB, fails_above=1.1)
    result = device.find([64, 512, 4096])
    assert any(not trial.fits and not trial.error for trial in result.points)
    assert vars(result.step_time) == pytest.approx(vars(expected), rel=1e-3)
    assert device.find([512]).step_time is None  # any squares would fit


# --- what it leaves as it was ---------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": {"momentum": 0.9},
    "AdamW": {"amsgrad": True, "foreach": True},
    "Adam": {"fused": True},
    "RMSprop": {"centered": True},
    "Adafactor": {},
    "LBFGS": {"history_size": 3},
}


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_restored(name, steps_before):
    def begun(steps):
        training = make_training(partial(getattr(torch.optim, name), **OPTIMIZERS[name]), layers=1)
        for _ in range(steps):
            training.train_step(make_batch(2, 8))
        return training

    def train_step(batch):
        training.train_step(batch)
        training.optimizer.param_groups[0]["lr"] *= 2

    training = begun(steps_before)
    before = snapshot(training)
    find(training, ROOM, train_step=train_step, widths=[8], max_trials=4)
    assert_same(before, snapshot(training))
    training.train_step(make_batch(2, 8))
    assert_same(snapshot(training), snapshot(begun(steps_before + 1)))


def test_each_step_has_the_same_values_and_the_memory_of_a_run():
    training, seen = make_training(), []

    def train_step(batch):
        weights = torch.nn.utils.parameters_to_vector(training.model.parameters()).detach()
        seen.append((float(weights.sum()), len(training.optimizer.state)))
        training.train_step(batch)

    find(training, train_step=train_step)
    assert len({weights for weights, _ in seen}) == 1
    assert [state > 10 for _, state in seen] == [False] + [True] * (len(seen) - 1)
    assert not training.optimizer.state


class Replacing(torch.nn.Module):
    """Replaces its buffer in each call, and makes one that was not there."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.register_buffer("later", None)

    def forward(self):
        self.mean = self.mean + 1
        self.later = torch.ones(2)


class Counter:
    """Has a state in `state_dict`."""

    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Wrapped(torch.optim.Optimizer):
    """An optimizer in a wrapper, as Accelerate has it."""

    def __init__(self, inner):
        self.inner = inner

    state = property(lambda self: self.inner.state)
    param_groups = property(lambda self: self.inner.param_groups)


def test_buffers_graphs_and_custom_states_are_restored():
    training, module, counter = make_training(), Replacing(), Counter()
    loss = training.model(*make_batch(2, 8))

    def train_step(batch):
        module()
        counter.value += 1
        training.model(*batch).backward()

    find(training, train_step=train_step, more_states=[module, counter])
    assert torch.equal(module.mean, torch.zeros(3)) and module.later is None
    assert counter.value == 0
    loss.backward()  # the weights are those of its graph


@pytest.mark.parametrize(("fails_in", "fresh"), [("forward", True), ("backward", False)])
def test_states_are_restored_wherever_a_step_fails(fails_in, fresh):
    """An optimizer in a wrapper, too."""
    training = make_training() if fresh else in_the_middle_of_a_run()
    before = snapshot(training)
    meter = SavedTensorMeter(2 * MIB, fails_in=fails_in, backward_point=5)
    optimizer = Wrapped(training.optimizer) if fresh else training.optimizer
    result = find(training, meter=meter, states=[training.model, optimizer])
    assert any(f"in the {fails_in} pass" in trial.error for trial in result.points)
    assert_same(before, snapshot(training))


def test_schedulers_scalers_and_generators_are_restored():
    training = make_training(optimizer=torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 2, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # too large: a step changes it
    generator = torch.Generator().manual_seed(5)
    own_numbers = np.random.default_rng(5)

    def train_step(batch):
        training.optimizer.zero_grad()
        scaler.scale(training.model(*batch)).backward()
        scaler.unscale_(training.optimizer)
        if batch[0].numel() > 500:
            raise torch.OutOfMemoryError("between unscale_ and update")
        scaler.step(training.optimizer)
        scaler.update()
        scheduler.step()

    def batches(rows, width):
        own_numbers.random()
        return (torch.randint(60, (rows, width), generator=generator),)

    def states():
        objects = (training.optimizer, scheduler, scaler)
        numbers = [generator.get_state(), own_numbers.bit_generator.state]
        return [*(copy.deepcopy(holder.state_dict()) for holder in objects), *numbers]

    before, more = states(), [scheduler, scaler, generator, own_numbers]
    options = {"train_step": train_step, "make_batch": batches, "widths": [10, 40]}
    find(training, ROOM, more_states=more, **options)
    assert_same(before, states())


def test_a_step_that_failed_leaves_no_gradients_to_the_next():
    training, with_gradients = make_training(), []

    def train_step(batch):
        with_gradients.append(
            sum(weight.grad is not None for weight in training.model.parameters())
        )
        training.model(*batch).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()

    meter = SavedTensorMeter(2 * MIB, fails_in="backward", backward_point=20)
    result = find(training, train_step=train_step, meter=meter)
    assert sum(bool(trial.error) for trial in result.points[:-1]) > 1
    assert {*with_gradients} == {0}


@pytest.mark.parametrize("error", [KeyError("a mistake"), KeyboardInterrupt()])
def test_other_errors_of_a_step_are_raised_unchanged(error):
    training, calls = in_the_middle_of_a_run(), []
    before = snapshot(training)

    def train_step(batch):
        training.model(*batch).backward()  # accumulates
        calls.append(batch)
        if len(calls) == 4:
            raise error

    with pytest.raises(type(error)) as raised:
        find(training, train_step=train_step)
    assert raised.value is error
    assert_same(before, snapshot(training))


@pytest.mark.parametrize("states_of", ["model", "optimizer of another training"])
def test_an_optimizer_missing_from_states_is_an_error_before_it_steps(states_of):
    training, other = make_training(), make_training()
    states = [training.model] + [other.optimizer] * (states_of != "model")
    before = snapshot(training)
    with pytest.raises(RuntimeError, match="step of an `AdamW` that is not in `states`"):
        find(training, states=states)
    assert_same(before, snapshot(training))


# --- what is refused, or warned of ----------------------------------------------------------------


class ElsewhereMeter(SavedTensorMeter):
    """Sees nothing."""

    seen_bytes = 5

    def peak_bytes(self):
        return self.seen_bytes


def checkpointed():
    enable_checkpointing(model := make_training().model)
    return model


REFUSED = [
    ({"widths": []}, "`widths` must have at least one length"),
    ({"widths": [0]}, "`widths` must be in 1"),
    ({"widths": 512}, "`widths` must be .*Pass a list of lengths"),
    ({"meter": None}, "`meter` must have"),
    ({"patches_per_row": -1}, "`patches_per_row` must be in 0"),
    ({"train_step": 5}, "`train_step` must be a function"),
    ({"make_batch": 5}, "`make_batch` must be a function"),
    ({"states": [5]}, "`states` must be models.* but one is 5"),
    ({"states": make_training().model}, "`states` must be .* Pass a list"),
]
OF_FIND = [
    ({"max_trials": 3}, "`max_trials` must be in 4"),
    ({"checkpointing": True}, "`checkpointing` must be"),
    ({"checkpointing": checkpointed()}, "`SmallLM` is checkpointed already"),
    ({"checkpointing": torch.nn.Linear(2, 2)}, "its blocks cannot be chosen"),
]
OF_PREFLIGHT = [
    ({"budget": 0}, "`budget` must be in 1"),
    ({"budget": None}, "`budget` must be an integer"),
    ({"meter": ElsewhereMeter(MIB)}, "`meter` sees nothing of `train_step`: 3"),
]
BAD = (TypeError, ValueError)
test_bad_arguments_of_find_budget = refuses(REFUSED + OF_FIND, lambda options: find(**options), BAD)
test_bad_arguments_of_preflight = refuses(
    REFUSED + OF_PREFLIGHT, lambda options: tried(**{"budget": TokenBudget(100), **options}), BAD
)


def test_a_row_that_does_not_fit_is_named():
    with pytest.raises(ShapeTooLargeError, match="a single row of 900 tokens does not") as raised:
        find(widths=[12, 900])
    error = raised.value
    assert (error.rows, error.width, error.patches) == (1, 900, 0)


@pytest.mark.parametrize("seen_bytes", [0, 700])
def test_a_meter_that_sees_nothing_is_named_before_batches_are_large(seen_bytes):
    rows, meter = [], ElsewhereMeter(ROOM)
    meter.seen_bytes = seen_bytes

    def batches(count, width):
        rows.append(count)
        return make_batch(count, width)

    with pytest.raises(ValueError, match="`meter` sees nothing of `train_step`: 3 steps"):
        find(make_batch=batches, meter=meter)
    assert max(rows) <= 8


def test_a_step_that_does_not_use_its_batch_is_named():
    weight = torch.ones(8, requires_grad=True)
    step = lambda batch: weight.square().sum().backward()  # noqa: E731
    with pytest.raises(ValueError, match="does not see how memory grows with the batch"):
        find(train_step=step, meter=SavedTensorMeter(MIB), widths=[3], states=[])


def test_only_a_step_without_a_backward_pass_is_warned_of():
    training, last_loss = make_training(), []
    weights = list(training.model.parameters())

    def without(batch):
        last_loss[:] = [training.model(*batch)]

    def dropped(batch):
        training.model(*batch).backward()
        training.optimizer.zero_grad()

    def grads_only(batch):
        torch.autograd.grad(training.model(*batch), weights, allow_unused=True)

    with pytest.warns(UserWarning, match="has computed no gradient of the weights in `states`"):
        find(training, train_step=without, widths=[12], max_trials=4)
    for train_step in (dropped, grads_only):  # without the warning, which would be an error
        find(training, train_step=train_step, widths=[12], max_trials=4)
        assert not any(weight._backward_hooks for weight in weights)


# --- preflight ------------------------------------------------------------------------------------


def tried(budget, training=None, **options):
    training = make_training() if training is None else training
    options = {
        "train_step": training.train_step,
        "make_batch": make_batch,
        "states": [training.model, training.optimizer],
        "meter": SavedTensorMeter(ROOM),
        **options,
    }
    return preflight(budget=budget, **options)


def shapes_of(trials):
    return [(trial.rows, trial.width) for trial in trials]


@pytest.mark.parametrize(
    ("budget", "widths", "expected"),
    [
        (TokenBudget(100), None, [(1, 100), (100, 1)]),  # both are as full as can be
        (100, [64, 8, 20], [(1, 64), (2, 50), (12, 8)]),
        (TokenBudget(100), [8, 500], [(1, 500), (1, 100), (12, 8)]),  # oversize, so alone
        (TokenBudget(100, oversize="drop"), [8, 500], [(1, 100), (12, 8)]),
        (TokenBudget(100, oversize="error"), [500], [(1, 100)]),
        (TokenBudget(100, pad_to_multiple_of=8), [9, 101], [(1, 104), (6, 16)]),
        (TokenBudget(100, row_sizes="friendly"), [9, 100], [(1, 100), (2, 50), (8, 9)]),
        (TokenBudget(100, max_samples=6), [4, 80], [(1, 80), (2, 50), (6, 4)]),
        (TokenBudget(100, attention_tokens=50), [10, 60], [(1, 60), (1, 50), (8, 10)]),
        (TokenBudget(256, shapes=3), [9, 300], [(1, 300), (18, 14)]),
        (TokenBudget(100, layout="packed"), None, [(1, 100)]),
        (TokenBudget(100, layout="packed"), [8, 130], [(1, 130), (1, 100)]),
    ],
)
def test_preflight_tries_the_widest_the_fullest_and_the_most_numerous_batch(
    budget, widths, expected
):
    trials = tried(budget, widths=widths)
    assert all(trial.fits and trial.peak_bytes > 0 for trial in trials)
    shapes, budget = shapes_of(trials), TokenBudget.of(budget)
    assert (shapes[0], shapes[-1]) == (expected[0], expected[-1])
    costs = {budget.batch_cost(shape, []) for shape in shapes}
    assert max(costs) == max(budget.batch_cost(shape, []) for shape in expected)
    assert len(shapes) <= 3


def test_the_loader_makes_no_batch_that_is_larger_than_the_tried_ones():
    budget = TokenBudget(100, row_sizes="friendly")
    lengths = [8, *[11] * 40, 170]
    shapes = shapes_of(tried(budget, widths=[min(lengths), max(lengths)]))
    samples = [{"input_ids": [1] * length} for length in lengths]
    with pytest.warns(UserWarning, match="exceeds the budget"):
        batches = [
            batch["input_ids"].shape for batch in ODBDataLoader(samples, token_budget=budget)
        ]
    assert max(width for _, width in batches) == max(width for _, width in shapes) == 170
    assert max(rows for rows, _ in batches) <= max(rows for rows, _ in shapes)


def test_every_peak_is_that_of_a_step_in_the_middle_of_a_run():
    training = make_training()
    training.train_step(make_batch(2, 10))
    before = snapshot(training)
    trials = tried(TokenBudget(120), training, widths=[12, 120])
    assert_same(before, snapshot(training))
    assert len(trials) == 2
    for trial in trials:
        assert trial.peak_bytes == peak_of(training, trial.rows, trial.width)


def test_patches_are_as_many_as_the_budget_allows():
    trials = tried(TokenBudget(100, max_patches=40), widths=[10, 100], patches_per_row=16)
    assert [(trial.rows, trial.patches) for trial in trials] == [(1, 16), (10, 40)]


def test_preflight_names_a_batch_that_does_not_fit_and_restores_all():
    training, meter = make_training(), SavedTensorMeter(2 * MIB, fails_in="backward")
    before = snapshot(training)
    with pytest.raises(ShapeTooLargeError, match="50 rows of 20 tokens does not fit") as e:
        tried(TokenBudget(1000), training, meter=meter, widths=[10, 20])
    assert "Lower `tokens` of the budget, which is 1000, call `find_budget`" in str(e.value)
    assert (e.value.rows, e.value.width, e.value.patches) == (50, 20, 0)
    assert_same(before, snapshot(training))
    with pytest.raises(ShapeTooLargeError, match="1 rows of 700 .* Leave longer samples out"):
        tried(TokenBudget(700), meter=SavedTensorMeter(2 * MIB), widths=[10, 700])
