"""Hashes of integers, and stable names of functions: equal in every process."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

_MASK64 = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def hash_ints(*values: int) -> int:
    """Return a 64-bit hash of integers: SplitMix64 (Steele et al., 2014) of one after another."""
    state = 0
    for value in values:
        state = (state + (value & _MASK64) + _STEP) & _MASK64
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK64
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK64
        state ^= state >> 31
    return state


def hash_rows(*columns: Sequence[int]) -> list[int]:
    """Return `hash_ints` of each row of equally long columns; faster from 16 rows on."""
    state: Any = np.uint64(0)
    for column in columns:
        state = state + np.array([value & _MASK64 for value in column], np.uint64)
        state += np.uint64(_STEP)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(_FIRST)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(_SECOND)
        state ^= state >> np.uint64(31)
    return state.tolist()  # type: ignore[no-any-return]


def stable_name(function: Any) -> str:
    """Return a name for a callable that is the same in every run of the same program.

    An object whose results depend on its settings declares them in a string attribute or property
    `fingerprint_name`. The name of a `functools.partial` has its arguments: plain values as they
    are, tokenizers by their vocabulary (which is slow), other objects by their type.
    """
    if isinstance(function, partial):
        named = [f"{key}={_text_of(value)}" for key, value in sorted(function.keywords.items())]
        return f"{stable_name(function.func)}({', '.join([*map(_text_of, function.args), *named])})"
    declared = getattr(function, "fingerprint_name", None)
    if isinstance(declared, str):  # and not the property itself, as of a class
        return declared
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def stable_names(functions: Mapping[str, Any]) -> str:
    """Return the stable names of several callables, each with its key: `"a=crop, b=tokenize"`."""
    return ", ".join(f"{key}={stable_name(function)}" for key, function in functions.items())


def tokenizer_name(tokenizer: Any) -> str:
    """Return a name for a tokenizer of any library, with a checksum of its vocabulary."""
    name = type(tokenizer).__qualname__
    try:
        words = sorted((index, repr(word)) for word, index in tokenizer.get_vocab().items())
    except (AttributeError, NotImplementedError, TypeError):  # no vocabulary that can be listed
        return name
    return f"{name} of {len(words)} tokens, {zlib.crc32(repr(words).encode()):08x}"


def _text_of(value: Any) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (str, int, float, bool, bytes, type(None))):
        return repr(value)
    if callable(getattr(value, "get_vocab", None)):
        return f"<{tokenizer_name(value)}>"
    return f"<{type(value).__qualname__}>"
