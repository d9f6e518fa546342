"""The command `odb-nodes`."""

from odb_nodes.cli.app import main

__all__ = ["main"]
