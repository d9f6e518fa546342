"""`find_budget`: how near it comes to the true largest budget, and what it leaves as it was."""

import copy
import random
import weakref
from dataclasses import dataclass
from functools import partial, wraps

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sampling import fewer
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

MIB, GB = 2**20, 10**9
ROOM = 900 * MIB
WIDTHS = [12, 40, 96]


def find(train_step, limit_bytes=2 * MIB, **options):
    options = {"meter": SavedTensorMeter(limit_bytes), "widths": WIDTHS, **options}
    return find_budget(train_step, options.pop("make_batch", make_batch), **options)


def peak_of(training, *shape):
    with SavedTensorMeter(2**40) as meter:
        training.train_step(make_batch(*shape))
    return meter.peak_bytes()


def most_rows(peak, limit_bytes, width):
    """By brute force: the rows of a width that fit, where one more does not."""
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
    rows = [most_rows(partial(peak_of, training), limit_bytes, width) for width in widths]
    true = min((n + 1) * costs[width] - 1 for n, width in zip(rows, widths, strict=True))
    assert 0.95 * true - min(costs.values()) <= budget.tokens <= true
    for width in (*widths, (widths[0] + widths[-1]) // 2):
        rows = budget.tokens // budget.row_cost(width)
        assert peak_of(training, rows, width) <= limit_bytes


@dataclass
class Device:
    """The meter of a made-up device, whose steps take what a formula says."""

    limit_bytes: int
    constant: float = GB
    token: float = 30_000.0
    square: float = 20.0
    floor: float = 0.0
    grain: int = 1  # bytes that peaks are rounded up to
    noise: float = 0.0
    fails_above: float = 1.0  # times the limit: only there a step raises
    taken = 0

    def reset(self):
        self.taken = 0

    def peak_bytes(self):
        return self.taken

    def peak(self, rows, width):
        exact = self.constant + rows * width * (self.token + self.square * width)
        scatter = self.noise * random.Random(rows * width).uniform(-1, 1)
        noisy = max(exact, self.floor) * (1 + scatter)
        return int(-(-noisy // self.grain)) * self.grain

    def train_step(self, shape):
        self.taken = self.peak(*shape)
        if self.taken > self.fails_above * self.limit_bytes:
            raise torch.OutOfMemoryError("out of memory")

    def find(self, widths, max_trials=24):
        options = {"meter": self, "widths": widths, "max_trials": max_trials}
        found = find_budget(self.train_step, lambda *shape: shape, **options)
        assert len(found.points) <= max_trials
        return found

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
def test_it_comes_near_on_any_device(model, token, square, tokens, floor, grain, above, widths):
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
def test_large_floors_are_left_and_many_widths_are_predicted_from_a_few(floor, widths):
    Device(limit_bytes=40 * GB, floor=floor).check_near(widths)


def test_noise_costs_a_little():
    device = Device(limit_bytes=16 * GB, noise=0.01, grain=2 * MIB)
    budget = device.find([32, 256, 2048]).budget
    for width in (32, 256, 2048):
        assert device.peak(budget.tokens // budget.row_cost(width), width) <= 1.01 * 16 * GB
    assert budget.tokens > 0.9 * (15 * GB / 30_000)


def test_too_few_trials_give_what_has_fitted():
    found = Device(limit_bytes=40 * GB).find([32, 512, 4096], max_trials=6)
    tried = {trial.width: trial.rows for trial in found.points if trial.fits}
    assert len(tried) > 1
    for width, rows in tried.items():
        assert found.budget.tokens // found.budget.row_cost(width) <= rows


def test_one_row_alone_that_fits_is_the_budget():
    budget = Device(limit_bytes=2 * GB, square=0.0).find([20_000]).budget
    assert budget.tokens // budget.row_cost(20_000) == 1


def test_rows_have_a_bound_where_memory_hardly_grows():
    found = Device(limit_bytes=10**12, constant=1e6, token=1e-3, square=0.0).find([64, 256])
    assert all(trial.fits for trial in found.points)
    assert 10**6 < max(trial.rows * trial.width for trial in found.points) < 2**31


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
def test_every_optimizer_goes_on_as_if_nothing_had_happened(name, steps_before):
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
    find(train_step, ROOM, widths=[8], max_trials=4)
    assert_same(before, snapshot(training))
    training.train_step(make_batch(2, 8))
    assert_same(snapshot(training), snapshot(begun(steps_before + 1)))


def test_each_step_has_the_same_values_and_the_memory_of_a_run():
    training, seen = make_training(), []

    def train_step(batch):
        weights = torch.nn.utils.parameters_to_vector(training.model.parameters()).detach()
        seen.append((float(weights.sum()), len(training.optimizer.state)))
        training.train_step(batch)

    find(train_step)
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
    """Has a state, of a kind that nobody knows."""

    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_buffers_graphs_and_states_that_are_passed_are_kept():
    training, module, counter = make_training(), Replacing(), Counter()
    loss = training.model(*make_batch(2, 8))

    def train_step(batch):
        module()
        counter.value += 1
        training.model(*batch).backward()

    find(train_step, states=[counter])
    assert torch.equal(module.mean, torch.zeros(3)) and module.later is None
    assert counter.value == 0
    loss.backward()  # the weights are those of its graph


TRAINING = []


def uses_a_global(batch):
    TRAINING[0].train_step(batch)


def step_of(one, batch):
    (one[1][0]["a"] if isinstance(one, tuple) else one).train_step(batch)


class Trainer:
    def __init__(self, training):
        self.parts = {"trainings": [training]}

    def step(self, batch):
        self.parts["trainings"][0].train_step(batch)

    __call__ = step


def closure_over(step):
    return lambda batch: step(batch)


def decorated(training):
    @wraps(step_of)
    def wrapper(batch, training=training):
        training.train_step(batch)

    return wrapper


def beside_much_else(training):
    records, circle, unset = [[n] for n in range(300_000)], [], None
    circle.append(circle)
    much = lambda: (records, circle, unset)  # noqa: E731, F821
    del unset
    step = training.train_step
    for _ in range(6):  # farther away than the records
        step = closure_over(step)
    return partial(lambda _, batch: step(batch), much)


HOLDERS = {
    "a global": lambda _: uses_a_global,
    "a global of an inner function": lambda _: lambda batch: (lambda: uses_a_global(batch))(),
    "a default": decorated,
    "an attribute": Trainer,
    "a method": lambda training: Trainer(training).step,
    "a partial": lambda training: partial(step_of, training),
    "a partial of containers": lambda training: partial(step_of, (1, [{"a": training}])),
    "closures": lambda training: closure_over(closure_over(training.train_step)),
    "much else": beside_much_else,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_model_and_its_optimizer_are_found_wherever_the_step_has_them(holder):
    training = make_training(layers=1)
    TRAINING[:] = [training] if "global" in holder else []
    before = snapshot(training)
    find(HOLDERS[holder](training), ROOM, widths=[8], max_trials=4)
    assert_same(before, snapshot(training))


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
        ({"states": [5]}, "`states` must be models.* but one is 5"),
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
