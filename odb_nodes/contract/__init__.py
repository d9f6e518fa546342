"""What every node is: its state, its epochs, and what a graph of them can be asked."""

from odb_nodes.contract.epochs import EpochNode, EpochState
from odb_nodes.contract.fields import Count, InRange, RowsOf, SourceState, SourceStates, Sparse
from odb_nodes.contract.node import StatefulNode, snapshot
from odb_nodes.contract.recall import recall, recalls
from odb_nodes.contract.state import NodeState, copy_state

__all__ = [
    "Count",
    "EpochNode",
    "EpochState",
    "InRange",
    "NodeState",
    "RowsOf",
    "SourceState",
    "SourceStates",
    "Sparse",
    "StatefulNode",
    "copy_state",
    "recall",
    "recalls",
    "snapshot",
]
