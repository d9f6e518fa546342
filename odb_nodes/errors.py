"""Errors of this library, besides `TypeError` and `ValueError` for bad arguments."""

__all__ = ["PeerError", "SampleError", "StateError", "StepMemoryError", "WorkerError"]


class PeerError(RuntimeError):
    """Another rank failed, left the epoch, was lost, or did not answer in time."""


class SampleError(ValueError):
    """A sample cannot be used: its processing raised, or its length or size is not valid.

    The graph stays before the sample, so no sample is lost.

    Attributes:
        index: the sample's index in its group if a collate function raised the error, else `None`.
    """

    def __init__(self, message: str = "", index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class StateError(ValueError):
    """A state does not fit the graph, is incomplete, or does not reproduce what it recorded."""


class PositionError(StateError):
    """A `Loader` cannot continue from its position, with any configuration."""


class TornStateError(StateError):
    """A state or checkpoint was not written completely, or has lost data since."""


class StepMemoryError(RuntimeError):
    """A training step ran out of memory and cannot be computed again."""


class WorkerError(RuntimeError):
    """A worker died, did not answer in time, or could not be started."""
