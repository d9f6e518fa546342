"""A graph as an iterable over epochs, the whole graph in one call, and its checkpoints."""

from odb_nodes.core.loader.dataloader import ODBDataLoader
from odb_nodes.core.loader.loader import Loader

__all__ = ["Loader", "ODBDataLoader"]
