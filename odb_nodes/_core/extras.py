"""Import optional packages when they are needed, or say how to install them."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["import_extra"]


def import_extra(module: str, extra: str) -> ModuleType:
    """Return a module of an optional package.

    Args:
        module: the module's full name.
        extra: the extra of this library that installs the package.

    Raises:
        ImportError: the package is not installed; names what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"`{module}` cannot be imported ({error}). Install it with: "
            f"pip install 'odb-nodes[{extra}]'"
        ) from error
