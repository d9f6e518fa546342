"""What one rank tells the others, that wait for it in a collective, where it cannot go on."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress

from odb_nodes._compat.torch_distributed import abort_groups
from odb_nodes.alignment.exchange.store import BoundedStore, StoreLost
from odb_nodes.errors import PeerError, StepMemoryError

_KEY = "failure"
_POLL_S = 0.5  # between two looks at the store
_READ_S = 2.0  # for a notice to arrive, where a collective has failed already
_GRACE_S = 2.0  # for a collective to fail by itself, before it is aborted
_EXIT_CODE = 70
_KINDS: dict[str, type[Exception]] = {one.__name__: one for one in (StepMemoryError, PeerError)}


class FailureNotice:
    """An error that one rank leaves at the store of the job for all others to raise.

    From `enter` to `leave`, a thread looks for it. A rank that waits in a collective for the one
    that has failed is got out: the collective fails once that process ends; after a while the
    connections are aborted; and where that does not help within `timeout_s`, the process ends with
    the text. Collectives of a GPU are waited for only where the loop needs what comes of them, so
    there a rank stays inside until its loop is over.

    Attributes:
        told: what another rank has left, as soon as it is found.
    """

    def __init__(self, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._store = BoundedStore(timeout_s)
        place = f"odb_nodes/notice/{hashlib.sha1(repr([*ranks]).encode()).hexdigest()[:12]}"
        count = self._store.call("add", f"{place}/{rank}", 1, limit_s=timeout_s)
        self._store.use_prefix(f"{place}/{count}")
        self._inside = threading.Event()
        self.told: Exception | None = None
        watcher = threading.Thread(
            target=_watch, args=(weakref.ref(self),), name="odb_nodes-notice", daemon=True
        )
        watcher.start()

    def give(self, error: StepMemoryError | PeerError) -> None:
        """Leave an error for the others. Does nothing where the store is gone."""
        with suppress(StoreLost):
            text = f"{type(error).__name__} {error}"
            self._store.call("set", _KEY, text, limit_s=_READ_S)

    def read(self, wait_s: float = _READ_S) -> Exception | None:
        """Return the error that another rank has left, or leaves within `wait_s` seconds."""
        if self.told is not None:
            return self.told
        deadline = time.monotonic() + wait_s
        try:
            while not self._store.call("check", [_KEY], limit_s=_READ_S):
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.05)
            found = self._store.call("get", _KEY, limit_s=_READ_S).decode(errors="replace")
        except StoreLost:
            return None
        kind, _, text = found.partition(" ")
        self.told = _KINDS[kind](text)
        return self.told

    def enter(self) -> None:
        """From now on the rank is got out of collectives where another has failed."""
        self._inside.set()

    def leave(self) -> None:
        """From now on it is not, until `enter`."""
        self._inside.clear()

    def look(self) -> None:
        """Get this rank out, if it is inside and another has failed."""
        if not self._inside.is_set() or (told := self.read(0.0)) is None:
            return
        if self._left_within(_GRACE_S):
            return
        print(told, file=sys.stderr, flush=True)  # What fails now does not say why.
        abort_groups()
        if not self._left_within(self._timeout_s):
            os._exit(_EXIT_CODE)  # Nothing else ends a collective that hangs.

    def _left_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._inside.is_set() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self._inside.is_set()


def _watch(reference: weakref.ref[FailureNotice]) -> None:
    while (notice := reference()) is not None:
        notice.look()
        del notice
        time.sleep(_POLL_S)
