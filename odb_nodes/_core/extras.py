"""Optional packages: imported when they are needed, with an error that names the install line."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["import_extra"]


def import_extra(module: str, extra: str) -> ModuleType:
    """Return a module of an optional package.

    Args:
        module: its name.
        extra: which extra of this library installs it.

    Raises:
        ImportError: it is not installed; names what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"`{module}` cannot be imported ({error}). Install it with: "
            f"pip install 'odb-nodes[{extra}]'"
        ) from error
