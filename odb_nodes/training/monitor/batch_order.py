"""Checks that each batch of a loader is counted once."""

from __future__ import annotations

from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.step_info import StepInfo


class BatchOrder:
    """Checks that `Monitor.step` is called once for each batch of one loader."""

    def __init__(self) -> None:
        self.last_counted: StepInfo | None = None  # `None` before the first batch
        self.last_yielded: StepInfo | None = None  # the last batch of `watch`
        self._is_warned = False

    def begin(self) -> None:
        """Accept any batch next: a loader begins, or continues from a state."""
        self.last_counted = self.last_yielded = None

    def note(self, info: StepInfo) -> None:
        """Check the next batch; warn once if batches before it were not counted."""
        last = self.last_counted
        yielded = self.last_yielded
        place = (info.epoch, info.step)
        problem = ""
        if yielded is not None and place > (yielded.epoch, yielded.step):
            problem = f", but its loader stands at step {yielded.step} of epoch {yielded.epoch}"
        elif last is not None and place < (last.epoch, last.step):
            problem = f" after step {last.step} of epoch {last.epoch}"
        elif last is not None and place == (last.epoch, last.step):
            if info.micro_step == last.micro_step:  # It differs if a trainer repeats a step.
                problem = " a second time: call it once for each batch"
        if problem:
            raise ValueError(
                f"`Monitor.step` was called for step {info.step} of epoch {info.epoch}{problem}. "
                "A monitor counts the batches of one loader: do not call `step` for batches of an "
                "evaluation, or give the evaluation its own `Monitor` and folder. If the loader "
                "begins again without `watch`, call `attach` first."
            )
        self.last_counted = info
        if last is not None:
            expected = last.step + 1 if info.epoch == last.epoch else 0
            if info.step > expected:
                self._warn(f"step {expected} of epoch {info.epoch}")

    def end(self) -> None:
        """Note the end of an epoch of `watch`; warn once if its last batch was not counted."""
        last, yielded = self.last_counted, self.last_yielded
        if yielded is None:
            return
        if last is None:
            self._warn(f"any step of epoch {yielded.epoch}")
        elif (last.epoch, last.step) != (yielded.epoch, yielded.step):
            self._warn(f"step {yielded.step} of epoch {yielded.epoch}")

    def _warn(self, step: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            warn_user(
                f"`Monitor.step` was not called for {step}: the records lack its samples. "
                "Call it for each batch; for a batch that you skip, without `loss`."
            )
