"""Names of callables, for fingerprints."""

from typing import Any


def name_of(function: Any) -> str:
    """Return a name for a callable that is the same in every run of the same program."""
    function = getattr(function, "func", function)  # of a partial
    return getattr(function, "__qualname__", None) or type(function).__qualname__
