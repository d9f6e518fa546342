"""The public names of `odb_nodes`, which are imported on first access."""

from odb_nodes.alignment import RankAligner
from odb_nodes.checkpoints.checkpoints import Checkpoints
from odb_nodes.checkpoints.rank_states import DistributedState, load_rank_state, save_rank_state
from odb_nodes.checkpoints.resharding import reshard
from odb_nodes.collate import PackedCollate, PaddingCollate
from odb_nodes.contract import EpochNode, StatefulNode
from odb_nodes.contract.state_file import load_state, save_state
from odb_nodes.errors import PeerError, SampleError, StateError, StepMemoryError, WorkerError
from odb_nodes.ledger import Audit, EpochAudit, Ledger, audit
from odb_nodes.loader.batch_sampler import TokenBatchSampler
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.loader.loader import Loader
from odb_nodes.nodes import GroupCollator, LengthObserver, PlannedGroups, WindowBucketer
from odb_nodes.planning import TokenBudget
from odb_nodes.processing import ParallelProcessor, PerSource, WorkerOptions
from odb_nodes.sample import ItemKey, LeftOut, Observation, Sample, Skipped, SourceItem
from odb_nodes.sample_block import SampleBlock
from odb_nodes.sources import (
    IterableSource,
    JsonlSource,
    Mixing,
    ParquetDataset,
    ShardedSampler,
    SourceMixer,
    TarDataset,
    WeightedSampler,
    WeightSchedule,
)
from odb_nodes.step_info import AlignedGroup, SourceCount, StepInfo, pop_step_info
from odb_nodes.tasks import TaskWeights

__all__ = [
    "AlignedGroup",
    "Audit",
    "Checkpoints",
    "DistributedState",
    "EpochAudit",
    "EpochNode",
    "GroupCollator",
    "ItemKey",
    "IterableSource",
    "JsonlSource",
    "Ledger",
    "LeftOut",
    "LengthObserver",
    "Loader",
    "Mixing",
    "ODBDataLoader",
    "Observation",
    "PackedCollate",
    "PaddingCollate",
    "ParallelProcessor",
    "ParquetDataset",
    "PeerError",
    "PerSource",
    "PlannedGroups",
    "RankAligner",
    "Sample",
    "SampleBlock",
    "SampleError",
    "ShardedSampler",
    "Skipped",
    "SourceCount",
    "SourceItem",
    "SourceMixer",
    "StateError",
    "StatefulNode",
    "StepInfo",
    "StepMemoryError",
    "TarDataset",
    "TaskWeights",
    "TokenBatchSampler",
    "TokenBudget",
    "WeightSchedule",
    "WeightedSampler",
    "WindowBucketer",
    "WorkerError",
    "WorkerOptions",
    "audit",
    "load_rank_state",
    "load_state",
    "pop_step_info",
    "reshard",
    "save_rank_state",
    "save_state",
]
