"""Budgets that fit in memory, and steps that lose nothing where it runs out."""

from odb_nodes.memory.guard import OomGuard

__all__ = ["OomGuard"]
