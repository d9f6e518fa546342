"""Notice, while collectives of the model run, that another rank has failed."""

from __future__ import annotations

import os
import sys
import threading
import time

from odb_nodes._compat.torch_distributed import abort_groups
from odb_nodes.core.alignment.exchange.channel import Channel
from odb_nodes.errors import PeerError, StepMemoryError

_POLL_S = 0.5  # between two checks for an error
_READ_S = 2.0  # limit for a text to arrive after a collective has failed
_GRACE_S = 2.0  # limit for a collective to fail before connections are aborted
_EXIT_CODE = 70
_KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (StepMemoryError, PeerError)}


class FailureWatch:
    """Ends a collective of the model in which this rank waits for a rank that has failed.

    The failed rank publishes its error through the channel. Between `enter` and `leave`, a thread
    checks for such an error. The collective fails when the failed process ends. Otherwise this
    process aborts its connections after a while, and if that does not help within `timeout_s`, it
    exits with the text of the error. A GPU loop waits for a collective only where it needs the
    result, so its rank stays inside until the loop is over.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._inside = threading.Event()
        self._closed = threading.Event()
        self._peer_error: Exception | None = None
        threading.Thread(target=self._look, name="odb_nodes-watch", daemon=True).start()

    def publish(self, error: StepMemoryError | PeerError) -> None:
        """Publish an error for all other ranks to raise."""
        self._channel.publish(f"{type(error).__name__} {error}")

    def read(self, wait_s: float = _READ_S) -> Exception | None:
        """Return the error that another rank has published, or publishes within `wait_s`."""
        deadline = time.monotonic() + wait_s
        while self._peer_error is None:
            text = self._channel.published()
            if text is not None:
                kind, _, message = text.partition(" ")
                self._peer_error = _KINDS[kind](message)
            elif time.monotonic() >= deadline:
                break
            else:
                time.sleep(0.05)
        return self._peer_error

    def enter(self) -> None:
        """Begin to watch, or raise the error that another rank has published before."""
        if self._peer_error is not None:
            self.leave()
            raise self._peer_error
        self._inside.set()

    def leave(self) -> None:
        """Stop watching until `enter`."""
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
            # The collective then fails with an error that does not name the cause.
            print(self._peer_error, file=sys.stderr, flush=True)
            abort_groups()
            if not self._is_out_within(self._channel.timeout_s):
                os._exit(_EXIT_CODE)  # Nothing else ends a collective that hangs.

    def _is_out_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._inside.is_set() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self._inside.is_set()
