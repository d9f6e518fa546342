"""What a process started, and a forked child of it inherits without owning it."""

from __future__ import annotations

import os

from odb_nodes.errors import WorkerError


class Owner:
    """The process that made this object. Threads and child processes of it are its own.

    A child that it forks has copies of all objects, but none of the threads; workers are not its
    children, and their sockets are shared with the parent.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Tell whether this is that process."""
        return self._pid == os.getpid()

    def check(self, what: str) -> None:
        """Check that this is that process.

        Raises:
            WorkerError: it is a forked child.
        """
        if not self.is_here:
            raise WorkerError(
                f"{what} was started in process {self._pid}; process {os.getpid()}, which was "
                "forked from it, has none of its threads and workers. Make a loader of its own in "
                "the child process."
            )
