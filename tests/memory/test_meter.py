"""`CudaMeter`: what it asks of torch.cuda, and, where there is a GPU, what it measures."""

from types import SimpleNamespace

import pytest
import torch

from odb_nodes.memory import CudaMeter, MemoryMeter
from odb_nodes.memory.meter import check_meter

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 80 GiB of which others use 10 and torch has reserved 5."""
    gpu = SimpleNamespace(free=65 * GIB, reserved=5 * GIB, fraction=1.0, peak=0, asked=set())

    def reset(device):
        gpu.asked.add(device)
        gpu.peak = 0

    for name, function in {
        "is_available": lambda: True,
        "current_device": lambda: 1,
        "mem_get_info": lambda device: (gpu.free, 80 * GIB),
        "memory_reserved": lambda device: gpu.reserved,
        "get_per_process_memory_fraction": lambda device: gpu.fraction,
        "reset_peak_memory_stats": reset,
        "max_memory_allocated": lambda device: gpu.peak,
        "max_memory_reserved": lambda device: gpu.peak + GIB,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return gpu


def test_the_limit_is_a_share_of_what_this_process_can_have(gpu):
    assert CudaMeter().limit_bytes == 63 * GIB
    assert CudaMeter(share=0.5).limit_bytes == 35 * GIB


def test_the_limit_is_within_what_torch_may_take(gpu):
    gpu.fraction = 0.25
    assert CudaMeter(share=1.0).limit_bytes == 20 * GIB


def test_the_peak_is_that_of_allocated_bytes_since_reset(gpu):
    meter = CudaMeter()
    gpu.peak = 7 * GIB
    assert (meter.peak_bytes(), meter.reserved_bytes()) == (7 * GIB, 8 * GIB)
    meter.reset()
    assert meter.peak_bytes() == 0


@pytest.mark.parametrize(
    ("device", "asked"),
    [(None, "cuda:1"), (3, "cuda:3"), ("cuda:2", "cuda:2"), (torch.device("cuda", 0), "cuda:0")],
)
def test_it_measures_one_device(gpu, device, asked):
    CudaMeter(device).reset()
    assert gpu.asked == {torch.device(asked)}


def test_it_is_a_memory_meter(gpu):
    assert isinstance(CudaMeter(), MemoryMeter)


@pytest.mark.parametrize("share", [0, 1.5, -1, True, "all"])
def test_the_share_is_checked(gpu, share):
    with pytest.raises((TypeError, ValueError), match="`share` must be"):
        CudaMeter(share=share)


def test_the_device_is_checked(gpu):
    with pytest.raises(ValueError, match="`device` must be a GPU, but is 'cpu' instead"):
        CudaMeter("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_names_the_meter_for_a_cpu():
    with pytest.raises(RuntimeError, match="torch sees none. On a CPU, use .*SavedTensorMeter"):
        CudaMeter()


@pytest.mark.parametrize("meter", [None, 5, CudaMeter, SimpleNamespace(limit_bytes=5)])
def test_what_is_no_meter_is_an_error(meter):
    with pytest.raises(TypeError, match="`meter` must have `reset\\(\\)`"):
        check_meter(meter)


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
    from odb_nodes.memory import free_memory, is_out_of_memory

    def step():
        held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        return held, torch.empty(2**50, dtype=torch.uint8, device="cuda")

    before = torch.cuda.memory_allocated()
    failure = None
    try:
        step()
    except Exception as error:
        failure = error
    assert is_out_of_memory(failure)
    assert torch.cuda.memory_allocated() > before
    free_memory(failure)
    assert torch.cuda.memory_allocated() == before
