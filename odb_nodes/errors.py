"""What this library raises beside `TypeError` and `ValueError` for bad arguments."""

__all__ = ["PeerError", "SampleError", "StateError", "WorkerError"]


class PeerError(RuntimeError):
    """Another rank failed, left, was lost, or did not come in time."""


class SampleError(ValueError):
    """A sample cannot be used: its processing raised, or its length or size is not valid.

    Nothing is lost by it: the state of the graph still stands before the sample.

    Attributes:
        index: which sample of its group it is, where a collate function raised it; else `None`.
    """

    def __init__(self, message: str = "", index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class StateError(ValueError):
    """A state does not fit the graph, is incomplete, or does not reproduce what it recorded."""


class WorkerError(RuntimeError):
    """A worker died, did not answer in time, or could not be started."""
