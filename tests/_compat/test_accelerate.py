"""Canaries: what we rely on inside of accelerate."""

from types import SimpleNamespace

import pytest
import torch
from canary import relies_on

from odb_nodes._compat import accelerate as compat

pytestmark = pytest.mark.slow  # importing it takes seconds


def canary(what, used_in="accelerate"):
    return relies_on("accelerate", what, f"_compat/accelerate.py (`integrations/{used_in}.py`)")


@pytest.fixture(scope="module")
def accelerate():
    return pytest.importorskip("accelerate")


@pytest.fixture
def accelerator(accelerate):
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    accelerate.state.GradientState._reset_state()


def micro_steps(accelerator, count):
    """Whether the optimizer steps after each of the next micro-steps."""
    found = []
    for _ in range(count):
        with accelerator.accumulate():
            found.append(accelerator.sync_gradients)
    return found


def loader_of(accelerator):
    return type("L", (compat.loader_base(),), {"gradient_state": accelerator.gradient_state})()


@canary("DataLoaderStateMixin, read by Accelerator._do_sync, or Accelerator.prepare")
def test_a_loader_of_our_own_tells_where_an_epoch_ends(accelerator):
    loader = loader_of(accelerator)
    assert accelerator.prepare(loader) is loader
    loader.begin()
    assert micro_steps(accelerator, 4) == [False, False, True, False]
    loader.end_of_dataloader = True
    assert micro_steps(accelerator, 1) == [True]
    loader.end()
    assert micro_steps(accelerator, 3) == [False, False, True]


@canary("Accelerator.step")
def test_the_accelerator_counts_micro_steps_and_the_count_can_be_set(accelerator):
    micro_steps(accelerator, 1)
    assert accelerator.step == 1
    compat.drop_partial_step(accelerator)
    assert micro_steps(accelerator, 3) == [False, False, True]
    compat.drop_partial_step(accelerator)
    assert accelerator.step == 3


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
    accelerate.state.GradientState._reset_state()


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


@canary("AcceleratorState.deepspeed_plugin.deepspeed_config", "huggingface/config")
def test_the_configuration_of_deepspeed_is_in_the_state(accelerate, accelerator):
    assert accelerator.state.deepspeed_plugin is None
    assert compat.deepspeed_config(accelerator) == {}
    given = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    plugin = accelerate.utils.DeepSpeedPlugin(hf_ds_config={**given, "scheduler": {}})
    stub = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    assert "scheduler" in compat.deepspeed_config(stub)


@canary("utils.extract_model_from_parallel", "huggingface/run")
def test_a_model_is_unwrapped(accelerate):
    model = torch.nn.Linear(1, 1)
    for wrapper in (lambda model: model, torch.compile, torch.nn.DataParallel):
        assert compat.unwrap_model(wrapper(model)) is model


@canary("the hooks of save_state and load_state")
def test_hooks_of_checkpoints_get_the_folder_and_can_be_removed(accelerator, tmp_path):
    seen = []
    handles = (
        accelerator.register_save_state_pre_hook(lambda *given: seen.append(given[2])),
        accelerator.register_load_state_pre_hook(lambda *given: seen.append(given[1])),
    )
    for _ in range(2):
        accelerator.save_state(tmp_path)
        accelerator.load_state(tmp_path)
        for handle in handles:
            handle.remove()
    assert list(map(str, seen)) == [str(tmp_path)] * 2
