"""What this library raises beside `TypeError` and `ValueError` for bad arguments."""

__all__ = ["PeerError", "SampleError", "StateError", "WorkerError"]


class PeerError(RuntimeError):
    """Another rank failed, left, was lost, or did not come in time."""


class SampleError(ValueError):
    """A sample cannot be used: its processing raised, or its length or size is not valid.

    Nothing is lost by it: the state of the graph still stands before the sample.
    """


class StateError(ValueError):
    """A state does not fit the graph, is incomplete, or does not reproduce what it recorded."""


class WorkerError(RuntimeError):
    """A worker died, did not answer in time, or could not be started."""
