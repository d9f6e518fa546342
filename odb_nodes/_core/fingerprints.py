"""Names of callables, for fingerprints."""

import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any


def stable_name(function: Any) -> str:
    """Return a name for a callable that is the same in every run of the same program.

    An object whose settings decide what it returns declares them in a string attribute or property
    `fingerprint_name`. The name of a `functools.partial` has its arguments: plain values as they
    are, a tokenizer by its vocabulary (which takes a while), others by their type.
    """
    if isinstance(function, partial):
        named = [f"{key}={_show(value)}" for key, value in sorted(function.keywords.items())]
        return f"{stable_name(function.func)}({', '.join([*map(_show, function.args), *named])})"
    declared = getattr(function, "fingerprint_name", None)
    if isinstance(declared, str):  # and not the property itself, as of a class
        return declared
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def stable_names(functions: Mapping[str, Any]) -> str:
    """Return the stable names of several callables, each with its key: `"a=crop, b=tokenize"`."""
    return ", ".join(f"{key}={stable_name(function)}" for key, function in functions.items())


def tokenizer_name(tokenizer: Any) -> str:
    """Return a name for a tokenizer, of any library, that has a checksum of its vocabulary."""
    name = type(tokenizer).__qualname__
    try:
        words = sorted((index, repr(word)) for word, index in tokenizer.get_vocab().items())
    except (AttributeError, NotImplementedError, TypeError):  # it has none that can be listed
        return name
    return f"{name} of {len(words)} tokens, {zlib.crc32(repr(words).encode()):08x}"


def _show(value: Any) -> str:
    if isinstance(value, (str, int, float, bool, bytes, type(None))):
        return repr(value)
    if callable(getattr(value, "get_vocab", None)):
        return f"<{tokenizer_name(value)}>"
    return f"<{type(value).__qualname__}>"
