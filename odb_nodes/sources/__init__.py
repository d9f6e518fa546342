"""Nodes that a graph starts with."""

from odb_nodes.sources.iterable_source import IterableSource
from odb_nodes.sources.sharded_sampler import ShardedSampler

__all__ = ["IterableSource", "ShardedSampler"]
