"""From where `find_budget` sees models, optimizers and generators, and what it leaves aside."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from odb_nodes.memory.stateful_objects import find_stateful

MODEL = nn.Linear(2, 2)


def uses_a_global(batch):
    return MODEL(batch)


def uses_it_in_an_inner_function(batch):
    return (lambda: uses_a_global(batch))()


class Trainer:
    def __init__(self, model):
        self.parts = {"models": [model]}

    def step(self, batch):
        pass

    def __call__(self, batch):
        pass


def closure_over(model):
    return lambda batch: model(batch)


def decorated(model):
    @functools.wraps(uses_a_global)
    def wrapper(batch, model=model):
        return batch

    return wrapper


@pytest.mark.parametrize(
    "root_of",
    [
        lambda model: uses_a_global,
        lambda model: uses_it_in_an_inner_function,
        decorated,
        Trainer,
        lambda model: Trainer(model).step,
        lambda model: functools.partial(print, model),
        lambda model: functools.partial(print, model=(1, [{"a": model}])),
        lambda model: closure_over(closure_over(SimpleNamespace(model=model))),
        lambda model: model.forward,
        lambda model: model,
    ],
)
def test_a_model_is_found(root_of):
    assert any(one is MODEL for one in find_stateful([root_of(MODEL)]))


def test_what_has_a_state_is_found_once():
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    generators = [torch.Generator(), np.random.default_rng()]
    others = [torch.ones(3), np.ones(3), "text", int, torch]
    everything = [weight, scheduler, *generators, *others]
    found = find_stateful([everything, everything])
    expected = [weight, scheduler, *generators, optimizer]
    assert {id(one) for one in found} == {id(one) for one in expected}
    assert len(found) == len(expected)


def test_a_model_beside_a_huge_dataset_is_found():
    records = [[n] for n in range(300_000)]
    found = find_stateful([closure_over(records), closure_over(closure_over(closure_over(MODEL)))])
    assert [id(one) for one in found] == [id(MODEL)]


def test_circles_and_empty_cells_end():
    circle = []
    circle.append(circle)
    unset = None
    root = lambda: (circle, unset)  # noqa: E731, F821
    del unset
    assert find_stateful([root, None]) == []
