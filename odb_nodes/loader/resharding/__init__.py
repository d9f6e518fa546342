"""States of N ranks made into those of M ranks; see `reshard`."""

from odb_nodes.loader.resharding.whole import add_rule, reshard, reshard_parts

__all__ = ["add_rule", "reshard", "reshard_parts"]
