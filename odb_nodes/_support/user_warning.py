"""Warnings that point to the line of the user's code, once for each cause."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable

_LIBRARIES = frozenset(
    "odb_nodes torchdata torch transformers accelerate lightning pytorch_lightning contextlib "
    "functools threading concurrent".split()
)
"""This package, and packages that call it: a warning does not point to their lines."""

_warned_causes: set[Hashable] = set()
_filters: object = None


def warn_user(message: str, *, once: Hashable = None) -> None:
    """Warn at the innermost line of the user; on a thread of this library, at the line here.

    `once` identifies the cause of a message that varies: a process warns once of each cause.
    """
    global _filters
    if once is not None:
        # `catch_warnings` replaces the filters, and Python then forgets earlier warnings: a test
        # that expects a warning gets it in every order of tests.
        if _filters is not warnings.filters:
            _warned_causes.clear()
            _filters = warnings.filters
        if once in _warned_causes:
            return
        _warned_causes.add(once)
    warnings.warn(message, stacklevel=_user_level())


def _user_level() -> int:
    frame, level = sys._getframe(1), 1  # the frame of `warn_user`
    while (caller := frame.f_back) is not None:
        frame = caller
        level += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            return level
    return 2
