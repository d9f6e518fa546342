"""A graph as an iterable over epochs, the whole graph in one call, and its checkpoints."""

from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.loader.loader import Loader

__all__ = ["Loader", "ODBDataLoader"]
