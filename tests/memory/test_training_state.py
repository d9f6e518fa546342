"""What `TrainingState` puts back, of every kind of optimizer, and what it refuses."""

import copy
from types import SimpleNamespace

import pytest
import torch
from small_lm import SmallLM, assert_same, make_batch, snapshot
from torch import nn

from odb_nodes.memory.training_state import TrainingState, unchanged_training

OPTIMIZERS = {
    "SGD": {"momentum": 0.9},
    "AdamW": {"amsgrad": True, "foreach": True},
    "Adam": {"fused": True},
    "RMSprop": {"centered": True},
    "Adafactor": {},
    "LBFGS": {"history_size": 3},
}


def make(name):
    torch.manual_seed(0)
    model = SmallLM(layers=1)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **OPTIMIZERS[name])

    def step():
        def loss():
            optimizer.zero_grad()
            value = model(*make_batch(2, 8))
            value.backward()
            return value

        optimizer.step(loss)

    return SimpleNamespace(model=model, optimizer=optimizer), step


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_as_if_nothing_had_happened(name, steps_before):
    training, step = make(name)
    for _ in range(steps_before):
        step()
    before = snapshot(training)
    with unchanged_training([step]):
        for _ in range(2):
            step()
        training.optimizer.param_groups[0]["lr"] = 5.0
        with pytest.raises(AssertionError):
            assert_same(before, snapshot(training))
    assert_same(before, snapshot(training))
    step()
    other, other_step = make(name)
    for _ in range(steps_before + 1):
        other_step()
    assert_same(snapshot(training), snapshot(other))


def test_values_are_put_back_while_what_takes_memory_stays():
    training, step = make("AdamW")
    model, optimizer = training.model, training.optimizer
    weights = copy.deepcopy(model.state_dict())
    with unchanged_training([step]) as state:
        step()
        state.restore_values()
        assert_same(weights, model.state_dict())
        trained = [weight for weight in model.parameters() if weight.grad is not None]
        assert len(optimizer.state) == len(trained) > 10
    assert not optimizer.state


class Replacing(nn.Module):
    """Replaces its buffer in each call, and makes one that was not there."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.register_buffer("later", None)

    def forward(self):
        self.mean = self.mean + 1
        self.later = torch.ones(2)


def test_buffers_that_are_replaced_are_put_back():
    module = Replacing()
    with unchanged_training([module]):
        module()
    assert torch.equal(module.mean, torch.zeros(3))
    assert module.later is None


def test_a_graph_that_uses_the_weights_can_still_go_backward():
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    with unchanged_training([weight]):
        weight.data.mul_(5)
    loss.backward()
    assert torch.equal(weight.grad, torch.full((3,), 2.0))


class Counter:
    """Has a state, of a kind that nobody knows."""

    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_other_states_are_put_back_where_they_are_passed():
    counter = Counter()
    with unchanged_training([], [counter]):
        counter.value += 1
    assert counter.value == 0
    with pytest.raises(TypeError, match="`states` must be models.* but one is 5 instead"):
        TrainingState([], [5])
