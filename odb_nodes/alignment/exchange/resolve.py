"""Which ranks a graph shares its steps with."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from odb_nodes._core.processes import resolve_rank
from odb_nodes.alignment.exchange.base import Exchange, LocalExchange
from odb_nodes.alignment.exchange.gloo import GlooExchange


def group_rank(process_group: Any) -> tuple[int, int]:
    """Return this process's rank in a process group, and the number of ranks in it."""
    place = getattr(process_group, "rank", None), getattr(process_group, "world_size", None)
    if isinstance(process_group, Exchange) or all(type(one) is int for one in place):
        return process_group.rank, process_group.world_size
    if process_group is None:
        return resolve_rank(None, None)
    group = _as_group(process_group)
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            "`process_group` must contain this rank, but does not. Build the loader only on the "
            "ranks of the group, or pass the group that this rank is in."
        )
    return rank, dist.get_world_size(group)


def resolve_exchange(process_group: Any, timeout_s: float) -> Exchange:
    """Return the exchange among the ranks of `process_group`."""
    if isinstance(process_group, Exchange):
        return process_group
    _, world_size = group_rank(process_group)
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        if world_size > 1:
            raise RuntimeError(
                f"`WORLD_SIZE` says that the job has {world_size} ranks, but torch.distributed is "
                "not initialised, so nothing can align them. Call "
                '`torch.distributed.init_process_group("gloo")` (or "nccl") before the first '
                "iteration."
            )
        return LocalExchange()
    if world_size == 1:
        return LocalExchange()
    return GlooExchange(_as_group(process_group), timeout_s)


def _as_group(process_group: Any) -> Any:
    if process_group is None:
        return dist.group.WORLD
    if callable(get_group := getattr(process_group, "get_group", None)):  # a DeviceMesh
        if process_group.ndim != 1:
            raise ValueError(
                "`process_group` must be a `DeviceMesh` of one dimension, but has "
                f"{process_group.ndim} ({process_group.mesh_dim_names}). Pass the data-parallel "
                'one, as in `mesh["dp"]`.'
            )
        return get_group()
    outside = process_group == dist.GroupMember.NON_GROUP_MEMBER  # of a `new_group`
    if not outside and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            "`process_group` must be a process group, a `DeviceMesh` or None, but is "
            f"`{type(process_group).__name__}` instead."
        )
    return process_group
