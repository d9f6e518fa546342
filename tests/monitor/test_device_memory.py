"""The memory of a GPU is read where a record is written, and nothing of it is reset."""

import pytest
import torch
from monitors import loader_of, train

from odb_nodes.monitor import Monitor, read_run

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for batches")


def test_memory_is_in_the_records(tmp_path, monkeypatch):
    reads = []

    def statistics():
        reads.append(len(reads))
        return {
            "allocated_bytes.all.current": 100 + len(reads),
            "allocated_bytes.all.peak": 1000 - len(reads),
            "reserved_bytes.all.current": 300,
            "reserved_bytes.all.peak": 3000,
        }

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", statistics)
    with Monitor(tmp_path, every=4) as monitor:
        train(monitor, loader_of(), steps=8)
    one, other = read_run(tmp_path).steps
    assert len(reads) == 2
    assert one["last"]["memory_allocated_bytes"] == 101
    assert other["last"]["memory_allocated_bytes"] == 102
    assert one["peak"]["memory_allocated_bytes"] == 999
    assert one["peak"]["memory_reserved_bytes"] == 3000


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_a_real_gpu(tmp_path):
    held = torch.zeros(2**20, device="cuda")
    with Monitor(tmp_path, every=1) as monitor:
        train(monitor, loader_of(), steps=1)
    (one,) = read_run(tmp_path).steps
    assert one["last"]["memory_allocated_bytes"] >= held.nbytes
    assert one["peak"]["memory_reserved_bytes"] >= one["peak"]["memory_allocated_bytes"]
