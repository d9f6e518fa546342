"""Notice, while the model's own collectives run, that another rank has failed."""

from __future__ import annotations

import os
import sys
import threading
import time

from odb_nodes._compat.torch_distributed import abort_groups
from odb_nodes.alignment.exchange.channel import Channel
from odb_nodes.errors import PeerError, StepMemoryError

_POLL_S = 0.5  # between two looks
_READ_S = 2.0  # for a text to arrive, where a collective has failed already
_GRACE_S = 2.0  # for a collective to fail by itself, before it is aborted
_EXIT_CODE = 70
_KINDS: dict[str, type[Exception]] = {one.__name__: one for one in (StepMemoryError, PeerError)}


class FailureWatch:
    """Gets this rank out of a collective of the model in which another rank has failed.

    The rank that fails publishes why, through the channel. From `enter` to `leave`, a thread looks
    for that. The collective fails once the process that failed ends; after a while the
    connections are aborted; and where that does not help within `timeout_s`, this process ends with
    the text. Collectives of a GPU are waited for only where the loop needs what comes of them, so
    there a rank stays inside until its loop is over.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._inside, self._closed = threading.Event(), threading.Event()
        self._told: Exception | None = None
        threading.Thread(target=self._look, name="odb_nodes-watch", daemon=True).start()

    def publish(self, error: StepMemoryError | PeerError) -> None:
        """Leave an error for all other ranks to raise."""
        self._channel.publish(f"{type(error).__name__} {error}")

    def read(self, wait_s: float = _READ_S) -> Exception | None:
        """Return the error that another rank has published, or publishes within `wait_s`."""
        deadline = time.monotonic() + wait_s
        while self._told is None:
            if (text := self._channel.published()) is not None:
                kind, _, message = text.partition(" ")
                self._told = _KINDS[kind](message)
            elif time.monotonic() >= deadline:
                break
            else:
                time.sleep(0.05)
        return self._told

    def enter(self) -> None:
        """From now on this rank is got out; raises what another rank has published before."""
        if self._told is not None:
            self.leave()
            raise self._told
        self._inside.set()

    def leave(self) -> None:
        """From now on it is not, until `enter`."""
        self._inside.clear()

    def close(self) -> None:
        """End the thread."""
        self.leave()
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(_POLL_S):
            if not self._inside.is_set() or self.read(0.0) is None:
                continue
            if self._is_out_within(_GRACE_S):
                continue
            print(self._told, file=sys.stderr, flush=True)  # What fails now does not say why.
            abort_groups()
            if not self._is_out_within(self._channel.timeout_s):
                os._exit(_EXIT_CODE)  # Nothing else ends a collective that hangs.

    def _is_out_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._inside.is_set() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self._inside.is_set()
