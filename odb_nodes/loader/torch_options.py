"""What a `DataLoader` of torch is configured to do, as arguments of an `ODBDataLoader`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from odb_nodes.alignment.exchange import group_rank
from odb_nodes.processing import WorkerOptions
from odb_nodes.sources.datasets import order_of


def options_of(loader: DataLoader[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that do what a loader does.

    Args:
        loader: the loader, which is not iterated.
        options: arguments that override what it has.

    Raises:
        ValueError: its sampler cannot yield its order again.
    """
    given = dict(options)
    if loader.collate_fn not in (default_collate, default_convert):
        given.setdefault("collate_fn", loader.collate_fn)
    if not isinstance(loader.dataset, IterableDataset) and not {"sampler", "shuffle"} & {*given}:
        given = {**order_of(loader, group_rank(given.get("process_group"))), **given}
    if "workers" not in given and "num_workers" not in given:
        context = loader.multiprocessing_context
        given["workers"] = WorkerOptions(
            num_workers=loader.num_workers,
            start_method=None if context is None else context.get_start_method(),
            worker_init_fn=loader.worker_init_fn,
            timeout_s=loader.timeout or WorkerOptions.timeout_s,
        )
    given.setdefault("pin_memory", loader.pin_memory)
    return given
