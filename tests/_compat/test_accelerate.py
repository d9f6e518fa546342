"""Canaries: what we rely on inside of accelerate."""

from types import SimpleNamespace

import pytest
import torch
from canary import relies_on

from odb_nodes._compat import accelerate as compat

pytestmark = pytest.mark.slow  # importing it takes seconds


def canary(behaviour, used_in="accelerate"):
    return relies_on(
        "accelerate", behaviour, f"_compat/accelerate.py (`integrations/{used_in}.py`)"
    )


@pytest.fixture(scope="module")
def accelerate():
    return pytest.importorskip("accelerate")


@pytest.fixture
def accelerator(accelerate):
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)


@pytest.fixture(autouse=True)
def no_accelerator_after(accelerate):
    yield
    accelerate.state.GradientState._reset_state()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def micro_steps(accelerator, count):
    """Whether the optimizer steps after each of the next micro-steps."""
    synced = []
    for _ in range(count):
        with accelerator.accumulate():
            synced.append(accelerator.sync_gradients)
    return synced


def loader_of(accelerator):
    return type("L", (compat.loader_base(),), {"gradient_state": accelerator.gradient_state})()


@canary("AcceleratorState._shared_state", "../loader/dataloader")
def test_a_process_knows_whether_it_has_an_accelerator(accelerate):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert not compat.has_accelerator()
    accelerate.Accelerator(cpu=True)
    assert compat.has_accelerator()


@canary("Accelerator.step, the number of micro-steps")
def test_a_partial_step_is_dropped(accelerator):
    assert micro_steps(accelerator, 1) == [False]
    compat.drop_partial_step(accelerator)
    assert micro_steps(accelerator, 3) == [False, False, True]


@canary("Accelerator.gather, which gather_for_metrics calls", "huggingface/loss")
def test_ranks_gather_different_numbers_of_rows(accelerator, monkeypatch):
    def gather(_, tensor):
        """As if another rank had the values 7 and 8; a count of rows is gathered first."""
        if len(tensor) == 1 and not tensor.is_floating_point():
            return torch.cat([tensor, torch.tensor([2])])
        return torch.cat([tensor, torch.tensor([7.0, 8.0, 0.0])])

    monkeypatch.setattr(type(accelerator), "num_processes", 2)
    monkeypatch.setattr(type(accelerator), "gather", gather)
    with compat.gathering_rows(accelerator):
        rows = accelerator.gather_for_metrics(torch.tensor([1.0, 2.0, 3.0]))
    assert rows.tolist() == [1, 2, 3, 7, 8]


@pytest.mark.parametrize("steps", [True, False])
@canary("GradientState.sync_with_dataloader")
def test_the_end_of_a_loader_steps_only_if_the_gradient_state_says_so(accelerate, steps):
    plugin = accelerate.utils.GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=steps)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    assert compat.steps_at_epoch_end(accelerator) is steps
    loader = loader_of(accelerator)
    loader.begin()
    loader.end_of_dataloader = True
    assert micro_steps(accelerator, 1) == [steps]
    loader.end()


@canary("the division in Accelerator.backward")
def test_backward_divides_by_the_micro_steps(accelerate, accelerator):
    weight = torch.ones((), requires_grad=True)
    assert compat.backward_divides(accelerator)
    accelerator.backward(weight * 6)
    assert weight.grad == 2
    kind = accelerate.utils.DistributedType.MEGATRON_LM
    megatron = SimpleNamespace(distributed_type=kind, gradient_accumulation_steps=3)
    assert not compat.backward_divides(megatron)
    accelerate.Accelerator.backward(megatron, weight * 6)
    assert weight.grad == 2


@canary("utils.extract_model_from_parallel", "huggingface/run")
def test_a_model_is_unwrapped(accelerate):
    model = torch.nn.Linear(1, 1)
    for wrapper in (lambda model: model, torch.compile, torch.nn.DataParallel):
        assert compat.unwrap_model(wrapper(model)) is model
