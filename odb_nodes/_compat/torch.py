"""What we rely on inside of torch."""

import torch

# Pins tensors in any nesting of mappings, sequences and tuples, as torch's `DataLoader` does.
from torch.utils.data._utils.pin_memory import pin_memory

__all__ = ["forget_step", "pin_memory"]


def forget_step(scaler: torch.amp.GradScaler) -> None:
    """Let a scaler forget the step that it is within, where an optimizer's step has failed."""
    scaler._per_optimizer_states.clear()
