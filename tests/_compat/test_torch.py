"""Canaries: what we rely on inside of torch."""

from collections import namedtuple

import pytest
import torch
from canary import relies_on

Pair = namedtuple("Pair", ("a", "b"))


class Pinned:
    def pin_memory(self):
        return "pinned"


def test_pin_memory_reaches_into_any_nesting_and_leaves_the_rest():
    used_in = "_compat/torch.py (batches of `ODBDataLoader`)"
    with relies_on("torch", "torch.utils.data._utils.pin_memory.pin_memory", used_in):
        from odb_nodes._compat.torch import pin_memory

        batch = {"a": Pinned(), "b": [Pinned(), 1], "c": Pair(Pinned(), "text"), "d": None}
        expected = {"a": "pinned", "b": ["pinned", 1], "c": Pair("pinned", "text"), "d": None}
        pinned = pin_memory(batch)
        assert pinned == expected, pinned
        assert type(pinned["c"]) is Pair, pinned


def test_the_default_generator_is_the_one_that_is_seeded():
    with relies_on("torch", "torch.default_generator", "_core/seeds.py"):
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(7)
        first = torch.rand(3)
        torch.manual_seed(7)
        assert torch.equal(first, torch.rand(3))
        torch.set_rng_state(before)


def test_a_scaler_forgets_the_step_that_failed():
    used_in = "_compat/torch.py (trials of `find_budget`)"
    with relies_on("torch", "GradScaler._per_optimizer_states", used_in):
        from odb_nodes._compat.torch import forget_step

        weight = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([weight])
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(2):  # a second `unscale_` without `update` is an error else
            scaler.scale(weight.sum()).backward()
            scaler.unscale_(optimizer)
            forget_step(scaler)


def test_a_compiled_model_has_the_one_that_it_was_made_of():
    with relies_on("torch", "OptimizedModule._orig_mod", "_compat/torch.py"):
        from odb_nodes._compat.torch import uncompiled

        model = torch.nn.Linear(2, 2)
        assert uncompiled(torch.compile(model)) is model
        assert uncompiled(model) is model


def test_a_graph_that_backward_has_freed_is_told_by_its_error():
    with relies_on("torch", "the text of a second backward", "_compat/torch.py"):
        from odb_nodes._compat.torch import is_freed_graph

        square = torch.ones(2, requires_grad=True).square().sum()
        square.backward()
        with pytest.raises(RuntimeError) as caught:
            square.backward()
        assert is_freed_graph(caught.value)
        assert not is_freed_graph(RuntimeError("CUDA out of memory"))
