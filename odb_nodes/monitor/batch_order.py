"""Makes sure that a monitor is told of each batch of its loader once, and of no other."""

from __future__ import annotations

from odb_nodes._core.user_warning import warn_user
from odb_nodes.step_info import StepInfo

_REMEDY = (
    "A monitor counts the batches of one loader: do not call `step` for those of an evaluation, or "
    "give that a `Monitor` with a folder of its own. Where the loader begins anew without `watch`, "
    "call `attach` before."
)


class BatchOrder:
    """Compares each batch with the one that was told before it, by their `StepInfo`."""

    def __init__(self) -> None:
        self._last: StepInfo | None = None
        self._yielded: StepInfo | None = None
        self._is_warned = False

    @property
    def place(self) -> tuple[int, int] | None:
        """The epoch of the last batch, and its number in it; None where there is none."""
        return None if self._last is None else _place(self._last)

    def begin(self) -> None:
        """Let the next batch be any one: a loader begins, or goes on from a state."""
        self._last = self._yielded = None

    def follow(self, info: StepInfo) -> None:
        """Note that `watch` yields a batch: no later one can be told before the next is yielded."""
        self._yielded = info

    def end(self) -> None:
        """Note that the epoch of `watch` ends. Warn, once, if its last batch was not told."""
        last, end = self._last, self._yielded
        if end is None or (last is not None and _place(last) == _place(end)):
            return
        step = "any step" if last is None else f"step {end.step}"
        self._warn(f"{step} of epoch {end.epoch}")

    def note(self, info: StepInfo) -> None:
        """Note that a batch is told. Warn, once, where others are missing before it."""
        last, yielded = self._last, self._yielded
        where = f"step {info.step} of epoch {info.epoch}"
        if yielded is not None and _place(info) > _place(yielded):
            raise ValueError(
                f"`step` of the monitor came for {where}, but its loader stands at step "
                f"{yielded.step} of epoch {yielded.epoch}. {_REMEDY}"
            )
        if last is not None and _place(info) < _place(last):
            raise ValueError(
                f"`step` of the monitor came for {where} after step {last.step} of epoch "
                f"{last.epoch}. {_REMEDY}"
            )
        # A step that a trainer repeats has further micro-steps.
        if last is not None and (*_place(info), info.micro_step) == (
            *_place(last),
            last.micro_step,
        ):
            raise ValueError(
                f"`step` of the monitor must be called once for each batch, but was called again "
                f"for {where}. {_REMEDY}"
            )
        self._last = info
        if last is None:
            return
        expected = last.step + 1 if info.epoch == last.epoch else 0
        if info.step > expected:
            self._warn(f"step {expected} of epoch {info.epoch}")

    def _warn(self, untold: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            warn_user(
                f"`step` of the monitor was not called for {untold}: its samples are missing in "
                "the records. Call it for each batch; without `loss` for one that you leave out."
            )


def _place(info: StepInfo) -> tuple[int, int]:
    return info.epoch, info.step
