"""multiprocessing: what a forked child believes to be its own children.

Relied on beside the public names: `_children` of `multiprocessing.process`, the set that
`active_children` reads, and whose processes are signalled and joined at exit.
"""

from __future__ import annotations

import os
from multiprocessing import process
from multiprocessing.process import BaseProcess
from weakref import WeakSet

_kept: WeakSet[BaseProcess] = WeakSet()


def keep_from_forks(child: BaseProcess) -> None:
    """Keep a child from forks of this process, which would send it SIGTERM at their exit."""
    _kept.add(child)


def _forget() -> None:
    process._children.difference_update(_kept)  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)
