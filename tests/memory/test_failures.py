"""Which errors say that memory ran out, and what gives it back."""

import gc
import weakref

import pytest
import torch

from odb_nodes.memory import free_memory, is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.cuda.OutOfMemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        MemoryError(),
    ],
)
def test_memory_ran_out(error):
    assert is_out_of_memory(error)


def raised_from(error, cause):
    """An error that was raised `from` another one."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_error_that_was_raised_from_a_lack_of_memory_is_one(kind):
    error = raised_from(kind("layer 3 failed"), torch.OutOfMemoryError())
    assert is_out_of_memory(error)
    assert is_out_of_memory(raised_from(KeyError(), error))
    error.__cause__.__cause__ = error  # a circle
    assert is_out_of_memory(error)


def test_an_error_while_a_lack_of_memory_is_handled_is_none():
    error = RuntimeError("no checkpoint to go back to")
    error.__context__ = torch.OutOfMemoryError()
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        raised_from(RuntimeError("no memory"), KeyError("a cause")),
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("out of memory"),
        KeyboardInterrupt(),
    ],
)
def test_memory_did_not_run_out(error):
    assert not is_out_of_memory(error)


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


def test_errors_that_refer_to_each_other_end():
    first, second = ValueError(), ValueError()
    first.__context__, second.__cause__ = second, first
    free_memory(first)


def test_without_an_error_garbage_is_collected():
    class Held:
        pass

    held = Held()
    held.itself = held
    alive = weakref.ref(held)
    del held
    free_memory()
    assert alive() is None
