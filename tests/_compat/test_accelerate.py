"""Canaries: what we rely on inside of accelerate."""

from types import SimpleNamespace

import pytest
import torch
from canary import relies_on

from odb_nodes._compat import accelerate as compat

pytestmark = pytest.mark.slow  # importing it takes seconds

USED_IN = "_compat/accelerate.py (`integrations/accelerate.py`)"


@pytest.fixture(scope="module")
def accelerate():
    return pytest.importorskip("accelerate")


@pytest.fixture
def accelerator(accelerate):
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    accelerate.state.GradientState._reset_state()


def micro_step(accelerator):
    """Whether the optimizer steps after the next micro-step."""
    with accelerator.accumulate():
        return accelerator.sync_gradients


def loader_of(accelerator):
    class Loader(compat.loader_base()):
        gradient_state = accelerator.gradient_state

    return Loader()


def test_a_loader_of_our_own_tells_where_an_epoch_ends(accelerator):
    with relies_on("accelerate", "DataLoaderStateMixin, read by Accelerator._do_sync", USED_IN):
        loader = loader_of(accelerator)
        loader.begin()
        assert [micro_step(accelerator) for _ in range(4)] == [False, False, True, False]
        loader.end_of_dataloader = True
        assert micro_step(accelerator)
        loader.end()
        assert [micro_step(accelerator) for _ in range(3)] == [False, False, True]


def test_prepare_leaves_a_loader_of_our_own_alone(accelerator):
    with relies_on("accelerate", "Accelerator.prepare of what is no DataLoader", USED_IN):
        loader = loader_of(accelerator)
        assert accelerator.prepare(loader) is loader


def test_the_accelerator_counts_micro_steps_and_the_count_can_be_set(accelerator):
    with relies_on("accelerate", "Accelerator.step", USED_IN):
        assert not micro_step(accelerator)
        assert accelerator.step == 1
        compat.drop_partial_step(accelerator)
        assert [micro_step(accelerator) for _ in range(3)] == [False, False, True]
        compat.drop_partial_step(accelerator)
        assert accelerator.step == 3


@pytest.mark.parametrize("steps", [True, False])
def test_the_end_of_a_loader_steps_only_if_the_gradient_state_says_so(accelerate, steps):
    with relies_on("accelerate", "GradientState.sync_with_dataloader", USED_IN):
        plugin = accelerate.utils.GradientAccumulationPlugin(
            num_steps=3, sync_with_dataloader=steps
        )
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        assert compat.steps_at_epoch_end(accelerator) is steps
        loader = loader_of(accelerator)
        loader.begin()
        loader.end_of_dataloader = True
        assert micro_step(accelerator) is steps
        loader.end()
        accelerate.state.GradientState._reset_state()


def test_backward_divides_by_the_micro_steps(accelerate, accelerator):
    with relies_on("accelerate", "the division in Accelerator.backward", USED_IN):
        weight = torch.ones((), requires_grad=True)
        assert compat.backward_divides(accelerator)
        accelerator.backward(weight * 6)
        assert weight.grad == 2
        megatron = SimpleNamespace(
            distributed_type=accelerate.utils.DistributedType.MEGATRON_LM,
            gradient_accumulation_steps=3,
        )
        assert not compat.backward_divides(megatron)
        accelerate.Accelerator.backward(megatron, weight * 6)
        assert weight.grad == 2


def test_the_configuration_of_deepspeed_is_in_the_state(accelerate, accelerator):
    used_in = "_compat/accelerate.py (`integrations/huggingface/checks.py`)"
    with relies_on("accelerate", "AcceleratorState.deepspeed_plugin.deepspeed_config", used_in):
        assert accelerator.state.deepspeed_plugin is None
        assert compat.deepspeed_config(accelerator) == {}
        given = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
        plugin = accelerate.utils.DeepSpeedPlugin(hf_ds_config={**given, "scheduler": {}})
        stub = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
        assert "scheduler" in compat.deepspeed_config(stub)


@pytest.mark.parametrize("wrapper", [torch.compile, torch.nn.DataParallel])
def test_a_model_is_unwrapped(accelerate, wrapper):
    used_in = "_compat/accelerate.py (`_compat/transformers.py`)"
    with relies_on("accelerate", "utils.extract_model_from_parallel", used_in):
        model = torch.nn.Linear(1, 1)
        assert compat.unwrap_model(model) is model
        assert compat.unwrap_model(wrapper(model)) is model


def test_hooks_of_checkpoints_get_the_folder_and_can_be_removed(accelerator, tmp_path):
    with relies_on("accelerate", "the hooks of save_state and load_state", USED_IN):
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


def test_an_accelerator_may_be_kept_from_gathering(accelerator):
    used_in = "_compat/accelerate.py (`integrations/huggingface/guard.py`)"
    with relies_on("accelerate", "Accelerator.gather, as gather_for_metrics calls it", used_in):
        one, gather = torch.ones(1), accelerator.gather
        with compat.without_gathering(accelerator, "Some", "do not come."):
            for method in ("gather", "gather_for_metrics", "reduce"):
                with pytest.raises(
                    RuntimeError,
                    match="`Some` gathers from other ranks, which do",
                ):
                    getattr(accelerator, method)(one)
        assert accelerator.gather == gather
        assert torch.equal(accelerator.gather_for_metrics(one), one)


def test_a_forward_has_the_precision_that_prepare_gives_it(accelerate):
    class Noting(torch.nn.Linear):
        def forward(self, x):
            self.inside = super().forward(x)
            return {"logits": self.inside}

    used_in = "_compat/accelerate.py (`integrations/huggingface/auto_budget.py`)"
    reset = accelerate.state.AcceleratorState._reset_state
    with relies_on("accelerate", "native_amp, and how prepare_model wraps forward", used_in):
        reset(True)
        try:
            accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
            model, x = Noting(4, 4), torch.rand(2, 4)
            with compat.mixed_precision(accelerator, model):
                found, inside = model(x)["logits"], model.inside.dtype
            assert "forward" not in vars(model)
            assert model(x)["logits"].dtype == model.inside.dtype == torch.float32
            expected = accelerator.prepare_model(model)(x)["logits"]
            assert inside == model.inside.dtype == torch.bfloat16
            assert found.dtype == torch.float32 and torch.equal(found, expected)
        finally:
            reset(True)


def test_the_norm_of_the_gradients_is_that_before_they_were_clipped(accelerator):
    with relies_on("accelerate", "Accelerator.clip_grad_norm_", "_compat/accelerate.py"):
        weight, norms = torch.nn.Parameter(torch.zeros(2)), []
        weight.grad = torch.tensor([3.0, 4.0])
        with compat.noting_gradient_norms(accelerator, norms.append):
            accelerator.clip_grad_norm_([weight], 1.0)
        accelerator.clip_grad_norm_([weight], 1.0)
        assert [float(norm) for norm in norms] == [5.0]
        assert "clip_grad_norm_" not in vars(accelerator)
