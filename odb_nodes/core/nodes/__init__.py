"""Nodes between processing and the loader."""

from odb_nodes.core.nodes.group_collator import GroupCollator
from odb_nodes.core.nodes.length_observer import LengthObserver
from odb_nodes.core.nodes.planned_groups import PlannedGroups
from odb_nodes.core.nodes.read_ahead import ReadAhead
from odb_nodes.core.nodes.window_bucketer import WindowBucketer

__all__ = ["GroupCollator", "LengthObserver", "PlannedGroups", "ReadAhead", "WindowBucketer"]
