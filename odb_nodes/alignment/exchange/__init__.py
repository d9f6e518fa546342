"""Exchange integers among ranks over torch.distributed, whatever they mean."""

from odb_nodes.alignment.exchange.base import Exchange, Interrupted
from odb_nodes.alignment.exchange.channel import Channel, Meeting
from odb_nodes.alignment.exchange.gloo import GlooExchange, group_rank, resolve_exchange
from odb_nodes.alignment.exchange.watch import FailureWatch

__all__ = [
    "Channel",
    "Exchange",
    "FailureWatch",
    "GlooExchange",
    "Interrupted",
    "Meeting",
    "group_rank",
    "resolve_exchange",
]
