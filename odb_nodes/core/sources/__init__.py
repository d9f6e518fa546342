"""Nodes that a graph starts with."""

from odb_nodes.core.sources.feed_client import FeedClient
from odb_nodes.core.sources.feed_source import FeedSource
from odb_nodes.core.sources.iterable_source import IterableSource
from odb_nodes.core.sources.jsonl_source import JsonlSource
from odb_nodes.core.sources.mixing import Mixing, WeightSchedule
from odb_nodes.core.sources.parquet_dataset import ParquetDataset
from odb_nodes.core.sources.sharded_sampler import ShardedSampler
from odb_nodes.core.sources.source_mixer import SourceMixer
from odb_nodes.core.sources.tar_dataset import TarDataset
from odb_nodes.core.sources.weighted_sampler import WeightedSampler

__all__ = [
    "FeedClient",
    "FeedSource",
    "IterableSource",
    "JsonlSource",
    "Mixing",
    "ParquetDataset",
    "ShardedSampler",
    "SourceMixer",
    "TarDataset",
    "WeightSchedule",
    "WeightedSampler",
]
