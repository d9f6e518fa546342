"""The memory of the device, as torch's allocator has it."""

from __future__ import annotations

import torch

from odb_nodes.monitor.window import Window


def note_memory(window: Window) -> None:
    """Note the bytes of the current GPU, where this process uses one.

    Peaks are those since the process began, or since torch's statistics were reset, as
    `CudaMeter.reset` does: a monitor changes nothing that others measure.
    """
    if not torch.cuda.is_initialized():
        return
    now = torch.cuda.memory_stats()
    for part in ("allocated_bytes", "reserved_bytes"):
        window.set_last(f"memory_{part}", now.get(f"{part}.all.current", 0))
        window.set_peak(f"memory_{part}", now.get(f"{part}.all.peak", 0))
