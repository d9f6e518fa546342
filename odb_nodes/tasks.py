"""Public: losses of several tasks."""

from odb_nodes.training.tasks import *  # noqa: F403
from odb_nodes.training.tasks import __all__ as __all__
