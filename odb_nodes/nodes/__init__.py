"""Nodes between processing and the loader."""

from odb_nodes.nodes.group_collator import GroupCollator
from odb_nodes.nodes.length_observer import LengthObserver
from odb_nodes.nodes.packed_collate import PackedCollate
from odb_nodes.nodes.padding_collate import PaddingCollate
from odb_nodes.nodes.rank_aligner import RankAligner
from odb_nodes.nodes.window_bucketer import WindowBucketer

__all__ = [
    "GroupCollator",
    "LengthObserver",
    "PackedCollate",
    "PaddingCollate",
    "RankAligner",
    "WindowBucketer",
]
