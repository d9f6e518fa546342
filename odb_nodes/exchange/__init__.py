"""Integers between ranks. Knows torch.distributed; does not know what they mean."""

from odb_nodes.exchange.base import Exchange, Interrupted, LocalExchange
from odb_nodes.exchange.channel import Channel
from odb_nodes.exchange.gloo import GlooExchange
from odb_nodes.exchange.in_process import InProcessHub
from odb_nodes.exchange.resolve import group_rank, resolve_exchange

__all__ = [
    "Channel",
    "Exchange",
    "GlooExchange",
    "InProcessHub",
    "Interrupted",
    "LocalExchange",
    "group_rank",
    "resolve_exchange",
]
