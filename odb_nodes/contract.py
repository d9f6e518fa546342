"""Public: what a node of your own is made of."""

from odb_nodes.core.contract import *  # noqa: F403
from odb_nodes.core.contract import __all__ as __all__
