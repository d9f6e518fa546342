"""Names of callables, for fingerprints."""

import zlib
from functools import partial
from typing import Any

_PLAIN = (str, int, float, bool, bytes, type(None))


def stable_name(function: Any) -> str:
    """Return a name for a callable that is the same in every run of the same program.

    That of a `functools.partial` has its arguments: the plain ones whole, a tokenizer by its
    vocabulary, the others by their type. Not to be called often: a vocabulary takes a while.
    """
    if isinstance(function, partial):
        named = [f"{key}={_show(value)}" for key, value in sorted(function.keywords.items())]
        return f"{stable_name(function.func)}({', '.join([*map(_show, function.args), *named])})"
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def tokenizer_name(tokenizer: Any) -> str:
    """Return a name for a tokenizer, of any library, that has a checksum of its vocabulary."""
    name = type(tokenizer).__qualname__
    try:
        words = sorted((index, repr(word)) for word, index in tokenizer.get_vocab().items())
    except (AttributeError, NotImplementedError, TypeError):  # it has none that can be listed
        return name
    return f"{name} of {len(words)} tokens, {zlib.crc32(repr(words).encode()):08x}"


def _show(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if callable(getattr(value, "get_vocab", None)):
        return f"<{tokenizer_name(value)}>"
    return f"<{type(value).__qualname__}>"
