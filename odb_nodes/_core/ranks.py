"""The rank of this process."""

from __future__ import annotations

import os

import torch.distributed as dist

from odb_nodes._core.checks import MAX_COUNT, check_count, check_integer


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: as given, or from torch.distributed, or from the environment."""
    if (rank is None) != (world_size is None):
        raise ValueError(
            "`rank` and `world_size` must be given together, "
            f"but are {rank!r} and {world_size!r} instead."
        )
    if rank is None or world_size is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        world_size = _variable("WORLD_SIZE", 1, 1, MAX_COUNT)
        return _variable("RANK", 0, 0, world_size - 1), world_size
    world_size = check_count("world_size", world_size)
    rank = check_integer("rank", rank)
    if not 0 <= rank < world_size:
        raise ValueError(f"`rank` must be in 0..{world_size - 1}, but is {rank} instead.")
    return rank, world_size


def has_data_elsewhere(world_size: int) -> bool:
    """Tell whether other ranks than the `world_size` that share this data have data, too."""
    return world_size == 1 and resolve_rank(None, None)[1] > 1


def _variable(name: str, default: int, least: int, most: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise ValueError(
            f"the environment variable `{name}` must be an integer in {least}..{most}, but is "
            f"{text!r} instead. Start all ranks with torchrun, which sets `RANK` and `WORLD_SIZE`, "
            "or unset both for a single process."
        )
    return value
