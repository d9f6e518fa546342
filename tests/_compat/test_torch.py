"""Canaries: what we rely on inside of torch."""

from collections import namedtuple

import pytest
import torch
from canary import relies_on

from odb_nodes._compat import torch as compat

Pair = namedtuple("Pair", ("a", "b"))


class Pinned:
    def pin_memory(self):
        return "pinned"


@relies_on("torch", "torch.utils.data._utils.pin_memory.pin_memory", "_compat/torch.py")
def test_pin_memory_reaches_into_any_nesting_and_leaves_the_rest():
    batch = {"a": Pinned(), "b": [Pinned(), 1], "c": Pair(Pinned(), "text"), "d": None}
    pinned = compat.pin_memory(batch)
    assert pinned == {"a": "pinned", "b": ["pinned", 1], "c": Pair("pinned", "text"), "d": None}
    assert type(pinned["c"]) is Pair, pinned


@relies_on("torch", "torch.default_generator", "_core/seeds.py")
def test_the_default_generator_is_the_one_that_is_seeded():
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(7)
        first = torch.rand(3)
        torch.manual_seed(7)
        assert torch.equal(first, torch.rand(3))


@relies_on("torch", "GradScaler._per_optimizer_states", "_compat/torch.py (`find_budget`)")
def test_a_scaler_forgets_the_step_that_failed():
    weight = torch.ones(2, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu")
    for again in (False, True):
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        if again:
            break
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)
        compat.forget_step(scaler)


@relies_on("torch", "OptimizedModule._orig_mod", "_compat/torch.py")
def test_a_compiled_model_has_the_one_that_it_was_made_of():
    model = torch.nn.Linear(2, 2)
    assert compat.uncompiled(torch.compile(model)) is compat.uncompiled(model) is model
