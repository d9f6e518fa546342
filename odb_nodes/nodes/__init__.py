"""Nodes between processing and the loader."""

from odb_nodes.nodes.group_collator import GroupCollator
from odb_nodes.nodes.length_observer import LengthObserver
from odb_nodes.nodes.planned_groups import PlannedGroups
from odb_nodes.nodes.read_ahead import ReadAhead
from odb_nodes.nodes.window_bucketer import WindowBucketer

__all__ = ["GroupCollator", "LengthObserver", "PlannedGroups", "ReadAhead", "WindowBucketer"]
