"""The same steps on all ranks, and one loss over them."""

from odb_nodes.core.alignment.rank_aligner import RankAligner

__all__ = ["RankAligner"]
