"""`enable_checkpointing`: equal loss and gradients with fewer saved tensors."""

import copy
import pickle
from functools import partial

import pytest
import torch
from small_lm import Block, SmallLM, make_batch
from torch import nn

from odb_nodes.testing import SavedTensorMeter
from odb_nodes.training.memory import enable_checkpointing


def small_lm():
    torch.manual_seed(0)
    return SmallLM(layers=4)


def loss_and_gradients(model):
    """Loss, gradients and peak of saved bytes of one step, bitwise reproducible."""
    torch.manual_seed(1)
    batch = make_batch(4, 24)
    model.zero_grad()
    with SavedTensorMeter(2**30) as meter:
        loss = model(*batch)
        forward_bytes = meter.peak_bytes()
        loss.backward()
    return [loss, *(p.grad for p in model.parameters() if p.grad is not None)], forward_bytes


def assert_equal(expected, actual):
    assert len(expected) == len(actual)
    for tensor, other_tensor in zip(expected, actual, strict=True):
        assert torch.equal(tensor, other_tensor)


def test_checkpointing_saves_memory_with_bitwise_equal_gradients():
    model = small_lm()
    names, (expected, plain_bytes) = [*model.state_dict()], loss_and_gradients(model)
    for _ in range(2):
        checkpointing = enable_checkpointing(model)
        with pytest.raises(ValueError, match="is checkpointed already"):
            enable_checkpointing(model)
        for _ in range(2):
            tensors, bytes_saved = loss_and_gradients(model)
            assert_equal(expected, tensors)
            assert bytes_saved < plain_bytes / 2
        assert [*model.state_dict()] == names
        checkpointing.disable()
        checkpointing.disable()
        tensors, bytes_saved = loss_and_gradients(model)
        assert_equal(expected, tensors)
        assert bytes_saved == plain_bytes


def test_the_blocks_are_chosen_or_passed():
    model = small_lm()
    plain_bytes = loss_and_gradients(model)[1]
    checkpointing = enable_checkpointing(model)
    assert checkpointing.blocks == tuple(model.blocks)
    with pytest.raises(ValueError, match="`SmallLM` is checkpointed already"):
        enable_checkpointing(model, blocks=model.blocks[:1])
    checkpointing.disable()
    enable_checkpointing(model, blocks=model.blocks[:1])
    one_block_bytes = loss_and_gradients(model)[1]
    enable_checkpointing(model, blocks=model.blocks[1:])
    assert loss_and_gradients(model)[1] < one_block_bytes < plain_bytes


def test_a_custom_forward_of_a_module_is_kept():
    model = small_lm()
    block = model.blocks[0]
    block.forward = (lambda self, x: 2 * Block.forward(self, x)).__get__(block)
    expected, _ = loss_and_gradients(model)
    checkpointing = enable_checkpointing(model)
    assert_equal(expected, loss_and_gradients(model)[0])
    checkpointing.disable()
    assert_equal(expected, loss_and_gradients(model)[0])


def test_a_forward_that_is_no_bound_method_is_kept():
    model = small_lm()
    block = model.blocks[0]
    block.forward = partial(Block.forward, block)  # as the hooks of accelerate are installed
    expected, _ = loss_and_gradients(model)
    enable_checkpointing(model)
    assert_equal(expected, loss_and_gradients(model)[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_checkpointed_model_has_separate_weights(copied):
    model = small_lm()
    enable_checkpointing(model)
    twin = copied(model)
    expected, _ = loss_and_gradients(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert_equal(expected, loss_and_gradients(twin)[0])


class Counting(nn.Linear):
    """Counts its calls in a buffer, in place or by a new tensor."""

    def __init__(self, in_place):
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.in_place = in_place

    def forward(self, x):
        if self.in_place:
            self.calls.add_(1)
        else:
            self.calls = self.calls + 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("block", "buffer"),
    [
        (lambda: Counting(True), "`Counting` changes its buffer `calls`"),
        (lambda: Counting(False), "`Counting` changes its buffer `calls`"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "`1.num_batches_tracked`"),
    ],
)
def test_a_block_that_changes_a_buffer_is_an_error(block, buffer):
    model = nn.Sequential(*[block() for _ in range(2)])
    enable_checkpointing(model)
    with pytest.raises(RuntimeError, match=buffer):
        model(torch.ones(2, 4))


class Library(nn.Module):
    """Has the methods of a model of transformers, of one version."""

    def __init__(self, kind, is_enabled=False, is_supported=True):
        super().__init__()
        self.calls, self.supports_gradient_checkpointing = [], is_supported
        setattr(self, f"is_{kind}", is_enabled)
        setattr(self, f"{kind}_enable", lambda **kw: self.calls.append(kw))
        setattr(self, f"{kind}_disable", lambda: self.calls.append("disabled"))


KINDS = ["activation_checkpointing", "gradient_checkpointing"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_models_own_method_is_preferred(kind):
    model = Library(kind)
    enable_checkpointing(model).disable()
    assert model.calls == [{f"{kind}_kwargs": {"use_reentrant": False}}, "disabled"]


LINEAR = nn.Linear(2, 2)
REFUSALS = [
    (LINEAR, {}, "`Linear` has no `ModuleList` .* Pass `blocks=`"),
    (nn.Sequential(nn.Linear(2, 2), nn.GELU()), {}, "its blocks cannot be chosen"),
    (None, {}, "`model` must be a `Module`"),
    (LINEAR, {"blocks": [nn.Linear(2, 2)]}, "`blocks` must be one or more different modules"),
    (LINEAR, {"blocks": []}, "`blocks` must be one or more different modules"),
    (LINEAR, {"blocks": [LINEAR, LINEAR]}, "`blocks` must be one or more different modules"),
    (LINEAR, {"blocks": nn.Linear(2, 2)}, "`blocks` must be .* Pass a list"),
    *[(Library(kind, is_enabled=True), {}, "is checkpointed already") for kind in KINDS],
    (Library(KINDS[1], is_supported=False), {}, "`Library` does not support"),
]


@pytest.mark.parametrize(("model", "options", "message"), REFUSALS)
def test_what_cannot_be_is_an_error(model, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        enable_checkpointing(model, **options)
    assert not getattr(model, "calls", [])
