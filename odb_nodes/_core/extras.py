"""Import optional packages when they are needed, or say how to install them."""

from __future__ import annotations

import importlib
from types import ModuleType


def import_extra(module: str, extra: str) -> ModuleType:
    """Return a module of a package that an extra of this library installs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"`{module}` cannot be imported ({error}). Install it with: "
            f"pip install 'odb-nodes[{extra}]'"
        ) from error
