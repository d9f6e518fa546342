"""`CudaMeter` with a fake and a real GPU; which errors mean out of memory."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from odb_nodes.testing import SavedTensorMeter
from odb_nodes.training.memory import CudaMeter, MemoryMeter, free_memory, is_out_of_memory
from odb_nodes.training.memory.meter import (
    ALLOCATOR_SETTINGS,
    GIB,
    check_meter,
    warn_of_fragments,
)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 80 GiB of which others use 10 and torch has reserved 5."""
    gpu = SimpleNamespace(fraction=1.0, peak=0, asked=set())

    def reset(device):
        gpu.asked.add(device)
        gpu.peak = 0

    for name, function in {
        "is_available": lambda: True,
        "current_device": lambda: 1,
        "mem_get_info": lambda device: (65 * GIB, 80 * GIB),
        "memory_reserved": lambda device: 5 * GIB,
        "get_per_process_memory_fraction": lambda device: gpu.fraction,
        "reset_peak_memory_stats": reset,
        "max_memory_allocated": lambda device: gpu.peak,
        "max_memory_reserved": lambda device: gpu.peak + GIB,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return gpu


@pytest.mark.parametrize(
    ("share", "fraction", "limit_gib"), [(0.9, 1.0, 63), (0.5, 1.0, 35), (1.0, 0.25, 20)]
)
def test_the_limit_is_a_share_of_the_available_memory(gpu, share, fraction, limit_gib):
    gpu.fraction = fraction
    assert CudaMeter(share=share).limit_bytes == limit_gib * GIB


def test_the_peak_is_that_of_allocated_bytes_since_reset(gpu):
    meter = CudaMeter()
    gpu.peak = 7 * GIB
    assert isinstance(meter, MemoryMeter)
    assert (meter.peak_bytes(), meter.reserved_bytes()) == (7 * GIB, 8 * GIB)
    meter.reset()
    assert meter.peak_bytes() == 0


@pytest.mark.parametrize(
    ("device", "expected"),
    [(None, "cuda:1"), (3, "cuda:3"), ("cuda:2", "cuda:2"), (torch.device("cuda", 0), "cuda:0")],
)
def test_it_measures_one_device(gpu, device, expected):
    CudaMeter(device).reset()
    assert gpu.asked == {torch.device(expected)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *[(lambda share=share: CudaMeter(share=share), "`share` must be") for share in (0, "all")],
        (lambda: CudaMeter("cpu"), "`device` must be a GPU, but is 'cpu'"),
        *[(lambda meter=meter: check_meter(meter), r"`meter` must have `reset\(\)`")
          for meter in (CudaMeter, SimpleNamespace(limit_bytes=5))],
    ],
)  # fmt: skip
def test_bad_meters_are_refused(gpu, make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize(
    ("name", "value", "warns"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128,expandable_segments:True", False),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", False),
    ],
)
def test_an_allocator_that_fragments_memory_is_warned_of(gpu, monkeypatch, name, value, warns):
    for setting in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(setting, raising=False)
    monkeypatch.setenv(name, value)
    warn_of_fragments(SavedTensorMeter(GIB))
    with pytest.warns(UserWarning, match="expandable_segments:True") if warns else nullcontext():
        warn_of_fragments(CudaMeter())


def test_without_a_gpu_it_names_the_meter_for_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch sees none. On a CPU, use .*SavedTensorMeter"):
        CudaMeter()


@pytest.mark.cuda
def test_it_sees_what_a_gpu_has_allocated():
    meter = CudaMeter()
    meter.reset()
    before = meter.peak_bytes()
    blocks = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    del blocks
    assert meter.peak_bytes() - before == 64 * 2**20
    assert meter.peak_bytes() <= meter.reserved_bytes()
    meter.reset()
    assert meter.peak_bytes() == before
    assert 0 < meter.limit_bytes < torch.cuda.mem_get_info()[1]


@pytest.mark.cuda
def test_a_real_failure_is_out_of_memory_and_gives_everything_back():
    def step():
        held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        return held, torch.empty(2**50, dtype=torch.uint8, device="cuda")

    before = torch.cuda.memory_allocated()
    with pytest.raises(RuntimeError) as failure:
        step()
    assert is_out_of_memory(failure.value)
    assert torch.cuda.memory_allocated() > before
    free_memory(failure.value)
    assert torch.cuda.memory_allocated() == before


# --- which errors say that memory ran out, and what gives it back ---------------------------------


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
def test_out_of_memory_errors_are_recognized(error, ran_out):
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
def test_freeing_memory_clears_the_frames_of_an_error(wrap):
    held = []
    error = failing_step(held, wrap)
    gc.collect()
    assert held[0]() is not None
    free_memory(error)
    assert held[0]() is None
    assert error.__traceback__ is not None
