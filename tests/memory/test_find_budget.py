"""`find_budget`: how near it comes to the true largest budget, and what it leaves as it was."""

import copy
import random
import re
import weakref

import numpy as np
import pytest
import torch
from small_lm import SmallLM, assert_same, make_batch, make_training, snapshot

from odb_nodes._core import progress
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
WIDTHS = [12, 40, 96]


def fits(training, limit_bytes, rows, width):
    """Whether a step with a batch of a shape takes no more than a limit."""
    with SavedTensorMeter(2**40) as meter:
        training.train_step(make_batch(rows, width))
    return meter.peak_bytes() <= limit_bytes


def most_rows(training, limit_bytes, width):
    """By brute force: the rows of a width that fit, where one more does not."""
    low, high = 0, 1
    while fits(training, limit_bytes, high, width):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(training, limit_bytes, middle, width) else (low, middle)
    return low


def in_the_middle_of_a_run(**options):
    """A training some steps old, with gradients that are accumulating, and with drawn numbers."""
    training = make_training(**options)
    for _ in range(2):
        training.train_step(make_batch(2, 10))
    training.model(*make_batch(1, 9)).backward()
    random.random(), np.random.rand()
    return training


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("limit_mib", [2, 7, 30])
@pytest.mark.parametrize("widths", [WIDTHS, [20], [8, 24, 48, 72, 96]])
def test_it_comes_within_5_percent_of_the_true_largest_budget(limit_mib, widths):
    training = make_training()
    limit_bytes = limit_mib * MIB
    found = find_budget(
        training.train_step, make_batch, meter=SavedTensorMeter(limit_bytes), widths=widths
    )
    assert len(found.points) <= 24
    budget = found.budget
    true = min(
        (most_rows(training, limit_bytes, width) + 1) * budget.row_cost(width) - 1
        for width in widths
    )
    smallest_step = min(budget.row_cost(width) for width in widths)
    assert 0.95 * true - smallest_step <= budget.tokens <= true
    for width in (*widths, (widths[0] + widths[-1]) // 2):
        assert fits(training, limit_bytes, budget.tokens // budget.row_cost(width), width)


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
@pytest.mark.parametrize("fresh", [True, False])
def test_everything_is_as_it_was_wherever_steps_fail(fails_in, fresh):
    training = make_training() if fresh else in_the_middle_of_a_run()
    before = snapshot(training)
    meter = SavedTensorMeter(2 * MIB, fails_in=fails_in, backward_point=5)
    found = find_budget(training.train_step, make_batch, meter=meter, widths=WIDTHS)
    assert any(f"in the {fails_in} pass" in trial.error for trial in found.points)
    assert_same(before, snapshot(training))


def test_without_a_terminal_lines_say_which_steps_were_tried(monkeypatch, caplog):
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    meter = SavedTensorMeter(2 * MIB)
    found = find_budget(make_training().train_step, make_batch, meter=meter, widths=WIDTHS)
    expected = [
        rf"steps tried to find the budget: {number} of 24 after 0 s; {one.rows} x {one.width} "
        + (r"fits, 0.00 GiB" if one.fits else "does not fit")
        for number, one in enumerate(found.points, 1)
    ]
    assert [re.sub(r"after \d+", "after 0", one) for one in caplog.messages] == expected


class HalfDone(torch.optim.AdamW):
    """Runs out of memory after it has changed the first weights, if the last batch was large."""

    most_tokens = 900
    tokens = 0

    def step(self, closure=None):
        super().step(closure)
        if self.tokens > self.most_tokens:
            self.param_groups[0]["lr"] = 5.0
            raise torch.OutOfMemoryError("out of memory in the optimizer's step")


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [True, False])
def test_everything_is_as_it_was_if_the_optimizers_step_fails(fresh):
    options = {"optimizer": HalfDone}
    training = make_training(**options) if fresh else in_the_middle_of_a_run(**options)
    before = snapshot(training)

    def train_step(batch):
        training.optimizer.tokens = batch[0].numel()
        training.train_step(batch)

    found = find_budget(train_step, make_batch, meter=SavedTensorMeter(900 * MIB), widths=WIDTHS)
    assert any("optimizer's step" in trial.error for trial in found.points)
    assert_same(before, snapshot(training))
    for width in WIDTHS:
        assert found.budget.tokens // found.budget.row_cost(width) * width <= 900


def test_a_run_goes_on_as_if_nothing_had_happened():
    expected, calibrated = in_the_middle_of_a_run(), in_the_middle_of_a_run()
    meter = SavedTensorMeter(2 * MIB)
    find_budget(calibrated.train_step, make_batch, meter=meter, widths=WIDTHS)
    for training in (expected, calibrated):
        torch.manual_seed(3)
        for _ in range(3):
            training.train_step(make_batch(3, 12))
    assert_same(snapshot(expected), snapshot(calibrated))


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
        return [
            *(copy.deepcopy(one.state_dict()) for one in objects),
            generator.get_state(),
            own_numbers.bit_generator.state,
        ]

    before = states()
    find_budget(train_step, batches, meter=SavedTensorMeter(900 * MIB), widths=[10, 40])
    assert_same(before, states())


def test_a_step_that_failed_leaves_no_gradients_to_the_next():
    training = make_training()
    with_gradients = []

    def train_step(batch):
        weights = list(training.model.parameters())
        with_gradients.append(sum(weight.grad is not None for weight in weights))
        training.model(*batch).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()

    meter = SavedTensorMeter(2 * MIB, fails_in="backward", backward_point=20)
    found = find_budget(train_step, make_batch, meter=meter, widths=WIDTHS)
    assert sum(bool(trial.error) for trial in found.points[:-1]) > 1
    assert set(with_gradients) == {0}


def test_gradients_that_are_accumulated_are_kept():
    training = in_the_middle_of_a_run()
    before = snapshot(training)

    def accumulate(batch):
        training.model(*batch).backward()

    find_budget(accumulate, make_batch, meter=SavedTensorMeter(2 * MIB), widths=WIDTHS)
    assert_same(before, snapshot(training))


class Owner:
    """A trainer whose method is the step."""

    def __init__(self):
        self.parts = {"training": make_training()}

    def step(self, batch):
        self.parts["training"].train_step(batch)


def test_states_are_found_through_methods_and_containers():
    owner = Owner()
    before = snapshot(owner.parts["training"])
    find_budget(owner.step, make_batch, meter=SavedTensorMeter(2 * MIB), widths=WIDTHS)
    assert_same(before, snapshot(owner.parts["training"]))


class TestAnErrorThatIsNoOutOfMemory:
    def find(self, fail):
        training = in_the_middle_of_a_run()
        before = snapshot(training)
        calls = []

        def train_step(batch):
            training.train_step(batch)
            calls.append(batch)
            if len(calls) == 4:
                fail()

        try:
            find_budget(train_step, make_batch, meter=SavedTensorMeter(2 * MIB), widths=WIDTHS)
        finally:
            assert_same(before, snapshot(training))

    def test_it_is_raised_as_it_is(self):
        error = KeyError("a mistake")

        def fail():
            raise error

        with pytest.raises(KeyError) as raised:
            self.find(fail)
        assert raised.value is error

    def test_an_interrupt_too(self):
        def fail():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.find(fail)


class TestAnOptimizerThatIsNotFound:
    def training(self):
        training = make_training()
        hidden = weakref.ref(training.train_step)  # which the search does not follow
        return training, lambda batch: hidden()(batch)

    def test_it_is_an_error_before_a_weight_changes(self):
        training, train_step = self.training()
        weights = snapshot(training)["weights"]
        with pytest.raises(RuntimeError, match="step of an `AdamW` that cannot be found"):
            find_budget(train_step, make_batch, meter=SavedTensorMeter(MIB), widths=WIDTHS)
        assert_same(weights, snapshot(training)["weights"])

    def test_it_can_be_passed(self):
        training, train_step = self.training()
        before = snapshot(training)
        find_budget(
            train_step,
            make_batch,
            meter=SavedTensorMeter(2 * MIB),
            widths=WIDTHS,
            states=(training.model, training.optimizer),
        )
        assert_same(before, snapshot(training))


def test_a_real_failure_of_the_host_is_one_too():
    training = make_training()

    def train_step(batch):
        training.train_step(batch)
        torch.empty(2**60 if batch[0].numel() > 600 else 1, dtype=torch.int8)

    found = find_budget(train_step, make_batch, meter=SavedTensorMeter(900 * MIB), widths=[10, 60])
    assert any("allocat" in trial.error for trial in found.points)
    assert 500 < found.budget.tokens // found.budget.row_cost(10) * 10 <= 600


def test_a_peak_above_the_limit_is_a_failure_also_if_the_step_ends():
    training = make_training()

    class Generous(SavedTensorMeter):
        limit_bytes = MIB

    found = find_budget(training.train_step, make_batch, meter=Generous(900 * MIB), widths=WIDTHS)
    assert not any(trial.error for trial in found.points)
    assert {trial.fits for trial in found.points} == {True, False}
    assert found.model.predict(1, 12) < MIB


def test_patches_have_a_limit_of_their_own():
    training = make_training()
    found = find_budget(
        training.train_step,
        make_batch,
        meter=SavedTensorMeter(8 * MIB),
        widths=WIDTHS,
        patches_per_row=100,
    )
    assert all(trial.patches == 100 * trial.rows for trial in found.points)
    budget = found.budget
    for width in WIDTHS:
        rows = budget.tokens // budget.row_cost(width)
        with SavedTensorMeter(900 * MIB) as meter:
            training.train_step(make_batch(rows, width, budget.max_patches))
        assert meter.peak_bytes() <= 8 * MIB
    with SavedTensorMeter(900 * MIB) as meter:
        training.train_step(make_batch(budget.tokens // 13, 12, budget.max_patches))
    assert meter.peak_bytes() > 7 * MIB


def test_the_result_holds_no_tensors_and_goes_on_learning():
    training = make_training()
    found = find_budget(
        training.train_step, make_batch, meter=SavedTensorMeter(2 * MIB), widths=WIDTHS
    )
    shown = repr(found)
    assert (
        f"budget=TokenBudget(tokens={found.budget.tokens}" in shown and "max_samples" not in shown
    )
    assert f"{len(found.points)} trials" in shown and shown.count("\n") < 8 > len(shown) / 80
    model = MemoryModel.from_json(found.model.to_json())
    predicted = model.predict(5, 50)
    model.add(5, 50, 0, predicted)
    assert model.accuracy().steps.steps == 1
    alive = weakref.ref(training.model)
    del training
    free_memory()
    assert alive() is None


class TestCheckpointing:
    def compare(self, monkeypatch, seconds_of_checkpointing):
        """Compare both ways where a checkpointed step takes so long, and another one second."""
        training, clock = make_training(layers=4), [0.0]
        before = snapshot(training)
        monkeypatch.setattr(trials.time, "perf_counter", lambda: clock[0])

        def train_step(batch):
            is_checkpointed = "forward" in vars(training.model.blocks[0])
            clock[0] += seconds_of_checkpointing if is_checkpointed else 1.0
            training.train_step(batch)

        found = find_budget(
            train_step,
            make_batch,
            meter=SavedTensorMeter(3 * MIB),
            widths=[12, 96],
            checkpointing=training.model,
        )
        assert_same(before, snapshot(training))
        assert "forward" not in vars(training.model.blocks[0])
        return found

    def test_the_slower_way_is_told_too(self, monkeypatch):
        found = self.compare(monkeypatch, 30.0)
        assert not found.checkpointing
        assert found.slower.checkpointing
        assert found.slower.budget.tokens > 1.5 * found.budget.tokens
        assert found.slower.tokens_per_s < found.tokens_per_s

    def test_a_model_that_is_checkpointed_already_cannot_be_compared_with_itself(self):
        training = make_training()
        enable_checkpointing(training.model)
        with pytest.raises(ValueError, match="`SmallLM` is checkpointed already"):
            find_budget(
                lambda batch: pytest.fail("no step"),
                make_batch,
                meter=SavedTensorMeter(MIB),
                widths=[3],
                checkpointing=training.model,
            )

    def test_a_model_that_cannot_be_checkpointed_is_an_error_before_a_step(self):
        model = torch.nn.Linear(2, 2)
        with pytest.raises(ValueError, match="its blocks are not known"):
            find_budget(
                lambda batch: pytest.fail("no step"),
                make_batch,
                meter=SavedTensorMeter(MIB),
                widths=[3],
                checkpointing=model,
            )


class TestErrors:
    def find(self, **options):
        training = make_training()
        options = {"meter": SavedTensorMeter(2 * MIB), "widths": WIDTHS, **options}
        return find_budget(training.train_step, make_batch, **options)

    def test_a_row_that_does_not_fit_is_named(self):
        with pytest.raises(
            ShapeTooLargeError, match="a single row of 900 tokens does not"
        ) as raised:
            self.find(widths=[12, 900])
        error = raised.value
        assert (error.rows, error.width, error.patches) == (1, 900, 0)

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
        ],
    )
    def test_bad_arguments(self, options, message):
        with pytest.raises((TypeError, ValueError), match=message):
            self.find(**options)

    @pytest.mark.parametrize("name", ["train_step", "make_batch"])
    def test_what_is_no_function(self, name):
        arguments = {"train_step": print, "make_batch": make_batch, name: 5}
        with pytest.raises(TypeError, match=f"`{name}` must be a function"):
            find_budget(**arguments, meter=SavedTensorMeter(MIB), widths=[3])

    @pytest.mark.parametrize("seen_bytes", [0, 700])
    def test_a_meter_that_sees_nothing_is_named_before_batches_are_large(self, seen_bytes):
        class ElsewhereMeter(SavedTensorMeter):
            def peak_bytes(self):
                return seen_bytes

        training, rows = make_training(), []

        def batches(count, width):
            rows.append(count)
            return make_batch(count, width)

        with pytest.raises(ValueError, match="`meter` sees nothing of `train_step`: 3 steps"):
            find_budget(
                training.train_step, batches, meter=ElsewhereMeter(900 * MIB), widths=WIDTHS
            )
        assert max(rows) <= 8

    def test_a_step_that_does_not_use_its_batch_is_named(self):
        weight = torch.ones(8, requires_grad=True)
        with pytest.raises(ValueError, match="does not see how memory grows with the batch"):
            find_budget(
                lambda batch: weight.square().sum().backward(),
                lambda rows, width: None,
                meter=SavedTensorMeter(MIB),
                widths=[3],
            )


class TestAStepWithoutABackwardPass:
    def find(self, training, train_step):
        find_budget(train_step, make_batch, meter=SavedTensorMeter(2 * MIB), widths=WIDTHS)

    def test_it_is_warned_of(self):
        training = make_training()
        kept = []

        def train_step(batch):
            kept[:] = [training.model(*batch)]

        with pytest.warns(UserWarning, match="has computed no gradient of the 31 weights"):
            self.find(training, train_step)

    def test_gradients_that_are_dropped_or_taken_otherwise_are_seen(self, recwarn):
        training = make_training()

        def train_step(batch):
            training.model(*batch).backward()
            training.optimizer.zero_grad()

        self.find(training, train_step)
        weights = list(training.model.parameters())
        self.find(
            training,
            lambda batch: torch.autograd.grad(training.model(*batch), weights, allow_unused=True),
        )
        assert not recwarn.list
        assert not any(weight._backward_hooks for weight in weights)


def test_a_model_in_the_globals_of_its_module_is_found():
    namespace = {"torch": torch, "model": SmallLM(), "__name__": "script"}
    exec(
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "def helper(batch):\n"
        "    model(*batch).backward()\n"
        "def train_step(batch):\n"
        "    helper(batch)\n"
        "    optimizer.step()\n",
        namespace,
    )
    before = [one.detach().clone() for one in namespace["model"].parameters()]
    find_budget(namespace["train_step"], make_batch, meter=SavedTensorMeter(2 * MIB), widths=WIDTHS)
    assert_same(before, [one.detach() for one in namespace["model"].parameters()])
    assert not namespace["optimizer"].state
