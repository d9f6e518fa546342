"""Progress of long work: a bar in a terminal, elsewhere lines in the log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

from odb_nodes._support.processes import resolve_rank

logger = logging.getLogger("odb_nodes")

FIRST_S = 10.0
"""Seconds until the first line. The time between lines then doubles, up to `EVERY_S`."""
EVERY_S = 60.0

_COLUMNS = 80  # assumed for a terminal that reports no columns


class SlowProgress:
    """Logs how many of `total` items (`None`: unknown) are done, after 10, 20, 40 s and so on."""

    def __init__(self, task: str, total: int | None) -> None:
        self._task = task
        self._of_total = "" if total is None else f" of {total}"
        self._began_s = time.monotonic()
        self._due_s = self._began_s + FIRST_S

    @property
    def is_due(self) -> bool:
        """Whether the next update logs a line; takes less than 1 us."""
        return time.monotonic() >= self._due_s

    def update(self, done: int, more: str = "") -> None:
        """Note that `done` items are done; a line ends with `more`."""
        if self.is_due:
            now_s = time.monotonic()
            passed_s = now_s - self._began_s
            self._due_s = now_s + min(passed_s, EVERY_S)
            text = f"{self._task}: {done}{self._of_total} after {passed_s:.0f} s"
            logger.warning("%s", f"{text}; {more}" if more else text)


def is_terminal() -> bool:
    """Tell whether stderr is a terminal, which can show a bar."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed, as in a daemon
        return False


class Bar(tqdm):  # type: ignore[misc]
    """A progress bar of tqdm in a terminal, and elsewhere the lines of `SlowProgress`.

    It has no thread, which would outlive it. By default, only rank 0 shows it.
    """

    monitor_interval = 0
    _lock = threading.RLock()  # tqdm's own has a semaphore, which a kill would leave in /dev/shm
    ncols: int | None
    nrows: int | None
    postfix: str | None = None  # tqdm does not set it if it draws nothing

    def __init__(
        self,
        iterable: Iterable[Any] | None,
        task: str,
        total: int | None,
        *,
        is_shown: bool | None = None,
        **options: Any,
    ) -> None:
        if is_shown is None:
            is_shown = resolve_rank(None, None)[0] == 0
        is_drawn = is_shown and is_terminal()
        super().__init__(
            iterable, task, total, **{"leave": False, "disable": not is_drawn, **options}
        )
        self.lines = SlowProgress(task, total) if is_shown and not is_drawn else None
        if is_drawn:  # tqdm draws nothing in a terminal without a size, as in `docker exec`
            self.ncols = _COLUMNS if self.ncols is not None and self.ncols < 1 else self.ncols
            self.nrows = None if self.nrows is not None and self.nrows < 1 else self.nrows

    def __iter__(self) -> Iterator[Any]:
        if self.lines is None:
            yield from super().__iter__()
            return
        for item in self.iterable:
            yield item
            self.update()

    def update(self, n: int = 1) -> None:
        """Note that `n` more items are done."""
        if self.lines is None:
            super().update(n)
        else:
            self.n += n
            self.lines.update(self.n, self.postfix or "")
