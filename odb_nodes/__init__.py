"""Online dynamic batching as stateful `torchdata.nodes`: token budgets, exact resume."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from odb_nodes._public import *  # noqa: F403
    from odb_nodes._public import __all__ as __all__

__version__ = "0.1.0"

if not TYPE_CHECKING:  # A type checker would accept any attribute.
    _MODULES = ("collate", "contract", "memory", "monitor", "planning", "tasks")

    def __getattr__(name: str) -> Any:
        """Import the public names, and torch with them, on first access."""
        if name in _MODULES:
            return importlib.import_module(f"odb_nodes.{name}")
        public = importlib.import_module("odb_nodes._public")
        globals().update({key: getattr(public, key) for key in ("__all__", *public.__all__)})
        if name in globals():
            return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *importlib.import_module("odb_nodes._public").__all__})
