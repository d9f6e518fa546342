"""`enable_checkpointing`: the same loss and gradients, of fewer saved tensors, or an error."""

import copy
import pickle

import pytest
import torch
from small_lm import Block, SmallLM, make_batch
from torch import nn

from odb_nodes.memory import enable_checkpointing
from odb_nodes.testing import SavedTensorMeter


def small_lm():
    torch.manual_seed(0)
    return SmallLM(layers=4)


def loss_and_gradients(model, batch=None):
    """Loss, gradients and peak of saved bytes of one step, bitwise reproducible."""
    torch.manual_seed(1)
    batch = make_batch(4, 24) if batch is None else batch
    model.zero_grad()
    with SavedTensorMeter(2**30) as meter:
        loss = model(*batch)
        forward_bytes = meter.peak_bytes()
        loss.backward()
    return [loss, *(p.grad for p in model.parameters() if p.grad is not None)], forward_bytes


def assert_equal(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert torch.equal(one, other)


def test_loss_and_gradients_are_bitwise_the_same_of_less_memory():
    model = small_lm()
    names, (expected, plain_bytes) = list(model.state_dict()), loss_and_gradients(model)
    checkpointing = enable_checkpointing(model)
    assert checkpointing.blocks == tuple(model.blocks)
    for _ in range(2):
        got, bytes_saved = loss_and_gradients(model)
        assert_equal(expected, got)
        assert bytes_saved < plain_bytes / 2
    assert list(model.state_dict()) == names


def test_it_can_be_disabled_and_enabled_again():
    model = small_lm()
    expected, plain_bytes = loss_and_gradients(model)
    checkpointing = enable_checkpointing(model)
    for blocks in (None, model.blocks[:1]):
        with pytest.raises(ValueError, match="`SmallLM` is checkpointed already"):
            enable_checkpointing(model, blocks=blocks)
    assert loss_and_gradients(model)[1] < plain_bytes
    checkpointing.disable()
    checkpointing.disable()
    got, bytes_saved = loss_and_gradients(model)
    assert_equal(expected, got)
    assert bytes_saved == plain_bytes
    enable_checkpointing(model)
    assert loss_and_gradients(model)[1] < plain_bytes


def test_the_blocks_can_be_named():
    model = small_lm()
    plain_bytes = loss_and_gradients(model)[1]
    enable_checkpointing(model, blocks=model.blocks[:1])
    one_bytes = loss_and_gradients(model)[1]
    enable_checkpointing(model, blocks=model.blocks[1:])
    assert loss_and_gradients(model)[1] < one_bytes < plain_bytes


def test_a_forward_of_the_modules_own_is_kept():
    model = small_lm()
    block = model.blocks[0]
    scaled = type("Scaled", (Block,), {"forward": lambda self, x: 2 * Block.forward(self, x)})
    block.forward = scaled.forward.__get__(block)
    expected, _ = loss_and_gradients(model)
    checkpointing = enable_checkpointing(model)
    assert_equal(expected, loss_and_gradients(model)[0])
    checkpointing.disable()
    assert_equal(expected, loss_and_gradients(model)[0])


def test_without_gradients_nothing_is_computed_twice():
    model = small_lm().eval()
    batch = make_batch(2, 8)
    with torch.no_grad():
        expected = model(*batch)
        enable_checkpointing(model)
        assert torch.equal(model(*batch), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_weights_of_its_own(copied):
    model = small_lm()
    enable_checkpointing(model)
    twin = copied(model)
    expected, _ = loss_and_gradients(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert_equal(expected, loss_and_gradients(twin)[0])


class WithBatchNorm(nn.Sequential):
    pass


def test_running_statistics_are_refused():
    blocks = [WithBatchNorm(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    with pytest.raises(ValueError, match="`WithBatchNorm` has a `BatchNorm1d`, whose running"):
        enable_checkpointing(nn.Sequential(*blocks))


class Counting(nn.Linear):
    """Counts its calls in a buffer, in place or by a new tensor."""

    def __init__(self, in_place):
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: torch.Tensor
        self.in_place = in_place

    def forward(self, x):
        if self.in_place:
            self.calls.add_(1)
        else:
            self.calls = self.calls + 1
        return super().forward(x)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_block_that_changes_a_buffer_is_an_error(in_place):
    model = nn.Sequential(*[Counting(in_place) for _ in range(2)])
    enable_checkpointing(model)
    with pytest.raises(RuntimeError, match="`Counting` changes its buffer `calls`"):
        model(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Linear(2, 2), {}, "`Linear` has no `ModuleList` or `Sequential` .* Pass `blocks=`"),
        (nn.Sequential(nn.Linear(2, 2), nn.GELU()), {}, "its blocks are not known"),
        (None, {}, "`model` must be a `Module`"),
        (nn.Linear(2, 2), {"blocks": [nn.Linear(2, 2)]}, "`blocks` must be modules of `model`"),
        (nn.Linear(2, 2), {"blocks": []}, "`blocks` must have one module or more, but is empty"),
        (
            nn.Linear(2, 2),
            {"blocks": nn.Linear(2, 2)},
            "`blocks` must be .* Pass a list of modules",
        ),
    ],
)
def test_what_cannot_be_is_an_error(model, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        enable_checkpointing(model, **options)


class Library(nn.Module):
    """Has the methods of a model of transformers, of one version."""

    supports_gradient_checkpointing = True

    def __init__(self, kind):
        super().__init__()
        self.calls = []
        setattr(self, f"{kind}_enable", lambda **kw: self.calls.append(kw))
        setattr(self, f"{kind}_disable", lambda: self.calls.append("disabled"))


@pytest.mark.parametrize("kind", ["activation_checkpointing", "gradient_checkpointing"])
def test_a_models_own_method_is_preferred(kind):
    model = Library(kind)
    enable_checkpointing(model).disable()
    assert model.calls == [{f"{kind}_kwargs": {"use_reentrant": False}}, "disabled"]


@pytest.mark.parametrize("kind", ["activation_checkpointing", "gradient_checkpointing"])
def test_what_was_enabled_before_stays_so(kind):
    model = Library(kind)
    setattr(model, f"is_{kind}", True)
    with pytest.raises(ValueError, match="`Library` is checkpointed already"):
        enable_checkpointing(model)
    assert not model.calls


def test_a_model_that_does_not_support_its_own_method_is_an_error():
    model = Library("gradient_checkpointing")
    model.supports_gradient_checkpointing = False
    with pytest.raises(ValueError, match="`Library` does not support activation checkpointing"):
        enable_checkpointing(model)


def test_a_model_of_transformers_gives_the_same_gradients():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(61, (2, 20))

    def step(_):
        return model(input_ids=ids, labels=ids).loss

    holder = nn.Module()
    holder.model, holder.forward = model, step
    expected, plain_bytes = loss_and_gradients(holder, (None,))
    checkpointing = enable_checkpointing(model)
    got, bytes_saved = loss_and_gradients(holder, (None,))
    assert_equal(expected, got)
    assert bytes_saved < plain_bytes
    checkpointing.disable()
    assert loss_and_gradients(holder, (None,))[1] == plain_bytes
