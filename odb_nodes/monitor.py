"""Public: records of a run, and reports of them."""

from odb_nodes.training.monitor import *  # noqa: F403
from odb_nodes.training.monitor import __all__ as __all__
