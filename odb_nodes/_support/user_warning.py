"""Warnings at the line of the user's code that led to them, once for each cause."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable

_BETWEEN = frozenset(
    "odb_nodes torchdata torch transformers accelerate lightning pytorch_lightning contextlib "
    "functools threading concurrent".split()
)
"""Packages whose lines tell a user nothing: ours, and those that call us."""

_said: set[Hashable] = set()
_filters: object = None


def warn_user(message: str, *, once: Hashable = None) -> None:
    """Warn at the first line outside of `_BETWEEN`; on a thread of ours, at our line.

    `once` names the cause of a text with numbers: a process warns of each cause once.
    """
    global _filters
    if once is not None:
        # `catch_warnings` replaces the filters, and Python then forgets earlier warnings: a test
        # that expects a warning gets it in every order of tests.
        if _filters is not warnings.filters:
            _said.clear()
            _filters = warnings.filters
        if once in _said:
            return
        _said.add(once)
    warnings.warn(message, stacklevel=_user_level())


def _user_level() -> int:
    frame, level = sys._getframe(1), 1  # the frame of `warn_user`
    while (caller := frame.f_back) is not None:
        frame, level = caller, level + 1
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _BETWEEN:
            return level
    return 2
