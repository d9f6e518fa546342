"""Public: functions that collate, and checks of them."""

from odb_nodes.core.collate import *  # noqa: F403
from odb_nodes.core.collate import __all__ as __all__
