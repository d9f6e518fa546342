"""Run the user's processing in parallel: workers, transport, and the node that uses them."""

from odb_nodes.core.processing.options import WorkerOptions
from odb_nodes.core.processing.parallel_processor import ParallelProcessor, PerSource

__all__ = ["ParallelProcessor", "PerSource", "WorkerOptions"]
