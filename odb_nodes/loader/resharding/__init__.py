"""States of N ranks made into those of M ranks; see `reshard`."""

from odb_nodes.loader.resharding.whole import reshard, reshard_parts

__all__ = ["reshard", "reshard_parts"]
