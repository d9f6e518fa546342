"""What we rely on inside of torch."""

# Pins tensors in any nesting of mappings, sequences and tuples, as torch's `DataLoader` does.
from torch.utils.data._utils.pin_memory import pin_memory

__all__ = ["pin_memory"]
