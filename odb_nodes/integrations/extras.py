"""Libraries that only an integration needs: imported, or asked for."""

from __future__ import annotations

from importlib import import_module

__all__ = ["require"]


def require(extra: str, *modules: str) -> None:
    """Import these modules.

    Raises:
        ImportError: one is missing; names the extra that brings it.
    """
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise ImportError(
                f"this integration needs `{module}`, which cannot be imported ({error}). Install "
                f"it with: pip install 'odb-nodes[{extra}]'"
            ) from error
