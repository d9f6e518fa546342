"""Which errors say that memory ran out, and what gives it back."""

import gc
import weakref

import pytest
import torch

from odb_nodes.memory import free_memory, is_out_of_memory


def raised_from(error, cause):
    """An error that was raised `from` another one."""
    error.__cause__ = cause
    return error


def raised_while_handling(error, context):
    error.__context__ = context
    return error


OOM = torch.OutOfMemoryError
CIRCLE = raised_from(RuntimeError("layer 3 failed"), ValueError())
CIRCLE.__cause__.__cause__ = CIRCLE


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (OOM("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `create(h)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (MemoryError(), True),
        (raised_from(KeyError(), raised_from(ValueError("layer 3 failed"), OOM())), True),
        (raised_while_handling(RuntimeError("no checkpoint to go back to"), OOM()), False),
        (raised_from(RuntimeError("no memory"), KeyError("a cause")), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
        (CIRCLE, False),
    ],
)
def test_whether_memory_ran_out_is_told_by_the_error(error, ran_out):
    assert is_out_of_memory(error) == ran_out


def test_torch_itself_says_so_on_a_cpu():
    with pytest.raises(RuntimeError) as failure:
        torch.empty(2**60, dtype=torch.int8)
    assert is_out_of_memory(failure.value)


def failing_step(held, wrap):
    """Return the error of a step whose frame holds a tensor, which `held` refers to weakly."""

    def step():
        activations = torch.ones(10)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError

    try:
        try:
            step()
        except torch.OutOfMemoryError as error:
            if wrap == "cause":
                raise RuntimeError from error
            if wrap == "context":
                raise KeyError("while handling")  # noqa: B904
            error.__context__ = ValueError()
            error.__context__.__cause__ = error  # a circle, which ends
            raise
    except Exception as error:
        return error


@pytest.mark.parametrize("wrap", ["none", "cause", "context"])
def test_what_the_frames_of_an_error_hold_is_given_back(wrap):
    held = []
    error = failing_step(held, wrap)
    gc.collect()
    assert held[0]() is not None
    free_memory(error)
    assert held[0]() is None
    assert error.__traceback__ is not None
