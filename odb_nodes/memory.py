"""Public: the budget that fits into memory, and steps that run out of it."""

from odb_nodes.training.memory import *  # noqa: F403
from odb_nodes.training.memory import __all__ as __all__
