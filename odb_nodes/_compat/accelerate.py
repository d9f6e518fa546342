"""Internals of accelerate that we rely on: its count of micro-steps, and its shared state.

Read in accelerate 1.15.0; the extra `accelerate` allows 1.10 and later. Each function has a canary
in `tests/_compat/test_accelerate.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


def loader_base() -> Any:
    """Return the base class of loaders that report the end of an epoch to the accelerator.

    Relies on `DataLoaderStateMixin`: between `begin()` and `end()`, `Accelerator._do_sync` reads
    the attribute `end_of_dataloader` of the loader through its `gradient_state`, and steps the
    optimizer where it is True. `Accelerator.prepare` returns such a loader unchanged, since it is
    not a `torch.utils.data.DataLoader`.
    """
    from accelerate.data_loader import DataLoaderStateMixin

    return DataLoaderStateMixin


def has_accelerator() -> bool:
    """Return whether this process has made an `Accelerator`, without importing accelerate.

    Relies on `AcceleratorState._shared_state`, which is empty before.
    """
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    return bool(getattr(state, "_shared_state", None))


def drop_partial_step(accelerator: Any) -> None:
    """Make the next micro-step the first one of an optimizer step.

    Relies on `Accelerator.step`, the number of micro-steps so far: `_do_sync` adds one to it and
    steps the optimizer at multiples of `gradient_accumulation_steps`.
    """
    accelerator.step -= accelerator.step % accelerator.gradient_accumulation_steps


def steps_at_epoch_end(accelerator: Any) -> bool:
    """Return whether the accelerator steps at the end of a loader, even after fewer micro-steps.

    Relies on `_do_sync` to read `GradientState.sync_with_dataloader`.
    """
    return bool(accelerator.gradient_state.sync_with_dataloader)


def backward_divides(accelerator: Any) -> bool:
    """Return whether `Accelerator.backward` divides the loss by `gradient_accumulation_steps`.

    It does for all kinds of distributed training (DeepSpeed: in its engine), except Megatron-LM,
    under which `backward` does nothing.
    """
    from accelerate.utils import DistributedType

    return bool(accelerator.distributed_type != DistributedType.MEGATRON_LM)


def unwrap_model(model: Any) -> Any:
    """Return the model inside the wrappers of data parallelism, sharding and compilation.

    Relies on `extract_model_from_parallel`, which is not in accelerate's reference, and on its
    argument `keep_torch_compile`.
    """
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model, keep_torch_compile=False)


@contextmanager
def gathering_rows(accelerator: Any) -> Iterator[None]:
    """Within the block, `gather` accepts a different number of rows on each rank.

    TRL's trainers gather values of each row for their logs; torch fails or hangs if the numbers of
    rows differ. Relies on `gather_for_metrics` to call `gather` of the accelerator.
    """
    from accelerate.utils import recursively_apply

    if accelerator.num_processes == 1:
        yield
        return
    gather: Callable[[torch.Tensor], torch.Tensor] = accelerator.gather

    def gather_rows(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim:
            return gather(tensor)
        counts = gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
        most = max(1, *counts)
        whole = tensor.new_zeros(most, *tensor.shape[1:])
        whole[: len(tensor)] = tensor
        parts = zip(gather(whole).split(most), counts, strict=True)
        return torch.cat([part[:count] for part, count in parts])

    accelerator.gather = partial(recursively_apply, gather_rows, error_on_other_type=True)
    try:
        yield
    finally:
        del accelerator.gather
