"""What every node is: its state, its epochs, and what a graph of them can be asked."""

from odb_nodes.contract.node import EpochNode, EpochState, StatefulNode, recall, recalls, snapshot
from odb_nodes.contract.state import NodeState, SourceState, SourceStates, copy_state

__all__ = [
    "EpochNode",
    "EpochState",
    "NodeState",
    "SourceState",
    "SourceStates",
    "StatefulNode",
    "copy_state",
    "recall",
    "recalls",
    "snapshot",
]
