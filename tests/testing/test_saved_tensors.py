"""What `SavedTensorMeter` counts, and where it fails."""

import pytest
import torch
from refusals import refuses
from torch.utils.checkpoint import checkpoint

from odb_nodes.testing import SavedTensorMeter
from odb_nodes.training.memory import MemoryMeter, free_memory

MIB = 2**20


def leaf(*shape):
    return torch.ones(shape, requires_grad=True)


def test_it_counts_what_autograd_saves_until_backward_has_read_it():
    x = leaf(1000)
    with SavedTensorMeter(MIB) as meter:
        loss = x.exp().sum()  # saves its result
        assert meter.saved_bytes == meter.peak_bytes() == 4000
        loss.backward()
        assert (meter.saved_bytes, meter.peak_bytes()) == (0, 4000)
        meter.reset()
        assert meter.peak_bytes() == 0
    assert torch.equal(x.grad, x.detach().exp())


def test_a_storage_counts_once():
    x = leaf(1000)
    with SavedTensorMeter(MIB) as meter:
        doubled = x * 2
        products = doubled[:500] * doubled[500:] * doubled[:500]
        assert meter.peak_bytes() == 4000 + 2000  # `doubled`, and the first product
        del products
        assert meter.saved_bytes == 0


@pytest.mark.parametrize("operation", [torch.exp, torch.rsqrt, lambda x: x.softmax(-1)])
def test_a_graph_that_is_dropped_without_backward_counts_no_more(operation):
    with SavedTensorMeter(MIB) as meter:
        result = operation(leaf(1000))
        assert meter.saved_bytes == 4000
        del result
        assert meter.saved_bytes == 0


def test_nothing_counts_outside_of_the_block_and_it_can_be_entered_again():
    meter = SavedTensorMeter(MIB)
    with meter, meter:
        inner = leaf(10).exp()
    outside = leaf(1000).exp()
    assert (meter.peak_bytes(), len(inner), len(outside)) == (40, 10, 1000)
    with meter:
        result = leaf(1000).exp()
        assert meter.saved_bytes == 4040
    assert len(result) == 1000


def test_above_the_limit_forward_is_out_of_memory_as_torch_says_it():
    with SavedTensorMeter(5000) as meter:
        kept = leaf(1000).exp()
        with pytest.raises(torch.OutOfMemoryError, match="in the forward pass: 8000 bytes"):
            kept.exp()
        assert meter.limit_bytes == 5000


@pytest.mark.parametrize("point", [0, 1, 2])
def test_it_fails_at_a_chosen_point_of_backward(point):
    x = leaf(1000)
    reached = []
    with SavedTensorMeter(5000, fails_in="backward", backward_point=point):
        values = x
        for _ in range(3):
            values = values.exp()
            values.register_hook(reached.append)
        with pytest.raises(torch.OutOfMemoryError, match="in the backward pass"):
            values.sum().backward()
    assert len(reached) == point + 1
    assert x.grad is None


def test_blocks_that_are_computed_again_do_not_end_the_step():
    with SavedTensorMeter(13_000, fails_in="backward", backward_point=3) as meter:
        kept = leaf(1000).exp()
        result = checkpoint(lambda x: x.exp(), leaf(1000), use_reentrant=True)
        values = result.exp().exp()
        assert meter.saved_bytes == 16_000
        with pytest.raises(torch.OutOfMemoryError, match="in the backward pass"):
            values.sum().backward()
    assert len(kept) == 1000


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_after_a_failed_step_nothing_is_left_and_the_next_may_succeed(fails_in):
    with SavedTensorMeter(5000, fails_in=fails_in) as meter:
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError) as caught:
                leaf(1000).exp().exp().sum().backward()
            free_memory(caught.value)
            del caught
            assert meter.saved_bytes == 0
            leaf(1000).exp().sum().backward()
    assert isinstance(meter, MemoryMeter)


test_bad_arguments_are_errors = refuses(
    [
        ({"limit_bytes": 0}, "`limit_bytes` must be in 1"),
        ({"limit_bytes": 1.5}, "`limit_bytes` must be an integer"),
        ({"limit_bytes": 1, "fails_in": "step"}, "`fails_in` must be one of"),
        ({"limit_bytes": 1, "backward_point": -1}, "`backward_point` must be in 0"),
    ],
    lambda options: SavedTensorMeter(**options),
    error=(TypeError, ValueError),
)
