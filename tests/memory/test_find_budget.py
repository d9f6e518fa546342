"""`find_budget`: how near it comes to the true largest budget, and what it leaves as it was."""

import copy
import random
import weakref

import numpy as np
import pytest
import torch
from small_lm import assert_same, make_batch, make_training, snapshot

from odb_nodes.memory import (
    MemoryModel,
    ShapeTooLargeError,
    enable_checkpointing,
    find_budget,
    free_memory,
    trials,
)
from odb_nodes.testing import SavedTensorMeter

MIB = 2**20
ROOM = 900 * MIB
WIDTHS = [12, 40, 96]


def find(train_step, limit_bytes=2 * MIB, **options):
    options = {"meter": SavedTensorMeter(limit_bytes), "widths": WIDTHS, **options}
    return find_budget(train_step, options.pop("make_batch", make_batch), **options)


def peak_of(training, *shape):
    with SavedTensorMeter(2**40) as meter:
        training.train_step(make_batch(*shape))
    return meter.peak_bytes()


def most_rows(training, limit_bytes, width):
    """By brute force: the rows of a width that fit, where one more does not."""
    low, high = 0, 1
    while peak_of(training, high, width) <= limit_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = peak_of(training, middle, width) <= limit_bytes
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit_mib", "widths"), [(2, [20]), (7, WIDTHS), (30, [8, 24, 48, 72, 96])]
)
def test_it_comes_within_5_percent_of_the_true_largest_budget(limit_mib, widths):
    training, limit_bytes = make_training(), limit_mib * MIB
    found = find(training.train_step, limit_bytes, widths=widths)
    assert len(found.points) <= 24
    budget = found.budget
    costs = {width: budget.row_cost(width) for width in widths}
    true = min((most_rows(training, limit_bytes, width) + 1) * costs[width] - 1 for width in widths)
    assert 0.95 * true - min(costs.values()) <= budget.tokens <= true
    for width in (*widths, (widths[0] + widths[-1]) // 2):
        rows = budget.tokens // budget.row_cost(width)
        assert peak_of(training, rows, width) <= limit_bytes


# --- what it leaves as it was ---------------------------------------------------------------------


@pytest.mark.parametrize(("fails_in", "fresh"), [("forward", True), ("backward", False)])
def test_everything_is_as_it_was_wherever_steps_fail(fails_in, fresh):
    training = make_training() if fresh else in_the_middle_of_a_run()
    before = snapshot(training)
    meter = SavedTensorMeter(2 * MIB, fails_in=fails_in, backward_point=5)
    found = find(training.train_step, meter=meter)
    assert any(f"in the {fails_in} pass" in trial.error for trial in found.points)
    assert_same(before, snapshot(training))


def test_schedulers_scalers_and_generators_are_as_they_were():
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
        return [*(copy.deepcopy(one.state_dict()) for one in objects), *numbers]

    before = states()
    find(train_step, ROOM, make_batch=batches, widths=[10, 40])
    assert_same(before, states())


def test_a_step_that_failed_leaves_no_gradients_to_the_next():
    training, with_gradients = make_training(), []

    def train_step(batch):
        with_gradients.append(sum(one.grad is not None for one in training.model.parameters()))
        training.model(*batch).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()

    meter = SavedTensorMeter(2 * MIB, fails_in="backward", backward_point=20)
    found = find(train_step, meter=meter)
    assert sum(bool(trial.error) for trial in found.points[:-1]) > 1
    assert {*with_gradients} == {0}


def test_gradients_that_are_accumulated_are_kept():
    training = in_the_middle_of_a_run()
    before = snapshot(training)
    find(lambda batch: training.model(*batch).backward())
    assert_same(before, snapshot(training))


@pytest.mark.parametrize("error", [KeyError("a mistake"), KeyboardInterrupt()])
def test_an_error_that_is_no_lack_of_memory_is_raised_as_it_is(error):
    training, calls = in_the_middle_of_a_run(), []
    before = snapshot(training)

    def train_step(batch):
        training.train_step(batch)
        calls.append(batch)
        if len(calls) == 4:
            raise error

    with pytest.raises(type(error)) as raised:
        find(train_step)
    assert raised.value is error
    assert_same(before, snapshot(training))


def test_an_optimizer_that_is_not_found_is_an_error_unless_it_is_passed():
    training = make_training()
    before, hidden = snapshot(training), weakref.ref(training.train_step)

    def train_step(batch):
        hidden()(batch)  # which the search does not follow

    with pytest.raises(RuntimeError, match="step of an `AdamW` that cannot be found"):
        find(train_step)
    assert_same(before["weights"], snapshot(training)["weights"])
    training = make_training()
    before, hidden = snapshot(training), weakref.ref(training.train_step)
    find(train_step, states=(training.model, training.optimizer))
    assert_same(before, snapshot(training))


# --- what it goes by ------------------------------------------------------------------------------


def test_a_peak_above_the_limit_is_a_failure_also_if_the_step_ends():
    class Generous(SavedTensorMeter):
        limit_bytes = MIB

    found = find(make_training().train_step, meter=Generous(ROOM))
    assert not any(trial.error for trial in found.points)
    assert {trial.fits for trial in found.points} == {True, False}
    assert found.model.predict(1, 12) < MIB


def test_patches_have_a_limit_of_their_own():
    training = make_training()
    found = find(training.train_step, 8 * MIB, patches_per_row=100)
    assert all(trial.patches == 100 * trial.rows for trial in found.points)
    budget = found.budget
    peaks = [
        peak_of(training, budget.tokens // budget.row_cost(width), width, budget.max_patches)
        for width in WIDTHS
    ]
    assert 7 * MIB < max(peaks) <= 8 * MIB


def test_the_result_holds_no_tensors_and_goes_on_learning():
    training = make_training()
    found = find(training.train_step)
    shown = repr(found)
    assert f"budget=TokenBudget(tokens={found.budget.tokens}" in shown
    assert f"{len(found.points)} trials" in shown and len(shown) < 640
    model = MemoryModel.from_json(found.model.to_json())
    model.add(5, 50, 0, model.predict(5, 50))
    assert model.accuracy().steps.steps == 1
    alive = weakref.ref(training.model)
    del training
    free_memory()
    assert alive() is None


def test_with_and_without_checkpointing_the_slower_way_is_told_too(monkeypatch):
    training, clock = make_training(layers=4), [0.0]
    before = snapshot(training)
    monkeypatch.setattr(trials.time, "perf_counter", lambda: clock[0])

    def train_step(batch):
        clock[0] += 30.0 if "forward" in vars(training.model.blocks[0]) else 1.0
        training.train_step(batch)

    found = find(train_step, 3 * MIB, widths=[12, 96], checkpointing=training.model)
    assert_same(before, snapshot(training))
    assert "forward" not in vars(training.model.blocks[0])
    assert found.slower.checkpointing and not found.checkpointing
    assert found.slower.budget.tokens > 1.5 * found.budget.tokens
    assert found.slower.tokens_per_s < found.tokens_per_s


# --- what is refused ------------------------------------------------------------------------------


def no_step(batch):
    pytest.fail("no step")


def checkpointed():
    enable_checkpointing(model := make_training().model)
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": []}, "`widths` must have one length or more"),
        ({"widths": [0]}, "`widths` must be in 1"),
        ({"widths": 512}, "`widths` must be .*Pass a list of lengths"),
        ({"meter": None}, "`meter` must have"),
        ({"max_trials": 3}, "`max_trials` must be in 4"),
        ({"patches_per_row": -1}, "`patches_per_row` must be in 0"),
        ({"checkpointing": True}, "`checkpointing` must be"),
        ({"checkpointing": checkpointed()}, "`SmallLM` is checkpointed already"),
        ({"checkpointing": torch.nn.Linear(2, 2)}, "its blocks are not known"),
        ({"train_step": 5}, "`train_step` must be a function"),
        ({"make_batch": 5}, "`make_batch` must be a function"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        find(**{"train_step": no_step, **options})


def test_a_row_that_does_not_fit_is_named():
    with pytest.raises(ShapeTooLargeError, match="a single row of 900 tokens does not") as raised:
        find(make_training().train_step, widths=[12, 900])
    error = raised.value
    assert (error.rows, error.width, error.patches) == (1, 900, 0)


@pytest.mark.parametrize("seen_bytes", [0, 700])
def test_a_meter_that_sees_nothing_is_named_before_batches_are_large(seen_bytes):
    class ElsewhereMeter(SavedTensorMeter):
        def peak_bytes(self):
            return seen_bytes

    rows = []

    def batches(count, width):
        rows.append(count)
        return make_batch(count, width)

    with pytest.raises(ValueError, match="`meter` sees nothing of `train_step`: 3 steps"):
        find(make_training().train_step, make_batch=batches, meter=ElsewhereMeter(ROOM))
    assert max(rows) <= 8


def test_a_step_that_does_not_use_its_batch_is_named():
    weight = torch.ones(8, requires_grad=True)
    with pytest.raises(ValueError, match="does not see how memory grows with the batch"):
        find(lambda batch: weight.square().sum().backward(), MIB, widths=[3])


def test_a_step_without_a_backward_pass_is_warned_of():
    training, kept = make_training(), []

    def train_step(batch):
        kept[:] = [training.model(*batch)]

    with pytest.warns(UserWarning, match="has computed no gradient of the 31 weights"):
        find(train_step)


def test_gradients_that_are_dropped_or_taken_otherwise_are_seen():
    training = make_training()
    weights = list(training.model.parameters())

    def dropped(batch):
        training.model(*batch).backward()
        training.optimizer.zero_grad()

    def taken(batch):
        torch.autograd.grad(training.model(*batch), weights, allow_unused=True)

    for train_step in (dropped, taken):
        find(train_step)  # without the warning, which would be an error
        assert not any(weight._backward_hooks for weight in weights)
