"""Turn the samples of a group into a batch."""

from odb_nodes.core.collate.check_packing import check_packing
from odb_nodes.core.collate.context import shard_context
from odb_nodes.core.collate.packed_collate import PackedCollate
from odb_nodes.core.collate.padding_collate import PaddingCollate
from odb_nodes.core.collate.rows import RowsCollate, RowsObserve

__all__ = [
    "PackedCollate",
    "PaddingCollate",
    "RowsCollate",
    "RowsObserve",
    "check_packing",
    "shard_context",
]
