"""The contract of nodes: states, epochs, and functions over graphs of nodes."""

from odb_nodes.core.contract.again import ItemsAgain, make_again, restore_items
from odb_nodes.core.contract.epochs import EpochState
from odb_nodes.core.contract.node import (
    EpochNode,
    StatefulNode,
    can_restore,
    snapshot,
)
from odb_nodes.core.contract.state import NodeState, SourceState, SourceStates, copy_state

__all__ = [
    "EpochNode",
    "EpochState",
    "ItemsAgain",
    "NodeState",
    "SourceState",
    "SourceStates",
    "StatefulNode",
    "can_restore",
    "copy_state",
    "make_again",
    "restore_items",
    "snapshot",
]
