"""The public names of `odb_nodes`, which are imported on first access."""

from odb_nodes.core.alignment import RankAligner
from odb_nodes.core.collate import PackedCollate, PaddingCollate
from odb_nodes.core.contract import EpochNode, StatefulNode
from odb_nodes.core.contract.state_file import load_state, save_state
from odb_nodes.core.loader.batch_sampler import TokenBatchSampler
from odb_nodes.core.loader.dataloader import ODBDataLoader
from odb_nodes.core.loader.loader import Loader
from odb_nodes.core.nodes import (
    GroupCollator,
    LengthObserver,
    PlannedGroups,
    ReadAhead,
    WindowBucketer,
)
from odb_nodes.core.planning import TokenBudget
from odb_nodes.core.processing import ParallelProcessor, PerSource, WorkerOptions
from odb_nodes.core.sample import ItemKey, LeftOut, Observation, Sample, Skipped, SourceItem
from odb_nodes.core.sample_block import SampleBlock
from odb_nodes.core.sources import (
    FeedClient,
    FeedSource,
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
from odb_nodes.core.step_info import AlignedGroup, SourceCount, StepInfo, pop_step_info
from odb_nodes.errors import PeerError, SampleError, StateError, StepMemoryError, WorkerError
from odb_nodes.training.checkpoints.checkpoints import Checkpoints
from odb_nodes.training.checkpoints.rank_states import (
    DistributedState,
    load_rank_state,
    save_rank_state,
)
from odb_nodes.training.checkpoints.resharding import reshard
from odb_nodes.training.ledger import Audit, EpochAudit, Ledger, audit
from odb_nodes.training.tasks import TaskWeights

__all__ = [
    "AlignedGroup",
    "Audit",
    "Checkpoints",
    "DistributedState",
    "EpochAudit",
    "EpochNode",
    "FeedClient",
    "FeedSource",
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
    "ReadAhead",
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
