"""How far something is that takes long, where a user would see nothing for minutes."""

from __future__ import annotations

import logging
import time

from tqdm import tqdm

logger = logging.getLogger("odb_nodes")

FIRST_S = 10.0
"""Seconds until the first line; each further one comes after twice the time of the one before."""


class Bar(tqdm):  # type: ignore[misc]
    """A progress bar of tqdm without its thread, which would outlive it."""

    monitor_interval = 0


class SlowProgress:
    """Logs a line of what is done after 10 s, 20 s, 40 s and so on, and nothing of what is faster.

    It has no thread: it looks at the clock whenever an item is done, which takes less than 1 us.

    Args:
        what: what is done, in words.
        total: the number of items to do, or at most so many.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._began_s = time.monotonic()
        self._due_s = self._began_s + FIRST_S

    def update(self, done: int) -> None:
        """Note that `done` items are done now."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        passed_s = now_s - self._began_s
        self._due_s = now_s + passed_s
        logger.warning("%s: %d of %d after %.0f s", self._what, done, self._total, passed_s)
