"""Names of callables, for fingerprints."""

from functools import partial
from typing import Any

_PLAIN = (str, int, float, bool, bytes, type(None))


def name_of(function: Any) -> str:
    """Return a name for a callable that is the same in every run of the same program.

    That of a `functools.partial` has its arguments: the plain ones whole, the others by their type.
    """
    if isinstance(function, partial):
        named = [f"{key}={_show(value)}" for key, value in sorted(function.keywords.items())]
        return f"{name_of(function.func)}({', '.join([*map(_show, function.args), *named])})"
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, _PLAIN) else f"<{type(value).__qualname__}>"
