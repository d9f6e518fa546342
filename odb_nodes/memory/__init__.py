"""Budgets that fit in memory, and steps that lose nothing where it runs out."""

from odb_nodes.memory.generation import LongestFirst, generate_in_parts
from odb_nodes.memory.guard import OomGuard

__all__ = ["LongestFirst", "OomGuard", "generate_in_parts"]
