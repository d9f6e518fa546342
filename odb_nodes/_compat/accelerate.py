"""What we rely on inside of accelerate: how it counts micro-steps, and its shared state.

Read in accelerate 1.15.0; the extra `accelerate` allows 1.10 and later. Each function has a canary
in `tests/_compat/test_accelerate.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


def loader_base() -> Any:
    """Return the base of a loader whose `end_of_dataloader` has `Accelerator._do_sync` step."""
    from accelerate.data_loader import DataLoaderStateMixin

    return DataLoaderStateMixin


def drop_partial_step(accelerator: Any) -> None:
    """Make the next micro-step, of those that `step` counts, the first one of a step."""
    accelerator.step -= accelerator.step % accelerator.gradient_accumulation_steps


def steps_at_epoch_end(accelerator: Any) -> bool:
    """Tell whether the accelerator steps at the end of a loader, after however few micro-steps."""
    return bool(accelerator.gradient_state.sync_with_dataloader)


def backward_divides(accelerator: Any) -> bool:
    """Tell whether `backward` divides the loss: that of Megatron-LM alone does nothing."""
    from accelerate.utils import DistributedType

    return bool(accelerator.distributed_type != DistributedType.MEGATRON_LM)


def unwrap_model(model: Any) -> Any:
    """Return the model inside the wrappers of data parallelism, sharding and compilation."""
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model, keep_torch_compile=False)


@contextmanager
def gathering_rows(accelerator: Any) -> Iterator[None]:
    """Let `gather`, also by `gather_for_metrics`, take other numbers of rows on other ranks."""
    from accelerate.utils import recursively_apply

    # Trainers gather what they log of each row; torch fails or hangs where the numbers differ.
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
