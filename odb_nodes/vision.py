"""Public: images beside text."""

from odb_nodes.training.vision import *  # noqa: F403
from odb_nodes.training.vision import __all__ as __all__
