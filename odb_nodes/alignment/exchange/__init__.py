"""Exchange integers among ranks over torch.distributed, whatever they mean."""

from odb_nodes.alignment.exchange.base import Exchange, Interrupted, LocalExchange
from odb_nodes.alignment.exchange.channel import Channel
from odb_nodes.alignment.exchange.gloo import GlooExchange, group_rank, resolve_exchange
from odb_nodes.alignment.exchange.meeting import Meeting
from odb_nodes.alignment.exchange.watch import FailureWatch

__all__ = [
    "Channel",
    "Exchange",
    "FailureWatch",
    "GlooExchange",
    "Interrupted",
    "LocalExchange",
    "Meeting",
    "group_rank",
    "resolve_exchange",
]
