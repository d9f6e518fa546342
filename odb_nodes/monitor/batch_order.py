"""Makes sure that a monitor is told of each batch once."""

from __future__ import annotations

from odb_nodes._core.user_warning import warn_user
from odb_nodes.step_info import StepInfo


class BatchOrder:
    """Compares each batch with the one that was told before it, by their `StepInfo`."""

    def __init__(self) -> None:
        self._last: StepInfo | None = None
        self._is_warned = False

    @property
    def place(self) -> tuple[int, int] | None:
        """The epoch of the last batch, and its number in it; None where there is none."""
        return None if self._last is None else (self._last.epoch, self._last.step)

    def begin(self) -> None:
        """Let the next batch be any one: a loader begins, or goes on from a state."""
        self._last = None

    def note(self, info: StepInfo) -> None:
        """Note that a batch is told. Warn, once, where others are missing before it.

        Raises:
            ValueError: it was told before.
        """
        last, self._last = self._last, info
        if last is None:
            return
        is_same_epoch = info.epoch == last.epoch
        # A step that a trainer repeats has further micro-steps.
        if is_same_epoch and (info.step, info.micro_step) == (last.step, last.micro_step):
            raise ValueError(
                f"`step` of the monitor must be called once for each batch, but was called again "
                f"for step {info.step} of epoch {info.epoch}."
            )
        expected = last.step + 1 if is_same_epoch else 0
        if info.step > expected and not self._is_warned:
            self._is_warned = True
            warn_user(
                f"`step` of the monitor was not called for step {expected} of epoch {info.epoch}: "
                "its samples are missing in the records. Call it for each batch; without `loss` "
                "for one that you leave out."
            )
