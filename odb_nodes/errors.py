"""Errors of this library, besides `TypeError` and `ValueError` for bad arguments."""

__all__ = ["PeerError", "SampleError", "StateError", "StepMemoryError", "WorkerError"]


class PeerError(RuntimeError):
    """Another rank failed, left the epoch, was lost, or did not come in time."""


class SampleError(ValueError):
    """A sample cannot be used: its processing raised, or its length or size is not valid.

    Nothing is lost by it: the position of the graph is still before the sample.

    Attributes:
        index: the sample's index in its group if a collate function raised the error, else `None`.
    """

    def __init__(self, message: str = "", index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class StateError(ValueError):
    """A state does not fit the graph, is incomplete, or does not reproduce what it recorded."""


class PositionError(StateError):
    """A `Loader` cannot go on from where it stands, whatever its configuration is."""


class TornStateError(StateError):
    """A state or checkpoint that was not written whole, or is not whole any more."""


class StepMemoryError(RuntimeError):
    """A training step ran out of memory, and cannot be computed again."""


class WorkerError(RuntimeError):
    """A worker died, did not answer in time, or could not be started."""
