"""Nodes that a graph starts with."""

from odb_nodes.sources.iterable_source import IterableSource
from odb_nodes.sources.jsonl_source import JsonlSource
from odb_nodes.sources.mixing import Mixing, WeightSchedule
from odb_nodes.sources.parquet_dataset import ParquetDataset
from odb_nodes.sources.sharded_sampler import ShardedSampler
from odb_nodes.sources.source_mixer import SourceMixer
from odb_nodes.sources.weighted_sampler import WeightedSampler

__all__ = [
    "IterableSource",
    "JsonlSource",
    "Mixing",
    "ParquetDataset",
    "ShardedSampler",
    "SourceMixer",
    "WeightSchedule",
    "WeightedSampler",
]
