"""Exchange integers between ranks, over gloo."""

from odb_nodes.core.alignment.exchange.base import (
    Exchange,
    Interrupted,
    KnownRank,
    ProcessGroupLike,
)
from odb_nodes.core.alignment.exchange.channel import Channel, Meeting
from odb_nodes.core.alignment.exchange.gloo import (
    GlooExchange,
    check_process_group,
    group_rank,
    resolve_exchange,
)
from odb_nodes.core.alignment.exchange.watch import FailureWatch

__all__ = [
    "Channel",
    "Exchange",
    "FailureWatch",
    "GlooExchange",
    "Interrupted",
    "KnownRank",
    "Meeting",
    "ProcessGroupLike",
    "check_process_group",
    "group_rank",
    "resolve_exchange",
]
